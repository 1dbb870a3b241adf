"""FP8 GEMMs (E4M3, E5M2), emulated: operands are converted to the shortest float that this processor multiplies, then the usual
GEMMs run. Exact: both formats are subsets of bf16, and accumulation is in fp32 as on FP8 hardware.

Shapes: x (..., K), weight (K, N), y (..., N), scales (1,)."""

from typing import Any

from barellm.cpu.kernel import Lowering, Op, Tensor, Value, kernel, lowering
from barellm.cpu.kernels.gemm import amx, gemm, linear, packing, weight_gradient
from barellm.cpu.kernels.loops import elementwise, flat, shape_of
from barellm.cpu.kernels.loss.cross_entropy import ALL_ROWS
from barellm.cpu.kernels.pointwise.elementwise import cast
from barellm.cpu.tuning import select_config
from barellm.program.dtypes import EIGHTS, LARGEST, PLANES


@kernel("quantise", also={"x": PLANES, "y": EIGHTS}, constants=lambda op: {"per_target": op.per_target, **flat(op.y)})
def quantise(k, y, x, scale, *, per_target, dims, width) -> None:
    """y = x / scale, rounded to the 8-bit dtype of y. `per_target` (gradients): the scale is multiplied by inv_targets."""
    divisor = scale.get(0)
    if per_target:
        divisor = divisor * k.to(k.scalar("inv_targets"), "float")
    divisor = k.splat(divisor)
    for i, mask, put in elementwise(k, k.num_elements(dims) * width, y, unroll=4):
        put(x.load(i, mask) / divisor)


def dequantization_factor(k, one, other, *, per_target: bool) -> Value:
    """What accumulators are multiplied with, in all lanes: the product of both operands' scales."""
    by = one.get(0) * other.get(0)
    return k.splat(by * k.to(k.scalar("inv_targets"), "float") if per_target else by)


def scaled_product(k, out, a, weight, scale, other, *, per_target, **how) -> None:
    """out = a @ weight times both scales, `scale` and `other`; the constants `how` are those of `gemm`."""
    by = dequantization_factor(k, scale, other, per_target=per_target)
    gemm.gemm(k, out, None, a, weight, None, None, k.int(0), k.int(ALL_ROWS), epilogues=("times",), scale=by, **how)


def scaled_weight_gradient(k, dweight, dy, x, scale, other, **how) -> None:
    """dweight = dy^T @ x times both scales, `scale` and `other`; the constants `how` are those of `weight_gradient`."""
    by = dequantization_factor(k, scale, other, per_target=True)
    weight_gradient.weight_gradient(k, dweight, dy, x, k.int(0), k.int(ALL_ROWS), scale=by, **how)


def append_decode(c: Lowering, name: str, codes: Tensor) -> Tensor:
    """Append the conversion of an FP8 operand to the dtype of the emulated GEMM, bf16 where the ISA multiplies it, in a workspace,
    which is returned; other dtypes as they are."""
    if codes.dtype not in LARGEST:
        return codes
    dtype = "bf16" if packing.uses_vnni(c.isa, "bf16") or amx.uses_tiles(c.isa, "bf16") else "fp32"
    t = Tensor(f"{c.op.name}.{name}", codes.shape, dtype, "scratch")
    c.scratch_tensors.append(t)
    c.call(cast, {"y": t, "x": codes}, {"columns": None, "mode_y": "store", **shape_of(t), **flat(t)}, writes="y")
    return t


def append_fp8_gemm(c: Lowering, out: Tensor, a: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], *, transposed: bool,
        mode: str) -> None:  # fmt: skip
    """Append out = a @ weight with the `scales` (1) of both, of FP8 operands that are decoded first: fprop (`transposed`: weight
    (N, K) is read as (cols, depth)) or dgrad."""
    x, w = append_decode(c, "x", a), append_decode(c, "weight", weight)
    N, K = (int(n) for n in w.shape)
    cols, depth = (N, K) if transposed else (K, N)
    config = select_config(c, linear.gemm_kind(transposed, ()), x.dtype, cols, depth, linear.tokens_of(x, (0, ALL_ROWS)))
    c.thread_scratch(gemm.gemm_scratch_bytes(c.isa, x.dtype, depth, config))
    constants: dict[str, Any] = {"cols": cols, "depth": depth, "transposed": transposed, "mode": mode}
    constants |= {"config": config, "per_target": transposed, **shape_of(x)}
    operands = {"out": out, "a": x, "weight": w, "scale": scales[0], "other": scales[1]}
    c.call(scaled_product, operands, constants, writes="out")


@lowering("scaled_matmul", also={"x": EIGHTS, "weight": EIGHTS})
def scaled_matmul(op: Op, c: Lowering) -> None:
    append_fp8_gemm(c, op.y, op.x, op.weight, (op.x_scale, op.weight_scale), transposed=False, mode="store")


@lowering("scaled_matmul_dx", adds="dx", also={"dy": EIGHTS, "weight": EIGHTS})
def scaled_matmul_dx(op: Op, c: Lowering) -> None:
    scales = op.dy_scale, op.weight_scale
    append_fp8_gemm(c, op.dx, op.dy, op.weight, scales, transposed=True, mode=op.modes["dx"])


@lowering("scaled_matmul_dw", starts="dweight", also={"x": EIGHTS, "dy": EIGHTS})
def scaled_matmul_dw(op: Op, c: Lowering) -> None:
    x, dy = append_decode(c, "x", op.x), append_decode(c, "dy", op.dy)
    N, K = (int(n) for n in op.dweight.shape)
    tokens = linear.tokens_of(x, (0, ALL_ROWS))
    config = select_config(c, "weight_gradient", x.dtype, K, tokens, N)
    c.thread_scratch(weight_gradient.wgrad_scratch_bytes(c.isa, x.dtype, tokens, config))
    constants = {"N": N, "K": K, "mode": op.modes["dweight"], "config": config, **shape_of(x)}
    operands = {"dweight": op.dweight, "dy": x, "x": dy, "scale": op.x_scale, "other": op.dy_scale}
    c.call(scaled_weight_gradient, operands, constants, writes="dweight")
