"""Warp-specialized mainloop and epilogue of Hopper's GEMM (hopper.py): producer warps issue TMA loads, consumer warpgroups run
wgmma.

Shapes: out (M, N) = a b over depth K, in tiles of (TILE_M, TILE_N), TILE_K of the depth per step. A thread block is persistent: it
does every (number of blocks)-th tile, and all warps count the same steps i and the same tiles.

    warps                   registers  what they do
    2 consumer warpgroups   232        `consumer`: WG_M = 64 rows of the tile each: wgmma into fp32 accumulators in registers, then
                                       the epilogue, through shared memory and TMA stores
    1 producer warp         40         `producer`: TMA loads of a and b into every free stage, also of the next tile
    2 load_c warps          40         `load_c`, one for each consumer, only where the epilogue reads a matrix C (residual,
                                       pre-activation, or the gradient that is added to)

In shared memory, STAGES and EPI_STAGES deep, with mbarriers that say what a stage holds:

    a_ring (2 STAGES, 64, TILE_K), b_ring (STAGES, TILE_N, TILE_K)
        full[s]    TMA has written a step's operands: 1 arrival (the producer's expect) and their bytes; consumers wait for it
        empty[s]   both consumers' wgmma have read them: 2 arrivals; the producer waits for it
    c_buffers (2 EPI_STAGES, 64, 128 bytes): subtiles on their way out by TMA store, and in where load_c is
        c_full[l]  TMA has written a subtile of C: its consumer waits for it
        c_empty[l] the store that read the buffer is done: load_c waits for it
    stagger[0]     the second consumer starts when the first has issued the wgmma of `lead` steps

Tuples of shared memory that the functions pass on: pipeline = (a_ring, b_ring, full, empty), c_pipeline = (c_buffers, c_full,
c_empty); sizes = (M, N, K, k_per_split, group). A work item w is a tile of one split-K slice; i counts the steps (TILE_K of K) of a
block since its start: step i is in stage i % STAGES. WG: the consumer, 0 or 1, and so its 64 rows of a tile.

A barrier's phase is the parity of how often its ring has gone round: i // STAGES & 1 in waits for a full stage, its opposite in
waits for an empty one; waiting for the phase before the first passes at once. Within a consumer, Triton's barriers order its four
warps' writes to a c_buffer before fence.proxy.async and the TMA store."""

from __future__ import annotations

from barellm.cuda import gemm_config
from barellm.cuda.kernels.common import ACCUMULATE
from barellm.cuda.kernels.pointwise.activations import slope_of, value_of
from barellm.cuda.lang import constant, gl, gluon, hopper

WG_M = constant(64)  # rows of a consumer warpgroup
TILE_M = constant(gemm_config.TILE_M)
TILE_K = constant(gemm_config.TILE_K)  # 128 bytes of bf16: the widest swizzle
ONES_N = constant(8)  # columns of the narrowest wgmma
LEAD = constant(2)  # steps that the first consumer is ahead of the second, if there are as many stages and one more


@gluon
def tile_counts(sizes, TILE_N):
    """The number of tiles, and of work items: tiles times split-K slices."""
    M, N, K, k_per_split, _ = sizes
    tiles = gl.cdiv(M, TILE_M) * gl.cdiv(N, TILE_N)
    return tiles, tiles * gl.cdiv(K, k_per_split)


@gluon
def tile_at(w, tiles, sizes, TILE_N):
    """The tile scheduler: first row, first column, start and end in K of work item w. All tiles of a split-K slice come before the
    next slice; within it tiles are rasterized in groups of `group` rows, column by column."""
    M, N, K, k_per_split, group = sizes
    m_tiles, n_tiles = gl.cdiv(M, TILE_M), gl.cdiv(N, TILE_N)
    t = w % tiles
    width = group * n_tiles
    first = t // width * group
    height = min(m_tiles - first, group)
    within = t % width
    start = w // tiles * k_per_split
    return (first + within % height) * TILE_M, within // height * TILE_N, start, min(start + k_per_split, K)


@gluon
def producer(a_map, b_map, pipeline, sizes, A_TRANSPOSED, B_TRANSPOSED, TILE_N):
    """The producer warp: TMA loads of a (two boxes of WG_M rows) and b into every free stage, ahead into the next tile."""
    a_ring, b_ring, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    NBYTES: gl.constexpr = 2 * a_map.block_type.nbytes + b_map.block_type.nbytes
    tiles, items = tile_counts(sizes, TILE_N)
    i = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, start, stop = tile_at(w, tiles, sizes, TILE_N)
        for k in range(start, stop, TILE_K):
            s = i % STAGES
            ready = full.index(s)
            hopper.mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(ready, NBYTES)
            for half in gl.static_range(2):
                at = [k, m + half * WG_M] if A_TRANSPOSED else [m + half * WG_M, k]
                hopper.tma.async_copy_global_to_shared(a_map, at, ready, a_ring.index(2 * s + half))
            at = [n, k] if B_TRANSPOSED else [k, n]
            hopper.tma.async_copy_global_to_shared(b_map, at, ready, b_ring.index(s))
            i += 1


