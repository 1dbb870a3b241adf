"""Column sums (reductions over rows): gradients of biases and of the parameters of LayerNorm and RMSNorm.

Two stages: rows go by chunks of `per` rows whose number depends on the row count alone, each summed by one program (per block of BC
columns, BR rows at a time) into its row of partials; then the partials are added in order. So the bits do not depend on the
machine. Shapes: dy, x (rows, C); mean, rstd (rows); partials (chunks, COUNT, C) fp32, COUNT the number of results; results (C)."""

from dataclasses import dataclass
from typing import Any

from barellm.cuda.kernel import Lowering, Size, Sizes, lowering, mode
from barellm.cuda.kernels.common import pow2, store_or_add
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.program.ops.norm.rmsnorm import heads_of
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part

MAX_CHUNKS, MIN_ROWS = 256, 32  # at most so many chunks, of at least so many rows
TILE = 2048  # elements that a program of the first stage reads at once of each operand


@dataclass(frozen=True)
class Chunks:
    """How rows are split into chunks: `per` rows each, the last chunk shorter; at most `most` chunks of at least `least` rows."""

    rows: Size
    most: int = MAX_CHUNKS
    least: int = MIN_ROWS

    def per(self, sizes: Sizes) -> int:
        return max(ceil_div(self.rows(sizes), self.most), self.least)

    def count(self, sizes: Sizes) -> int:
        return ceil_div(self.rows(sizes), self.per(sizes))

    def planned(self, rows: int) -> int:
        """The most chunks that a run of up to `rows` rows has."""
        return min(self.most, ceil_div(rows, self.least))


@device
def bias_grad_partials(partials, dy, rows, per, C, BR, BC):
    """First stage of a bias's gradient: partials (chunks, C) fp32 = the sums of dy (rows, C) over chunks of `per` rows; grid:
    chunks, blocks of BC columns. BR rows at a time: BR, BC (powers of two) and `per` decide the order of the sums, so the bits."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    column_in = column < C
    total = tl.zeros((BR, BC), tl.float32)
    for first in range(begin, end, BR):
        row = first + tl.arange(0, BR)
        i = row.to(tl.int64)[:, None] * C + column[None, :]
        total += tl.load(dy + i, mask=(row < end)[:, None] & column_in[None, :], other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(0) * C + column, tl.sum(total, 0), mask=column_in)


@device
def dparams_partials(partials, dy, x, mean, rstd, rows, per, C, BR, BC, COUNT):
    """First stage of the gradients of a norm's parameters: partials (chunks, COUNT, C) fp32 = over chunks of `per` rows the sums of
    dy * n, for dweight, and, if COUNT is 2, of dy, for dbias. n is the normalised row (x - mean) * rstd, or with `mean` None
    (RMSNorm) x * rstd; dy, x (rows, C), mean, rstd (rows) fp32 of the forward pass. Grid, BR, BC: as bias_grad_partials."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < C
    dweight_sums, dbias_sums = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    for first in range(begin, end, BR):
        row = first + tl.arange(0, BR)
        row_in = row < end
        mask = row_in[:, None] & inside[None, :]
        i = row.to(tl.int64)[:, None] * C + column[None, :]
        rstd_rows = tl.load(rstd + row, mask=row_in, other=0.0)
        g = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        if mean is not None:
            v = v - tl.load(mean + row, mask=row_in, other=0.0)[:, None]
        dweight_sums += g * v * rstd_rows[:, None]
        dbias_sums += g
    partial_ptrs = partials + tl.program_id(0) * (COUNT * C) + column
    tl.store(partial_ptrs, tl.sum(dweight_sums, 0), mask=inside)
    if COUNT == 2:
        tl.store(partial_ptrs + C, tl.sum(dbias_sums, 0), mask=inside)


