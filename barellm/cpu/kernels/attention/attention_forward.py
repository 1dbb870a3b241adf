"""Attention forward, for training and with a KV cache: tiles of keys x queries, softmax as it goes.

Shapes: q, out (B, T, heads * D), keys and values (B, T, kv_heads * D), lse (B, heads, T); caches (B, maxT, kv_heads * D). Rows
of q, keys and values may lie any `strides` apart. A claim is one block of queries of one head; it walks the keys that its queries
may see, KEYS at a time, and keeps the maximum and the sum of each query in lanes (Milakov and Gimelshein 2018, Dao et al. 2022).
In causal attention, keys later than the last query of a block are never touched, nor are those that its window or its document
excludes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import e, log2, sqrt
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.attention.attention_blocks import (
    KEYS,
    Dropout,
    Geometry,
    Lower,
    Rows,
    add_transposed,
    blocks_of,
    clear,
    crosses,
    dim_size,
    exp2_nonpositive,
    offsets,
    pack_units,
    round_up,
    scores,
    serving,
    sizes,
    stage,
    straighten,
    turn,
    unstage,
    visible,
    weave_left,
)
from barellm.cpu.kernels.attention.attention_bounds import PLAIN, Bounds, Reach, dense_sizes
from barellm.cpu.kernels.attention.attention_short import attention_short, forward_units, short
from barellm.cpu.kernels.attention.attention_tiles import highest_scores, whole_tiles
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import ln
from barellm.program.ops.base import Op

LOWEST = -1e30  # where a maximum begins if the first keys of a block may be none of a query's
BLOCK = 128  # queries that share the staging of keys and values, where that leaves enough claims


def groups(g: Geometry) -> int:
    """Register-wide groups of queries in a claim."""
    return max(1, BLOCK // g.queries)


def claim_block(k: KernelBuilder, g: Geometry, count: Value, T: Value) -> tuple[Value, Value]:
    """The number of (queries of a claim, claims of a head) for `count` heads. No bit of the result depends on it."""
    large = groups(g) * g.queries
    enough = (count * k.ceil_div(T, large)) >= (k.threads * 4)
    block = k.select(enough, k.int(large), k.int(g.queries))
    return block, (T + block - 1) // block


def scratch_units(g: Geometry, rate: float = 0.0, bounded: bool = False) -> dict[str, int]:
    n = groups(g)
    return {
        "q_rows": g.rows_units(g.queries),
        "q": n * g.turned_units,
        "k": g.rows_units(KEYS),
        "v_rows": g.rows_units(KEYS),
        "v": g.woven_units(KEYS),
        "p": KEYS * g.queries,
        "keep": KEYS * g.queries if rate else 0,
        "acc": n * g.transposed_units(),
        "stats": n * 2 * g.queries,  # of each query the maximum and the sum
        "alpha": g.queries,
        "out": g.queries * g.wide,
        "least": n * g.queries if bounded else 0,
    }


def attend(
    k: KernelBuilder, g: Geometry, q: Rows, keys: Rows, values: Rows, out: Rows, lse: Pointer | None, first: Value,
    last: Value, pos: Value, dropout: Dropout | None = None, head: Value | None = None, sample_key: Any = None,
    bounds: Bounds = PLAIN, reach: Reach | None = None, length: Value | None = None,
) -> None:  # fmt: skip
    """Queries [first, last) of one head, the query t at position pos + t; rows 0 of q, keys, values, out and lse are token 0.
    Where every query sees all keys, `length` is their number."""
    s = blocks_of(k, scratch_units(g, dropout.rate if dropout else 0.0, reach is not None))
    root, unit = bounds.root(k, g.D), bounds.unit(k, g.D)
    least = s["least"].as_dtype("i32")

    with k.loop(first, last, g.queries) as t:
        at = (t - first) // g.queries
        begin_queries(k, g, s, q, t, last, at, LOWEST if reach else float("-inf"))
        if reach:
            reach.fill(k, g, t, least.at(at * g.queries))

    end = pos + last if length is None else length
    with k.loop(reach.first(k, first) & -KEYS if reach else 0, end, KEYS) as j0:
        count = k.min(end - j0, KEYS)
        stage(k, g, keys.start(j0), count, round_up(k, count, g.rows), s["k"])
        stage(k, g, values.start(j0), count, round_up(k, count, g.rows), s["v_rows"])
        v_block = weave_left(k, g, s["v_rows"], count, s["v"])
        with k.loop(first, last, g.queries) as t:
            # Keys of this block that the group's queries see.
            stop = pos + k.min(t + g.queries, last) if length is None else length
            seen = whole_tiles(k, g, k.min(stop - j0, KEYS))
            at = (t - first) // g.queries
            lower = reach.lower(k, g, t, least.at(at * g.queries)) if reach else None
            begin = lower.begin(k, g, j0) if lower else 0
            with k.when(seen > begin):
                fill = dropout and partial(dropout.fill, k, g, s["keep"], sample_key, head, t, j0, seen)
                edges = partial(edges_of, k, g, j0, pos + t, lower, length)
                fold_in(k, g, s, at, v_block, begin, seen, unit, edges, fill)

    with k.loop(first, last, g.queries) as t:
        end_queries(k, g, s, out, lse, t, last, (t - first) // g.queries, root)


def begin_queries(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], q: Rows, t: Value, last: Value, at: Value, lowest: float
) -> None:
    """Turn the group of queries from t on, the group `at` of its claim, and clear what it sums up."""
    stage(k, g, q.start(t), k.min(last - t, g.queries), g.queries, s["q_rows"])
    turn(k, g, s["q_rows"], s["q"].at(at * g.turned_units))
    clear(k, s["acc"].at(at * g.transposed_units()), g.deep * g.queries)
    for v in range(g.vectors):
        s["stats"].store(lowest, at * (2 * g.queries) + v * g.lanes)
        s["stats"].store(0.0, at * (2 * g.queries) + g.queries + v * g.lanes)


def fold_in(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], at: Value, v_block: Pointer, begin: Any, seen: Value, unit: Any,
    edges: Edges, fill: Callable[[], None] | None = None, start: Start | None = None,
) -> None:  # fmt: skip
    """Add the keys [begin, seen) of a block to the softmax of a group of queries. `fill` writes the multipliers of dropout, and
    `start` gives what the scores of a tile begin with."""
    stats = s["stats"].at(at * (2 * g.queries))
    turned, acc = s["q"].at(at * g.turned_units), s["acc"].at(at * g.transposed_units())
    for v, top in enumerate(score_block(k, g, s, turned, begin, seen, edges, start)):
        before = stats.load(v * g.lanes)
        highest = k.max(top, before)
        s["alpha"].store(exp2_nonpositive(k, g, (before - highest) * unit), v * g.lanes)
        stats.store(highest, v * g.lanes)
    if fill:
        fill()
    probabilities(k, g, s, stats, unit, begin, seen, fill is not None)
    alpha = [s["alpha"].load(v * g.lanes) for v in range(g.vectors)]
    add_transposed(k, g, acc, v_block, s["p"], begin, seen, alpha)


def end_queries(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], out: Rows, lse: Pointer | None, t: Value, last: Value, at: Value,
    root: Any,
) -> None:  # fmt: skip
    """Divide by the sums, and write a group's rows of the result, and lse."""
    stats = s["stats"].at(at * (2 * g.queries))
    count = k.min(last - t, g.queries)
    total = [stats.load(g.queries + v * g.lanes) for v in range(g.vectors)]
    straighten(k, g, s["acc"].at(at * g.transposed_units()), s["out"], [1.0 / x for x in total])
    unstage(k, g, s["out"], count, out.start(t), 1.0)
    if lse is not None:
        for v in range(g.vectors):
            value = k.fma(stats.load(v * g.lanes), root, ln(k, total[v]))
            lse.at(t).store(value, v * g.lanes, k.mask_first(count - v * g.lanes))


