"""Rung 2, loop order: the loops over columns and depth change places, so B and C are read along their rows. Each cache line is
now used whole, and the next one is on its way before it is asked for, because the processor recognises the stream. The
additions of one row of C do not wait for each other any more. In exchange, C is loaded and stored for every multiply-add.
"""

from anatomy.rung import rung


@rung("loop order", step=lambda isa: (2, 12))
def loop_order(k, c, a, b, *, M, N, K):
    with k.loop(0, M) as i:
        a_row, c_row = a.at(i * K), c.at(i * N)
        with k.loop(0, N) as j:
            c_row.put(0.0, j)
        with k.loop(0, K) as p:
            one, b_row = a_row.get(p), b.at(p * N)
            with k.loop(0, N) as j:
                c_row.put(k.fma(one, b_row.get(j), c_row.get(j)), j)
