"""Rung 6, packed: the columns of B that a tile needs are first copied into a panel, one behind the other. The copy costs K x 2
vectors and serves all rows of A. The panel is read in the order of its addresses, so the processor fetches ahead; it touches
few pages; its lines spread over all sets of the caches, where rows of B that lie a power of two apart would displace each
other. The last panel is filled up with zeros, so the inner loop needs no mask.
"""

from anatomy.cpu.r05_register_tile import VECTORS, columns, left_of, multiplied, rows_of, step, store
from anatomy.rung import rung


def panel_bytes(isa, N, K):
    return 4 * K * VECTORS * isa.lanes


def packed(k, b, j, masks, *, N, K):
    """Columns j... of B as a panel in this thread's scratch, (K, VECTORS, lanes): right(p, v) of `multiplied`."""
    panel, span = k.thread_scratch(), VECTORS * k.lanes
    with k.loop(0, K) as p:
        for v, mask in enumerate(masks):
            panel.store(b.at(p * N).load(j + v * k.lanes, mask), p * span + v * k.lanes)
    return lambda p, v: panel.load(p * span + v * k.lanes)


@rung("packed", step=step, scratch=panel_bytes)
def packed_panels(k, c, a, b, *, M, N, K):
    def panel(j, masks):
        right = packed(k, b, j, masks, N=N, K=K)
        with k.loop(0, M, rows_of(k.isa)) as i:
            store(k, c, multiplied(k, left_of(k, a, i, M=M, K=K), right, K), i, j, masks, M=M, N=N)

    columns(k, N, panel)
