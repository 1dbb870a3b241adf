"""Attention forward, for training and with a KV cache: blocked, with online softmax (FlashAttention).

Shapes: q, out (B, T, heads * D), keys and values (B, T, kv_heads * D), lse (B, heads, T) fp32; caches (rows, maxT, kv_heads * D). A
work item is a block of queries of one head. It loops over blocks of KEY_BLOCK keys, packs K and V of each to scratch (L1/L2), and
keeps each query's running maximum and sum (Milakov and Gimelshein 2018, Dao et al. 2022). Blocks that the mask excludes are
skipped.

Parameters: `g`, Geometry of the tiles; `t`, first query of a group of g.queries, the lanes of g.vectors vectors; `j0`, first key of
a block; `j`, a row in it. Scores are transposed, (keys, queries), and exponentials are powers of 2. `mask_spec`: what of the mask
is known at compile time (attention_mask.py); layouts of blocks: attention_microkernels.py."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import e, log2
from typing import NamedTuple

from barellm.cpu.kernel import Lowering, Op, Pointer, Value, lowering
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.cpu.kernels.attention.attention_amx import round_to_tiles, score_key_block_amx
from barellm.cpu.kernels.attention.attention_mask import LOWEST, KeyRange, MaskSpec, dense_constants
from barellm.cpu.kernels.attention.attention_one_query_exact import attend_one_query_exactly, one_query_units
from barellm.cpu.kernels.attention.attention_single_block import attention_single_block, fits_single_block, forward_units
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang.vector import ln, tanh

Start = Callable[[Value], list[list[Value]]]  # row of a block of keys -> the initial scores of its tile
QUERY_BLOCK = 128  # queries that share the packing of keys and values, where that leaves enough work items


def groups_per_block(g) -> int:
    """Groups of queries in a large work item."""
    return max(1, QUERY_BLOCK // g.queries)


def select_query_block(k, g, count, T) -> tuple[Value, Value]:
    """(queries of a work item, work items of a head): QUERY_BLOCK queries, which share packed K and V, where that leaves four items
    a thread, else one group, for load balance. `count`: heads of all sequences, of T queries each. No bit depends on it."""
    large = groups_per_block(g) * g.queries
    enough = (count * k.ceil_div(T, large)) >= (k.threads * 4)
    block = k.select(enough, k.int(large), k.int(g.queries))
    return block, (T + block - 1) // block


def scratch_units(g, rate: float = 0.0, bounded: bool = False) -> dict[str, int]:
    """Sizes of the blocks in scratch, in 32-bit units. `rate` of dropout; `bounded`: the mask has windows or documents."""
    n = groups_per_block(g)
    return {
        "q_rows": g.rows_units(g.queries),
        "q": n * g.transposed_units,
        "k": g.rows_units(micro.KEY_BLOCK),
        "v_rows": g.rows_units(micro.KEY_BLOCK),
        "v": g.vnni_units(micro.KEY_BLOCK),
        "p": micro.KEY_BLOCK * g.queries,
        "keep": micro.KEY_BLOCK * g.queries if rate else 0,
        "acc": n * g.accumulator_units(),
        "stats": n * 2 * g.queries,  # of each query the maximum and the sum
        "alpha": g.queries,
        "out": g.queries * g.padded_D,
        "first_keys": n * g.queries if bounded else 0,
    }


class QueryBlock(NamedTuple):
    """What a work item reads and writes: the queries [first, last) of one head of one sequence. `q`, `keys`, `values`, `out`: rows
    of the head, the first of them query or key 0; `lse` (T) fp32 from query 0 on, None: not stored. `pos`: how many keys lie before
    query 0, none but with a KV cache."""

    q: micro.HeadRows
    keys: micro.HeadRows
    values: micro.HeadRows
    out: micro.HeadRows
    lse: Pointer | None
    first: Value
    last: Value
    pos: Value


def attend_queries(k, g, item: QueryBlock, mask_spec: MaskSpec, *, key_range: KeyRange | None = None, length=None,
        dropout: micro.Dropout | None = None, cached: bool = False) -> None:  # fmt: skip
    """The work item: out and lse of its queries, by online softmax over all blocks of keys that they see. `key_range`: windows or
    documents, None: neither; `length`: the number of keys of full attention, None: causal. Query t is at position t, or with
    `cached` at item.pos + t."""
    s = micro.blocks_of(k, scratch_units(g, dropout.rate if dropout else 0.0, key_range is not None))
    softmax = OnlineSoftmax(k, g, s, mask_spec)
    first, last, pos = item.first, item.last, item.pos
    first_keys = s["first_keys"].as_dtype("i32")

    # Pack the queries and begin their sums, a group at a time.
    with k.loop(first, last, g.queries) as t:
        group = (t - first) // g.queries
        softmax.begin(group, item.q, t, last, LOWEST if key_range else float("-inf"))
        if key_range:
            key_range.store_first_keys(k, g, pos + t if cached else t, first_keys.at(group * g.queries))

    # Pack the keys and values, a block at a time, and add them to each group that sees some of them.
    end = pos + last if length is None else length  # behind the last key that any query sees
    begin: Value | int = 0
    if key_range:
        begin = key_range.first_key(k, pos + first if cached else first) & -micro.KEY_BLOCK
    with k.loop(begin, end, micro.KEY_BLOCK) as j0:
        count = k.min(end - j0, micro.KEY_BLOCK)  # keys of the block
        micro.pack_tile(k, g, item.keys.start(j0), count, micro.round_up(k, count, g.rows), s["k"])
        micro.pack_tile(k, g, item.values.start(j0), count, micro.round_up(k, count, g.rows), s["v_rows"])
        v_block = micro.pack_left(k, g, s["v_rows"], count, s["v"])  # V as the left operand of V^T P
        with k.loop(first, last, g.queries) as t:
            # The group's queries see the keys [first_row, num_keys) of this block, or some of them.
            stop = pos + k.min(t + g.queries, last) if length is None else length
            num_keys = round_to_tiles(k, g, k.min(stop - j0, micro.KEY_BLOCK))
            group = (t - first) // g.queries
            key_bounds, first_row = None, 0
            if key_range:
                key_bounds = key_range.bounds_of(k, g, pos + t if cached else t, first_keys.at(group * g.queries))
                first_row = key_bounds.first_row(k, g, j0)
            with k.when(num_keys > first_row):
                fill = dropout and partial(dropout.fill, k, g, s["keep"], t, j0, num_keys)
                tile_mask = partial(micro.tile_mask, k, g, pos + t, key_bounds, length, j0)
                softmax.add_keys(group, v_block, first_row, num_keys, tile_mask, fill)

    with k.loop(first, last, g.queries) as t:
        softmax.finish((t - first) // g.queries, item.out, item.lse, t, last)


class OnlineSoftmax:
    """The softmax of a work item's queries over blocks of keys (Milakov and Gimelshein 2018): `begin`, `add_keys` for each block,
    `finish`. Queries are lanes, in groups of g.queries; `group`: the index of one, `t`: its first query; queries from `last` on do
    not exist. `softmax_scale`: scores are multiplied by it; `softmax_scale_log2` = that times log2(e). Blocks of scratch `s`:

        q       [group] packed queries, layout `transposed`
        acc     [group][D][queries] fp32, the sum of the probabilities times the values, relative to the maximum so far
        stats   [group][2][queries] fp32, the maximum of the scores so far, and the sum of the exponentials relative to it
        k       packed keys of the block, layout `rows`
        p       [key][queries] fp32, scores of the block; then their exponentials in units along the keys
        alpha   [queries] fp32, by which a new maximum multiplies the sums so far
        keep    [key][queries] fp32, multipliers of dropout"""

    def __init__(self, k, g, s, mask_spec: MaskSpec) -> None:
        self.k, self.g, self.s = k, g, s
        self.softmax_scale = mask_spec.softmax_scale(k, g.D)
        self.softmax_scale_log2 = mask_spec.softmax_scale_log2(k, g.D)
        self.capped = partial(mask_spec.capped, k, D=g.D)  # a score under the softcap, if there is one

    def queries_of(self, group) -> Pointer:
        """The group's packed queries."""
        return self.s["q"].at(group * self.g.transposed_units)

    def begin(self, group, q, t, last, lowest: float) -> None:
        """Pack the group's queries from q (HeadRows), zero its sums, and set its maxima to `lowest`."""
        k, g, s = self.k, self.g, self.s
        micro.pack_tile(k, g, q.start(t), k.min(last - t, g.queries), g.queries, s["q_rows"])
        micro.transpose_tile(k, g, s["q_rows"], self.queries_of(group))
        micro.clear(k, s["acc"].at(group * g.accumulator_units()), g.acc_rows * g.queries)
        for v in range(g.vectors):
            s["stats"].store(lowest, group * (2 * g.queries) + v * g.lanes)
            s["stats"].store(0.0, group * (2 * g.queries) + g.queries + v * g.lanes)

    def add_keys(self, group, v_block, begin, num_keys, tile_mask: micro.TileMask, fill: Callable[[], None] | None = None,
            start: Start | None = None) -> None:  # fmt: skip
        """Add the packed keys [begin, num_keys) of a block: m' = max(m, scores), alpha = exp(m - m'), sum = alpha sum + p, acc =
        alpha acc + V^T p. `v_block`: V as `pack_left` returned it. tile_mask(j): `tile_mask` of the tile of keys from row j on;
        start(j): the tile's initial scores (position bias), None: zero. fill() writes dropout's multipliers, None: no dropout."""
        k, g, s = self.k, self.g, self.s
        stats = s["stats"].at(group * (2 * g.queries))
        queries, acc = self.queries_of(group), s["acc"].at(group * g.accumulator_units())
        for v, top in enumerate(self._scores(queries, begin, num_keys, tile_mask, start)):
            before = stats.load(v * g.lanes)
            highest = k.max(top, before)
            s["alpha"].store(micro.exp2_nonpositive(k, g, (before - highest) * self.softmax_scale_log2), v * g.lanes)
            stats.store(highest, v * g.lanes)
        if fill:
            fill()
        self._exponentials(stats, begin, num_keys, fill is not None)
        alpha = [s["alpha"].load(v * g.lanes) for v in range(g.vectors)]
        micro.accumulate_transposed(k, g, acc, v_block, s["p"], begin, num_keys, alpha)

    def finish(self, group, out, lse, t, last) -> None:
        """out (HeadRows) = acc / sum of the group's queries, transposed through s["out"], and lse (T) = maximum * softmax_scale +
        ln(sum), None: not stored."""
        k, g, s = self.k, self.g, self.s
        stats = s["stats"].at(group * (2 * g.queries))
        count = k.min(last - t, g.queries)
        total = [stats.load(g.queries + v * g.lanes) for v in range(g.vectors)]
        micro.transpose_accumulator(k, g, s["acc"].at(group * g.accumulator_units()), s["out"], [1.0 / x for x in total])
        micro.unpack_tile(k, g, s["out"], count, out.start(t), 1.0)
        if lse is not None:
            for v in range(g.vectors):
                value = k.fma(stats.load(v * g.lanes), self.softmax_scale, ln(k, total[v]))
                lse.at(t).store(value, v * g.lanes, k.mask_first(count - v * g.lanes))

    def _scores(self, queries, begin, num_keys, tile_mask: micro.TileMask, start: Start | None) -> list[Value]:
        """s["p"] = capped(K Q^T + start) of the keys [begin, num_keys), in tiles of g.rows keys; -infinity where a query does not
        see a key. Returns each query's largest score, g.vectors vectors."""
        k, g, s = self.k, self.g, self.s
        if g.tiles:
            assert start is None
            return score_key_block_amx(k, g, s, queries, begin, num_keys, tile_mask, self.capped)
        top = [k.var_vec(float("-inf")) for _ in range(g.vectors)]

        def store_tile(tile, target) -> None:
            """Store the scores of a tile [key][vector], and update each query's maximum."""
            for v in range(g.vectors):
                best = top[v].value
                for r, row in enumerate(tile):
                    target.store(row[v], r * g.queries + v * g.lanes)
                    best = k.max(row[v], best)
                top[v].value = best

        with k.loop(begin, num_keys, g.rows) as j:
            scores = micro.score_tile(k, g, s["k"], j, queries, start and start(j))
            tile = [[self.capped(x) for x in row] for row in scores]
            target = s["p"].at(j * g.queries)
            partly_masked, make_mask = tile_mask(j)  # i1, and what emits the mask
            with k.when(partly_masked):
                is_visible = make_mask()
                masked = [[k.select(is_visible(r, v), x, float("-inf")) for v, x in enumerate(row)] for r, row in enumerate(tile)]
                store_tile(masked, target)
            with k.otherwise(partly_masked):
                store_tile(tile, target)
        return [t.value for t in top]

    def _exponentials(self, stats, begin, num_keys, dropout: bool) -> None:
        """s["p"] = exp2((scores - maximum) * softmax_scale_log2) of the keys [begin, num_keys), in place, with `dropout` times
        s["keep"]; the group's sum in `stats` [maximum, sum][queries] = alpha * sum + these before dropout."""
        k, g, s, scale = self.k, self.g, self.s, self.softmax_scale_log2
        # The constants of exp2 fill most of 16 registers: there one vector of queries at a time, with nothing else alive.
        vectors_at_once = g.vectors if k.isa.registers == 32 else 1
        for first in range(0, g.vectors, vectors_at_once):
            lanes = range(first, first + vectors_at_once)
            shift = {v: stats.load(v * g.lanes) * -scale for v in lanes}
            sums = {v: k.var_vec(0.0) for v in lanes}
            with k.loop(begin, num_keys, g.pair) as j:
                rows = [s["p"].at((j + i) * g.queries) for i in range(g.pair)]  # scores of a pair of keys
                target = s["p"].at(j // g.pair * g.queries)  # never behind what is read next
                for v in lanes:
                    p = [micro.exp2_nonpositive(k, g, k.fma(row.load(v * g.lanes), scale, shift[v])) for row in rows]
                    for x in p:
                        sums[v].value = sums[v].value + x
                    if dropout:
                        p = [x * s["keep"].at((j + i) * g.queries).load(v * g.lanes) for i, x in enumerate(p)]
                    target.store(micro.pack_units(k, g, *p, *[None] * (2 - g.pair)), v * g.lanes)
            for v in lanes:
                old = stats.load(g.queries + v * g.lanes)
                stats.store(k.fma(old, s["alpha"].load(v * g.lanes), sums[v].value), g.queries + v * g.lanes)


# --- training and evaluation ---


def attention(k, out, lse, q, keys, values, starts, stream, *, batch, seq, heads, kv_heads, D, strides, rate, mask_spec) -> None:
    """The kernel: out (B, T, heads * D) and lse (B, heads, T) of attention with the mask of `mask_spec`, dropout of the given
    `rate` by random stream number `stream`, and documents: `starts` (B, T) i32, the first position of each token's document, or
    None. A work item is a block of queries of a head, the longest first. `batch`, `seq`: numbers or names of run-time scalars;
    `strides`: from a row of q, keys and values to the next, in elements."""
    g = micro.Geometry.of(k.isa, q.dtype, D)
    T = mask_spec.length(k, seq)
    block, blocks = select_query_block(k, g, k.size(batch) * heads, T)  # queries of an item, items of a head
    with amx.tile_registers(k, g.tiles), k.parallel_for(k.size(batch) * heads * blocks) as item:
        sequence = item // (blocks * heads)
        head = item // blocks % heads
        first = (blocks - 1 - item % blocks) * block  # its first query; longest first, for load balance
        token = sequence * T
        heads_of = {"D": D, "heads": heads, "kv_heads": kv_heads}
        q_rows, k_rows, v_rows = mask_spec.rows_of((q, keys, values), token, head, strides=strides, **heads_of)
        dst = mask_spec.rows(out, token, head, D=D, heads=heads, stride=mask_spec.fold * heads * D)
        lse_row = lse.at((sequence * heads + head) * T)
        query_block = QueryBlock(q_rows, k_rows, v_rows, dst, lse_row, first, last=k.min(first + block, T), pos=k.int(0))
        dropout = micro.Dropout.of(k, rate, stream, heads, sequence, head)
        key_range = KeyRange.of(k, mask_spec, T, starts, sequence)
        length = None if mask_spec.causal else T
        attend_queries(k, g, query_block, mask_spec, key_range=key_range, length=length, dropout=dropout)


@lowering("attention", views="q k v", also={"starts": "i32"})
def lower_attention(op: Op, c: Lowering) -> None:
    """Append the kernel of one block for short sequences (`fits_single_block`), else the blocked `attention` with its scratch."""
    constants = dense_constants(op)
    g = micro.Geometry.of(c.isa, op.q.dtype, constants["D"])
    operands = {"out": op.out, "lse": op.lse, "q": op.q, "keys": op.k, "values": op.v}
    if op.plain and fits_single_block(c.isa, op.q.dtype, g.D, int(op.out.shape[1]), op.rate):
        c.thread_scratch(micro.offsets(forward_units(g))[1])
        c.call(attention_single_block, operands, constants, writes="out lse")
        return
    c.thread_scratch(micro.offsets(scratch_units(g, op.rate, op.bounded))[1])
    operands |= {"starts": op.starts, "stream": op.stream}
    c.call(attention, operands, constants | {"rate": op.rate}, writes="out lse")


# --- decoding ---


def cache_row_of(k, sequence, T, pos, slots, length: int) -> tuple[Value, Value]:
    """(cache row, first position) of a sequence: the row of the caches that it owns (`slots` (B,), None: its own index) and the
    position of its first new token, clamped so that its T new rows end within the cache of `length` rows. `pos`: the positions (B,
    T), or one position for all sequences."""
    first = k.min(pos.get(sequence * T), k.int(length) - T) if isinstance(pos, Pointer) else pos
    return (sequence if slots is None else slots.get(sequence)), first


def append_to_caches(k, k_cache, v_cache, keys, values, positions, slots, *, batch, seq, C, length, strides) -> None:
    """Copy keys and values (batch, T, C) into rows [pos, pos + T) of each sequence in the caches (rows, length, C). `positions` (B,
    T) i32 or None: the scalar pos; `slots` (B,) i32: the cache row of a sequence, or None (`cache_row_of`). `strides`: of both."""
    T, first_positions = k.size(seq), k.scalar("pos") if positions is None else positions
    with k.parallel_for(k.size(batch) * T) as token:
        cache_row, pos = cache_row_of(k, token // T, T, first_positions, slots, length)
        row = (cache_row * length + pos + token % T) * C
        for cache, new, stride in zip((k_cache, v_cache), (keys, values), strides, strict=True):
            source, full = new.at(token * stride), C - C % k.lanes  # new row, columns in whole vectors
            with k.loop(0, full, k.lanes) as c:
                cache.store(source.load(c), row + c)
            if C % k.lanes:
                mask = k.mask_first(C % k.lanes)
                cache.store(source.load(full, mask), row + full, mask)


def attention_cached(k, out, q, k_cache, v_cache, positions, slots, *, batch, seq, heads, kv_heads, D, stride, length, mask_spec,
        exact) -> None:  # fmt: skip
    """The kernel of decoding and prefill: out (B, T, heads * D) = causal attention of the T new queries q (B, T, heads * D) over
    the KV caches (rows, length, kv_heads * D), to which `append_to_caches` has added the new keys. `positions`, `slots`: as there;
    `stride`: of q's rows. T = 1 takes a kernel of its own; with `exact` one that gives a query the bits that it has among several,
    and AMX tiles are not used, because they add in an order of their own."""
    g = micro.Geometry.of(k.isa, q.dtype, D, tiles=not exact)
    C = kv_heads * D
    T = k.size(seq)
    first_positions = k.scalar("pos") if positions is None else positions
    block, blocks = select_query_block(k, g, k.size(batch) * heads, T)
    has_one_query_kernel = not exact or g.pair == 1 or D % 2 == 0  # an odd D: a row's last bf16 pair is half the next row's
    with amx.tile_registers(k, g.tiles), k.parallel_for(k.size(batch) * heads * blocks) as item:
        sequence = item // (blocks * heads)
        head = item // blocks % heads
        first = item % blocks * block
        kv_head = micro.kv_head_of(head, heads, kv_heads)
        queries = micro.HeadRows.of(q, sequence * T, head, D=D, stride=stride)
        dst = micro.HeadRows.of(out, sequence * T, head, D=D, stride=heads * D)
        cache_row, pos = cache_row_of(k, sequence, T, first_positions, slots, length)
        keys, values = (micro.HeadRows.of(p, cache_row * length, kv_head, D=D, stride=C) for p in (k_cache, v_cache))
        is_one_query = T.equals(1)  # at run time: both kernels are emitted
        begin = None if mask_spec.window is None else k.max(pos - mask_spec.window, 0)  # the first key that query 0 sees

        if has_one_query_kernel:
            with k.when(is_one_query):
                if exact:
                    attend_one_query_exactly(k, g, queries, keys, values, dst.pointer, begin, pos + 1, mask_spec)
                elif begin is None:
                    attend_one_query(k, D, queries.pointer, keys, values, dst.pointer, pos + 1, mask_spec)
                else:
                    visible_keys, visible_values = keys.start(begin), values.start(begin)
                    attend_one_query(k, D, queries.pointer, visible_keys, visible_values, dst.pointer, pos + 1 - begin, mask_spec)
        with k.otherwise(is_one_query) if has_one_query_kernel else nullcontext():
            query_block = QueryBlock(queries, keys, values, dst, None, first, k.min(first + block, T), pos)
            key_range = None if mask_spec.window is None else KeyRange.of(k, mask_spec, pos + T, None, sequence)
            attend_queries(k, g, query_block, mask_spec, key_range=key_range, cached=True)


def attend_one_query(k, D: int, q, keys, values, out, count, mask_spec: MaskSpec) -> None:
    """out (D) = softmax(q K^T) V of one query q (D) over `count` keys and values (HeadRows of the cache): decoding, bound by
    memory. Channels are lanes, so that no lane idles. Three passes: scores to the thread's scratch (`count` fp32), probabilities in
    place of them, the weighted sum of the values."""
    scratch = k.thread_scratch("fp32")
    columns = k.columns(D)
    highest = one_query_scores(k, scratch, q, keys, count, mask_spec, D)

    g = micro.Geometry.of(k.isa, "fp32", D)  # says how exact the exponentials have to be
    total = k.var_vec(0.0)  # of the probabilities, lane by lane
    with k.loop(0, count, k.lanes) as j:
        p = micro.exp2_nonpositive(k, g, scratch.load(j) - highest)
        total.value = total.value + p
        scratch.store(p, j)

    acc = [k.var_vec(0.0) for _ in columns]
    with k.loop(0, count) as j:
        p = k.splat(scratch.get(j))
        row = values[j]
        for a, (c, mask) in zip(acc, columns, strict=True):
            a.value = k.fma(p, row.load(c, mask), a.value)
    scale = k.splat(k.float(1.0) / k.sum(total.value))
    for a, (c, mask) in zip(acc, columns, strict=True):
        out.store(a.value * scale, c, mask)


def one_query_scores(k, scores, q, keys, count, mask_spec: MaskSpec, D: int) -> Value:
    """scores (count) fp32 = q K^T of one query q (D) and `count` keys (HeadRows), scaled so that exp2 of them is the softmax's
    exponential, and -infinity up to the next vector. Returns the largest in all lanes."""
    columns = k.columns(D)
    cap = mask_spec.softcap
    factor = mask_spec.score_scale(k, D, 1 / cap) if cap else mask_spec.softmax_scale_log2(k, D)
    query = [q.load(c, mask) * factor for c, mask in columns]
    top = k.var_vec(float("-inf"))
    with k.loop(0, count, k.lanes) as j:
        products = []  # of a vector of keys each, whose lanes are to be added
        for i in range(k.lanes):
            row = keys[k.min(j + i, count - 1)]
            product = query[0] * row.load(*columns[0])
            for x, (c, mask) in zip(query[1:], columns[1:], strict=True):
                product = k.fma(x, row.load(c, mask), product)
            products.append(product)
        exists = k.mask_first(count - j)
        sums = lane_sums(k, products)
        capped = tanh(k, sums) * (cap * log2(e)) if cap else sums
        score = k.select(exists, capped, float("-inf"))
        top.value = k.max(score, top.value)
        scores.store(score, j)
    return k.splat(k.maximum(top.value))


def lane_sums(k, vectors) -> Value:
    """Reduce `lanes` vectors: lane i of the result is the sum over the lanes of vector i, in a fixed tree of pairwise additions."""
    n = k.lanes
    even, odd = list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))
    while len(vectors) > 1:
        vectors = [k.shuffle(a, b, even) + k.shuffle(a, b, odd) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@lowering("attention_cached", views="q k v", also={"positions": "i32", "slots": "i32"})
def lower_attention_cached(op: Op, c: Lowering) -> None:
    """Append two calls: `append_to_caches` with the new rows of k and v, then `attention_cached` over all of the caches."""
    shape, length = micro.size_constants(op), int(op.k_cache.shape[1])
    q_stride, *strides = shape.pop("strides")
    exact = op.attrs.get("exact", False)
    g = micro.Geometry.of(c.isa, op.q.dtype, shape["D"], tiles=not exact)
    mask_spec = MaskSpec.of(op, length)
    units = scratch_units(g, bounded=mask_spec.window is not None)
    one = micro.offsets(one_query_units(g))[1] if exact else 4 * (length + c.isa.lanes)
    c.thread_scratch(max(micro.offsets(units)[1], one))
    caches = {"k_cache": op.k_cache, "v_cache": op.v_cache, "positions": op.positions, "slots": op.slots}
    rows = {"batch": shape["batch"], "seq": shape["seq"], "C": op.kv_heads * g.D, "strides": tuple(strides)}
    c.call(append_to_caches, {**caches, "keys": op.k, "values": op.v}, {**rows, "length": length}, writes="k_cache v_cache")
    constants = {**shape, "stride": q_stride, "length": length, "mask_spec": mask_spec, "exact": exact}
    c.call(attention_cached, {"out": op.out, "q": op.q, **caches}, constants, writes="out")
