"""Loops that kernels share: over flat elements, over the columns of a row, over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.kernel import KernelBuilder, dims_of
from barellm.cpu.lang import Value, Var
from barellm.program.tensor import Tensor

GRAIN = 8192  # flat elements a claim: some 5 to 10 us
STREAM_BYTES = 24 << 20  # a result larger than this leaves the caches: it is written past them

# (index of the first lane, mask or None, number of the vector in the unrolled turn)
Body = Callable[[Any, Value | None, int], None]


def shape_of(tensor: Tensor) -> dict[str, Any]:
    """Constants `dims` and `inner`: `k.extent(dims) * inner` rows of the last axis."""
    return {"dims": dims_of(tensor), "inner": tensor.width // int(tensor.shape[-1]) if tensor.shape else 1}


def flat(tensor: Tensor) -> dict[str, Any]:
    """Constants `dims` and `width`: `k.extent(dims) * width` elements."""
    return {"dims": dims_of(tensor), "width": tensor.width}


def sweep(k: KernelBuilder, begin: Any, end: Any, body: Body, *, unroll: int = 2) -> None:
    """body(index, mask, j) for the vectors of elements [begin, end)."""
    step = unroll * k.lanes
    begin, end = k.int(begin), k.int(end)
    whole = begin + ((end - begin) & -step)
    with k.loop(begin, whole, step) as i:
        for j in range(unroll):
            body(i + j * k.lanes, None, j)
    with k.loop(whole, end, k.lanes) as i:
        body(i, k.mask_first(end - i), 0)


def sweep_result(
    k: KernelBuilder, n: Value, itemsize: int, body: Callable[[Any, Value | None, bool], None], *, unroll: int = 2
) -> None:
    """Threads claim ranges of the `n` elements of a result; body(index, mask, nontemporal) stores one vector."""
    large = n * itemsize > STREAM_BYTES
    with k.claim(n, GRAIN) as (begin, end):
        with k.when(large):
            sweep(k, begin, end, lambda i, mask, j: body(i, mask, mask is None), unroll=unroll)
        with k.otherwise(large):
            sweep(k, begin, end, lambda i, mask, j: body(i, mask, False), unroll=unroll)


def zeros(k: KernelBuilder, count: int) -> list[Var]:
    """Vectors to add to, one for each chain: several hide the latency of an addition."""
    return [k.var(k.to(0.0, k.vec)) for _ in range(count)]


def fold(chains: list[Var], combine: Callable[[Value, Value], Value]) -> Value:
    """Chains (a power of two) joined in pairs."""
    values = [v.value for v in chains]
    while len(values) > 1:
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def across(k: KernelBuilder, C: int, body: Body, *, unroll: int = 4, unrolled: bool = False) -> None:
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


def row_grain(C: int) -> int:
    """Rows a claim: about GRAIN elements."""
    return max(1, GRAIN // C)
