"""The roles of the warps of a Hopper product. Shapes: out (M, N) = a b over depth K, in tiles of (ROWS, cols); names as in
hopper.py.

One block has two warpgroups that multiply (`multiply`), the upper and the lower 64 rows of a tile; one warp that loads operands
(`load`); where the epilogue reads a matrix, one warp for each half that fetches it (`fetch`). They meet in rings in shared memory:

    a_ring (2 S, 64 rows, DEPTH), b_ring (S, cols, DEPTH)    full[s]: loaded, empty[s]: both halves have multiplied it
    slots (2 L, 64 rows, 128 bytes)                          the way out; arrived[l], free[l] where it is a way in as well

A barrier's phase is the parity of how often its ring has gone round. Waiting for the phase before the first passes at once.
"""

from __future__ import annotations

from barellm.cuda import choices
from barellm.cuda.kernels.common import ACCUMULATE
from barellm.cuda.kernels.pointwise.activations import slope_of, value_of
from barellm.cuda.lang import constant, gl, gluon, hopper

HALF = constant(64)  # rows that one warpgroup multiplies
ROWS = constant(choices.ROWS)
DEPTH = constant(choices.DEPTH)  # 128 bytes of bf16: the widest swizzle
ONES = constant(8)  # columns of the narrowest product


@gluon
def work(sizes, COLS: gl.constexpr):
    """Tiles, and how many tiles and parts of K are to do."""
    M, N, K, chunk, _ = sizes
    tiles = gl.cdiv(M, ROWS) * gl.cdiv(N, COLS)
    return tiles, tiles * gl.cdiv(K, chunk)


@gluon
def place(w, tiles, sizes, COLS: gl.constexpr):
    """Work item w: its first row, first column, start and end in K. All tiles of one part of K come before the next part; within
    it `group` rows of tiles are walked together, column by column."""
    M, N, K, chunk, group = sizes
    m_tiles, n_tiles = gl.cdiv(M, ROWS), gl.cdiv(N, COLS)
    t = w % tiles
    width = group * n_tiles
    first = t // width * group
    height = min(m_tiles - first, group)
    within = t % width
    start = w // tiles * chunk
    return (first + within % height) * ROWS, within // height * COLS, start, min(start + chunk, K)


@gluon
def load(a_map, b_map, ring, sizes, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, COLS: gl.constexpr):
    """Fill the ring, as far ahead as it has room: also with the next tile while this one goes out."""
    a_ring, b_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    NBYTES: gl.constexpr = 2 * a_map.block_type.nbytes + b_map.block_type.nbytes
    tiles, items = work(sizes, COLS)
    i = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, start, stop = place(w, tiles, sizes, COLS)
        for k in range(start, stop, DEPTH):
            s = i % STAGES
            ready = full.index(s)
            hopper.mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(ready, NBYTES)
            for half in gl.static_range(2):
                at = [k, m + half * HALF] if A_TRANSPOSED else [m + half * HALF, k]
                hopper.tma.async_copy_global_to_shared(a_map, at, ready, a_ring.index(2 * s + half))
            at = [n, k] if B_TRANSPOSED else [k, n]
            hopper.tma.async_copy_global_to_shared(b_map, at, ready, b_ring.index(s))
            i += 1


