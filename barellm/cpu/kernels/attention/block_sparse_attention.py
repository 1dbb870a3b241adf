"""Block-sparse attention, forward: over the blocks of keys that a layout lists (`program/layouts.py` has the tables).

Shapes and common parameters as in attention_forward.py; `block`: queries or keys of a block. A work item is one row of the layout:
a block of queries of one head. Its listed blocks of keys are gathered into one packed tile of at most KEY_BLOCK rows, and are then
keys like any others: register tiles do not know that they are not contiguous in memory. Only tiles of partly masked blocks read
mask bits. The relative position bias (relative_position_bias.py) is the initial accumulator of the scores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from barellm.cpu.kernel import ISA, KernelBuilder, Lowering, Op, Pointer, Value, lowering, weight_operand
from barellm.cpu.kernels.attention import attention_microkernels as micro
from barellm.cpu.kernels.attention.attention_forward import OnlineSoftmax
from barellm.cpu.kernels.attention.attention_mask import LOWEST, PLAIN
from barellm.cpu.kernels.attention.relative_position_bias import Distances, RelativePositionBias, forward_units
from barellm.cpu.kernels.gemm import amx
from barellm.program import dtypes, layouts


def geometry(isa: ISA, dtype: str, D: int, block: int, *, tiles: bool) -> micro.Geometry:
    """The geometry whose groups of queries divide a block. AMX is used if its tiles lie in one block and `tiles` is true: a
    position bias, the scores' initial accumulator, needs vector registers."""
    g = micro.Geometry.of(isa, dtype, D, tiles=tiles and block % amx.TILE_K == 0)
    return g if block % g.queries == 0 else replace(g, vectors=1)


