"""Rung 1, naive: each element of C is the dot product of a row of A and a column of B. It is the definition, and it does two
things badly. It walks down a column of B, so of each cache line of 16 numbers it uses one before the line is gone. And every
addition waits for the one before, which takes four cycles, although the processor could start two in every cycle.
"""

from anatomy.rung import rung


@rung("naive", step=lambda isa: (2, 8))
def naive(k, c, a, b, *, M, N, K):
    with k.loop(0, M) as i:
        a_row, c_row = a.at(i * K), c.at(i * N)
        with k.loop(0, N) as j:
            column, total = b.at(j), k.var(0.0)
            with k.loop(0, K) as p:
                total.value = k.fma(a_row.get(p), column.get(p * N), total.value)
            c_row.put(total.value, j)
