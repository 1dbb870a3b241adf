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
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.attention_backward_tiles import Head
from barellm.cpu.kernels.attention_mask import MaskSpec
from barellm.cpu.kernels.attention_microkernels import KEY_BLOCK, Geometry, clear, pack_left, round_up, runtime_size
from barellm.cpu.lang import Value

CHUNK = 2048  # positions at most
CHUNK_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # segments of a sequence that are tried
OWN, CROSSING = 5, 1  # products of a pair in a segment, and what each pair across its two ends costs beyond them


def select_chunk_count(k: KernelBuilder, heads: Value, blocks: Value, mask_spec: MaskSpec) -> Value:
    """The number of segments that a sequence of `blocks` is cut into: as many as end soonest on these threads, which share
    `heads`."""
    min_chunks = k.ceil_div(blocks, CHUNK // KEY_BLOCK)
    window = blocks if mask_spec.window is None else k.min(k.scalar(mask_spec.window) // KEY_BLOCK + 1, blocks)
    best, shortest = k.max(min_chunks, 1), k.int(1 << 62)
    for n in CHUNK_COUNTS:
        span = k.ceil_div(blocks, n)
        rounds = k.ceil_div(heads * n, k.threads)
        time = rounds * (span * OWN + k.min(window, span) * CROSSING)
        better = (time < shortest) & (min_chunks <= n) & (blocks >= n)
        best, shortest = k.select(better, k.int(n), best), k.select(better, time, shortest)
    return best


def attention_backward_windowed(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream,
    *, batch, seq, modes, heads, kv_heads, D, mask_spec, **shape,
) -> None:  # fmt: skip
    """Compute dq, dk and dv. `modes` and the six strides are those of q, k and v in that order."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    size_constants: dict[str, Any] = {
        "seq": seq,
        "heads": heads,
        "kv_heads": kv_heads,
        "D": D,
        "mask_spec": mask_spec,
        **shape,
    }
    T, count = mask_spec.length(k, seq), runtime_size(k, batch) * kv_heads
    blocks = k.ceil_div(T, KEY_BLOCK)
    pieces = select_chunk_count(k, count, blocks, mask_spec)
    span, group = k.ceil_div(blocks, pieces), heads // kv_heads
    keep = [k.keep(mode) for mode in modes]
    with (
        amx.tile_registers(k, Geometry.of(k.isa, q.dtype, D).tiles),
        k.claim_each(count * k.ceil_div(blocks, span)) as item,
    ):
        per_head = k.ceil_div(blocks, span)
        index, own = item // per_head, item % per_head * span  # a head of keys, the segment's first block
        first, stop = own * KEY_BLOCK, k.min((own + span) * KEY_BLOCK, T)
        with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as member:
            h = Head(k, operands, index // kv_heads, index % kv_heads * group + member, **size_constants)
            begins, ends = (None, None) if group == 1 else (member.equals(0), member.equals(group - 1))
            add_chunk(k, h, own, first, stop, begins, ends, (keep[1], keep[2]))
            with k.loop(first, stop, h.g.queries) as t:
                h.store_dq(t, h.s["dq"].at((t - first) * h.g.acc_rows), keep[0])


def add_chunk(
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
    assert h.key_range is not None
    clear(k, s["dq"], k.ceil_div(stop - first, g.queries) * (g.acc_rows * g.queries))
    with k.loop(h.key_range.first_key(k, first) // KEY_BLOCK, k.ceil_div(stop, KEY_BLOCK)) as block:
        j0, mine = block * KEY_BLOCK, block >= own
        count = h.pack_keys(j0)
        pack_left(k, g, s["k_rows"], count, s["k"])
        waits = k.select(mine, block - own, 0) * (KEY_BLOCK * g.padded_D)
        dk, dv = (s[name] if begins is None else s[name].at(waits) for name in ("dk", "dv"))
        with k.when(mine if begins is None else mine & begins):
            for acc in (dk, dv):
                clear(k, acc, round_up(k, count, g.rows) * g.padded_D)
        last = h.key_range.query_end(k, j0 + count - 1)
        last = k.select(mine, last, k.min(last, stop))
        with k.loop(k.max(j0, first), last, g.queries) as t:
            key_bounds = h.key_bounds(t)
            assert key_bounds is not None
            begin, num_keys = key_bounds.first_row(k, g, j0), h.num_keys(j0, count, t)
            shift, deltas = h.pack_queries(t, vnni=True)
            h.probabilities(j0, t, begin, num_keys, shift, deltas, for_dkdv=True, key_bounds=key_bounds)
            with k.when(mine):
                h.add_dkdv(begin, num_keys, dk, dv)
            with k.when(t < stop):
                h.add_dq(begin, num_keys, s["dq"].at((t - first) * g.acc_rows))
        with k.when(mine if ends is None else mine & ends):
            h.store_dkdv(j0, count, dk, dv, keep)
