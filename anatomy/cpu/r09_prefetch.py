"""Rung 9, prefetch: while a tile is multiplied, the rows of A of the next tile and the lines of C that this one will write are
fetched. The processor sees a stream only after a few of its lines, and a tile of A is 6 or 12 short streams that begin at
once: their first lines would come late in every tile. The stores of C would wait too, for lines that were last touched a
whole panel ago. The panel is fp32 again, that of rung 6.
"""

from anatomy.cpu.r05_register_tile import columns, left_of, multiplied, rows_of, step, store
from anatomy.cpu.r06_packed import packed, panel_bytes
from anatomy.rung import rung

LINE = 16  # numbers of a cache line
AHEAD = 4  # lines of each of the next tile's rows: the processor goes on from there


def prefetched(k, c, a, i, j, *, N, K):
    """Start fetching what tile (i, j) will write, and where the tile below it begins to read. Any address will do: beyond the last
    row there is nothing to fetch, and no harm in asking."""
    rows = rows_of(k.isa)
    for r in range(rows):
        k.prefetch(c.at((i + r) * N + j), write=True)
        for line in range(min(AHEAD, -(-K // LINE))):
            k.prefetch(a.at((i + rows + r) * K + line * LINE))


@rung("prefetch", step=step, scratch=panel_bytes)
def prefetch(k, c, a, b, *, M, N, K):
    def panel(j, masks):
        right = packed(k, b, j, masks, N=N, K=K)
        with k.loop(0, M, rows_of(k.isa)) as i:
            prefetched(k, c, a, i, j, N=N, K=K)
            store(k, c, multiplied(k, left_of(k, a, i, M=M, K=K), right, K), i, j, masks, M=M, N=N)

    columns(k, N, panel)
