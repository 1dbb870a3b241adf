"""Layouts of block-sparse matrices: their order, their tables, where long lists are cut, and graphs between two layers."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import block_layouts, ops
from barellm.program.block_layouts import block_layout
from barellm.program.builder import Program, Store


def test_blocks_lie_in_morton_order_and_make_the_matrix():
    there = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1]], bool)
    layout = block_layout(there, 8)
    assert layout.places.tolist() == [[0, 0], [1, 0], [1, 1], [0, 2], [2, 2]], "bits of row and column take turns"
    weight = np.arange(5 * 64.0).reshape(40, 8)
    whole = layout.dense(weight)
    assert np.array_equal(whole[8:16, :8], weight[8:16]) and np.array_equal(whole[:8, 16:], weight[24:32])
    assert np.count_nonzero(whole) == 5 * 64 - 1 and np.array_equal(layout.blocks_of(whole), weight)
    columns, rows = [0, -1, 0, 2, 1, -1, 2, 3, 2, -1, 3, 5], [0, -1, 0, 2, 1, -1, 2, 4, 2, -1, 4, 5]
    assert layout.tables["columns"].tolist() == [*columns, 0, 1, 1, 0, 2, 0, 1, 2, 3, 4]
    assert layout.tables["rows"].tolist() == [*rows, 0, 2, 0, 1, 2, 0, 3, 1, 2, 4]
    assert layout.tables["places"].tolist() == [0, 1, 1, 0, 2, 0, 0, 1, 2, 2]
    assert layout.density == 5 / 9


def test_each_square_of_a_power_of_two_is_finished_before_the_next():
    places = block_layout(np.ones((8, 16), bool), 8).places
    for side in (1, 2, 4, 8):
        squares = (places // side).reshape(-1, side * side, 2)
        assert (squares == squares[:, :1]).all(), f"blocks of a square of {side} lie together"


@pytest.mark.parametrize("length, parts", [(16, 1), (17, 2), (33, 3), (64, 4)])
def test_only_a_long_list_is_cut(length, parts):
    """With blocks of 64, sixteen entries are 1024 rows; the mean of all lists is far below."""
    there = np.eye(64, dtype=bool)
    there[:length, 0] = True
    lists = block_layout(there, 64).columns
    own = lists.segments[lists.segments[:, 0] == 0]
    assert len(own) == parts and lists.slots == (parts if parts > 1 else 0)
    assert own[0, 2] == 0 and own[-1, 3] == length and np.array_equal(own[1:, 2], own[:-1, 3])
    assert np.ptp(own[:, 3] - own[:, 2]) <= 1 and (own[:, 3] - own[:, 2]).max() <= 16
    assert own[:, 1].tolist() == (list(range(parts)) if parts > 1 else [-1])
    assert lists.cuts.tolist() == ([[0, 0, parts]] if parts > 1 else [])
    even = block_layout(np.ones((64, 64), bool), 64)
    assert not len(even.columns.cuts), "where all lists are long, each is whole"


def test_products_count_the_blocks_and_the_tables_that_they_read():
    """16 columns to 24 in 3 blocks of 6, of 2 x 5 tokens. Of the layout's tables each product reads one."""
    layout = block_layout(np.array([[1, 0, 1], [0, 0, 1]], bool), 8)
    p = Program(Store())
    x, dy = p.input("x", (2, 5, 16), "fp32"), p.input("dy", (2, 5, 24), "fp32")
    weight = p.parameter("weight", (24, 8))
    p.block_linear(x, weight, layout=layout)
    (forward,) = p.ops
    tables = {name: forward.inputs[name] for name in layout.tables}
    p.apply(ops.BlockMatmulDx, dy=dy, weight=weight, rows=tables["rows"], layout=layout)
    p.apply(ops.BlockMatmulDw, dy=dy, x=x, places=tables["places"], layout=layout)
    shared = 10 * (16 + 24) + 3 * 64
    for op, table in zip(p.ops, ("columns", "rows", "places"), strict=True):
        assert (op.flops(), op.bytes()) == (2 * 10 * 3 * 64, 4 * (shared + len(layout.tables[table]))), op.name


def test_graphs_between_two_layers():
    ring = block_layouts.watts_strogatz(8, 16, 3, 0.0, 1)
    world = block_layouts.watts_strogatz(8, 16, 3, 0.5, 1)
    assert ring[:, 0].nonzero()[0].tolist() == [0, 1, 7] and ring[:, 8].nonzero()[0].tolist() == [3, 4, 5]
    assert (ring.sum(0) == 3).all() and (world.sum(0) == 3).all() and 8 <= (ring & ~world).sum() <= 32
    hubs, even = block_layouts.barabasi_albert(40, 200, 4, 1), block_layouts.spread(40, 200, 4, 1)
    assert (hubs.sum(0) == 4).all() and (even.sum(0) == 4).all()
    assert hubs.sum(1).max() > 2 * even.sum(1).max() - hubs.sum(1).min(), "some rows have many more links than others"
    again = [block_layouts.parse("spread:4:1", rows=40, columns=200, more=more) for more in (0, 1)]
    assert np.array_equal(again[0], even) and not np.array_equal(again[0], again[1])


def test_what_is_no_matrix_of_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks of a matrix have size 12, expected one of 8, 16, 32, 64"):
        block_layout(np.ones((2, 2), bool), 12)
    with pytest.raises(ValueError, match="expects a matrix of blocks, some of them there"):
        block_layout(np.zeros((2, 2), bool), 8)
    with pytest.raises(ValueError, match="'local:3' is no graph, expected one of watts-strogatz"):
        block_layouts.parse("local:3", rows=2, columns=2)