@device
def combine_partials(first, second, third, partials, scalars, chunks, C, STRIDE, BR, BC, MODE_FIRST, MODE_SECOND, MODE_THIRD):
    """Second stage: up to three results (C) fp32 (dweight, dbias, ...; None where there are fewer) = the sums over the chunks of
    partials (chunks, COUNT, C), which the first stage wrote, in order; STRIDE = COUNT * C. Each is stored or added (MODE_...)."""
    result = tl.program_id(1)  # 0, 1 or 2: which of the three
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    column_in = column < C
    total = tl.zeros((BR, BC), tl.float32)
    for begin in range(0, chunks, BR):
        chunk = begin + tl.arange(0, BR)
        i = chunk[:, None] * STRIDE + result * C + column[None, :]
        total += tl.load(partials + i, mask=(chunk < chunks)[:, None] & column_in[None, :], other=0.0)
    value = tl.sum(total, 0)
    if result == 0:
        store_columns(first, column, column_in, value, scalars, MODE_FIRST)
    elif result == 1:
        store_columns(second, column, column_in, value, scalars, MODE_SECOND)
    else:
        store_columns(third, column, column_in, value, scalars, MODE_THIRD)


@device
def store_columns(out, column, inside, value, scalars, MODE):
    """Store or add BC columns of a result; nothing if `out` is None, as in an instance with fewer results."""
    if out is not None:
        store_or_add(out + column, inside, value, scalars, MODE)


def outputs_read(op: Op, *names: str) -> list[str]:
    """Those of the outputs `names` that some op reads: a LayerNorm without bias has a dbias that none does."""
    outputs = {name: op.outputs[name] for name in names if name in op.outputs}
    return [name for name, t in outputs.items() if name == "dweight" or t.role != "activation"]


def scratch_partials(c: Lowering, like: Tensor, count: int, chunks: Chunks) -> Tensor:
    """Scratch (chunks, count, C) for the partials of `count` results, over rows like those of `like` (..., C)."""
    C = int(like.shape[-1])
    return c.scratch("partials", (chunks.planned(like.size // C), count, C))


def lower_combine(c: Lowering, partials: Tensor, names: list[str], chunks: Chunks) -> None:
    """Launch the second stage, into the op's outputs `names`."""
    op, C = c.op, int(partials.shape[-1])
    operands: dict[str, Any] = {"partials": partials, "chunks": chunks.count}
    constants: dict[str, Any] = {"C": C, "STRIDE": len(names) * C, "BR": 64, "BC": 32}
    for i, parameter in enumerate(("first", "second", "third")):
        out = names[i] if i < len(names) else None
        operands[parameter] = (part(op.outputs[out]), "fp32") if out else None
        constants[f"MODE_{parameter.upper()}"] = mode(op, out) if out else None
    c.launch(combine_partials, operands, constants, grid=lambda s: (ceil_div(C, 32), len(names)), writes="first second third")


def lower_sums(
    c: Lowering, function: DeviceFunction, like: Tensor, operands: dict[str, Any], names: list[str], **constants: Any
) -> None:
    """Plan both stages: the outputs `names` (C) from rows like those of `like` (..., C), through scratch partials. `function` is
    the first stage, with the parameters partials, rows, per, C, BR and BC, besides `operands` and `constants`."""
    C, rows = int(like.shape[-1]), c.rows(like)
    chunks = Chunks(rows)
    partials = scratch_partials(c, like, len(names), chunks)
    BC = min(128, pow2(C))
    c.launch(
        function, {**operands, "partials": partials, "rows": rows, "per": chunks.per},
        {"C": C, "BR": min(MIN_ROWS, TILE // BC), "BC": BC, **constants},
        grid=lambda s: (chunks.count(s), ceil_div(C, BC)), writes="partials",
    )  # fmt: skip
    lower_combine(c, partials, names, chunks)


@lowering("bias_grad", starts="dbias")
def lower_bias_grad(op: Any, c: Lowering) -> None:
    lower_sums(c, bias_grad_partials, op.dy, {}, ["dbias"])


@lowering("rmsnorm_dweight", "head_rmsnorm_dweight", starts="dweight")
@lowering("layernorm_dparams", starts="dweight dbias")
def lower_norm_dparams(op: Any, c: Lowering) -> None:
    names = outputs_read(op, "dweight", "dbias")
    like = heads_of(op) if op.name == "head_rmsnorm_dweight" else op.x
    lower_sums(c, dparams_partials, like, {}, names, COUNT=len(names))
