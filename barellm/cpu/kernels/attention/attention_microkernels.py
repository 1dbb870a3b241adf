"""Micro-kernels and packing of attention, on blocks of one head in a thread's scratch.

`g`: Geometry of the tiles. `s`: the thread's scratch blocks by name. A register tile of scores is S^T = K Q^T, g.rows keys x
g.queries queries: queries are lanes, so the softmax has no horizontal sum or maximum, a causal mask is one comparison, and the
probabilities leave the registers as the right operand of the next GEMM.

A block consists of 32-bit units: an fp32, or with a bf16 dot product a VNNI pair (g.pair = 2 bf16 along the contracted dimension):

    rows         (tokens, D)  [token][g.row_units]           units along D, zero-padded
    vnni         (tokens, D)  [token / g.pair][g.padded_D]   units along the tokens; fp32: the same as rows
    columns      (tokens, D)  [token / 32][g.padded_D][16]   AMX's vnni: 32 tokens of a column in a cache line
    transposed   (tokens, D)  [g.row_units][g.queries]       units along D, tokens as lanes
    accumulator  fp32 (g.acc_rows, queries) of a transposed result, else (tokens, g.padded_D)

`t` is the first query of a group of g.queries, `j` the first key of a tile of g.rows; both count tokens. bf16 without a dot product
becomes fp32 while it is packed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import ISA, Op, Pointer, Value, batch_and_seq
from barellm.cpu.kernels.gemm import amx, packing
from barellm.cpu.kernels.loops import pieces
from barellm.cpu.lang.random import keep, sample_key, threefry
from barellm.cpu.lang.vector import EXP2, MAGIC, polynomial, transpose
from barellm.program.ops.pointwise.random import HALF

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
    def of(cls, isa: ISA, dtype: str, D: int, *, tiles: bool = True) -> "Geometry":
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


def round_up(k, n, step: int) -> Value:
    """The next multiple of `step`, a power of two."""
    return (n + (step - 1)) & -step


def size_constants(op: Op) -> dict[str, Any]:
    """Compile-time constants of every attention kernel. `strides`: elements from one row of q, k and v to the next."""
    strides = (op.q.row_stride, op.k.row_stride, op.v.row_stride)
    heads = {"heads": op.heads, "kv_heads": op.kv_heads, "D": int(op.out.shape[-1]) // op.heads}
    return {**batch_and_seq(op.out), **heads, "strides": strides}


@dataclass(frozen=True)
class HeadRows:
    """Rows of one head in memory: element (t, d) is pointer[t * stride + d]. With paired heads two rows, `pair_stride` apart, share
    a stride; such rows start at an even t."""

    pointer: Pointer
    stride: int
    pair_stride: int = 0

    def __getitem__(self, t) -> Pointer:
        if self.pair_stride:
            return self.pointer.at((t >> 1) * self.stride + (t & 1) * self.pair_stride)
        return self.pointer.at(t * self.stride)

    def start(self, t) -> "HeadRows":
        return HeadRows(self[t], self.stride, self.pair_stride)

    @classmethod
    def of(cls, tensor, token, head, *, D: int, stride: int) -> "HeadRows":
        """The rows of a head, from `token` on."""
        return cls(tensor.at(token * stride + head * D), stride)


def kv_head_of(head, heads: int, kv_heads: int) -> Value:
    """The key and value head of a query head: grouped-query attention (GQA) shares each among heads / kv_heads adjacent ones."""
    return head if heads == kv_heads else head // (heads // kv_heads)


# --- between memory and scratch ---


def pack_tile(k, g, source, count, total, dst) -> None:
    """Pack rows [0, count) of `source` (HeadRows of D elements, any dtype) into the scratch block dst of layout `rows`,
    [total][g.row_units] units. Columns from D to g.padded_D and rows from `count` to `total` become zero."""
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
    """Pack `tokens` (a multiple of g.pair) tokens of `rows`, a block written by `pack_tile`, into dst as a `vnni` block: row t / 2
    has the bf16 pairs (t, t + 1) of each column. Returns the packed block: `rows` itself with fp32 units."""
    if g.pair == 1:
        return rows
    with k.loop(0, tokens, 2) as t:
        even, odd = rows.at(t * g.row_units).as_dtype("bf16"), rows.at((t + 1) * g.row_units).as_dtype("bf16")
        target = dst.at((t >> 1) * g.padded_D)  # row t / 2 of the pairs
        for c in range(0, g.padded_D, g.lanes):
            target.store_raw(k.bitcast(k.interleave(even.load_raw(c), odd.load_raw(c)), k.vec), c)
    return dst


def pack_left(k, g, rows, count, dst) -> Pointer:
    """Pack `count` tokens of `rows`, a block written by `pack_tile`, as the left operand X of `accumulate_transposed`. Returns
    where it lies: dst as `vnni`, or for AMX as `columns`; `rows` itself with fp32 units."""
    if not g.tiles:
        return vnni_pack(k, g, rows, round_up(k, count, g.pair), dst)
    with k.loop(0, count, amx.TILE_K) as t, k.loop(0, g.padded_D, g.lanes) as c:
        source = rows.at(t * g.row_units).as_dtype("bf16").at(c)
        target = dst.as_dtype("i32").at((t >> 1) * g.padded_D + c * amx.SIDE)
        tokens = [source.load_raw(i * g.padded_D) for i in range(amx.TILE_K)]  # TILE_K tokens x `lanes` columns
        square = [k.bitcast(k.interleave(*pair), k.ivec) for pair in zip(tokens[::2], tokens[1::2], strict=True)]
        for i, column in enumerate(transpose(k, square)):
            target.store_raw(column, i * amx.SIDE)
    return dst


def transpose_tile(k, g, rows, dst) -> None:
    """Transpose g.queries tokens of `rows`, a block written by `pack_tile`, into dst as a `transposed` block
    [g.row_units][g.queries], in register squares of `lanes` x `lanes` units."""
    with k.loop(0, g.queries, g.lanes) as v, k.loop(0, g.row_units, g.lanes) as c:
        source, target = rows.at(v * g.row_units + c), dst.at(c * g.queries + v)  # of a square: tokens v.., units c..
        square = [source.load(i * g.row_units) for i in range(g.lanes)]
        for i, column in enumerate(transpose(k, square)):
            target.store(column, i * g.queries)


def transpose_accumulator(k, g, transposed, dst, factor) -> None:
    """dst [queries][g.padded_D] fp32 = `factor` times the transpose of the accumulator `transposed` [D][queries] fp32, that
    `accumulate_transposed` left; `factor`: g.vectors vectors, a lane for each query. Reads and writes whole squares: rows of the
    accumulator from D to g.padded_D are padding of its scratch, and so are dst's columns."""
    for v in range(g.vectors):
        with k.loop(0, g.padded_D, g.lanes) as d:
            source = transposed.at(d * g.queries)
            square = [source.load(i * g.queries + v * g.lanes) * factor[v] for i in range(g.lanes)]
            target = dst.at(d)
            for i, row in enumerate(transpose(k, square)):
                target.store(row, (v * g.lanes + i) * g.padded_D)


