"""GEMM in Triton, for any shape and architecture, with the fused operations that follow it done on the accumulators (epilogue.py).

Shapes: x (tokens, K), weight (N, K), y (tokens, N), row-major. One kernel over out (M, N) = a b, depth K, by gemm_kind:

    nt  y = x weight^T       a (M, K)             b stored (N, K)    forward
    nn  dx = dy weight       a (M, K)             b stored (K, N)    input gradient
    tn  dweight = dy^T x     a stored (K, M)      b stored (K, N)    weight gradient; K: tokens, split-K (split_k.py)

Names of every GEMM in this folder: `rows`: tokens of the run, a size; `most`: their planned maximum; N, K: the weight's shape;
`pre`: the pre-activation, written or read; `residual`: added to the result; `epilogue`: what is fused (epilogue.py); `mode`:
whether the result is stored or added (MODES). NAME_STRIDE: elements from a row of a view to the next, or None: contiguous.

bf16 and fp16 operands are multiplied by tensor cores and added in fp32; fp32 ones in fp32 all through or, where the target says
tf32, by tensor cores that leave out the last 13 of 23 bits of each operand. It moves (M K + K N + M N) elements at least and does 2
M N K operations; what is fused adds its own operand and no other pass over y.

A program's fp32 accumulators (BM, BN) stay in registers. All warps load blocks of a and b with cp.async into
`num_stages` buffers of shared memory; Triton places the waits and barriers."""

from __future__ import annotations

from typing import Any

from barellm.cuda import gemm_config, tuning
from barellm.cuda.kernel import MODES, Lowering, Size, lowering, mode
from barellm.cuda.kernels.common import view_strides
from barellm.cuda.kernels.gemm.cublaslt import append_cublaslt_gemm, fits_cublaslt
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands, epilogue_tile
from barellm.cuda.kernels.gemm.hopper import fits_hopper_gemm, launch_hopper_gemm
from barellm.cuda.kernels.gemm.skinny_gemm import RowsWhere, fits_skinny_gemm, launch_skinny_gemm
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.kernels.norm.column_sums import bias_grad_partials, lower_sums
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import weight_operand

SUBTILE_N = 64  # columns of a tile that a fused epilogue handles at a time: more would not leave it registers


@device
def grouped_tile(M: tl.int32, N: tl.int32, BM, BN, GROUP):
    """(first row, first column) of this program's tile of (M, N): GROUP rows of tiles are walked column by column (grouped
    rasterization), so that their operands stay in L2."""
    pid = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first_m = pid // (GROUP * n_tiles) * GROUP
    group_m = min(m_tiles - first_m, GROUP)
    in_group = pid % (GROUP * n_tiles)
    return (first_m + in_group % group_m) * BM, in_group // group_m * BN


@device
def operand_pointers(base, first, i, k, ROW, K_CONTIGUOUS, K_AXIS):
    """Pointers to a block of an operand of a GEMM: rows (of a) or columns (of b) first + i, by the depths k, on axis K_AXIS of the
    block. Stored rows, ROW elements apart, run along the depth where K_CONTIGUOUS, else along the other axis."""
    if K_CONTIGUOUS:
        return base + (tl.cast(first, tl.int64) * ROW + tl.expand_dims(i, K_AXIS) * ROW + tl.expand_dims(k, 1 - K_AXIS))
    else:
        return base + (first + tl.expand_dims(i, K_AXIS) + tl.expand_dims(k, 1 - K_AXIS) * ROW)


@device
def load_k_blocks(a_ptrs, b_ptrs, m_in, n_in, k, k0, k_end, EVEN_K):
    """Load a (BM, BK) and b (BK, BN) of the step at k0, zeros off the masks m_in, n_in and, unless EVEN_K, beyond k_end."""
    if EVEN_K:
        a_block = tl.load(a_ptrs, mask=m_in[:, None], other=0.0)
        b_block = tl.load(b_ptrs, mask=n_in[None, :], other=0.0)
    else:
        k_in = k < k_end - k0
        a_block = tl.load(a_ptrs, mask=m_in[:, None] & k_in[None, :], other=0.0)
        b_block = tl.load(b_ptrs, mask=n_in[None, :] & k_in[:, None], other=0.0)
    return a_block, b_block


