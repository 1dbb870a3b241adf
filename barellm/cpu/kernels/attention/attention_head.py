"""The parts that the schedules of attention's backward pass share: one head of one sequence, with its blocks in a thread's
scratch.

Shapes and formulas are those of attention_backward.py, and blocks those of attention_blocks.py: KEYS keys beside a group of
g.queries queries.
"""

from __future__ import annotations

from collections.abc import Callable
from math import e as E
from math import log2
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.attention.attention_blocks import (
    KEYS,
    Dropout,
    Geometry,
    Lower,
    add_straight,
    add_transposed,
    blocks_of,
    crosses,
    exp2_nonpositive,
    pack_units,
    put_along,
    round_up,
    scores,
    scores_of_tiles,
    serving,
    stage,
    straighten,
    turn,
    unstage,
    visible,
    weave,
)
from barellm.cpu.kernels.attention.attention_bounds import Bounds, Reach
from barellm.cpu.kernels.attention.attention_tiles import Seen, each_pair, whole_tiles
from barellm.cpu.lang import Pointer, Value


def scratch_units(g: Geometry, rate: float, length: int, *, shared: bool, bounded: bool) -> dict[str, int]:
    """The blocks of scratch, in units. `length` is the number of queries whose dq may wait there. Where heads share keys
    (`shared`), it is also the number of keys whose dk and dv may wait."""
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
        "dp_tile": g.rows * g.queries if g.tiles else 0,
        "p": KEYS * g.queries // g.pair,  # (keys, queries) in units along the queries
        "ds": KEYS * g.queries // g.pair,
        "ds_woven": KEYS * g.queries // g.pair,  # in units along the keys
        "keep": KEYS * g.queries if rate else 0,
        "dk": waiting * g.wide,
        "dv": waiting * g.wide,
        "out": g.queries * g.wide,
        "dq": g.transposed_units(-(-length // g.queries)),
        "least": g.queries if bounded else 0,
    }


def round_up_to(n: int, step: int) -> int:
    return -(-n // step) * step


Operands = tuple[Any, ...]  # q, keys, values, their gradients, dout, lse, delta, starts: pointers; stream


class Head:
    """One head of one sequence: its rows in memory, and the blocks in scratch that every schedule fills alike."""

    def __init__(
        self, k: KernelBuilder, operands: Operands, sequence: Value, head: Value,
        *, seq, heads, kv_heads, D, strides, rate, length, bounds: Bounds,
    ) -> None:  # fmt: skip
        q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream = operands
        self.k, self.g = k, self.geometry(k.isa, q.dtype, D)
        self.rate = rate
        self.root, self.unit = bounds.root(k, D), bounds.unit(k, D)
        self.T, self.head = bounds.length(k, seq), head
        self.length = None if bounds.causal else self.T  # the keys that every query sees
        token, counts = sequence * self.T, 2 * (heads, kv_heads, kv_heads)
        tensors = zip((q, keys, values, dq, dkeys, dvalues), counts, strides, strict=True)
        rows = [bounds.rows(p, token, serving(head, heads, n), D=D, heads=n, stride=stride) for p, n, stride in tensors]
        self.q, self.keys, self.values, self.dq, self.dk, self.dv = rows
        self.dout = bounds.rows(dout, token, head, D=D, heads=heads, stride=bounds.fold * heads * D)
        self.lse, self.delta = (p.at((sequence * heads + head) * self.T) for p in (lse, delta))
        self.reach = Reach.of(k, bounds, self.T, starts, sequence)
        shape = {"shared": heads > kv_heads, "bounded": self.reach is not None}
        self.s = blocks_of(k, self.units(rate, length, **shape))
        self.dropout = Dropout(rate, stream, heads)
        self.key = self.dropout.key(k, sequence) if rate else None

    def geometry(self, isa: ISA, dtype: str, D: int) -> Geometry:
        return Geometry.of(isa, dtype, D)

    def units(self, rate: float, length: int, **shape: bool) -> dict[str, int]:
        """Its blocks of scratch."""
        return scratch_units(self.g, rate, length, **shape)

    def stage_keys(self, j0: Value, most: Any = KEYS) -> Value:
        """K and V from j0 on as rows; returns how many there are, KEYS at most."""
        k, g, s = self.k, self.g, self.s
        count = k.min(self.T - j0, most)
        stage(k, g, self.keys.start(j0), count, round_up(k, count, g.rows), s["k_rows"])
        stage(k, g, self.values.start(j0), count, round_up(k, count, g.rows), s["v_rows"])
        return count

    def first_query(self, j0: Value) -> Any:
        """The first group of queries of which one sees a key from j0 on."""
        return j0 // self.g.queries * self.g.queries if self.length is None else 0

    def seen(self, j0: Value, count: Value, t: Value) -> Value:
        """How many of the `count` keys from j0 on the queries of the group from t on compute."""
        some = self.k.min(count, t + self.g.queries - j0) if self.length is None else count
        return whole_tiles(self.k, self.g, some)

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
        shift = [self.lse.load(t + v * g.lanes, mask) * -log2(E) for v, mask in enumerate(masks)]
        return shift, [self.delta.load(t + v * g.lanes, mask) for v, mask in enumerate(masks)]

    def lower(self, t: Value) -> Lower | None:
        """The bounds of the queries from t on, where they have any."""
        if self.reach is None:
            return None
        least = self.s["least"].as_dtype("i32")
        self.reach.fill(self.k, self.g, t, least)
        return self.reach.lower(self.k, self.g, t, least)

    def probabilities(
        self, j0: Value, t: Value, begin: Any, seen: Value, shift: list[Value], delta: list[Value],
        *, straight: bool, lower: Lower | None = None,
    ) -> None:  # fmt: skip
        """dS of the keys [begin, seen) of a block in units along the keys; where `straight`, P M and dS along the queries."""
        k, g, s = self.k, self.g, self.s
        per_row = g.queries // g.pair
        if self.rate:
            self.dropout.fill(k, g, s["keep"], self.key, self.head, t, j0, seen)
        if g.tiles:
            self._probabilities_of_tiles(j0, t, begin, seen, shift, delta, straight=straight, lower=lower)
            return
        with k.loop(begin, seen, g.rows) as j:
            self._probability_tile(j, j0 + j, t, shift, lower)
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
            self.keep_ds(j, ds)

    def _probabilities_of_tiles(
        self, j0: Value, t: Value, begin: Any, seen: Value, shift: list[Value], delta: list[Value],
        *, straight: bool, lower: Lower | None,
    ) -> None:  # fmt: skip
        """The same of tiles that lie in memory, two rows at a time."""
        k, g, s = self.k, self.g, self.s
        per_row = g.queries // g.pair
        with k.loop(begin, seen, g.rows) as j:
            scores_of_tiles(k, g, s["k_rows"], j, s["q_turned"], s["p_tile"])
            scores_of_tiles(k, g, s["v_rows"], j, s["do_turned"], s["dp_tile"])

            def rows(r: Value, sees: Seen | None, j: Value = j) -> None:
                ds: list[list[Value]] = []
                for i in (r, r + 1):
                    at = i * g.queries
                    p = [
                        exp2_nonpositive(k, g, k.fma(s["p_tile"].load(at + v * g.lanes), self.unit, shift[v]))
                        for v in range(g.vectors)
                    ]
                    if sees is not None:
                        p = [k.select(sees(i, v), x, 0.0) for v, x in enumerate(p)]
                    dp = [s["dp_tile"].load(at + v * g.lanes) for v in range(g.vectors)]
                    kept = p
                    if self.rate:
                        keep = [s["keep"].at((j + i) * g.queries).load(v * g.lanes) for v in range(g.vectors)]
                        kept, dp = ([x * m for x, m in zip(row, keep, strict=True)] for row in (p, dp))
                    ds.append([x * (y - d) for x, y, d in zip(p, dp, delta, strict=True)])
                    if straight:
                        put_along(k, g, s["p"].at((j + i) * per_row), kept)
                        put_along(k, g, s["ds"].at((j + i) * per_row), ds[-1])
                for v in range(g.vectors):
                    woven = pack_units(k, g, ds[0][v], ds[1][v])
                    s["ds_woven"].store(woven, ((j + r) >> 1) * g.queries + v * g.lanes)

            each_pair(k, g, *self.edges(j0 + j, t, lower), rows)

    def _probability_tile(self, j: Value, key: Value, t: Value, shift: list[Value], lower: Lower | None) -> None:
        """P of g.rows keys, 0 where a query does not see a key."""
        k, g, unit = self.k, self.g, self.unit
        tile = scores(k, g, self.s["k_rows"], j, self.s["q_turned"], self.start(j))
        p = [[exp2_nonpositive(k, g, k.fma(x, unit, shift[v])) for v, x in enumerate(row)] for row in tile]

        def put(values: list[list[Value]]) -> None:
            for r, row in enumerate(values):
                for v, x in enumerate(row):
                    self.s["p_tile"].store(x, r * g.queries + v * g.lanes)

        edge, visible_of = self.edges(key, t, lower)
        with k.when(edge):
            sees = visible_of()
            put([[k.select(sees(r, v), x, 0.0) for v, x in enumerate(row)] for r, row in enumerate(p)])
        with k.otherwise(edge):
            put(p)

    def start(self, j: Value) -> list[list[Value]] | None:
        """What the scores of the tile from row j on begin with."""
        return None

    def keep_ds(self, j: Value, ds: list[list[Value]]) -> None:
        """Do more with dS of the tile from row j on."""

    def edges(
        self, key: Value, t: Value, lower: Lower | None
    ) -> tuple[Value, Callable[[], Callable[[int, int], Value]]]:
        """Whether not every query of the group sees all keys of the tile from `key` on, and a function that tells which do."""
        length = self.length
        return crosses(self.g, key, t, lower, length), lambda: visible(self.k, self.g, key, t, lower, length)

    def add_dkdv(self, begin: Any, seen: Value, dk: Pointer, dv: Pointer) -> None:
        """dV += (P M)^T dO and dK, before scaling, += dS^T Q for the keys [begin, seen) of a block, over the group's queries."""
        k, g, s = self.k, self.g, self.s
        add_straight(k, g, dv, s["p"], s["do"], begin, seen)
        add_straight(k, g, dk, s["ds"], s["q"], begin, seen)

    def store_dkdv(self, j0: Value, count: Value, dk: Pointer, dv: Pointer, keep: tuple[Value | None, ...]) -> None:
        k, g = self.k, self.g
        unstage(k, g, dv, count, self.dv.start(j0), 1.0, keep[1])
        unstage(k, g, dk, count, self.dk.start(j0), self.root, keep[0])

    def add_dq(self, begin: Any, seen: Value, acc: Pointer) -> None:
        """dQ^T of a group of queries, before scaling, += K^T dS^T over the keys [begin, seen) of a block."""
        g, s = self.g, self.s
        keys, ds = (s["k"], s["ds_woven"]) if g.pair == 2 else (s["k_rows"], s["ds"])
        add_transposed(self.k, g, acc, keys, ds, begin, seen)

    def store_dq(self, t: Value, acc: Pointer, keep: Value | None) -> None:
        k, g, s = self.k, self.g, self.s
        scale = [k.to(self.root, k.vec)] * g.vectors
        straighten(k, g, acc, s["out"], scale)
        unstage(k, g, s["out"], k.min(self.T - t, g.queries), self.dq.start(t), 1.0, keep)
