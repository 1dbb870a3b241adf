"""What the warp-specialized kernels of Hopper share: rings of tiles in shared memory, which a producer warp fills by TMA and
consumer warpgroups read by wgmma, and the layout of wgmma's results. Step i of a ring is in stage i % STAGES; with two mbarriers.

    full[s]   TMA has written the stage: 1 arrival (the producer's expect) and the bytes of its loads
    empty[s]  every consumer has read it: an arrival of each"""

from barellm.cuda.lang import compile_time, constant, gl, gluon, hopper

WG_M = constant(64)  # rows of a consumer warpgroup: of one wgmma


@compile_time
def wgmma_layout(COLUMNS):
    """The registers of a wgmma's fp32 result (64, COLUMNS): version 3 of tensor core instructions; four warps of 16 rows each; in a
    warp, each group of 8 columns lies so: lane 4 r + c has row r (and row 8 + r), columns 2 c and 2 c + 1. COLUMNS: 8 j."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])


@gluon
def smem_boxes(tensor_map, COUNT):
    """COUNT boxes of a tensor map in shared memory, (COUNT, rows, columns), in the map's swizzled layout."""
    shape: gl.constexpr = [COUNT, tensor_map.block_shape[0], tensor_map.block_shape[1]]
    return gl.allocate_shared_memory(tensor_map.dtype, shape, tensor_map.layout)


@gluon
def mbarriers(STAGES):
    """STAGES mbarriers in shared memory, (STAGES, 1) i64, to be initialized."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())


@gluon
def producer_acquire(empty, i):
    """Wait until the stage of step i of a ring may be filled: every consumer has released it. `empty`: its (STAGES, 1) mbarriers.

    Step i is in stage i % STAGES. A barrier's phase is the parity of how often the ring has gone round, i // STAGES & 1, here its
    opposite: waiting for the phase before the first passes at once."""
    STAGES: gl.constexpr = empty.shape[0]
    hopper.mbarrier.wait(empty.index(i % STAGES), (i // STAGES & 1) ^ 1)


@gluon
def consumer_wait(full, i):
    """Wait until TMA has filled the stage of step i of a ring. `full`: its (STAGES, 1) mbarriers."""
    STAGES: gl.constexpr = full.shape[0]
    hopper.mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)


@gluon
def consumer_release(empty, i):
    """Say that this consumer has read the stage of step i: one arrival at its `empty` barrier."""
    STAGES: gl.constexpr = empty.shape[0]
    hopper.mbarrier.arrive(empty.index(i % STAGES))
