"""The K largest elements of rows (radix select), in descending order, and their gradient. A program does one row, which it finds in
the caches after the first pass.

Shapes: x, dx (rows, C); values, dvalues, indices (rows, K); scratch selected_keys, selected_columns (rows, K) i32: the K largest in
the order of their columns. Elements are compared by integer keys in the same order."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import ACCUMULATE, ADD, MIN_SUM_COLUMNS, STORE, pow2
from barellm.cuda.kernels.gemm.split_k import BLOCK
from barellm.cuda.lang import constant, device, tl

LOWEST = constant(-(1 << 31))  # below every key
LONG_BLOCK, RANKED = 2048, 32  # columns at a time at most; selected elements that are ranked at a time


@device
def keys_of(x, column, C: tl.constexpr):
    """Keys (i32) of the elements at `column` (BC,), in the order of their values: of negative ones all bits but the sign are
    flipped. -0 has the key of 0, NaN that of infinity, and columns from C on LOWEST."""
    v = tl.load(x + column, mask=column < C, other=0.0).to(tl.float32) + 0.0
    bits = v.to(tl.int32, bitcast=True)
    key = tl.where(v == v, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7F800000)
    return tl.where(column < C, key, LOWEST)


@device
def count_at_least(x, least, C: tl.constexpr, BC: tl.constexpr):
    """How many keys of a row x (C) are at least `least`."""
    found = tl.zeros((BC,), tl.int32)
    for first in range(0, C, BC):
        found += (keys_of(x, first + tl.arange(0, BC), C) >= least).to(tl.int32)
    return tl.sum(found, 0)


@device
def top_k(
    values, indices, selected_keys, selected_columns, x,
    C: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """values and indices of the K largest elements of one row, of equal ones those with the lowest columns. Three steps: find the
    K-th largest key bit by bit, collect the elements, rank each of them by counting those before it."""
    row = tl.program_id(0).to(tl.int64)
    x += row * C
    selected_keys += row * K
    selected_columns += row * K
    zero, one = tl.full((), 0, tl.int32), tl.full((), 1, tl.int32)
    # The largest `least` that K keys reach: its sign first, then each lower bit.
    least = tl.where(count_at_least(x, zero, C, BC) >= K, zero, tl.full((), LOWEST, tl.int32))
    for bit in range(31):
        guess = least + (one << (30 - bit))
        least = tl.where(count_at_least(x, guess, C, BC) >= K, guess, least)
    ties = K - count_at_least(x, least + 1, C, BC)  # of the keys equal to the K-th, those with the lowest columns
    collected, ties_before = zero, zero
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        key = keys_of(x, column, C)
        tie = ((key == least) & (column < C)).to(tl.int32)
        tie_number = ties_before + tl.cumsum(tie, 0)
        take = (key > least) | ((tie > 0) & (tie_number <= ties))
        slot = collected + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(selected_keys + slot, key, mask=take)
        tl.store(selected_columns + slot, column, mask=take)
        collected += tl.sum(take.to(tl.int32), 0)
        ties_before += tl.sum(tie, 0)
    tl.debug_barrier()  # other threads may read what this one stored
    for first in range(0, K, BK):
        i = first + tl.arange(0, BK)
        own_key, rank = tl.load(selected_keys + i, mask=i < K, other=LOWEST), tl.zeros((BK,), tl.int32)
        for start in range(0, K, BK):
            j = start + tl.arange(0, BK)
            other = tl.load(selected_keys + j, mask=j < K, other=LOWEST)
            tie = (other[None, :] == own_key[:, None]) & (j[None, :] < i[:, None])
            rank += tl.sum(((other[None, :] > own_key[:, None]) | tie).to(tl.int32), 1)
        column = tl.load(selected_columns + i, mask=i < K, other=0)
        tl.store(values + row * K + rank, tl.load(x + column, mask=i < K), mask=i < K)
        tl.store(indices + row * K + rank, column, mask=i < K)


@device
def top_k_dx(
    dx, dvalues, indices, scalars,
    C: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of one row: dvalues at the indices, zeros elsewhere; or added to dx, as MODE says."""
    row = tl.program_id(0).to(tl.int64)
    dx += row * C
    clear = MODE == STORE
    if MODE != STORE and MODE != ADD:
        clear = tl.load(scalars + ACCUMULATE) == 0
    if clear:
        for first in range(0, C, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(dx + i, tl.zeros((BLOCK,), tl.float32), mask=i < C)
    tl.debug_barrier()  # other threads may write where this one cleared
    for first in range(0, K, BLOCK):
        i = first + tl.arange(0, BLOCK)
        to = dx + tl.load(indices + row * K + i, mask=i < K, other=0)
        value = tl.load(dvalues + row * K + i, mask=i < K, other=0.0).to(tl.float32)
        if MODE != STORE:
            value += tl.load(to, mask=i < K, other=0.0).to(tl.float32)
        tl.store(to, value, mask=i < K)


@lowering("top_k", also={"indices": "i32"})
def lower_top_k(op: Any, c: Lowering) -> None:
    C, K, rows = int(op.x.shape[-1]), int(op.K), c.rows(op.x)
    most = op.x.size // C
    operands = {name: c.scratch(name, (most, K), "i32") for name in ("selected_keys", "selected_columns")}
    BC = max(MIN_SUM_COLUMNS, min(pow2(C), LONG_BLOCK))
    constants = {"C": C, "K": K, "BC": BC, "BK": min(pow2(K), RANKED)}
    grid, writes = (lambda s: (rows(s),)), "values indices selected_keys selected_columns"
    c.launch(top_k, operands, constants, grid=grid, writes=writes, warps=max(4, BC // 256))


@lowering("top_k_dx", starts="dx", also={"indices": "i32"})
def lower_top_k_dx(op: Any, c: Lowering) -> None:
    rows = c.rows(op.dvalues)
    c.launch(top_k_dx, {}, {"C": int(op.C), "K": int(op.dvalues.shape[-1]), "BLOCK": BLOCK}, grid=lambda s: (rows(s),))
