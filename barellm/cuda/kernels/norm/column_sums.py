"""Sums over the rows of each column: gradients of biases and of the parameters of LayerNorm and RMSNorm.

Two stages: rows go by chunks whose number depends on the row count alone, each summed by one program (per block of columns) into
its row of partials; then the partials are added in order. So the bits do not depend on the machine.
Shapes: dy, x (rows, C); mean, rstd (rows); partials (chunks, count, C) fp32; sums (C).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cuda.kernel import Lowering, Size, Sizes, lowering, mode
from barellm.cuda.kernels.common import pow2, store_or_add
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part

CHUNKS, LEAST = 256, 32  # at most so many chunks, of at least so many rows
TILE = 2048  # elements that a program of the first stage reads at once of each operand


@dataclass(frozen=True)
class Chunks:
    """How the rows are cut: `per` rows each, the last one shorter."""

    rows: Size
    most: int = CHUNKS
    least: int = LEAST

    def per(self, sizes: Sizes) -> int:
        return max(ceil_div(self.rows(sizes), self.most), self.least)

    def count(self, sizes: Sizes) -> int:
        return ceil_div(self.rows(sizes), self.per(sizes))

    def planned(self, rows: int) -> int:
        """The most chunks that a run of up to `rows` rows has."""
        return min(self.most, ceil_div(rows, self.least))


@device
def bias_grad_partials(partials, dy, rows, per, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < C
    total = tl.zeros((BR, BC), tl.float32)
    for first in range(begin, end, BR):
        row = first + tl.arange(0, BR)
        i = row.to(tl.int64)[:, None] * C + column[None, :]
        total += tl.load(dy + i, mask=(row < end)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(0) * C + column, tl.sum(total, 0), mask=inside)


@device
def dparams_partials(
    partials, dy, x, mean, rstd, rows, per, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, COUNT: tl.constexpr
):
    """Sums of dy * n, and of dy where COUNT is 2. Without `mean`, of an RMSNorm, n is x * rstd."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < C
    weights, biases = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    for first in range(begin, end, BR):
        row = first + tl.arange(0, BR)
        live = row < end
        mask = live[:, None] & inside[None, :]
        i = row.to(tl.int64)[:, None] * C + column[None, :]
        inverse = tl.load(rstd + row, mask=live, other=0.0)
        g = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        if mean is not None:
            v = v - tl.load(mean + row, mask=live, other=0.0)[:, None]
        weights += g * v * inverse[:, None]
        biases += g
    to = partials + tl.program_id(0) * (COUNT * C) + column
    tl.store(to, tl.sum(weights, 0), mask=inside)
    if COUNT == 2:
        tl.store(to + C, tl.sum(biases, 0), mask=inside)


@device
def combine(
    first, second, third, partials, scalars, chunks,
    C: tl.constexpr, STRIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    MODE_FIRST: tl.constexpr, MODE_SECOND: tl.constexpr, MODE_THIRD: tl.constexpr,
):  # fmt: skip
    """Compute up to three outputs (C) from the chunks' partial sums. The second index of a program tells for which."""
    which = tl.program_id(1)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < C
    total = tl.zeros((BR, BC), tl.float32)
    for begin in range(0, chunks, BR):
        chunk = begin + tl.arange(0, BR)
        i = chunk[:, None] * STRIDE + which * C + column[None, :]
        total += tl.load(partials + i, mask=(chunk < chunks)[:, None] & inside[None, :], other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        give(first, column, inside, value, scalars, MODE_FIRST)
    elif which == 1:
        give(second, column, inside, value, scalars, MODE_SECOND)
    else:
        give(third, column, inside, value, scalars, MODE_THIRD)


@device
def give(out, column, inside, value, scalars, MODE: tl.constexpr):
    if out is not None:
        store_or_add(out + column, inside, value, scalars, MODE)


def wanted(op: Op, *names: str) -> list[str]:
    """The outputs that somebody reads: a LayerNorm without bias has a dbias that nobody reads."""
    return [name for name in names if name in op.outputs and op.outputs[name].role != "activation"]


def partials_of(c: Lowering, like: Tensor, count: int, chunks: Chunks) -> Tensor:
    C = int(like.shape[-1])
    return c.scratch("partials", (chunks.planned(like.size // C), count, C))


def lower_combine(c: Lowering, partials: Tensor, names: list[str], chunks: Chunks) -> None:
    """The second stage, into the outputs `names`."""
    op, C = c.op, int(partials.shape[-1])
    operands: dict[str, Any] = {"partials": partials, "chunks": chunks.count}
    constants: dict[str, Any] = {"C": C, "STRIDE": len(names) * C, "BR": 64, "BC": 32}
    for i, place in enumerate(("first", "second", "third")):
        out = names[i] if i < len(names) else None
        operands[place] = (part(op.outputs[out]), "fp32") if out else None
        constants[f"MODE_{place.upper()}"] = mode(op, out) if out else None
    c.launch(combine, operands, constants, grid=lambda s: (ceil_div(C, 32), len(names)), writes="first second third")


def lower_sums(
    c: Lowering, function: DeviceFunction, like: Tensor, operands: dict[str, Any], names: list[str], **constants: Any
) -> None:
    """Both stages. The first is `function`, with parameters partials, rows, per, C, BR and BC."""
    C, rows = int(like.shape[-1]), c.rows(like)
    chunks = Chunks(rows)
    partials = partials_of(c, like, len(names), chunks)
    BC = min(128, pow2(C))
    c.launch(
        function,
        {**operands, "partials": partials, "rows": rows, "per": chunks.per},
        {"C": C, "BR": min(LEAST, TILE // BC), "BC": BC, **constants},
        grid=lambda s: (chunks.count(s), ceil_div(C, BC)),
        writes="partials",
    )
    lower_combine(c, partials, names, chunks)


@lowering("bias_grad", starts="dbias")
def lower_bias_grad(op: Any, c: Lowering) -> None:
    lower_sums(c, bias_grad_partials, op.dy, {"dy": op.dy}, ["dbias"])


@lowering("rmsnorm_dweight", starts="dweight")
@lowering("layernorm_dparams", starts="dweight dbias")
def lower_norm_dparams(op: Any, c: Lowering) -> None:
    names = wanted(op, "dweight", "dbias")
    operands = {name: op.inputs.get(name) for name in ("dy", "x", "mean", "rstd")}
    lower_sums(c, dparams_partials, op.x, operands, names, COUNT=len(names))
