"""Block-sparse attention, backward.

Shapes and formulas as in attention_backward.py, tables as in block_sparse_attention.py. Two schedules give the same bits, for every
sum runs over the same blocks in the same order:

    one pass     a work item is a head of keys: five GEMMs a block; dk and dv of a whole head accumulate in the thread's scratch
    two passes   a work item is a row of the layout (dq), then a column (dk, dv): seven GEMMs, but more parallelism

The run-time shape and the number of threads decide. A row has its blocks of keys packed into one tile, like the forward pass; a
column has one block of keys and loops over the rows that list it.

The gradient of the position bias is a sum over all queries. The rows of a layout are split into parts, whose number depends on the
numbers of sequences and heads; each part of each sequence has a partial sum, and these are added in order."""

from collections.abc import Callable
from math import sqrt

from barellm.cpu.kernel import Lowering, Op, Value, lowering, part
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.cpu.kernels.attention import block_sparse_attention as forward
from barellm.cpu.kernels.attention.attention_backward import append_delta, use_one_pass
from barellm.cpu.kernels.attention.attention_backward_tiles import BackwardHead, Operands, query_heads
from barellm.cpu.kernels.attention.attention_mask import PLAIN
from barellm.cpu.kernels.attention.relative_position_bias import Distances, backward_units
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.reductions import add_chunks
from barellm.program.integers import ceil_div

PARTIAL_SUMS = 64  # of the position bias's gradient, over all heads of keys: enough for any number of threads


def scratch_units(g, block: int, rows: int, distances: Distances | None) -> dict[str, int]:
    """Sizes of the scratch blocks of a BlockSparseHead, in 32-bit units: packed blocks of keys, tiles of P and dS, fp32
    accumulators "dq" of a block of queries, and "dk", "dv" of all `rows` keys. `distances`: of the position bias, None: no bias."""
    packed = forward.blocks_per_pack(block) * block
    bias = backward_units(g, block, forward.blocks_per_pack(block), distances) if distances else {}
    return {"rows": g.rows_units(g.queries), "q_transposed": g.transposed_units, "do_transposed": g.transposed_units,
        "q": g.vnni_units(g.queries) + g.lanes, "do": g.vnni_units(g.queries) + g.lanes, "k_rows": g.rows_units(packed),
        "v_rows": g.rows_units(packed), "k": g.vnni_units(packed), "p_tile": g.rows * g.queries,
        "dp_tile": g.rows * g.queries if g.tiles else 0, "p": packed * g.queries // g.pair, "ds": packed * g.queries // g.pair,
        "ds_vnni": packed * g.queries // g.pair, "out": g.queries * g.padded_D, "dq": g.accumulator_units(block // g.queries),
        "dk": rows * g.padded_D, "dv": rows * g.padded_D, **bias}  # fmt: skip


