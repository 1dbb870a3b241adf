"""Products with weights of few bits (`program.quantization`).

A few rows, as decoding has them, cost what reading the weights costs. So their kernel goes once through codes and scales and turns
them into numbers in registers. The numbers of a group are multiplied as they are, in several chains that do not wait for each
other, and the sum of a group is multiplied by its scale. More rows, as those of a prompt, take the kernel of all other products:
its panels are made of codes instead of numbers.

Shapes: x (rows, depth), codes (tiles, blocks, 128), scales (tiles, groups, 16), out (rows, cols).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from itertools import islice
from typing import Any

from barellm.cpu.choices import Choice, Tile
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels import gemm
from barellm.cpu.kernels.codes import Codes, Scales
from barellm.cpu.kernels.cross_entropy import ALL_ROWS
from barellm.cpu.kernels.epilogue import Epilogue
from barellm.cpu.kernels.linear import role_of, tokens_of, views_of
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.kernels.packing import LINE, Packing, paired
from barellm.cpu.lang import Pointer, Value, Var
from barellm.cpu.tuning import choose
from barellm.program.integers import ceil_div, round_up
from barellm.program.ops.base import Op
from barellm.program.quantization import BLOCK, TILE, scheme

ROWS = (1, 2, 4)  # that are multiplied with numbers in registers; three are done as four
FEW = ROWS[-1]
CHAINS = 4  # sums that do not wait for each other: as many as hide the latency of a multiply-add
CLAIM_BYTES = 1 << 15  # of codes that a thread claims at once: some two microseconds of reading
AHEAD = 16  # blocks of codes that are on their way into the first cache
TOGETHER = 4  # blocks in a turn of the loop, where a block is few vectors


class FewRows:
    """One thread's part of a product with FEW rows at most."""

    def __init__(
        self, k: KernelBuilder, x: Pointer, codes: Pointer, scales: Pointer, rows: Value, *, cols: int, depth: int,
        weights: str, stride: int,
    ) -> None:  # fmt: skip
        """`stride`: elements from a row of x to the next."""
        self.k, self.rows, self.cols, self.how = k, rows, cols, scheme(weights)
        self.blocks, self.groups = ceil_div(depth, BLOCK), self.how.groups(depth)
        self.vectors = TILE // k.lanes
        self.codes, self.scales = Codes(k, codes, self.how, self.blocks), Scales(k, scales, self.groups)
        self.pair = paired(k.isa, x.dtype) and bool(self.how.table)
        self.x, self.stride = x, stride
        if depth % BLOCK or not (self.pair or x.dtype == "fp32"):
            self._copy(depth)

    def _copy(self, depth: int) -> None:
        """x as the multiply-adds take it, in this thread's scratch: as fp32, or bf16 if in pairs, and zeros behind each row."""
        k, length = self.k, self.blocks * BLOCK
        copied = k.private("bf16" if self.pair else "fp32")
        with k.loop(0, self.rows) as row:
            for at, mask in ((length - BLOCK + v, None) for v in range(0, BLOCK, min(k.lanes, BLOCK))):
                copied.store(0.0, row * length + at, mask if k.lanes <= BLOCK else k.mask_first(BLOCK))
            with k.loop(0, depth - depth % k.lanes, k.lanes) as c:
                copied.store(self.x.at(row * self.stride).load(c), row * length + c)
            if depth % k.lanes:
                c, mask = depth - depth % k.lanes, k.mask_first(depth % k.lanes)
                copied.store(self.x.at(row * self.stride).load(c, mask), row * length + c, mask)
        self.x, self.stride = copied, length

    def run(self, finish: Any) -> None:
        """`finish(column)` makes the epilogue of a tile."""
        k, tiles = self.k, ceil_div(self.cols, TILE)
        grain = max(1, CLAIM_BYTES // (self.blocks * self.codes.block_bytes))
        with k.claim(tiles, grain) as (begin, end), k.loop(begin, end) as tile:
            for fewer, rows in zip((0, *ROWS), ROWS, strict=False):
                with k.when((self.rows > fewer) & (self.rows <= rows)):
                    sums = self._tile(tile, rows)
                    epilogue = finish(tile * TILE)
                    for r, values in enumerate(sums):
                        with k.when(self.rows > r) if r > fewer else nullcontext():
                            for v, x in enumerate(values):
                                epilogue.put(k.int(r), v, x)

    def _tile(self, tile: Value, rows: int) -> list[list[Value]]:
        """The finished sums of 16 columns: a vector for each `lanes` of them, of each row."""
        k = self.k
        totals = [[k.var_vec(0.0) for _ in range(self.vectors)] for _ in range(rows)]
        each = (self.how.group or self.blocks * BLOCK) // BLOCK  # blocks of a group
        whole, rest = self.blocks // each, self.blocks % each
        with k.loop(0, whole) as group:
            self._group(tile, group, each, totals)
        if rest:
            self._group(tile, k.int(whole), rest, totals)
        return [[v.value for v in row] for row in totals]

    def _group(self, tile: Value, group: Value, blocks: int, totals: list[list[Var]]) -> None:
        """Adds the products of a group of so many `blocks`."""
        k, rows = self.k, len(totals)
        ways = max(1, CHAINS // (self.vectors * rows))
        sums = [[[k.var_vec(0.0) for _ in range(ways)] for _ in range(self.vectors)] for _ in range(rows)]
        first = group * ((self.how.group or 0) // BLOCK)
        together = TOGETHER if self.vectors <= 2 else 1
        with k.loop(0, blocks - blocks % together, together) as b:
            for i in range(together):
                self._block(tile, first + (b + i), sums)
        for i in range(blocks - blocks % together, blocks):
            self._block(tile, first + i, sums)
        for v in range(self.vectors):
            scale = self.scales.load(tile, group, v * k.lanes)
            for r in range(rows):
                total = reduce(lambda a, b: a + b, [chain.value for chain in sums[r][v]])
                totals[r][v].value = k.fma(total, scale, totals[r][v].value)

    def _block(self, tile: Value, block: Value, sums: list[list[list[Var]]]) -> None:
        k = self.k
        p = self.codes.block(tile, block)
        for line in range(0, self.codes.block_bytes, LINE):
            k.prefetch(p.bytes(AHEAD * self.codes.block_bytes + line))
        read = self.codes.pairs if self.pair else self.codes.values
        for i, right in enumerate(zip(*(read(p, v * k.lanes) for v in range(self.vectors)), strict=True)):
            for r, of_row in enumerate(sums):
                left = self._broadcast(r, block, i)
                for chains, w in zip(of_row, right, strict=True):
                    chain = chains[i % len(chains)]
                    chain.value = k.dot(chain.value, left, w) if self.pair else k.fma(left, w, chain.value)

    def _broadcast(self, row: int, block: Value, i: int) -> Value:
        """Element i, or pair i, of a block of a row of x, in all lanes. Rows that are not there are the last one."""
        k = self.k
        last = k.int(row) if row == 0 else k.min(self.rows - 1, row)
        p = self.x.at(block * BLOCK + last * self.stride)
        return k.splat(k.op("i32", f"load i32, ptr {p.bytes(4 * i).ref}, align 2") if self.pair else p.get(i))


def quantized_few_rows(
    k: KernelBuilder, out, second, x, codes, scales, bias, other, *, cols: int, depth: int, weights: str,
    dims: tuple[str, ...], inner: int, epilogues: tuple[str, ...], mode: str, strides: tuple[tuple[str, int], ...] = (),
) -> None:  # fmt: skip
    """out (rows, cols) = x (rows, depth) @ weight and then the `epilogues`, for FEW rows at most; nothing if a run has more."""
    rows, apart = k.extent(dims, inner), dict(strides)

    def finish(col: Value) -> Epilogue:
        how: dict[str, Any] = {"cols": cols, "epilogues": epilogues, "mode": mode, "early": False, "strides": apart}
        return Epilogue(k, col, Tile(1, TILE // k.lanes), out, second, bias, other, **how)

    with k.when(rows <= FEW):
        sizes = {"cols": cols, "depth": depth, "weights": weights, "stride": apart.get("a", depth)}
        FewRows(k, x, codes, scales, rows, **sizes).run(finish)


class _OfCodes:
    """A product whose panels are made of codes."""

    quantized: tuple[Codes, Scales]

    def _pack(self: Any, into: Pointer, number: Value) -> Packing:
        """Part number % parts of the depth, of panel number // parts. A chunk is a block of a vector of columns."""
        k, span, pair = self.k, self.span, paired(self.k.isa, self.a.dtype)
        codes, scales = self.quantized
        last, vectors = ceil_div(self.cols, TILE) - 1, span // k.lanes
        col, p = number // self.parts * span, number % self.parts
        length = self._length((p + 1).equals(self.parts) if self.parts > 1 else None)
        first, out = p * (self.part // BLOCK), into.as_dtype("i32")
        blocks = k.int(length) // BLOCK

        def write(block: Value, v: Value, elements: int) -> None:
            column = col + v * k.lanes
            tile, within = k.min(column // TILE, last), column % TILE
            at = first + block
            group = at * BLOCK // (codes.how.group or codes.blocks * BLOCK)
            scale = scales.load(tile, group, within)
            numbers = [x * scale for x in islice(codes.values(codes.block(tile, at), within), elements)]
            for i, vector in enumerate(_pairs(k, numbers) if pair else numbers):
                out.store_raw(
                    k.bitcast(vector, k.ivec), (block * (BLOCK // (2 if pair else 1)) + i) * span + v * k.lanes
                )

        def rest() -> None:
            if self.depth % BLOCK:
                ends = (p + 1).equals(self.parts)
                with k.when(ends), k.loop(0, vectors) as v:
                    write(blocks, v, self.depth % BLOCK)

        return Packing(k, blocks * vectors, lambda i: write(i // vectors, i % vectors, BLOCK), rest)


def _pairs(k: KernelBuilder, numbers: list[Value]) -> list[Value]:
    """Neighbours rounded to bf16 in one 32-bit lane; beside an odd last one zero."""
    halves = [k.to(k.op(k.ivec, f"zext {k.round_bf16(x).typed} to {k.ivec}"), k.ivec) for x in numbers]
    odd = [*halves[1::2], k.const(0, k.ivec)][: len(halves[::2])]
    return [a | (b << 16) for a, b in zip(halves[::2], odd, strict=True)]


class RegisterProduct(_OfCodes, gemm.RegisterProduct):
    """On register tiles."""


class AmxProduct(_OfCodes, gemm.AmxProduct):
    """On AMX tiles."""


def quantized_rows(
    k: KernelBuilder, out, second, x, codes, scales, bias, other, row_begin, row_limit, *, cols: int, depth: int,
    weights: str, dims: tuple[str, ...], inner: int, epilogues: tuple[str, ...], mode: str, choice: Choice, least: int,
    strides: tuple[tuple[str, int], ...] = (),
) -> None:  # fmt: skip
    """The same for rows [row_begin, row_begin + row_limit) of a run that has at least `least`."""
    how = scheme(weights)
    extent = k.extent(dims, inner)
    rows = k.select(extent < least, 0, k.min(extent - row_begin, row_limit))
    reader = Codes(k, codes, how, ceil_div(depth, BLOCK)), Scales(k, scales, how.groups(depth))

    def run(kind: Any, *operands: Any, **sizes: Any) -> None:
        product = kind(k, x, codes, rows, *operands, transposed=True, **sizes)
        product.quantized = reader
        product.run()

    gemm.multiply(
        k, (RegisterProduct, AmxProduct), run, out, second, x, bias, other, cols=cols, depth=depth, epilogues=epilogues,
        mode=mode, choice=choice, strides=dict(strides),
    )  # fmt: skip


def append_quantized(
    c: Lowering, *, out: Any, x: Any, codes: Any, scales: Any, weights: str, cols: int, depth: int, like: Any,
    epilogues: tuple[str, ...] = (), second: Any = None, bias: Any = None, other: Any = None, mode: str = "store",
    rows: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """As `append_product` does it for weights that are numbers. `rows`: the (first, count) that a call does, which then does few
    rows too; without it there are two calls, of which a run needs one."""
    dtype = x[1] if isinstance(x, tuple) else x.dtype
    constants = {
        "cols": cols, "depth": depth, "weights": weights, "epilogues": epilogues, "mode": mode, **shape_of(like),
        **views_of(out=out, second=second, a=x, other=other),
    }  # fmt: skip
    operands = {"out": out, "second": second, "x": x, "codes": codes, "scales": scales, "bias": bias, "other": other}
    if rows is None:
        c.private(FEW * round_up(depth, max(BLOCK, c.isa.lanes)) * 4)
        c.call(quantized_few_rows, operands, constants, writes="out second")
    most = tokens_of(like, rows or (0, 1 << 40))
    if rows is None and most <= FEW:
        return
    choice = choose(c.isa, role_of(True, epilogues), dtype, cols, depth, most, c.threads)
    c.private(gemm.product_private(c.isa, dtype, depth, choice))
    first, count = rows or (0, ALL_ROWS)
    operands |= {"row_begin": first, "row_limit": count}
    constants |= {"choice": choice, "least": 0 if rows else FEW + 1}
    c.call(quantized_rows, operands, constants, writes="out second")


@lowering("quantized_product", "quantized_matmul", also={"codes": "u4 i8"}, views="x y residual")
def quantized_product(op: Op, c: Lowering) -> None:
    """A product with codes, with what follows it."""
    append_quantized(
        c, out=op.y, x=op.x, codes=op.codes, scales=op.scales, weights=op.weights, cols=op.columns,
        depth=int(op.x.shape[-1]), like=op.x, bias=op.inputs.get("bias"), second=op.outputs.get("pre"),
        other=op.inputs.get("residual"), epilogues=op.attrs.get("epilogues", ()),
    )  # fmt: skip
