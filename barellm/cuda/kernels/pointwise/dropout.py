"""Dropout and its gradient. Shapes: x, y, dx, dy (batch, seq, C); the bits are those of `program/ops/pointwise/random.py`."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import SAMPLE, rowwise, store_or_add, tile_indices
from barellm.cuda.kernels.pointwise.random import sample_key, words
from barellm.cuda.lang import device, tl
from barellm.program.ops.pointwise.random import keep_scale, threshold


@device
def keep_mask(row, column, scalars, seq, stream, THRESHOLD, BR, BC):
    """The mask (BR, BC) of the elements that dropout keeps, for rows `row` (BR,) i64 and BC columns from `column` on."""
    k0, k1 = sample_key(scalars, tl.load(scalars + SAMPLE) + row // seq, stream)
    return words(k0, k1, row % seq, column, BR, BC) >= THRESHOLD


@device
def dropout(out, x, scalars, rows, seq, stream, C, BR, BC, THRESHOLD, SCALE, MODE):
    """out = x SCALE where a random word is at least THRESHOLD, else 0. A call of the generator serves two elements; its words are
    put in the order of the columns through shared memory: an H100 does these integer operations in less than the bytes' time."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    i = row[:, None] * C + column[None, :]
    kept = keep_mask(row, tl.program_id(1) * BC, scalars, seq, stream, THRESHOLD, BR, BC)
    y = tl.where(kept, tl.load(x + i, mask=mask, other=0.0).to(tl.float32) * SCALE, 0.0)
    store_or_add(out + i, mask, y, scalars, MODE)


def constants_of(op: Any) -> dict[str, Any]:
    """THRESHOLD of a random word, and SCALE = 1 / (1 - rate)."""
    return {"THRESHOLD": threshold(op.rate), "SCALE": keep_scale(op.rate)}


@lowering("dropout", starts="y")
@lowering("dropout_backward", starts="dx")
def lower_dropout(op: Any, c: Lowering) -> None:
    ((out, to),), ((_, x),) = op.outputs.items(), op.inputs.items()
    operands = {"out": to, "x": x, "stream": int(op.stream)}
    rowwise(c, dropout, to, operands, writes="out", least=32, MODE=mode(op, out), **constants_of(op))
