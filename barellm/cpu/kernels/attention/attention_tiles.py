"""What attention does between products of AMX tiles: the tiles lie in memory, and vectors of queries pass over their rows.

Blocks as in attention_blocks.py. A tile of scores has 32 keys, so that one step of the contraction over keys is one tile of
probabilities; what lies beyond the last key in it is zero. The processor overlaps by itself: while tile registers multiply one
tile, the exponentials of the one before fill the vector units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.attention.attention_blocks import Geometry, round_up, scores_of_tiles
from barellm.cpu.lang import Pointer, Value

Seen = Callable[[Any, int], Value]  # row of a tile, vector -> which lanes' queries see the row's key
BOTH = 2  # rows of a tile that are packed together


def whole_tiles(k: KernelBuilder, g: Geometry, seen: Value) -> Value:
    """The keys of a block that are computed where `seen` of them are seen."""
    return round_up(k, seen, g.rows) if g.tiles else seen


def each_pair(
    k: KernelBuilder, g: Geometry, edge: Value, visible_of: Callable[[], Seen], do: Callable[[Value, Seen | None], None]
) -> None:
    """do(row, seen) for the rows of a tile, every second one; `seen` is None where all queries see all of the tile."""
    with k.when(edge):
        seen = visible_of()
        with k.loop(0, g.rows, BOTH) as r:
            do(r, seen)
    with k.otherwise(edge), k.loop(0, g.rows, BOTH) as r:
        do(r, None)


def highest_scores(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], turned: Pointer, begin: Any, seen: Value,
    edges: Callable[[Value], tuple[Value, Callable[[], Seen]]],
) -> list[Value]:  # fmt: skip
    """K Q^T of the keys [begin, seen) of a block into s["p"], -infinity where a query does not see a key; the largest score of each
    query."""
    top = [k.var_vec(float("-inf")) for _ in range(g.vectors)]
    with k.loop(begin, seen, g.rows) as j:
        target = s["p"].at(j * g.queries)
        scores_of_tiles(k, g, s["k"], j, turned, target)

        def rows(r: Value, sees: Seen | None, target: Pointer = target) -> None:
            for v in range(g.vectors):
                best = top[v].value
                for i in range(BOTH):
                    at = (r + i) * g.queries + v * g.lanes
                    x = target.load(at)
                    if sees is not None:
                        x = k.select(sees(r + i, v), x, float("-inf"))
                        target.store(x, at)
                    best = k.max(x, best)
                top[v].value = best

        each_pair(k, g, *edges(j), rows)
    return [t.value for t in top]
