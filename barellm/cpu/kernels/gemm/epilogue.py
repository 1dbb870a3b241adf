"""GEMM epilogues: bias, activation, residual and scaling, applied to the accumulators before they are stored."""

from collections.abc import Mapping
from contextlib import nullcontext

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import Value
from barellm.cpu.kernels.gemm.microkernel import prefetch_row
from barellm.cpu.kernels.loops import store_all
from barellm.cpu.kernels.pointwise.activations import emitter_of
from barellm.program.ops.pointwise.elementwise import SLOPES


class Epilogue:
    """The epilogue of one panel, columns [col, col + NR) of C: reads and writes rows of out, second and other, each (rows, cols).

    `epilogues` apply in their order to the fp32 accumulators: "rescale" multiplies by `factor`; "bias" adds it; an activation
    stores its input to `second`; "residual" adds `other`, and "scaled" adds `scale` times `other`; "times" multiplies by `scale`,
    and a slope by an activation's slope at `other`."""

    def __init__(self, k, tile: Tile, out, second, bias, other, col, *, cols: int, strides: Mapping[str, int],
            epilogues: tuple[str, ...], mode: str, bias_in_registers: bool, scale=None, factor: float = 1.0,
            nontemporal=None) -> None:  # fmt: skip
        """`col` is the last positional parameter, so that a `partial` object makes the epilogue of any panel. out, second, other:
        (rows, cols), None where no epilogue needs it; bias (cols). `strides`: row strides in elements, where not `cols`.
        `bias_in_registers`: bias and masks are loaded once. `nontemporal` (i1; None: never): rows are stored non-temporally, only
        by `store_row`, whose rows must be whole cache lines. `mode`: "store", or "add" to the old out. `scale`: an fp32 vector;
        `factor`: a number of the code."""
        self.k, self.col, self.cols, self.epilogues, self.mode = k, col, cols, epilogues, mode
        self.out, self.second, self.bias, self.other, self.scale, self.factor = out, second, bias, other, scale, factor
        self.nr, self.nontemporal = tile.nr(k.isa), nontemporal
        matrices = {"out": out, "second": second, "other": other}
        self.stride = {name: strides.get(name, cols) for name, p in matrices.items() if p is not None}
        self.bias_in_registers = [self._bias_and_mask(v) for v in range(tile.vectors)] if bias_in_registers else []

    def _bias_and_mask(self, v) -> tuple[Value | None, Value | None]:
        """Of vector v of the panel: its bias, and the mask of the columns that exist (None: all)."""
        first = self.col + v * self.k.lanes
        mask = self.k.mask_first(self.cols - first) if self.cols % self.nr else None
        return None if self.bias is None else self.bias.load(first, mask), mask

    def put(self, row, v, x) -> None:
        """Apply to vector v of a row and store it; v is a Python integer where `bias_in_registers`."""
        at = self._at(row, v)
        bias, mask = self.bias_in_registers[v] if self.bias_in_registers else self._bias_and_mask(v)
        for name in self.epilogues:
            x = self._apply(name, x, at, bias, mask)
        if self.mode == "add":
            x = x + self.out.load(at["out"], mask)
        self.out.store(x, at["out"], mask)

    def store_row(self, row, sums) -> None:
        """Apply to a row's accumulators `sums`, a vector of fp32 each, and store it. 16-bit vectors go in pairs: a non-temporal
        store of half a cache line costs as much as one of a whole line."""
        if self.nontemporal is None:
            for v, x in enumerate(sums):
                self.put(row, v, x)
            return
        pre_activations: list[Value] = []
        finished = []
        for v, x in enumerate(sums):
            at, (bias, mask) = self._at(row, v), self._bias_and_mask(v)
            for name in self.epilogues:
                x = self._apply(name, x, at, bias, mask, pre_activations)
            finished.append(x)
        at = self._at(row, 0)
        if pre_activations:
            store_all(self.k, self.second, pre_activations, at["second"], self.nontemporal)
        store_all(self.k, self.out, finished, at["out"], self.nontemporal)

    def _at(self, row, v=None) -> dict[str, Value]:
        """The element index, in each operand, of a row's vector v of the panel, or of the panel's first column. Operands of the
        same stride share it: fewer instructions."""
        at = {stride: row * stride + self.col for stride in dict.fromkeys(self.stride.values())}
        if v is not None:
            skipped = v * self.k.lanes  # columns of the panel before vector v
            at = {stride: first + skipped for stride, first in at.items()}
        return {name: at[stride] for name, stride in self.stride.items()}

    def _apply(self, name: str, x, at: dict[str, Value], bias, mask, pre_activations: list | None = None) -> Value:
        """The vector x after epilogue `name` (the class's docstring has them). `at`: its element index in each operand; `mask`: of
        its columns. An activation stores its input to `second`, or only appends it to `pre_activations` where that is given."""
        if name == "bias":
            return x + bias
        if name == "rescale":
            return x * self.factor
        if name == "residual":
            return self.other.load(at["other"], mask) + x
        if name == "scaled":
            return self.k.fma(self.other.load(at["other"], mask), self.scale, x)
        if name == "times":
            return x * self.scale
        emitter = emitter_of(name)
        assert emitter is not None, name
        if name in SLOPES:
            return x * emitter.slope(self.k, self.other.load(at["other"], mask), self.out.dtype)
        if pre_activations is None:
            self.second.store(x, at["second"], mask)
        else:
            pre_activations.append(x)
        return emitter.value(self.k, x, self.out.dtype)

    def prefetch(self, row) -> None:
        """Prefetch the lines of a row of the panel that `put` or `store_row` touch, but for non-temporal stores."""
        at = self._at(row)
        if self.other is not None:
            prefetch_row(self.k, self.other.at(at["other"]), self.nr, write=False)
        with nullcontext() if self.nontemporal is None else self.k.otherwise(self.nontemporal):
            for name, p in (("out", self.out), ("second", self.second)):
                if p is not None:
                    prefetch_row(self.k, p.at(at[name]), self.nr, write=True)
