"""The GEMM micro-kernel on vector registers: an MR x NR tile of C, updated by one outer product for each step of the depth.

In registers: MR x (NR / lanes) accumulators, fp32; a row of the packed B panel (packing.py wrote it, it stays in the L1); one
broadcast element of A. With VNNI a step is a pair of bf16 along the depth. Each element of C is one accumulation chain over the
depth, so its bits do not depend on the blocking (gemm_config.py). `tile`: MR and the vectors of NR columns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from barellm.cpu.gemm_config import GemmConfig, Tile
from barellm.cpu.kernel import Pointer, Value, Var
from barellm.cpu.kernels.gemm.packing import LINE

OVERLAP_UNITS = 16  # steps of the depth between two calls of `overlap`
BroadcastA = Callable[[int, Value], Value]  # (row of the tile, step of the depth) -> that element of A in all lanes


def microkernel(k, tile: Tile, load_a: BroadcastA, panel, k_units, vnni: bool, *, tail: BroadcastA | None = None,
        prefetch: Callable[[Value], None] | None = None, overlap: Callable[[], None] | None = None,
        c_init: tuple[Value, Pointer] | None = None, is_last_k=None) -> list[list[Value]]:  # fmt: skip
    """A (mr, k_units) @ panel (k_units, nr): returns the accumulators, mr rows of fp32 vectors. A k unit is an element of the
    depth, with `vnni` a pair of bf16. `panel`: packed by `PackB` or `PackBTransposed`, [k unit][nr]. load_a(r, u): unit u of row
    r of A in all lanes; `tail`: the same for the odd last element, done where `is_last_k` (None: always). `c_init`: (i1, pointer to
    [mr][nr] fp32); where true the accumulators begin with what a KC block before left there. Software pipelining: `prefetch(r)` is
    called mr times at even distances (all at once would fill the line-fill buffers), `overlap()` `overlap_calls` times."""
    lanes, acc = k.lanes, zero_tile(k, tile)
    if c_init is not None:
        with k.when(c_init[0]):
            for i, x in enumerate(x for row in acc for x in row):
                x.value = c_init[1].load(i * lanes)

    def step(u, operand: BroadcastA) -> None:
        rank1_update(k, acc, operand, panel, u, vnni)

    if prefetch is None:
        with k.loop(0, k_units) as u:
            step(u, load_a)
    else:
        segment = (k_units + (tile.mr - 1)) // tile.mr  # units between two prefetches
        with k.loop(0, tile.mr) as r:
            start = r * segment
            prefetch(r)
            if overlap is None:
                with k.loop(start, k.min(start + segment, k_units)) as u:
                    step(u, load_a)
            else:  # the loop runs to the segment's end, also beyond k_units: so `overlap_calls` are made whatever k_units is
                with k.loop(start, start + segment, OVERLAP_UNITS) as first:
                    overlap()
                    with k.loop(first, k.min(k.min(first + OVERLAP_UNITS, start + segment), k_units)) as u:
                        step(u, load_a)
    if tail is not None:
        with k.when(is_last_k) if is_last_k is not None else nullcontext():
            step(k.int(k_units), tail)
    return [[x.value for x in row] for row in acc]


def zero_tile(k, tile: Tile) -> list[list[Var]]:
    """Accumulators of a tile, zero: mr rows of vectors."""
    return [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]


@contextmanager
def accumulators(k, tile: Tile, dst, pitch: int, add_previous) -> Iterator[list[list[Var]]]:
    """The accumulators of a tile: loaded from dst [mr][pitch] where `add_previous` (i1, None: never), else zero; stored at exit."""
    acc = zero_tile(k, tile)
    # (accumulator, where it lies in dst).
    places = [(x, dst.at(r * pitch + v * k.lanes)) for r, row in enumerate(acc) for v, x in enumerate(row)]
    if add_previous is not None:
        with k.when(add_previous):
            for x, p in places:
                x.value = p.load()
    yield acc
    for x, p in places:
        p.store(x.value)


def add_previous_sums(k, tokens_before, keep) -> Value:
    """Whether (i1) a chunk of a contraction over tokens is added to the result: where other chunks came before it, or where the op
    adds to what an earlier micro-batch left (`keep`, i1; None: never)."""
    follows = tokens_before > 0
    return follows if keep is None else k.op("i1", f"or i1 {follows.ref}, {keep.ref}")


def rank1_update(k, acc, load_a: BroadcastA, panel, u, vnni: bool) -> None:
    """acc (mr, nr) += outer product of step `u`: unit u of A's rows (load_a) x row u of the packed panel, fp32 or pairs."""
    vectors, lanes = len(acc[0]), k.lanes
    # NR columns of the panel's row u.
    right = [panel.as_dtype("i32").load_raw(u * (vectors * lanes) + v * lanes) for v in range(vectors)]
    for r, row in enumerate(acc):
        a = load_a(r, u)
        for x, b in zip(row, right, strict=True):
            x.value = k.dot(x.value, a, b) if vnni else k.fma(a, k.bitcast(b, k.vec), x.value)