def blocks_per_pack(block: int) -> int:
    """Blocks of keys in a packed tile of at most KEY_BLOCK keys."""
    return max(1, micro.KEY_BLOCK // block)


@dataclass(frozen=True)
class BlockTable:
    """One of a layout's tables in CSR form, of rows (blocks of keys for each block of queries) or of columns: `table` i32 has the
    begins of the `lists` lists of all `heads` (and an end), block numbers of the `entries` entries, mask numbers of the entries.
    `masks` i32: bits of the partly masked blocks, [mask][key of the block][word of query bits]."""

    k: KernelBuilder
    table: Pointer
    masks: Pointer
    block: int
    lists: int
    entries: int
    heads: int

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, padded to blocks."""
        return self.lists // self.heads * self.block

    def entries_of(self, head, row) -> tuple[Value, Value]:
        """The entries [begin, end) of a head's row."""
        number = head * (self.lists // self.heads) + row
        return self.table.get(number), self.table.get(number + 1)

    def block_of(self, entry) -> Value:
        """The block number of an entry."""
        return self.table.get(entry + (self.lists + 1))

    def tile_mask(self, g, entry, query, j) -> tuple[Value, Callable[[], Callable[[int, int], Value]]]:
        """As `attention_microkernels.tile_mask`, by the layout's bits: of the tile from row j of the packed blocks on, whose first
        block is `entry`, x the group of queries from position `query` of its block on."""
        k, words = self.k, -(-self.block // layouts.WORD)
        # 0: all of the entry's block is visible; n: mask n - 1 says what is.
        kind = self.table.get(entry + j // self.block + (self.lists + 1 + self.entries))

        def make_mask() -> Callable[[int, int], Value]:
            """Emit the addresses of the mask's words for this tile; returns the function of its lane masks."""
            # A mask has a row of `words` words for each key, a bit for each query of the block.
            first = ((kind - 1) * self.block + j % self.block) * words
            bit_numbers = [query + v * g.lanes for v in range(g.vectors)]
            bit = Value(k, k.ivec, "<" + ", ".join(f"i32 {1 << i}" for i in range(k.lanes)) + ">")

            def is_visible(r: int, v: int) -> Value:
                word = self.masks.get(first + r * words + bit_numbers[v] // layouts.WORD)
                return (k.splat(word >> (bit_numbers[v] % layouts.WORD)) & bit).differs(0)

            return is_visible

        return kind > 0, make_mask


def gather(k, g, table: BlockTable, tensors: tuple[tuple[micro.HeadRows, Pointer], ...], entry, num_blocks, T) -> None:
    """Pack the blocks of keys of `num_blocks` entries, from `entry` on, one after the other as `rows`: for each (tensor, scratch
    block) of `tensors`. A sequence has T tokens; rows beyond are zero."""
    with k.loop(0, num_blocks) as i:
        j0 = table.block_of(entry + i) * table.block
        for rows, dst in tensors:
            micro.pack_tile(k, g, rows.start(j0), k.min(T - j0, table.block), table.block, dst.at(i * (table.block * g.row_units)))


def scratch_units(g, block: int, distances: Distances | None) -> dict[str, int]:
    """Sizes of the blocks in scratch, in 32-bit units; `distances`: those that have a relative position bias, None: no bias."""
    n, rows = block // g.queries, blocks_per_pack(block) * block
    bias = forward_units(g, block, blocks_per_pack(block)) if distances else {}
    return {"q_rows": g.rows_units(g.queries), "q": n * g.transposed_units, "k": g.rows_units(rows), "v_rows": g.rows_units(rows),
        "v": g.vnni_units(rows), "p": rows * g.queries, "acc": n * g.accumulator_units(), "stats": n * 2 * g.queries,
        "alpha": g.queries, "out": g.queries * g.padded_D, **bias}  # fmt: skip


def relative_bias_of(k, g, s, block: int, relative, head, heads: int, distances: Distances | None) -> RelativePositionBias | None:
    """The relative position bias of a head, if there is any."""
    if relative is None or distances is None:
        return None
    return RelativePositionBias(k, g, s, block, micro.HeadRows.of(relative, k.int(0), head, D=g.D, stride=heads * g.D), distances)


def block_sparse_attention(k, out, lse, q, keys, values, rows, masks, relative, *, batch, seq, heads, kv_heads, D, strides, block,
        lists, entries, distances) -> None:  # fmt: skip
    """The kernel: out (B, T, heads * D) and lse (B, heads, T) over the blocks of keys that the table `rows` lists for each block of
    queries; `masks`: see `BlockTable`. `relative` (distances, heads * D): the vectors of a relative position bias, or None. A work
    item is a block of queries: pack Q, then for as many listed blocks as fit into KEY_BLOCK rows gather K and V and do one step of
    the online softmax for each group of queries. `block`: queries or keys of a block; `lists`, `entries`: sizes of the table;
    `distances`: first and last that have a bias, or None."""
    g = geometry(k.isa, q.dtype, D, block, tiles=relative is None)
    T = k.size(seq)
    s = micro.blocks_of(k, scratch_units(g, block, distances))
    softmax = OnlineSoftmax(k, g, s, PLAIN)
    table = BlockTable(k, rows, masks, block, lists, entries, heads)
    blocks = k.ceil_div(T, block)  # of queries, of a head
    with amx.tile_registers(k, g.tiles), k.parallel_for(k.size(batch) * heads * blocks) as item:
        sequence = item // (blocks * heads)
        head = item // blocks % heads
        row = blocks - 1 - item % blocks  # longest first in a causal layout
        first = row * block  # queries [first, last)
        last = k.min(first + block, T)
        token = sequence * T
        q_rows, k_rows, v_rows = PLAIN.rows_of((q, keys, values), token, head, D=D, heads=heads, kv_heads=kv_heads, strides=strides)
        dst = micro.HeadRows.of(out, token, head, D=D, stride=heads * D)
        bias = relative_bias_of(k, g, s, block, relative, head, heads, distances)
        with k.loop(first, last, g.queries) as t:
            softmax.begin((t - first) // g.queries, q_rows, t, last, LOWEST)
        begin, end = table.entries_of(head, row)  # the row's blocks of keys
        with k.loop(begin, end, blocks_per_pack(block)) as entry:
            num_blocks = k.min(end - entry, blocks_per_pack(block))
            gather(k, g, table, ((k_rows, s["k"]), (v_rows, s["v_rows"])), entry, num_blocks, T)
            v_block = micro.pack_left(k, g, s["v_rows"], num_blocks * block, s["v"])

            def block_distance(i, entry=entry) -> Value:
                return row - table.block_of(entry + i)

            if bias:
                with bias.for_each_near(num_blocks, block_distance) as (between, i):
                    bias.pack_tile(between, i)
            with k.loop(first, last, g.queries) as t:
                group = (t - first) // g.queries
                if bias:
                    with bias.for_each_near(num_blocks, block_distance) as (between, i):
                        bias.bias_of_queries(between, i, t - first, softmax.queries_of(group))
                start = bias and partial(bias.start, block_distance)

                def tile_mask(j, entry=entry, t=t) -> Any:
                    return table.tile_mask(g, entry, t - first, j)

                softmax.add_keys(group, v_block, 0, num_blocks * block, tile_mask, start=start)
        with k.loop(first, last, g.queries) as t:
            softmax.finish((t - first) // g.queries, dst, lse.at((sequence * heads + head) * T), t, last)


def shape_of(op: Op) -> dict[str, Any]:
    """Compile-time constants of the kernels: sizes, and those of the layout's tables."""
    layout = op.layout
    lists = {"block": layout.block, "lists": layout.heads * layout.rows, "entries": len(layout.keys)}
    return micro.size_constants(op) | lists | {"distances": op.distances if op.relative is not None else None}


def vectors_of(op: Op) -> Any:
    """The vectors of the position bias as an operand."""
    return None if op.relative is None else weight_operand(op.relative)


TABLES = {"rows": "i32", "columns": "i32", "masks": "i32", "relative": dtypes.PLANES}


@lowering("block_sparse_attention", views="q k v", also=TABLES)
def lower_block_sparse_attention(op: Op, c: Lowering) -> None:
    """Append the kernel with the scratch of its packed blocks."""
    constants = shape_of(op)
    g = geometry(c.isa, op.q.dtype, constants["D"], constants["block"], tiles=op.relative is None)
    c.thread_scratch(micro.offsets(scratch_units(g, constants["block"], constants["distances"]))[1])
    operands = {"out": op.out, "lse": op.lse, "q": op.q, "keys": op.k, "values": op.v, "relative": vectors_of(op)}
    c.call(block_sparse_attention, operands | {"rows": op.rows, "masks": op.masks}, constants, writes="out lse")
