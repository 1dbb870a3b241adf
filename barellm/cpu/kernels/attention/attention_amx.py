"""Softmax between AMX GEMMs: score tiles go through memory (L1), and vectors of queries process their rows.

Blocks as in attention_microkernels.py. A tile of scores has 32 keys, so that one K step over keys is one tile of probabilities;
beyond the last key it is zero. Out-of-order execution overlaps AMX and the vector units: while TMUL multiplies one tile, the
exponentials of the one before run."""

from collections.abc import Callable, Iterator

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.attention.attention_microkernels import LaneMask, TileMask, round_up, score_tile_amx

ROW_PAIR = 2  # rows of a tile that are one VNNI pair


def round_to_tiles(k, g, num_keys) -> Value:
    """How many keys of a block are computed where `num_keys` are visible: AMX computes full tiles."""
    return round_up(k, num_keys, g.rows) if g.tiles else num_keys


def row_pairs(k, g, partly_masked, make_mask: Callable[[], LaneMask]) -> Iterator[tuple[Value, LaneMask | None]]:
    """(first row, mask) of each VNNI pair of rows of a tile of scores in memory: a loop as those of loops.py, emitted twice. Tiles
    that are `partly_masked` (i1, at run time) get is_visible of make_mask() (`tile_mask`), others None."""
    with k.when(partly_masked):
        is_visible = make_mask()
        with k.loop(0, g.rows, ROW_PAIR) as r:
            yield r, is_visible
    with k.otherwise(partly_masked), k.loop(0, g.rows, ROW_PAIR) as r:
        yield r, None


def score_key_block_amx(k, g, s, transposed, begin, num_keys, tile_mask: TileMask, capped: Callable[[Value], Value]) -> list[Value]:
    """OnlineSoftmax._scores (attention_forward.py) on AMX: s["p"] [key][g.queries] fp32 = capped(K Q^T) of the packed keys [begin,
    num_keys), -infinity where a query does not see a key. The tile registers leave a tile of scores in memory (L1), and a second
    pass over its rows masks it and finds the maximum. `transposed`: Q, written by `transpose_tile`; tile_mask(j): `tile_mask` of
    the tile from row j on. Returns each query's largest score, g.vectors vectors."""
    top = [k.var_vec(float("-inf")) for _ in range(g.vectors)]
    with k.loop(begin, num_keys, g.rows) as j:
        target = s["p"].at(j * g.queries)
        score_tile_amx(k, g, s["k"], j, transposed, target)
        for r, is_visible in row_pairs(k, g, *tile_mask(j)):
            for v in range(g.vectors):
                best = top[v].value
                for i in range(ROW_PAIR):
                    offset = (r + i) * g.queries + v * g.lanes
                    score = target.load(offset)
                    x = capped(score)
                    if is_visible is not None:
                        x = k.select(is_visible(r + i, v), x, float("-inf"))
                    if x is not score:
                        target.store(x, offset)
                    best = k.max(x, best)
                top[v].value = best
    return [t.value for t in top]
