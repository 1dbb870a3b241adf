"""Products of a few rows with a weight, at the speed of memory.

To multiply few rows costs what reading the weight costs. So nothing is packed: each row of the weight, which is a column of the
result, is read where it lies, from its first byte to its last, beside a few others. An element of the result is one chain of
multiply-adds of vectors along the depth, whose lanes are added at the end; so its bits do not depend on how many rows there are.
Several columns go together, since a chain alone would wait for its own sums. More rows than one go in pairs, which find the columns
that the first pair read in the first cache.

What memory gives depends on how much of it is on its way. A processor that does not read far enough ahead is helped: while some
columns are multiplied, those that come next are fetched, in the order in which they lie and evenly over all pairs of rows.

Shapes: a (rows, depth), weight (cols, depth), out (rows, cols).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from barellm.cpu.choices import FewChoice, Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import few_tiles
from barellm.cpu.kernels.epilogue import Epilogue
from barellm.cpu.kernels.few_tiles import tiles_private
from barellm.cpu.kernels.packing import LINE, paired
from barellm.cpu.lang import Pointer, Value, Var
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div, round_up

FEW = 64  # rows at most
PAIR = 2  # rows of a tile where there are several
LEAST_SPAN = 24  # columns of a claim, at least
PART_BYTES = 3 << 12  # of the columns of a pair, read again for each pair: beside x they stay in the first cache


@dataclass(frozen=True)
class Cut:
    """How an ISA cuts a product: columns of a tile, and those of a claim."""

    columns: int
    lanes: int

    @classmethod
    def of(cls, isa: ISA) -> Cut:
        if isa.registers == 32:
            return cls(8, isa.lanes)
        return cls(6 if isa.fma else 4, isa.lanes)  # without fma the product needs a register

    @property
    def span(self) -> int:
        return round_up(LEAST_SPAN, lcm(self.columns, self.lanes))


def few_choices(isa: ISA, dtype: str, cols: int, depth: int) -> list[FewChoice]:
    """The ways to walk a weight, the one that is taken untuned first. A processor with AMX tiles reads ahead by itself, faster than
    by requests, each of which takes one of few places for lines on their way. AMD's processors read more with requests."""
    on_tiles = few_tiles.fits(isa, dtype, cols, depth)
    together = few_tiles.TOGETHER if on_tiles else (Cut.of(isa).columns, Cut.of(isa).columns // 2)
    most = max(1, ceil_div(cols, span_of(isa, dtype, cols, depth)) // 8)
    ways = [FewChoice(n, t, f) for n in (1, 2, 4) if n <= most for t in together for f in (False, True)]
    first = FewChoice(1, together[0], not isa.tiles)
    return [first, *(way for way in ways if way != first)]


def few_private(isa: ISA, depth: int) -> int:
    """Bytes of a thread's own scratch: the sums of a claim, and those that are kept between two parts of the depth, or tiles."""
    return _sums_bytes(isa) + tiles_private(isa, depth)


def span_of(isa: ISA, dtype: str, cols: int, depth: int) -> int:
    """Columns of a claim."""
    return few_tiles.SPAN if few_tiles.fits(isa, dtype, cols, depth) else Cut.of(isa).span


def _sums_bytes(isa: ISA) -> int:
    cut = Cut.of(isa)
    return 4 * FEW * (max(cut.span, few_tiles.SPAN) + cut.lanes + cut.columns * cut.lanes)


class FewRows:
    """One thread's part of a product with FEW rows at most."""

    def __init__(
        self, k: KernelBuilder, a: Pointer, weight: Pointer, rows: Value, *, cols: int, depth: int, stride: int,
        choice: FewChoice,
    ) -> None:  # fmt: skip
        """`stride`: elements from a row of a to the next."""
        self.k, self.a, self.weight, self.rows, self.choice = k, a, weight, rows, choice
        self.cols, self.depth, self.stride = cols, depth, stride
        self.cut, self.dot = Cut.of(k.isa), paired(k.isa, a.dtype)
        self.unit = k.lanes * (2 if a.dtype == "bf16" else 1)  # elements of a chain's next link or two
        self.itemsize = itemsize(a.dtype)
        self.span = span_of(k.isa, a.dtype, cols, depth)
        self.width = self.span + k.lanes  # of a row of sums, whose last vector may hang over
        self.sums = k.private()
        self.kept = self.sums.at(FEW * self.width)
        self.tiles = None
        if few_tiles.fits(k.isa, a.dtype, cols, depth):
            scratch = self.sums.bytes(_sums_bytes(k.isa))
            sizes = {"cols": cols, "depth": depth, "stride": stride}
            self.tiles = few_tiles.FewTiles(k, a, weight, rows, scratch, choice=choice, **sizes)
            self.wide = self.cut.columns
        else:
            self.wide = choice.together
        parts = max(1, round(self.cut.columns * depth * self.itemsize / PART_BYTES))
        self.part = round_up(ceil_div(depth, parts), self.unit)

    def run(self, finish: Callable[[Value], Epilogue]) -> None:
        """`finish(column)` makes the epilogue of a claim."""
        k, span, tiles = self.k, self.span, self.tiles
        if tiles:
            tiles.begin()
        with k.claim(ceil_div(self.cols, span), self.choice.spans) as (begin, end), k.loop(begin, end) as at:
            column = at * span
            if tiles:
                tiles.multiply(column, self.sums, self.width)
            else:
                self._multiply_vectors(column)
            epilogue = finish(column)
            with k.loop(0, self.rows) as row:
                for v in range(span // k.lanes):
                    epilogue.put(row, v, self.sums.load(row * self.width + v * k.lanes))
        if tiles:
            tiles.end()

    def _multiply_vectors(self, column: Value) -> None:
        with self.k.when(self.rows.equals(1)):
            self._one_row(column)
        with self.k.when(self.rows > 1):
            self._pairs(column)

    def _one_row(self, column: Value) -> None:
        k, wide = self.k, self.wide
        with k.loop(0, self.cut.span, wide) as c:
            chains = self._chains(1, wide)
            columns = self._columns(column + c, wide)
            self._multiply([self.a], columns, chains, k.int(0), k.int(self.depth), k.int(1), k.int(0))
            self._add_lanes(chains[0], self.sums.at(c))

    def _pairs(self, column: Value) -> None:
        k, wide = self.k, self.wide
        parts, pairs = ceil_div(self.depth, self.part), k.ceil_div(self.rows, PAIR)
        with k.loop(0, self.cut.span, wide) as c:
            columns = self._columns(column + c, wide)
            with k.loop(0, parts) as p, k.loop(0, self.rows, PAIR) as row:
                first = p * self.part
                last = k.min(first + self.part, self.depth)
                held = self.kept.at(row * (wide * k.lanes))
                both = [row, k.min(row + 1, self.rows - 1)]  # an odd last row is multiplied twice
                chains = self._chains(PAIR, wide)
                if parts > 1:
                    with k.when(p > 0):
                        for i, chain in enumerate(x for of_row in chains for x in of_row):
                            chain.value = held.load(i * k.lanes)
                left = [self.a.at(r * self.stride) for r in both]
                done = (first * pairs + row // PAIR * (last - first)) // self.unit
                self._multiply(left, columns, chains, first, last, pairs, done)
                if parts > 1:
                    with k.when(p < parts - 1):
                        for i, chain in enumerate(x for of_row in chains for x in of_row):
                            held.store(chain.value, i * k.lanes)
                for r, of_row in zip(both, chains, strict=True):
                    self._add_lanes(of_row, self.sums.at(r * self.width + c))

    def _chains(self, rows: int, columns: int) -> list[list[Var]]:
        return [[self.k.var_vec(0.0) for _ in range(columns)] for _ in range(rows)]

    def _columns(self, first: Value, count: int) -> list[Pointer]:
        """The rows of the weight; of those behind the last one that one."""
        k = self.k
        at = [k.min(first + i, self.cols - 1) if self.cols % self.cut.span else first + i for i in range(count)]
        return [self.weight.at(c * self.depth) for c in at]

    def _multiply(
        self, left: list[Pointer], right: list[Pointer], chains: list[list[Var]], first: Value, last: Value, times: Value,
        done: Value,
    ) -> None:  # fmt: skip
        """Adds the products of the depth [first, last) to the chains. Meanwhile the columns that come next are fetched, evenly over
        the `times` that these are multiplied, of which so many units are `done`."""
        k, each = self.k, len(right) * self.unit * self.itemsize
        whole = first + (last - first) // self.unit * self.unit
        step = k.int(each) // times
        behind = len(right) * self.depth * self.itemsize
        ahead = right[0].bytes(behind + (done - first // self.unit) * step)
        with k.loop(first, whole, self.unit) as d:
            for line in range(0, each if self.choice.fetch else 0, LINE):
                k.prefetch(ahead.bytes(d // self.unit * step + line))
            self._unit([x.at(d) for x in left], [w.at(d) for w in right], chains)
        if not self.depth % self.unit:
            return
        with k.when(last.equals(self.depth)):
            rest = self.depth % self.unit
            for u in range(0, rest, k.lanes):
                mask, at = None if rest - u >= k.lanes else k.mask_first(rest - u), self.depth - rest + u
                xs = [x.load(at, mask) for x in left]
                for c, w in enumerate(right):
                    self._link(xs, w.load(at, mask), chains, c)

    def _unit(self, left: list[Pointer], right: list[Pointer], chains: list[list[Var]]) -> None:
        k = self.k
        if self.dot:
            xs = [_both(k, x) for x in left]
            for c, w in enumerate(right):
                y = _both(k, w)
                for x, of_row in zip(xs, chains, strict=True):
                    of_row[c].value = k.dot(of_row[c].value, x, y)
        elif self.a.dtype == "bf16":
            for half in (_lower, _upper):
                xs = [half(k, x) for x in left]
                for c, w in enumerate(right):
                    self._link(xs, half(k, w), chains, c)
        else:
            xs = [x.load() for x in left]
            for c, w in enumerate(right):
                self._link(xs, w.load(), chains, c)

    def _link(self, xs: list[Value], w: Value, chains: list[list[Var]], column: int) -> None:
        for x, of_row in zip(xs, chains, strict=True):
            of_row[column].value = self.k.fma(x, w, of_row[column].value)

    def _add_lanes(self, chains: list[Var], out: Pointer) -> None:
        """The sum of each chain's lanes, side by side."""
        k = self.k
        values = [chain.value for chain in chains]
        for first in range(0, len(values), k.lanes):
            some = values[first : first + k.lanes]
            out.store(sums_of_lanes(k, some + [k.to(0.0, k.vec)] * (k.lanes - len(some))), first)


def _both(k: KernelBuilder, p: Pointer) -> Value:
    """2 `lanes` bf16 as lanes of 32 bits. A row of an odd depth, or of odd columns of a wider tensor, begins at an odd element: no
    more than the alignment of one element may be stated, though the type's own is larger."""
    return k.op(k.ivec, f"load {k.ivec}, ptr {p.ref}, align {p.itemsize}")


def _lower(k: KernelBuilder, p: Pointer) -> Value:
    """Elements 0, 2, 4, ... of 2 `lanes` bf16 as fp32: a shift."""
    return k.bitcast(_both(k, p) << 16, k.vec)


def _upper(k: KernelBuilder, p: Pointer) -> Value:
    """Elements 1, 3, 5, ...: a mask. They are loaded as lanes of 16 bits, so that LLVM does not see that `_lower` loads the same
    bytes: it would keep them in a register that is not there."""
    half = f"<{2 * k.lanes} x i16>"
    raw = k.op(half, f"load {half}, ptr {p.ref}, align {p.itemsize}")
    mask = Value(k, half, "<" + ", ".join(["i16 0, i16 -1"] * k.lanes) + ">")
    return k.bitcast(raw & mask, k.vec)


def sums_of_lanes(k: KernelBuilder, vectors: list[Value]) -> Value:
    """The sum of each of `lanes` vectors' lanes, side by side. Two vectors become one by two shuffles of one instruction each and
    an addition: twice inside each group of four lanes, then across groups."""
    n = k.lanes
    groups = [list(range(g, g + 4)) for g in range(0, n, 4)]

    def join(a: Value, b: Value, low: list[int], high: list[int]) -> Value:
        return k.shuffle(a, b, low) + k.shuffle(a, b, high)

    def both(order: list[list[int]]) -> list[int]:
        return [i for part in order for i in part]

    inside = [
        [both([[g[i], n + g[i], g[i + 1], n + g[i + 1]] for g in groups]) for i in (0, 2)],
        [both([[g[i], g[i + 1], n + g[i], n + g[i + 1]] for g in groups]) for i in (0, 2)],
    ]
    across = []
    times = len(groups)  # how often the sums of the same vectors are there, one group after the other
    while times > 1:
        half = times // 2
        picked = [[g for i, g in enumerate(groups) if (i // half) % 2 == which] for which in (0, 1)]
        across.append([both(p + [[n + i for i in g] for g in p]) for p in picked])
        times = half
    for low, high in inside + across:
        vectors = [join(a, b, low, high) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def few_rows(
    k: KernelBuilder, out, second, a, weight, bias, other, *, cols: int, depth: int, dims: tuple[str, ...], inner: int,
    epilogues: tuple[str, ...], mode: str, choice: FewChoice, strides: tuple[tuple[str, int], ...] = (), factor: float = 1.0,
) -> None:  # fmt: skip
    """out (rows, cols) = a (rows, depth) @ weight.T and then the `epilogues`, for FEW rows at most; nothing if a run has more."""
    rows, apart = k.extent(dims, inner), dict(strides)
    vectors = span_of(k.isa, a.dtype, cols, depth) // k.lanes

    def finish(col: Value) -> Epilogue:
        how: dict[str, Any] = {"cols": cols, "epilogues": epilogues, "mode": mode, "early": False, "strides": apart}
        return Epilogue(k, col, Tile(1, vectors), out, second, bias, other, factor=factor, **how)

    with k.when(rows <= FEW):
        sizes = {"cols": cols, "depth": depth, "stride": apart.get("a", depth)}
        FewRows(k, a, weight, rows, choice=choice, **sizes).run(finish)
