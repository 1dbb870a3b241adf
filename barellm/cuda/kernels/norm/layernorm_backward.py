"""The complete backward pass of a LayerNorm or RMSNorm, fused with what reads its result next, in one pass over the rows.

Alone, layernorm_dx and layernorm_dparams read dy and x twice, and the GEMM's bias gradient and operand (cast, or dropout) read dx
twice more: 30 bytes an element of a bf16 program that adds to the residual stream's gradient. Here it is 16: dy 2, x 4, dx 4 + 4,
narrow 2. Shapes: dx, dy, x, narrow (rows, C); weight (C); mean, rstd (rows) fp32; partials (chunks, COUNT, C) fp32: the sums of
dweight, dbias and dx_sum that there are. `narrow`: dx rounded to 16 bits, or with dropout's mask, for the GEMM that reads it."""

from typing import Any

from barellm.cuda.kernel import MODES, Lowering, lowering
from barellm.cuda.kernels.common import ADD, MIN_SUM_COLUMNS, pow2
from barellm.cuda.kernels.norm.column_sums import Chunks, lower_combine, outputs_read, scratch_partials
from barellm.cuda.kernels.norm.layernorm import load_factors, offset_of, statistics
from barellm.cuda.kernels.pointwise.dropout import constants_of as dropout_constants
from barellm.cuda.kernels.pointwise.dropout import keep_mask
from barellm.cuda.lang import device, tl

MAX_CHUNKS, MIN_ROWS = 512, 8  # four programs for each of 128 multiprocessors


@device
def layernorm_backward(
    dx, narrow, partials, dy, x, weight, mean, rstd, scalars, rows, per, seq, stream,
    C, BR, BC, MODE, DBIAS, DX_SUM, THRESHOLD, SCALE, STAGES,
):  # fmt: skip
    """dx = rstd (dn - mean(dn) - n mean(dn n)), with n = (x - mean) rstd and dn = dy weight, and the column sums that gradients of
    parameters need. A program takes one chunk of `per` rows, BR at a time, with loads of the next ones in flight (STAGES).

    It reads dy (rows, C), x, mean and rstd of the forward pass; stores or adds dx (MODE), stores `narrow`, and sums its part of
    dweight = sum dy n, of dbias = sum dy (if DBIAS) and of the next op's bias gradient, the sum of `narrow` (if DX_SUM), into
    partials (chunks, COUNT, C). An RMSNorm has no `mean`, and maybe no `weight`: then there are no `partials`. THRESHOLD, SCALE:
    dropout's, or None. BC >= C; BR and BC are powers of two and decide, with `per`, the bits of the sums."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    column = tl.arange(0, BC)
    inside = column < C
    dweight_sums, dbias_sums, dx_sums = (tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32))
    for first in tl.range(begin, end, BR, num_stages=STAGES):
        row = (first + tl.arange(0, BR)).to(tl.int64)
        live = row < end
        mask = live[:, None] & inside[None, :]
        i = row[:, None] * C + column[None, :]
        centre, inverse = statistics(mean, rstd, row, live)
        g, dn, n = load_factors(dy, x, weight, i, column, mask, inside, centre, inverse)
        a, p = offset_of(mean, dn, C), tl.sum(dn * n, 1) / C  # mean(dn), mean(dn n)
        if partials is not None:
            dweight_sums += tl.sum(g * n, 0)
        if DBIAS:
            dbias_sums += tl.sum(g, 0)
        d = inverse[:, None] * (dn - a[:, None] - n * p[:, None])
        if MODE == ADD:
            d += tl.load(dx + i, mask=mask, other=0.0)
        tl.store(dx + i, d, mask=mask)
        if THRESHOLD is not None:
            d = tl.where(keep_mask(row, 0, scalars, seq, stream, THRESHOLD, BR, BC), d * SCALE, 0.0)
        if narrow is not None:
            tl.store(narrow + i, d, mask=mask)
        if DX_SUM:
            dx_sums += tl.sum(d, 0)
    if partials is not None:
        COUNT: tl.constexpr = 1 + DBIAS + DX_SUM
        partial_ptrs = partials + tl.program_id(0) * (COUNT * C) + column
        tl.store(partial_ptrs, dweight_sums, mask=inside)
        if DBIAS:
            tl.store(partial_ptrs + C, dbias_sums, mask=inside)
        if DX_SUM:
            tl.store(partial_ptrs + (COUNT - 1) * C, dx_sums, mask=inside)


@lowering("rmsnorm_backward", adds="dx", starts="dweight")
@lowering("layernorm_backward", adds="dx", starts="dweight dbias dx_sum")
def lower_layernorm_backward(op: Any, c: Lowering) -> None:
    """Plan two launches: one pass over the rows, which leaves column sums of chunks in scratch, and their second stage
    (column_sums.py) into dweight, dbias and dx_sum, those of them that an op reads."""
    C, rows = int(op.x.shape[-1]), c.rows(op.x)
    names = outputs_read(op, "dweight", "dbias", "dx_sum")
    chunks = Chunks(rows, MAX_CHUNKS, MIN_ROWS)
    partials = scratch_partials(c, op.x, len(names), chunks) if names else None
    dropped = "dropped" in op.outputs
    operands = {
        "narrow": op.outputs.get("dropped") or op.outputs.get("rounded"), "partials": partials, "rows": rows, "per": chunks.per,
        "seq": (lambda s: s.seq) if dropped else None, "stream": int(op.stream) if dropped else None,
    }  # fmt: skip
    BC = max(MIN_SUM_COLUMNS, pow2(C))
    constants = {
        "C": C, "BR": max(1, 1024 // BC), "BC": BC, "MODE": MODES[op.modes["dx"]],
        "STAGES": 3 if BC <= 2048 else 2,  # 74 KB of shared memory at most: sm_89 has 99
        "DBIAS": "dbias" in names, "DX_SUM": "dx_sum" in names,
        **(dropout_constants(op) if dropped else {"THRESHOLD": None, "SCALE": None}),
    }  # fmt: skip
    c.launch(
        layernorm_backward, operands, constants, grid=lambda s: (chunks.count(s),), writes="dx narrow partials",
        warps=max(4, BC // (256 if c.target.arch >= 90 else 128)),  # with 4 warps on sm_80, rows of 768 spill two registers
    )  # fmt: skip
    if partials is not None:
        lower_combine(c, partials, names, chunks)
