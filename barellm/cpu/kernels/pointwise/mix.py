"""Linear combinations of tensors (residual mixing), and their gradients. Shapes: terms x0..x3, y, dy, dx0..dx3 of equal shapes;
coefficients k0..k3 and their gradients (1), often elements of a vector. `numbers` has each coefficient as a compile-time constant,
or None where it is learned: then its tensor is read."""

from operator import add
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Value, kernel, lowering
from barellm.cpu.kernels import loops, reductions
from barellm.program.ops.pointwise.mix import COEFFICIENTS, MOST, TERMS

PREFETCH_DISTANCE = 512  # elements, into L2: four streams are more than the hardware prefetcher follows
CHAINS = loops.ROW_UNROLL  # so that rows of full groups of vectors are aligned

DX, DK = (" ".join(f"d{name}" for name in names) for names in (TERMS, COEFFICIENTS))


def coefficient(k, number: float | None, tensor) -> Any:
    """A coefficient as a constant, or its tensor's element in all lanes; None for 1."""
    if tensor is not None:
        return k.splat(tensor.get(0))
    return None if number == 1.0 else number


def prefetch_streams(k, i, streams) -> None:
    """Prefetch what is read PREFETCH_DISTANCE elements later."""
    for p in streams:
        k.prefetch(p.at(i + PREFETCH_DISTANCE), near=False)


@kernel("mix", constants=lambda op: {"numbers": op.numbers, **loops.flat(op.y)}, views=" ".join(COEFFICIENTS))
def mix(k, y, x0, x1, x2, x3, k0, k1, k2, k3, *, numbers, dims, width, mode_y) -> None:
    """The kernel: y = the sum of k_i x_i over len(numbers) terms (1 to 4; the others None), flat, stored or added (mode_y)."""
    factors = [coefficient(k, number, p) for number, p in zip(numbers, (k0, k1, k2, k3), strict=False)]
    (first, first_factor), *others = zip((x0, x1, x2, x3), factors, strict=False)
    for i, mask, put in loops.elementwise(k, k.num_elements(dims) * width, y, unroll=4, mode=mode_y):
        total = first.load(i, mask)
        total = total if first_factor is None else total * first_factor
        prefetch_streams(k, i, [first, *(x for x, _ in others)])
        for x, factor in others:
            value = x.load(i, mask)
            total = total + value if factor is None else k.fma(value, factor, total)
        put(total)


def mix_backward(k, partials, dx0, dx1, dx2, dx3, dy, x0, x1, x2, x3, k0, k1, k2, k3, *, numbers, modes, C, dims, inner) -> None:
    """The kernel: dx_i = k_i dy, and partials (chunks, learned coefficients) fp32 = sum(dy x_i) over the rows of each chunk, in one
    pass that reads dy once. `modes`: of dx0...; a dx that is not computed is None."""
    n = len(numbers)  # terms
    xs, dxs, ks = (x0, x1, x2, x3)[:n], (dx0, dx1, dx2, dx3)[:n], (k0, k1, k2, k3)[:n]
    learned = [i for i in range(n) if numbers[i] is None]
    factors = [coefficient(k, number, p) for number, p in zip(numbers, ks, strict=True)]
    results = [(dx, factor, mode) for dx, factor, mode in zip(dxs, factors, modes, strict=True) if dx is not None]
    rows = k.num_elements(dims) * inner
    step = CHAINS * k.lanes  # elements of an iteration
    nontemporal = [loops.exceeds_caches(k, rows, C, dx) if mode == "store" else None for dx, _, mode in results]
    with reductions.chunks_of_rows(k, partials, rows, 1, len(learned)) as (dst, first, last):
        sums = [loops.new_accumulators(k, CHAINS) for _ in learned]

        def gradients(i, mask, chain: int) -> list[Value]:
            """The vectors of all dx from element i on; adds dy x to accumulator `chain` of each learned coefficient."""
            prefetch_streams(k, i, [dy, *(xs[t] for t in learned)])
            d = dy.load(i, mask)
            for t, chains in zip(learned, sums, strict=True):
                chains[chain].value = k.fma(d, xs[t].load(i, mask), chains[chain].value)
            return [loops.accumulate(k, dx, i, mask, d if factor is None else d * factor, mode) for dx, factor, mode in results]

        begin, end = first * C, last * C  # elements of the chunk
        full_end = begin + ((end - begin) & -step)
        with k.loop(begin, full_end, step) as i:
            groups = [gradients(i + j * k.lanes, None, j) for j in range(CHAINS)]
            for (dx, _, _), values, bypass in zip(results, zip(*groups, strict=True), nontemporal, strict=True):
                loops.store_all(k, dx, list(values), i, bypass)
        with k.loop(full_end, end, k.lanes) as i:
            mask = k.mask_first(end - i)
            for (dx, _, _), value in zip(results, gradients(i, mask, 0), strict=True):
                dx.store(value, i, mask)
        for t, chains in enumerate(sums):
            dst.put(k.sum(loops.tree_reduce(chains, add)), t)


@lowering("mix_backward", starts=f"{DX} {DK}", views=f"{DK} {' '.join(COEFFICIENTS)}")
def lower_mix_backward(op: Op, c: Lowering) -> None:
    """Append the kernel with partial sums of the learned coefficients' gradients, then the sums of these in order."""
    numbers = op.numbers
    learned = [i for i, number in enumerate(numbers) if number is None]
    named = op.inputs | op.outputs
    operands = {f"{name}{i}": named.get(f"{name}{i}") for name in ("dx", "x", "k") for i in range(MOST)}
    partials = reductions.lower_partials(c, op.dy, len(learned))
    modes = tuple(op.modes.get(f"dx{i}", "store") for i in range(len(numbers)))
    constants = {"numbers": numbers, "modes": modes, "C": int(op.dy.shape[-1]), **loops.shape_of(op.dy)}
    c.call(mix_backward, {"partials": partials, "dy": op.dy, **operands}, constants, writes=f"partials {DX}")
    outputs = {f"dk{i}": op.outputs[f"dk{i}"] for i in learned}
    reductions.lower_scalars(c, partials, op.dy, outputs, op.modes)
