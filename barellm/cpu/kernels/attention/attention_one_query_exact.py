"""Decoding attention of one query with the bits that it has among several queries (the option `exact`).

The arithmetic is that of attention_forward.attend_queries, operation for operation: each score is one chain along D, each block of
KEY_BLOCK keys one step of the online softmax, the sum and each channel of the result one chain along the keys. There queries are
lanes, of which only one would be used. Here keys are the lanes of the scores (K is transposed in scratch, some vectors of keys at a
time), and channels those of the result.

`g`: geometry of tiles, `s`: blocks in scratch by name, `j0`: first key of a block, `j`: a key's index in it
(attention_microkernels.py)."""

from dataclasses import replace

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.cpu.kernels.attention.attention_mask import LOWEST, MaskSpec
from barellm.cpu.lang.vector import transpose


def one_query_geometry(g) -> micro.Geometry:
    """The geometry with keys as lanes: up to 8 vectors, chains enough to hide the latency of the multiply-adds."""
    return replace(g, vectors=min(8, 64 // g.lanes))


def one_query_units(g) -> dict[str, int]:
    """Sizes of the blocks in scratch, in 32-bit units; "p_units" are the probabilities as bf16 pairs along the keys."""
    wide = one_query_geometry(g)
    sizes = {"q": g.rows_units(1), "transposed": wide.transposed_units, "acc": g.padded_D, "p": micro.KEY_BLOCK}
    return {**sizes, "p_units": micro.KEY_BLOCK if g.pair == 2 else 0}


def attend_one_query_exactly(k, g, q, keys, values, out, first, count, mask_spec: MaskSpec) -> None:
    """out (D) = softmax(q K^T) V of one query q over the keys [first, count) (`first` None: 0), by online softmax over blocks of
    KEY_BLOCK keys. `keys`, `values`: HeadRows of the KV cache. Scratch (`one_query_units`): "q" (1, D) units, "transposed"
    [D][keys], "p" and "p_units" [KEY_BLOCK] probabilities, "acc" [g.padded_D] fp32. `mask_spec`: scale and softcap. `g`: the
    geometry of several queries, whose order of operations is kept; `wide`: keys as lanes."""
    wide, s = one_query_geometry(g), micro.blocks_of(k, one_query_units(g))
    scale_log2 = mask_spec.softmax_scale_log2(k, g.D)
    micro.pack_tile(k, g, q, k.int(1), 1, s["q"])
    micro.clear(k, s["acc"], g.padded_D)
    highest = k.var_vec(float("-inf") if first is None else LOWEST)  # the maximum so far, in all lanes
    total = k.var_vec(0.0)  # and the sum
    with k.loop(0 if first is None else first & -micro.KEY_BLOCK, count, micro.KEY_BLOCK) as j0:
        end = k.min(count - j0, micro.KEY_BLOCK)  # keys of the block
        begin = 0 if first is None else k.max(first - j0, 0) & -wide.queries
        top = k.var_vec(float("-inf"))
        with k.loop(begin, end, wide.queries) as j:
            transpose_keys(k, wide, keys.start(j0 + j), end - j, s["transposed"])
            chains = micro.micro_kernel(
                k, wide, micro.BroadcastOperand(s["q"], 0, 1), micro.VectorOperand(s["transposed"], wide.queries), g.d_steps, rows=1
            )
            for v, x in enumerate(chains[0]):
                key = j + v * g.lanes
                visible = k.mask_first(end - key)
                if first is not None:
                    visible = visible & (k.splat(first - j0 - key) <= k.iota())
                score = k.select(visible, mask_spec.capped(k, x, g.D), float("-inf"))
                s["p"].store(score, key)
                top.value = k.max(score, top.value)
        before = highest.value
        highest.value = k.max(k.splat(k.maximum(top.value)), before)
        alpha = micro.exp2_nonpositive(k, g, (before - highest.value) * scale_log2)  # rescales what came before
        shift = highest.value * -scale_log2
        with k.loop(begin, end, g.lanes) as j:
            p = micro.exp2_nonpositive(k, g, k.fma(s["p"].load(j), scale_log2, shift))
            s["p"].store(p, j)
            if g.pair == 2:
                s["p_units"].as_dtype("bf16").store(p, j)
        total.value = k.fma(total.value, alpha, k.splat(accumulate_one_query(k, g, s, values.start(j0), begin, end, alpha)))
    scale = 1.0 / total.value
    for c, mask in k.columns(g.D):
        out.store(s["acc"].load(c) * scale, c, mask)


def transpose_keys(k, g, keys, count, dst) -> None:
    """dst [g.d_steps][g.queries] = g.queries keys (HeadRows) as lanes, in units along D; the last of `count` is repeated."""
    with k.loop(0, g.queries, g.lanes) as t:
        rows = [keys[k.min(t + i, count - 1)] for i in range(g.lanes)]
        for c in range(0, g.d_steps, g.lanes):
            mask = None if c + g.lanes <= g.d_steps else k.mask_first(g.d_steps - c)
            square = [x.load(c, mask) if g.pair == 1 else k.bitcast(x.as_dtype("i32").load_raw(c, mask), k.vec) for x in rows]
            for i, column in enumerate(transpose(k, square)):
                dst.store(column, (c + i) * g.queries + t)


def accumulate_one_query(k, g, s, values, begin, end, alpha) -> Value:
    """s["acc"] [D] fp32 = alpha s["acc"] + p @ values over the keys [begin, end) of a block, a chain for each channel; returns the
    sum of p. s["p"] [KEY_BLOCK] fp32 are the probabilities, s["p_units"] the same as bf16 pairs; `values`: HeadRows from the
    block's first key on. A few vectors of channels at a time stay in registers."""
    columns, total = k.columns(g.D), k.var(k.float(0.0))
    max_columns = max(1, k.isa.registers // 2)  # vectors of channels
    for first_column in range(0, len(columns), max_columns):
        columns_at_once = columns[first_column : first_column + max_columns]
        acc = [k.var(s["acc"].load(c) * alpha) for c, _ in columns_at_once]
        with k.loop(begin, end, g.pair) as j:
            if first_column == 0:
                for i in range(g.pair):  # behind the end p is 0
                    total.value = total.value + s["p"].get(j + i)
            if g.pair == 1:
                p, row = k.splat(s["p"].get(j)), values[j]
                for a, (c, mask) in zip(acc, columns_at_once, strict=True):
                    a.value = k.fma(p, row.load(c, mask), a.value)
            else:
                p, rows = k.splat(s["p_units"].as_dtype("i32").get(j >> 1)), (values[j], values[k.min(j + 1, end - 1)])
                for a, (c, mask) in zip(acc, columns_at_once, strict=True):
                    pair = k.interleave(*(row.load_raw(c, mask) for row in rows))
                    a.value = k.dot(a.value, p, k.bitcast(pair, k.ivec))
        for a, (c, _) in zip(acc, columns_at_once, strict=True):
            s["acc"].store(a.value, c)
    return total.value
