"""Attention of sequences so short that a head's scores lie in the cache as a whole: each product of a head in one go.

Shapes and formulas as in attention_forward.py and attention_backward.py, blocks as in attention_blocks.py, of SHORT tokens. Where
a sequence is cut into blocks, a head of 64 tokens costs more for clearing, adding up and turning blocks than for products. Here
nothing is added up in memory, every result leaves its product as rows (a unit of the left operand is broadcast from wherever
it lies, so the probabilities need no other form for that), and the causal half is cut by vectors of queries and tiles of keys.

Each element is the same chain of the same operations, and only zeros are left out: the bits are those of the blocks.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import e, log2, sqrt
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.attention.attention_blocks import (
    Geometry,
    Left,
    Right,
    Rows,
    blocks_of,
    clear,
    dim_size,
    exp2_nonpositive,
    pack_units,
    product,
    put_along,
    round_up,
    serving,
    unstage,
)
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import ln, transpose

SHORT = 64  # tokens: scores, probabilities and operands of a head are 52 KiB


def short(isa: ISA, dtype: str, D: int, length: int, rate: float) -> bool:
    """Whether sequences of up to `length` tokens are done here: with rows of whole units, a line each, and without dropout."""
    g = Geometry.of(isa, dtype, D)
    units = g.pair == 2 and not g.tiles and g.lanes == 2 * g.rows and D % (2 * g.lanes) == 0
    return length <= SHORT and not rate and units


def forward_units(g: Geometry) -> dict[str, int]:
    return {
        "q_turned": g.units * SHORT,
        "k_rows": SHORT * g.row,
        "v": g.woven_units(SHORT),
        "scores": SHORT * g.queries,
        "p": SHORT * g.queries // 2,  # of a group of queries, [key / 2][g.queries]
        "inverse": g.queries,
    }


def backward_units(g: Geometry, shared: bool) -> dict[str, int]:
    """The blocks of scratch of the backward pass, in units. Where keys are `shared`, dk and dv are sums over several heads, which
    wait as fp32 rows."""
    woven = {name: g.woven_units(SHORT) for name in ("q", "k", "do")}
    turned = {name: g.units * SHORT for name in ("q_turned", "do_turned")}
    # [key][SHORT / 2]; the last of them [key / 2][SHORT].
    straight = {name: SHORT * SHORT // 2 for name in ("p", "ds", "ds_woven")}
    rows = {"k_rows": SHORT * g.row, "v_rows": SHORT * g.row}
    sums = {name: SHORT * g.wide if shared else 0 for name in ("dk", "dv")}
    return {**rows, **turned, **woven, **straight, **sums, "p_tile": g.rows * g.queries, "shift": SHORT, "delta": SHORT}


def load_rows(
    k: KernelBuilder, g: Geometry, source: Rows, count: Value, *, rows: Pointer | None = None, turned: Pointer | None = None,
    woven: Pointer | None = None,
) -> None:  # fmt: skip
    """`count` rows in the forms that are wanted, with zeros up to a multiple of g.queries; turned ones [g.units][SHORT]."""
    with k.loop(0, round_up(k, count, g.queries), g.lanes) as t:
        for c in range(0, g.row, g.lanes):
            held = [k.var(k.const(0, k.ivec)) for _ in range(g.lanes)]
            whole = (t + g.lanes) <= count
            with k.when(whole):
                for i, x in enumerate(held):
                    x.value = source[t + i].as_dtype("i32").load_raw(c)
            with k.otherwise(whole):
                for i, x in enumerate(held):
                    inside = (t + i) < count
                    with k.when(inside):
                        x.value = source[t + i].as_dtype("i32").load_raw(c)
            units = [x.value for x in held]
            if rows is not None:
                for i, x in enumerate(units):
                    rows.as_dtype("i32").store_raw(x, (t + i) * g.row + c)
            if woven is not None:
                halves = [k.bitcast(x, f"<{2 * g.lanes} x i16>") for x in units]
                for i in range(0, g.lanes, 2):
                    for half in range(2):
                        order = [n + half * g.lanes + m for n in range(g.lanes) for m in (0, 2 * g.lanes)]
                        pairs = k.bitcast(k.shuffle(halves[i], halves[i + 1], order), k.ivec)
                        woven.as_dtype("i32").store_raw(pairs, ((t + i) >> 1) * g.wide + 2 * c + half * g.lanes)
            if turned is not None:
                for i, column in enumerate(transpose(k, units)):
                    turned.as_dtype("i32").store_raw(column, t + (c + i) * SHORT)


def store_rows(
    k: KernelBuilder, g: Geometry, tile: list[list[Value]], to: Rows, first: Value, c: Any, count: Value, factors: list[Any]
) -> None:  # fmt: skip
    """Rows of the tile from row `first` and column c on, times a factor each, up to row `count`."""

    def put(r: int) -> None:
        for v, x in enumerate(tile[r]):
            to[first + r].store(x * factors[r], c + v * g.lanes)

    whole = (first + len(tile)) <= count
    with k.when(whole):
        for r in range(len(tile)):
            put(r)
    with k.otherwise(whole):
        for r in range(len(tile)):
            inside = (first + r) < count
            with k.when(inside):
                put(r)


def straight_product(
    k: KernelBuilder, g: Geometry, left: Left, woven: Pointer, steps: Value, to: Rows, first: Value, count: Value,
    factors: list[Any], *, add: bool = False,
) -> None:  # fmt: skip
    """g.rows rows of L X from row `first` of `to` on, or with `add` these added to it; X woven, `left` and `woven` at the first of
    `steps` pairs of tokens."""
    with k.loop(0, g.wide, g.vectors * g.lanes) as c:
        start = (
            [[to[first + r].load(c + v * g.lanes) for v in range(g.vectors)] for r in range(g.rows)] if add else None
        )
        tile = product(k, g, left, Right(woven.at(c), g.wide), steps, start)
        store_rows(k, g, tile, to, first, c, count, factors)


def causal_tiles(k: KernelBuilder, g: Geometry, t: Value, tile: Any) -> None:
    """tile(first key, rows, first vector, crosses) for all that the g.queries queries from t on see. A tile has both vectors
    and g.rows keys, or the second one and twice as many; `crosses`: its first vector has queries before its last key."""
    with k.loop(0, t, g.rows) as j:
        tile(j, g.rows, 0, False)
    with k.loop(t, t + g.lanes, g.rows) as j:
        tile(j, g.rows, 0, True)
    tile(t + g.lanes, 2 * g.rows, 1, True)


def earlier(k: KernelBuilder, g: Geometry, x: Value, key: Value, query: Value, otherwise: float) -> Value:
    """Lanes of queries from `query` on, `otherwise` where the key is later."""
    return k.select(k.iota() < k.splat(key - query), otherwise, x)


def attention_short(k: KernelBuilder, out, lse, q, keys, values, *, batch, seq, heads, kv_heads, D, strides) -> None:
    g, T = Geometry.of(k.isa, q.dtype, D), dim_size(k, seq)
    s = blocks_of(k, forward_units(g))
    unit = log2(e) / sqrt(D)
    with k.parallel_for(dim_size(k, batch) * heads) as claim:
        sequence, head = claim // heads, claim % heads
        token, kv_head = sequence * T, serving(head, heads, kv_heads)
        to = Rows.of(out, token, head, D=D, stride=heads * D)
        load_rows(k, g, Rows.of(q, token, head, D=D, stride=strides[0]), T, turned=s["q_turned"])
        load_rows(k, g, Rows.of(keys, token, kv_head, D=D, stride=strides[1]), T, rows=s["k_rows"])
        load_rows(k, g, Rows.of(values, token, kv_head, D=D, stride=strides[2]), T, woven=s["v"])
        with k.loop(0, T, g.queries) as t:
            highest = short_scores(k, g, s, t)
            totals = short_probabilities(k, g, s, t, [x * -unit for x in highest], unit)
            for v in range(g.vectors):
                s["inverse"].store(1.0 / totals[v], v * g.lanes)
                value = k.fma(highest[v], 1 / sqrt(D), ln(k, totals[v]))
                lse.at(claim * T + t).store(value, v * g.lanes, k.mask_first(T - t - v * g.lanes))
            with k.loop(0, g.queries, g.rows) as i:
                pairs = k.ceil_div(k.min(t + i + g.rows, T), 2)
                factors = [k.splat(s["inverse"].get(i + r)) for r in range(g.rows)]
                straight_product(k, g, Left(s["p"].at(i), 1, g.queries), s["v"], pairs, to, t + i, T, factors)


def short_scores(k: KernelBuilder, g: Geometry, s: dict[str, Pointer], t: Value) -> list[Value]:
    """Scores of the queries from t on, -infinity where the key is later; the largest of each query."""
    top = [k.var_vec(float("-inf")) for _ in range(g.vectors)]

    def tile(j: Value, rows: int, first: int, crosses: bool) -> None:
        right = Right(s["q_turned"].at(t + first * g.lanes), SHORT)
        left = Left(s["k_rows"].at(j * g.row), g.row, 1)
        found = product(k, g, left, right, g.units, rows=rows, vectors=g.vectors - first)
        target = s["scores"].at(j * g.queries)
        for v in range(first, g.vectors):
            best = top[v].value
            for r, row in enumerate(found):
                x = row[v - first]
                if crosses and v == first:
                    x = earlier(k, g, x, j + r, t + v * g.lanes, float("-inf"))
                target.store(x, r * g.queries + v * g.lanes)
                best = k.max(x, best)
            top[v].value = best

    causal_tiles(k, g, t, tile)
    return [x.value for x in top]


def short_probabilities(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], t: Value, shift: list[Value], unit: float
) -> list[Value]:
    """exp2(scores * unit + shift) as units along the keys, and their sums."""
    sums = [k.var_vec(0.0) for _ in range(g.vectors)]

    def pair(j: Value, first: int) -> None:
        for v in range(first, g.vectors):
            rows = [s["scores"].at((j + i) * g.queries).load(v * g.lanes) for i in range(2)]
            p = [exp2_nonpositive(k, g, k.fma(x, unit, shift[v])) for x in rows]
            for x in p:
                sums[v].value = sums[v].value + x
            s["p"].at((j >> 1) * g.queries).store(pack_units(k, g, *p), v * g.lanes)

    with k.loop(0, t + g.lanes, 2) as j:
        pair(j, 0)
    last = t + g.lanes
    for i in range(0, g.lanes, 2):
        pair(last + i, 1)
    return [x.value for x in sums]


def attention_backward_short(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta,
    *, batch, seq, heads, kv_heads, D, strides,
) -> None:  # fmt: skip
    """A claim is a head of keys with the heads of queries that it serves."""
    g, T = Geometry.of(k.isa, q.dtype, D), dim_size(k, seq)
    group = heads // kv_heads
    s = blocks_of(k, backward_units(g, group > 1))
    scale, ones = [1 / sqrt(D)] * g.rows, [1.0] * g.rows
    half = SHORT // 2
    with k.parallel_for(dim_size(k, batch) * kv_heads) as claim:
        sequence, kv_head = claim // kv_heads, claim % kv_heads
        token = sequence * T
        tensors = zip((keys, values, dkeys, dvalues), (*strides[1:3], *strides[4:]), strict=True)
        key_rows, value_rows, dk, dv = (Rows.of(p, token, kv_head, D=D, stride=stride) for p, stride in tensors)
        load_rows(k, g, key_rows, T, rows=s["k_rows"], woven=s["k"])
        load_rows(k, g, value_rows, T, rows=s["v_rows"])
        sums = [(dv, ones), (dk, scale)]
        if group > 1:
            sums = [(Rows(s[name], g.wide), ones) for name in ("dv", "dk")]
            for to, _ in sums:
                clear(k, to.pointer, SHORT * g.wide)
        with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as member:
            head = kv_head * group + member
            load_rows(k, g, Rows.of(q, token, head, D=D, stride=strides[0]), T, turned=s["q_turned"], woven=s["q"])
            load_rows(k, g, Rows.of(dout, token, head, D=D, stride=heads * D), T, turned=s["do_turned"], woven=s["do"])
            of_head = (sequence * heads + head) * T
            with k.loop(0, round_up(k, T, g.queries), g.lanes) as t:
                mask = k.mask_first(T - t)
                s["shift"].store(lse.at(of_head).load(t, mask) * -log2(e), t)
                s["delta"].store(delta.at(of_head).load(t, mask), t)
            with k.loop(0, T, g.queries) as t:
                short_gradients(k, g, s, t)
            pairs = k.ceil_div(T, 2)
            with k.loop(0, T, g.rows) as j:
                u = j >> 1
                for name, woven, (to, factors) in zip(("p", "ds"), ("do", "q"), sums, strict=True):
                    left, right = Left(s[name].at(j * half + u), half, 1), s[woven].at(u * g.wide)
                    straight_product(k, g, left, right, pairs - u, to, j, T, factors, add=group > 1)
            to_dq = Rows.of(dq, token, head, D=D, stride=strides[3])
            with k.loop(0, T, g.rows) as i:
                seen = k.ceil_div(k.min(i + g.rows, T), 2)
                straight_product(k, g, Left(s["ds_woven"].at(i), 1, SHORT), s["k"], seen, to_dq, i, T, scale)
        if group > 1:
            unstage(k, g, s["dv"], T, dv, 1.0)
            unstage(k, g, s["dk"], T, dk, 1 / sqrt(D))


def short_gradients(k: KernelBuilder, g: Geometry, s: dict[str, Pointer], t: Value) -> None:
    """P and dS of the queries from t on, along the queries, and dS along the keys."""
    unit = log2(e) / sqrt(g.D)

    def tile(j: Value, rows: int, first: int, crosses: bool) -> None:
        lanes = range(first, g.vectors)
        shape = {"rows": rows, "vectors": len(lanes)}
        at = t + first * g.lanes
        found = product(
            k, g, Left(s["k_rows"].at(j * g.row), g.row, 1), Right(s["q_turned"].at(at), SHORT), g.units, **shape
        )
        for n, v in enumerate(lanes):
            shift = s["shift"].load(t + v * g.lanes)
            for r, row in enumerate(found):
                p = exp2_nonpositive(k, g, k.fma(row[n], unit, shift))
                if crosses and v == first:
                    p = earlier(k, g, p, j + r, t + v * g.lanes, 0.0)
                s["p_tile"].store(p, (r * len(lanes) + n) * g.lanes)
        found = product(
            k, g, Left(s["v_rows"].at(j * g.row), g.row, 1), Right(s["do_turned"].at(at), SHORT), g.units, **shape
        )
        deltas = [s["delta"].load(t + v * g.lanes) for v in lanes]
        for r in range(0, rows, 2):
            of: list[list[Value]] = []
            for i in (r, r + 1):
                p = [s["p_tile"].load((i * len(lanes) + n) * g.lanes) for n in range(len(lanes))]
                of.append([x * (y - d) for x, y, d in zip(p, found[i], deltas, strict=True)])
                along = (j + i) * (SHORT // 2) + (at >> 1)
                put_along(k, g, s["p"].at(along), p)
                put_along(k, g, s["ds"].at(along), of[-1])
            for n, (even, odd) in enumerate(zip(*of, strict=True)):
                s["ds_woven"].store(pack_units(k, g, even, odd), ((j + r) >> 1) * SHORT + at + n * g.lanes)

    causal_tiles(k, g, t, tile)
