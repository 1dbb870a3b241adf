"""Tile operations of attention's backward pass, which its schedules share: one head of one sequence, with its blocks in scratch.

Shapes and formulas are those of attention_backward.py (P, dS, M = dropout multipliers), layouts and parameters those of
attention_microkernels.py: `g`, the geometry; `s`, scratch blocks by name; `t`, the first query of a group of g.queries; `j0`, the
first key of a block of KEY_BLOCK; `j`, a key's row in it. Scores, P and dS are transposed, (keys, queries)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from math import e, log2
from typing import Any

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.attention import attention_amx, attention_mask
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.program.integers import round_up


def scratch_units(g, rate: float, length: int, *, shared: bool, bounded: bool, capped: bool) -> dict[str, int]:
    """Sizes of a BackwardHead's scratch blocks (32-bit units). fp32 accumulators: "dq" of `length` queries, "dk" and "dv"
    [key][g.padded_D] of a block of keys, or (`shared`: grouped queries) of `length`. `bounded`: windows or documents."""
    kv_length = round_up(length, micro.KEY_BLOCK) if shared else micro.KEY_BLOCK
    return {
        "rows": g.rows_units(g.queries),
        "q_transposed": g.transposed_units,
        "do_transposed": g.transposed_units,
        "q": g.vnni_units(g.queries) + g.lanes,
        "do": g.vnni_units(g.queries) + g.lanes,
        "k_rows": g.rows_units(micro.KEY_BLOCK),
        "v_rows": g.rows_units(micro.KEY_BLOCK),
        "k": g.vnni_units(micro.KEY_BLOCK),
        "p_tile": g.rows * g.queries,
        "dp_tile": g.rows * g.queries if g.tiles else 0,
        "p": micro.KEY_BLOCK * g.queries // g.pair,  # (keys, queries) in units along the queries
        "ds": micro.KEY_BLOCK * g.queries // g.pair,
        "ds_vnni": micro.KEY_BLOCK * g.queries // g.pair,  # in units along the keys
        "keep": micro.KEY_BLOCK * g.queries if rate else 0,
        "dk": kv_length * g.padded_D,
        "dv": kv_length * g.padded_D,
        "out": g.queries * g.padded_D,
        "dq": g.accumulator_units(-(-length // g.queries)),
        "first_keys": g.queries if bounded else 0,
        **({"slope_tile": g.rows * g.queries} if capped else {}),
    }


@contextmanager
def query_heads(k, group: int) -> Iterator[Value]:
    """Loop over the `group` query heads that share a head of keys (GQA); yields the index in the group. One: no loop."""
    with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as index:
        yield index


def ends_of_group(group: int, index) -> tuple[Value, Value] | tuple[None, None]:
    """(is_first, is_last), i1, of the query head `index` of its group; None for a group of one head, which is both."""
    return (None, None) if group == 1 else (index.equals(0), index.equals(group - 1))


Operands = tuple[Any, ...]  # q, keys, values, their gradients, dout, lse, delta, starts: pointers; stream


class BackwardHead:
    """One query head of one sequence in a backward pass, and the steps of the pass on it. Attributes beside `k` and `g`:

    q, dq, dout, keys, values, dk, dv   the rows in memory (HeadRows) of the query head, and of its head of keys
    lse, delta                          [T] fp32, of the forward pass and of attention_delta; T: positions of the sequence
    score_scale, softmax_scale_log2     the factor of q k^T, and the factor of the exponent times log2(e)
    mask_spec, key_range, length        the mask; windows or documents, else None; keys of full attention, None: causal
    dropout                             None: no dropout
    s                                   its blocks in scratch by name (`scratch_units`)"""

    def __init__(self, k, operands: Operands, sequence, head, *, seq, heads, kv_heads, D, strides, rate, length,
            mask_spec: attention_mask.MaskSpec, g: micro.Geometry, units: dict[str, int] | None = None) -> None:  # fmt: skip
        """Find the rows of query head `head` of sequence number `sequence`. `operands`: the kernel's; `strides`: of q, k, v, dq,
        dk, dv; `rate` of dropout; `length`: queries whose dq accumulates in scratch; `units`: sizes of `s` (None: usual)."""
        q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream = operands
        self.k, self.g = k, g
        self.mask_spec = mask_spec
        self.score_scale = mask_spec.score_scale(k, D)
        self.softmax_scale_log2 = mask_spec.softmax_scale_log2(k, D)
        self.T = mask_spec.length(k, seq)
        self.length = None if mask_spec.causal else self.T
        token = sequence * self.T  # the sequence's first row
        tensors = (q, keys, values, dq, dkeys, dvalues)
        rows = mask_spec.rows_of(tensors, token, head, D=D, heads=heads, kv_heads=kv_heads, strides=strides)
        self.q, self.keys, self.values, self.dq, self.dk, self.dv = rows
        self.dout = mask_spec.rows(dout, token, head, D=D, heads=heads, stride=mask_spec.fold * heads * D)
        self.lse, self.delta = (p.at((sequence * heads + head) * self.T) for p in (lse, delta))
        self.key_range = attention_mask.KeyRange.of(k, mask_spec, self.T, starts, sequence)
        shape = {"shared": heads > kv_heads, "bounded": self.key_range is not None, "capped": bool(mask_spec.softcap)}
        self.s = micro.blocks_of(k, units or scratch_units(g, rate, length, **shape))
        self.dropout = micro.Dropout.of(k, rate, stream, heads, sequence, head)

    def pack_keys(self, j0, max_keys=micro.KEY_BLOCK) -> Value:
        """Pack K and V of `max_keys` keys from j0 on as rows. Returns how many there are: fewer at the sequence's end."""
        k, g, s = self.k, self.g, self.s
        count = k.min(self.T - j0, max_keys)
        micro.pack_tile(k, g, self.keys.start(j0), count, micro.round_up(k, count, g.rows), s["k_rows"])
        micro.pack_tile(k, g, self.values.start(j0), count, micro.round_up(k, count, g.rows), s["v_rows"])
        return count

    def first_query(self, j0) -> Any:
        """The first group of queries that sees a key from j0 on: its first query, rounded down to a group."""
        return j0 // self.g.queries * self.g.queries if self.length is None else 0

    def num_keys(self, j0, count, t) -> Value:
        """How many of the `count` keys from j0 on are computed for the group of queries from t on (causal)."""
        num_keys = self.k.min(count, t + self.g.queries - j0) if self.length is None else count
        return attention_amx.round_to_tiles(self.k, self.g, num_keys)

    def pack_queries(self, t, *, vnni: bool) -> tuple[list[Value], list[Value]]:
        """Pack Q and dO of the group of queries from t on into s["q_transposed"] and s["do_transposed"], with `vnni` also into
        s["q"] and s["do"] as `vnni` blocks. Returns (-lse log2(e), by which exponents are shifted; delta), each g.vectors vectors,
        a lane for each query; zero for queries that do not exist."""
        k, g, s = self.k, self.g, self.s
        count = k.min(self.T - t, g.queries)  # queries that exist
        for source, name in ((self.q, "q"), (self.dout, "do")):
            rows = s["rows"] if g.pair == 2 or not vnni else s[name]
            micro.pack_tile(k, g, source.start(t), count, g.queries, rows)
            micro.transpose_tile(k, g, rows, s[name + "_transposed"])
            if vnni:
                micro.vnni_pack(k, g, rows, g.queries, s[name])
        masks = [k.mask_first(count - v * g.lanes) for v in range(g.vectors)]
        shift = [self.lse.load(t + v * g.lanes, mask) * -log2(e) for v, mask in enumerate(masks)]
        return shift, [self.delta.load(t + v * g.lanes, mask) for v, mask in enumerate(masks)]

    def key_bounds(self, t) -> micro.KeyBounds | None:
        """The key bounds of the queries from t on; None without windows and documents."""
        if self.key_range is None:
            return None
        first_keys = self.s["first_keys"].as_dtype("i32")
        self.key_range.store_first_keys(self.k, self.g, t, first_keys)
        return self.key_range.bounds_of(self.k, self.g, t, first_keys)

    def probabilities(self, j0, t, begin, num_keys, shift, delta, *, for_dkdv: bool,
            key_bounds: micro.KeyBounds | None = None) -> None:  # fmt: skip
        """Recompute P = exp(S - lse), and dS = P (M dP - delta), of the packed keys [begin, num_keys) of the block from key j0 on x
        the group of queries from t on: S = K Q^T, dP = V dO^T, M: dropout's multipliers; with a softcap dS times its slope. Writes
        s["ds_vnni"] = dS in units along the keys, `for_dkdv` also s["p"] = P M and s["ds"] = dS in units along the queries.
        Operands: `pack_keys` and `pack_queries`, whose results are `shift` and `delta`."""
        k, g, s = self.k, self.g, self.s
        if self.dropout:
            self.dropout.fill(k, g, s["keep"], t, j0, num_keys)
        if g.tiles:
            self._probabilities_of_tiles(j0, t, begin, num_keys, shift, delta, for_dkdv=for_dkdv, key_bounds=key_bounds)
            return
        with k.loop(begin, num_keys, g.rows) as j:
            self._probability_tile(j, j0 + j, t, shift, key_bounds)
            dp = micro.score_tile(k, g, s["v_rows"], j, s["do_transposed"])  # [g.rows][g.vectors]
            ds = []
            for r in range(g.rows):
                p = [s["p_tile"].load(r * g.queries + v * g.lanes) for v in range(g.vectors)]
                slopes = (s["slope_tile"].load(r * g.queries + v * g.lanes) for v in range(g.vectors))
                ds.append(self._ds_of_key(j, r, p, dp[r], delta, slopes, for_dkdv=for_dkdv))
            if g.pair == 2:
                for r in range(0, g.rows, 2):
                    target = s["ds_vnni"].at(((j + r) >> 1) * g.queries)
                    for v in range(g.vectors):
                        target.store(micro.pack_units(k, g, ds[r][v], ds[r + 1][v]), v * g.lanes)
            self.record_ds(j, ds)

    def _ds_of_key(self, j, r, p, dp, delta, slopes: Iterable[Value], *, for_dkdv: bool) -> list[Value]:
        """dS = P (M dP - delta) of the key in packed row j + r, with a softcap times `slopes`. p, dp, delta, slopes and the result
        are rows of g.vectors vectors, a lane for each query; slopes are emitted when they are taken. Stores, in units along the
        queries, s["p"] = P M and s["ds"] = dS with `for_dkdv`; without, only fp32 units of dS, which have no other layout."""
        k, g, s = self.k, self.g, self.s
        per_row = g.queries // g.pair  # units of a row of P or dS
        dropped_p = p
        if self.dropout:
            multipliers = [s["keep"].at((j + r) * g.queries).load(v * g.lanes) for v in range(g.vectors)]
            dropped_p, dp = ([x * m for x, m in zip(row, multipliers, strict=True)] for row in (p, dp))
        ds = [x * (y - d) for x, y, d in zip(p, dp, delta, strict=True)]  # P before dropout: M is in dp
        if self.mask_spec.softcap:
            ds = [x * slope for x, slope in zip(ds, slopes, strict=True)]
        if for_dkdv:
            micro.store_units(k, g, s["p"].at((j + r) * per_row), dropped_p)
        if for_dkdv or g.pair == 1:
            micro.store_units(k, g, s["ds"].at((j + r) * per_row), ds)
        return ds

    def _probabilities_of_tiles(self, j0, t, begin, num_keys, shift, delta, *, for_dkdv: bool,
            key_bounds: micro.KeyBounds | None) -> None:  # fmt: skip
        """`probabilities` on AMX: the tile registers leave S and dP of a tile of keys in memory, s["p_tile"] and s["dp_tile"]
        [g.rows][g.queries] fp32; a second pass takes two rows at a time, which are a VNNI pair along the keys. Parameters: as
        there."""
        k, g, s = self.k, self.g, self.s
        with k.loop(begin, num_keys, g.rows) as j:
            micro.score_tile_amx(k, g, s["k_rows"], j, s["q_transposed"], s["p_tile"])
            micro.score_tile_amx(k, g, s["v_rows"], j, s["do_transposed"], s["dp_tile"])
            for r, is_visible in attention_amx.row_pairs(k, g, *self.tile_mask(j0 + j, t, key_bounds)):
                # dS of the keys j + r and j + r + 1, which are stored as pairs.
                ds = [self._ds_of_tile_row(j, i, is_visible, shift, delta, for_dkdv=for_dkdv) for i in (r, r + 1)]
                for v in range(g.vectors):
                    vnni = micro.pack_units(k, g, ds[0][v], ds[1][v])
                    s["ds_vnni"].store(vnni, ((j + r) >> 1) * g.queries + v * g.lanes)

    def _ds_of_tile_row(self, j, r, is_visible: micro.LaneMask | None, shift, delta, *, for_dkdv: bool) -> list[Value]:
        """`_ds_of_key` of row r of the tiles of scores and dP in memory; 0 where not `is_visible` (None: all are)."""
        k, g, s = self.k, self.g, self.s
        row_offset = r * g.queries
        p, scores = [], []
        for v in range(g.vectors):
            scores.append(self.mask_spec.capped(k, s["p_tile"].load(row_offset + v * g.lanes), g.D))
            p.append(micro.exp2_nonpositive(k, g, k.fma(scores[v], self.softmax_scale_log2, shift[v])))
        if is_visible is not None:
            p = [k.select(is_visible(r, v), x, 0.0) for v, x in enumerate(p)]
        dp = [s["dp_tile"].load(row_offset + v * g.lanes) for v in range(g.vectors)]
        slopes = (1.0 - y * y for y in scores)  # a softcap's: 1 - tanh^2
        return self._ds_of_key(j, r, p, dp, delta, slopes, for_dkdv=for_dkdv)

    def _probability_tile(self, j, key, t, shift, key_bounds: micro.KeyBounds | None) -> None:
        """s["p_tile"] [g.rows][g.queries] fp32 = P = exp2(S * softmax_scale_log2 + shift) of the tile from packed row j on, whose
        first key is `key`; 0 where masked. With a softcap also s["slope_tile"] = its derivative, 1 - tanh^2."""
        k, g, softmax_scale_log2 = self.k, self.g, self.softmax_scale_log2

        tile = micro.score_tile(k, g, self.s["k_rows"], j, self.s["q_transposed"], self.start(j))
        if self.mask_spec.softcap:
            tile = [[self.mask_spec.capped(k, x, g.D) for x in row] for row in tile]
            micro.store_tile(g, [[1.0 - x * x for x in row] for row in tile], self.s["slope_tile"], g.queries)
        p = [[micro.exp2_nonpositive(k, g, k.fma(x, softmax_scale_log2, shift[v])) for v, x in enumerate(row)] for row in tile]

        partly_masked, make_mask = self.tile_mask(key, t, key_bounds)
        with k.when(partly_masked):
            is_visible = make_mask()
            p_masked = [[k.select(is_visible(r, v), x, 0.0) for v, x in enumerate(row)] for r, row in enumerate(p)]
            micro.store_tile(g, p_masked, self.s["p_tile"], g.queries)
        with k.otherwise(partly_masked):
            micro.store_tile(g, p, self.s["p_tile"], g.queries)

    def start(self, j) -> list[list[Value]] | None:
        """The initial accumulator of the score tile from row j on, for a position bias; None: zero."""
        return None

    def record_ds(self, j, ds) -> None:
        """Called with dS of the tile from row j on; a subclass may keep it."""

    def tile_mask(self, key, t, key_bounds: micro.KeyBounds | None) -> tuple[Value, Callable[[], micro.LaneMask]]:
        """`micro.tile_mask` of the tile of keys from `key` on and the group."""
        return micro.tile_mask(self.k, self.g, t, key_bounds, self.length, None, key)

    def add_dkdv(self, begin, num_keys, dk, dv) -> None:
        """dv += (P M)^T dO and dk, before scaling, += dS^T Q for keys [begin, num_keys) of a block and the group. dk, dv
        [key][g.padded_D] fp32: rows up to a tile of g.rows behind `num_keys` are written too."""
        k, g, s = self.k, self.g, self.s
        micro.accumulate_rows(k, g, dv, s["p"], s["do"], begin, num_keys)
        micro.accumulate_rows(k, g, dk, s["ds"], s["q"], begin, num_keys)

    def store_dkdv(self, j0, count, dk, dv, add) -> None:
        """dk (times the score scale) and dv in memory, `count` keys from j0 on, = the accumulators `dk` and `dv` [key][g.padded_D]
        fp32; `add` (of dk, of dv): whether (i1) to add to what is there, None: no."""
        k, g = self.k, self.g
        micro.unpack_tile(k, g, dv, count, self.dv.start(j0), 1.0, add[1])
        micro.unpack_tile(k, g, dk, count, self.dk.start(j0), self.score_scale, add[0])

    def add_dq(self, begin, num_keys, acc) -> None:
        """acc [D][queries] fp32 += K^T dS^T, which is dQ^T of a group of queries before scaling, over the keys [begin, num_keys) of
        a block: s["k"] and s["ds_vnni"], or with fp32 units s["k_rows"] and s["ds"]."""
        g, s = self.g, self.s
        keys, ds = (s["k"], s["ds_vnni"]) if g.pair == 2 else (s["k_rows"], s["ds"])
        micro.accumulate_transposed(self.k, g, acc, keys, ds, begin, num_keys)

    def store_dq(self, t, acc, add) -> None:
        """dq in memory, the group of queries from t on, = the score scale times the accumulator acc [D][queries] fp32, transposed
        through s["out"]; `add`: whether (i1) to add it to what is there, None: no."""
        k, g, s = self.k, self.g, self.s
        scale = [k.to(self.score_scale, k.vec)] * g.vectors
        micro.transpose_accumulator(k, g, acc, s["out"], scale)
        micro.unpack_tile(k, g, s["out"], k.min(self.T - t, g.queries), self.dq.start(t), 1.0, add)