@device
def gemm(
    out, pre, a, b, bias, other, scalars, M: tl.int32, N: tl.int32, K: tl.int32, k_per_split,
    A_TRANSPOSED, B_TRANSPOSED, EVEN_K, EPILOGUE, MODE, BM, BN, BK, GROUP, SUBTILES, TF32, A_STRIDE, B_STRIDE, OUT_STRIDE,
    PRE_STRIDE, OTHER_STRIDE,
):  # fmt: skip
    """out (M, N) = epilogue(a (M, K) b (K, N)): one (BM, BN) tile a program, in steps of BK, fp32 accumulators.

    a is stored (M, K) or A_TRANSPOSED (K, M), b (K, N) or B_TRANSPOSED (N, K), rows NAME_STRIDE apart; pre, bias, other, EPILOGUE:
    epilogue.py. Grid: tiles, rasterized in groups of GROUP rows of tiles; with `k_per_split` axis 1 counts split-K slices of so
    many of K, and slice s writes the s-th (M, N) of out. BM, BN, BK: powers of two from 16 on; EVEN_K: BK divides K. A tile starts
    at a 64-bit address; within it offsets are 32-bit. TF32: fp32 operands are rounded to it. SUBTILES: parts of the epilogue. MODE:
    out is stored or added."""
    m0, n0 = grouped_tile(M, N, BM, BN, GROUP)
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)  # in the tile
    m_in, n_in = m < M - m0, n < N - n0

    # Elements from a stored row to the next, and from one depth to the next.
    a_row: tl.constexpr = A_STRIDE if A_STRIDE is not None else M if A_TRANSPOSED else K
    b_row: tl.constexpr = B_STRIDE if B_STRIDE is not None else K if B_TRANSPOSED else N
    a_step: tl.constexpr = a_row if A_TRANSPOSED else 1
    b_step: tl.constexpr = 1 if B_TRANSPOSED else b_row
    # The part of K that this program sums, and the place of its tile in out.
    k_end = K
    a_ptrs, b_ptrs = a, b
    out_offset = tl.cast(m0, tl.int64) * N + n0
    if k_per_split is not None:
        k_start = tl.cast(tl.program_id(1) * k_per_split, tl.int64)
        k_end = min(K - tl.program_id(1) * k_per_split, k_per_split)
        a_ptrs += k_start * a_step
        b_ptrs += k_start * b_step
        out_offset += tl.cast(tl.program_id(1), tl.int64) * M * N
    a_ptrs = operand_pointers(a_ptrs, m0, m, k, a_row, not A_TRANSPOSED, 1)
    b_ptrs = operand_pointers(b_ptrs, n0, n, k, b_row, B_TRANSPOSED, 0)

    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, k_end, BK):
        a_block, b_block = load_k_blocks(a_ptrs, b_ptrs, m_in, n_in, k, k0, k_end, EVEN_K)
        acc = tl.dot(a_block, b_block, acc, input_precision="tf32" if TF32 else "ieee")
        a_ptrs += BK * a_step
        b_ptrs += BK * b_step

    epilogue_tile(
        out, pre, bias, other, scalars, acc, m0, n0, out_offset, M, N, EPILOGUE, MODE, SUBTILES,
        OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
    )  # fmt: skip