@gluon
def fetch(other_map, scalars, way, sizes, H: gl.constexpr, EPILOGUE: gl.constexpr, COLS: gl.constexpr):
    """Bring what the epilogue of half H reads into its slots, as soon as they are free."""
    slots, arrived, free = way
    SLOTS: gl.constexpr = slots.shape[0] // 2
    WIDTH: gl.constexpr = slots.shape[2]
    tiles, items = work(sizes, COLS)
    if EPILOGUE == "start":
        items = items if gl.load(scalars + ACCUMULATE) != 0 else 0
    i = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, _, _ = place(w, tiles, sizes, COLS)
        for c in range(0, COLS if m + H * HALF < sizes[0] else 0, WIDTH):
            s = H * SLOTS + i % SLOTS
            ready = arrived.index(s)
            hopper.mbarrier.wait(free.index(s), (i // SLOTS & 1) ^ 1)
            hopper.mbarrier.expect(ready, other_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(other_map, [m + H * HALF, n + c], ready, slots.index(s))
            i += 1


@gluon
def multiply(
    out_map, pre_map, bias, scalars, ring, way, ahead, sums, sizes,
    H: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Multiply half H of each tile and send it out. The tensor cores serve both halves in turn, or the one that is not in its
    epilogue. In step they would be in it at once, so the lower half starts when the upper has done its first product: nothing
    evens out such a lead, and a longer one would leave too little of the ring for loads on their way.

    `sums`: where the sums of a's rows go, (parts, M), and ones to multiply them by; the tiles of the first columns do that."""
    empty = ring[3]
    M, N, _, chunk, _ = sizes
    STAGES: gl.constexpr = empty.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    rows_to, ones = sums
    adding = True
    if EPILOGUE == "start":
        adding = gl.load(scalars + ACCUMULATE) != 0
    tiles, items = work(sizes, COLS)
    if H == 1:
        hopper.mbarrier.wait(ahead.index(0), 0)
    i = 0
    sent = 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        m, n, start, stop = place(w, tiles, sizes, COLS)
        acc = gl.zeros((HALF, COLS), gl.float32, LAYOUT)
        row = start // chunk * M + m + H * HALF
        if rows_to is not None:
            if n == 0:
                column = gl.zeros((HALF, ONES), gl.float32, SUMS)
                for k in range(start, stop, DEPTH):
                    hopper.mbarrier.wait(ring[2].index(i % STAGES), i // STAGES & 1)
                    a, b = operands(ring, i, H, A_TRANSPOSED, B_TRANSPOSED)
                    column = hopper.warpgroup_mma(a, ones.index(0).permute((1, 0)), column, is_async=True)
                    acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
                    acc, column = hopper.warpgroup_mma_wait(1, deps=(acc, column))
                    release(empty, ahead, i, k > start, H)
                    i += 1
                acc, column = hopper.warpgroup_mma_wait(0, deps=(acc, column))
                at = m + H * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))
                gl.store(
                    rows_to + start // chunk * M + at, gl.max(column, 1), mask=at < M
                )  # all of its columns are equal
            else:
                acc, i = contract(acc, ring, ahead, start, stop, i, H, A_TRANSPOSED, B_TRANSPOSED)
        else:
            acc, i = contract(acc, ring, ahead, start, stop, i, H, A_TRANSPOSED, B_TRANSPOSED)
        hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))

        if m + H * HALF < M:  # a half without rows has nothing to send; with parts of K the next part's rows lie there
            sent = finish(acc, out_map, pre_map, bias, adding, way, row, n, N, sent, H, EPILOGUE)
    if H == 0:
        hopper.mbarrier.arrive(ahead.index(0), pred=i < 2)
    hopper.tma.store_wait(0)


@gluon
def operands(ring, i, H: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """Half H of a, and b, of the i-th turn, as a product takes them."""
    s = i % ring[2].shape[0]
    a, b = ring[0].index(2 * s + H), ring[1].index(s)
    if A_TRANSPOSED:
        a = a.permute((1, 0))
    if B_TRANSPOSED:
        b = b.permute((1, 0))
    return a, b


@gluon
def release(empty, ahead, i, another, H: gl.constexpr):
    """After the i-th turn's product is on its way: give the stage back of the one before, of the same tile if there is `another`;
    it is done with."""
    STAGES: gl.constexpr = empty.shape[0]
    hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=another)
    if H == 0:
        hopper.mbarrier.arrive(ahead.index(0), pred=i == 1)


@gluon
def contract(acc, ring, ahead, start, stop, i, H: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """Multiply a tile over [start, stop). One product stays in flight, so the tensor cores never wait for this loop."""
    for k in range(start, stop, DEPTH):
        hopper.mbarrier.wait(ring[2].index(i % ring[2].shape[0]), i // ring[2].shape[0] & 1)
        a, b = operands(ring, i, H, A_TRANSPOSED, B_TRANSPOSED)
        acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        release(ring[3], ahead, i, k > start, H)
        i += 1
    return hopper.warpgroup_mma_wait(0, deps=(acc,)), i


@gluon
def finish(
    total, out_map, pre_map, bias, adding, way, row, column, N, sent, H: gl.constexpr, EPILOGUE: gl.constexpr
):  # fmt: skip
    """Send half H of a tile out through the epilogue, in blocks as wide as a slot. `sent`: blocks so far; gives the new count."""
    slots, arrived, free = way
    SLOTS: gl.constexpr = slots.shape[0] // 2
    WIDTH: gl.constexpr = slots.shape[2]
    COUNT: gl.constexpr = total.shape[1] // WIDTH
    FETCHED: gl.constexpr = EPILOGUE != "" and pre_map is None
    ADDED: gl.constexpr = EPILOGUE == "residual" or EPILOGUE == "add" or EPILOGUE == "start"
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    blocks = pieces(total, COUNT)
    for c in gl.static_range(COUNT):
        value = blocks[c]
        if bias is not None:
            at = column + c * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
            inside = gl.max_constancy(at < N, [2])  # N is even: two go in one load
            value += gl.expand_dims(gl.load(bias + at, mask=inside, other=0.0).to(gl.float32), 0)
        if pre_map is not None:
            hopper.tma.store_wait(SLOTS - 1)
            send(pre_map, slots.index(H * SLOTS + sent % SLOTS), value, row, column + c * WIDTH)
            sent += 1
            value = value_of(value, EPILOGUE)
        slot = slots.index(H * SLOTS + sent % SLOTS)
        if FETCHED:
            if adding:
                hopper.mbarrier.wait(arrived.index(H * SLOTS + sent % SLOTS), sent // SLOTS & 1)
                other = slot.load(LAYOUT).to(gl.float32)
                value = value + other if ADDED else value * slope_of(other, EPILOGUE)
        else:
            hopper.tma.store_wait(SLOTS - 1)
        send(out_map, slot, value, row, column + c * WIDTH)
        if FETCHED:
            # The block before has left its slot by now: the next may be fetched into it. The tile's last leaves below.
            hopper.tma.store_wait(1)
            hopper.mbarrier.arrive(free.index(H * SLOTS + (sent + SLOTS - 1) % SLOTS), pred=c > 0)
        sent += 1
    if FETCHED:
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(free.index(H * SLOTS + (sent + SLOTS - 1) % SLOTS))
    return sent


@gluon
def pieces(x, COUNT: gl.constexpr):
    """x (rows, cols) as COUNT blocks of columns. Nothing moves: in the layout of products, registers count columns beyond 8."""
    if COUNT == 1:
        return (x,)
    else:
        HALF_COLS: gl.constexpr = x.shape[1] // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_COLS, 16])
        left, right = x.reshape([x.shape[0], 2, HALF_COLS]).permute(0, 2, 1).split()
        left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
        right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
        return pieces(left, COUNT // 2) + pieces(right, COUNT // 2)


@gluon
def send(out_map, slot, value, row, column):
    """Write a block of the result to its slot and start its way out."""
    slot.store(value.to(out_map.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out_map, [row, column], slot)