class BlockSparseHead(BackwardHead):
    """A BackwardHead whose queries see the blocks that `table` lists. `bias`: its relative position bias, None: none; `sums`: the
    same where its gradient is accumulated. State of the loops: `query`, the group's first query in its block; `entry`, the table's
    entry of the first packed block, by which masks are found; block_distance(i): the index of the block of queries minus that of
    packed block i of keys."""

    def __init__(self, k, operands: Operands, sequence, head, table: forward.BlockTable, relative, distances: Distances | None, *,
            g: micro.Geometry, sums: bool, heads: int, **size_constants) -> None:  # fmt: skip
        """As BackwardHead. `relative` (distances, heads * D), `distances`: the position bias's vectors and their first and last
        distance, or None; `sums`: accumulate their gradient."""
        self.table = table
        units = scratch_units(g, table.block, table.tokens, distances)
        super().__init__(k, operands, sequence, head, rate=0.0, length=table.tokens, mask_spec=PLAIN, g=g, units=units, heads=heads,
            **size_constants)  # fmt: skip
        self.query = self.entry = k.int(0)
        self.block_distance: Callable[[Value], Value] = lambda i: i
        self.bias = forward.relative_bias_of(k, g, self.s, table.block, relative, head, heads, distances)
        self.sums = self.bias if sums else None

    def start(self, j) -> list[list[Value]] | None:
        return self.bias and self.bias.start(self.block_distance, j)

    def record_ds(self, j, ds) -> None:
        if self.sums:
            self.sums.record_ds(j, ds)

    def pack_bias(self, num_blocks) -> None:
        """Pack the position bias's vectors for `num_blocks` packed blocks of keys."""
        if self.bias:
            with self.bias.for_each_near(num_blocks, self.block_distance) as (block_distance, i):
                self.bias.pack_tile(block_distance, i)
                if self.sums:
                    self.bias.vnni_pack(i)

    def bias_scores(self, num_blocks) -> None:
        """Compute R Q^T, the position bias of the packed group of queries and `num_blocks` packed blocks of keys, in scratch."""
        if self.bias:
            with self.bias.for_each_near(num_blocks, self.block_distance) as (block_distance, i):
                self.bias.bias_of_queries(block_distance, i, self.query, self.s["q_transposed"])

    def tile_mask(self, key, t, key_bounds: micro.KeyBounds | None) -> tuple[Value, Callable[[], Callable[[int, int], Value]]]:
        return self.table.tile_mask(self.g, self.entry, self.query, key)

    def add_row(self, row, begin, end, is_one_pass) -> None:
        """Add the block of queries `row` x its listed blocks of keys, the table's entries [begin, end): s["dq"] [D][queries]
        accumulates its dq, from zero; where `is_one_pass` (i1) s["dk"] and s["dv"] [key][g.padded_D] what these queries add."""
        k, g, s, block = self.k, self.g, self.s, self.table.block
        first = row * block  # queries [first, last)
        last = k.min(first + block, self.T)
        micro.clear(k, s["dq"], block * g.acc_rows)
        with k.loop(begin, end, forward.blocks_per_pack(block)) as entry:
            num_blocks = k.min(end - entry, forward.blocks_per_pack(block))
            forward.gather(k, g, self.table, ((self.keys, s["k_rows"]), (self.values, s["v_rows"])), entry, num_blocks, self.T)
            micro.pack_left(k, g, s["k_rows"], num_blocks * block, s["k"])
            self.block_distance = lambda i, entry=entry: row - self.table.block_of(entry + i)
            self.pack_bias(num_blocks)
            with k.loop(first, last, g.queries) as t:
                shift, deltas = self.pack_queries(t, vnni=True)
                self.query, self.entry = t - first, entry
                self.bias_scores(num_blocks)
                self.probabilities(k.int(0), t, 0, num_blocks * block, shift, deltas, for_dkdv=True)
                with k.when(is_one_pass), k.loop(0, num_blocks) as i:
                    # Where packed block i's keys are in dk, less i blocks.
                    at = (self.table.block_of(entry + i) - i) * (block * g.padded_D)
                    self.add_dkdv(i * block, (i + 1) * block, s["dk"].at(at), s["dv"].at(at))
                dq = s["dq"].at((t - first) * g.acc_rows)
                self.add_dq(0, num_blocks * block, dq)
                if self.sums:
                    with self.sums.for_each_near(num_blocks, self.block_distance) as (block_distance, i):
                        self.sums.backward(block_distance, i, t - first, dq)

    def store_row(self, row, add) -> None:
        """Write dq of the block of queries `row`, or add it where `add` (i1, None: never)."""
        g, block = self.g, self.table.block
        first = row * block
        with self.k.loop(first, self.k.min(first + block, self.T), g.queries) as t:
            self.store_dq(t, self.s["dq"].at((t - first) * g.acc_rows), add)


def rows_per_part(k, batch: str | int, kv_heads: int, blocks) -> Value:
    """How many rows of a layout of `blocks` rows share one partial sum of the position bias's gradient."""
    return k.ceil_div(blocks, k.ceil_div(k.int(PARTIAL_SUMS), k.size(batch) * kv_heads))


