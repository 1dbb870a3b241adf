"""Attention backward: probabilities are computed again from lse, block by block.

Shapes: qkv, dqkv (B, T, 3C), out, dout (B, T, C), lse, delta (B, heads, T) fp32; C = heads * D. With P = exp(s - lse), M the
dropout multipliers and delta = sum(dout * out):   dv = (P M)^T dout,   ds = P (M (dout v^T) - delta),   dq = ds k,   dk = ds^T q.

Two schedules give the same bits, for every sum runs over the same blocks in the same order:

    one pass     a claim is a head: five products a block; dq of the whole head waits in the thread's scratch
    two passes   a claim is a block of keys (dk, dv), then a block of queries (dq): seven products, but many claims

The run-time shape and the number of threads decide, so that a single long sequence keeps every thread busy.
"""

from __future__ import annotations

from math import e, log2, sqrt

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
from barellm.runtime.lowering import packed, part

ONE_PASS, TWO_PASSES = 5, 7  # products a block


def scratch_units(g: Geometry, rate: float, blocks: int) -> dict[str, int]:
    """`blocks`: of queries whose dq waits."""
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
        "dk": KEYS * g.wide,
        "dv": KEYS * g.wide,
        "out": g.queries * g.wide,
        "dq": g.transposed_units(blocks),
    }


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


class Head:
    """One head of one sequence: its rows in memory, and the blocks in scratch that both passes fill alike."""

    def __init__(self, k, dqkv, qkv, dout, lse, delta, index: Value, *, seq, heads, D, rate, stream, length) -> None:
        self.k, self.g = k, Geometry.of(k.isa, qkv.dtype, D)
        self.rate = rate
        self.s = blocks_of(k, scratch_units(self.g, rate, -(-length // self.g.queries)))
        C, self.T = heads * D, extent(k, seq)
        sequence, self.head = index // heads, index % heads
        token = sequence * self.T
        row, d_row = (p.at(token * (3 * C) + self.head * D) for p in (qkv, dqkv))
        self.q, self.keys, self.values = (Rows(row.at(n * C), 3 * C) for n in range(3))
        self.dq, self.dk, self.dv = (Rows(d_row.at(n * C), 3 * C) for n in range(3))
        self.dout = Rows(dout.at(token * C + self.head * D), C)
        self.lse, self.delta = lse.at(index * self.T), delta.at(index * self.T)
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
    k: KernelBuilder, dqkv, qkv, dout, lse, delta, stream, *, batch, seq, heads, D, rate, length, mode_dqkv
) -> None:
    """dk and dv; in one pass also dq."""
    T, count = extent(k, seq), extent(k, batch) * heads
    together = one_pass(k, count)
    blocks = k.ceil_div(T, KEYS)
    keep = k.keep(mode_dqkv)
    per_head = k.select(together, k.int(1), blocks)
    with k.claim_each(count * per_head) as claim:
        h = Head(k, dqkv, qkv, dout, lse, delta, claim // per_head, seq=seq, heads=heads, D=D, rate=rate, stream=stream,
                 length=length)  # fmt: skip
        g, s = h.g, h.s
        start = claim % per_head
        with k.when(together):
            clear(k, s["dq"], k.ceil_div(T, g.queries) * (g.D * g.queries))
        with k.loop(start, k.select(together, blocks, start + 1)) as block:
            j0 = block * KEYS
            keys = h.stage_keys(j0)
            with k.when(together):
                weave(k, g, s["k_rows"], round_up(k, keys, g.pair), s["k"])
            for name in ("dk", "dv"):
                clear(k, s[name], round_up(k, keys, g.rows) * g.wide)
            with k.loop(j0 // g.queries * g.queries, T, g.queries) as t:
                shift, deltas = h.stage_queries(t, woven=True)
                seen = k.min(keys, t + g.queries - j0)
                h.probabilities(j0, t, seen, shift, deltas, straight=True)
                add_straight(k, g, s["dv"], s["p"], s["do"], seen)
                add_straight(k, g, s["dk"], s["ds"], s["q"], seen)
                with k.when(together):
                    h.add_dq(t, seen, s["dq"].at(t * g.D))
            unstage(k, g, s["dv"], keys, h.dv.start(j0), 1.0, keep)
            unstage(k, g, s["dk"], keys, h.dk.start(j0), 1 / sqrt(D), keep)
        with k.when(together), k.loop(0, T, g.queries) as t:
            h.store_dq(t, s["dq"].at(t * g.D), keep)


def attention_backward_queries(
    k: KernelBuilder, dqkv, qkv, dout, lse, delta, stream, *, batch, seq, heads, D, rate, length, mode_dqkv
) -> None:
    """dq, where it was not computed with dk and dv."""
    T, count = extent(k, seq), extent(k, batch) * heads
    queries = Geometry.of(k.isa, qkv.dtype, D).queries
    blocks = k.ceil_div(T, queries)
    keep = k.keep(mode_dqkv)
    with k.claim_each(k.select(one_pass(k, count), k.int(0), count * blocks)) as claim:
        h = Head(k, dqkv, qkv, dout, lse, delta, claim // blocks, seq=seq, heads=heads, D=D, rate=rate, stream=stream,
                 length=length)  # fmt: skip
        g, s = h.g, h.s
        t = (blocks - 1 - claim % blocks) * queries
        shift, deltas = h.stage_queries(t, woven=False)
        clear(k, s["dq"], g.D * queries)
        with k.loop(0, k.min(t + queries, T), KEYS) as j0:
            keys = h.stage_keys(j0)
            weave(k, g, s["k_rows"], round_up(k, keys, g.pair), s["k"])
            seen = k.min(keys, t + queries - j0)
            h.probabilities(j0, t, seen, shift, deltas, straight=False)
            h.add_dq(t, seen, s["dq"])
        h.store_dq(t, s["dq"], keep)


@lowering("attention_backward", starts="dq dk dv", alike="dq dk dv", views="q k v dq dk dv")
def lower_attention_backward(op: Op, c: Lowering) -> None:
    shape = sizes(op.out, op.heads)
    length, qkv, mode = int(op.out.shape[1]), packed(op.q, op.k, op.v), op.modes["dq"]
    g = Geometry.of(c.isa, qkv.dtype, shape["D"])
    delta = c.scratch("delta", op.lse.nbytes)
    c.call(attention_delta, {"delta": (part(delta), "fp32"), "out": op.out, "dout": op.dout}, shape, writes="delta")
    operands = {
        "dqkv": packed(op.dq, op.dk, op.dv),
        "qkv": qkv,
        "dout": op.dout,
        "lse": op.lse,
        "delta": (part(delta), "fp32"),
    }
    if short(c.isa, qkv.dtype, g.D, length, op.rate) and mode == "store":
        c.private(offsets(backward_units(g))[1])
        c.call(attention_backward_short, operands, shape, writes="dqkv")
        return
    c.private(offsets(scratch_units(g, op.rate, -(-length // g.queries)))[1])
    operands["stream"] = op.stream
    constants = {**shape, "rate": op.rate, "length": length, "mode_dqkv": mode}
    for emit in (attention_backward_keys, attention_backward_queries):
        c.call(emit, operands, constants, writes="dqkv")
