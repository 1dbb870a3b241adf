"""Attention backward where queries see windows or documents: a claim is a segment of a head of keys.

Shapes and formulas as in attention_backward.py. A segment is a run of blocks of keys and the queries at the same positions. Its
claim computes dk and dv of these keys and dq of these queries, five products a block. Only where a query and a key that it sees
are in different segments do two claims compute their probability, for three products and for four: of segments much longer than a
window that is little, and a document's border costs nothing. dq of the segment waits in the thread's scratch, and a sequence of any
length keeps every thread busy.

Every sum runs over the same blocks in the same order wherever segments end, so that their number decides no bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.attention.attention_blocks import KEYS, Geometry, clear, dim_size, round_up, weave_left
from barellm.cpu.kernels.attention.attention_bounds import Bounds
from barellm.cpu.kernels.attention.attention_head import Head
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Value

SEGMENT = 2048  # positions at most
PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # segments of a sequence that are tried
OWN, CROSSING = 5, 1  # products of a pair in a segment, and what each pair across its two ends costs beyond them


def pieces_of(k: KernelBuilder, heads: Value, blocks: Value, bounds: Bounds) -> Value:
    """The number of segments that a sequence of `blocks` is cut into: as many as end soonest on these threads, which share
    `heads`."""
    least = k.ceil_div(blocks, SEGMENT // KEYS)
    window = blocks if bounds.window is None else k.min(k.scalar(bounds.window) // KEYS + 1, blocks)
    best, shortest = k.max(least, 1), k.int(1 << 62)
    for n in PIECES:
        span = k.ceil_div(blocks, n)
        rounds = k.ceil_div(heads * n, k.threads)
        time = rounds * (span * OWN + k.min(window, span) * CROSSING)
        better = (time < shortest) & (least <= n) & (blocks >= n)
        best, shortest = k.select(better, k.int(n), best), k.select(better, time, shortest)
    return best


def attention_backward_segments(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream,
    *, batch, seq, modes, heads, kv_heads, D, bounds, **shape,
) -> None:  # fmt: skip
    """Compute dq, dk and dv. `modes` and the six strides are those of q, k and v in that order."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    sizes: dict[str, Any] = {"seq": seq, "heads": heads, "kv_heads": kv_heads, "D": D, "bounds": bounds, **shape}
    T, count = bounds.length(k, seq), dim_size(k, batch) * kv_heads
    blocks = k.ceil_div(T, KEYS)
    pieces = pieces_of(k, count, blocks, bounds)
    span, group = k.ceil_div(blocks, pieces), heads // kv_heads
    keep = [k.keep(mode) for mode in modes]
    with (
        amx.tile_registers(k, Geometry.of(k.isa, q.dtype, D).tiles),
        k.parallel_for(count * k.ceil_div(blocks, span)) as claim,
    ):
        per_head = k.ceil_div(blocks, span)
        index, own = claim // per_head, claim % per_head * span  # a head of keys, the segment's first block
        first, stop = own * KEYS, k.min((own + span) * KEYS, T)
        with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as member:
            h = Head(k, operands, index // kv_heads, index % kv_heads * group + member, **sizes)
            begins, ends = (None, None) if group == 1 else (member.equals(0), member.equals(group - 1))
            add_segment(k, h, own, first, stop, begins, ends, (keep[1], keep[2]))
            with k.loop(first, stop, h.g.queries) as t:
                h.store_dq(t, h.s["dq"].at((t - first) * h.g.deep), keep[0])


def add_segment(
    k: KernelBuilder,
    h: Head,
    own: Value,
    first: Value,
    stop: Value,
    begins: Value | None,
    ends: Value | None,
    keep: Any,
) -> None:
    """Add the part of one head of queries. dq of [first, stop) goes into scratch. dk and dv of the blocks from `own` on are
    cleared if the head `begins` a group of several, and stored if it `ends` it."""
    g, s = h.g, h.s
    assert h.reach is not None
    clear(k, s["dq"], k.ceil_div(stop - first, g.queries) * (g.deep * g.queries))
    with k.loop(h.reach.first(k, first) // KEYS, k.ceil_div(stop, KEYS)) as block:
        j0, mine = block * KEYS, block >= own
        count = h.stage_keys(j0)
        weave_left(k, g, s["k_rows"], count, s["k"])
        waits = k.select(mine, block - own, 0) * (KEYS * g.wide)
        dk, dv = (s[name] if begins is None else s[name].at(waits) for name in ("dk", "dv"))
        with k.when(mine if begins is None else mine & begins):
            for acc in (dk, dv):
                clear(k, acc, round_up(k, count, g.rows) * g.wide)
        last = h.reach.stop(k, j0 + count - 1)
        last = k.select(mine, last, k.min(last, stop))
        with k.loop(k.max(j0, first), last, g.queries) as t:
            lower = h.lower(t)
            assert lower is not None
            begin, seen = lower.begin(k, g, j0), h.seen(j0, count, t)
            shift, deltas = h.stage_queries(t, woven=True)
            h.probabilities(j0, t, begin, seen, shift, deltas, straight=True, lower=lower)
            with k.when(mine):
                h.add_dkdv(begin, seen, dk, dv)
            with k.when(t < stop):
                h.add_dq(begin, seen, s["dq"].at((t - first) * g.deep))
        with k.when(mine if ends is None else mine & ends):
            h.store_dkdv(j0, count, dk, dv, keep)
