"""Operands and error bounds of block-sparse products: what the tests of every backend share."""

from __future__ import annotations

from typing import Any

import numpy as np

from barellm.program import ops
from barellm.program.block_layouts import BlockLayout, barabasi_albert, block_layout, watts_strogatz
from barellm.program.dtypes import PRECISIONS
from tests.cases import as_operand, chain_bound, normal
from tests.check import persistent, tokens

LONG = np.zeros((150, 8), bool)  # an empty column, short ones, and two that are so long that they are cut in two
LONG[7, 1:] = LONG[11, 3] = LONG[:, 2] = LONG[:, 5] = True
HOLES = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]], bool)  # a row and a column that are empty
LAYOUTS = {
    "holes of 8": block_layout(HOLES, 8),
    "small world of 16": block_layout(watts_strogatz(5, 7, 2, 0.3, 1), 16),
    "hubs of 32": block_layout(barabasi_albert(3, 5, 1, 2), 32),
    "long columns of 16": block_layout(LONG, 16),
    "long rows of 16": block_layout(LONG.T, 16),
    "one of 64": block_layout(np.ones((1, 1), bool), 64),
}


def block_case(op_type: type, layout: BlockLayout, dtype: str, *, batch: int = 2, seq: int = 37, mode: str = "store") -> dict:
    """What `check_op` wants for a product over batch x seq tokens."""
    b, (rows, columns) = layout.block, layout.shape
    x, dy = normal(batch, seq, rows * b), normal(batch, seq, columns * b, seed=2)
    weight = persistent(normal(len(layout) * b, b, seed=3), PRECISIONS[dtype].weights)
    whole = layout.dense(as_operand(weight, dtype))
    given: dict[str, Any] = {"x": tokens(x, dtype), "dy": tokens(dy, dtype), "weight": weight}
    flat = {name: g.values.reshape(-1, g.values.shape[-1]) for name, g in given.items() if name != "weight"}
    needed, read, out, bound = {
        ops.BlockMatmul: (("x", "weight"), layout.tables, "y", chain_bound(given["x"].values, whole)),
        ops.BlockMatmulDx: (("dy", "weight"), ("rows",), "dx", chain_bound(given["dy"].values, whole.T)),
        ops.BlockMatmulDw: (("x", "dy"), ("places",), "dweight", layout.blocks_of(chain_bound(flat["x"].T, flat["dy"]))),
    }[op_type]
    tables = {name: persistent(layout.tables[name], "i32", "constant") for name in read}
    added = 2**-23 * (3 + np.abs(bound)) if mode != "store" else 0.0
    case = {"given": {name: given[name] for name in needed} | tables, "bounds": {out: bound + added}, "layout": layout}
    return case | {"modes": {out: mode}, "plan": (batch + 1, seq + 3)}
