"""Dropout by combined Tausworthe generators (L'Ecuyer 1996), and its gradient. Shapes: x, y, dx, dy (batch, seq, C); the draws are
those of `program/ops/pointwise/tausworthe.py`. HALF streams serve a block of BLOCK columns of a row, HALF columns with each draw.
COMPONENTS: (A, B, C, MASK) of each of the three or four generators whose states s0 to s3 are xored."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import SAMPLE, store_or_add
from barellm.cuda.kernels.pointwise.dropout import constants_of
from barellm.cuda.kernels.pointwise.random import sample_key, threefry
from barellm.cuda.lang import constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.random import HALF as LANES_OF_ROW
from barellm.program.ops.pointwise.tausworthe import BLOCK as COLUMNS_OF_STREAMS
from barellm.program.ops.pointwise.tausworthe import GENERATORS

HALF, BLOCK = constant(LANES_OF_ROW), constant(COLUMNS_OF_STREAMS)
ROWS = 64  # of a program: with HALF columns 8 elements for each of 128 threads


@device
def seed_states(word, MASK):
    """Seeds from random words: if all bits inside the mask are zero, which a generator cannot leave, the lowest is set."""
    return tl.where((word & MASK) == 0, word | ((MASK ^ 0xFFFFFFFF) + 1), word)


@device
def advance(s, A, B, C, MASK):
    """One step of one generator's states s (uint32)."""
    return ((s & MASK) << C) ^ (((s << A) ^ s) >> B)


@device
def advance_all(s0, s1, s2, s3, COMPONENTS):
    """One step of all components; of three, s3 stays as it is."""
    s0 = advance(s0, COMPONENTS[0][0], COMPONENTS[0][1], COMPONENTS[0][2], COMPONENTS[0][3])
    s1 = advance(s1, COMPONENTS[1][0], COMPONENTS[1][1], COMPONENTS[1][2], COMPONENTS[1][3])
    s2 = advance(s2, COMPONENTS[2][0], COMPONENTS[2][1], COMPONENTS[2][2], COMPONENTS[2][3])
    if len(COMPONENTS) == 4:
        s3 = advance(s3, COMPONENTS[3][0], COMPONENTS[3][1], COMPONENTS[3][2], COMPONENTS[3][3])
    return s0, s1, s2, s3


@device
def first_states(k0, k1, row, block, ROWS, COMPONENTS):
    """The states s0 to s3 (ROWS, HALF), uint32, of the streams of a block of columns before their first draw, seeded by Threefry
    with the keys k0, k1 (ROWS,) of the rows' sequences and the counter (column of the stream, row); of three, s3 is zeros."""
    i = (block * 2 * HALF + tl.arange(0, HALF)).to(tl.uint32)[None, :]  # calls for s0, s1; HALF on for s2, s3
    row = row.to(tl.uint32)[:, None]
    s0, s1 = threefry(k0[:, None], k1[:, None], i, row)
    s2, s3 = threefry(k0[:, None], k1[:, None], i + HALF, row)
    s0, s1, s2 = seed_states(s0, COMPONENTS[0][3]), seed_states(s1, COMPONENTS[1][3]), seed_states(s2, COMPONENTS[2][3])
    if len(COMPONENTS) == 4:
        s3 = seed_states(s3, COMPONENTS[3][3])
    else:
        s3 = tl.zeros((ROWS, HALF), tl.uint32)
    return advance_all(s0, s1, s2, s3, COMPONENTS)


@device
def tausworthe_dropout(out, x, scalars, rows, seq, stream, C, ROWS, COMPONENTS, THRESHOLD, SCALE, MODE):
    """out = x SCALE where a draw is at least THRESHOLD, else 0, for ROWS rows of one block of BLOCK columns, HALF columns with each
    draw; out, x (rows, C), stored or added (MODE). THRESHOLD = rate * 2^32, SCALE = 1 / (1 - rate). Grid: rows, columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    k0, k1 = sample_key(scalars, tl.load(scalars + SAMPLE) + row // seq, stream)
    s0, s1, s2, s3 = first_states(k0, k1, row % seq, block, ROWS, COMPONENTS)
    for first in range(block * BLOCK, min(block * BLOCK + BLOCK, C), HALF):
        s0, s1, s2, s3 = advance_all(s0, s1, s2, s3, COMPONENTS)
        column = first + tl.arange(0, HALF)
        mask = (row < rows)[:, None] & (column < C)[None, :]
        i = row[:, None] * C + column[None, :]
        value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32) * SCALE
        store_or_add(out + i, mask, tl.where((s0 ^ s1 ^ s2 ^ s3) >= THRESHOLD, value, 0.0), scalars, MODE)


@lowering("tausworthe_dropout", starts="y")
@lowering("tausworthe_dropout_backward", starts="dx")
def lower_tausworthe_dropout(op: Any, c: Lowering) -> None:
    ((out, to),), ((_, x),) = op.outputs.items(), op.inputs.items()
    C, rows = int(to.shape[-1]), c.rows(to)
    components = tuple((s.a, s.b, s.c, s.mask) for s in GENERATORS[op.bits])
    c.launch(
        tausworthe_dropout, {"out": to, "x": x, "rows": rows, "stream": int(op.stream)},
        {"C": C, "ROWS": ROWS, "COMPONENTS": components, "MODE": mode(op, out), **constants_of(op)},
        grid=lambda s: (ceil_div(rows(s), ROWS), ceil_div(C, COLUMNS_OF_STREAMS)), writes="out",
    )  # fmt: skip
