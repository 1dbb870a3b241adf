"""Attention backward: probabilities are computed again from lse, block by block.

Shapes: q, dq, out, dout (B, T, heads * D), keys, values and their gradients (B, T, kv_heads * D), lse, delta (B, heads, T) fp32.
Rows of q, keys, values and of their gradients may lie any `strides` apart. With P = exp(s - lse), M the dropout multipliers and
delta = sum(dout * out):   dv = (P M)^T dout,   ds = P (M (dout v^T) - delta),   dq = ds k,   dk = ds^T q.

Two schedules give the same bits, for every sum runs over the same blocks in the same order:

    one pass     a claim is a head of keys: five products a block; dq of a whole head waits in the thread's scratch
    two passes   a claim is a block of keys (dk, dv), then a block of queries (dq): seven products, but many claims

The run-time shape and the number of threads decide, so that a single long sequence keeps every thread busy. Windows and documents
have a schedule of their own (attention_segments.py), of the same parts.

A head of keys that serves several heads of queries takes them in turn, and its dk and dv are the sums over all of them: in one
pass those of all its blocks wait in scratch until the last one has been added.
"""

from __future__ import annotations

from contextlib import nullcontext

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.attention.attention_blocks import (
    KEYS,
    Geometry,
    clear,
    dim_size,
    offsets,
    round_up,
    weave_left,
)
from barellm.cpu.kernels.attention.attention_bounds import dense_sizes
from barellm.cpu.kernels.attention.attention_head import Head, scratch_units
from barellm.cpu.kernels.attention.attention_segments import SEGMENT, attention_backward_segments
from barellm.cpu.kernels.attention.attention_short import attention_backward_short, backward_units, short
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Value
from barellm.program.ops.base import Op
from barellm.runtime.lowering import part

ONE_PASS, TWO_PASSES = 5, 7  # products a block
FEW_KEYS = 64  # of a claim of two passes, where claims of KEYS are too few to be dealt evenly


