"""Split-K: fp32 partial results of slices of a sum over tokens, then added in order. How many slices: gemm_config.py."""

from dataclasses import dataclass
from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import Lowering, Size, Sizes
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor

BLOCK = 1024  # elements of out that a program sums


@device
def split_k_reduce(out, partials, scalars, count, N, MODE, BLOCK):
    """out (N) = the sum of partials (count, N) fp32 over the slices, in order; stored or added as MODE says."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(count):
        total += tl.load(partials + i, mask=mask, other=0.0)
        partials += N
    store_or_add(out + i, mask, total, scalars, MODE)


@dataclass(frozen=True)
class SplitK:
    """A function of the run's sizes: the tokens of each split-K slice of a weight gradient whose result has `tiles` tiles; a
    multiple of 64 (TILE_K), the last slice shorter. `rows`: tokens of the run."""

    rows: Size
    tiles: int

    def __call__(self, sizes: Sizes) -> int:
        rows = self.rows(sizes)
        return ceil_div(ceil_div(rows, gemm_config.num_splits(self.tiles, rows)), 64) * 64

    def count(self, sizes: Sizes) -> int:
        """The number of slices."""
        return ceil_div(self.rows(sizes), self(sizes))


def reduce_splits(c: Lowering, out: Any, partials: Tensor, count: Size | int, n: int, mode: int) -> None:
    """Launch out (n) = the sum of partials (count, n), in order."""
    c.launch(
        split_k_reduce, {"out": out, "partials": partials, "count": count}, {"N": n, "MODE": mode, "BLOCK": BLOCK},
        grid=lambda s: (ceil_div(n, BLOCK),), writes="out",
    )  # fmt: skip