def unpack_tile(k, g, rows, count, dst, factor, add=None) -> None:
    """dst (count, D) in memory, of any dtype, = `factor` times fp32 rows [count][g.padded_D], plus the old dst where `add` (i1)."""
    with k.loop(0, count) as t:
        row, target = rows.at(t * g.padded_D), dst[t]
        for c, mask in k.columns(g.D):
            value = row.load(c) * factor
            if add is not None:
                value = value + k.select(add, target.load(c, mask), k.to(0.0, k.vec))
            target.store(value, c, mask)


# --- micro-kernels ---


@dataclass(frozen=True)
class BroadcastOperand:
    """The left operand of `micro_kernel`, whose units are broadcast: unit s of row r at pointer[r * row + s * step]."""

    pointer: Pointer
    row: int
    step: int


@dataclass(frozen=True)
class VectorOperand:
    """The right operand of `micro_kernel`, loaded as vectors: columns v * lanes ... of unit s at pointer[s * step + v * lanes]."""

    pointer: Pointer
    step: int


def micro_kernel(k, g, a: BroadcastOperand, b: VectorOperand, steps, start=None, **shape: int) -> list[list[Value]]:
    """A @ B + start on a register tile: values [row][vector] of g.rows rows x g.vectors vectors of fp32 (or `rows`, `vectors` of
    `shape`), by an outer product for each of `steps` units of the contracted dimension (fp32, or bf16 pairs by a dot product).
    `start`: values of the same shape, None: zero. An element is one accumulation chain in the order of the steps."""
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


