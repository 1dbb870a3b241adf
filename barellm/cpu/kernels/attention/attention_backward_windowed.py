"""Attention backward with sliding windows or documents: a work item is a chunk of the sequence of a head of keys.

Shapes and formulas as in attention_backward.py. A chunk is a run of blocks of keys and the queries at the same positions. Its work
item computes dk and dv of these keys and dq of these queries, five GEMMs a block. Only where a query and a key that it sees are in
different chunks do two work items recompute their probability, for three GEMMs and for four: with chunks much longer than a window
that is little, and a document's border costs nothing. dq of the chunk accumulates in the thread's scratch, and a sequence of any
length occupies every thread.

Every sum runs over the same blocks in the same order wherever chunks end, so that their number decides no bit."""

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.attention.attention_backward_tiles import BackwardHead, ends_of_group, query_heads
from barellm.cpu.kernels.attention.attention_mask import MaskSpec
from barellm.cpu.kernels.attention.attention_microkernels import KEY_BLOCK, Geometry, clear, pack_left, round_up
from barellm.cpu.kernels.gemm import amx

CHUNK = 2048  # positions at most
CHUNK_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # candidates
INNER_COST, BORDER_COST = 5, 1  # GEMMs of a block pair in a chunk, and what a pair across its ends costs more


def select_chunk_count(k, heads, blocks, mask_spec: MaskSpec) -> Value:
    """The number of chunks of a sequence of `blocks` key blocks: of CHUNK_COUNTS that with the shortest makespan, estimated in
    GEMMs of a block, when `heads` heads of keys share these threads."""
    min_chunks = k.ceil_div(blocks, CHUNK // KEY_BLOCK)
    # Key blocks that a query sees.
    window = blocks if mask_spec.window is None else k.min(mask_spec.keys_before(k) // KEY_BLOCK + 1, blocks)
    best, shortest = k.max(min_chunks, 1), k.int(1 << 62)
    for n in CHUNK_COUNTS:
        chunk_blocks = k.ceil_div(blocks, n)
        rounds = k.ceil_div(heads * n, k.threads)  # of work items, one a thread
        time = rounds * (chunk_blocks * INNER_COST + k.min(window, chunk_blocks) * BORDER_COST)
        better = (time < shortest) & (min_chunks <= n) & (blocks >= n)
        best, shortest = k.select(better, k.int(n), best), k.select(better, time, shortest)
    return best


def attention_backward_windowed(k, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, starts, stream, *, batch, modes, heads,
        kv_heads, D, mask_spec, **shape) -> None:  # fmt: skip
    """The kernel: dq, dkeys and dvalues (shapes of q, keys, values) with windows or documents. A work item is a chunk of a head of
    keys, for all query heads that share it. `modes` (store or add): of dq, dk and dv; `strides` in `shape`: of q, k, v, dq, dk, dv.
    `starts` (B, T) i32: first position of each token's document, or None; `stream`: dropout's random stream. `mask_spec`: the mask;
    lse, delta (B, heads, T) fp32."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, starts, stream)
    shape |= {"heads": heads, "kv_heads": kv_heads, "D": D, "mask_spec": mask_spec, "g": Geometry.of(k.isa, q.dtype, D)}
    group = heads // kv_heads  # query heads that share a head of keys
    T = mask_spec.length(k, shape["seq"])
    count = k.size(batch) * kv_heads  # heads of keys
    blocks = k.ceil_div(T, KEY_BLOCK)
    num_chunks = select_chunk_count(k, count, blocks, mask_spec)
    chunk_blocks = k.ceil_div(blocks, num_chunks)
    add_dq, *add_dkdv = (k.keep(mode) for mode in modes)  # i1, or None: never
    with amx.tile_registers(k, shape["g"].tiles), k.parallel_for(count * k.ceil_div(blocks, chunk_blocks)) as item:
        per_head = k.ceil_div(blocks, chunk_blocks)
        index = item // per_head  # of the head of keys, over all sequences
        first_block = item % per_head * chunk_blocks
        first = first_block * KEY_BLOCK  # positions [first, stop) of the chunk
        stop = k.min((first_block + chunk_blocks) * KEY_BLOCK, T)
        with query_heads(k, group) as group_index:
            sequence = index // kv_heads
            head = index % kv_heads * group + group_index
            h = BackwardHead(k, operands, sequence, head, **shape)
            add_chunk(k, h, first_block, first, stop, *ends_of_group(group, group_index), add_dkdv)
            with k.loop(first, stop, h.g.queries) as t:
                h.store_dq(t, h.s["dq"].at((t - first) * h.g.acc_rows), add_dq)


def add_chunk(k, h: BackwardHead, first_block, first, stop, is_first, is_last, add) -> None:
    """One query head `h` x one chunk: dq of its queries [first, stop) accumulates in h.s["dq"]; dk and dv of its key blocks, from
    number `first_block` on, in h.s["dk"] and h.s["dv"]. These are zeroed by the first head of a group and stored by the last
    (`is_first`, `is_last`: i1, None for a group of one), or added where `add` (of dk, of dv) is true. Keys before the chunk, which
    its queries see, only give dq; queries behind it, which see its keys, only dk and dv."""
    g, s = h.g, h.s
    assert h.key_range is not None
    clear(k, s["dq"], k.ceil_div(stop - first, g.queries) * (g.acc_rows * g.queries))
    with k.loop(h.key_range.first_key(k, first) // KEY_BLOCK, k.ceil_div(stop, KEY_BLOCK)) as block:
        j0 = block * KEY_BLOCK  # first key
        in_chunk = block >= first_block  # whether dk and dv are this item's
        count = h.pack_keys(j0)
        pack_left(k, g, s["k_rows"], count, s["k"])
        offset = k.select(in_chunk, block - first_block, 0) * (KEY_BLOCK * g.padded_D)
        dk, dv = s["dk"], s["dv"]
        if is_first is not None:  # the sums of all blocks wait for the group's other heads
            dk, dv = dk.at(offset), dv.at(offset)
        with k.when(in_chunk if is_first is None else in_chunk & is_first):
            for acc in (dk, dv):
                clear(k, acc, round_up(k, count, g.rows) * g.padded_D)

        query_end = h.key_range.query_end(k, j0 + count - 1)  # behind the last query that sees a key of the block
        query_end = k.select(in_chunk, query_end, k.min(query_end, stop))  # of the queries that are computed
        with k.loop(k.max(j0, first), query_end, g.queries) as t:
            key_bounds = h.key_bounds(t)
            assert key_bounds is not None
            begin, num_keys = key_bounds.first_row(k, g, j0), h.num_keys(j0, count, t)  # keys of the block that the group sees
            shift, deltas = h.pack_queries(t, vnni=True)
            h.probabilities(j0, t, begin, num_keys, shift, deltas, for_dkdv=True, key_bounds=key_bounds)
            with k.when(in_chunk):
                h.add_dkdv(begin, num_keys, dk, dv)
            with k.when(t < stop):
                h.add_dq(begin, num_keys, s["dq"].at((t - first) * g.acc_rows))

        with k.when(in_chunk if is_last is None else in_chunk & is_last):
            h.store_dkdv(j0, count, dk, dv, add)
