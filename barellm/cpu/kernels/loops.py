"""Loops that kernels share: elementwise over flat ranges, over the columns of a row, over rows; non-temporal stores.

A loop is a generator: the body of a Python `for` over it is emitted once for each vector of an unrolled iteration, so a body may
neither `break` nor return. `put` stores the value that belongs at the body's index.

Shared parameters: `mode` of a result is "store", "add" (C += ...) or "start" (the first micro-batch stores, later ones add; see
`KernelBuilder.keep`). A `mask` (i1 lanes) limits a vector at the end of a row; None: all lanes. `nontemporal` is a run-time
condition (i1), true for results that are larger than the caches; None: never. A "vector" is `k.lanes` elements. dims, inner, width:
`shape_of`, `flat`. Kernels over rows have C columns."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from barellm.cpu.kernel import Op, Pointer, Tensor, Value, Var, dims_of
from barellm.cpu.lang import random
from barellm.program.ops.pointwise.random import HALF

GRAIN = 8192  # flat elements of a work item: some 5 to 10 us
STREAM_BYTES = 24 << 20  # a larger result leaves the caches: it is stored non-temporally

LINE = 64  # bytes of a cache line
CHAINS = 4  # independent accumulation chains of a sum: they hide the latency of an addition
ROW_UNROLL = 4  # vectors of a row that are stored together
ROW_TOGETHER = 2  # and of each of several results

# Index of the first lane, mask or None, number of the vector in the unrolled iteration.
Numbered = Iterator[tuple[Any, Value | None, int]]
# Index of the first lane, mask or None, put(value): what belongs there.
Written = Iterator[tuple[Any, Value | None, Callable[..., None]]]
# (index of the first lane, mask or None) -> a vector
Vector = Callable[[Any, Value | None], Value]


def shape_of(tensor: Tensor) -> dict[str, Any]:
    """Compile-time constants `dims` and `inner`: a kernel over rows of the last axis has k.num_elements(dims) * inner rows."""
    return {"dims": dims_of(tensor), "inner": tensor.width // int(tensor.shape[-1]) if tensor.shape else 1}


def flat(tensor: Tensor) -> dict[str, Any]:
    """Compile-time constants `dims` and `width`: a flat kernel has k.num_elements(dims) * width elements."""
    return {"dims": dims_of(tensor), "width": tensor.width}


def vectors(k, begin, end, *, unroll: int = 2) -> Numbered:
    """`for i, mask, j in vectors(...)`: the vectors of elements [begin, end): a loop of `unroll` unmasked vectors an iteration, of
    which each is number j < `unroll` (to choose an accumulator); then single vectors, j = 0, the last of them masked."""
    step = unroll * k.lanes
    begin, end = k.int(begin), k.int(end)
    full_end = begin + ((end - begin) & -step)  # step is a power of two
    with k.loop(begin, full_end, step) as i:
        for j in range(unroll):
            yield i + j * k.lanes, None, j
    with k.loop(full_end, end, k.lanes) as i:
        yield i, k.mask_first(end - i), 0


def groups(k, begin, end, size: int) -> Iterator[tuple[Value, int]]:
    """`for first, count in groups(...)`: [begin, end) in groups of `size`, a power of two; then what remains, one by one."""
    full_end = begin + ((end - begin) & -size) if isinstance(begin, Value) else end & -size  # `begin` is a Value or 0
    with k.loop(begin, full_end, size) as first:
        yield first, size
    with k.loop(full_end, end) as first:
        yield first, 1


def blocks(k, C: int, width: int) -> Iterator[tuple[Any, int]]:
    """`for number, size in blocks(...)`: the blocks of `width` columns of a row of C; the last may have fewer columns."""
    with k.loop(0, C // width) as number:
        yield number, width
    if C % width:
        yield C // width, C % width


def steps(k, begin, end, step: int = 1, *, unrolled: bool) -> Iterator[Any]:
    """`for i in steps(...)`: begin, begin + step, ... below end; with `unrolled` as Python integers, and no loop is emitted."""
    if unrolled:
        yield from range(begin, end, step)
    else:
        with k.loop(begin, end, step) as i:
            yield i


def pieces(k, n: int, step: int) -> Iterator[tuple[Any, int]]:
    """`for first, size in pieces(...)`: [0, n) in pieces of `step`, then the shorter rest. The body is emitted for each kind that
    exists: `first` is a Value in the loop, and an integer in the rest."""
    full_end = n - n % step
    if full_end:
        with k.loop(0, full_end, step) as first:
            yield first, step
    if full_end < n:
        yield full_end, n - full_end


def row_words(k, key: tuple[Value, Value], row: Any, C: int) -> Iterator[tuple[Value, Value | None, Value]]:
    """`for column, mask, word in row_words(...)`: the vectors of a row of C columns, each with its random words (i32 lanes)."""
    for block, size in blocks(k, C, 2 * HALF):
        for part, offset in random.column_blocks(k.lanes):
            if offset >= size:
                continue
            # Two vectors, HALF columns apart, share call number `part` of the generator; the first is at `offset` in the block.
            for half, word in enumerate(random.words(k, key, row, block, part)):
                left = size - offset - half * HALF
                if left > 0:
                    mask = None if left >= k.lanes else k.mask_first(left)
                    yield k.int(block) * (2 * HALF) + offset + half * HALF, mask, word


def fill(k, out, value, n: int) -> None:
    """The first `n` elements of `out`, a number of the code, become `value`."""
    for c, mask, _ in columns(k, n):
        out.store(value, c, mask)


def store_all(k, out, values, index, nontemporal=None) -> None:
    """Store vectors of fp32 lanes, converted to out's dtype, one after the other from element `index` on: any number of vectors to
    fp32, an even number to a 16-bit dtype, a power of two to an 8-bit one. Where `nontemporal` (i1), `index` must be aligned to a
    cache line. Short vectors are concatenated first: a non-temporal store of half a line costs as much as one of a full line."""

    def emit_stores(streaming: bool) -> None:
        for j, value in enumerate(values):
            at = out.at(j * per_store * k.lanes + index)
            aligned = f"align {out.itemsize * per_store * k.lanes}, !nontemporal !0"
            k.line(f"store {value.typed}, ptr {at.ref}, {aligned if streaming else f'align {out.itemsize}'}")

    per_store = {4: 1, 2: 2, 1: len(values)}[out.itemsize]  # vectors of `values` that one store instruction writes
    if out.itemsize < 4:
        short = [k.round_to(value, out.dtype) for value in values]
        values = [k.concat(short[j : j + per_store]) for j in range(0, len(short), per_store)]
    if nontemporal is None:
        emit_stores(False)
        return
    with k.when(nontemporal):
        emit_stores(True)
    with k.otherwise(nontemporal):
        emit_stores(False)


def accumulate(k, out, index, mask, value, mode: str) -> Value:
    """The vector `value`, plus the vector of `out` from element `index` on if `mode` accumulates. Nothing is stored."""
    keep = k.keep(mode)
    if keep is None:
        return value
    return value + k.select(keep, out.load(index, mask), 0.0)


def accumulate_scalar(k, out, index, value, mode: str) -> None:
    """out[index] = value, a scalar, or out[index] + value if `mode` accumulates."""
    keep = k.keep(mode)
    out.put(value if keep is None else value + k.select(keep, out.get(index), 0.0), index)


def elementwise(k, n, out, *, unroll: int = 2, mode: str = "store") -> Written:
    """`for i, mask, put in elementwise(...)`: out[i] = what is put, for `n` elements, stored or added (`mode`), in parallel over
    ranges of GRAIN elements. Results of more than STREAM_BYTES are stored non-temporally."""
    nontemporal = n * out.itemsize > STREAM_BYTES if mode == "store" else None
    step = unroll * k.lanes
    results: list[Value] = []

    def put(i, mask, value) -> None:
        results.append(accumulate(k, out, i, mask, value, mode))

    with k.parallel_range(n, GRAIN) as (begin, end):
        full_end = begin + ((end - begin) & -step)
        with k.loop(begin, full_end, step) as first:
            for j in range(unroll):
                i = first + j * k.lanes
                yield i, None, partial(put, i, None)
            store_all(k, out, results, first, nontemporal)
        results.clear()
        with k.loop(full_end, end, k.lanes) as i:
            mask = k.mask_first(end - i)
            yield i, mask, partial(put, i, mask)
            out.store(results[0], i, mask)


def new_accumulators(k, count: int) -> list[Var]:
    """`count` vector accumulators, zero: several independent chains hide the latency of an addition."""
    return [k.var(k.to(0.0, k.vec)) for _ in range(count)]


def tree_reduce(chains, combine: Callable[[Value, Value], Value]) -> Value:
    """Reduce vector accumulators (a power of two of them) pairwise to one vector."""
    values = [v.value for v in chains]
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def columns(k, C: int, *, unroll: int = 4, unrolled: bool = False) -> Numbered:
    """`for column, mask, j in columns(...)`: the vectors of a row of C columns: a loop of `unroll` vectors an iteration, of which
    each is number j < `unroll` (to choose an accumulator). `mask` is None but for the last vector of a row that `k.lanes` does not
    divide. `unrolled`: no loop at all, and `column` is a Python integer, so the body may index a list of registers by it."""
    if unrolled:
        for i, (c, mask) in enumerate(k.columns(C)):
            yield c, mask, i % unroll
        return
    step = unroll * k.lanes
    full_end = C - C % step
    if full_end > step:
        with k.loop(0, full_end, step) as c:
            for j in range(unroll):
                yield c + j * k.lanes, None, j
    elif full_end:  # one iteration only: no loop is emitted
        for j in range(unroll):
            yield j * k.lanes, None, j
    for j, (c, mask) in enumerate(k.columns(C - full_end)):
        yield full_end + c, mask, j


def exceeds_caches(k, rows, C: int, out) -> Value | None:
    """The condition `nontemporal` of `write_row`: whether `rows` rows of C columns take more than STREAM_BYTES (i1). None where
    rows are not a multiple of ROW_UNROLL vectors, so that their addresses are not aligned."""
    return rows * (C * out.itemsize) > STREAM_BYTES if C % (ROW_UNROLL * k.lanes) == 0 else None


def write_row(k, out, C: int, *, nontemporal, mode: str = "store", unrolled: bool = False) -> Written:
    """`for column, mask, put in write_row(...)`: out[column] = what is put, for a row of C columns, stored or added (`mode`),
    ROW_UNROLL vectors at a time, which fill a cache line also of 16-bit dtypes. `unrolled`: as in `columns`."""
    step = ROW_UNROLL * k.lanes
    full_end = C - C % step
    results: list[Value] = []

    def put(c, mask, value) -> None:
        results.append(accumulate(k, out, c, mask, value, mode))

    for first in steps(k, 0, full_end, step, unrolled=unrolled or full_end <= step):
        for j in range(ROW_UNROLL):
            c = first + j * k.lanes
            yield c, None, partial(put, c, None)
        store_all(k, out, results, first, nontemporal)
        results.clear()
    for first, mask in k.columns(C - full_end):
        c = full_end + first
        yield c, mask, partial(put, c, mask)
        out.store(results.pop(), c, mask)


def row_grain(C: int) -> int:
    """Rows of a work item: about GRAIN elements."""
    return max(1, GRAIN // C)


def whole_cache_lines(op: Op) -> bool:
    """Whether the rows of all results of an op, which may be views, start and end at cache lines, with fp32 or a 16-bit dtype."""
    return all(n % 64 == 0 for t in op.outputs.values() for n in (t.first_column, t.row_stride, t.shape[-1]))


def write_rows(k, rows, F: int, outs: list[tuple[Pointer, int, str]], *, lines: bool) -> Iterator[tuple[Value, Written]]:
    """`for row, columns in write_rows(...)`, and `for c, mask, put in columns`: put(...) is given a vector of each of several
    elementwise results of rows of F columns, in parallel over rows. `outs`: (pointer, row stride in elements, mode) of each result.
    Large results are stored non-temporally if all rows fill cache lines (`lines`) and none is accumulated."""
    stored = all(mode == "store" for *_, mode in outs)
    nontemporal = rows * sum(F * p.itemsize for p, *_ in outs) > STREAM_BYTES if stored and lines else None
    step = ROW_TOGETHER * k.lanes
    full_end = F - F % step

    def columns(row_outs) -> Written:
        """The loop over a row's columns; of each result ROW_TOGETHER vectors are stored together."""
        results: list[list[Value]] = []

        def put(c, mask, *values) -> None:
            triples = zip(row_outs, values, outs, strict=True)
            results.append([accumulate(k, p, c, mask, value, mode) for p, value, (_, _, mode) in triples])

        with k.loop(0, full_end, step) as first:
            for j in range(ROW_TOGETHER):
                c = first + j * k.lanes
                yield c, None, partial(put, c, None)
            for p, values in zip(row_outs, zip(*results, strict=True), strict=True):  # transposed: the vectors of one result
                store_all(k, p, list(values), first, nontemporal)
        results.clear()
        for first, mask in k.columns(F - full_end):
            c = full_end + first
            yield c, mask, partial(put, c, mask)
            for p, value in zip(row_outs, results.pop(), strict=True):
                p.store(value, c, mask)

    with k.parallel_range(rows, row_grain(F)) as (begin, end), k.loop(begin, end) as row:
        row_outs = [p.at(row * stride) for p, stride, _ in outs]
        yield row, columns(row_outs)