def attention_delta(k: KernelBuilder, delta, out, dout, *, batch, seq, heads, D, bounds) -> None:
    """delta = sum(dout * out) over each head's channels."""
    C, T = heads * D, bounds.length(k, seq)
    with k.parallel_range(dim_size(k, batch) * T, 32) as (begin, end), k.loop(begin, end) as token:
        target = delta.at(token // T * (heads * T) + token % T)
        with k.loop(0, heads) as head:
            a, b = out.at(token * C + head * D), dout.at(token * C + head * D)
            total = k.to(0.0, k.vec)
            for c, mask in k.columns(D):
                total = k.fma(a.load(c, mask), b.load(c, mask), total)
            target.put(k.sum(total), head * T)


def one_pass(k: KernelBuilder, claims: Value) -> Value:
    """Whether the heads alone occupy the threads well enough."""
    threads = k.threads
    rounds = (claims + (threads - 1)) // threads
    return (rounds * threads * ONE_PASS) <= (claims * TWO_PASSES)


def attention_backward_keys(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream,
    *, batch, modes, heads, kv_heads, D, **shape,
) -> None:  # fmt: skip
    """Compute dk and dv, and in one pass also dq. `modes` and the six strides are those of q, k and v in that order."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    T, count = shape["bounds"].length(k, shape["seq"]), dim_size(k, batch) * kv_heads
    together = one_pass(k, count)
    enough = count * k.ceil_div(T, KEYS) >= k.threads * 4
    step = k.select(together | enough, k.int(KEYS), FEW_KEYS)
    blocks = k.ceil_div(T, step)
    keep = [k.keep(mode) for mode in modes]
    per_head = k.select(together, k.int(1), blocks)
    group = heads // kv_heads
    with amx.tile_registers(k, Geometry.of(k.isa, q.dtype, D).tiles), k.parallel_for(count * per_head) as claim:
        index, place = claim // per_head, claim % per_head
        # The first block is the longest: a long and a short one in turn, for neighbouring claims are one thread's.
        start = k.select((place & 1).equals(0), place >> 1, per_head - 1 - (place >> 1))
        stop = k.select(together, blocks, start + 1)
        with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as member:
            h = Head(
                k,
                operands,
                index // kv_heads,
                index % kv_heads * group + member,
                heads=heads,
                kv_heads=kv_heads,
                D=D,
                **shape,
            )
            g, s = h.g, h.s
            first, last = (None, None) if group == 1 else (member.equals(0), member.equals(group - 1))
            with k.when(together):
                clear(k, s["dq"], k.ceil_div(T, g.queries) * (g.deep * g.queries))
            with k.loop(start, stop) as block:
                j0 = block * step
                sums = [
                    s[name] if group == 1 else s[name].at((block - start) * (KEYS * g.wide)) for name in ("dk", "dv")
                ]
                seen_keys = h.stage_keys(j0, step)
                with k.when(together):
                    weave_left(k, g, s["k_rows"], seen_keys, s["k"])
                with nullcontext() if first is None else k.when(first):
                    for acc in sums:
                        clear(k, acc, round_up(k, seen_keys, g.rows) * g.wide)
                with k.loop(h.first_query(j0), T, g.queries) as t:
                    shift, deltas = h.stage_queries(t, woven=True)
                    seen = h.seen(j0, seen_keys, t)
                    h.probabilities(j0, t, 0, seen, shift, deltas, straight=True)
                    h.add_dkdv(0, seen, sums[0], sums[1])
                    with k.when(together):
                        h.add_dq(0, seen, s["dq"].at(t * g.deep))
                with nullcontext() if last is None else k.when(last):
                    h.store_dkdv(j0, seen_keys, sums[0], sums[1], (keep[1], keep[2]))
            with k.when(together), k.loop(0, T, g.queries) as t:
                h.store_dq(t, s["dq"].at(t * g.deep), keep[0])


def attention_backward_queries(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream,
    *, batch, modes, heads, kv_heads, D, **shape,
) -> None:  # fmt: skip
    """Compute dq, where it was not computed together with dk and dv."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    T, sequences = shape["bounds"].length(k, shape["seq"]), dim_size(k, batch)
    geometry = Geometry.of(k.isa, q.dtype, D)
    queries = geometry.queries
    blocks = k.ceil_div(T, queries)
    keep = k.keep(modes[0])
    claims = k.select(one_pass(k, sequences * kv_heads), k.int(0), sequences * heads * blocks)
    with amx.tile_registers(k, geometry.tiles), k.parallel_for(claims) as claim:
        index = claim // blocks
        h = Head(k, operands, index // heads, index % heads, heads=heads, kv_heads=kv_heads, D=D, **shape)
        g, s = h.g, h.s
        t = (blocks - 1 - claim % blocks) * queries
        shift, deltas = h.stage_queries(t, woven=False)
        clear(k, s["dq"], g.deep * queries)
        end = k.min(t + queries, T) if h.length is None else h.length
        with k.loop(0, end, KEYS) as j0:
            seen_keys = h.stage_keys(j0)
            weave_left(k, g, s["k_rows"], seen_keys, s["k"])
            seen = h.seen(j0, seen_keys, t)
            h.probabilities(j0, t, 0, seen, shift, deltas, straight=False)
            h.add_dq(0, seen, s["dq"])
        h.store_dq(t, s["dq"], keep)


@lowering("attention_backward", starts="dq dk dv", views="q k v dq dk dv", also={"starts": "i32"})
def lower_attention_backward(op: Op, c: Lowering) -> None:
    shape, length = dense_sizes(op), op.fold * int(op.out.shape[1])
    shape["strides"] += tuple(t.row_stride for t in (op.dq, op.dk, op.dv))
    modes = tuple(op.modes[name] for name in ("dq", "dk", "dv"))
    g = Geometry.of(c.isa, op.q.dtype, shape["D"])
    shared = op.heads > op.kv_heads
    delta = c.workspace("delta", op.lse.nbytes)
    of_rows = {name: shape[name] for name in ("batch", "seq", "heads", "D", "bounds")}
    c.call(attention_delta, {"delta": (part(delta), "fp32"), "out": op.out, "dout": op.dout}, of_rows, writes="delta")
    operands = {
        **{"dq": op.dq, "dkeys": op.dk, "dvalues": op.dv, "q": op.q, "keys": op.k, "values": op.v},
        **{"dout": op.dout, "lse": op.lse, "delta": (part(delta), "fp32")},
    }
    written = "dq dkeys dvalues"
    if op.plain and short(c.isa, op.q.dtype, g.D, length, op.rate) and set(modes) == {"store"}:
        del shape["bounds"]
        c.thread_scratch(offsets(backward_units(g, shared))[1])
        c.call(attention_backward_short, operands, shape, writes=written)
        return
    operands |= {"starts": op.starts, "stream": op.stream}
    constants = {**shape, "rate": op.rate, "modes": modes}
    bounded = op.window is not None or op.starts is not None
    if bounded:
        constants["length"] = min(length, SEGMENT)
        schedules = (attention_backward_segments,)
    else:
        constants["length"] = length
        schedules = (attention_backward_keys, attention_backward_queries)
    c.thread_scratch(offsets(scratch_units(g, op.rate, constants["length"], shared=shared, bounded=bounded))[1])
    for emit in schedules:
        c.call(emit, operands, constants, writes=written)
