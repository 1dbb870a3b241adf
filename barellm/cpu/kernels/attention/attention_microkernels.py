"""Tile layouts, packing and micro-kernels of attention: blocks of one head in a thread's scratch, and GEMMs of register tiles on
them.

Scores are kept transposed, S^T = K Q^T: keys are rows, queries are lanes. So the softmax has no horizontal sum or maximum, a causal
mask is one comparison, and the probabilities leave the registers as the right operand of the next GEMM.

Blocks in scratch consist of 32-bit units: one fp32, or, with a bf16 dot instruction, a VNNI pair: two bf16 that follow each other
along K, the contracted dimension. bf16 without such an instruction is converted to fp32 by packing.

Parameters: `g` is the Geometry, `s` the blocks of scratch by name (`blocks_of`), `t` the first query of a group of g.queries and
`j` the first key of a tile of g.rows; both count tokens.

    rows         (tokens, D)   [token][g.row_units]           units along D; padded with zeros
    vnni         (tokens, D)   [token / g.pair][g.padded_D]   units along the tokens; the same bytes as rows where g.pair is 1
    columns      (tokens, D)   [token / 32][g.padded_D][16]   units along the tokens, 32 tokens of a column in a cache line: for AMX
    transposed   (tokens, D)   [g.row_units][g.queries]       units along D, tokens as lanes
    accumulator  fp32: (g.acc_rows, queries) of a transposed result, else (tokens, g.padded_D)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import ISA, Op, Pointer, Value
from barellm.cpu.kernels.gemm import amx, packing
from barellm.cpu.lang.random import keep, sample_key, threefry
from barellm.cpu.lang.vector import EXP2, MAGIC, polynomial, transpose
from barellm.program.ops.pointwise.random import HALF
from barellm.program.tensor import Dim

# 2^f on [-0.5, 0.5], relative error 2.8e-6: a hundredth of what rounding a probability to bf16 costs.
EXP2_SHORT = (1.0, 0.6931241933586842, 0.24024098616755934, 0.05590642492460038, 0.00958285286558115)
TILE_VECTORS = 2  # vectors of queries of an AMX tile
KEY_BLOCK = 128  # keys of a block: a multiple of 32, the period of the dropout words, and of every tile's rows


@dataclass(frozen=True)
class Geometry:
    """Sizes of blocks and register tiles for a head size, dtype and ISA. A tile of scores has `rows` keys and `queries` lanes."""

    D: int
    pair: int  # bf16 numbers in a unit: 2 with a dot instruction, else 1
    lanes: int
    rows: int  # keys of a tile
    vectors: int = 2
    tiles: bool = False  # GEMMs in AMX tile registers, with operands and results in memory

    @classmethod
    def of(cls, isa: ISA, dtype: str, D: int, *, tiles: bool = True) -> Geometry:
        """`tiles` False: GEMMs in vector registers even where there are AMX tile registers."""
        if tiles and amx.uses_tiles(isa, dtype):
            return cls(D, 2, isa.lanes, amx.MR, TILE_VECTORS, True)
        return cls(D, 2 if packing.uses_vnni(isa, dtype) else 1, isa.lanes, 8 if isa.registers == 32 else 4)

    @property
    def queries(self) -> int:
        return self.vectors * self.lanes

    @property
    def padded_D(self) -> int:
        step = amx.TILE_K if self.tiles else self.lanes
        return -(-self.D // step) * step

    @property
    def acc_rows(self) -> int:
        """Rows of a transposed accumulator."""
        return self.padded_D if self.tiles else self.D

    @property
    def row_units(self) -> int:
        return self.padded_D // self.pair

    @property
    def d_steps(self) -> int:
        """Steps of a contraction over D."""
        return -(-self.D // self.pair)

    # Sizes of the blocks in units. Transposes read whole vectors, up to one vector beyond a block's last row.
    def rows_units(self, tokens: int) -> int:
        return tokens * self.row_units + self.lanes

    def vnni_units(self, tokens: int) -> int:
        return tokens // self.pair * self.padded_D

    @property
    def transposed_units(self) -> int:
        return -(-self.row_units // self.lanes) * self.lanes * self.queries

    def accumulator_units(self, blocks: int = 1) -> int:
        return (blocks * self.acc_rows + self.lanes) * self.queries


def offsets(units: dict[str, int]) -> tuple[dict[str, int], int]:
    """(byte offset of each named block of `units` 32-bit units, total bytes). All are multiples of 64, a cache line."""
    total, offset_of = 0, {}
    for name, n in units.items():
        offset_of[name] = total
        total += -(-4 * n // 64) * 64
    return offset_of, total


def blocks_of(k, units: dict[str, int]) -> dict[str, Pointer]:
    """The named blocks in this thread's scratch."""
    thread_scratch = k.thread_scratch("fp32")
    return {name: thread_scratch.bytes(k.int(at)) for name, at in offsets(units)[0].items()}


