"""Rung 10, threads: every core claims panels from a shared counter until none is left. A panel is one thread's: it packs the
panel into its own scratch, and writes columns of C that nobody else touches, so nothing has to be locked and no bit depends
on who did it. Threads that claim their work finish together even where one of them is disturbed; with a fixed half each, the
slower one would be waited for.
"""

from anatomy.cpu.r05_register_tile import VECTORS, columns, left_of, multiplied, rows_of, step, store
from anatomy.cpu.r06_packed import packed, panel_bytes
from anatomy.cpu.r09_prefetch import prefetched
from anatomy.rung import rung


@rung("threads", step=step, threads=True, scratch=panel_bytes)
def threads(k, c, a, b, *, M, N, K):
    def panel(j, masks):
        right = packed(k, b, j, masks, N=N, K=K)
        with k.loop(0, M, rows_of(k.isa)) as i:
            prefetched(k, c, a, i, j, N=N, K=K)
            store(k, c, multiplied(k, left_of(k, a, i, M=M, K=K), right, K), i, j, masks, M=M, N=N)

    span = VECTORS * k.lanes
    with k.parallel_for(-(-N // span)) as number:
        with k.when(number < N // span):
            panel(number * span, [None] * VECTORS)
        if N % span:
            with k.when(number.equals(N // span)):
                columns(k, N % span, lambda j, masks: panel(j + N // span * span, masks))
