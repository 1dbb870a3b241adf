"""Attention of short sequences, whose scores of a head are one block: no online softmax, no accumulators in memory.

Shapes and formulas as in attention_forward.py and attention_backward.py; parameters and layouts of blocks as in
attention_microkernels.py, blocks having MAX_SEQ tokens: `g`, the geometry of tiles; `s`, the blocks in the thread's scratch by
name; `t`, the first query of a group of two vectors of lanes; `j`, the first key of a tile. Blocked attention of a head of 64
tokens would spend more on clearing, accumulating and transposing blocks than on its GEMMs. Here all operands of a head stay in
L1/L2, every GEMM stores rows (units of the left operand are broadcast, so the probabilities need no repacking), and the causal half
is skipped by vectors of queries and tiles of keys.

Each element is the same chain of the same operations, and only zeros are left out: the bits are those of blocked attention."""

from collections.abc import Iterator
from contextlib import nullcontext
from math import e, log2
from typing import Any

from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.cpu.kernels.attention.attention_backward_tiles import query_heads
from barellm.cpu.kernels.attention.attention_mask import MaskSpec
from barellm.cpu.lang.vector import ln, transpose

MAX_SEQ = 64  # tokens: scores, probabilities and operands of a head are 52 KiB


def fits_single_block(isa: ISA, dtype: str, D: int, length: int, rate: float) -> bool:
    """Whether sequences of up to `length` tokens are supported: bf16 dot products, rows that fill cache lines, no dropout."""
    g = micro.Geometry.of(isa, dtype, D)
    units = g.pair == 2 and not g.tiles and g.lanes == 2 * g.rows and D % (2 * g.lanes) == 0
    return length <= MAX_SEQ and not rate and units


def forward_units(g) -> dict[str, int]:
    """Sizes of the scratch blocks of the forward pass, in 32-bit units; all hold MAX_SEQ tokens or a group of queries."""
    return {
        "q_transposed": g.d_steps * MAX_SEQ,
        "k_rows": MAX_SEQ * g.row_units,
        "v": g.vnni_units(MAX_SEQ),
        "scores": MAX_SEQ * g.queries,
        "p": MAX_SEQ * g.queries // 2,  # of a group of queries, [key / 2][g.queries]
        "inverse": g.queries,
    }


