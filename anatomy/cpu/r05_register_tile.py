"""Rung 5, register tile: a tile of C stays in registers for the whole depth, and each value loaded is used many times. A step
loads two vectors of B and one number for each row of A, and does rows x 2 multiply-adds with them: with 6 rows, 8 loads for
12. C is written once. The chains are independent, so as many multiply-adds are under way as the processor can hold. What is
left to do: the rows of B that a tile reads lie N numbers apart, which costs a cache line and perhaps a page of memory for
every two vectors.
"""

from anatomy.rung import rung

VECTORS = 2


def rows_of(isa):
    """The rows of a tile: accumulators, two vectors of B and one of A fill the registers."""
    return 12 if isa.registers == 32 else 6 if isa.fma else 4


def step(isa):
    """Operations and bytes of one turn of the inner loop."""
    return 2 * rows_of(isa) * VECTORS * isa.lanes, 4 * (rows_of(isa) + VECTORS * isa.lanes)


def columns(k, N, body):
    """Call body(first column, masks of its vectors) for each VECTORS vectors of columns; None is no mask."""
    span = VECTORS * k.lanes
    with k.loop(0, N - N % span, span) as j:
        body(j, [None] * VECTORS)
    if rest := N % span:
        body(k.int(N - rest), [k.mask_first(max(0, min(rest - v * k.lanes, k.lanes))) for v in range(VECTORS)])


def left_of(k, a, i, *, M, K):
    """left(r, p): element p of row i + r of A in all lanes. Rows beyond the last repeat it; nothing stores their sums."""
    rows = [a.at(k.min(i + r, M - 1) * K) for r in range(rows_of(k.isa))]
    return lambda r, p: k.splat(rows[r].get(p))


def multiplied(k, left, right, depth, fma=None):
    """A tile of sums over p of left(r, p) right(p, v), in registers."""
    acc = [[k.var_vec(0.0) for _ in range(VECTORS)] for _ in range(rows_of(k.isa))]
    with k.loop(0, depth) as p:
        vectors = [right(p, v) for v in range(VECTORS)]
        for r, sums in enumerate(acc):
            one = left(r, p)
            for total, vector in zip(sums, vectors, strict=True):
                total.value = (fma or k.fma)(one, vector, total.value)
    return [[x.value for x in sums] for sums in acc]


def store(k, c, tile, i, j, masks, *, M, N):
    for r, sums in enumerate(tile):
        with k.when(i + r < M):
            for v, (x, mask) in enumerate(zip(sums, masks, strict=True)):
                c.at((i + r) * N).store(x, j + v * k.lanes, mask)


@rung("register tile", step=step)
def register_tile(k, c, a, b, *, M, N, K):
    with k.loop(0, M, rows_of(k.isa)) as i:
        left = left_of(k, a, i, M=M, K=K)

        def tile(j, masks):
            def right(p, v):
                return b.at(p * N).load(j + v * k.lanes, masks[v])

            store(k, c, multiplied(k, left, right, K), i, j, masks, M=M, N=N)

        columns(k, N, tile)
