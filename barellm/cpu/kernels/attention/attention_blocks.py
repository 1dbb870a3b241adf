"""The parts of which the attention kernels are made: blocks of one head in a thread's scratch, and products of register tiles over
them.

Scores are kept transposed, S^T = K Q^T: keys are rows, queries are lanes. So the softmax needs no sum or maximum across lanes, a
causal mask is one comparison, and the probabilities come out of the registers as the right operand of the next product.

Blocks in scratch consist of 32-bit units: one fp32, or, with a bf16 dot instruction, two bf16 that follow each other along the
contraction. bf16 without such an instruction becomes fp32 while it is staged.

    rows         (tokens, D)   [token][g.row]               units along D; rows beyond the last token and columns beyond D are 0
    woven        (tokens, D)   [token / g.pair][g.wide]     units along the tokens; the same bytes as rows where g.pair is 1
    columns      (tokens, D)   [token / 32][g.wide][16]     units along the tokens, a column of 32 tokens as a line: of AMX tiles
    turned       (tokens, D)   [g.row][g.queries]           units along D, tokens as lanes
    accumulator  fp32: (g.deep, queries) for a transposed result, (tokens, g.wide) for a straight one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.packing import uses_vnni
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.random import keep, sample_key, threefry
from barellm.cpu.lang.vector import EXP2, MAGIC, polynomial, transpose
from barellm.program.ops.base import Op
from barellm.program.ops.pointwise.random import HALF
from barellm.program.tensor import Dim

# 2^f on [-0.5, 0.5], relative error 2.8e-6: a hundredth of what rounding a probability to bf16 costs.
EXP2_SHORT = (1.0, 0.6931241933586842, 0.24024098616755934, 0.05590642492460038, 0.00958285286558115)
TILE_VECTORS = 2  # vectors of queries beside AMX tiles
KEYS = 128  # of a block: a multiple of 32, the period of the dropout words, and of every tile's rows


@dataclass(frozen=True)
class Geometry:
    """Sizes of blocks and register tiles for one head size, dtype and ISA."""

    D: int
    pair: int  # bf16 numbers in a unit: 2 with a dot instruction, else 1
    lanes: int
    rows: int  # of a tile
    vectors: int = 2
    tiles: bool = False  # products in AMX's tile registers, whose tiles lie in memory before and behind them

    @classmethod
    def of(cls, isa: ISA, dtype: str, D: int, *, tiles: bool = True) -> Geometry:
        """`tiles` False: of vector registers wherever it runs."""
        if tiles and amx.uses_tiles(isa, dtype):
            return cls(D, 2, isa.lanes, amx.MR, TILE_VECTORS, True)
        return cls(D, 2 if uses_vnni(isa, dtype) else 1, isa.lanes, 8 if isa.registers == 32 else 4)

    @property
    def queries(self) -> int:
        return self.vectors * self.lanes

    @property
    def wide(self) -> int:
        step = amx.TILE_K if self.tiles else self.lanes
        return -(-self.D // step) * step

    @property
    def deep(self) -> int:
        """Rows of a transposed accumulator."""
        return self.wide if self.tiles else self.D

    @property
    def row(self) -> int:
        return self.wide // self.pair

    @property
    def units(self) -> int:
        """Steps of a contraction over D."""
        return -(-self.D // self.pair)

    # Units of the blocks. Turning and straightening read whole vectors, up to one vector beyond a block's last row.
    def rows_units(self, tokens: int) -> int:
        return tokens * self.row + self.lanes

    def woven_units(self, tokens: int) -> int:
        return tokens // self.pair * self.wide

    @property
    def turned_units(self) -> int:
        return -(-self.row // self.lanes) * self.lanes * self.queries

    def transposed_units(self, blocks: int = 1) -> int:
        return (blocks * self.deep + self.lanes) * self.queries


def offsets(units: dict[str, int]) -> tuple[dict[str, int], int]:
    """The byte offset of each named block, and the total. All are multiples of 64."""
    at, where = 0, {}
    for name, n in units.items():
        where[name] = at
        at += -(-4 * n // 64) * 64
    return where, at


def blocks_of(k: KernelBuilder, units: dict[str, int]) -> dict[str, Pointer]:
    thread_scratch = k.thread_scratch("fp32")
    return {name: thread_scratch.bytes(k.int(at)) for name, at in offsets(units)[0].items()}


def size(n: int) -> str | int:
    """A size as a constant of the code: the scalar's name, or the number."""
    return n.name if isinstance(n, Dim) else int(n)


