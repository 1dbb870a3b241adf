"""Attention over the blocks of keys that a layout lists, forward (`program/layouts.py` has the tables).

Shapes as in attention_forward.py. A claim is one row of the layout: a block of queries of one head. Its listed blocks of keys are
staged side by side, as many as fit into KEYS rows of scratch, and then are keys like any others: register tiles do not know that
they lie apart in memory. Only tiles of blocks with a mask look at its bits, and relative terms (attention_relative.py) are what
the scores of blocks near enough begin with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.attention.attention_blocks import (
    KEYS,
    Geometry,
    Rows,
    blocks_of,
    dim_size,
    offsets,
    serving,
    sizes,
    stage,
    weave_left,
)
from barellm.cpu.kernels.attention.attention_bounds import PLAIN
from barellm.cpu.kernels.attention.attention_forward import LOWEST, begin_queries, end_queries, fold_in
from barellm.cpu.kernels.attention.attention_relative import Distances, Terms, forward_units
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Pointer, Value
from barellm.program.dtypes import PLANES
from barellm.program.layouts import WORD
from barellm.program.ops.base import Op
from barellm.runtime.lowering import weight_operand


def geometry(isa: ISA, dtype: str, D: int, block: int, *, tiles: bool) -> Geometry:
    """Groups of queries that end where blocks do. Tiles of AMX must lie in one block, and relative terms, which are what scores
    begin with, want them in vector registers."""
    g = Geometry.of(isa, dtype, D, tiles=tiles and block % amx.TILE_K == 0)
    return g if block % g.queries == 0 else replace(g, vectors=1)


def together(block: int) -> int:
    """Blocks of keys that are staged side by side."""
    return max(1, KEYS // block)


@dataclass(frozen=True)
class Table:
    """One of a layout's tables, of rows or of columns: the constants of its shape, and where it is."""

    k: KernelBuilder
    table: Pointer
    masks: Pointer
    block: int
    lists: int  # rows of all heads
    entries: int

    def span(self, row: Value) -> tuple[Value, Value]:
        """The entries of a row of all heads' rows."""
        return self.table.get(row), self.table.get(row + 1)

    def listed(self, entry: Value) -> Value:
        """The block that an entry names."""
        return self.table.get(entry + (self.lists + 1))

    def kind(self, entry: Value) -> Value:
        return self.table.get(entry + (self.lists + 1 + self.entries))

    def edges(
        self, g: Geometry, entry: Value, query: Value, j: Value
    ) -> tuple[Value, Callable[[], Callable[[int, int], Value]]]:
        """Whether not all of the tile from row j on of staged blocks, of which `entry` is the first, is seen by the group that
        begins at place `query` of its block; and a function that tells which is."""
        k, words = self.k, -(-self.block // WORD)
        kind = self.kind(entry + j // self.block)

        def visible_of() -> Callable[[int, int], Value]:
            first = ((kind - 1) * self.block + j % self.block) * words
            places = [query + v * g.lanes for v in range(g.vectors)]
            bit = Value(k, k.ivec, "<" + ", ".join(f"i32 {1 << i}" for i in range(k.lanes)) + ">")

            def sees(r: int, v: int) -> Value:
                word = self.masks.get(first + r * words + places[v] // WORD)
                return (k.splat(word >> (places[v] % WORD)) & bit).differs(0)

            return sees

        return kind > 0, visible_of


def gather(
    k: KernelBuilder, g: Geometry, table: Table, tensors: tuple[tuple[Rows, Pointer], ...], entry: Value, some: Value, T: Value
) -> None:  # fmt: skip
    """Stage the blocks that `some` entries from `entry` on list, of each tensor, side by side."""
    with k.loop(0, some) as i:
        j0 = table.listed(entry + i) * table.block
        for rows, to in tensors:
            stage(k, g, rows.start(j0), k.min(T - j0, table.block), table.block, to.at(i * (table.block * g.row)))


def scratch_units(g: Geometry, block: int, distances: Distances | None) -> dict[str, int]:
    n, rows = block // g.queries, together(block) * block
    terms = forward_units(g, block, together(block)) if distances else {}
    return {
        "q_rows": g.rows_units(g.queries),
        "q": n * g.turned_units,
        "k": g.rows_units(rows),
        "v_rows": g.rows_units(rows),
        "v": g.woven_units(rows),
        "p": rows * g.queries,
        "acc": n * g.transposed_units(),
        "stats": n * 2 * g.queries,
        "alpha": g.queries,
        "out": g.queries * g.wide,
        **terms,
    }


def terms_of(
    k: KernelBuilder, g: Geometry, s: dict[str, Pointer], block: int, relative: Pointer | None, head: Value, heads: int,
    distances: Distances | None,
) -> Terms | None:  # fmt: skip
    """The relative terms of a head, if there are any."""
    if relative is None or distances is None:
        return None
    return Terms(k, g, s, block, Rows.of(relative, k.int(0), head, D=g.D, stride=heads * g.D), distances)


def layout_attention(
    k: KernelBuilder, out, lse, q, keys, values, rows, masks, relative,
    *, batch, seq, heads, kv_heads, D, strides, block, lists, entries, distances,
) -> None:  # fmt: skip
    g, T = geometry(k.isa, q.dtype, D, block, tiles=relative is None), dim_size(k, seq)
    s, root, unit = blocks_of(k, scratch_units(g, block, distances)), PLAIN.root(k, D), PLAIN.unit(k, D)
    table, blocks = Table(k, rows, masks, block, lists, entries), k.ceil_div(T, block)
    counts = (heads, kv_heads, kv_heads)
    with amx.tile_registers(k, g.tiles), k.parallel_for(dim_size(k, batch) * heads * blocks) as claim:
        sequence, head = claim // (blocks * heads), claim // blocks % heads
        row = blocks - 1 - claim % blocks  # the last ones are the longest, if any are
        first = row * block
        last = k.min(first + block, T)
        token = sequence * T
        of = [
            Rows.of(p, token, serving(head, heads, n), D=D, stride=stride)
            for p, n, stride in zip((q, keys, values), counts, strides, strict=True)
        ]
        to = Rows.of(out, token, head, D=D, stride=heads * D)
        terms = terms_of(k, g, s, block, relative, head, heads, distances)
        with k.loop(first, last, g.queries) as t:
            begin_queries(k, g, s, of[0], t, last, (t - first) // g.queries, LOWEST)
        begin, end = table.span(head * (lists // heads) + row)
        with k.loop(begin, end, together(block)) as entry:
            some = k.min(end - entry, together(block))
            gather(k, g, table, ((of[1], s["k"]), (of[2], s["v_rows"])), entry, some, T)
            v_block = weave_left(k, g, s["v_rows"], some * block, s["v"])

            def gap(i: Value, entry: Value = entry) -> Value:
                return row - table.listed(entry + i)

            if terms:
                with terms.each_near(some, gap) as (between, i):
                    terms.stage(between, i)
            with k.loop(first, last, g.queries) as t:

                def edges(j: Value, entry: Value = entry, t: Value = t) -> Any:
                    return table.edges(g, entry, t - first, j)

                at = (t - first) // g.queries
                if terms:
                    with terms.each_near(some, gap) as (between, i):
                        terms.multiply(between, i, t - first, s["q"].at(at * g.turned_units))
                start = terms and partial(terms.start, gap)
                fold_in(k, g, s, at, v_block, 0, some * block, unit, edges, start=start)
        with k.loop(first, last, g.queries) as t:
            at = (t - first) // g.queries
            end_queries(k, g, s, to, lse.at((sequence * heads + head) * T), t, last, at, root)


def shape_of(op: Op) -> dict[str, Any]:
    """Constants of the kernels: sizes, and those of the layout's tables."""
    layout = op.layout
    lists = {"block": layout.block, "lists": layout.heads * layout.rows, "entries": len(layout.keys)}
    return sizes(op) | lists | {"distances": op.distances if op.relative is not None else None}


def vectors_of(op: Op) -> Any:
    """The vectors of the relative terms as an operand."""
    return None if op.relative is None else weight_operand(op.relative)


TABLES = {"rows": "i32", "columns": "i32", "masks": "i32", "relative": PLANES}


@lowering("layout_attention", views="q k v", also=TABLES)
def lower_layout_attention(op: Op, c: Lowering) -> None:
    constants = shape_of(op)
    g = geometry(c.isa, op.q.dtype, constants["D"], constants["block"], tiles=op.relative is None)
    c.thread_scratch(offsets(scratch_units(g, constants["block"], constants["distances"]))[1])
    operands = {"out": op.out, "lse": op.lse, "q": op.q, "keys": op.k, "values": op.v, "relative": vectors_of(op)}
    c.call(layout_attention, operands | {"rows": op.rows, "masks": op.masks}, constants, writes="out lse")
