"""Attention backward: probabilities are computed again from lse, block by block.

Shapes: q, dq, out, dout (B, T, heads * D), keys, values and their gradients (B, T, kv_heads * D), lse, delta (B, heads, T) fp32.
Rows of q, keys, values and of their gradients may lie any `strides` apart. With P = exp(s - lse), M the dropout multipliers and
delta = sum(dout * out):   dv = (P M)^T dout,   ds = P (M (dout v^T) - delta),   dq = ds k,   dk = ds^T q.

Two schedules give the same bits, for every sum runs over the same blocks in the same order:

    one pass     a claim is a head of keys: five products a block; dq of a whole head waits in the thread's scratch
    two passes   a claim is a block of keys (dk, dv), then a block of queries (dq): seven products, but many claims

The run-time shape and the number of threads decide, so that a single long sequence keeps every thread busy.

A head of keys that serves several heads of queries takes them in turn, and its dk and dv are the sums over all of them: in one
pass those of all its blocks wait in scratch until the last one has been added.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import e, log2, sqrt
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.attention_blocks import (
    KEYS,
    Dropout,
    Geometry,
    Rows,
    add_straight,
    add_transposed,
    blocks_of,
    clear,
    exp2_nonpositive,
    extent,
    offsets,
    pack_units,
    put_along,
    round_up,
    scores,
    serving,
    sizes,
    stage,
    straighten,
    turn,
    unstage,
    visible,
    weave,
)
from barellm.cpu.kernels.attention_short import attention_backward_short, backward_units, short
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.base import Op
from barellm.runtime.lowering import part

ONE_PASS, TWO_PASSES = 5, 7  # products a block


def scratch_units(g: Geometry, rate: float, length: int, shared: bool) -> dict[str, int]:
    """`length`: queries whose dq may wait, and where the keys are `shared` by heads, keys whose dk and dv may."""
    waiting = round_up_to(length, KEYS) if shared else KEYS
    return {
        "rows": g.rows_units(g.queries),
        "q_turned": g.turned_units,
        "do_turned": g.turned_units,
        "q": g.woven_units(g.queries) + g.lanes,
        "do": g.woven_units(g.queries) + g.lanes,
        "k_rows": g.rows_units(KEYS),
        "v_rows": g.rows_units(KEYS),
        "k": g.woven_units(KEYS),
        "p_tile": g.rows * g.queries,
        "p": KEYS * g.queries // g.pair,  # (keys, queries) in units along the queries
        "ds": KEYS * g.queries // g.pair,
        "ds_woven": KEYS * g.queries // g.pair,  # in units along the keys
        "keep": KEYS * g.queries if rate else 0,
        "dk": waiting * g.wide,
        "dv": waiting * g.wide,
        "out": g.queries * g.wide,
        "dq": g.transposed_units(-(-length // g.queries)),
    }


def round_up_to(n: int, step: int) -> int:
    return -(-n // step) * step


def attention_delta(k: KernelBuilder, delta, out, dout, *, batch, seq, heads, D) -> None:
    """delta = sum(dout * out) over each head's channels."""
    C, T = heads * D, extent(k, seq)
    with k.claim(extent(k, batch) * T, 32) as (begin, end), k.loop(begin, end) as token:
        target = delta.at(token // T * (heads * T) + token % T)
        with k.loop(0, heads) as head:
            a, b = out.at(token * C + head * D), dout.at(token * C + head * D)
            total = k.to(0.0, k.vec)
            for c, mask in k.columns(D):
                total = k.fma(a.load(c, mask), b.load(c, mask), total)
            target.put(k.sum(total), head * T)


Operands = tuple[Any, ...]  # q, keys, values, their gradients, dout, lse, delta: pointers; stream


class Head:
    """One head of one sequence: its rows in memory, and the blocks in scratch that both passes fill alike."""

    def __init__(
        self, k: KernelBuilder, operands: Operands, sequence: Value, head: Value,
        *, seq, heads, kv_heads, D, strides, rate, length,
    ) -> None:  # fmt: skip
        q, keys, values, dq, dkeys, dvalues, dout, lse, delta, stream = operands
        self.k, self.g = k, Geometry.of(k.isa, q.dtype, D)
        self.rate = rate
        self.s = blocks_of(k, scratch_units(self.g, rate, length, heads > kv_heads))
        self.T, self.head = extent(k, seq), head
        token, kv_head = sequence * self.T, serving(head, heads, kv_heads)
        tensors = zip((q, keys, values, dq, dkeys, dvalues), 2 * (head, kv_head, kv_head), strides, strict=True)
        rows = [Rows.of(p, token, h, D=D, stride=stride) for p, h, stride in tensors]
        self.q, self.keys, self.values, self.dq, self.dk, self.dv = rows
        self.dout = Rows.of(dout, token, head, D=D, stride=heads * D)
        self.lse, self.delta = (p.at((sequence * heads + head) * self.T) for p in (lse, delta))
        self.dropout = Dropout(rate, stream, heads)
        self.key = self.dropout.key(k, sequence) if rate else None

    def stage_keys(self, j0: Value) -> Value:
        """K and V from j0 on as rows; returns how many there are."""
        k, g, s = self.k, self.g, self.s
        count = k.min(self.T - j0, KEYS)
        stage(k, g, self.keys.start(j0), count, round_up(k, count, g.rows), s["k_rows"])
        stage(k, g, self.values.start(j0), count, round_up(k, count, g.rows), s["v_rows"])
        return count

    def stage_queries(self, t: Value, *, woven: bool) -> tuple[list[Value], list[Value]]:
        """Q and dO of a block turned (and woven); -lse and delta of its queries in lanes."""
        k, g, s = self.k, self.g, self.s
        count = k.min(self.T - t, g.queries)
        for source, name in ((self.q, "q"), (self.dout, "do")):
            rows = s["rows"] if g.pair == 2 or not woven else s[name]
            stage(k, g, source.start(t), count, g.queries, rows)
            turn(k, g, rows, s[name + "_turned"])
            if woven:
                weave(k, g, rows, g.queries, s[name])
        masks = [k.mask_first(count - v * g.lanes) for v in range(g.vectors)]
        shift = [self.lse.load(t + v * g.lanes, mask) * -log2(e) for v, mask in enumerate(masks)]
        return shift, [self.delta.load(t + v * g.lanes, mask) for v, mask in enumerate(masks)]

    def probabilities(
        self, j0: Value, t: Value, seen: Value, shift: list[Value], delta: list[Value], *, straight: bool
    ) -> None:
        """dS of the first `seen` keys of a block in units along the keys; where `straight`, P M and dS along the queries."""
        k, g, s = self.k, self.g, self.s
        per_row = g.queries // g.pair
        if self.rate:
            self.dropout.fill(k, g, s["keep"], self.key, self.head, t, j0, seen)
        with k.loop(0, seen, g.rows) as j:
            self._probability_tile(j, j0 + j, t, shift)
            dp = scores(k, g, s["v_rows"], j, s["do_turned"])
            ds = []
            for r in range(g.rows):
                p = [s["p_tile"].load(r * g.queries + v * g.lanes) for v in range(g.vectors)]
                if self.rate:
                    keep = [s["keep"].at((j + r) * g.queries).load(v * g.lanes) for v in range(g.vectors)]
                    kept, dp[r] = ([x * m for x, m in zip(row, keep, strict=True)] for row in (p, dp[r]))
                else:
                    kept = p
                ds.append([x * (y - d) for x, y, d in zip(p, dp[r], delta, strict=True)])
                if straight:
                    put_along(k, g, s["p"].at((j + r) * per_row), kept)
                if straight or g.pair == 1:
                    put_along(k, g, s["ds"].at((j + r) * per_row), ds[r])
            if g.pair == 2:
                for r in range(0, g.rows, 2):
                    target = s["ds_woven"].at(((j + r) >> 1) * g.queries)
                    for v in range(g.vectors):
                        target.store(pack_units(k, g, ds[r][v], ds[r + 1][v]), v * g.lanes)

    def _probability_tile(self, j: Value, key: Value, t: Value, shift: list[Value]) -> None:
        """P of g.rows keys, 0 where the key is later than the query."""
        k, g = self.k, self.g
        unit = log2(e) / sqrt(g.D)
        tile = scores(k, g, self.s["k_rows"], j, self.s["q_turned"])
        p = [[exp2_nonpositive(k, g, k.fma(x, unit, shift[v])) for v, x in enumerate(row)] for row in tile]

        def put(values: list[list[Value]]) -> None:
            for r, row in enumerate(values):
                for v, x in enumerate(row):
                    self.s["p_tile"].store(x, r * g.queries + v * g.lanes)

        crosses = (key + (g.rows - 1)) > t
        with k.when(crosses):
            sees = visible(k, g, key, t)
            put([[k.select(sees(r, v), x, 0.0) for v, x in enumerate(row)] for r, row in enumerate(p)])
        with k.otherwise(crosses):
            put(p)

    def add_dq(self, t: Value, seen: Value, acc: Pointer) -> None:
        """dQ^T of the queries from t on, before scaling, += K^T dS^T."""
        g, s = self.g, self.s
        keys, ds = (s["k"], s["ds_woven"]) if g.pair == 2 else (s["k_rows"], s["ds"])
        add_transposed(self.k, g, acc, keys, ds, seen)

    def store_dq(self, t: Value, acc: Pointer, keep: Value | None) -> None:
        k, g, s = self.k, self.g, self.s
        scale = [k.to(1 / sqrt(g.D), k.vec)] * g.vectors
        straighten(k, g, acc, s["out"], scale)
        unstage(k, g, s["out"], k.min(self.T - t, g.queries), self.dq.start(t), 1.0, keep)


def one_pass(k: KernelBuilder, claims: Value) -> Value:
    """Whether the heads alone occupy the threads well enough."""
    threads = k.threads
    rounds = (claims + (threads - 1)) // threads
    return (rounds * threads * ONE_PASS) <= (claims * TWO_PASSES)


def attention_backward_keys(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, stream,
    *, batch, modes, heads, kv_heads, D, **shape,
) -> None:  # fmt: skip
    """dk and dv; in one pass also dq. `modes` and the six strides: of q, k and v in that order."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, stream)
    T, count = extent(k, shape["seq"]), extent(k, batch) * kv_heads
    together = one_pass(k, count)
    blocks = k.ceil_div(T, KEYS)
    keep = [k.keep(mode) for mode in modes]
    per_head = k.select(together, k.int(1), blocks)
    group = heads // kv_heads
    with k.claim_each(count * per_head) as claim:
        index, start = claim // per_head, claim % per_head
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
                clear(k, s["dq"], k.ceil_div(T, g.queries) * (g.D * g.queries))
            with k.loop(start, stop) as block:
                j0 = block * KEYS
                sums = [
                    s[name] if group == 1 else s[name].at((block - start) * (KEYS * g.wide)) for name in ("dk", "dv")
                ]
                seen_keys = h.stage_keys(j0)
                with k.when(together):
                    weave(k, g, s["k_rows"], round_up(k, seen_keys, g.pair), s["k"])
                with nullcontext() if first is None else k.when(first):
                    for acc in sums:
                        clear(k, acc, round_up(k, seen_keys, g.rows) * g.wide)
                with k.loop(j0 // g.queries * g.queries, T, g.queries) as t:
                    shift, deltas = h.stage_queries(t, woven=True)
                    seen = k.min(seen_keys, t + g.queries - j0)
                    h.probabilities(j0, t, seen, shift, deltas, straight=True)
                    add_straight(k, g, sums[1], s["p"], s["do"], seen)
                    add_straight(k, g, sums[0], s["ds"], s["q"], seen)
                    with k.when(together):
                        h.add_dq(t, seen, s["dq"].at(t * g.D))
                with nullcontext() if last is None else k.when(last):
                    unstage(k, g, sums[1], seen_keys, h.dv.start(j0), 1.0, keep[2])
                    unstage(k, g, sums[0], seen_keys, h.dk.start(j0), 1 / sqrt(D), keep[1])
            with k.when(together), k.loop(0, T, g.queries) as t:
                h.store_dq(t, s["dq"].at(t * g.D), keep[0])


def attention_backward_queries(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, stream,
    *, batch, modes, heads, kv_heads, D, **shape,
) -> None:  # fmt: skip
    """dq, where it was not computed with dk and dv."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, stream)
    T, sequences = extent(k, shape["seq"]), extent(k, batch)
    queries = Geometry.of(k.isa, q.dtype, D).queries
    blocks = k.ceil_div(T, queries)
    keep = k.keep(modes[0])
    with k.claim_each(k.select(one_pass(k, sequences * kv_heads), k.int(0), sequences * heads * blocks)) as claim:
        index = claim // blocks
        h = Head(k, operands, index // heads, index % heads, heads=heads, kv_heads=kv_heads, D=D, **shape)
        g, s = h.g, h.s
        t = (blocks - 1 - claim % blocks) * queries
        shift, deltas = h.stage_queries(t, woven=False)
        clear(k, s["dq"], g.D * queries)
        with k.loop(0, k.min(t + queries, T), KEYS) as j0:
            seen_keys = h.stage_keys(j0)
            weave(k, g, s["k_rows"], round_up(k, seen_keys, g.pair), s["k"])
            seen = k.min(seen_keys, t + queries - j0)
            h.probabilities(j0, t, seen, shift, deltas, straight=False)
            h.add_dq(t, seen, s["dq"])
        h.store_dq(t, s["dq"], keep)


@lowering("attention_backward", starts="dq dk dv", views="q k v dq dk dv")
def lower_attention_backward(op: Op, c: Lowering) -> None:
    if not op.plain:
        raise ValueError(f"the cpu backend's {op.name} knows no windows, documents or paired heads")
    shape, length = sizes(op), int(op.out.shape[1])
    shape["strides"] += tuple(t.row_stride for t in (op.dq, op.dk, op.dv))
    modes = tuple(op.modes[name] for name in ("dq", "dk", "dv"))
    g = Geometry.of(c.isa, op.q.dtype, shape["D"])
    shared = op.heads > op.kv_heads
    delta = c.scratch("delta", op.lse.nbytes)
    of_rows = {name: shape[name] for name in ("batch", "seq", "heads", "D")}
    c.call(attention_delta, {"delta": (part(delta), "fp32"), "out": op.out, "dout": op.dout}, of_rows, writes="delta")
    operands = {
        **{"dq": op.dq, "dkeys": op.dk, "dvalues": op.dv, "q": op.q, "keys": op.k, "values": op.v},
        **{"dout": op.dout, "lse": op.lse, "delta": (part(delta), "fp32")},
    }
    written = "dq dkeys dvalues"
    if short(c.isa, op.q.dtype, g.D, length, op.rate) and set(modes) == {"store"}:
        c.private(offsets(backward_units(g, shared))[1])
        c.call(attention_backward_short, operands, shape, writes=written)
        return
    c.private(offsets(scratch_units(g, op.rate, length, shared))[1])
    operands["stream"] = op.stream
    constants = {**shape, "rate": op.rate, "length": length, "modes": modes}
    for emit in (attention_backward_keys, attention_backward_queries):
        c.call(emit, operands, constants, writes=written)
