"""Warp-specialized mainloop and epilogue of Hopper's GEMM (hopper.py): producer warps load by TMA, consumer warpgroups run wgmma.

Shapes: out (M, N) = a b over depth K, in tiles of (TILE_M, TILE_N), TILE_K of the depth per step. A thread block is persistent: it
does every (number of blocks)-th tile, and all warps count the same steps i and the same tiles.

Tuples of shared memory that the functions pass on: pipeline = (a_ring, b_ring, full, empty), c_pipeline = (c_buffers, c_full,
c_empty); sizes = (M, N, K, k_per_split, group). A work item w is a tile of one split-K slice; i counts the steps (TILE_K of K) of a
block since its start: step i is in stage i % STAGES. WG: the consumer, 0 or 1, and so its 64 rows of a tile.

    warps                   registers  what they do
    2 consumer warpgroups   232        WG_M = 64 rows of the tile each: wgmma into fp32 accumulators in registers, then the
                                       epilogue, through shared memory and TMA stores
    1 producer warp         40         TMA loads of a and b into every free stage, also of the next tile
    2 load_c warps          40         one for each consumer, only where the epilogue reads a matrix C (residual, pre-activation,
                                       or the gradient that is added to)

In shared memory, STAGES and EPI_STAGES deep, with mbarriers that say what a stage holds:

    a_ring (2 STAGES, 64, TILE_K), b_ring (STAGES, TILE_N, TILE_K)
    c_buffers (2 EPI_STAGES, 64, 128 bytes): subtiles on their way out by TMA store, and in where load_c is
        c_full[l]  TMA has written a subtile of C: its consumer waits for it
        c_empty[l] the store that read the buffer is done: load_c waits for it
    stagger[0]     the second consumer starts when the first has issued the wgmma of `lead` steps

Within a consumer, Triton's barriers order its four warps' writes to a c_buffer before fence.proxy.async and the TMA store."""

from __future__ import annotations

from barellm.cuda import gemm_config
from barellm.cuda.kernels.common import ACCUMULATE
from barellm.cuda.kernels.hopper_pipeline import WG_M, consumer_wait, producer_acquire, wgmma_layout
from barellm.cuda.kernels.pointwise.activations import slope_of, value_of
from barellm.cuda.lang import constant, gl, gluon, hopper

TILE_M = constant(gemm_config.TILE_M)
TILE_K = constant(gemm_config.TILE_K)  # 128 bytes of bf16: the widest swizzle
ONES_N = constant(8)  # columns of the narrowest wgmma
LEAD = constant(2)  # steps that the first consumer is ahead of the second, if there are as many stages and one more


@gluon
def count_work_items(sizes, TILE_N):
    """The number of tiles, and of work items: tiles times split-K slices."""
    M, N, K, k_per_split, _ = sizes
    tiles = gl.cdiv(M, TILE_M) * gl.cdiv(N, TILE_N)
    return tiles, tiles * gl.cdiv(K, k_per_split)


@gluon
def gemm_tile_at(w, tiles, sizes, TILE_N):
    """The tile scheduler: (first row, first column, begin and end in K) of work item w, one of `tiles` tiles of one split-K slice.

    All tiles of a slice come before the next slice. Within it they are rasterized in groups of `group` rows of tiles, column by
    column, so that the thread blocks at work share rows of a and columns of b in L2; the last group may have fewer rows."""
    M, N, K, k_per_split, group = sizes
    m_tiles, n_tiles = gl.cdiv(M, TILE_M), gl.cdiv(N, TILE_N)
    t = w % tiles  # the tile in its slice
    tiles_of_group = group * n_tiles
    group_row = t // tiles_of_group * group
    group_height = min(m_tiles - group_row, group)
    in_group = t % tiles_of_group
    k_begin = w // tiles * k_per_split
    m_tile, n_tile = group_row + in_group % group_height, in_group // group_height
    return m_tile * TILE_M, n_tile * TILE_N, k_begin, min(k_begin + k_per_split, K)


