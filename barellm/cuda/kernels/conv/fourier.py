"""Two-dimensional FFTs of tiles of F x F real numbers, F a power of two, in registers.

A real tile's transform is Hermitian, so half of it is enough: F F / 2 complex elements hold it. Row frequencies f = 0 and F / 2 of
each column are real, so one complex column transform does both: with z = a + i b of two real sequences, their transforms are A(k) =
(z(k) + z*(-k)) / 2 and B(k) = (z(k) - z*(-k)) / 2i. So element (f, k), f < F / 2, k < F, is the transform at row frequency f and
column frequency k, but for f = 0. There

    (0, 0) and (0, F / 2)    hold two real numbers each: A in the place of a real part, B in that of an imaginary one
    (0, k), 0 < k < F / 2    is A(k), at the row frequency 0
    (0, F - k)               is B(k), at the row frequency F / 2

A thread has whole columns for the transform along rows, and then whole rows: in between, numbers go through shared memory. Axes are
ordered so that this is the one time that the compiler has to move them (it moves what is joined far less often if a load decides
where its numbers are). One-dimensional transforms work on Python tuples of n tensors (real parts `re`, imaginary parts `im`): a
tensor has one element of every sequence, and the recursion is unrolled at compile time.

By halves (Cooley and Tukey 1965) such a transform takes some 3,000 operations for 16 x 16 numbers, and 17,000 for 32 x 32 (counted
in the compiled code); as matmuls with the DFT matrices it would take 26,000 and 200,000. What a square of 16 comes from and goes to
are 2.5 KB, which an H100's L2 moves in about 0.5 ns. 3,000 operations of fp32 take less than 0.1 ns and 26,000 take 0.4, or 0.16 on
tensor cores, where TF32 needs three multiplications for the accuracy of fp32. So the transform is bound by bytes if it is done by
halves, and would not be if it were done by matmuls."""

from __future__ import annotations

from math import cos, pi, sin

from barellm.cuda.lang import constant, device, tl

LARGEST = 32  # F at most
_ANGLES = [2 * pi * i / LARGEST for i in range(LARGEST)]
COS, SIN = (constant(tuple(round(f(a), 15) for a in _ANGLES)) for f in (cos, sin))  # rounded: zeros are exact
STEPS = constant(LARGEST)  # twiddle factors are powers of exp(2 pi i / STEPS)


@device
def rotate(re, im, AT: tl.constexpr, SIGN: tl.constexpr):
    """Multiply by a twiddle factor: (re + i im) exp(SIGN 2 pi i AT / LARGEST), AT below half a circle."""
    if AT == 0:
        made = (re, im)
    elif AT * 4 == STEPS:
        made = (-im, re) if SIGN > 0 else (im, -re)
    else:
        made = (re * COS[AT] - im * (SIGN * SIN[AT]), re * (SIGN * SIN[AT]) + im * COS[AT])
    return made


