"""Attention backward (FlashAttention, Dao et al. 2022): probabilities are recomputed from lse, block by block.

Shapes: q, dq, out, dout (B, T, heads * D), keys, values and their gradients (B, T, kv_heads * D), lse, delta (B, heads, T) fp32.
Rows of q, keys, values and of their gradients have any `strides`. With P = exp(s - lse), M the dropout multipliers and delta =
sum(dout * out):   dv = (P M)^T dout,   ds = P (M (dout v^T) - delta),   dq = ds k,   dk = ds^T q.

    one pass     a work item is a head of keys: five GEMMs a block; dq of a whole head accumulates in the thread's scratch
    two passes   a work item is a block of keys (dk, dv), then a block of queries (dq): seven GEMMs, but more parallelism

Both schedules give the same bits, for every sum runs over the same blocks in the same order. The run-time shape and the number of
threads decide, so that a single long sequence occupies every thread. Windows and documents have a schedule of their own
(attention_backward_windowed.py), of the same tile operations (`h`, a BackwardHead: attention_backward_tiles.py).

With grouped queries, the heads of queries of a head of keys are processed in turn, and its dk and dv are the sums over them: in one
pass those of all its blocks accumulate in scratch."""

from contextlib import nullcontext
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Value, lowering, part
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.cpu.kernels.attention.attention_backward_tiles import BackwardHead, ends_of_group, query_heads, scratch_units
from barellm.cpu.kernels.attention.attention_backward_windowed import CHUNK, attention_backward_windowed
from barellm.cpu.kernels.attention.attention_mask import dense_constants
from barellm.cpu.kernels.attention.attention_single_block import attention_backward_single_block, backward_units, fits_single_block
from barellm.cpu.kernels.gemm import amx

ONE_PASS, TWO_PASSES = 5, 7  # GEMMs a block
SMALL_KEY_BLOCK = 64  # of a work item of two passes, where those of KEY_BLOCK are too few for load balance