def size_constant(n: int) -> str | int:
    """A size as a compile-time constant: the number, or the name of the run-time scalar that has it."""
    return n.name if isinstance(n, Dim) else int(n)


def round_up(k, n, step: int) -> Value:
    """The next multiple of `step`, a power of two."""
    return (n + (step - 1)) & -step


def runtime_size(k, n: str | int) -> Value:
    """The run-time value of a `size_constant`."""
    return k.scalar(n) if isinstance(n, str) else k.int(n)


def size_constants(op: Op) -> dict[str, Any]:
    """Compile-time constants of every attention kernel. `strides`: elements from one row of q, k and v to the next."""
    B, T, C = op.out.shape
    strides = (op.q.row_stride, op.k.row_stride, op.v.row_stride)
    heads = {"heads": op.heads, "kv_heads": op.kv_heads, "D": int(C) // op.heads}
    return {"batch": size_constant(B), "seq": size_constant(T), **heads, "strides": strides}


@dataclass(frozen=True)
class Rows:
    """Rows of one head in memory: element (t, d) is pointer[t * stride + d]. With paired heads two rows, `pair_stride` apart, share
    a stride; such rows start at an even t."""

    pointer: Pointer
    stride: int
    pair_stride: int = 0

    def __getitem__(self, t) -> Pointer:
        if self.pair_stride:
            return self.pointer.at((t >> 1) * self.stride + (t & 1) * self.pair_stride)
        return self.pointer.at(t * self.stride)

    def start(self, t) -> Rows:
        return Rows(self[t], self.stride, self.pair_stride)

    @classmethod
    def of(cls, tensor, token, head, *, D: int, stride: int) -> Rows:
        """The rows of a head, from `token` on."""
        return cls(tensor.at(token * stride + head * D), stride)


def kv_head_of(head, heads: int, kv_heads: int) -> Value:
    """The key and value head of a query head: grouped-query attention (GQA) shares each among heads / kv_heads adjacent ones."""
    return head if heads == kv_heads else head // (heads // kv_heads)


# --- between memory and scratch ---


def pack_tile(k, g, source, count, total, dst) -> None:
    """Copy rows [0, count) of `source` to dst, a block of `rows`, zero-padded to g.padded_D columns and `total` rows."""
    with k.loop(0, count) as t:
        row, target = source[t], dst.at(t * g.row_units)
        for c, mask in k.columns(g.D):
            if g.pair == 2:
                target.as_dtype("bf16").store_raw(row.load_raw(c, mask), c)
            else:
                target.store(row.load(c, mask), c)
        for c in range(-(-g.D // g.lanes) * g.lanes, g.padded_D, g.lanes):
            target.as_dtype("bf16").store_raw(k.const(0, f"<{k.lanes} x i16>"), c)
    with k.loop(count, total) as t:
        target = dst.at(t * g.row_units)
        for c in range(0, g.padded_D, g.lanes):
            if g.pair == 2:
                target.as_dtype("bf16").store_raw(k.const(0, f"<{k.lanes} x i16>"), c)
            else:
                target.store(0.0, c)


def vnni_pack(k, g, rows, tokens, dst) -> Pointer:
    """Pack a block of `rows` of `tokens` tokens, a multiple of g.pair, into dst as a `vnni` block. Returns the packed block: `rows`
    itself where units are fp32, as nothing is copied then."""
    if g.pair == 1:
        return rows
    with k.loop(0, tokens, 2) as t:
        even, odd = rows.at(t * g.row_units).as_dtype("bf16"), rows.at((t + 1) * g.row_units).as_dtype("bf16")
        target = dst.at((t >> 1) * g.padded_D)
        for c in range(0, g.padded_D, g.lanes):
            target.store_raw(k.bitcast(k.interleave(even.load_raw(c), odd.load_raw(c)), k.vec), c)
    return dst


def pack_left(k, g, rows, count, dst) -> Pointer:
    """Pack a block of `rows` of `count` tokens, padded by `pack_tile`, into dst as the left operand of `accumulate_transposed`:
    `vnni`, or `columns` for AMX. Returns the packed block: dst, or `rows` if nothing had to be copied."""
    if not g.tiles:
        return vnni_pack(k, g, rows, round_up(k, count, g.pair), dst)
    with k.loop(0, count, amx.TILE_K) as t, k.loop(0, g.padded_D, g.lanes) as c:
        source = rows.at(t * g.row_units).as_dtype("bf16").at(c)
        target = dst.as_dtype("i32").at((t >> 1) * g.padded_D + c * amx.SIDE)
        tokens = [source.load_raw(i * g.padded_D) for i in range(amx.TILE_K)]
        square = [k.bitcast(k.interleave(*pair), k.ivec) for pair in zip(tokens[::2], tokens[1::2], strict=True)]
        for i, column in enumerate(transpose(k, square)):
            target.store_raw(column, i * amx.SIDE)
    return dst


def transpose_tile(k, g, rows, dst) -> None:
    """Transpose a block of `rows` of g.queries tokens into dst, a `transposed` block, in squares of `lanes` x `lanes` units."""
    with k.loop(0, g.queries, g.lanes) as v, k.loop(0, g.row_units, g.lanes) as c:
        source, target = rows.at(v * g.row_units + c), dst.at(c * g.queries + v)
        square = [source.load(i * g.row_units) for i in range(g.lanes)]
        for i, column in enumerate(transpose(k, square)):
            target.store(column, i * g.queries)


def transpose_accumulator(k, g, transposed, dst, factor) -> None:
    """dst (queries, g.padded_D) = the transpose of the accumulator `transposed` (D, queries), times `factor`: for each of g.vectors
    vectors of queries a vector of factors."""
    for v in range(g.vectors):
        with k.loop(0, g.padded_D, g.lanes) as d:
            source = transposed.at(d * g.queries)
            square = [source.load(i * g.queries + v * g.lanes) * factor[v] for i in range(g.lanes)]
            target = dst.at(d)
            for i, row in enumerate(transpose(k, square)):
                target.store(row, (v * g.lanes + i) * g.padded_D)


def unpack_tile(k, g, rows, count, dst, factor, add=None) -> None:
    """dst (count, D) in memory = fp32 rows [token][g.padded_D] times `factor`, plus the old dst where `add` (i1; None: never)."""
    with k.loop(0, count) as t:
        row, target = rows.at(t * g.padded_D), dst[t]
        for c, mask in k.columns(g.D):
            value = row.load(c) * factor
            if add is not None:
                value = value + k.select(add, target.load(c, mask), k.to(0.0, k.vec))
            target.store(value, c, mask)


# --- micro-kernels ---


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


def micro_kernel(k, g, a: Left, b: Right, steps, start=None, **shape: int) -> list[list[Value]]:
    """start + A @ B over `steps` units of the contraction: a register tile of g.rows rows x g.vectors vectors (or `rows`, `vectors`
    of `shape`), as values [row][vector]; `start` None: zero. Each element is one accumulation chain, in order."""
    rows, vectors = shape.get("rows", g.rows), shape.get("vectors", g.vectors)
    acc = [[k.var(start[r][v] if start else k.to(0.0, k.vec)) for v in range(vectors)] for r in range(rows)]
    with k.loop(0, steps) as s:
        left, right = a.pointer.at(s * a.step), b.pointer.at(s * b.step)
        if g.pair == 2:
            right = right.as_dtype("i32")
        columns = [right.load_raw(v * g.lanes) for v in range(vectors)]
        for r in range(rows):
            if g.pair == 2:
                broadcast = k.splat(k.op("i32", f"load i32, ptr {left.at(r * a.row).ref}, align 4"))
            else:
                broadcast = k.splat(left.get(r * a.row))
            for v in range(vectors):
                old = acc[r][v].value
                acc[r][v].value = k.dot(old, broadcast, columns[v]) if g.pair == 2 else k.fma(broadcast, columns[v], old)
    return [[x.value for x in row] for row in acc]


def score_tile(k, g, rows, first, transposed, start=None) -> list[list[Value]]:
    """A register tile of K Q^T or V dO^T plus `start` (None: zero): tokens [first, first + g.rows) of a block of `rows` x the
    g.queries tokens of a `transposed` block. Returns values [row][vector]."""
    return micro_kernel(k, g, Left(rows.at(first * g.row_units), g.row_units, 1), Right(transposed, g.queries), g.d_steps, start)


def score_tile_amx(k, g, rows, first, transposed, dst) -> None:
    """A tile of K Q^T or V dO^T on AMX, as `score_tile` without a start, to memory: dst [g.rows][g.queries] fp32."""
    left = amx.row_major(rows.at(first * g.row_units), 4 * g.row_units)
    amx.gemm_accumulate(k, dst, left, transposed, g.row_units // amx.SIDE, rows=g.rows, cols=g.queries, begins=True)


def accumulate_transposed(k, g, acc, vnni, right, begin, end, factor=None) -> None:
    """acc (D, queries) = acc * factor + X^T R, contracted over the tokens [begin, end): X (tokens, D) packed by `pack_left`, R
    (tokens, queries) in units along the tokens; `factor`: vectors with a lane for each query, None: 1. `begin` is a Value or 0. On
    AMX begin and end are multiples of 32."""
    tokens = end
    if isinstance(begin, Value):
        vnni, right = vnni.at(begin // g.pair * g.padded_D), right.at(begin // g.pair * g.queries)
        tokens = end - begin
    if g.tiles:
        if factor is not None:  # tile registers cannot be scaled: a pass of its own
            with k.loop(0, g.padded_D * g.queries, g.queries) as at:
                for v, f in enumerate(factor):
                    acc.store(acc.load(at + v * g.lanes) * f, at + v * g.lanes)
        left = amx.TileA(vnni, amx.LINE, g.padded_D * amx.LINE, amx.TILE_BYTES)
        amx.gemm_accumulate(k, acc, left, right, tokens // amx.TILE_K, rows=g.padded_D, cols=g.queries)
        return

    def multiply_tile(d, rows: int) -> None:
        """Accumulate a register tile: `rows` rows of acc, which are the columns of X from d on."""
        block = acc.at(d * g.queries)
        start = [[block.load(r * g.queries + v * g.lanes) for v in range(g.vectors)] for r in range(rows)]
        if factor is not None:
            start = [[x * f for x, f in zip(row, factor, strict=True)] for row in start]
        a, b = Left(vnni.at(d), 1, g.padded_D), Right(right, g.queries)
        for r, row in enumerate(micro_kernel(k, g, a, b, k.ceil_div(tokens, g.pair), start, rows=rows)):
            for v, x in enumerate(row):
                block.store(x, r * g.queries + v * g.lanes)

    full_rows = g.D - g.D % g.rows
    if full_rows:
        with k.loop(0, full_rows, g.rows) as d:
            multiply_tile(d, g.rows)
    if g.D % g.rows:
        multiply_tile(full_rows, g.D % g.rows)


def accumulate_rows(k, g, acc, left_block, vnni, begin, end) -> None:
    """acc (tokens, g.padded_D) += L @ X for the tokens [begin, end), contracted over a group's g.queries queries: L (tokens,
    g.queries) in units along the queries, X (g.queries, D) a `vnni` block. Full tiles of g.rows tokens are computed, which may
    reach beyond `end`."""
    per_row = g.queries // g.pair  # units of a row of L
    if g.tiles:
        with k.loop(begin, end, g.rows) as t:
            left = amx.row_major(left_block.at(t * per_row), 4 * per_row)
            amx.gemm_accumulate(k, acc.at(t * g.padded_D), left, vnni, per_row // amx.SIDE, rows=g.rows, cols=g.padded_D)
        return

    def multiply_tile(t, c: Any, vectors: int) -> None:
        """Accumulate a register tile: g.rows tokens from t on x `vectors` vectors of columns from c on."""
        block = acc.at(t * g.padded_D + c)
        start = [[block.load(r * g.padded_D + v * g.lanes) for v in range(vectors)] for r in range(g.rows)]
        a, b = Left(left_block.at(t * per_row), per_row, 1), Right(vnni.at(c), g.padded_D)
        for r, row in enumerate(micro_kernel(k, g, a, b, per_row, start, vectors=vectors)):
            for v, x in enumerate(row):
                block.store(x, r * g.padded_D + v * g.lanes)

    step = g.vectors * g.lanes
    full_columns = g.padded_D - g.padded_D % step
    with k.loop(begin, end, g.rows) as t:
        if full_columns:
            with k.loop(0, full_columns, step) as c:
                multiply_tile(t, c, g.vectors)
        if g.padded_D % step:
            multiply_tile(t, full_columns, g.padded_D % step // g.lanes)


def clear(k, block, units) -> None:
    """Zero `units` (a multiple of the lanes)."""
    with k.loop(0, units, k.lanes) as i:
        block.store(0.0, i)


# --- softmax and dropout ---


def exp2_nonpositive(k, g, x) -> Value:
    """2^x for x <= 0 (up to rounding); 0 at -infinity, NaN for NaN. x = n + f: 2^f is a polynomial; n is added to the exponent."""
    x = k.max(-127.0, x)  # an exponent field of zero; of a NaN this is the NaN
    shifted = x + MAGIC
    p = polynomial(k, x - (shifted - MAGIC), EXP2_SHORT if g.pair == 2 else EXP2)
    return k.bitcast(k.bitcast(p, k.ivec) + (k.bitcast(shifted, k.ivec) << 23), k.vec)


def pack_units(k, g, even, odd) -> Value:
    """Round two rows of fp32 lanes to VNNI pairs (even, odd); with g.pair 1 return the one row as it is."""
    if odd is None:
        return even
    return k.bitcast(k.interleave(k.round_bf16(even), k.round_bf16(odd)), k.vec)


def store_units(k, g, dst, row) -> None:
    """Store a row of g.queries fp32 lanes as units along the row."""
    for v, x in enumerate(row):
        if g.pair == 2:
            dst.as_dtype("bf16").store(x, v * g.lanes)
        else:
            dst.store(x, v * g.lanes)


@dataclass(frozen=True)
class KeyBounds:
    """The first keys that a group's queries see: `first` of the first query, `last` of the last, `first_keys` of each (i32)."""

    first: Value
    last: Value
    first_keys: Pointer

    def first_row(self, k, g, j0) -> Value:
        """The index in the block from key j0 on of the first key that any of the queries sees, rounded down to a tile."""
        return k.max(self.first - j0, 0) & -g.rows


LaneMask = Callable[[Any, int], Value]  # (row of a tile, vector) -> lanes whose queries see the row's key
TileMask = Callable[[Value], tuple[Value, Callable[[], LaneMask]]]  # tile -> whether it is partly masked, and its mask


def tile_mask(k, g, position, key_bounds: KeyBounds | None, length, j0, j) -> tuple[Value, Callable[[], LaneMask]]:
    """(partly masked (i1), function that returns the lane mask) of a tile of g.rows keys and the group of queries from `position`
    on. The tile begins at row j of the block from key j0 on (None: at key j). `length`: the number of keys of full attention, None:
    causal; `key_bounds`: the first keys that windows or documents leave, None: all from 0 on."""
    key = j if j0 is None else j0 + j

    def make_mask() -> LaneMask:
        """Emit what is common to a tile; returns the function that gives the lane mask of row r and vector v."""
        if length is not None:
            remaining = length - key
            return lambda r, v: k.splat(remaining - r) > 0
        distance = k.splat(key - position)
        if key_bounds is None:
            return lambda r, v: (distance + (r - v * g.lanes)) <= k.iota()
        keys = k.splat(key)
        first_keys = [key_bounds.first_keys.load(v * g.lanes) for v in range(g.vectors)]
        return lambda r, v: ((distance + (r - v * g.lanes)) <= k.iota()) & (first_keys[v] <= (keys + r))

    if length is not None:
        return (key + g.rows) > length, make_mask
    beyond_causal = (key + (g.rows - 1)) > position
    return beyond_causal if key_bounds is None else beyond_causal | (key < key_bounds.last), make_mask


@dataclass(frozen=True)
class Dropout:
    """Multipliers of a block of probabilities, [key][g.queries] fp32: 0 with probability `rate`, else 1 / (1 - rate), by the random
    words that `program/ops/pointwise/random.py` defines. `stream`: the number of the random stream; `heads`: query heads."""

    rate: float
    stream: Value
    heads: int

    def key(self, k, sample) -> tuple[Value, Value]:
        """The threefry key of a sequence in this step, two i32 in all lanes."""
        first, second = sample_key(k, k.scalar("seed"), k.scalar("step"), k.scalar("sample") + sample, self.stream)
        return k.splat(first), k.splat(second)

    def fill(self, k, g, dst, key, head, query, first, count) -> None:
        """dst [key][g.queries] = the multipliers of keys [first, first + count) and of the group of queries from `query` on.
        `first` is a multiple of 32 = 2 HALF: one call of threefry gives two words, for keys that are HALF apart."""
        rows = [k.splat((query + v * g.lanes) * self.heads + head) + k.iota() * self.heads for v in range(g.vectors)]
        with k.loop(0, count, 2 * HALF) as block, k.loop(0, HALF) as i:
            call = k.splat(((first + block) >> 1) + i)
            target = dst.at((block + i) * g.queries)
            for v, row in enumerate(rows):
                for half, word in enumerate(threefry(k, key[0], key[1], call, row)):
                    target.store(keep(k, word, self.rate), half * HALF * g.queries + v * g.lanes)