@device
def complex_dft(re, im, SIGN: tl.constexpr):
    """A complex DFT of n numbers re + i im (tuples of n tensors): X[k] = sum over j of x[j] exp(SIGN 2 pi i j k / n), by radix-2
    decimation in time (Cooley and Tukey 1965), unscaled. Gives the tuples of X's real and imaginary parts."""
    N: tl.constexpr = len(re)
    if N == 1:
        made = (re, im)
    else:
        a_re, a_im = complex_dft(re[::2], im[::2], SIGN)
        b_re, b_im = complex_dft(re[1::2], im[1::2], SIGN)
        low_re, low_im, high_re, high_im = (), (), (), ()
        for k in tl.static_range(N // 2):  # butterflies: X[k] = A[k] + w^k B[k], X[k + n / 2] = A[k] - w^k B[k]
            t_re, t_im = rotate(b_re[k], b_im[k], k * (STEPS // N), SIGN)
            low_re += (a_re[k] + t_re,)
            low_im += (a_im[k] + t_im,)
            high_re += (a_re[k] - t_re,)
            high_im += (a_im[k] - t_im,)
        made = (low_re + high_re, low_im + high_im)
    return made


@device
def real_dft(x):
    """The DFT of n real numbers x (a tuple): tuples of the n / 2 + 1 real parts of the frequencies 0 to n / 2, and of the n / 2 - 1
    imaginary parts of those between (0 and n / 2 are real). Decimation in time: A of the even, B of the odd numbers."""
    N: tl.constexpr = len(x)
    if N == 2:
        made = ((x[0] + x[1], x[0] - x[1]), ())
    else:
        a_re, a_im = real_dft(x[::2])
        b_re, b_im = real_dft(x[1::2])
        low_re, high_re = (a_re[0] + b_re[0],), (a_re[0] - b_re[0],)
        low_im, middle, high_im = (), (-b_re[N // 4],), ()  # frequency n / 4: A - i B, both real there
        for k in tl.static_range(1, N // 4):  # A + w^k B: frequency k; A - w^k B: the conjugate of n / 2 - k
            t_re, t_im = rotate(b_re[k], b_im[k - 1], k * (STEPS // N), -1)
            low_re += (a_re[k] + t_re,)
            low_im += (a_im[k - 1] + t_im,)
            re, im = (a_re[k] - t_re,), (t_im - a_im[k - 1],)
            high_re, high_im = re + high_re, im + high_im
        made = (low_re + a_re[N // 4 :] + high_re, low_im + middle + high_im)
    return made


@device
def inverse_real_dft(re, im):
    """The inverse of `real_dft`, times n: n real numbers from n / 2 + 1 real and n / 2 - 1 imaginary parts. Decimation in
    frequency: even numbers come from x(k) + x*(n / 2 - k), odd ones from the difference times a twiddle factor."""
    N: tl.constexpr = 2 * (len(re) - 1)
    if N == 2:
        made = (re[0] + re[1], re[0] - re[1])
    else:
        a_re, b_re = (re[0] + re[N // 2],), (re[0] - re[N // 2],)
        a_im, b_im = (), ()
        for k in tl.static_range(1, N // 4):
            t_re, t_im = rotate(re[k] - re[N // 2 - k], im[k - 1] + im[N // 2 - k - 1], k * (STEPS // N), 1)
            a_re += (re[k] + re[N // 2 - k],)
            a_im += (im[k - 1] - im[N // 2 - k - 1],)
            b_re += (t_re,)
            b_im += (t_im,)
        a_re += (2.0 * re[N // 4],)
        b_re += (-2.0 * im[N // 4 - 1],)
        even, odd = inverse_real_dft(a_re, a_im), inverse_real_dft(b_re, b_im)
        made = ()
        for j in tl.static_range(N // 2):
            made += (even[j], odd[j])
    return made


@device
def interleave(parts):
    """n tensors (A, B) as (A, B, 2, ..., 2), n = 2^k, the last k axes in the order of the tuple: a reshape makes (A, B, n)."""
    if len(parts) == 1:
        made = parts[0]
    else:
        made = tl.join(interleave(parts[::2]), interleave(parts[1::2]))
    return made


@device
def deinterleave(x):
    """The n tensors (A, B) of x (A, B, n): split into even and odd ones until each has one."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    N: tl.constexpr = x.shape[2]
    if N == 1:
        made = (tl.reshape(x, (A, B)),)
    else:
        even, odd = tl.split(tl.reshape(x, (A, B, N // 2, 2)))
        evens, odds = deinterleave(even), deinterleave(odd)
        made = ()
        for i in tl.static_range(N // 2):
            made += (evens[i], odds[i])
    return made


@device
def stack_columns(parts):
    """n tensors (A, B) as one (A, n, B)."""
    A: tl.constexpr = parts[0].shape[0]
    B: tl.constexpr = parts[0].shape[1]
    return tl.permute(tl.reshape(interleave(parts), (A, B, len(parts))), (0, 2, 1))


@device
def spectrum(x):
    """The forward transform of tiles x (tiles, F, F): real and imaginary parts (F / 2, F, tiles) of the elements (f, k), in the
    packing of the module's docstring."""
    F: tl.constexpr = x.shape[1]
    TILES: tl.constexpr = x.shape[0]
    re, im = real_dft(deinterleave(tl.permute(x, (0, 2, 1))))
    packed = (re[0], re[F // 2])
    for f in tl.static_range(1, F // 2):
        packed += (re[f], im[f - 1])
    x = tl.permute(tl.reshape(interleave(packed), (TILES, F, F // 2, 2)), (2, 0, 3, 1))
    columns = deinterleave(tl.reshape(x, (F // 2, TILES, 2 * F)))
    re, im = complex_dft(columns[:F], columns[F:], -1)
    # Row f = 0 has z = a + i b, a at the row frequency 0 and b at F / 2: A(k) for k < F / 2, B(F - k) for k > F / 2.
    first = (tl.arange(0, F // 2) == 0)[:, None]
    made_re, made_im = re[:1], im[:1]
    for k in tl.static_range(1, F):
        if k < F // 2:
            a, b = re[k] + re[F - k], im[k] - im[F - k]
        elif k > F // 2:
            a, b = im[k] + im[F - k], re[k] - re[F - k]
        else:
            a, b = 2.0 * re[k], 2.0 * im[k]
        made_re += (tl.where(first, 0.5 * a, re[k]),)
        made_im += (tl.where(first, 0.5 * b, im[k]),)
    return stack_columns(made_re), stack_columns(made_im)


@device
def inverse_spectrum(re, im):
    """The inverse of `spectrum`, times F^2: tiles (tiles, F, F) from real and imaginary parts (F / 2, F, tiles)."""
    F: tl.constexpr = re.shape[1]
    TILES: tl.constexpr = re.shape[2]
    re, im = deinterleave(tl.permute(re, (0, 2, 1))), deinterleave(tl.permute(im, (0, 2, 1)))
    first = (tl.arange(0, F // 2) == 0)[:, None]
    z_re, z_im = re[:1], im[:1]
    for k in tl.static_range(1, F):
        if k < F // 2:  # A + i B
            a, b = re[k] - im[F - k], im[k] + re[F - k]
        elif k > F // 2:  # the conjugates of both
            a, b = re[F - k] + im[k], re[k] - im[F - k]
        else:
            a, b = re[k], im[k]
        z_re += (tl.where(first, a, re[k]),)
        z_im += (tl.where(first, b, im[k]),)
    rows_re, rows_im = complex_dft(z_re, z_im, 1)
    x = tl.permute(tl.reshape(interleave(rows_re + rows_im), (F // 2, TILES, 2, F)), (1, 3, 0, 2))
    packed = deinterleave(tl.reshape(x, (TILES, F, F)))
    return stack_columns(inverse_real_dft(packed[:1] + packed[2::2] + packed[1:2], packed[3::2]))