Seen = Callable[[Any, int], Value]  # row of a tile, vector -> which lanes' queries see the row's key
Edges = Callable[[Value], tuple[Value, Callable[[], Seen]]]  # tile -> whether not all of it is seen, and what is
Start = Callable[[Value], list[list[Value]]]


def edges_of(
    k: KernelBuilder, g: Geometry, j0: Value, position: Value, lower: Lower | None, length: Value | None, j: Value
) -> tuple[Value, Callable[[], Seen]]:
    """`Edges` where a query sees the keys before its own, from `lower` on, or all keys up to `length`."""
    key = j0 + j
    return crosses(g, key, position, lower, length), lambda: visible(k, g, key, position, lower, length)


def score_block(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], turned: Pointer, begin: Any, seen: Value, edges: Edges,
    start: Start | None = None,
) -> list[Value]:  # fmt: skip
    """K Q^T of the keys [begin, seen) of a block into s["p"], -infinity where a query does not see a key; the largest score of each
    query."""
    if g.tiles:
        assert start is None
        return highest_scores(k, g, s, turned, begin, seen, edges)
    top = [k.var_vec(float("-inf")) for _ in range(g.vectors)]
    with k.loop(begin, seen, g.rows) as j:
        tile = scores(k, g, s["k"], j, turned, start and start(j))
        target = s["p"].at(j * g.queries)

        def put(values: list[list[Value]], target: Pointer = target) -> None:
            for v in range(g.vectors):
                best = top[v].value
                for r, row in enumerate(values):
                    target.store(row[v], r * g.queries + v * g.lanes)
                    best = k.max(row[v], best)
                top[v].value = best

        edge, visible_of = edges(j)
        with k.when(edge):
            sees = visible_of()
            put([[k.select(sees(r, v), x, float("-inf")) for v, x in enumerate(row)] for r, row in enumerate(tile)])
        with k.otherwise(edge):
            put(tile)
    return [t.value for t in top]