def append_gemm(
    c: Lowering, gemm_kind: str, *, out: Any, a: Any, b: Any, rows: Size, most: int, N: int, K: int,
    bias: Any = None, residual: Any = None, pre: Any = None, epilogue: str = "", mode: int = MODES["store"],
) -> None:  # fmt: skip
    """Plan one GEMM, by the first of skinny_gemm, cuBLASLt, hopper_gemm and this kernel that takes it: launches (of split-K two),
    or a call of the library, appended to `c`. The weight is (N, K); an operand is a Tensor or (Region, dtype).

        "nt"  out (rows, N) = a (rows, K) b^T, b (N, K), plus `bias` (N). `epilogue` an activation: `pre` (rows, N) gets the
              pre-activation and out the activation; "residual": out is `residual` (rows, N) plus it
        "nn"  out (rows, K) = a (rows, N) b, b (N, K)
        "tn"  out (N, K) fp32 = a^T b of a (rows, N), b (rows, K): the sum over rows

    With an activation's derivative ("gelu_backward", ...) as `epilogue` of "nt" or "nn", out is multiplied by it at `pre`."""
    arguments = {"out": out, "a": a, "b": b, "rows": rows, "most": most, "N": N, "K": K}
    arguments |= {"bias": bias, "residual": residual, "pre": pre, "epilogue": epilogue, "mode": mode}
    if gemm_kind == "nt" and fits_skinny_gemm(c, most=most, K=K):  # and a second launch below
        launch_skinny_gemm(c, **arguments)
        if most <= gemm_config.SKINNY_M:
            return
        arguments["rows"] = rows = RowsWhere(rows, skinny=False)
    if fits_cublaslt(c, **arguments):
        return append_cublaslt_gemm(c, gemm_kind, **arguments)
    if fits_hopper_gemm(c, gemm_kind, **arguments):
        return launch_hopper_gemm(c, gemm_kind, **arguments)
    dtype = a[1] if isinstance(a, tuple) else a.dtype
    if gemm_kind == "tn":
        return _append_wgrad(c, out, a, b, rows, most, N, K, dtype, mode)
    cols, depth = (N, K) if gemm_kind == "nt" else (K, N)
    config = tuning.select_config(c.target, tuning.GemmProblem(gemm_kind, _kind(c, dtype), most, cols, depth))
    pre_out, other = epilogue_operands(pre, residual, epilogue)
    operands = {"out": out, "pre": pre_out, "a": a, "b": b, "bias": bias, "other": other}
    operands |= {"M": rows, "k_per_split": None}
    constants = {"N": cols, "K": depth, "A_TRANSPOSED": False, "B_TRANSPOSED": gemm_kind == "nt", "MODE": mode}
    constants |= _constants(c, config) | {"EVEN_K": depth % config.tile_k == 0, "EPILOGUE": epilogue}
    constants |= {"SUBTILES": ceil_div(config.tile_n, SUBTILE_N) if epilogue else 1} | view_strides(
        a=a, b=b, out=out, pre=pre_out, other=other
    )
    n_tiles = ceil_div(cols, config.tile_n)
    c.launch(
        gemm, operands, constants, grid=lambda s: (ceil_div(rows(s), config.tile_m) * n_tiles,), writes="out pre",
        warps=config.num_warps, stages=config.num_stages,
    )  # fmt: skip


def _append_wgrad(c, out, dy, x, rows, most, N, K, dtype, mode) -> None:
    """Plan a weight gradient out (N, K) fp32 = dy^T x, of dy (rows, N) and x (rows, K): one launch of `gemm`; or, if the result has
    too few tiles to fill the GPU, split-K: fp32 partial sums (slices, N, K) in scratch, then added in order."""
    problem = tuning.GemmProblem("tn", _kind(c, dtype), N, K, most)
    config, default = tuning.select_config(c.target, problem), problem.default(c.target.arch)
    tiles = ceil_div(N, config.tile_m) * ceil_div(K, config.tile_n)
    default_tiles = ceil_div(N, default.tile_m) * ceil_div(K, default.tile_n)  # which decide the slices
    constants = {"M": N, "N": K, "A_TRANSPOSED": True, "B_TRANSPOSED": False}
    constants |= _constants(c, config) | {"EVEN_K": False, "EPILOGUE": "", "SUBTILES": 1}
    constants |= view_strides(a=dy, b=x, out=None, pre=None, other=None)
    operands = {"pre": None, "a": dy, "b": x, "bias": None, "other": None, "K": rows}
    options = {"writes": "out", "warps": config.num_warps, "stages": config.num_stages}
    slices = gemm_config.max_splits(default_tiles, most)  # by the default's tiles: bits do not depend on tuning
    if slices == 1:
        operands |= {"out": out, "k_per_split": None}
        c.launch(gemm, operands, constants | {"MODE": mode}, grid=lambda s: (tiles,), **options)
        return
    split = SplitK(rows, default_tiles)
    partials = c.scratch("partials", (slices, N, K))
    operands |= {"out": partials, "k_per_split": split}
    c.launch(gemm, operands, constants | {"MODE": MODES["store"]}, grid=lambda s: (tiles, split.count(s)), **options)
    reduce_splits(c, out, partials, split.count, N * K, mode)