def round_up(k: KernelBuilder, n: Value, step: int) -> Value:
    """The next multiple of `step`, a power of two."""
    return (n + (step - 1)) & -step


def dim_size(k: KernelBuilder, n: str | int) -> Value:
    return k.scalar(n) if isinstance(n, str) else k.int(n)


def sizes(op: Op) -> dict[str, Any]:
    """Constants of every attention kernel. `strides`: elements from one row of q, k and v to the next."""
    B, T, C = op.out.shape
    strides = (op.q.row_stride, op.k.row_stride, op.v.row_stride)
    heads = {"heads": op.heads, "kv_heads": op.kv_heads, "D": int(C) // op.heads}
    return {"batch": size(B), "seq": size(T), **heads, "strides": strides}


@dataclass(frozen=True)
class Rows:
    """Rows of one head in memory: element (t, d) lies at pointer[t * stride + d]. Of paired heads two rows, `apart` from each
    other, share a stride; such rows start at an even t."""

    pointer: Pointer
    stride: int
    apart: int = 0

    def __getitem__(self, t: Any) -> Pointer:
        if self.apart:
            return self.pointer.at((t >> 1) * self.stride + (t & 1) * self.apart)
        return self.pointer.at(t * self.stride)

    def start(self, t: Any) -> Rows:
        return Rows(self[t], self.stride, self.apart)

    @classmethod
    def of(cls, tensor: Pointer, token: Value, head: Value, *, D: int, stride: int) -> Rows:
        """The rows of a head, from `token` on."""
        return cls(tensor.at(token * stride + head * D), stride)


def serving(head: Value, heads: int, kv_heads: int) -> Value:
    """The head of k and v that serves a head of q: each serves heads / kv_heads of them, one after the other."""
    return head if heads == kv_heads else head // (heads // kv_heads)


# --- between memory and scratch ---


def stage(k: KernelBuilder, g: Geometry, source: Rows, count: Value, total: Any, to: Pointer) -> None:
    """Rows [0, count) of `source` as a block of rows, with zeros up to row `total`."""
    with k.loop(0, count) as t:
        row, target = source[t], to.at(t * g.row)
        for c, mask in k.columns(g.D):
            if g.pair == 2:
                target.as_dtype("bf16").store_raw(row.load_raw(c, mask), c)
            else:
                target.store(row.load(c, mask), c)
        for c in range(-(-g.D // g.lanes) * g.lanes, g.wide, g.lanes):
            target.as_dtype("bf16").store_raw(k.const(0, f"<{k.lanes} x i16>"), c)
    with k.loop(count, total) as t:
        target = to.at(t * g.row)
        for c in range(0, g.wide, g.lanes):
            if g.pair == 2:
                target.as_dtype("bf16").store_raw(k.const(0, f"<{k.lanes} x i16>"), c)
            else:
                target.store(0.0, c)


def weave(k: KernelBuilder, g: Geometry, rows: Pointer, tokens: Any, to: Pointer) -> Pointer:
    """Rows -> woven; `tokens` is a multiple of g.pair."""
    if g.pair == 1:
        return rows
    with k.loop(0, tokens, 2) as t:
        even, odd = rows.at(t * g.row).as_dtype("bf16"), rows.at((t + 1) * g.row).as_dtype("bf16")
        target = to.at((t >> 1) * g.wide)
        for c in range(0, g.wide, g.lanes):
            target.store_raw(k.bitcast(interleave(k, even.load_raw(c), odd.load_raw(c)), k.vec), c)
    return to


def weave_left(k: KernelBuilder, g: Geometry, rows: Pointer, count: Value, to: Pointer) -> Pointer:
    """Rows of `count` tokens, padded as `stage` does, as `add_transposed` wants them: woven, or columns where tiles are used."""
    if not g.tiles:
        return weave(k, g, rows, round_up(k, count, g.pair), to)
    with k.loop(0, count, amx.TILE_K) as t, k.loop(0, g.wide, g.lanes) as c:
        source = rows.at(t * g.row).as_dtype("bf16").at(c)
        target = to.as_dtype("i32").at((t >> 1) * g.wide + c * amx.SIDE)
        tokens = [source.load_raw(i * g.wide) for i in range(amx.TILE_K)]
        square = [k.bitcast(interleave(k, *pair), k.ivec) for pair in zip(tokens[::2], tokens[1::2], strict=True)]
        for i, column in enumerate(transpose(k, square)):
            target.store_raw(column, i * amx.SIDE)
    return to


def interleave(k: KernelBuilder, a: Value, b: Value) -> Value:
    """a0 b0 a1 b1 ..."""
    return k.shuffle(a, b, [i for j in range(k.lanes) for i in (j, k.lanes + j)])


def turn(k: KernelBuilder, g: Geometry, rows: Pointer, to: Pointer) -> None:
    """Rows -> turned, g.queries tokens."""
    with k.loop(0, g.queries, g.lanes) as v, k.loop(0, g.row, g.lanes) as c:
        source, target = rows.at(v * g.row + c), to.at(c * g.queries + v)
        square = [source.load(i * g.row) for i in range(g.lanes)]
        for i, column in enumerate(transpose(k, square)):
            target.store(column, i * g.queries)


def straighten(k: KernelBuilder, g: Geometry, transposed: Pointer, to: Pointer, factor: list[Value]) -> None:
    """Accumulator (D, queries) -> (queries, g.wide), times a factor per query."""
    for v in range(g.vectors):
        with k.loop(0, g.wide, g.lanes) as d:
            source = transposed.at(d * g.queries)
            square = [source.load(i * g.queries + v * g.lanes) * factor[v] for i in range(g.lanes)]
            target = to.at(d)
            for i, row in enumerate(transpose(k, square)):
                target.store(row, (v * g.lanes + i) * g.wide)


def unstage(
    k: KernelBuilder, g: Geometry, rows: Pointer, count: Value, to: Rows, factor: Any, keep: Value | None = None
) -> None:
    """Write fp32 rows [token][g.wide], times `factor`, to memory. They are added to what is there if `keep` says so."""
    with k.loop(0, count) as t:
        row, target = rows.at(t * g.wide), to[t]
        for c, mask in k.columns(g.D):
            value = row.load(c) * factor
            if keep is not None:
                value = value + k.select(keep, target.load(c, mask), k.to(0.0, k.vec))
            target.store(value, c, mask)


# --- products ---


@dataclass(frozen=True)
class Left:
    """Broadcast operand: unit (r, s) of row r and step s at pointer[r * row + s * step]."""

    pointer: Pointer
    row: int
    step: int


@dataclass(frozen=True)
class Right:
    """Vector operand: lanes v of step s at pointer[s * step + v * lanes]."""

    pointer: Pointer
    step: int


def product(
    k: KernelBuilder, g: Geometry, a: Left, b: Right, steps: Any, start: list[list[Value]] | None = None, **shape: int
) -> list[list[Value]]:
    """start + a b over `steps`, a register tile of g.rows x g.vectors (or `rows`, `vectors`). One chain an element, in order."""
    rows, vectors = shape.get("rows", g.rows), shape.get("vectors", g.vectors)
    acc = [[k.var(start[r][v] if start else k.to(0.0, k.vec)) for v in range(vectors)] for r in range(rows)]
    with k.loop(0, steps) as s:
        left, right = a.pointer.at(s * a.step), b.pointer.at(s * b.step)
        if g.pair == 2:
            right = right.as_dtype("i32")
        columns = [right.load_raw(v * g.lanes) for v in range(vectors)]
        for r in range(rows):
            if g.pair == 2:
                unit = k.splat(k.op("i32", f"load i32, ptr {left.at(r * a.row).ref}, align 4"))
            else:
                unit = k.splat(left.get(r * a.row))
            for v in range(vectors):
                old = acc[r][v].value
                acc[r][v].value = k.dot(old, unit, columns[v]) if g.pair == 2 else k.fma(unit, columns[v], old)
    return [[x.value for x in row] for row in acc]


def scores(
    k: KernelBuilder, g: Geometry, rows: Pointer, first: Value, turned: Pointer, start: list[list[Value]] | None = None
) -> list[list[Value]]:
    """Products of g.rows tokens from `first` with g.queries tokens, added to `start`: K Q^T, V dO^T."""
    return product(k, g, Left(rows.at(first * g.row), g.row, 1), Right(turned, g.queries), g.units, start)


def scores_of_tiles(k: KernelBuilder, g: Geometry, rows: Pointer, first: Value, turned: Pointer, to: Pointer) -> None:
    """The same in AMX tiles, to memory: [g.rows][g.queries] fp32."""
    left = amx.row_major(rows.at(first * g.row), 4 * g.row)
    amx.add_product(k, to, left, turned, g.row // amx.SIDE, rows=g.rows, cols=g.queries, begins=True)


def add_transposed(
    k: KernelBuilder,
    g: Geometry,
    acc: Pointer,
    woven: Pointer,
    right: Pointer,
    begin: Any,
    end: Value,
    factor: list[Value] | None = None,
) -> None:
    """acc (D, queries) = acc * factor + X^T R over the tokens [begin, end), X as `weave_left` has it and R (tokens, queries) in
    units along the tokens. On tiles both ends are whole tiles."""
    tokens = end
    if isinstance(begin, Value):  # else 0
        woven, right = woven.at(begin // g.pair * g.wide), right.at(begin // g.pair * g.queries)
        tokens = end - begin
    if g.tiles:
        if factor is not None:
            with k.loop(0, g.wide * g.queries, g.queries) as at:
                for v, f in enumerate(factor):
                    acc.store(acc.load(at + v * g.lanes) * f, at + v * g.lanes)
        left = amx.Left(woven, amx.LINE, g.wide * amx.LINE, amx.TILE_BYTES)
        amx.add_product(k, acc, left, right, tokens // amx.TILE_K, rows=g.wide, cols=g.queries)
        return

    def tile(d: Any, rows: int) -> None:
        block = acc.at(d * g.queries)
        start = [[block.load(r * g.queries + v * g.lanes) for v in range(g.vectors)] for r in range(rows)]
        if factor is not None:
            start = [[x * f for x, f in zip(row, factor, strict=True)] for row in start]
        a, b = Left(woven.at(d), 1, g.wide), Right(right, g.queries)
        for r, row in enumerate(product(k, g, a, b, k.ceil_div(tokens, g.pair), start, rows=rows)):
            for v, x in enumerate(row):
                block.store(x, r * g.queries + v * g.lanes)

    whole = g.D - g.D % g.rows
    if whole:
        with k.loop(0, whole, g.rows) as d:
            tile(d, g.rows)
    if g.D % g.rows:
        tile(whole, g.D % g.rows)


def add_straight(
    k: KernelBuilder, g: Geometry, acc: Pointer, left_block: Pointer, woven: Pointer, begin: Any, end: Value
) -> None:
    """acc (tokens, g.wide) += L X over g.queries for the tokens [begin, end), L [token][g.queries / g.pair] in units along the
    queries and X woven."""
    per_row = g.queries // g.pair
    if g.tiles:
        with k.loop(begin, end, g.rows) as t:
            left = amx.row_major(left_block.at(t * per_row), 4 * per_row)
            amx.add_product(k, acc.at(t * g.wide), left, woven, per_row // amx.SIDE, rows=g.rows, cols=g.wide)
        return

    def tile(t: Value, c: Any, vectors: int) -> None:
        block = acc.at(t * g.wide + c)
        start = [[block.load(r * g.wide + v * g.lanes) for v in range(vectors)] for r in range(g.rows)]
        a, b = Left(left_block.at(t * per_row), per_row, 1), Right(woven.at(c), g.wide)
        for r, row in enumerate(product(k, g, a, b, per_row, start, vectors=vectors)):
            for v, x in enumerate(row):
                block.store(x, r * g.wide + v * g.lanes)

    step = g.vectors * g.lanes
    whole = g.wide - g.wide % step
    with k.loop(begin, end, g.rows) as t:
        if whole:
            with k.loop(0, whole, step) as c:
                tile(t, c, g.vectors)
        if g.wide % step:
            tile(t, whole, g.wide % step // g.lanes)


def clear(k: KernelBuilder, block: Pointer, units: Any) -> None:
    """Zero `units` (a multiple of the lanes)."""
    with k.loop(0, units, k.lanes) as i:
        block.store(0.0, i)


# --- softmax and dropout ---


def exp2_nonpositive(k: KernelBuilder, g: Geometry, x: Value) -> Value:
    """2**x for x up to a rounding error above 0; exactly 0 at -infinity, NaN for NaN."""
    x = k.max(-127.0, x)  # an exponent field of zero; of a NaN this is the NaN
    shifted = x + MAGIC
    p = polynomial(k, x - (shifted - MAGIC), EXP2_SHORT if g.pair == 2 else EXP2)
    return k.bitcast(k.bitcast(p, k.ivec) + (k.bitcast(shifted, k.ivec) << 23), k.vec)


def pack_units(k: KernelBuilder, g: Geometry, even: Value, odd: Value | None) -> Value:
    """Units of two rows of fp32 lanes along the rows; with g.pair 1 of the one row."""
    if odd is None:
        return even
    return k.bitcast(interleave(k, k.round_bf16(even), k.round_bf16(odd)), k.vec)


def put_along(k: KernelBuilder, g: Geometry, to: Pointer, row: list[Value]) -> None:
    """A row of g.queries fp32 lanes as units along the row."""
    for v, x in enumerate(row):
        if g.pair == 2:
            to.as_dtype("bf16").store(x, v * g.lanes)
        else:
            to.store(x, v * g.lanes)


@dataclass(frozen=True)
class Lower:
    """The first keys that a group of queries sees: that of its first query, that of its last, and in `least` each query's, i32."""

    first: Value
    last: Value
    least: Pointer

    def begin(self, k: KernelBuilder, g: Geometry, j0: Value) -> Value:
        """The first row of a block of keys that any of the queries sees, down to a whole tile."""
        return k.max(self.first - j0, 0) & -g.rows


def crosses(g: Geometry, key: Value, position: Value, lower: Lower | None, length: Value | None) -> Value:
    """Whether some query of the group from `position` on may not see some key of the tile from `key` on. Where every query sees
    all keys, `length` is their number, and else None."""
    if length is not None:
        return (key + g.rows) > length
    late = (key + (g.rows - 1)) > position
    return late if lower is None else late | (key < lower.last)


def visible(
    k: KernelBuilder, g: Geometry, key: Value, position: Value, lower: Lower | None, length: Value | None
) -> Callable[[Any, int], Value]:
    """A function from (row of a tile, vector) to the lanes of queries from `position` on that may see the row's key, `key` +
    row. `length` as for `crosses`."""
    if length is not None:
        left = length - key
        return lambda r, v: k.splat(left - r) > 0
    gap = k.splat(key - position)
    if lower is None:
        return lambda r, v: (gap + (r - v * g.lanes)) <= k.iota()
    at = k.splat(key)
    least = [lower.least.load(v * g.lanes) for v in range(g.vectors)]
    return lambda r, v: ((gap + (r - v * g.lanes)) <= k.iota()) & (least[v] <= (at + r))


@dataclass(frozen=True)
class Dropout:
    """Multipliers of a block of probabilities, [key][g.queries] fp32, from the words that `program/ops/pointwise/random.py` defines."""

    rate: float
    stream: Value
    heads: int

    def key(self, k: KernelBuilder, sample: Value) -> tuple[Value, Value]:
        first, second = sample_key(k, k.scalar("seed"), k.scalar("step"), k.scalar("sample") + sample, self.stream)
        return k.splat(first), k.splat(second)

    def fill(
        self,
        k: KernelBuilder,
        g: Geometry,
        to: Pointer,
        key: tuple[Value, Value],
        head: Value,
        query: Value,
        first: Value,
        count: Value,
    ) -> None:
        """Rows of `count` keys from `first`, a multiple of 32."""
        rows = [k.splat((query + v * g.lanes) * self.heads + head) + k.iota() * self.heads for v in range(g.vectors)]
        with k.loop(0, count, 2 * HALF) as block, k.loop(0, HALF) as i:
            call = k.splat(((first + block) >> 1) + i)
            target = to.at((block + i) * g.queries)
            for v, row in enumerate(rows):
                for half, word in enumerate(threefry(k, key[0], key[1], call, row)):
                    target.store(keep(k, word, self.rate), half * HALF * g.queries + v * g.lanes)