def block_sparse_attention_backward_rows(k, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, rows, masks, relative, partials,
        *, batch, modes, heads, kv_heads, block, lists, entries, distances, **shape) -> None:  # fmt: skip
    """The kernel: dq, and in one pass also dkeys and dvalues. A work item is a head of keys (one pass) or a part of its rows of the
    layout, for all its query heads. `rows`, `masks`: see `BlockTable`. partials (sequences, parts, distances, heads * D) fp32: sums
    of the relative bias's gradient. `modes` (store or add): of dq, dk and dv; `strides` in `shape`: of q, k, v, dq, dk, dv."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, None, None)
    table = forward.BlockTable(k, rows, masks, block, lists, entries, heads)
    group = heads // kv_heads  # query heads that share a head of keys
    T = k.size(shape["seq"])
    count = k.size(batch) * kv_heads  # heads of keys
    blocks = k.ceil_div(T, block)  # rows of a head
    is_one_pass = use_one_pass(k, count)
    add_dq, *add_dkdv = (k.keep(mode) for mode in modes)  # i1, or None: never
    part_rows = k.int(1) if relative is None else rows_per_part(k, batch, kv_heads, blocks)
    parts = k.ceil_div(blocks, part_rows)  # of a head's rows
    g = forward.geometry(k.isa, q.dtype, shape["D"], block, tiles=relative is None)
    with amx.tile_registers(k, g.tiles), k.parallel_for(count * k.select(is_one_pass, k.int(1), parts)) as item:
        index = k.select(is_one_pass, item, item // parts)  # of the head of keys, over all sequences
        part_index = parts - 1 - item % parts  # the longest rows of a causal layout first
        start = k.select(is_one_pass, k.int(0), part_index)  # parts [start, stop)
        stop = k.select(is_one_pass, parts, part_index + 1)
        with query_heads(k, group) as group_index:
            head = index % kv_heads * group + group_index
            sequence = index // kv_heads
            h = BlockSparseHead(k, operands, sequence, head, table, relative, distances, g=g, sums=True, heads=heads,
                kv_heads=kv_heads, **shape)  # fmt: skip
            with k.when(is_one_pass & group_index.equals(0)):
                for name in ("dk", "dv"):
                    micro.clear(k, h.s[name], blocks * (block * g.padded_D))
            if h.sums:
                h.sums.clear_padding(forward.blocks_per_pack(block))
            with k.loop(start, stop) as part_of_rows:
                if h.sums:
                    h.sums.clear()
                with k.loop(part_of_rows * part_rows, k.min(part_of_rows * part_rows + part_rows, blocks)) as row:
                    h.add_row(row, *table.entries_of(head, row), is_one_pass)
                    h.store_row(row, add_dq)
                if h.sums:
                    C = heads * h.g.D
                    num_distances = distances[1] - distances[0] + 1
                    dst = partials.at((sequence * parts + part_of_rows) * (num_distances * C) + head * h.g.D)
                    h.sums.store(micro.HeadRows(dst, C), 1 / sqrt(h.g.D))
            with k.when(is_one_pass & group_index.equals(group - 1)):
                h.store_dkdv(k.int(0), T, h.s["dk"], h.s["dv"], add_dkdv)


def block_sparse_attention_backward_columns(k, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, columns, masks, relative, *,
        batch, modes, heads, kv_heads, block, lists, entries, distances, **shape) -> None:  # fmt: skip
    """The kernel: dkeys and dvalues, unless one pass did. A work item is a block of keys of a head of keys: a column of the layout,
    whose table `columns` lists blocks of queries. Other parameters as in `block_sparse_attention_backward_rows`."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, None, None)
    table = forward.BlockTable(k, columns, masks, block, lists, entries, heads)
    group = heads // kv_heads  # query heads that share a head of keys
    T = k.size(shape["seq"])
    count = k.size(batch) * kv_heads  # heads of keys
    blocks = k.ceil_div(T, block)  # columns of a head
    _, *add_dkdv = (k.keep(mode) for mode in modes)  # i1, or None: never
    g = forward.geometry(k.isa, q.dtype, shape["D"], block, tiles=relative is None)
    items = k.select(use_one_pass(k, count), k.int(0), count * blocks)
    with amx.tile_registers(k, g.tiles), k.parallel_for(items) as item:
        index = item // blocks  # of the head of keys, over all sequences
        column = item % blocks
        with query_heads(k, group) as group_index:
            head = index % kv_heads * group + group_index
            sequence = index // kv_heads
            h = BlockSparseHead(k, operands, sequence, head, table, relative, distances, g=g, sums=False, heads=heads,
                kv_heads=kv_heads, **shape)  # fmt: skip
            s = h.s
            j0 = column * block
            num_keys = k.min(T - j0, block)
            # The first query head of the group packs the keys, and the last one stores the sums of all.
            with k.when(group_index.equals(0)):
                for source, name in ((h.keys, "k_rows"), (h.values, "v_rows")):
                    micro.pack_tile(k, g, source.start(j0), num_keys, block, s[name])
                for name in ("dk", "dv"):
                    micro.clear(k, s[name], block * g.padded_D)
            begin, end = table.entries_of(head, column)
            with k.loop(begin, end) as entry:
                first = table.block_of(entry) * block
                h.block_distance = lambda i, entry=entry: table.block_of(entry) - column
                h.pack_bias(k.int(1))
                with k.loop(first, k.min(first + block, T), g.queries) as t:
                    shift, deltas = h.pack_queries(t, vnni=True)
                    h.query, h.entry = t - first, entry
                    h.bias_scores(k.int(1))
                    h.probabilities(k.int(0), t, 0, k.int(block), shift, deltas, for_dkdv=True)
                    h.add_dkdv(0, k.int(block), s["dk"], s["dv"])
            with k.when(group_index.equals(group - 1)):
                h.store_dkdv(j0, num_keys, s["dk"], s["dv"], add_dkdv)


