"""Gated activations (SwiGLU and the like) forward and backward. Shapes: y, dy, gate, up, dgate, dup (..., F); gate, up and their
gradients may be columns of wider rows; GATE_STRIDE and so on: elements from a row to the next. NAME: the activation."""

from barellm.cuda.kernels.common import kernel, store_or_add, tile_indices
from barellm.cuda.kernels.pointwise.activations import slope_of, value_of
from barellm.cuda.lang import tl
from barellm.program.ops.pointwise.swiglu import GATED


@kernel(*(one.name for one in GATED.values()), starts="y", views="gate up", constants=lambda op: {"NAME": op.definition.name})
def gated(y, gate, up, scalars, rows, NAME, C, GATE_STRIDE, UP_STRIDE, BR, BC, MODE):
    """y = activation(gate) * up, stored or added (MODE), in blocks (BR, BC) of rows."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    row, column = row[:, None], column[None, :]
    g = tl.load(gate + row * GATE_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    store_or_add(y + row * C + column, mask, value_of(g, NAME) * u, scalars, MODE)


@kernel(
    *(one.backward.name for one in GATED.values()), starts="dgate dup", views="gate up dgate dup",
    constants=lambda op: {"NAME": op.definition.name, "SLOPE": op.definition.backward.name},
)  # fmt: skip
def gated_backward(
    dgate, dup, dy, gate, up, scalars, rows,
    NAME, SLOPE, C, GATE_STRIDE, UP_STRIDE, DGATE_STRIDE, DUP_STRIDE, BR, BC, DGATE_MODE, DUP_MODE,
):  # fmt: skip
    """dgate = dy up slope(gate) and dup = dy activation(gate), (rows, C), each stored or added, in blocks (BR, BC) of rows. gate,
    up: what the MLP's first GEMM wrote; dy: the gradient of y. NAME, SLOPE: the activation and its derivative."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    row, column = row[:, None], column[None, :]
    d = tl.load(dy + row * C + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * GATE_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    store_or_add(dgate + row * DGATE_STRIDE + column, mask, d * u * slope_of(g, SLOPE), scalars, DGATE_MODE)
    store_or_add(dup + row * DUP_STRIDE + column, mask, d * value_of(g, NAME), scalars, DUP_MODE)
