"""GEMM with quantized weights (int8, int4, NF4; `program.quantization`).

Skinny GEMMs (decoding) are bound by reading the weights: their kernels (quantized_few.py, quantized_digits.py) read codes and
scales once and dequantize in registers, with a group's sum multiplied by its scale. With more rows (prefill) the usual GEMM runs,
and its B panels are dequantized while packing.

Shapes: x (rows, depth), codes (tiles, blocks, 128), scales (tiles, groups + 1, 16), out (rows, cols)."""

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import ISA, Lowering, Op, Value, lowering
from barellm.cpu.kernels.gemm import epilogue, gemm, gemm_mainloop, linear, packing, quantized_digits, quantized_few
from barellm.cpu.kernels.gemm.codes import Codes, Scales
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.kernels.loss.cross_entropy import ALL_ROWS
from barellm.cpu.tuning import select_config
from barellm.program.integers import ceil_div, round_up
from barellm.program.quantization import BLOCK, TILE, scheme


def quantized_skinny_gemm(k, out, second, x, codes, scales, bias, other, *, cols: int, depth: int, weights: str,
        dims: tuple[str, ...], inner: int, epilogues: tuple[str, ...], mode: str,
        strides: tuple[tuple[str, int], ...] = ()) -> None:  # fmt: skip
    """The kernel: out (rows, cols) = x (rows, depth) @ weight, then the `epilogues`, for FEW rows at most; nothing if a run has
    more. `codes`, `scales`: the weight (cols, depth), of quantization scheme `weights`; the rest as in `gemm.gemm`."""
    rows, row_strides = k.num_elements(dims, inner), dict(strides)
    make_epilogue = partial(epilogue.Epilogue, k, Tile(1, TILE // k.lanes), out, second, bias, other, cols=cols,
        epilogues=epilogues, mode=mode, bias_in_registers=False, strides=row_strides)  # fmt: skip
    integer = quantized_digits.uses_integer_dot(k.isa, weights)
    kernel = quantized_digits.IntegerSkinnyGemm if integer else quantized_few.QuantizedSkinnyGemm
    with k.when(rows <= quantized_few.FEW):
        sizes = {"cols": cols, "depth": depth, "weights": weights, "stride": row_strides.get("a", depth)}
        kernel(k, x, codes, scales, rows, **sizes).run(make_epilogue)


@dataclass(frozen=True)
class QuantizedWeight:
    """The weight of a GEMM main loop, which is dequantized while B panels are packed."""

    codes: Codes
    scales: Scales

    def pack(self, loop: gemm_mainloop.GemmMainloop, into, panel_id) -> packing.PackTask:
        """The task that dequantizes KC block panel_id % k_blocks of a panel of the weight into a packed B panel (KC, NR)."""
        if loop.transposed:
            return DequantizeFprop(self, loop, into, panel_id, BLOCK, loop.nr // loop.k.lanes)
        return DequantizeDgrad(self, loop, into, panel_id, TILE, ceil_div(loop.nr, BLOCK))

    @property
    def group_elements(self) -> int:
        """Elements of a row of the matrix that share a scale."""
        return self.codes.how.group or self.codes.blocks * BLOCK

    def scale(self, tile, group, within) -> Value:
        """The scales of a group, of the `lanes` rows of the matrix from row `within` of a tile of rows on."""
        return self.scales.load(tile, group, within) * self.scales.powers(tile, within)


class DequantizePanel(packing.PackTask):
    """Dequantizes a KC block of a panel to `out` [k unit][NR], fp32 or VNNI pairs. A chunk is `step` elements of the depth of one
    of `pieces` groups of columns."""

    def __init__(self, weight: QuantizedWeight, loop: gemm_mainloop.GemmMainloop, into, panel_id, step: int, pieces: int) -> None:
        """`col`, `k_block`, `depth`: first column, number and depth of block `panel_id`; `first`: its first step."""
        self.weight, self.loop, self.vnni = weight, loop, packing.uses_vnni(loop.k.isa, loop.a.dtype)
        self.col, self.k_block, depth = loop.block_of_panel(panel_id)
        self.first, self.out = self.k_block * (loop.kc // step), into.as_dtype("i32")
        self.depth, self.step_size, self.pieces = loop.k.int(depth), step, pieces
        super().__init__(loop.k, self.depth // step * pieces)

    @abstractmethod
    def dequantize(self, number, piece, elements: int) -> None:
        """The first `elements` of step `number` of the depth, of group `piece` of the columns."""

    def chunk(self, i) -> None:
        self.dequantize(i // self.pieces, i % self.pieces, self.step_size)

    def pack_tail(self) -> None:
        k, rest = self.k, self.loop.depth % self.step_size
        if rest:
            with k.when((self.k_block + 1).equals(self.loop.k_blocks)), k.loop(0, self.pieces) as piece:
                self.dequantize(self.depth // self.step_size, piece, rest)


class DequantizeFprop(DequantizePanel):
    """Of a stored matrix whose rows are columns of B. A chunk is a block of the depth x a vector of columns."""

    def dequantize(self, block, v, elements: int) -> None:
        """The first `elements` rows of a block, of vector v of the columns. Columns behind the last tile repeat it."""
        k, nr, codes, last_tile = self.k, self.loop.nr, self.weight.codes, ceil_div(self.loop.cols, TILE) - 1
        column = self.col + v * k.lanes
        tile, within = k.min(column // TILE, last_tile), column % TILE
        at = self.first + block  # block of the stored row
        scale = self.weight.scale(tile, at * BLOCK // self.weight.group_elements, within)
        numbers = [x * scale for x in islice(codes.values(codes.block(tile, at), within), elements)]
        for i, vector in enumerate(_vnni_pairs(k, numbers) if self.vnni else numbers):
            self.out.store_raw(k.bitcast(vector, k.ivec), (block * (BLOCK // (2 if self.vnni else 1)) + i) * nr + v * k.lanes)


class DequantizeDgrad(DequantizePanel):
    """Of a stored matrix whose rows are the depth. A chunk is TILE rows x BLOCK columns, transposed in registers."""

    def dequantize(self, tile, i, rows: int) -> None:
        """The first `rows` rows of a tile, in the panel's block i. Columns behind the last block repeat it."""
        k, codes, unit_rows = self.k, self.weight.codes, 2 if self.vnni else 1
        wanted = self.col // BLOCK + i  # block of columns
        block, at, here = k.min(wanted, codes.blocks - 1), wanted * BLOCK - self.col, self.first + tile
        group = block * BLOCK // self.weight.group_elements  # of the stored rows
        for within in range(0, rows, k.lanes):
            scale = self.weight.scale(here, group, within)
            numbers = [x * scale for x in codes.values(codes.block(here, block), within)]
            pairs = f"<{k.lanes // 2} x i32>"
            units = [k.bitcast(k.round_bf16(x), pairs) if self.vnni else k.bitcast(x, k.ivec) for x in numbers]
            unit = (tile * TILE + within) // unit_rows
            for n, row in enumerate(_transpose_columns(k, units)[: ceil_div(min(rows - within, k.lanes), unit_rows)]):
                self._store(row, unit + n, at)

    def _store(self, row, unit, at) -> None:
        """Store the columns of a unit, in vectors of them; those that are another panel's are left out."""
        k, nr, width = self.k, self.loop.nr, BLOCK // len(row)
        for j, vector in enumerate(row):
            column = at + j * width
            with nullcontext() if nr % BLOCK == 0 else k.when((column >= 0) & (column < nr)):
                k.line(f"store {vector.typed}, ptr {self.out.at(unit * nr + column).ref}, align 4")


def _transpose_columns(k, columns) -> list[list[Value]]:
    """The rows of BLOCK columns, each a vector of i32: of every row one vector of BLOCK lanes, or two of half as many. Three
    perfect shuffles of all lanes turn the number of the column, the upper bits of a lane's place, into its lower bits."""
    lanes = int(columns[0].type.split()[0][1:])
    low, high = ([j // 2 + j % 2 * lanes + half for j in range(lanes)] for half in (0, lanes // 2))
    for _ in range(BLOCK.bit_length() - 1):
        halves = zip(columns[: BLOCK // 2], columns[BLOCK // 2 :], strict=True)
        columns = [k.shuffle(a, b, order) for a, b in halves for order in (low, high)]
    width = min(BLOCK, lanes)
    parts = [k.shuffle(v, None, list(range(i, i + width))) if lanes > width else v for v in columns for i in range(0, lanes, width)]
    each = BLOCK // width  # vectors of a row
    return [parts[i : i + each] for i in range(0, len(parts), each)]


def _vnni_pairs(k, numbers) -> list[Value]:
    """VNNI pairs of fp32 vectors: neighbours rounded to bf16 in one 32-bit lane; an odd last one with zero."""
    halves = [k.to(k.op(k.ivec, f"zext {k.round_bf16(x).typed} to {k.ivec}"), k.ivec) for x in numbers]
    odd = [*halves[1::2], k.const(0, k.ivec)][: len(halves[::2])]
    return [a | (b << 16) for a, b in zip(halves[::2], odd, strict=True)]


def quantized_gemm(k, out, second, x, codes, scales, bias, other, row_begin, row_limit, *, cols: int, depth: int, weights: str,
        dims: tuple[str, ...], inner: int, least: int, strides: tuple[tuple[str, int], ...] = (), transposed: bool = True,
        **options) -> None:  # fmt: skip
    """The kernel: out (rows, cols) = x (rows, depth) @ weight with `epilogues`, for rows [row_begin, row_begin + row_limit) of a
    run that has at least `least` rows. `codes`, `scales`: the stored matrix, of scheme `weights`, which is dequantized while B
    panels are packed; `transposed`: it is (cols, depth), else (depth, cols). `options`: see `gemm.run_mainloop`."""
    how = scheme(weights)
    planned = k.num_elements(dims, inner)
    rows = k.select(planned < least, 0, k.min(planned - row_begin, row_limit))
    width = depth if transposed else cols  # of a row of the matrix
    weight = QuantizedWeight(Codes(k, codes, how, ceil_div(width, BLOCK)), Scales(k, scales, how.groups(width)))
    sizes = {"cols": cols, "depth": depth, "transposed": transposed, "strides": dict(strides)}
    gemm.run_mainloop(k, out, second, x, weight, rows, bias, other, streams=False, **sizes, **options)


def append_quantized_gemm(c: Lowering, *, out, x, codes, scales, weights: str, cols: int, depth: int, like,
        epilogues: tuple[str, ...] = (), second=None, bias=None, other=None, mode: str = "store",
        rows: tuple[int, int] | None = None, transposed: bool = True) -> None:  # fmt: skip
    """Append the call(s) of out (rows, cols) = x (rows, depth) @ weight with `epilogues`; parameters as in `linear.append_gemm`,
    with `codes`, `scales` and the scheme's name `weights` for the weight. None for `rows`: two calls, a skinny and a usual GEMM, of
    which a run does one. `rows` (first, count): one call, of the usual GEMM. `transposed`: see `quantized_gemm`."""
    dtype = x[1] if isinstance(x, tuple) else x.dtype
    constants = {"cols": cols, "depth": depth, "weights": weights, "epilogues": epilogues, "mode": mode, **shape_of(like),
        **linear.views_of(out=out, second=second, a=x, other=other)}  # fmt: skip
    operands = {"out": out, "second": second, "x": x, "codes": codes, "scales": scales, "bias": bias, "other": other}
    if rows is None:
        c.thread_scratch(_skinny_scratch_bytes(c.isa, weights, dtype, depth))
        c.call(quantized_skinny_gemm, operands, constants, writes="out second")
    max_rows = linear.tokens_of(like, rows or (0, ALL_ROWS))
    if rows is None and max_rows <= quantized_few.FEW:
        return
    config = select_config(c, linear.gemm_kind(transposed, epilogues), dtype, cols, depth, max_rows)
    c.thread_scratch(gemm.gemm_scratch_bytes(c.isa, dtype, depth, config))
    first, count = rows or (0, ALL_ROWS)
    operands |= {"row_begin": first, "row_limit": count}
    constants |= {"config": config, "least": 0 if rows else quantized_few.FEW + 1, "transposed": transposed}
    c.call(quantized_gemm, operands, constants, writes="out second")


def _skinny_scratch_bytes(isa: ISA, weights: str, dtype: str, depth: int) -> int:
    """Scratch bytes of a thread of the skinny GEMM, for x: as digits, or zero-padded fp32."""
    if quantized_digits.uses_integer_dot(isa, weights):
        return quantized_few.FEW * quantized_digits.row_bytes(scheme(weights), dtype, depth)
    return quantized_few.FEW * round_up(depth, max(BLOCK, isa.lanes)) * 4


@lowering("quantized_product", "quantized_matmul", also={"codes": "u4 i8"}, views="x y residual")
def quantized_product(op: Op, c: Lowering) -> None:
    """A linear layer with a quantized weight, with its epilogues."""
    append_quantized_gemm(c, out=op.y, x=op.x, codes=op.codes, scales=op.scales, weights=op.weights, cols=op.columns,
        depth=int(op.x.shape[-1]), like=op.x, bias=op.inputs.get("bias"), second=op.outputs.get("pre"),
        other=op.inputs.get("residual"), epilogues=op.attrs.get("epilogues", ()))  # fmt: skip


@lowering("quantized_matmul_dx", adds="dx", also={"codes": "u4 i8"}, views="dy dx")
def quantized_matmul_dx(op: Op, c: Lowering) -> None:
    """Dgrad of a linear layer with a quantized weight."""
    append_quantized_gemm(c, out=op.dx, x=op.dy, codes=op.codes, scales=op.scales, weights=op.weights, cols=op.depth,
        depth=op.columns, like=op.dy, mode=op.modes["dx"], rows=(0, ALL_ROWS), transposed=False)  # fmt: skip
