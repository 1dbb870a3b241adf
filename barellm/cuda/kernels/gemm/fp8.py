"""Products of codes of 8 bits, by tensor cores that have them (compute capability 8.9 and later), with fp32 sums; and of the longer
numbers that other ways to round to 8 bits leave.

Shapes: x (tokens, K), weight (K, N), y (tokens, N), row-major; scales (1,). Tensor cores want both operands with the depth of the
product as their last axis. So one kernel does out (M, N) = a b^T with a (M, depth) and b (N, depth), and what lies the other way
round is turned over first: the weight for y, x and dy for dweight. A code is a byte to read and a byte to write there.

Hopper's tensor cores keep few bits of a sum over e4m3 or e5m2: after each DEPTH of them it is added to one in fp32.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, Size, lowering, mode
from barellm.cuda.kernels.common import INV_TARGETS, flat_indices, launch_elementwise, scalar_fp64, store_or_add
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import EIGHTS, LARGEST, PLANES, itemsize
from barellm.program.integers import ceil_div, round_up
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import weight_operand

FIRST = 89  # the compute capability that has these formats
ROWS, COLUMNS = 128, 128  # of a tile of the result
DEPTH = 128  # bytes of a tile of the operands, and the codes in the sums that a tensor core makes by itself
GROUP = 8  # rows of tiles that blocks of neighbouring numbers share
TURNED = 64  # side of the tiles that are turned over


@device
def divisor(scale, scalars, PER_TARGET: tl.constexpr):
    by = tl.load(scale)
    if PER_TARGET:
        by *= scalar_fp64(scalars, INV_TARGETS).to(tl.float32)
    return by


@device
def quantise(y, x, scale, scalars, units, PER_TARGET: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Conversions to 8 bits saturate."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    value = tl.math.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * divisor(scale, scalars, PER_TARGET))
    tl.store(y + i, value.to(y.dtype.element_ty), mask=mask)


@device
def turn(y, x, rows, COLUMNS: tl.constexpr, Y_ROW: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr):
    """y (COLUMNS, rows), whose rows lie Y_ROW bytes apart, = x (rows, COLUMNS); zeros behind them up to a multiple of DEPTH."""
    ACROSS: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    r0, c0 = tl.program_id(0) // ACROSS * TILE, tl.program_id(0) % ACROSS * TILE
    x += tl.cast(r0, tl.int64) * COLUMNS + c0
    y += tl.cast(c0, tl.int64) * Y_ROW + r0
    r, c = tl.arange(0, TILE), tl.arange(0, TILE)
    within = c < COLUMNS - c0
    value = tl.load(x + r[:, None] * COLUMNS + c[None, :], mask=(r < rows - r0)[:, None] & within[None, :], other=0.0)
    written = r < tl.cdiv(rows, DEPTH) * DEPTH - r0
    tl.store(y + c[:, None] * Y_ROW + r[None, :], tl.trans(value), mask=within[:, None] & written[None, :])


@device
def eight_gemm(
    out, a, b, scale, other, scalars, M, depth,
    N: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr, EVEN: tl.constexpr, EIGHT: tl.constexpr, PER_TARGET: tl.constexpr,
    MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of out (M, N) = a (M, depth) times b (N, depth) turned over, times both scales. NAME_ROW: elements from a row to the
    next. EVEN: up to the next multiple of BK there are zeros, or the depth is one."""
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    first = pid // (GROUP * N_TILES) * GROUP
    height = min(tl.cdiv(M, BM) - first, GROUP)
    within = pid % (GROUP * N_TILES)
    m0, n0 = (first + within % height) * BM, within // height * BN
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    m_in, n_in = m < M - m0, n < N - n0
    a_at = a + tl.cast(m0, tl.int64) * A_ROW + (m[:, None] * A_ROW + k[None, :])
    b_at = b + tl.cast(n0, tl.int64) * B_ROW + (n[None, :] * B_ROW + k[:, None])
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, depth, BK):
        if EVEN:
            x, y = tl.load(a_at, mask=m_in[:, None], other=0.0), tl.load(b_at, mask=n_in[None, :], other=0.0)
        else:
            k_in = k < depth - k0
            x = tl.load(a_at, mask=m_in[:, None] & k_in[None, :], other=0.0)
            y = tl.load(b_at, mask=n_in[None, :] & k_in[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee", max_num_imprecise_acc=BK if EIGHT else None)
        a_at += BK
        b_at += BK
    acc *= tl.load(other) * divisor(scale, scalars, PER_TARGET)
    to = out + tl.cast(m0, tl.int64) * N + n0 + (m[:, None] * N + n[None, :])
    store_or_add(to, m_in[:, None] & n_in[None, :], acc, scalars, MODE)


def check(c: Lowering, codes: Tensor) -> None:
    if codes.dtype in LARGEST and c.target.arch < FIRST:
        found = f"{c.target.arch // 10}.{c.target.arch % 10}"
        raise ValueError(f"{c.op.name} needs a GPU of compute capability 8.9 or later, found {found}")


def turned(c: Lowering, name: str, codes: Tensor, rows: Size | int) -> Tensor:
    """The codes (..., columns) as (columns, rows), in scratch, with zeros behind each row up to a multiple of DEPTH."""
    columns = int(codes.shape[-1])
    row = round_up(codes.size // columns, DEPTH)
    t = c.scratch(name, (columns, row), codes.dtype)

    def grid(s: Any) -> tuple[int, ...]:
        there = rows if isinstance(rows, int) else rows(s)
        return (round_up(there, DEPTH) // TURNED * ceil_div(columns, TURNED),)

    constants = {"COLUMNS": columns, "Y_ROW": row, "DEPTH": DEPTH, "TILE": TURNED}
    c.launch(turn, {"y": t, "x": codes, "rows": rows}, constants, grid=grid, writes="y", warps=4)
    return t


def product(
    c: Lowering, out: Tensor, a: Tensor, b: Tensor, scale: Tensor, other: Tensor,
    *, M: Size | int, depth: Size | int, mode: int, per_target: bool,
) -> None:  # fmt: skip
    """Append one product of operands (..., depth); `scale` is the one that goes with inv_targets if any does."""
    check(c, a)
    N, depth_of_tile = int(out.shape[-1]), DEPTH // itemsize(a.dtype)
    rows = {"A_ROW": int(a.shape[-1]), "B_ROW": int(b.shape[-1])}
    even = not any(row % depth_of_tile for row in rows.values())
    operands = {"out": out, "a": a, "b": b, "scale": scale, "other": other, "M": M, "depth": depth}
    constants = {"N": N, **rows, "EVEN": even, "EIGHT": a.dtype in LARGEST, "PER_TARGET": per_target, "MODE": mode}
    constants |= {"BM": ROWS, "BN": COLUMNS, "BK": depth_of_tile, "GROUP": GROUP}

    def grid(s: Any) -> tuple[int, ...]:
        return (ceil_div(M if isinstance(M, int) else M(s), ROWS) * ceil_div(N, COLUMNS),)

    c.launch(eight_gemm, operands, constants, grid=grid, writes="out", warps=8, stages=4)


@lowering("quantise", also={"x": PLANES, "y": EIGHTS})
def lower_quantise(op: Any, c: Lowering) -> None:
    check(c, op.y)
    operands = {"y": op.y, "x": weight_operand(op.x), "scale": op.scale}
    launch_elementwise(c, quantise, op.y, operands, writes="y", PER_TARGET=op.per_target)


@lowering("scaled_matmul", also={"x": EIGHTS, "weight": EIGHTS})
def lower_scaled_matmul(op: Any, c: Lowering) -> None:
    depth = int(op.weight.shape[0])
    how = {"M": c.rows(op.x), "depth": depth, "mode": mode(op, "y"), "per_target": False}
    product(c, op.y, op.x, turned(c, "weight", op.weight, depth), op.x_scale, op.weight_scale, **how)


@lowering("scaled_matmul_dx", starts="dx", also={"dy": EIGHTS, "weight": EIGHTS})
def lower_scaled_matmul_dx(op: Any, c: Lowering) -> None:
    how = {"M": c.rows(op.dy), "depth": int(op.weight.shape[1]), "mode": mode(op, "dx"), "per_target": True}
    product(c, op.dx, op.dy, op.weight, op.dy_scale, op.weight_scale, **how)


@lowering("scaled_matmul_dw", starts="dweight", also={"x": EIGHTS, "dy": EIGHTS})
def lower_scaled_matmul_dw(op: Any, c: Lowering) -> None:
    rows = c.rows(op.x)
    a, b = turned(c, "x", op.x, rows), turned(c, "dy", op.dy, rows)
    how = {"M": int(op.dweight.shape[0]), "depth": rows, "mode": mode(op, "dweight"), "per_target": True}
    product(c, op.dweight, a, b, op.dy_scale, op.x_scale, **how)
