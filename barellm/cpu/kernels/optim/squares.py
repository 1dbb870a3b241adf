"""Sums of squares of a matrix (for gradient norms), by blocks of BLOCK x BLOCK: of one in memory, and fused into a GEMM's epilogue.

Each column of a block is one accumulation chain over its rows in both, so both give the same bits."""

from operator import add

from barellm.cpu.kernel import Lowering, Op, Value, lowering
from barellm.cpu.kernels.loops import new_accumulators, tree_reduce
from barellm.program.ops.gemm.block_squares import BLOCK


class BlockSum:
    """The sum of squares of one block of a matrix, whose rows are added one after the other."""

    def __init__(self, k) -> None:
        self.k, self.chains = k, new_accumulators(k, BLOCK // k.lanes)

    def add_row(self, values) -> None:
        """Add a row of a block: vectors, with zeros beyond the matrix's columns."""
        for chain, x in zip(self.chains, values, strict=True):
            chain.value = self.k.fma(x, x, chain.value)

    def put(self, partials, number) -> None:
        partials.put(self.k.sum(tree_reduce(self.chains, add)), number)


def block_number(row, col, columns) -> Value:
    """The index of the block that begins at `row` and `col` of a matrix of `columns` columns."""
    return row // BLOCK * ((columns + (BLOCK - 1)) // BLOCK) + col // BLOCK


def block_squares(k, partials, x, rows, columns) -> None:
    """partials (ceil(rows / BLOCK), ceil(columns / BLOCK)) = sums of squares of x's (rows, columns) blocks. An item: a row."""
    with k.parallel_for((rows + (BLOCK - 1)) // BLOCK) as band, k.loop(0, columns, BLOCK) as col:
        block, first = BlockSum(k), band * BLOCK
        masks = [k.mask_first(columns - col - v) for v in range(0, BLOCK, k.lanes)]
        with k.loop(first, k.min(first + BLOCK, rows)) as row:
            offset = row * columns + col
            block.add_row([x.load(offset + v * k.lanes, mask) for v, mask in enumerate(masks)])
        block.put(partials, block_number(first, col, columns))


@lowering("block_squares", floats="fp32")
def lower_block_squares(op: Op, c: Lowering) -> None:
    rows, columns = (int(n) for n in op.x.shape)
    operands = {"partials": op.partials, "x": op.x, "rows": rows, "columns": columns}
    c.call(block_squares, operands, writes="partials")
