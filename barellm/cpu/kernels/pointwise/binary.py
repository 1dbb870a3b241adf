"""Binarization (BNN): signs packed into 32-bit words, unpacked, and the straight-through estimator. Shapes: x, signs (rows, K),
words (rows, W), with W = ceil(K / 32). (dims, inner): sizes whose product is the number of rows."""

from barellm.cpu.kernel import PLANES, Value, kernel
from barellm.cpu.kernels.loops import accumulate, blocks, elementwise, flat, row_grain, shape_of
from barellm.cpu.kernels.numbers import FP32_MAGNITUDE
from barellm.cpu.lang.random import signed
from barellm.program.ops.pointwise.binary import BITS, words_of


def word_of(k, x, column, count: int) -> Value:
    """The i32 word of `count` signs from x[column] on: bit i is set where element i >= 0. A comparison gives `lanes` bits."""
    word = k.const(0, "i32")
    for part in range(0, min(count, BITS), k.lanes):
        left = count - part
        mask = None if left >= k.lanes else k.mask_first(left)
        ones = k.bitcast(x.load(k.int(column) + part, mask) >= 0.0, f"i{k.lanes}")
        word = word | (k.op("i32", f"zext {ones.typed} to i32") << part)
    return word if count >= BITS else word & ((1 << count) - 1)


@kernel("pack_signs", also={"x": PLANES, "words": "i32"}, constants=lambda op: {"K": int(op.x.shape[-1]), **shape_of(op.x)})
def pack_signs(k, words, x, *, K, dims, inner) -> None:
    """words (rows, W) = the signs of x (rows, K), 32 a word; the last word's other bits are zero."""
    W = words_of(K)
    with k.parallel_range(k.num_elements(dims) * inner, row_grain(K)) as (begin, end), k.loop(begin, end) as row:
        dst, src = words.at(row * W), x.at(row * K)
        for w, count in blocks(k, K, BITS):
            dst.put(word_of(k, src, w * BITS, count), w)


@kernel("unpack_signs", constants=lambda op: {"K": op.columns, **shape_of(op.signs)}, also={"words": "i32"})
def unpack_signs(k, signs, words, *, K, dims, inner, mode_signs) -> None:
    """The kernel: signs (rows, K) = 1 where the bit of words (rows, W) i32 is set, else -1; stored or added (mode_signs)."""
    W = words_of(K)
    with k.parallel_range(k.num_elements(dims) * inner, row_grain(K)) as (begin, end), k.loop(begin, end) as row:
        dst, src = signs.at(row * K), words.at(row * W)
        for w, count in blocks(k, K, BITS):
            first, word = w * BITS, k.to(src.get(w), "i32")
            for part in range(0, count, k.lanes):
                left = count - part
                mask = None if left >= k.lanes else k.mask_first(left)
                # Each lane tests its own bit, a constant mask.
                bits = ", ".join(f"i32 {signed(1 << (part + i))}" for i in range(k.lanes))
                one = (k.splat(word) & Value(k, k.ivec, f"<{bits}>")).differs(0)
                c = k.int(first) + part
                dst.store(accumulate(k, dst, c, mask, k.select(one, k.to(1.0, k.vec), -1.0), mode_signs), c, mask)


@kernel("straight_through", also={"x": PLANES}, constants=lambda op: flat(op.dx))
def straight_through(k, dx, dy, x, *, dims, width, mode_dx) -> None:
    """dx = dy where |x| <= 1, else 0."""
    for i, mask, put in elementwise(k, k.num_elements(dims) * width, dx, mode=mode_dx):
        size = k.bitcast(k.bitcast(x.load(i, mask), k.ivec) & FP32_MAGNITUDE, k.vec)
        put(k.select(size <= 1.0, dy.load(i, mask), 0.0))
