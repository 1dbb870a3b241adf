"""Rung 4, vector: one instruction multiplies and adds a whole vector of a row. The loops are those of rung 3, but a step of the
inner one covers `k.lanes` columns: 4, 8 or 16. Columns that fill no vector are done with a mask, whose lanes beyond the last
column are neither read nor written. Still each multiply-add loads two vectors and stores one, and only one store fits into a
cycle.
"""

from anatomy.rung import rung

DEPTH, COLUMNS = 32, 128  # of a block of B


@rung("vector", step=lambda isa: (2 * isa.lanes, 12 * isa.lanes))
def vector(k, c, a, b, *, M, N, K):
    with k.loop(0, M * N) as at:
        c.put(0.0, at)
    whole = N - N % k.lanes

    def rows(first, last, left, right, mask=None):
        with k.loop(0, M) as i:
            a_row, c_row = a.at(i * K), c.at(i * N)
            with k.loop(first, last) as p:
                one, b_row = k.splat(a_row.get(p)), b.at(p * N)
                with k.loop(left, right, k.lanes) as j:
                    c_row.store(k.fma(one, b_row.load(j, mask), c_row.load(j, mask)), j, mask)

    with k.loop(0, K, DEPTH) as first:
        last = k.min(first + DEPTH, K)
        with k.loop(0, whole, COLUMNS) as left:
            rows(first, last, left, k.min(left + COLUMNS, whole))
        if whole < N:
            rows(first, last, whole, N, k.mask_first(N - whole))