def overlap_calls(k, tile: Tile, k_units) -> Value:
    """How often `microkernel` calls `overlap`."""
    return k.ceil_div(k.ceil_div(k_units, tile.mr), OVERLAP_UNITS) * tile.mr


def broadcast_a(k, a, rows, vnni: bool, *, depth: int, stride: int) -> tuple[BroadcastA, BroadcastA | None]:
    """Loads of A for `microkernel` from row-major memory, unpacked: `rows` (indices) of a (.., stride) in fp32 or bf16. Returns
    (the load of a whole k unit; of an odd last element of the `depth`, paired with zero, else None)."""
    bases = [a.at(row * stride) for row in rows]  # where each row of the tile begins
    if not vnni:
        return (lambda r, u: k.splat(bases[r].get(u))), None

    def load_pair(r: int, u) -> Value:
        p = bases[r].bytes(u << 2)  # a pair of bf16 has 4 bytes
        return k.splat(k.op("i32", f"load i32, ptr {p.ref}, align 2"))

    def load_last(r: int, u) -> Value:
        p = bases[r].bytes(u << 2)  # the upper half of the pair is zero
        return k.splat(k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {p.ref}, align 2').ref} to i32"))

    return load_pair, load_last if depth % 2 else None


def broadcast_packed(k, packed, unit_bytes: int, row_bytes: int, vnni: bool = True) -> BroadcastA:
    """Loads of packed A: unit u of row r (fp32, or a VNNI pair) is u * unit_bytes + r * row_bytes bytes from `packed` on."""
    word = "i32" if vnni else "float"

    def load_unit(r: int, u) -> Value:
        return k.splat(k.op(word, f"load {word}, ptr {packed.bytes(u * unit_bytes + r * row_bytes).ref}, align 4"))

    return load_unit


def block_of_item(item, config: GemmConfig, row_blocks, column_blocks) -> tuple[Value, Value]:
    """(row block, column block) of a work item. Order "rows": consecutive items share a row block. Row blocks have MC rows of C,
    column blocks are groups of panels."""
    if config.order == "rows":
        return item // column_blocks, item % column_blocks
    return item % row_blocks, item // row_blocks


def row_tiles(k, begin, full_end, end, rows: int, tile: Tile) -> Iterator[tuple[Value, Tile]]:
    """`for row, tile in row_tiles(...)`: the tiles of a block of rows [begin, end) of a matrix of `rows` rows: full ones to
    `full_end`, and where the block has the matrix's last, partial tile, that."""
    with k.loop(begin, full_end, tile.mr) as row:
        yield row, tile
    if tail := rows % tile.mr:
        with k.when(end > rows - tail):
            yield k.int(rows - tail), Tile(tail, tile.vectors)


def prefetch_row(k, p, count: int, *, write: bool) -> None:
    """Prefetch `count` elements from `p`. `write`: for stores, else for loads. One prefetch a cache line."""
    for line in range(0, count * p.itemsize, LINE):
        k.prefetch(p.bytes(line), write=write)
