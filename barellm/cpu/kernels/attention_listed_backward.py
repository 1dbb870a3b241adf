"""Attention over the blocks of keys that a layout lists, backward.

Shapes and formulas as in attention_backward.py, tables as in attention_listed.py. Two schedules give the same bits, for every sum
runs over the same blocks in the same order:

    one pass     a claim is a head of keys: five products a block; dk and dv of a whole head wait in the thread's scratch
    two passes   a claim is a row of the layout (dq), then a column (dk, dv): seven products, but many claims

The run-time shape and the number of threads decide. A row meets its blocks of keys staged side by side, like the forward pass; a
column has one block of keys and meets the rows that list it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.attention_backward import attention_delta, one_pass
from barellm.cpu.kernels.attention_blocks import Geometry, Lower, clear, extent, offsets, stage, weave
from barellm.cpu.kernels.attention_bounds import PLAIN
from barellm.cpu.kernels.attention_head import Head, Operands
from barellm.cpu.kernels.attention_listed import Table, gather, geometry, shape_of, together
from barellm.cpu.lang import Value
from barellm.program.ops.base import Op
from barellm.runtime.lowering import part


def scratch_units(g: Geometry, block: int, rows: int) -> dict[str, int]:
    """The blocks of scratch, in units; dk and dv of all `rows` of keys may wait there."""
    staged = together(block) * block
    return {
        "rows": g.rows_units(g.queries),
        "q_turned": g.turned_units,
        "do_turned": g.turned_units,
        "q": g.woven_units(g.queries) + g.lanes,
        "do": g.woven_units(g.queries) + g.lanes,
        "k_rows": g.rows_units(staged),
        "v_rows": g.rows_units(staged),
        "k": g.woven_units(staged),
        "p_tile": g.rows * g.queries,
        "p": staged * g.queries // g.pair,
        "ds": staged * g.queries // g.pair,
        "ds_woven": staged * g.queries // g.pair,
        "out": g.queries * g.wide,
        "dq": g.transposed_units(block // g.queries),
        "dk": rows * g.wide,
        "dv": rows * g.wide,
    }


class ListedHead(Head):
    """A head whose queries see what a layout lists. `query` (of its block) and `entry`, of a tile's row, are where masks are
    looked up."""

    def __init__(
        self, k: KernelBuilder, operands: Operands, sequence: Value, head: Value, table: Table, rows: int, **sizes: Any
    ) -> None:  # fmt: skip
        self.table, self.padded = table, rows
        super().__init__(k, operands, sequence, head, rate=0.0, length=rows, bounds=PLAIN, **sizes)
        self.query = self.entry = k.int(0)

    def geometry(self, isa: ISA, dtype: str, D: int) -> Geometry:
        return geometry(isa, dtype, D, self.table.block)

    def units(self, rate: float, length: int, **shape: bool) -> dict[str, int]:
        return scratch_units(self.g, self.table.block, length)

    def edges(
        self, key: Value, t: Value, lower: Lower | None
    ) -> tuple[Value, Callable[[], Callable[[int, int], Value]]]:
        return self.table.edges(self.g, self.entry, self.query, key)

    def add_row(self, row: Value, begin: Value, end: Value, both: Value) -> None:
        """dq of a block of queries over the entries [begin, end), and where `both` their parts of dk and dv."""
        k, g, s, block = self.k, self.g, self.s, self.table.block
        first = row * block
        last = k.min(first + block, self.T)
        clear(k, s["dq"], block * g.D)
        with k.loop(begin, end, together(block)) as entry:
            some = k.min(end - entry, together(block))
            gather(k, g, self.table, ((self.keys, s["k_rows"]), (self.values, s["v_rows"])), entry, some, self.T)
            weave(k, g, s["k_rows"], some * block, s["k"])
            with k.loop(first, last, g.queries) as t:
                shift, deltas = self.stage_queries(t, woven=True)
                self.query, self.entry = t - first, entry
                self.probabilities(k.int(0), t, 0, some * block, shift, deltas, straight=True)
                with k.when(both), k.loop(0, some) as i:
                    at = (self.table.listed(entry + i) - i) * (block * g.wide)
                    self.add_dkdv(i * block, (i + 1) * block, s["dk"].at(at), s["dv"].at(at))
                self.add_dq(0, some * block, s["dq"].at((t - first) * g.D))

    def store_row(self, row: Value, keep: Value | None) -> None:
        g, block = self.g, self.table.block
        first = row * block
        with self.k.loop(first, self.k.min(first + block, self.T), g.queries) as t:
            self.store_dq(t, self.s["dq"].at((t - first) * g.D), keep)


@contextmanager
def members(k: KernelBuilder, group: int) -> Iterator[Value]:
    """The heads of queries that share a head of keys, one after the other."""
    with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as member:
        yield member


def layout_attention_backward_rows(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, rows, masks,
    *, batch, modes, heads, kv_heads, block, lists, entries, **shape,
) -> None:  # fmt: skip
    """Compute dq, and in one pass also dk and dv. `modes` and the six strides are those of q, k and v in that order."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, None, None)
    table, T, group = Table(k, rows, masks, block, lists, entries), extent(k, shape["seq"]), heads // kv_heads
    shared, blocks = extent(k, batch) * kv_heads, k.ceil_div(T, block)
    both, padded = one_pass(k, shared), lists // heads * block
    keep = [k.keep(mode) for mode in modes]
    with k.claim_each(shared * k.select(both, k.int(1), blocks)) as claim:
        index = k.select(both, claim, claim // blocks)
        own = blocks - 1 - claim % blocks
        start, stop = k.select(both, k.int(0), own), k.select(both, blocks, own + 1)
        with members(k, group) as member:
            head = index % kv_heads * group + member
            h = ListedHead(k, operands, index // kv_heads, head, table, padded, heads=heads, kv_heads=kv_heads, **shape)
            with k.when(both & member.equals(0)):
                for name in ("dk", "dv"):
                    clear(k, h.s[name], blocks * (block * h.g.wide))
            with k.loop(start, stop) as row:
                h.add_row(row, *table.span(head * (lists // heads) + row), both)
                h.store_row(row, keep[0])
            with k.when(both & member.equals(group - 1)):
                h.store_dkdv(k.int(0), T, h.s["dk"], h.s["dv"], (keep[1], keep[2]))


def layout_attention_backward_columns(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, columns, masks,
    *, batch, modes, heads, kv_heads, block, lists, entries, **shape,
) -> None:  # fmt: skip
    """Compute dk and dv, where they were not computed together with dq."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, None, None)
    table, T, group = Table(k, columns, masks, block, lists, entries), extent(k, shape["seq"]), heads // kv_heads
    shared, blocks = extent(k, batch) * kv_heads, k.ceil_div(T, block)
    keep = [k.keep(mode) for mode in modes]
    padded = lists // heads * block
    with k.claim_each(k.select(one_pass(k, shared), k.int(0), shared * blocks)) as claim:
        index, column = claim // blocks, claim % blocks
        with members(k, group) as member:
            head = index % kv_heads * group + member
            h = ListedHead(k, operands, index // kv_heads, head, table, padded, heads=heads, kv_heads=kv_heads, **shape)
            g, s, j0 = h.g, h.s, column * block
            count = k.min(T - j0, block)
            with k.when(member.equals(0)):
                for source, name in ((h.keys, "k_rows"), (h.values, "v_rows")):
                    stage(k, g, source.start(j0), count, block, s[name])
                for name in ("dk", "dv"):
                    clear(k, s[name], block * g.wide)
            begin, end = table.span(head * (lists // heads) + column)
            with k.loop(begin, end) as entry:
                first = table.listed(entry) * block
                with k.loop(first, k.min(first + block, T), g.queries) as t:
                    shift, deltas = h.stage_queries(t, woven=True)
                    h.query, h.entry = t - first, entry
                    h.probabilities(k.int(0), t, 0, k.int(block), shift, deltas, straight=True)
                    h.add_dkdv(0, k.int(block), s["dk"], s["dv"])
            with k.when(member.equals(group - 1)):
                h.store_dkdv(j0, count, s["dk"], s["dv"], (keep[1], keep[2]))


@lowering(
    "layout_attention_backward",
    starts="dq dk dv",
    views="q k v dq dk dv",
    also={"rows": "i32", "columns": "i32", "masks": "i32"},
)
def lower_layout_attention_backward(op: Op, c: Lowering) -> None:
    shape, layout = shape_of(op), op.layout
    shape["strides"] += tuple(t.row_stride for t in (op.dq, op.dk, op.dv))
    modes = tuple(op.modes[name] for name in ("dq", "dk", "dv"))
    g = geometry(c.isa, op.q.dtype, shape["D"], layout.block)
    delta = c.scratch("delta", op.lse.nbytes)
    of_rows = {name: shape[name] for name in ("batch", "seq", "heads", "D")} | {"bounds": PLAIN}
    c.call(attention_delta, {"delta": (part(delta), "fp32"), "out": op.out, "dout": op.dout}, of_rows, writes="delta")
    operands: dict[str, Any] = {
        **{"dq": op.dq, "dkeys": op.dk, "dvalues": op.dv, "q": op.q, "keys": op.k, "values": op.v},
        **{"dout": op.dout, "lse": op.lse, "delta": (part(delta), "fp32"), "rows": op.rows, "columns": op.columns},
    }
    operands["masks"] = op.masks
    c.private(offsets(scratch_units(g, layout.block, layout.rows * layout.block))[1])
    for emit in (layout_attention_backward_rows, layout_attention_backward_columns):
        c.call(emit, operands, shape | {"modes": modes}, writes="dq dkeys dvalues")
