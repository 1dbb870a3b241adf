"""Attention over the blocks of keys that a layout lists, backward.

Shapes and formulas as in attention_backward.py, tables as in attention_listed.py. Two schedules give the same bits, for every sum
runs over the same blocks in the same order:

    one pass     a claim is a head of keys: five products a block; dk and dv of a whole head wait in the thread's scratch
    two passes   a claim is a row of the layout (dq), then a column (dk, dv): seven products, but many claims

The run-time shape and the number of threads decide. A row meets its blocks of keys staged side by side, like the forward pass; a
column has one block of keys and meets the rows that list it.

The gradient of the relative terms' vectors is a sum over all queries. Rows of a layout are dealt into parts, whose number follows
from the sequences and the heads; each part of each sequence has a sum of its own, and these are added in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import sqrt
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.attention.attention_backward import attention_delta, one_pass
from barellm.cpu.kernels.attention.attention_blocks import (
    Geometry,
    Lower,
    Rows,
    clear,
    dim_size,
    offsets,
    stage,
    weave_left,
)
from barellm.cpu.kernels.attention.attention_bounds import PLAIN
from barellm.cpu.kernels.attention.attention_head import Head, Operands
from barellm.cpu.kernels.attention.attention_listed import (
    TABLES,
    Table,
    gather,
    geometry,
    shape_of,
    terms_of,
    together,
    vectors_of,
)
from barellm.cpu.kernels.attention.attention_relative import Distances, backward_units
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.reductions import add_chunks
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.runtime.lowering import part

SUMS = 64  # of the gradient of a relative term, over all heads of keys: enough for any number of threads


def scratch_units(g: Geometry, block: int, rows: int, distances: Distances | None) -> dict[str, int]:
    """The blocks of scratch, in units; dk and dv of all `rows` of keys may wait there."""
    staged = together(block) * block
    terms = backward_units(g, block, together(block), distances) if distances else {}
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
        "dp_tile": g.rows * g.queries if g.tiles else 0,
        "p": staged * g.queries // g.pair,
        "ds": staged * g.queries // g.pair,
        "ds_woven": staged * g.queries // g.pair,
        "out": g.queries * g.wide,
        "dq": g.transposed_units(block // g.queries),
        "dk": rows * g.wide,
        "dv": rows * g.wide,
        **terms,
    }


class ListedHead(Head):
    """A head whose queries see what a layout lists. `query` (of its block) and `entry`, of a tile's row, are where masks are
    looked up, and `gap` is how many blocks a staged block of keys lies before the queries. With `sums` it adds up the gradient of
    its relative terms."""

    def __init__(
        self, k: KernelBuilder, operands: Operands, sequence: Value, head: Value, table: Table, rows: int,
        relative: Pointer | None, distances: Distances | None, *, sums: bool, **sizes: Any,
    ) -> None:  # fmt: skip
        self.table, self.padded, self.distances = table, rows, distances
        super().__init__(k, operands, sequence, head, rate=0.0, length=rows, bounds=PLAIN, **sizes)
        self.query = self.entry = k.int(0)
        self.gap: Callable[[Value], Value] = lambda i: i
        self.terms = terms_of(k, self.g, self.s, table.block, relative, head, sizes["heads"], distances)
        self.sums = self.terms if sums else None

    def geometry(self, isa: ISA, dtype: str, D: int) -> Geometry:
        return geometry(isa, dtype, D, self.table.block, tiles=self.distances is None)

    def units(self, rate: float, length: int, **shape: bool) -> dict[str, int]:
        return scratch_units(self.g, self.table.block, length, self.distances)

    def start(self, j: Value) -> list[list[Value]] | None:
        return self.terms and self.terms.start(self.gap, j)

    def keep_ds(self, j: Value, ds: list[list[Value]]) -> None:
        if self.sums:
            self.sums.keep_ds(j, ds)

    def stage_terms(self, some: Value) -> None:
        """What the terms of `some` staged blocks of keys need."""
        if self.terms:
            with self.terms.each_near(some, self.gap) as (gap, i):
                self.terms.stage(gap, i)
                if self.sums:
                    self.terms.weave(i)

    def multiply_terms(self, some: Value) -> None:
        """The terms of the group that is staged."""
        if self.terms:
            with self.terms.each_near(some, self.gap) as (gap, i):
                self.terms.multiply(gap, i, self.query, self.s["q_turned"])

    def edges(
        self, key: Value, t: Value, lower: Lower | None
    ) -> tuple[Value, Callable[[], Callable[[int, int], Value]]]:
        return self.table.edges(self.g, self.entry, self.query, key)

    def add_row(self, row: Value, begin: Value, end: Value, both: Value) -> None:
        """dq of a block of queries over the entries [begin, end), and where `both` their parts of dk and dv."""
        k, g, s, block = self.k, self.g, self.s, self.table.block
        first = row * block
        last = k.min(first + block, self.T)
        clear(k, s["dq"], block * g.deep)
        with k.loop(begin, end, together(block)) as entry:
            some = k.min(end - entry, together(block))
            gather(k, g, self.table, ((self.keys, s["k_rows"]), (self.values, s["v_rows"])), entry, some, self.T)
            weave_left(k, g, s["k_rows"], some * block, s["k"])
            self.gap = lambda i, entry=entry: row - self.table.listed(entry + i)
            self.stage_terms(some)
            with k.loop(first, last, g.queries) as t:
                shift, deltas = self.stage_queries(t, woven=True)
                self.query, self.entry = t - first, entry
                self.multiply_terms(some)
                self.probabilities(k.int(0), t, 0, some * block, shift, deltas, straight=True)
                with k.when(both), k.loop(0, some) as i:
                    at = (self.table.listed(entry + i) - i) * (block * g.wide)
                    self.add_dkdv(i * block, (i + 1) * block, s["dk"].at(at), s["dv"].at(at))
                dq = s["dq"].at((t - first) * g.deep)
                self.add_dq(0, some * block, dq)
                if self.sums:
                    with self.sums.each_near(some, self.gap) as (gap, i):
                        self.sums.backward(gap, i, t - first, dq)

    def store_row(self, row: Value, keep: Value | None) -> None:
        g, block = self.g, self.table.block
        first = row * block
        with self.k.loop(first, self.k.min(first + block, self.T), g.queries) as t:
            self.store_dq(t, self.s["dq"].at((t - first) * g.deep), keep)


def rows_of_part(k: KernelBuilder, batch: str | int, kv_heads: int, blocks: Value) -> Value:
    """How many rows of a layout of `blocks` have a sum of the gradient of relative terms."""
    return k.ceil_div(blocks, k.ceil_div(k.int(SUMS), dim_size(k, batch) * kv_heads))


@contextmanager
def members(k: KernelBuilder, group: int) -> Iterator[Value]:
    """The heads of queries that share a head of keys, one after the other."""
    with k.loop(0, group) if group > 1 else nullcontext(k.int(0)) as member:
        yield member


def layout_attention_backward_rows(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, rows, masks, relative, partials,
    *, batch, modes, heads, kv_heads, block, lists, entries, distances, **shape,
) -> None:  # fmt: skip
    """Compute dq, and in one pass also dk and dv. `modes` and the six strides are those of q, k and v in that order. partials
    (sequences, parts, M, heads * D) are the sums of the relative terms' gradient."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, None, None)
    table, T, group = Table(k, rows, masks, block, lists, entries), dim_size(k, shape["seq"]), heads // kv_heads
    shared, blocks = dim_size(k, batch) * kv_heads, k.ceil_div(T, block)
    both, padded = one_pass(k, shared), lists // heads * block
    keep = [k.keep(mode) for mode in modes]
    per = k.int(1) if relative is None else rows_of_part(k, batch, kv_heads, blocks)
    parts = k.ceil_div(blocks, per)
    g = geometry(k.isa, q.dtype, shape["D"], block, tiles=relative is None)
    with amx.tile_registers(k, g.tiles), k.parallel_for(shared * k.select(both, k.int(1), parts)) as claim:
        index = k.select(both, claim, claim // parts)
        own = parts - 1 - claim % parts
        start, stop = k.select(both, k.int(0), own), k.select(both, parts, own + 1)
        with members(k, group) as member:
            head, sequence = index % kv_heads * group + member, index // kv_heads
            h = ListedHead(
                k, operands, sequence, head, table, padded, relative, distances,
                sums=True, heads=heads, kv_heads=kv_heads, **shape,
            )  # fmt: skip
            with k.when(both & member.equals(0)):
                for name in ("dk", "dv"):
                    clear(k, h.s[name], blocks * (block * g.wide))
            if h.sums:
                h.sums.clear_padding(together(block))
            with k.loop(start, stop) as place:
                if h.sums:
                    h.sums.clear()
                with k.loop(place * per, k.min(place * per + per, blocks)) as row:
                    h.add_row(row, *table.span(head * (lists // heads) + row), both)
                    h.store_row(row, keep[0])
                if h.sums:
                    C, M = heads * h.g.D, distances[1] - distances[0] + 1
                    to = partials.at((sequence * parts + place) * (M * C) + head * h.g.D)
                    h.sums.store(Rows(to, C), 1 / sqrt(h.g.D))
            with k.when(both & member.equals(group - 1)):
                h.store_dkdv(k.int(0), T, h.s["dk"], h.s["dv"], (keep[1], keep[2]))


def layout_attention_backward_columns(
    k: KernelBuilder, dq, dkeys, dvalues, q, keys, values, dout, lse, delta, columns, masks, relative,
    *, batch, modes, heads, kv_heads, block, lists, entries, distances, **shape,
) -> None:  # fmt: skip
    """Compute dk and dv, where they were not computed together with dq."""
    operands = (q, keys, values, dq, dkeys, dvalues, dout, lse, delta, None, None)
    table, T, group = Table(k, columns, masks, block, lists, entries), dim_size(k, shape["seq"]), heads // kv_heads
    shared, blocks = dim_size(k, batch) * kv_heads, k.ceil_div(T, block)
    keep = [k.keep(mode) for mode in modes]
    padded = lists // heads * block
    g = geometry(k.isa, q.dtype, shape["D"], block, tiles=relative is None)
    claims = k.select(one_pass(k, shared), k.int(0), shared * blocks)
    with amx.tile_registers(k, g.tiles), k.parallel_for(claims) as claim:
        index, column = claim // blocks, claim % blocks
        with members(k, group) as member:
            head = index % kv_heads * group + member
            h = ListedHead(
                k, operands, index // kv_heads, head, table, padded, relative, distances,
                sums=False, heads=heads, kv_heads=kv_heads, **shape,
            )  # fmt: skip
            s, j0 = h.s, column * block
            count = k.min(T - j0, block)
            with k.when(member.equals(0)):
                for source, name in ((h.keys, "k_rows"), (h.values, "v_rows")):
                    stage(k, g, source.start(j0), count, block, s[name])
                for name in ("dk", "dv"):
                    clear(k, s[name], block * g.wide)
            begin, end = table.span(head * (lists // heads) + column)
            with k.loop(begin, end) as entry:
                first = table.listed(entry) * block
                h.gap = lambda i, entry=entry: table.listed(entry) - column
                h.stage_terms(k.int(1))
                with k.loop(first, k.min(first + block, T), g.queries) as t:
                    shift, deltas = h.stage_queries(t, woven=True)
                    h.query, h.entry = t - first, entry
                    h.multiply_terms(k.int(1))
                    h.probabilities(k.int(0), t, 0, k.int(block), shift, deltas, straight=True)
                    h.add_dkdv(0, k.int(block), s["dk"], s["dv"])
            with k.when(member.equals(group - 1)):
                h.store_dkdv(j0, count, s["dk"], s["dv"], (keep[1], keep[2]))


def add_parts(k: KernelBuilder, drelative, partials, *, batch, seq, kv_heads, block, size, mode) -> None:
    """drelative (size) = the sum over sequences and parts, in order."""
    blocks = k.ceil_div(dim_size(k, seq), block)
    parts = k.ceil_div(blocks, rows_of_part(k, batch, kv_heads, blocks))
    add_chunks(k, drelative, partials, dim_size(k, batch) * parts, size, size, mode)


@lowering("layout_attention_backward", starts="dq dk dv drelative", views="q k v dq dk dv", also=TABLES)
def lower_layout_attention_backward(op: Op, c: Lowering) -> None:
    shape, layout = shape_of(op), op.layout
    shape["strides"] += tuple(t.row_stride for t in (op.dq, op.dk, op.dv))
    modes = tuple(op.modes[name] for name in ("dq", "dk", "dv"))
    g = geometry(c.isa, op.q.dtype, shape["D"], layout.block, tiles=op.relative is None)
    delta = c.workspace("delta", op.lse.nbytes)
    of_rows = {name: shape[name] for name in ("batch", "seq", "heads", "D")} | {"bounds": PLAIN}
    c.call(attention_delta, {"delta": (part(delta), "fp32"), "out": op.out, "dout": op.dout}, of_rows, writes="delta")
    operands: dict[str, Any] = {
        **{"dq": op.dq, "dkeys": op.dk, "dvalues": op.dv, "q": op.q, "keys": op.k, "values": op.v},
        **{"dout": op.dout, "lse": op.lse, "delta": (part(delta), "fp32"), "rows": op.rows, "columns": op.columns},
    }
    operands |= {"masks": op.masks, "relative": vectors_of(op), "partials": None}
    if op.relative is not None:
        most = int(op.out.shape[0]) + ceil_div(SUMS, op.kv_heads)  # parts of any number of sequences, each rounded up
        sums = c.workspace("partials", 4 * most * op.relative.size)
        operands["partials"] = (part(sums), "fp32")
    c.thread_scratch(offsets(scratch_units(g, layout.block, layout.rows * layout.block, shape["distances"]))[1])
    for emit in (layout_attention_backward_rows, layout_attention_backward_columns):
        c.call(emit, operands, shape | {"modes": modes}, writes="dq dkeys dvalues partials")
    if op.relative is not None:
        added = {name: shape[name] for name in ("batch", "seq", "kv_heads", "block")}
        added |= {"size": op.relative.size, "mode": op.modes["drelative"]}
        c.call(add_parts, operands | {"drelative": op.drelative}, added, writes="drelative")