@gluon
def load_c(c_map, scalars, c_pipeline, sizes, WG, EPILOGUE, TILE_N):
    """A load_c warp: TMA loads of the subtiles of C (WG_M rows, 128 bytes) that the epilogue of consumer WG reads, into its free
    buffers. EPILOGUE "start": only where the run's `accumulate` adds to what is there."""
    c_buffers, c_full, c_empty = c_pipeline
    EPI_STAGES: gl.constexpr = c_buffers.shape[0] // 2
    WIDTH: gl.constexpr = c_buffers.shape[2]
    tiles, items = tile_counts(sizes, TILE_N)
    if EPILOGUE == "start":
        items = items if gl.load(scalars + ACCUMULATE) != 0 else 0
    i = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, _, _ = tile_at(w, tiles, sizes, TILE_N)
        for c in range(0, TILE_N if m + WG * WG_M < sizes[0] else 0, WIDTH):
            s = WG * EPI_STAGES + i % EPI_STAGES
            ready = c_full.index(s)
            hopper.mbarrier.wait(c_empty.index(s), (i // EPI_STAGES & 1) ^ 1)
            hopper.mbarrier.expect(ready, c_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(c_map, [m + WG * WG_M, n + c], ready, c_buffers.index(s))
            i += 1


@gluon
def consumer(
    out_map, pre_map, bias, scalars, pipeline, c_pipeline, stagger, row_sums, sizes,
    WG, A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N,
):  # fmt: skip
    """Mainloop and epilogue of WG_M rows of each tile. The tensor cores serve both consumers in turn, or the one that is not in its
    epilogue. In step they would be in it at once, so the second starts when the first has issued the wgmma of two steps: nothing
    evens out such a lead, and a longer one would leave too few stages for loads in flight. On an H200 two steps save 1 % of a step
    of gpt2-124m at 64 x 1024 beside one, since more of an epilogue with GELU overlaps the other consumer's wgmma.

    `row_sums`: (sums (slices, M) or None, a buffer of ones): row sums of a are a times ones; tiles of the first columns do that."""
    empty = pipeline[3]
    M, N, _, k_per_split, _ = sizes
    STAGES: gl.constexpr = empty.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES_N, 16])
    sums, ones = row_sums
    adding = True
    if EPILOGUE == "start":
        adding = gl.load(scalars + ACCUMULATE) != 0
    tiles, items = tile_counts(sizes, TILE_N)
    if WG == 1:
        hopper.mbarrier.wait(stagger.index(0), 0)
    i = 0
    stored = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, start, stop = tile_at(w, tiles, sizes, TILE_N)
        acc = gl.zeros((WG_M, TILE_N), gl.float32, LAYOUT)
        row = start // k_per_split * M + m + WG * WG_M
        if sums is not None:
            if n == 0:
                column = gl.zeros((WG_M, ONES_N), gl.float32, SUMS)
                for k in range(start, stop, TILE_K):
                    hopper.mbarrier.wait(pipeline[2].index(i % STAGES), i // STAGES & 1)
                    a, b = smem_operands(pipeline, i, WG, A_TRANSPOSED, B_TRANSPOSED)
                    column = hopper.warpgroup_mma(a, ones.index(0).permute((1, 0)), column, is_async=True)
                    acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
                    acc, column = hopper.warpgroup_mma_wait(1, deps=(acc, column))
                    consumer_release(empty, stagger, i, k > start, WG)
                    i += 1
                acc, column = hopper.warpgroup_mma_wait(0, deps=(acc, column))
                at = m + WG * WG_M + gl.arange(0, WG_M, layout=gl.SliceLayout(1, SUMS))
                # All columns are equal, and max, unlike a sum, leaves them so.
                gl.store(sums + start // k_per_split * M + at, gl.max(column, 1), mask=at < M)
            else:
                acc, i = mainloop(acc, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        else:
            acc, i = mainloop(acc, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))  # the last step's stage: its wgmma is done

        if m + WG * WG_M < M:  # no rows, no store; with split-K the next slice's rows lie there
            stored = epilogue(acc, out_map, pre_map, bias, adding, c_pipeline, row, n, N, stored, WG, EPILOGUE)
    if WG == 0:
        hopper.mbarrier.arrive(stagger.index(0), pred=i <= lead(STAGES))  # no step has released consumer 1: do it now
    hopper.tma.store_wait(0)


@gluon
def lead(STAGES):
    """Steps that consumer 0 is ahead: it may hold all stages but one."""
    return LEAD if STAGES > LEAD else STAGES - 1


@gluon
def smem_operands(pipeline, i, WG, A_TRANSPOSED, B_TRANSPOSED):
    """The wgmma operands of step i in shared memory: consumer WG's rows of a (WG_M, TILE_K), and b (TILE_K, TILE_N)."""
    s = i % pipeline[2].shape[0]
    a, b = pipeline[0].index(2 * s + WG), pipeline[1].index(s)
    if A_TRANSPOSED:
        a = a.permute((1, 0))
    if B_TRANSPOSED:
        b = b.permute((1, 0))
    return a, b


@gluon
def consumer_release(empty, stagger, i, another, WG):
    """When wgmma i is issued, i - 1 is done: arrive at its stage's empty barrier, if it is of the same tile (`another`)."""
    STAGES: gl.constexpr = empty.shape[0]
    hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=another)
    if WG == 0:
        hopper.mbarrier.arrive(stagger.index(0), pred=i == lead(STAGES))


@gluon
def mainloop(acc, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED):
    """Accumulate acc (WG_M, TILE_N) over [start, stop) of K, beginning with step i; gives it and the next step. One wgmma stays in
    flight, so the tensor cores never wait for this loop."""
    for k in range(start, stop, TILE_K):
        hopper.mbarrier.wait(pipeline[2].index(i % pipeline[2].shape[0]), i // pipeline[2].shape[0] & 1)
        a, b = smem_operands(pipeline, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        consumer_release(pipeline[3], stagger, i, k > start, WG)
        i += 1
    return hopper.warpgroup_mma_wait(0, deps=(acc,)), i


@gluon
def epilogue(acc, out_map, pre_map, bias, adding, c_pipeline, row, column, N: gl.int32, stored, WG, EPILOGUE):
    """Epilogue and TMA store of accumulators (WG_M, TILE_N) at (row, column) of out, in subtiles as wide as a buffer (128 bytes).
    EPILOGUE: as in epilogue.py, or "add" (to out) and "start" (add if `adding`), which read C as "residual" does. `stored`:
    subtiles that this consumer has stored so far; gives the new count."""
    c_buffers, c_full, c_empty = c_pipeline
    EPI_STAGES: gl.constexpr = c_buffers.shape[0] // 2
    WIDTH: gl.constexpr = c_buffers.shape[2]
    COUNT: gl.constexpr = acc.shape[1] // WIDTH
    LOADS_C: gl.constexpr = EPILOGUE != "" and pre_map is None
    ADDS_C: gl.constexpr = EPILOGUE == "residual" or EPILOGUE == "add" or EPILOGUE == "start"
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    blocks = split_columns(acc, COUNT)
    for c in gl.static_range(COUNT):
        value = blocks[c]
        if bias is not None:
            at = column + c * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
            inside = gl.max_constancy(at < N, [2])  # N is even: two go in one load
            value += gl.expand_dims(gl.load(bias + at, mask=inside, other=0.0).to(gl.float32), 0)
        if pre_map is not None:
            hopper.tma.store_wait(EPI_STAGES - 1)
            tma_store(pre_map, c_buffers.index(WG * EPI_STAGES + stored % EPI_STAGES), value, row, column + c * WIDTH)
            stored += 1
            value = value_of(value, EPILOGUE)
        buffer = c_buffers.index(WG * EPI_STAGES + stored % EPI_STAGES)
        if LOADS_C:
            if adding:
                hopper.mbarrier.wait(c_full.index(WG * EPI_STAGES + stored % EPI_STAGES), stored // EPI_STAGES & 1)
                other = buffer.load(LAYOUT).to(gl.float32)
                value = value + other if ADDS_C else value * slope_of(other, EPILOGUE)
        else:
            hopper.tma.store_wait(EPI_STAGES - 1)
        tma_store(out_map, buffer, value, row, column + c * WIDTH)
        if LOADS_C:
            # The store before has read its buffer by now: the next subtile of C may be loaded into it. The tile's last is below.
            hopper.tma.store_wait(1)
            hopper.mbarrier.arrive(c_empty.index(WG * EPI_STAGES + (stored + EPI_STAGES - 1) % EPI_STAGES), pred=c > 0)
        stored += 1
    if LOADS_C:
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(c_empty.index(WG * EPI_STAGES + (stored + EPI_STAGES - 1) % EPI_STAGES))
    return stored


@gluon
def split_columns(x, COUNT):
    """x (rows, cols) as a tuple of COUNT subtiles (rows, cols / COUNT), by halving. No data moves: in the layout of wgmma's results
    a thread's registers count the columns beyond 8, so each half is half of them."""
    if COUNT == 1:
        return (x,)
    else:
        HALF_COLS: gl.constexpr = x.shape[1] // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_COLS, 16])
        left, right = x.reshape([x.shape[0], 2, HALF_COLS]).permute(0, 2, 1).split()
        left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
        right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
        return split_columns(left, COUNT // 2) + split_columns(right, COUNT // 2)


@gluon
def tma_store(out_map, buffer, value, row, column):
    """Write a subtile to its buffer in shared memory and start its TMA store to (row, column). The fence makes the threads' writes
    visible to the async proxy, which TMA reads through."""
    buffer.store(value.to(out_map.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out_map, [row, column], buffer)