def load_tile(g, block, row_stride: int, **shape: int) -> list[list[Value]]:
    """The values [row][vector] of a register tile, as `micro_kernel` has it, of fp32 in scratch: `block`, its first element."""
    rows, vectors = shape.get("rows", g.rows), shape.get("vectors", g.vectors)
    return [[block.load(r * row_stride + v * g.lanes) for v in range(vectors)] for r in range(rows)]


def store_tile(g, tile, dst, row_stride: int) -> None:
    """Store the values [row][vector] of a register tile as fp32: vector v of row r from dst[r * row_stride + v * g.lanes] on."""
    for r, row in enumerate(tile):
        for v, x in enumerate(row):
            dst.store(x, r * row_stride + v * g.lanes)


def score_tile(k, g, rows, first, transposed, start=None) -> list[list[Value]]:
    """A register tile of K Q^T or V dO^T plus `start` (None: zero): tokens [first, first + g.rows) of a block of `rows` x the
    g.queries tokens of a `transposed` block. Returns values [row][vector]."""
    return micro_kernel(
        k, g, BroadcastOperand(rows.at(first * g.row_units), g.row_units, 1), VectorOperand(transposed, g.queries), g.d_steps, start
    )


def score_tile_amx(k, g, rows, first, transposed, dst) -> None:
    """A tile of K Q^T or V dO^T on AMX, as `score_tile` without a start, to memory: dst [g.rows][g.queries] fp32."""
    left = amx.row_major(rows.at(first * g.row_units), 4 * g.row_units)
    amx.gemm_accumulate(k, dst, left, transposed, g.row_units // amx.SIDE, rows=g.rows, cols=g.queries, begins=True)


def accumulate_transposed(k, g, acc, vnni, right, begin, end, factor=None) -> None:
    """acc [D][queries] fp32 = acc * factor + X^T R over the tokens [begin, end): the GEMM of P V and dS K, transposed. X (tokens,
    D) was packed by `pack_left`; R (tokens, queries) has units along the tokens (`probabilities`, dS). `factor`: g.vectors vectors,
    a lane for each query (the online softmax's rescaling), None: 1. `begin`: a Value or 0; AMX: multiples of 32."""
    tokens = end  # how many
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

    for d, rows in pieces(k, g.D, g.rows):  # register tiles: rows of acc, which are columns of X
        block = acc.at(d * g.queries)
        start = load_tile(g, block, g.queries, rows=rows)
        if factor is not None:
            start = [[x * f for x, f in zip(row, factor, strict=True)] for row in start]
        a, b = BroadcastOperand(vnni.at(d), 1, g.padded_D), VectorOperand(right, g.queries)
        tile = micro_kernel(k, g, a, b, k.ceil_div(tokens, g.pair), start, rows=rows)
        store_tile(g, tile, block, g.queries)


def accumulate_rows(k, g, acc, left_block, vnni, begin, end) -> None:
    """acc [token][g.padded_D] fp32 += L @ X for the tokens [begin, end), contracted over the g.queries queries of a group: the GEMM
    of dV and dK. L [token][units along the queries] was stored by `store_units`, X (g.queries, D) is a `vnni` block (of dO or Q).
    Tiles of g.rows tokens are computed whole, so rows up to a tile behind `end` are written too."""
    per_row = g.queries // g.pair  # units of a row of L
    if g.tiles:
        with k.loop(begin, end, g.rows) as t:
            left = amx.row_major(left_block.at(t * per_row), 4 * per_row)
            amx.gemm_accumulate(k, acc.at(t * g.padded_D), left, vnni, per_row // amx.SIDE, rows=g.rows, cols=g.padded_D)
        return

    with k.loop(begin, end, g.rows) as t:
        for c, width in pieces(k, g.padded_D, g.vectors * g.lanes):  # register tiles: g.rows tokens x `width` columns
            block, vectors = acc.at(t * g.padded_D + c), width // g.lanes
            start = load_tile(g, block, g.padded_D, vectors=vectors)
            a, b = BroadcastOperand(left_block.at(t * per_row), per_row, 1), VectorOperand(vnni.at(c), g.padded_D)
            store_tile(g, micro_kernel(k, g, a, b, per_row, start, vectors=vectors), block, g.padded_D)


def clear(k, block, units) -> None:
    """Zero `units` (a multiple of the lanes)."""
    with k.loop(0, units, k.lanes) as i:
        block.store(0.0, i)


# --- softmax and dropout ---


def exp2_nonpositive(k, g, x) -> Value:
    """2^x for x <= 0 (up to rounding); 0 at -infinity, NaN for NaN. x = n + f: 2^f is a polynomial; n is added to the exponent."""
    x = k.max(-127.0, x)  # an exponent field of zero; of a NaN this is the NaN
    shifted = x + MAGIC  # rounds x to an integer n, in the low bits
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
    """The mask of a register tile of g.rows keys x the group of queries from `position` on: (i1, whether a mask is needed at all;
    make_mask). make_mask() emits what the tile's rows share and returns is_visible(r, v), the lanes of vector v that see the tile's
    key r. The tile begins at row j of the block from key j0 on (None: at key j). `length`: the number of keys of full attention,
    None: causal. `key_bounds`: each query's first key where windows or documents limit them, else None."""
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
    """Dropout of the probabilities of a query head, number `head` of `heads`, of one sequence: 0 with probability `rate`, else 1 /
    (1 - rate), by the random words that `program/ops/pointwise/random.py` defines. `key`: of the generator threefry for this
    sequence and step, two i32 in all lanes."""

    rate: float
    key: tuple[Value, Value]
    head: Value
    heads: int

    @classmethod
    def of(cls, k, rate: float, stream, heads: int, sequence, head) -> "Dropout | None":
        """None with a rate of 0; `stream`: the number of the random stream."""
        if not rate:
            return None
        first, second = sample_key(k, k.scalar("seed"), k.scalar("step"), k.scalar("sample") + sequence, stream)
        return cls(rate, (k.splat(first), k.splat(second)), head, heads)

    def fill(self, k, g, dst, query, first, count) -> None:
        """dst [key][g.queries] fp32 = multipliers 0 or 1 / (1 - rate) of the keys [first, first + count) for the queries from
        `query` on. `first`: a multiple of 32 = 2 HALF, for threefry gives words of keys HALF apart."""
        # Number of (query, head), in lanes.
        rows = [k.splat((query + v * g.lanes) * self.heads + self.head) + k.iota() * self.heads for v in range(g.vectors)]
        with k.loop(0, count, 2 * HALF) as block, k.loop(0, HALF) as i:
            call = k.splat(((first + block) >> 1) + i)  # call number of the generator
            target = dst.at((block + i) * g.queries)
            for v, row in enumerate(rows):
                for half, word in enumerate(threefry(k, *self.key, call, row)):
                    target.store(keep(k, word, self.rate), half * HALF * g.queries + v * g.lanes)
