"""Skinny GEMM (M <= 4) with a quantized weight, dequantized in registers by a 16-byte table look-up (pshufb, tbl).

Shapes: x (rows, depth), codes (tiles, blocks, 128), scales (tiles, groups + 1, 16)."""

from contextlib import nullcontext
from functools import reduce

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.gemm.codes import Codes, Scales
from barellm.cpu.kernels.gemm.packing import LINE, uses_vnni
from barellm.program.integers import ceil_div
from barellm.program.quantization import BLOCK, TILE, scheme

ROWS = (1, 2, 4)  # values of M with code of their own; three is done as four
FEW = ROWS[-1]
CHAINS = 4  # independent accumulation chains: as many as hide the latency of a multiply-add
ITEM_BYTES = 1 << 15  # of codes in a work item: some two microseconds of reading
PREFETCH_BLOCKS = 16  # prefetch distance into the L1, in blocks of codes
UNROLL = 4  # of the loop over blocks, where a block is few vectors


class QuantizedSkinnyGemm:
    """One thread's loop over tiles of 16 columns, M <= FEW."""

    def __init__(self, k, x, codes, scales, rows, *, cols: int, depth: int, weights: str, stride: int) -> None:
        """The GEMM out = x (rows, depth) @ weight (cols, depth)^T; codes (tiles, blocks, 128) and scales (tiles, groups + 1, 16) of
        scheme `weights`. `stride`: elements from a row of x to the next."""
        self.k, self.rows, self.cols, self.how = k, rows, cols, scheme(weights)
        self.blocks, self.groups = ceil_div(depth, BLOCK), self.how.groups(depth)
        self.vectors = TILE // k.lanes
        self.codes, self.scales = Codes(k, codes, self.how, self.blocks), Scales(k, scales, self.groups)
        self.depth, self.x, self.stride = depth, x, stride
        self.group = self.how.group  # elements of x whose sum is multiplied by a scale; 0: all
        self._prepare_x()

    def _prepare_x(self) -> None:
        """Prepares x before the first work item."""
        self.pair = uses_vnni(self.k.isa, self.x.dtype) and bool(self.how.table)
        if self.depth % BLOCK or not (self.pair or self.x.dtype == "fp32"):
            self._copy_x(self.depth)

    def _copy_x(self, depth: int) -> None:
        """Copy x to this thread's scratch [rows][blocks * BLOCK], as fp32, or bf16 for pairs; rows of `depth` are zero-padded."""
        k, length = self.k, self.blocks * BLOCK
        copied = k.thread_scratch("bf16" if self.pair else "fp32")
        with k.loop(0, self.rows) as row:
            for at, mask in ((length - BLOCK + v, None) for v in range(0, BLOCK, min(k.lanes, BLOCK))):
                copied.store(0.0, row * length + at, mask if k.lanes <= BLOCK else k.mask_first(BLOCK))
            with k.loop(0, depth - depth % k.lanes, k.lanes) as c:
                copied.store(self.x.at(row * self.stride).load(c), row * length + c)
            if depth % k.lanes:
                c, mask = depth - depth % k.lanes, k.mask_first(depth % k.lanes)
                copied.store(self.x.at(row * self.stride).load(c, mask), row * length + c, mask)
        self.x, self.stride = copied, length

    def run(self, make_epilogue) -> None:
        """For each tile of 16 columns: the sums of 1, 2 or 4 rows, then the epilogue make_epilogue(first column)."""
        k, tiles = self.k, ceil_div(self.cols, TILE)
        grain = max(1, ITEM_BYTES // (self.blocks * self.codes.block_bytes))  # tiles of a work item
        with k.parallel_range(tiles, grain) as (begin, end), k.loop(begin, end) as tile:
            for fewer, rows in zip((0, *ROWS), ROWS, strict=False):
                with k.when((self.rows > fewer) & (self.rows <= rows)):
                    sums = self._sums_of_tile(tile, rows)
                    epilogue = make_epilogue(tile * TILE)
                    for r, values in enumerate(sums):
                        with k.when(self.rows > r) if r > fewer else nullcontext():
                            for v, x in enumerate(values):
                                epilogue.put(k.int(r), v, x)

    def _sums_of_tile(self, tile, rows: int) -> list[list[Value]]:
        """The finished sums of a tile of 16 columns: [row][vector] of fp32, a vector for each `lanes` columns."""
        k = self.k
        totals = [[k.var_vec(0.0) for _ in range(self.vectors)] for _ in range(rows)]
        group_blocks = (self.group or self.blocks * BLOCK) // BLOCK
        whole, rest = self.blocks // group_blocks, self.blocks % group_blocks
        with k.loop(0, whole) as group:
            self._accumulate_group(tile, group, group_blocks, totals)
        if rest:
            self._accumulate_group(tile, k.int(whole), rest, totals)
        return self._apply_powers(tile, totals)

    def _apply_powers(self, tile, totals) -> list[list[Value]]:
        """The totals times the powers of two of their columns."""
        k = self.k
        powers = [self.scales.powers(tile, v * k.lanes) for v in range(self.vectors)]
        return [[v.value * power for v, power in zip(row, powers, strict=True)] for row in totals]

    def _accumulate_group(self, tile, group, blocks: int, totals) -> None:
        """totals[row][vector] += scale of the group * (x @ codes) over the `blocks` blocks of group number `group`."""
        k, rows = self.k, len(totals)
        num_chains = max(1, CHAINS // (self.vectors * rows))  # of an element
        sums = [[[k.var_vec(0.0) for _ in range(num_chains)] for _ in range(self.vectors)] for _ in range(rows)]
        first = group * ((self.how.group or 0) // BLOCK)  # block
        unroll = UNROLL if self.vectors <= 2 else 1
        with k.loop(0, blocks - blocks % unroll, unroll) as b:
            for i in range(unroll):
                self._accumulate_block(tile, first + (b + i), sums)
        for i in range(blocks - blocks % unroll, blocks):
            self._accumulate_block(tile, first + i, sums)
        for v in range(self.vectors):
            scale = self.scales.load(tile, group, v * k.lanes)
            for r in range(rows):
                total = reduce(lambda a, b: a + b, [chain.value for chain in sums[r][v]])
                totals[r][v].value = k.fma(total, scale, totals[r][v].value)

    def _accumulate_block(self, tile, block, sums) -> None:
        """sums[row][vector][chain] += x @ codes over one block, 8 elements (or 4 pairs of bf16) of 16 columns; consecutive elements
        go to different chains. The codes PREFETCH_BLOCKS further are prefetched."""
        k = self.k
        p = self.codes.block(tile, block)
        for line in range(0, self.codes.block_bytes, LINE):
            k.prefetch(p.bytes(PREFETCH_BLOCKS * self.codes.block_bytes + line))
        read = self.codes.pairs if self.pair else self.codes.values
        for i, right in enumerate(zip(*(read(p, v * k.lanes) for v in range(self.vectors)), strict=True)):
            for r, row_sums in enumerate(sums):
                left = self._broadcast_x(r, block, i)
                for chains, w in zip(row_sums, right, strict=True):
                    chain = chains[i % len(chains)]
                    chain.value = k.dot(chain.value, left, w) if self.pair else k.fma(left, w, chain.value)

    def _broadcast_x(self, row: int, block, i: int) -> Value:
        """Element i, or pair i, of a block of a row of x, in all lanes. Rows that are not there are the last one."""
        k = self.k
        last = k.int(row) if row == 0 else k.min(self.rows - 1, row)
        p = self.x.at(block * BLOCK + last * self.stride)
        return k.splat(k.op("i32", f"load i32, ptr {p.bytes(4 * i).ref}, align 2") if self.pair else p.get(i))
