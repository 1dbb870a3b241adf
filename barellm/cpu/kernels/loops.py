"""Loops that kernels share: elementwise over flat ranges, over the columns of a row, over rows; non-temporal stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.kernel import KernelBuilder, dims_of
from barellm.cpu.lang import Pointer, Value, Var
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor

GRAIN = 8192  # flat elements of a work item: some 5 to 10 us
STREAM_BYTES = 24 << 20  # a larger result leaves the caches: it is stored non-temporally

LINE = 64  # bytes of a cache line
ROW_UNROLL = 4  # vectors of a row that are stored together
ROW_TOGETHER = 2  # and of each of several results

# (index of the first lane, mask or None, number of the vector in the unrolled iteration)
Body = Callable[[Any, Value | None, int], None]
# (index of the first lane, mask or None) -> what belongs there
Vector = Callable[[Any, Value | None], Value]


def shape_of(tensor: Tensor) -> dict[str, Any]:
    """Constants `dims` and `inner`: `k.num_elements(dims) * inner` rows of the last axis."""
    return {"dims": dims_of(tensor), "inner": tensor.width // int(tensor.shape[-1]) if tensor.shape else 1}


def flat(tensor: Tensor) -> dict[str, Any]:
    """Constants `dims` and `width`: `k.num_elements(dims) * width` elements."""
    return {"dims": dims_of(tensor), "width": tensor.width}


def foreach_vector(k: KernelBuilder, begin: Any, end: Any, body: Body, *, unroll: int = 2) -> None:
    """body(index, mask, j) for the vectors of elements [begin, end)."""
    step = unroll * k.lanes
    begin, end = k.int(begin), k.int(end)
    whole = begin + ((end - begin) & -step)
    with k.loop(begin, whole, step) as i:
        for j in range(unroll):
            body(i + j * k.lanes, None, j)
    with k.loop(whole, end, k.lanes) as i:
        body(i, k.mask_first(end - i), 0)


def store_all(k: KernelBuilder, out: Pointer, values: list[Value], index: Any, past: Value | None = None) -> None:
    """Store adjacent vectors: an even number of 16-bit ones, a power of two of 8-bit ones. Non-temporally where `past` (i1),
    and then to an aligned address. Short vectors are joined, for a non-temporal store of half a cache line costs as much as of
    a whole one."""

    def store(nontemporal: bool) -> None:
        for j, value in enumerate(values):
            at = out.at(j * per * k.lanes + index)
            how = f"align {out.itemsize * per * k.lanes}, !nontemporal !0" if nontemporal else f"align {out.itemsize}"
            k.line(f"store {value.typed}, ptr {at.ref}, {how}")

    per = 1
    if out.itemsize == 2:
        per, lanes = 2, [k.round16(value, out.dtype) for value in values]
        values = [k.concat(lanes[j : j + 2]) for j in range(0, len(lanes), 2)]
    elif out.itemsize == 1:
        per, values = len(values), [k.concat([k.rounded(value, out.dtype) for value in values])]
    if past is None:
        store(False)
        return
    with k.when(past):
        store(True)
    with k.otherwise(past):
        store(False)


def added(k: KernelBuilder, out: Pointer, at: Any, mask: Value | None, value: Value, mode: str) -> Value:
    """`value`, plus what `out` has where the mode says so."""
    keep = k.keep(mode)
    if keep is None:
        return value
    return value + k.select(keep, out.load(at, mask), 0.0)


def put_added(k: KernelBuilder, out: Pointer, at: Any, value: Value, mode: str) -> None:
    """The same of one number, which goes to memory."""
    keep = k.keep(mode)
    out.put(value if keep is None else value + k.select(keep, out.get(at), 0.0), at)


def elementwise_map(
    k: KernelBuilder, n: Value, out: Pointer, vector: Vector, *, unroll: int = 2, mode: str = "store"
) -> None:
    """out[i] = vector(i, mask) for `n` elements, in `mode`, in parallel. Large results are stored non-temporally."""
    past = n * out.itemsize > STREAM_BYTES if mode == "store" else None
    step = unroll * k.lanes

    def written(i, mask):
        return added(k, out, i, mask, vector(i, mask), mode)

    with k.parallel_range(n, GRAIN) as (begin, end):
        whole = begin + ((end - begin) & -step)
        with k.loop(begin, whole, step) as i:
            store_all(k, out, [written(i + j * k.lanes, None) for j in range(unroll)], i, past)
        with k.loop(whole, end, k.lanes) as i:
            mask = k.mask_first(end - i)
            out.store(written(i, mask), i, mask)


def zeros(k: KernelBuilder, count: int) -> list[Var]:
    """Vector accumulators: several independent chains hide the latency of an addition."""
    return [k.var(k.to(0.0, k.vec)) for _ in range(count)]


def fold(chains: list[Var], combine: Callable[[Value, Value], Value]) -> Value:
    """Reduces chains (a power of two) pairwise."""
    values = [v.value for v in chains]
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def foreach_column(k: KernelBuilder, C: int, body: Body, *, unroll: int = 4, unrolled: bool = False) -> None:
    """body(column, mask, j) for the vectors of a row of C columns, j < unroll. A loop, or wholly `unrolled`: then columns are
    Python integers."""
    if unrolled:
        for i, (c, mask) in enumerate(k.columns(C)):
            body(c, mask, i % unroll)
        return
    step = unroll * k.lanes
    whole = C - C % step
    if whole > step:
        with k.loop(0, whole, step) as c:
            for j in range(unroll):
                body(c + j * k.lanes, None, j)
    elif whole:
        for j in range(unroll):
            body(j * k.lanes, None, j)
    for j, (c, mask) in enumerate(k.columns(C - whole)):
        body(whole + c, mask, j)


def past_caches(k: KernelBuilder, rows: Value, C: int, out: Pointer) -> Value | None:
    """Whether `rows` rows of C columns are stored non-temporally (i1); None where rows are not aligned, so that they cannot be."""
    return rows * (C * out.itemsize) > STREAM_BYTES if C % (ROW_UNROLL * k.lanes) == 0 else None


def write_row(
    k: KernelBuilder, out: Pointer, C: int, vector: Vector, *, past: Value | None, unrolled: bool = False
) -> None:
    """Stores vector(column, mask) for a row of C columns. `unrolled` as in `foreach_column`."""
    step = ROW_UNROLL * k.lanes
    whole = C - C % step

    def group(c: Any) -> None:
        store_all(k, out, [vector(c + j * k.lanes, None) for j in range(ROW_UNROLL)], c, past)

    if unrolled or whole <= step:
        for c in range(0, whole, step):
            group(c)
    else:
        with k.loop(0, whole, step) as c:
            group(c)
    for c, mask in k.columns(C - whole):
        out.store(vector(whole + c, mask), whole + c, mask)


def row_grain(C: int) -> int:
    """Rows of a work item: about GRAIN elements."""
    return max(1, GRAIN // C)


def whole_lines(op: Op) -> bool:
    """Whether the rows of all results of an op, which may be views, are whole cache lines."""
    return all(n % 64 == 0 for t in op.outputs.values() for n in (t.first_column, t.row_stride, t.shape[-1]))


# (column, mask or None) -> what belongs there of each result
Vectors = Callable[[Any, Value | None], list[Value]]


def foreach_row(
    k: KernelBuilder,
    rows: Value,
    F: int,
    outs: list[tuple[Pointer, int, str]],
    vectors: Callable[[Value], Vectors],
    *,
    lines: bool,
) -> None:
    """For rows in parallel: vectors(row) gives the vectors of the results `outs`, each with its stride and mode. Large results are
    stored non-temporally if none is accumulated."""
    stored = all(mode == "store" for *_, mode in outs)
    past = rows * sum(F * p.itemsize for p, *_ in outs) > STREAM_BYTES if stored and lines else None
    step = ROW_TOGETHER * k.lanes
    whole = F - F % step
    with k.parallel_range(rows, row_grain(F)) as (begin, end), k.loop(begin, end) as row:
        to, of = [p.at(row * stride) for p, stride, _ in outs], vectors(row)

        def written(c: Any, mask: Value | None) -> list[Value]:
            found = zip(to, of(c, mask), outs, strict=True)
            return [added(k, p, c, mask, value, mode) for p, value, (_, _, mode) in found]

        with k.loop(0, whole, step) as c:
            groups = [written(c + j * k.lanes, None) for j in range(ROW_TOGETHER)]
            for p, values in zip(to, zip(*groups, strict=True), strict=True):
                store_all(k, p, list(values), c, past)
        for c, mask in k.columns(F - whole):
            for p, value in zip(to, written(whole + c, mask), strict=True):
                p.store(value, whole + c, mask)