def probabilities(
    k: KernelBuilder,
    g: Geometry,
    s: dict[str, Pointer],
    stats: Pointer,
    unit: Any,
    begin: Any,
    seen: Value,
    dropout: bool,
) -> None:
    """exp2((scores - maximum) * unit) in place, as units along the keys; `stats` gets their sum, before dropout, added."""
    # The constants of exp2 fill most of 16 registers: there one vector of queries at a time, with nothing else alive.
    together = g.vectors if k.isa.registers == 32 else 1
    for first in range(0, g.vectors, together):
        lanes = range(first, first + together)
        shift = {v: stats.load(v * g.lanes) * -unit for v in lanes}
        sums = {v: k.var_vec(0.0) for v in lanes}
        with k.loop(begin, seen, g.pair) as j:
            rows = [s["p"].at((j + i) * g.queries) for i in range(g.pair)]
            target = s["p"].at(j // g.pair * g.queries)
            for v in lanes:
                p = [exp2_nonpositive(k, g, k.fma(row.load(v * g.lanes), unit, shift[v])) for row in rows]
                for x in p:
                    sums[v].value = sums[v].value + x
                if dropout:
                    p = [x * s["keep"].at((j + i) * g.queries).load(v * g.lanes) for i, x in enumerate(p)]
                target.store(pack_units(k, g, *p, *[None] * (2 - g.pair)), v * g.lanes)
        for v in lanes:
            old = stats.load(g.queries + v * g.lanes)
            stats.store(k.fma(old, s["alpha"].load(v * g.lanes), sums[v].value), g.queries + v * g.lanes)


# --- training and evaluation ---


def attention(
    k: KernelBuilder, out, lse, q, keys, values, starts, stream,
    *, batch, seq, heads, kv_heads, D, strides, rate, bounds,
) -> None:  # fmt: skip
    g, T = Geometry.of(k.isa, q.dtype, D), bounds.length(k, seq)
    block, blocks = claim_block(k, g, dim_size(k, batch) * heads, T)
    dropout = Dropout(rate, stream, heads) if rate else None
    with amx.tile_registers(k, g.tiles), k.parallel_for(dim_size(k, batch) * heads * blocks) as claim:
        sequence, head = claim // (blocks * heads), claim // blocks % heads
        first = (blocks - 1 - claim % blocks) * block  # the last is the longest: early, so that threads end together
        token, counts = sequence * T, (heads, kv_heads, kv_heads)
        of = [
            bounds.rows(p, token, serving(head, heads, n), D=D, heads=n, stride=stride)
            for p, n, stride in zip((q, keys, values), counts, strides, strict=True)
        ]
        to = bounds.rows(out, token, head, D=D, heads=heads, stride=bounds.fold * heads * D)
        attend(
            k, g, *of, to, lse.at((sequence * heads + head) * T), first, k.min(first + block, T), k.int(0), dropout, head,
            dropout.key(k, sequence) if dropout else None, bounds, Reach.of(k, bounds, T, starts, sequence),
            None if bounds.causal else T,
        )  # fmt: skip


@lowering("attention", views="q k v", also={"starts": "i32"})
def lower_attention(op: Op, c: Lowering) -> None:
    constants = dense_sizes(op)
    g = Geometry.of(c.isa, op.q.dtype, constants["D"])
    operands = {"out": op.out, "lse": op.lse, "q": op.q, "keys": op.k, "values": op.v}
    if op.plain and short(c.isa, op.q.dtype, g.D, int(op.out.shape[1]), op.rate):
        c.thread_scratch(offsets(forward_units(g))[1])
        c.call(attention_short, operands, sizes(op), writes="out lse")
        return
    bounded = op.window is not None or op.starts is not None
    c.thread_scratch(offsets(scratch_units(g, op.rate, bounded))[1])
    operands |= {"starts": op.starts, "stream": op.stream}
    c.call(attention, operands, constants | {"rate": op.rate}, writes="out lse")


# --- decoding ---


def append_to_caches(k: KernelBuilder, k_cache, v_cache, keys, values, *, batch, seq, C, length, strides) -> None:
    """Rows pos .. pos + T of the caches = keys and values, all of C columns."""
    T, pos = dim_size(k, seq), k.scalar("pos")
    with k.parallel_for(dim_size(k, batch) * T) as token:
        row = (token // T * length + pos + token % T) * C
        for cache, new, stride in zip((k_cache, v_cache), (keys, values), strides, strict=True):
            source, whole = new.at(token * stride), C - C % k.lanes
            with k.loop(0, whole, k.lanes) as c:
                cache.store(source.load(c), row + c)
            if C % k.lanes:
                mask = k.mask_first(C % k.lanes)
                cache.store(source.load(whole, mask), row + whole, mask)


def attention_cached(
    k: KernelBuilder, out, q, k_cache, v_cache, *, batch, seq, heads, kv_heads, D, stride, length
) -> None:
    """Attention over a KV cache. `stride` is that of q's rows."""
    g = Geometry.of(k.isa, q.dtype, D)
    C, T, pos = kv_heads * D, dim_size(k, seq), k.scalar("pos")
    block, blocks = claim_block(k, g, dim_size(k, batch) * heads, T)
    with amx.tile_registers(k, g.tiles), k.parallel_for(dim_size(k, batch) * heads * blocks) as claim:
        sequence, head = claim // (blocks * heads), claim // blocks % heads
        first, kv_head = claim % blocks * block, serving(head, heads, kv_heads)
        queries, to = (Rows.of(p, sequence * T, head, D=D, stride=n) for p, n in ((q, stride), (out, heads * D)))
        cached = [Rows.of(cache, sequence * length, kv_head, D=D, stride=C) for cache in (k_cache, v_cache)]
        one = T.equals(1)
        with k.when(one):
            attend_one(k, D, queries.pointer, *cached, to.pointer, pos + 1)
        with k.otherwise(one):
            attend(k, g, queries, *cached, to, None, first, k.min(first + block, T), pos)


def attend_one(k: KernelBuilder, D: int, q: Pointer, keys: Rows, values: Rows, out: Pointer, count: Value) -> None:
    """Attention of one query. Channels are lanes, so that no lane idles. The probabilities of all keys lie in scratch, `count`
    fp32."""
    scratch = k.thread_scratch("fp32")
    columns = k.columns(D)
    query = [q.load(c, mask) * (log2(e) / sqrt(D)) for c, mask in columns]
    g = Geometry.of(k.isa, "fp32", D)
    top = k.var_vec(float("-inf"))
    with k.loop(0, count, k.lanes) as j:
        partial = []
        for i in range(k.lanes):
            row = keys[k.min(j + i, count - 1)]
            sum_ = query[0] * row.load(*columns[0])
            for x, (c, mask) in zip(query[1:], columns[1:], strict=True):
                sum_ = k.fma(x, row.load(c, mask), sum_)
            partial.append(sum_)
        s = k.select(k.mask_first(count - j), lane_sums(k, partial), float("-inf"))
        top.value = k.max(s, top.value)
        scratch.store(s, j)
    highest = k.splat(k.maximum(top.value))
    total = k.var_vec(0.0)
    with k.loop(0, count, k.lanes) as j:
        p = exp2_nonpositive(k, g, scratch.load(j) - highest)
        total.value = total.value + p
        scratch.store(p, j)
    acc = [k.var_vec(0.0) for _ in columns]
    with k.loop(0, count) as j:
        p, row = k.splat(scratch.get(j)), values[j]
        for a, (c, mask) in zip(acc, columns, strict=True):
            a.value = k.fma(p, row.load(c, mask), a.value)
    scale = k.splat(k.float(1.0) / k.sum(total.value))
    for a, (c, mask) in zip(acc, columns, strict=True):
        out.store(a.value * scale, c, mask)


def lane_sums(k: KernelBuilder, vectors: list[Value]) -> Value:
    """Lane i is the sum over the lanes of vector i, in a fixed tree."""
    n = k.lanes
    even, odd = list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))
    while len(vectors) > 1:
        vectors = [
            k.shuffle(a, b, even) + k.shuffle(a, b, odd) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


@lowering("attention_cached", views="q k v")
def lower_attention_cached(op: Op, c: Lowering) -> None:
    shape, length = sizes(op), int(op.k_cache.shape[1])
    q_stride, *strides = shape.pop("strides")
    g = Geometry.of(c.isa, op.q.dtype, shape["D"])
    c.thread_scratch(max(offsets(scratch_units(g))[1], 4 * (length + c.isa.lanes)))
    caches = {"k_cache": op.k_cache, "v_cache": op.v_cache}
    rows = {"batch": shape["batch"], "seq": shape["seq"], "C": op.kv_heads * g.D, "strides": tuple(strides)}
    c.call(
        append_to_caches, {**caches, "keys": op.k, "values": op.v}, {**rows, "length": length}, writes="k_cache v_cache"
    )
    constants = {**shape, "stride": q_stride, "length": length}
    c.call(attention_cached, {"out": op.out, "q": op.q, **caches}, constants, writes="out")