def attention_delta(k, delta, out, dout, *, batch, seq, heads, D, mask_spec) -> None:
    """delta (B, heads, T) fp32 = sum(dout * out) over each head's D channels, both (B, T, heads * D); see the module's formulas."""
    C, T = heads * D, mask_spec.length(k, seq)  # columns of a row, tokens of a sequence
    with k.parallel_range(k.size(batch) * T, 32) as (begin, end), k.loop(begin, end) as token:
        target = delta.at(token // T * (heads * T) + token % T)  # of head 0; a head is T further
        with k.loop(0, heads) as head:
            a, b = out.at(token * C + head * D), dout.at(token * C + head * D)
            total = k.to(0.0, k.vec)
            for c, mask in k.columns(D):
                total = k.fma(a.load(c, mask), b.load(c, mask), total)
            target.put(k.sum(total), head * T)


def use_one_pass(k, items) -> Value:
    """Whether (i1) one pass is the faster schedule for `items` heads of keys: its load imbalance, GEMMs in rounds of as many items
    as there are threads, costs less than the two more GEMMs of two passes."""
    threads = k.threads
    rounds = (items + (threads - 1)) // threads
    return (rounds * threads * ONE_PASS) <= (items * TWO_PASSES)


def attention_backward_dkdv(k, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream, *, batch, modes, heads,
        kv_heads, D, **shape) -> None:  # fmt: skip
    """The kernel: dkeys and dvalues (B, T, kv_heads * D), and in one pass also dq. A work item is a head of keys (one pass), or one
    of its blocks of keys, for all query heads that share it: the first of a group of several zeroes the accumulators s["dk"] and
    s["dv"], the last stores them. `modes` (store or add): of dq, dk and dv; `strides` in `shape`: of q, k, v, dq, dk, dv; `starts`,
    `stream`: as in attention_forward.attention."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    group = heads // kv_heads  # query heads that share a head of keys
    T = shape["mask_spec"].length(k, shape["seq"])
    count = k.size(batch) * kv_heads  # heads of keys
    is_one_pass = use_one_pass(k, count)
    enough = count * k.ceil_div(T, micro.KEY_BLOCK) >= k.threads * 4  # work items for all threads
    step = k.select(is_one_pass | enough, k.int(micro.KEY_BLOCK), SMALL_KEY_BLOCK)  # keys of a block
    blocks = k.ceil_div(T, step)
    add_dq, *add_dkdv = (k.keep(mode) for mode in modes)  # i1, or None: never
    per_head = k.select(is_one_pass, k.int(1), blocks)  # work items of a head of keys
    g = micro.Geometry.of(k.isa, q.dtype, D)
    with amx.tile_registers(k, g.tiles), k.parallel_for(count * per_head) as item:
        index = item // per_head  # of the head of keys, over all sequences
        position = item % per_head
        # The first block is the longest: long and short ones alternate, for a thread's items are adjacent.
        start = k.select((position & 1).equals(0), position >> 1, per_head - 1 - (position >> 1))
        stop = k.select(is_one_pass, blocks, start + 1)  # blocks [start, stop)
        with query_heads(k, group) as group_index:
            sequence = index // kv_heads
            head = index % kv_heads * group + group_index
            h = BackwardHead(k, operands, sequence, head, g=g, heads=heads, kv_heads=kv_heads, D=D, **shape)
            s = h.s
            is_first, is_last = ends_of_group(group, group_index)
            with k.when(is_one_pass):
                micro.clear(k, s["dq"], k.ceil_div(T, g.queries) * (g.acc_rows * g.queries))
            with k.loop(start, stop) as block:
                j0 = block * step  # first key
                dk, dv = s["dk"], s["dv"]
                if group > 1:  # the sums of all blocks wait for the group's other heads
                    dk, dv = (acc.at((block - start) * (micro.KEY_BLOCK * g.padded_D)) for acc in (dk, dv))
                add_key_block(k, h, T, j0, step, dk, dv, add_dkdv, is_one_pass, is_first, is_last)
            with k.when(is_one_pass), k.loop(0, T, g.queries) as t:
                h.store_dq(t, s["dq"].at(t * g.acc_rows), add_dq)


def add_key_block(k, h: BackwardHead, T, j0, step, dk, dv, add, is_one_pass, is_first, is_last) -> None:
    """One query head `h` x the `step` keys from j0 on: adds to the accumulators dk and dv [key][g.padded_D] fp32, and where
    `is_one_pass` (i1) dQ^T of each group of the T queries to h.s["dq"]. `is_first`, `is_last` (i1; None for a group of one head):
    zero the accumulators before, store them behind; `add` (of dk, of dv): whether (i1) to add to what is in memory."""
    g, s = h.g, h.s
    packed_keys = h.pack_keys(j0, step)
    with k.when(is_one_pass):
        micro.pack_left(k, g, s["k_rows"], packed_keys, s["k"])
    with nullcontext() if is_first is None else k.when(is_first):
        for acc in (dk, dv):
            micro.clear(k, acc, micro.round_up(k, packed_keys, g.rows) * g.padded_D)
    with k.loop(h.first_query(j0), T, g.queries) as t:
        shift, deltas = h.pack_queries(t, vnni=True)  # -lse log2(e) and delta, a lane each
        num_keys = h.num_keys(j0, packed_keys, t)  # those that the group may see
        h.probabilities(j0, t, 0, num_keys, shift, deltas, for_dkdv=True)
        h.add_dkdv(0, num_keys, dk, dv)
        with k.when(is_one_pass):
            h.add_dq(0, num_keys, s["dq"].at(t * g.acc_rows))
    with nullcontext() if is_last is None else k.when(is_last):
        h.store_dkdv(j0, packed_keys, dk, dv, add)


def attention_backward_dq(k, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream, *, batch, modes, heads,
        kv_heads, D, **shape) -> None:  # fmt: skip
    """The kernel: dq (B, T, heads * D), unless one pass did: then there are no items. A work item is a group of queries of a head,
    which accumulates dQ^T in s["dq"] over all blocks of keys. Parameters as in `attention_backward_dkdv`."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    T = shape["mask_spec"].length(k, shape["seq"])
    sequences = k.size(batch)
    g = micro.Geometry.of(k.isa, q.dtype, D)
    blocks = k.ceil_div(T, g.queries)  # groups of queries
    add = k.keep(modes[0])
    items = k.select(use_one_pass(k, sequences * kv_heads), k.int(0), sequences * heads * blocks)
    with amx.tile_registers(k, g.tiles), k.parallel_for(items) as item:
        index = item // blocks
        h = BackwardHead(k, operands, index // heads, index % heads, g=g, heads=heads, kv_heads=kv_heads, D=D, **shape)
        s = h.s
        t = (blocks - 1 - item % blocks) * g.queries  # first query; the longest items first
        shift, deltas = h.pack_queries(t, vnni=False)
        micro.clear(k, s["dq"], g.acc_rows * g.queries)
        end = k.min(t + g.queries, T) if h.length is None else h.length  # of the keys
        with k.loop(0, end, micro.KEY_BLOCK) as j0:
            packed_keys = h.pack_keys(j0)
            micro.pack_left(k, g, s["k_rows"], packed_keys, s["k"])
            num_keys = h.num_keys(j0, packed_keys, t)
            h.probabilities(j0, t, 0, num_keys, shift, deltas, for_dkdv=False)
            h.add_dq(0, num_keys, s["dq"])
        h.store_dq(t, s["dq"], add)


def append_delta(op: Op, c: Lowering, shape: dict[str, Any]) -> dict[str, Any]:
    """Append `attention_delta` into a workspace. Returns the operands that all backward kernels share; `shape`: their constants."""
    delta = part(c.workspace("delta", op.lse.nbytes)), "fp32"
    of_rows = {name: shape[name] for name in ("batch", "seq", "heads", "D", "mask_spec")}
    c.call(attention_delta, {"delta": delta, "out": op.out, "dout": op.dout}, of_rows, writes="delta")
    gradients = {"dq": op.dq, "dkeys": op.dk, "dvalues": op.dv, "dout": op.dout}
    return gradients | {"q": op.q, "keys": op.k, "values": op.v, "lse": op.lse, "delta": delta}


@lowering("attention_backward", starts="dq dk dv", views="q k v dq dk dv", also={"starts": "i32"})
def lower_attention_backward(op: Op, c: Lowering) -> None:
    """Append `attention_delta`, then the schedule: one block for short sequences, windowed, or both passes (chosen at run time)."""
    shape, length = dense_constants(op), op.fold * int(op.out.shape[1])
    shape["strides"] += tuple(t.row_stride for t in (op.dq, op.dk, op.dv))
    modes = tuple(op.modes[name] for name in ("dq", "dk", "dv"))
    g = micro.Geometry.of(c.isa, op.q.dtype, shape["D"])
    shared = op.heads > op.kv_heads
    operands, written = append_delta(op, c, shape), "dq dkeys dvalues"
    if op.plain and fits_single_block(c.isa, op.q.dtype, g.D, length, op.rate) and set(modes) == {"store"}:
        c.thread_scratch(micro.offsets(backward_units(g, shared))[1])
        c.call(attention_backward_single_block, operands, shape, writes=written)
        return
    operands |= {"starts": op.starts, "stream": op.stream}
    constants = {**shape, "rate": op.rate, "modes": modes}
    if op.bounded:
        constants["length"] = min(length, CHUNK)
        schedules = (attention_backward_windowed,)
    else:
        constants["length"] = length
        schedules = (attention_backward_dkdv, attention_backward_dq)
    kinds = {"shared": shared, "bounded": op.bounded, "capped": bool(op.softcap)}
    c.thread_scratch(micro.offsets(scratch_units(g, op.rate, constants["length"], **kinds))[1])
    for emit in schedules:
        c.call(emit, operands, constants, writes=written)
