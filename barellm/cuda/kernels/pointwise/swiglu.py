"""SwiGLU forward and backward. Shapes: y, dy, gate, up, dgate, dup (..., F); gate, up and their gradients may be columns of wider
rows; GATE_STRIDE and so on: elements from a row to the next."""

from __future__ import annotations

from math import e, log2
from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import row_strides, rowwise, store_or_add, tile_indices
from barellm.cuda.lang import constant, device, tl

EXPONENT = constant(-log2(e))


@device
def sigmoid(x):
    """The logistic function of fp32 values."""
    return 1.0 / (1.0 + tl.exp2(EXPONENT * x))


@device
def swiglu(
    y, gate, up, scalars, rows,
    C: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """y = silu(gate) * up."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    row, column = row[:, None], column[None, :]
    g = tl.load(gate + row * GATE_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    store_or_add(y + row * C + column, mask, g * sigmoid(g) * u, scalars, MODE)


@device
def swiglu_backward(
    dgate, dup, dy, gate, up, scalars, rows,
    C: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, DGATE_STRIDE: tl.constexpr, DUP_STRIDE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, DGATE_MODE: tl.constexpr, DUP_MODE: tl.constexpr,
):  # fmt: skip
    """dgate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate), dup = dy gate s."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    row, column = row[:, None], column[None, :]
    d = tl.load(dy + row * C + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * GATE_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(g)
    store_or_add(dgate + row * DGATE_STRIDE + column, mask, d * u * (s * (1.0 + g * (1.0 - s))), scalars, DGATE_MODE)
    store_or_add(dup + row * DUP_STRIDE + column, mask, d * (g * s), scalars, DUP_MODE)


@lowering("swiglu", starts="y", views="gate up")
def lower_swiglu(op: Any, c: Lowering) -> None:
    operands = {"y": op.y, "gate": op.gate, "up": op.up}
    strides = row_strides(gate=op.gate, up=op.up)
    rowwise(c, swiglu, op.y, operands, writes="y", MODE=mode(op, "y"), **strides)


@lowering("swiglu_backward", starts="dgate dup", views="gate up dgate dup")
def lower_swiglu_backward(op: Any, c: Lowering) -> None:
    operands = {"dgate": op.dgate, "dup": op.dup, "dy": op.dy, "gate": op.gate, "up": op.up}
    strides = row_strides(gate=op.gate, up=op.up, dgate=op.dgate, dup=op.dup)
    modes = {"DGATE_MODE": mode(op, "dgate"), "DUP_MODE": mode(op, "dup")}
    rowwise(c, swiglu_backward, op.dy, operands, writes="dgate dup", **strides, **modes)