@gluon
def gemm_producer_warp(a_map, b_map, pipeline, sizes, A_TRANSPOSED, B_TRANSPOSED, TILE_N):
    """The producer warp of the GEMM: for each step of TILE_K of each tile, waits for a free stage and starts TMA loads of a (a box
    of WG_M = 64 rows for each consumer) and b. It is up to STAGES steps ahead of the consumers, so also in the next tile.

    a_map, b_map: tensor maps of the operands as they are stored, (M, K) or A_TRANSPOSED (K, M), (K, N) or B_TRANSPOSED (N, K),
    zeros beyond them. pipeline, sizes: the module's tuples. full[s] is expected to get NBYTES, all that a step loads."""
    a_ring, b_ring, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    NBYTES: gl.constexpr = 2 * a_map.block_type.nbytes + b_map.block_type.nbytes
    tiles, items = count_work_items(sizes, TILE_N)
    i = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, start, stop = gemm_tile_at(w, tiles, sizes, TILE_N)
        for k in range(start, stop, TILE_K):
            s = i % STAGES
            ready = full.index(s)
            producer_acquire(empty, i)
            hopper.mbarrier.expect(ready, NBYTES)
            for half in gl.static_range(2):
                at = [k, m + half * WG_M] if A_TRANSPOSED else [m + half * WG_M, k]
                hopper.tma.async_copy_global_to_shared(a_map, at, ready, a_ring.index(2 * s + half))
            at = [n, k] if B_TRANSPOSED else [k, n]
            hopper.tma.async_copy_global_to_shared(b_map, at, ready, b_ring.index(s))
            i += 1