def add_relative_parts(k, drelative, partials, *, batch, seq, kv_heads, block, size, mode) -> None:
    """drelative (size) = the sum of the partial sums over sequences and parts, in order."""
    blocks = k.ceil_div(k.size(seq), block)
    parts = k.ceil_div(blocks, rows_per_part(k, batch, kv_heads, blocks))
    add_chunks(k, drelative, partials, k.size(batch) * parts, size, size, mode)


@lowering("block_sparse_attention_backward", starts="dq dk dv drelative", views="q k v dq dk dv", also=forward.TABLES)
def lower_block_sparse_attention_backward(op: Op, c: Lowering) -> None:
    """Append `attention_delta`, both passes (the second is empty where one pass is chosen), and the sum of the bias's gradients."""
    shape, layout = forward.shape_of(op), op.layout
    shape["strides"] += tuple(t.row_stride for t in (op.dq, op.dk, op.dv))
    modes = tuple(op.modes[name] for name in ("dq", "dk", "dv"))
    g = forward.geometry(c.isa, op.q.dtype, shape["D"], layout.block, tiles=op.relative is None)
    operands = append_delta(op, c, shape | {"mask_spec": PLAIN})
    operands |= {"rows": op.rows, "columns": op.columns, "masks": op.masks, "relative": forward.vectors_of(op), "partials": None}
    if op.relative is not None:
        # The parts of as many sequences as a run may have; the number of each is rounded up.
        max_parts = int(op.out.shape[0]) + ceil_div(PARTIAL_SUMS, op.kv_heads)
        sums = c.workspace("partials", 4 * max_parts * op.relative.size)
        operands["partials"] = (part(sums), "fp32")
    c.thread_scratch(micro.offsets(scratch_units(g, layout.block, layout.rows * layout.block, shape["distances"]))[1])
    for emit in (block_sparse_attention_backward_rows, block_sparse_attention_backward_columns):
        c.call(emit, operands, shape | {"modes": modes}, writes="dq dkeys dvalues partials")
    if op.relative is not None:
        constants = {name: shape[name] for name in ("batch", "seq", "kv_heads", "block")}
        constants |= {"size": op.relative.size, "mode": op.modes["drelative"]}
        c.call(add_relative_parts, operands | {"drelative": op.drelative}, constants, writes="drelative")