def _kind(c: Lowering, dtype: str) -> str:
    """How operands of a dtype are multiplied: "bf16", "fp16", "fp32" or "tf32"."""
    return "tf32" if dtype == "fp32" and c.target.tf32 else dtype


def _constants(c: Lowering, t: gemm_config.GemmConfig) -> dict[str, Any]:
    """The constants of `gemm` that a configuration decides."""
    return {"BM": t.tile_m, "BN": t.tile_n, "BK": t.tile_k, "GROUP": t.group_m, "TF32": c.target.tf32 or None}


def shape_of(c: Lowering, activation: Tensor, weight: Tensor) -> dict[str, Any]:
    """The arguments `rows`, `most`, N and K of `append_gemm`, for an activation (..., C) and a weight (N, K)."""
    N, K = (int(n) for n in weight.shape)
    return {"rows": c.rows(activation), "most": activation.size // int(activation.shape[-1]), "N": N, "K": K}


@lowering("product", starts="y dx", also={"weight": PLANES}, views="x y pre residual dy dx")
@lowering("matmul_dx", starts="dx", also={"weight": PLANES}, views="dy dx")
@lowering("matmul", starts="y", also={"weight": PLANES}, views="x y")
def lower_matmul(op: Any, c: Lowering) -> None:
    """Plan y = x weight^T, or dx = dy weight, of an op with at most one fused op besides a bias (`append_gemm`)."""
    fused = [name for name in op.attrs.get("epilogues", ()) if name != "bias"]
    assert len(fused) <= 1, fused
    weight, more = weight_operand(op.weight), {"epilogue": "".join(fused)}
    if "dy" in op.inputs:
        more |= {"pre": op.inputs.get("pre"), "mode": mode(op, "dx"), **shape_of(c, op.dy, op.weight)}
        append_gemm(c, "nn", out=op.dx, a=op.dy, b=weight, **more)
    else:
        pre = op.outputs.get("pre", op.inputs.get("pre"))  # written with an activation, read with its derivative
        more |= {"bias": op.inputs.get("bias"), "residual": op.inputs.get("residual"), "pre": pre}
        append_gemm(c, "nt", out=op.y, a=op.x, b=weight, mode=mode(op, "y"), **more, **shape_of(c, op.x, op.weight))


@lowering("matmul_dw", starts="dweight", views="dy x")
def lower_weight_gradient(op: Any, c: Lowering) -> None:
    append_gemm(c, "tn", **_gradient_of(op, c))


@lowering("matmul_dw_dbias", starts="dweight dbias", views="x")
def lower_weight_and_bias_gradient(op: Any, c: Lowering) -> None:
    """On Hopper the bias's gradient (column sums of dy) comes from the weight gradient's tiles; elsewhere from a pass over dy."""
    arguments = _gradient_of(op, c)
    if fits_hopper_gemm(c, "tn", **arguments) and not fits_cublaslt(c, **arguments):
        return launch_hopper_gemm(c, "tn", **arguments, dbias=op.dbias, dbias_mode=mode(op, "dbias"))
    append_gemm(c, "tn", **arguments)
    lower_sums(c, bias_grad_partials, op.dy, {"dy": op.dy}, ["dbias"])


def _gradient_of(op: Any, c: Lowering) -> dict[str, Any]:
    """The arguments of `append_gemm` for an op's weight gradient."""
    return {"out": op.dweight, "a": op.dy, "b": op.x, "mode": mode(op, "dweight"), **shape_of(c, op.x, op.dweight)}