@gluon
def load_c(c_map, scalars, c_pipeline, sizes, WG, EPILOGUE, TILE_N):
    """The warp that loads C, the matrix (M, N) that the epilogue of consumer WG (0 or 1) reads: a residual, a pre-activation, or
    the gradient that is added to. For each subtile of its tiles (WG_M rows, 128 bytes wide) it waits until the buffer's store is
    done and starts a TMA load into it. EPILOGUE "start": only where the run's scalar `accumulate` adds to what is there."""
    c_buffers, c_full, c_empty = c_pipeline
    EPI_STAGES: gl.constexpr = c_buffers.shape[0] // 2
    WIDTH: gl.constexpr = c_buffers.shape[2]  # columns of a buffer
    tiles, items = count_work_items(sizes, TILE_N)
    if EPILOGUE == "start":
        items = items if gl.load(scalars + ACCUMULATE) != 0 else 0
    i = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, _, _ = gemm_tile_at(w, tiles, sizes, TILE_N)
        for c in range(0, TILE_N if m + WG * WG_M < sizes[0] else 0, WIDTH):
            s = WG * EPI_STAGES + i % EPI_STAGES
            ready = c_full.index(s)
            hopper.mbarrier.wait(c_empty.index(s), (i // EPI_STAGES & 1) ^ 1)
            hopper.mbarrier.expect(ready, c_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(c_map, [m + WG * WG_M, n + c], ready, c_buffers.index(s))
            i += 1


@gluon
def gemm_consumer_warpgroup(
    outputs, pipeline, c_pipeline, stagger, row_sums, sizes, WG, A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N
):
    """Consumer warpgroup WG (0 or 1) of the GEMM: out = a b of its WG_M = 64 rows of each tile: the mainloop, with accumulators
    (WG_M, TILE_N) fp32 in registers, then the epilogue; outputs = (out_map, pre_map, bias, scalars), of `epilogue_and_store`.

    The tensor cores serve both consumers in turn, or the one that is not in its epilogue. In step they would be in it at once, so
    the second starts when the first has issued the wgmma of two steps (`stagger`): nothing evens out such a lead, and a longer one
    would leave too few stages for loads in flight. On an H200 two steps save 1 % of a step of gpt2-124m at 64 x 1024 beside one.

    `row_sums`: (sums (slices, M) fp32 or None, a buffer of ones): where sums are wanted, for a bias's gradient, the tiles of the
    first columns write the row sums of a. The other tuples: of the module."""
    out_map, pre_map, bias, scalars = outputs
    empty = pipeline[3]
    M, N, _, k_per_split, _ = sizes
    STAGES: gl.constexpr = empty.shape[0]
    ACC_LAYOUT: gl.constexpr = wgmma_layout(TILE_N)
    sums, ones = row_sums
    adding = True  # whether the epilogue reads C
    if EPILOGUE == "start":
        adding = gl.load(scalars + ACCUMULATE) != 0
    tiles, items = count_work_items(sizes, TILE_N)
    if WG == 1:
        hopper.mbarrier.wait(stagger.index(0), 0)
    i = 0
    stored = 0  # subtiles so far
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, start, stop = gemm_tile_at(w, tiles, sizes, TILE_N)
        acc = gl.zeros((WG_M, TILE_N), gl.float32, ACC_LAYOUT)
        row = start // k_per_split * M + m + WG * WG_M  # of out: split-K slices lie below one another
        if sums is not None:
            if n == 0:
                acc, column, i = wgmma_mainloop(acc, ones, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
                at = m + WG * WG_M + gl.arange(0, WG_M, layout=gl.SliceLayout(1, wgmma_layout(ONES_N)))
                # All columns are equal, and max, unlike a sum, leaves them so.
                gl.store(sums + start // k_per_split * M + at, gl.max(column, 1), mask=at < M)
            else:
                acc, _, i = wgmma_mainloop(acc, None, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        else:
            acc, _, i = wgmma_mainloop(acc, None, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))  # the last step's stage: its wgmma is done

        if m + WG * WG_M < M:  # no rows, no store; with split-K the next slice's rows lie there
            stored = epilogue_and_store(acc, out_map, pre_map, bias, adding, c_pipeline, row, n, N, stored, WG, EPILOGUE)
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
def release_previous_stage(empty, stagger, i, another, WG):
    """When wgmma i is issued, i - 1 is done: arrive at its stage's empty barrier, if it is of the same tile (`another`)."""
    STAGES: gl.constexpr = empty.shape[0]
    hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=another)
    if WG == 0:
        hopper.mbarrier.arrive(stagger.index(0), pred=i == lead(STAGES))


@gluon
def wgmma_mainloop(acc, ones, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED):
    """Accumulate acc (WG_M, TILE_N) fp32 += a b over [start, stop) of K, beginning with step i; returns it, the row sums of a, and
    the next step. One wgmma stays in flight, so the tensor cores never wait for this loop. The row sums (WG_M, ONES_N), in equal
    columns, are a times `ones` (ONES_N, TILE_K), the narrowest wgmma, from the same shared memory; 0 where `ones` is None."""
    column = 0
    if ones is not None:
        column = gl.zeros((WG_M, ONES_N), gl.float32, wgmma_layout(ONES_N))
    for k in range(start, stop, TILE_K):
        consumer_wait(pipeline[2], i)
        a, b = smem_operands(pipeline, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        if ones is not None:
            column = hopper.warpgroup_mma(a, ones.index(0).permute((1, 0)), column, is_async=True)
        acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
        if ones is None:
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        else:
            acc, column = hopper.warpgroup_mma_wait(1, deps=(acc, column))
        release_previous_stage(pipeline[3], stagger, i, k > start, WG)
        i += 1
    if ones is None:
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    else:
        acc, column = hopper.warpgroup_mma_wait(0, deps=(acc, column))
    return acc, column, i


@gluon
def epilogue_and_store(acc, out_map, pre_map, bias, adding, c_pipeline, row, column, N: gl.int32, stored, WG, EPILOGUE):
    """Epilogue of a consumer: out = f(acc + bias, C) at (row, column), for accumulators acc (WG_M, TILE_N) fp32, in subtiles as
    wide as a buffer (128 bytes), each through shared memory and a TMA store; with pre_map also the pre-activation acc + bias.

    EPILOGUE: as in epilogue.py, or "add" (to out) and "start" (add if `adding`), which read C as "residual" does; C's subtiles
    come from `load_c`. bias (N) fp32 or 16-bit, or None. `stored`: subtiles that this consumer has stored so far, which
    says which of its EPI_STAGES buffers is next; gives the new count."""
    c_buffers, c_full, c_empty = c_pipeline
    EPI_STAGES: gl.constexpr = c_buffers.shape[0] // 2
    WIDTH: gl.constexpr = c_buffers.shape[2]  # columns of a buffer
    COUNT: gl.constexpr = acc.shape[1] // WIDTH  # subtiles of the accumulators
    LOADS_C: gl.constexpr = EPILOGUE != "" and pre_map is None
    ADDS_C: gl.constexpr = EPILOGUE == "residual" or EPILOGUE == "add" or EPILOGUE == "start"
    LAYOUT: gl.constexpr = wgmma_layout(WIDTH)
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
    """x (rows, cols) as a tuple of COUNT subtiles (rows, cols / COUNT), by halving; COUNT: a power of two. No data moves: in
    `wgmma_layout` a thread's registers count the columns beyond 8, so each half is half of them."""
    if COUNT == 1:
        return (x,)
    else:
        HALF_COLS: gl.constexpr = x.shape[1] // 2
        LAYOUT: gl.constexpr = wgmma_layout(HALF_COLS)
        left, right = x.reshape([x.shape[0], 2, HALF_COLS]).permute(0, 2, 1).split()
        left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
        right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
        return split_columns(left, COUNT // 2) + split_columns(right, COUNT // 2)


@gluon
def tma_store(out_map, buffer, value, row, column):
    """Write a subtile to its buffer in shared memory and start its TMA store to (row, column). The fence shows TMA the writes."""
    buffer.store(value.to(out_map.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out_map, [row, column], buffer)
