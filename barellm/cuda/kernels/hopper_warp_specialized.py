"""The roles of the warps of a Hopper product. Shapes: out (M, N) = a b over depth K, in tiles of (ROWS, cols); names as in
hopper.py.

One block has two warpgroups that multiply (`multiply`), the upper and the lower 64 rows of a tile; one warp that loads operands
(`load`); where the epilogue reads a matrix, one warp for each half that fetches it (`fetch`). They meet in rings in shared memory:

    a_ring (2 S, 64 rows, DEPTH), b_ring (S, cols, DEPTH)    full[s]: loaded, empty[s]: both halves have multiplied it
    slots (2 L, 64 rows, 128 bytes)                          the way out; arrived[l], free[l] where it is a way in as well

A barrier's phase is the parity of how often its ring has gone round. Waiting for the phase before the first passes at once.
"""

from __future__ import annotations

from barellm.cuda import gemm_config
from barellm.cuda.kernels.activations import slope_of, value_of
from barellm.cuda.kernels.common import ACCUMULATE
from barellm.cuda.lang import constant, gl, gluon, hopper

WG_M = constant(64)  # rows that one warpgroup multiplies
TILE_M = constant(gemm_config.TILE_M)
TILE_K = constant(gemm_config.TILE_K)  # 128 bytes of bf16: the widest swizzle
ONES_N = constant(8)  # columns of the narrowest product


@gluon
def tile_counts(sizes, TILE_N: gl.constexpr):
    """Tiles, and how many tiles and parts of K are to do."""
    M, N, K, k_per_split, _ = sizes
    tiles = gl.cdiv(M, TILE_M) * gl.cdiv(N, TILE_N)
    return tiles, tiles * gl.cdiv(K, k_per_split)


@gluon
def tile_at(w, tiles, sizes, TILE_N: gl.constexpr):
    """Work item w: its first row, first column, start and end in K. All tiles of one part of K come before the next part; within
    it `group` rows of tiles are walked together, column by column."""
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
def producer(
    a_map, b_map, pipeline, sizes, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, TILE_N: gl.constexpr
):
    """Fill the ring, as far ahead as it has room: also with the next tile while this one goes out."""
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
def load_c(c_map, scalars, c_pipeline, sizes, WG: gl.constexpr, EPILOGUE: gl.constexpr, TILE_N: gl.constexpr):
    """Bring what the epilogue of half H reads into its slots, as soon as they are free."""
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
    out_map, pre_map, bias, scalars, pipeline, c_pipeline, stagger, sums, sizes,
    WG: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr, TILE_N: gl.constexpr,
):  # fmt: skip
    """Multiply half H of each tile and send it out. The tensor cores serve both halves in turn, or the one that is not in its
    epilogue. In step they would be in it at once, so the lower half starts when the upper has done its first product: nothing
    evens out such a lead, and a longer one would leave too little of the ring for loads on their way.

    `sums`: where the sums of a's rows go, (parts, M), and ones to multiply them by; the tiles of the first columns do that."""
    empty = pipeline[3]
    M, N, _, k_per_split, _ = sizes
    STAGES: gl.constexpr = empty.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES_N, 16])
    rows_to, ones = sums
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
        if rows_to is not None:
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
                gl.store(
                    rows_to + start // k_per_split * M + at, gl.max(column, 1), mask=at < M
                )  # all of its columns are equal
            else:
                acc, i = mainloop(acc, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        else:
            acc, i = mainloop(acc, pipeline, stagger, start, stop, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))

        if m + WG * WG_M < M:  # a half without rows has nothing to send; with parts of K the next part's rows lie there
            stored = epilogue(acc, out_map, pre_map, bias, adding, c_pipeline, row, n, N, stored, WG, EPILOGUE)
    if WG == 0:
        hopper.mbarrier.arrive(stagger.index(0), pred=i < 2)
    hopper.tma.store_wait(0)


@gluon
def smem_operands(pipeline, i, WG: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """Half H of a, and b, of the i-th turn, as a product takes them."""
    s = i % pipeline[2].shape[0]
    a, b = pipeline[0].index(2 * s + WG), pipeline[1].index(s)
    if A_TRANSPOSED:
        a = a.permute((1, 0))
    if B_TRANSPOSED:
        b = b.permute((1, 0))
    return a, b


@gluon
def consumer_release(empty, stagger, i, another, WG: gl.constexpr):
    """After the i-th turn's product is on its way: give the stage back of the one before, of the same tile if there is `another`;
    it is done with."""
    STAGES: gl.constexpr = empty.shape[0]
    hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=another)
    if WG == 0:
        hopper.mbarrier.arrive(stagger.index(0), pred=i == 1)


@gluon
def mainloop(
    acc, pipeline, stagger, start, stop, i, WG: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr
):
    """Multiply a tile over [start, stop). One product stays in flight, so the tensor cores never wait for this loop."""
    for k in range(start, stop, TILE_K):
        hopper.mbarrier.wait(pipeline[2].index(i % pipeline[2].shape[0]), i // pipeline[2].shape[0] & 1)
        a, b = smem_operands(pipeline, i, WG, A_TRANSPOSED, B_TRANSPOSED)
        acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        consumer_release(pipeline[3], stagger, i, k > start, WG)
        i += 1
    return hopper.warpgroup_mma_wait(0, deps=(acc,)), i


@gluon
def epilogue(
    acc, out_map, pre_map, bias, adding, c_pipeline, row, column, N, stored, WG: gl.constexpr, EPILOGUE: gl.constexpr
):  # fmt: skip
    """Send half H of a tile out through the epilogue, in blocks as wide as a slot. `sent`: blocks so far; gives the new count."""
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
        slot = c_buffers.index(WG * EPI_STAGES + stored % EPI_STAGES)
        if LOADS_C:
            if adding:
                hopper.mbarrier.wait(c_full.index(WG * EPI_STAGES + stored % EPI_STAGES), stored // EPI_STAGES & 1)
                other = slot.load(LAYOUT).to(gl.float32)
                value = value + other if ADDS_C else value * slope_of(other, EPILOGUE)
        else:
            hopper.tma.store_wait(EPI_STAGES - 1)
        tma_store(out_map, slot, value, row, column + c * WIDTH)
        if LOADS_C:
            # The block before has left its slot by now: the next may be fetched into it. The tile's last leaves below.
            hopper.tma.store_wait(1)
            hopper.mbarrier.arrive(c_empty.index(WG * EPI_STAGES + (stored + EPI_STAGES - 1) % EPI_STAGES), pred=c > 0)
        stored += 1
    if LOADS_C:
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(c_empty.index(WG * EPI_STAGES + (stored + EPI_STAGES - 1) % EPI_STAGES))
    return stored


@gluon
def split_columns(x, COUNT: gl.constexpr):
    """x (rows, cols) as COUNT blocks of columns. Nothing moves: in the layout of products, registers count columns beyond 8."""
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
def tma_store(out_map, slot, value, row, column):
    """Write a block of the result to its slot and start its way out."""
    slot.store(value.to(out_map.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out_map, [row, column], slot)
