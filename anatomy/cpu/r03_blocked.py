"""Rung 3, blocked: a block of B that fits into L1 is used for all rows of A before the next one is read. Rung 2
reads all of B again for every row of C. Here a block of DEPTH x COLUMNS numbers, 16 KiB, comes from memory once and is then
read M times from L1. Scalar code can hardly show it, because it asks for four bytes in a cycle; the next rung
asks for more.
"""

from anatomy.rung import rung

DEPTH, COLUMNS = 32, 128  # of a block of B


@rung("blocked", step=lambda isa: (2, 12))
def blocked(k, c, a, b, *, M, N, K):
    with k.loop(0, M * N) as at:
        c.put(0.0, at)
    with k.loop(0, K, DEPTH) as first, k.loop(0, N, COLUMNS) as left:
        last, right = k.min(first + DEPTH, K), k.min(left + COLUMNS, N)
        with k.loop(0, M) as i:
            a_row, c_row = a.at(i * K), c.at(i * N)
            with k.loop(first, last) as p:
                one, b_row = a_row.get(p), b.at(p * N)
                with k.loop(left, right) as j:
                    c_row.put(k.fma(one, b_row.get(j), c_row.get(j)), j)
