"""GEMM with quantized weights (int8, int4, NF4; `program.quantization`).

Skinny GEMMs (decoding) are bound by reading the weights: their kernels (quantized_few.py, quantized_digits.py) read codes and
scales once and dequantize in registers, with a group's sum multiplied by its scale. With more rows (prefill) the usual GEMM runs,
and its B panels are dequantized while packing.

Shapes: x (rows, depth), codes (tiles, blocks, 128), scales (tiles, groups + 1, 16), out (rows, cols).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.gemm import gemm
from barellm.cpu.kernels.gemm.codes import Codes, Scales
from barellm.cpu.kernels.gemm.epilogue import Epilogue
from barellm.cpu.kernels.gemm.linear import gemm_kind, tokens_of, views_of
from barellm.cpu.kernels.gemm.packing import PackTask, uses_vnni
from barellm.cpu.kernels.gemm.quantized_digits import IntegerSkinnyGemm, digits_scratch_bytes, uses_integer_dot
from barellm.cpu.kernels.gemm.quantized_few import FEW, QuantizedSkinnyGemm
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.kernels.loss.cross_entropy import ALL_ROWS
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.tuning import select_config
from barellm.program.integers import ceil_div, round_up
from barellm.program.ops.base import Op
from barellm.program.quantization import BLOCK, TILE, scheme


def quantized_skinny_gemm(
    k: KernelBuilder, out, second, x, codes, scales, bias, other, *, cols: int, depth: int, weights: str,
    dims: tuple[str, ...], inner: int, epilogues: tuple[str, ...], mode: str, strides: tuple[tuple[str, int], ...] = (),
) -> None:  # fmt: skip
    """out (rows, cols) = x (rows, depth) @ weight and then the `epilogues`, for FEW rows at most; nothing if a run has more."""
    rows, apart = k.num_elements(dims, inner), dict(strides)

    def finish(col: Value) -> Epilogue:
        how: dict[str, Any] = {
            "cols": cols,
            "epilogues": epilogues,
            "mode": mode,
            "bias_in_registers": False,
            "strides": apart,
        }
        return Epilogue(k, col, Tile(1, TILE // k.lanes), out, second, bias, other, **how)

    with k.when(rows <= FEW):
        sizes = {"cols": cols, "depth": depth, "weights": weights, "stride": apart.get("a", depth)}
        kind = IntegerSkinnyGemm if uses_integer_dot(k.isa, weights) else QuantizedSkinnyGemm
        kind(k, x, codes, scales, rows, **sizes).run(finish)


class DequantizingPack:
    """A GEMM main loop that dequantizes the weight while it packs B panels."""

    quantized: tuple[Codes, Scales]

    def _pack(self: Any, into: Pointer, number: Value) -> PackTask:
        """Dequantizes KC block number % k_blocks of panel number // k_blocks. A chunk is a block of a vector of columns."""
        k, nr, pair = self.k, self.nr, uses_vnni(self.k.isa, self.a.dtype)
        codes, scales = self.quantized
        last, vectors = ceil_div(self.cols, TILE) - 1, nr // k.lanes
        col, p = number // self.k_blocks * nr, number % self.k_blocks
        length = self._kc_of((p + 1).equals(self.k_blocks) if self.k_blocks > 1 else None)
        first, out = p * (self.kc // BLOCK), into.as_dtype("i32")
        blocks = k.int(length) // BLOCK

        def write(block: Value, v: Value, elements: int) -> None:
            column = col + v * k.lanes
            tile, within = k.min(column // TILE, last), column % TILE
            at = first + block
            group = at * BLOCK // (codes.how.group or codes.blocks * BLOCK)
            scale = scales.load(tile, group, within) * scales.powers(tile, within)
            numbers = [x * scale for x in islice(codes.values(codes.block(tile, at), within), elements)]
            for i, vector in enumerate(_pairs(k, numbers) if pair else numbers):
                out.store_raw(k.bitcast(vector, k.ivec), (block * (BLOCK // (2 if pair else 1)) + i) * nr + v * k.lanes)

        def rest() -> None:
            if self.depth % BLOCK:
                ends = (p + 1).equals(self.k_blocks)
                with k.when(ends), k.loop(0, vectors) as v:
                    write(blocks, v, self.depth % BLOCK)

        return PackTask(k, blocks * vectors, lambda i: write(i // vectors, i % vectors, BLOCK), rest)


def _pairs(k: KernelBuilder, numbers: list[Value]) -> list[Value]:
    """VNNI pairs: neighbours rounded to bf16 in one 32-bit lane; an odd last one with zero."""
    halves = [k.to(k.op(k.ivec, f"zext {k.round_bf16(x).typed} to {k.ivec}"), k.ivec) for x in numbers]
    odd = [*halves[1::2], k.const(0, k.ivec)][: len(halves[::2])]
    return [a | (b << 16) for a, b in zip(halves[::2], odd, strict=True)]


class VectorGemm(DequantizingPack, gemm.VectorGemm):
    """On vector registers."""


class AmxGemm(DequantizingPack, gemm.AmxGemm):
    """On AMX tiles."""


def quantized_gemm(
    k: KernelBuilder, out, second, x, codes, scales, bias, other, row_begin, row_limit, *, cols: int, depth: int,
    weights: str, dims: tuple[str, ...], inner: int, epilogues: tuple[str, ...], mode: str, config: GemmConfig, least: int,
    strides: tuple[tuple[str, int], ...] = (),
) -> None:  # fmt: skip
    """The usual GEMM for rows [row_begin, row_begin + row_limit) of a run that has at least `least` rows."""
    how = scheme(weights)
    planned = k.num_elements(dims, inner)
    rows = k.select(planned < least, 0, k.min(planned - row_begin, row_limit))
    reader = Codes(k, codes, how, ceil_div(depth, BLOCK)), Scales(k, scales, how.groups(depth))

    def run(kind: Any, *operands: Any, **sizes: Any) -> None:
        product = kind(k, x, codes, rows, *operands, transposed=True, **sizes)
        product.quantized = reader
        product.run()

    gemm.multiply(
        k, (VectorGemm, AmxGemm), run, out, second, x, bias, other, cols=cols, depth=depth, epilogues=epilogues,
        mode=mode, config=config, strides=dict(strides),
    )  # fmt: skip


def append_quantized_gemm(
    c: Lowering, *, out: Any, x: Any, codes: Any, scales: Any, weights: str, cols: int, depth: int, like: Any,
    epilogues: tuple[str, ...] = (), second: Any = None, bias: Any = None, other: Any = None, mode: str = "store",
    rows: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `linear.append_gemm`, for quantized weights. `rows`: the (first, count) that a call does, which then does few
    rows too; without it there are two calls, of which a run needs one."""
    dtype = x[1] if isinstance(x, tuple) else x.dtype
    constants = {
        "cols": cols, "depth": depth, "weights": weights, "epilogues": epilogues, "mode": mode, **shape_of(like),
        **views_of(out=out, second=second, a=x, other=other),
    }  # fmt: skip
    operands = {"out": out, "second": second, "x": x, "codes": codes, "scales": scales, "bias": bias, "other": other}
    if rows is None:
        c.thread_scratch(_private(c.isa, weights, dtype, depth))
        c.call(quantized_skinny_gemm, operands, constants, writes="out second")
    most = tokens_of(like, rows or (0, 1 << 40))
    if rows is None and most <= FEW:
        return
    config = select_config(c, gemm_kind(True, epilogues), dtype, cols, depth, most)
    c.thread_scratch(gemm.gemm_scratch_bytes(c.isa, dtype, depth, config))
    first, count = rows or (0, ALL_ROWS)
    operands |= {"row_begin": first, "row_limit": count}
    constants |= {"config": config, "least": 0 if rows else FEW + 1}
    c.call(quantized_gemm, operands, constants, writes="out second")


def _private(isa: ISA, weights: str, dtype: str, depth: int) -> int:
    """Scratch bytes of a thread, for x."""
    if uses_integer_dot(isa, weights):
        return digits_scratch_bytes(scheme(weights), dtype, depth)
    return FEW * round_up(depth, max(BLOCK, isa.lanes)) * 4


@lowering("quantized_product", "quantized_matmul", also={"codes": "u4 i8"}, views="x y residual")
def quantized_product(op: Op, c: Lowering) -> None:
    """A linear layer with a quantized weight, with its epilogues."""
    append_quantized_gemm(
        c, out=op.y, x=op.x, codes=op.codes, scales=op.scales, weights=op.weights, cols=op.columns,
        depth=int(op.x.shape[-1]), like=op.x, bias=op.inputs.get("bias"), second=op.outputs.get("pre"),
        other=op.inputs.get("residual"), epilogues=op.attrs.get("epilogues", ()),
    )  # fmt: skip