def backward_units(g, shared: bool) -> dict[str, int]:
    """Sizes of the backward scratch blocks in 32-bit units, for MAX_SEQ tokens. "p", "ds": (keys, queries) as bf16 pairs along the
    queries; "ds_vnni": along the keys. With grouped queries (`shared`) dk and dv, sums over heads, are fp32 [key][g.padded_D]."""
    vnni = {name: g.vnni_units(MAX_SEQ) for name in ("q", "k", "do")}
    transposed = {name: g.d_steps * MAX_SEQ for name in ("q_transposed", "do_transposed")}
    # [key][MAX_SEQ / 2]; the last of them [key / 2][MAX_SEQ].
    along_queries = {name: MAX_SEQ * MAX_SEQ // 2 for name in ("p", "ds", "ds_vnni")}
    rows = {"k_rows": MAX_SEQ * g.row_units, "v_rows": MAX_SEQ * g.row_units}
    sums = {name: MAX_SEQ * g.padded_D if shared else 0 for name in ("dk", "dv")}
    return {**rows, **transposed, **vnni, **along_queries, **sums, "p_tile": g.rows * g.queries, "shift": MAX_SEQ,
        "delta": MAX_SEQ}  # fmt: skip


def pack_head(k, g, source, count, *, rows=None, transposed=None, vnni=None) -> None:
    """Read `count` bf16 rows of `source` (HeadRows) once, and write them to each destination that is given: `rows` and `vnni` as in
    attention_microkernels.py, `transposed` [g.d_steps][MAX_SEQ] pairs; all zero-padded to a multiple of g.queries tokens. A step
    transposes a square of `lanes` rows x `lanes` pairs in registers."""
    with k.loop(0, micro.round_up(k, count, g.queries), g.lanes) as t:
        for c in range(0, g.row_units, g.lanes):
            square = [k.var(k.const(0, k.ivec)) for _ in range(g.lanes)]  # rows t, t + 1, ... of `lanes` units
            all_rows = (t + g.lanes) <= count  # else missing rows stay zero
            with k.when(all_rows):
                for i, x in enumerate(square):
                    x.value = source[t + i].as_dtype("i32").load_raw(c)
            with k.otherwise(all_rows):
                for i, x in enumerate(square):
                    inside = (t + i) < count
                    with k.when(inside):
                        x.value = source[t + i].as_dtype("i32").load_raw(c)
            units = [x.value for x in square]
            if rows is not None:
                for i, x in enumerate(units):
                    rows.as_dtype("i32").store_raw(x, (t + i) * g.row_units + c)
            if vnni is not None:
                halves = [k.bitcast(x, f"<{2 * g.lanes} x i16>") for x in units]
                for i in range(0, g.lanes, 2):
                    for half in range(2):
                        # Pairs (row t + i, row t + i + 1) of columns.
                        order = [n + half * g.lanes + m for n in range(g.lanes) for m in (0, 2 * g.lanes)]
                        pairs = k.bitcast(k.shuffle(halves[i], halves[i + 1], order), k.ivec)
                        vnni.as_dtype("i32").store_raw(pairs, ((t + i) >> 1) * g.padded_D + 2 * c + half * g.lanes)
            if transposed is not None:
                for i, column in enumerate(transpose(k, units)):
                    transposed.as_dtype("i32").store_raw(column, t + (c + i) * MAX_SEQ)


def store_tile_rows(k, g, tile, dst, first, c, count, factors) -> None:
    """dst[first + r] (HeadRows) from column c = row r of a register tile [row][vector] times factors[r] (rows below `count`).
    `factors`: a vector or number for each row; `first`, `count`: rows of dst."""
    all_rows = (first + len(tile)) <= count
    for needs_check, branch in ((False, k.when), (True, k.otherwise)):
        with branch(all_rows):
            for r, row in enumerate(tile):
                with k.when((first + r) < count) if needs_check else nullcontext():
                    for v, x in enumerate(row):
                        dst[first + r].store(x * factors[r], c + v * g.lanes)


def gemm_rows(k, g, left: micro.BroadcastOperand, vnni, steps, dst, first, count, factors, *, add: bool = False) -> None:
    """dst (HeadRows), rows [first, first + g.rows) below `count`, = factors[r] (L @ X), or with `add` += L @ X. `left`: L (g.rows,
    tokens), bf16 pairs along the tokens, and `vnni`: X (tokens, D), a `vnni` block, both from the first of `steps` pairs on."""
    with k.loop(0, g.padded_D, g.vectors * g.lanes) as c:
        start = [[dst[first + r].load(c + v * g.lanes) for v in range(g.vectors)] for r in range(g.rows)] if add else None
        tile = micro.micro_kernel(k, g, left, micro.VectorOperand(vnni.at(c), g.padded_D), steps, start)
        store_tile_rows(k, g, tile, dst, first, c, count, factors)


def causal_tiles(k, g, t) -> Iterator[tuple[Value, int, int, bool]]:
    """(first key, rows, first vector, needs_mask) of the tiles of all keys that the group of g.queries queries (two vectors) from t
    on sees: a loop as those of loops.py. A tile has both vectors and g.rows keys, or only the second vector and twice as many keys;
    `needs_mask`: its first vector has queries before its last key."""
    with k.loop(0, t, g.rows) as j:
        yield j, g.rows, 0, False
    with k.loop(t, t + g.lanes, g.rows) as j:
        yield j, g.rows, 0, True
    yield t + g.lanes, 2 * g.rows, 1, True


def mask_future_queries(k, g, x, key, query, masked: float) -> Value:
    """x, whose lanes are queries from `query` on, with `masked` where the query is before `key`."""
    return k.select(k.iota() < k.splat(key - query), masked, x)


def attention_single_block(k, out, lse, q, keys, values, *, batch, seq, heads, kv_heads, D, strides, mask_spec: MaskSpec) -> None:
    """The kernel: out (B, T, heads * D) and lse (B, heads, T) fp32 of causal attention, T <= MAX_SEQ. A work item is a head of a
    sequence: all its scores are one block of scratch, s["scores"] [key][g.queries] for a group of queries at a time. `batch`,
    `seq`: numbers or names of run-time scalars; `strides`: of q, keys and values."""
    g, T = micro.Geometry.of(k.isa, q.dtype, D), k.size(seq)
    s = micro.blocks_of(k, forward_units(g))
    softmax_scale_log2 = mask_spec.softmax_scale_log2(k, D)
    with k.parallel_for(k.size(batch) * heads) as item:
        sequence, head = item // heads, item % heads
        token, kv_head = sequence * T, micro.kv_head_of(head, heads, kv_heads)
        dst = micro.HeadRows.of(out, token, head, D=D, stride=heads * D)
        pack_head(k, g, micro.HeadRows.of(q, token, head, D=D, stride=strides[0]), T, transposed=s["q_transposed"])
        pack_head(k, g, micro.HeadRows.of(keys, token, kv_head, D=D, stride=strides[1]), T, rows=s["k_rows"])
        pack_head(k, g, micro.HeadRows.of(values, token, kv_head, D=D, stride=strides[2]), T, vnni=s["v"])
        with k.loop(0, T, g.queries) as t:
            highest = single_block_scores(k, g, s, t)
            totals = single_block_probabilities(k, g, s, t, [x * -softmax_scale_log2 for x in highest], softmax_scale_log2)
            for v in range(g.vectors):
                s["inverse"].store(1.0 / totals[v], v * g.lanes)
                value = k.fma(highest[v], mask_spec.score_scale(k, D), ln(k, totals[v]))
                lse.at(item * T + t).store(value, v * g.lanes, k.mask_first(T - t - v * g.lanes))
            with k.loop(0, g.queries, g.rows) as i:
                pairs = k.ceil_div(k.min(t + i + g.rows, T), 2)  # key pairs that the last of these queries sees
                factors = [k.splat(s["inverse"].get(i + r)) for r in range(g.rows)]
                gemm_rows(k, g, micro.BroadcastOperand(s["p"].at(i), 1, g.queries), s["v"], pairs, dst, t + i, T, factors)


def single_block_scores(k, g, s, t) -> list[Value]:
    """s["scores"] [key][g.queries] fp32 = K Q^T of the group of queries from t on, -infinity where the key is later; K:
    s["k_rows"], Q: s["q_transposed"], written by `pack_head`. Returns each query's largest score, g.vectors vectors."""
    top = [k.var_vec(float("-inf")) for _ in range(g.vectors)]
    for j, rows, first, needs_mask in causal_tiles(k, g, t):  # `rows` keys from j on x the queries of the vectors from `first` on
        right = micro.VectorOperand(s["q_transposed"].at(t + first * g.lanes), MAX_SEQ)
        left = micro.BroadcastOperand(s["k_rows"].at(j * g.row_units), g.row_units, 1)
        scores = micro.micro_kernel(k, g, left, right, g.d_steps, rows=rows, vectors=g.vectors - first)
        target = s["scores"].at(j * g.queries)
        for v in range(first, g.vectors):
            best = top[v].value
            for r, row in enumerate(scores):
                x = row[v - first]
                if needs_mask and v == first:
                    x = mask_future_queries(k, g, x, j + r, t + v * g.lanes, float("-inf"))
                target.store(x, r * g.queries + v * g.lanes)
                best = k.max(x, best)
            top[v].value = best
    return [x.value for x in top]


def single_block_probabilities(k, g, s, t, shift, softmax_scale_log2: float) -> list[Value]:
    """s["p"] [key / 2][g.queries] = exp2(scores * softmax_scale_log2 + shift) of the queries from t on, as bf16 pairs along the
    keys, from s["scores"] [key][g.queries] fp32. `shift`: g.vectors vectors, minus the scaled maxima. Returns the sums."""
    sums = [k.var_vec(0.0) for _ in range(g.vectors)]

    def key_pairs() -> Iterator[tuple[Any, int]]:
        """(first key, first vector) of each pair of keys that the group sees; the last keys only by its second vector."""
        with k.loop(0, t + g.lanes, 2) as j:
            yield j, 0
        last = t + g.lanes
        for i in range(0, g.lanes, 2):
            yield last + i, 1

    for j, first in key_pairs():
        for v in range(first, g.vectors):
            rows = [s["scores"].at((j + i) * g.queries).load(v * g.lanes) for i in range(2)]
            p = [micro.exp2_nonpositive(k, g, k.fma(x, softmax_scale_log2, shift[v])) for x in rows]
            for x in p:
                sums[v].value = sums[v].value + x
            s["p"].at((j >> 1) * g.queries).store(micro.pack_units(k, g, *p), v * g.lanes)
    return [x.value for x in sums]


def attention_backward_single_block(k, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, *, batch, seq, heads, kv_heads, D,
        strides, mask_spec) -> None:  # fmt: skip
    """The kernel: dq, dkeys and dvalues of causal attention, T <= MAX_SEQ, from lse and delta (B, heads, T) fp32. A work item is a
    head of keys with its group of query heads; of a group of several, dK and dV are summed in scratch (s["dk"], s["dv"], fp32) and
    stored at the end. `strides`: of q, k, v, dq, dk, dv; `delta`: as in attention_backward.py. `mask_spec`: has the softmax's
    scale."""
    g, T = micro.Geometry.of(k.isa, q.dtype, D), k.size(seq)
    group = heads // kv_heads
    s = micro.blocks_of(k, backward_units(g, group > 1))
    scale, ones = [mask_spec.score_scale(k, D)] * g.rows, [1.0] * g.rows
    half = MAX_SEQ // 2  # units of a row of "p" and "ds"
    with k.parallel_for(k.size(batch) * kv_heads) as item:
        sequence, kv_head = item // kv_heads, item % kv_heads
        token = sequence * T
        tensors = zip((keys, values, dkeys, dvalues), (*strides[1:3], *strides[4:]), strict=True)
        key_rows, value_rows, dk, dv = (micro.HeadRows.of(p, token, kv_head, D=D, stride=stride) for p, stride in tensors)
        pack_head(k, g, key_rows, T, rows=s["k_rows"], vnni=s["k"])
        pack_head(k, g, value_rows, T, rows=s["v_rows"])
        sums = [(dv, ones), (dk, scale)]
        # Several query heads add to dv and dk: their sums are fp32, and scaled and rounded at the end.
        if group > 1:
            sums = [(micro.HeadRows(s[name], g.padded_D), ones) for name in ("dv", "dk")]
            for dst, _ in sums:
                micro.clear(k, dst.pointer, MAX_SEQ * g.padded_D)
        with query_heads(k, group) as group_index:
            head = kv_head * group + group_index
            pack_head(k, g, micro.HeadRows.of(q, token, head, D=D, stride=strides[0]), T, transposed=s["q_transposed"], vnni=s["q"])
            dout_rows = micro.HeadRows.of(dout, token, head, D=D, stride=heads * D)
            pack_head(k, g, dout_rows, T, transposed=s["do_transposed"], vnni=s["do"])
            head_row = (sequence * heads + head) * T  # of lse and delta
            with k.loop(0, micro.round_up(k, T, g.queries), g.lanes) as t:
                mask = k.mask_first(T - t)
                s["shift"].store(lse.at(head_row).load(t, mask) * -log2(e), t)
                s["delta"].store(delta.at(head_row).load(t, mask), t)
            with k.loop(0, T, g.queries) as t:
                single_block_gradients(k, g, s, t, mask_spec.softmax_scale_log2(k, D))
            # dV = P^T dO and dK = dS^T Q, for g.rows keys at a time: only the queries from key j on see it.
            pairs = k.ceil_div(T, 2)
            with k.loop(0, T, g.rows) as j:
                u = j >> 1  # the first pair of queries
                for name, vnni, (dst, factors) in zip(("p", "ds"), ("do", "q"), sums, strict=True):
                    left, right = micro.BroadcastOperand(s[name].at(j * half + u), half, 1), s[vnni].at(u * g.padded_D)
                    gemm_rows(k, g, left, right, pairs - u, dst, j, T, factors, add=group > 1)
            # dQ = dS K, for g.rows queries at a time, which see no key behind their last one.
            dq_rows = micro.HeadRows.of(dq, token, head, D=D, stride=strides[3])
            with k.loop(0, T, g.rows) as i:
                num_keys = k.ceil_div(k.min(i + g.rows, T), 2)
                gemm_rows(k, g, micro.BroadcastOperand(s["ds_vnni"].at(i), 1, MAX_SEQ), s["k"], num_keys, dq_rows, i, T, scale)
        if group > 1:
            micro.unpack_tile(k, g, s["dv"], T, dv, 1.0)
            micro.unpack_tile(k, g, s["dk"], T, dk, scale[0])


def single_block_gradients(k, g, s, t, softmax_scale_log2: float) -> None:
    """P = exp(S - lse) and dS = P (dP - delta) of the group of queries from t on, with S = K Q^T and dP = V dO^T. Writes s["p"] and
    s["ds"], [key] [MAX_SEQ / 2] bf16 pairs along the queries, and s["ds_vnni"] = dS, [key / 2] [MAX_SEQ] pairs along the keys.
    Operands: packed by `pack_head`; s["shift"] = -lse log2(e) and s["delta"], [query] fp32. `g`, `s`: geometry, scratch
    (`backward_units`); tiles of the causal half only, so what is not written is not read."""
    for j, rows, first, needs_mask in causal_tiles(k, g, t):  # `rows` keys from j on x the queries of the vectors from `first` on
        lanes = range(first, g.vectors)
        shape = {"rows": rows, "vectors": len(lanes)}
        first_query = t + first * g.lanes
        scores = micro.micro_kernel(k, g, micro.BroadcastOperand(s["k_rows"].at(j * g.row_units), g.row_units, 1),
            micro.VectorOperand(s["q_transposed"].at(first_query), MAX_SEQ), g.d_steps, **shape)  # fmt: skip
        for n, v in enumerate(lanes):
            shift = s["shift"].load(t + v * g.lanes)
            for r, row in enumerate(scores):
                p = micro.exp2_nonpositive(k, g, k.fma(row[n], softmax_scale_log2, shift))
                if needs_mask and v == first:
                    p = mask_future_queries(k, g, p, j + r, t + v * g.lanes, 0.0)
                s["p_tile"].store(p, (r * len(lanes) + n) * g.lanes)
        dp = micro.micro_kernel(k, g, micro.BroadcastOperand(s["v_rows"].at(j * g.row_units), g.row_units, 1),
            micro.VectorOperand(s["do_transposed"].at(first_query), MAX_SEQ), g.d_steps, **shape)  # fmt: skip
        deltas = [s["delta"].load(t + v * g.lanes) for v in lanes]
        for r in range(0, rows, 2):
            ds: list[list[Value]] = []
            for i in (r, r + 1):
                p = [s["p_tile"].load((i * len(lanes) + n) * g.lanes) for n in range(len(lanes))]
                ds.append([x * (y - d) for x, y, d in zip(p, dp[i], deltas, strict=True)])
                unit = (j + i) * (MAX_SEQ // 2) + (first_query >> 1)  # of key j + i
                micro.store_units(k, g, s["p"].at(unit), p)
                micro.store_units(k, g, s["ds"].at(unit), ds[-1])
            for n, (even, odd) in enumerate(zip(*ds, strict=True)):
                s["ds_vnni"].store(micro.pack_units(k, g, even, odd), ((j + r) >> 1) * MAX_SEQ + first_query + n * g.lanes)
