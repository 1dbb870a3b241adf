"""How products and attention are cut: the tile of a program, and into how many parts a weight gradient's sum over tokens is split.

A tile changes speed and no bit of the result: each element is one chain over the contraction. The split does change bits, so it
is a function of the shape alone. Both count programs against WAVE, the multiprocessors of an H100, whatever card is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from barellm.program.integers import ceil_div

WAVE = 132
LEAST_ROWS = 256  # of one part of a split sum
MOST_SPLITS = 64
GROUPS = (4, 8, 16, 32)  # rows of tiles that may be walked together
SPLIT_ROWS = 5  # writing and reading one more partial tile takes as long as multiplying this many rows into a tile


@dataclass(frozen=True)
class Tile:
    """`rows` x `cols` of the result in one program, `depth` of the contraction a turn, `stages` turns in flight. `group` rows of
    tiles are done together, column by column, so that their operands stay in the second cache."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    group: int = 8

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth} {self.warps}w {self.stages}s g{self.group}"


# Largest first. Shared memory is stages * (rows + cols) * depth * itemsize; accumulators rows * cols / (32 * warps) registers.
_BF16 = {
    80: (Tile(128, 256, 32, 8, 3), Tile(128, 128, 32, 4, 4), Tile(128, 64, 32, 4, 4), Tile(64, 64, 32, 4, 4)),
    89: (Tile(128, 128, 32, 8, 4), Tile(128, 64, 32, 4, 4), Tile(64, 64, 32, 4, 4)),
    90: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
}
# Other cards do as one of these does: 8.7 has the shared memory of 8.0; those with tcgen05 that of 9.0; and the tiles of sm_89,
# whose 99 KiB and mma are what 8.6 and 12.0 have, run everywhere.
_ALIKE = {87: 80, 100: 90, 101: 90, 103: 90, 110: 90}
# The first fp32 tile multiplies for 1024 cycles a turn, longer than a load takes; with a third turn in flight, one form spilled.
_FP32 = (Tile(128, 64, 16, 8, 2), Tile(64, 64, 16, 4, 3), Tile(32, 64, 16, 4, 3), Tile(32, 32, 16, 2, 3))
# Of fp32 operands on tensor cores; the largest fills the 99 KiB of sm_89.
_TF32 = (Tile(128, 128, 32, 8, 3), Tile(128, 64, 32, 4, 3), Tile(64, 64, 32, 4, 3), Tile(32, 64, 32, 4, 3))


def alike(arch: int) -> int:
    """The compute capability, of those with tiles of their own, whose tiles `arch` takes."""
    return arch if arch in _BF16 else _ALIKE.get(arch, 89)


def tiles(dtype: str, arch: int) -> tuple[Tile, ...]:
    """All that a product can be cut into; of fp16 what bf16 is cut into."""
    return {"fp32": _FP32, "tf32": _TF32}.get(dtype) or _BF16[alike(arch)]


def tile(role: str, rows: int, cols: int, depth: int, dtype: str, arch: int) -> Tile:
    """The tile for a result of (rows, cols) and a contraction of `depth` that leaves the least idle and padded work. A smaller
    tile loads more for each product, which counts as a tenth of its time for each step down the list. Weight gradients ("tn") are
    split until they fill the card."""
    best, least = None, 0.0
    for step, t in enumerate(tiles(dtype, arch)):
        count = ceil_div(rows, t.rows) * ceil_div(cols, t.cols)
        if role == "tn":
            count *= splits(count, depth)
            work = ceil_div(rows, t.rows) * ceil_div(cols, t.cols) / count
        else:
            work = 1.0
        time = ceil_div(count, WAVE) * work * t.rows * t.cols * (1 + 0.1 * step)
        if best is None or time < least:
            best, least = t, time
    assert best is not None
    return best


def splits(tiles: int, rows: int) -> int:
    """The number of parts that a sum over `rows` tokens is split into if the result has `tiles` tiles: as many as fill the card
    best, the cost of partial results included. Rows are rounded down to a power of two, so that only a few shapes need be looked
    at to find the most."""
    rows = 1 << (max(rows, 1).bit_length() - 1)

    def time(s: int) -> int:
        return ceil_div(tiles * s, WAVE) * ceil_div(rows, s) + (SPLIT_ROWS * tiles * s if s > 1 else 0)

    return min(range(1, min(MOST_SPLITS, max(rows // LEAST_ROWS, 1)) + 1), key=time)


def most_splits(tiles: int, rows: int) -> int:
    """The largest `splits` of any number of rows up to `rows`."""
    return max(splits(tiles, 1 << i) for i in range(max(rows, 1).bit_length()))


FEW = 8  # rows of activations, for which a product is done by reading the weight
FEW_LONGEST = 1 << 14  # columns of a weight whose rows fit in registers
_HELD = 4096  # elements of the weight in one program: 32 a thread, 64 bytes of bf16 under way


def few_rows_tile(columns: int) -> tuple[int, int]:
    """(rows of the weight that a program holds, warps), for rows of `columns`, padded to a power of two."""
    return max(1, _HELD // columns), 4 if columns <= _HELD else 8


ROWS, DEPTH = 128, 64  # of a tile of Hopper's products: two halves of 64 rows, 128 bytes of bf16 a turn
SHARED = 232448 - 1024  # bytes of shared memory for their rings; barriers and what the compiler needs take the rest
SLOT = 8192  # 64 rows of 128 bytes


@dataclass(frozen=True)
class Form:
    """How a product on Hopper is cut: tiles of ROWS x `cols`, a ring of `stages`, `slots` of each half for blocks on their way out,
    and in where the epilogue reads. `stages` fill the shared memory that the slots leave. `group`: as of a Tile; 16 x 8 tiles of
    128 x 256, a wave, read the fewest bytes."""

    cols: int
    stages: int
    slots: int
    group: int = 16

    def __str__(self) -> str:
        return f"128x{self.cols} {self.stages} stages {self.slots} slots g{self.group}"


def form(cols: int, *, fetched: bool) -> Form:
    """Two slots keep a block on its way out while the next is computed. Where blocks come in first, twice that hides the way in."""
    return _filled(cols, 4 if fetched else 2)


def _filled(cols: int, slots: int) -> Form:
    return Form(cols, (SHARED - 2 * slots * SLOT) // (ROWS + cols) // (2 * DEPTH), slots)


def forms() -> tuple[Form, ...]:
    """All that a product on Hopper can be cut into."""
    return tuple(_filled(cols, slots) for cols in (256, 128) for slots in (2, 4))


def orders(choice: Tile | Form) -> tuple[Tile | Form, ...]:
    """The same in every order of tiles, its own first."""
    return (choice, *(replace(choice, group=group) for group in GROUPS if group != choice.group))


def columns(role: str, rows: int, cols: int, depth: int) -> int:
    """Columns of a tile for a result of (rows, cols): the fewest columns times waves. 128 load 4/3 as much for each product."""

    def time(width: int) -> float:
        tiles = ceil_div(rows, ROWS) * ceil_div(cols, width)
        parts = splits(tiles, depth) if role == "tn" else 1
        return ceil_div(tiles * parts, WAVE) / parts * width * (1.0 if width == 256 else 1.15)

    return min((256, 128), key=time)


@dataclass(frozen=True)
class AttentionTile:
    """`queries` x `keys` scores at a time in one program. `registers`: the most of a thread, where the compiler would take more
    than let two programs share a multiprocessor; 0 where it decides. `roles`: by warps that load and warps that multiply, in a
    kernel of its own (kernels/hopper_attention.py, hopper_attention_backward.py), where `stages` are of its rings."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0
    roles: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        limit = f" {self.registers}r" if self.registers else ""
        return f"{self.queries}x{self.keys} {self.warps}w {self.stages}s{limit}{' roles' if self.roles else ''}"


# By (role, columns of a head up to): what neither spills nor overflows shared memory. Before sm_90, and on sm_120, tensor
# cores take their operands from registers. On sm_90 two programs share a multiprocessor where heads have 64 columns: the products
# of one fill the time of the other's exponentials. Three stages: with two, a turn waits for loads that the turn before it issued at
# its end.
_ATTENTION = {
    "fp32": {
        ("forward", 64): AttentionTile(32, 32, 8, 1),
        ("forward", 128): AttentionTile(32, 32, 16, 1),
        ("keys", 64): AttentionTile(32, 32, 8, 1),
        ("queries", 64): AttentionTile(32, 32, 8, 1),
        ("queries", 128): AttentionTile(32, 32, 16, 1),
    },
    "bf16": {
        ("forward", 64): AttentionTile(128, 64, 8, 3, 128),
        ("forward", 128): AttentionTile(128, 64, 8, 3),
        ("forward", 256): AttentionTile(64, 32, 8, 1),
        ("keys", 64): AttentionTile(64, 64, 4, 3),
        ("keys", 128): AttentionTile(64, 128, 8, 2),
        ("shared keys", 64): AttentionTile(64, 128, 8, 3),
        ("shared keys", 128): AttentionTile(64, 64, 8, 3),
        ("queries", 64): AttentionTile(128, 64, 8, 3, 128),
        ("queries", 128): AttentionTile(128, 64, 8, 3),
        ("few", 128): AttentionTile(16, 64, 4, 2),
        ("many", 128): AttentionTile(64, 64, 4, 2),
    },
    "bf16 in registers": {
        ("forward", 64): AttentionTile(128, 64, 8, 3),
        ("forward", 128): AttentionTile(128, 64, 8, 3),
        ("forward", 256): AttentionTile(64, 32, 8, 1),
        ("keys", 64): AttentionTile(64, 128, 8, 2),
        ("keys", 128): AttentionTile(64, 64, 8, 2),
        ("queries", 64): AttentionTile(128, 64, 8, 2),
        ("queries", 128): AttentionTile(64, 64, 8, 2),
        ("few", 128): AttentionTile(16, 64, 4, 2),
        ("many", 128): AttentionTile(64, 64, 4, 2),
    },
}
# Columns of a head up to which dk and dv of a block of keys are in one program's registers. Beyond that, which is fp32 with more
# than 128 columns, a program has PIECE of them and computes the scores again: with all 256 it would spill (on sm_90a by 301 LDL
# and STL).
WHOLE_HEAD = {"fp32": 128, "bf16": 256, "fp16": 256}
PIECE = 64
_ANY_HEAD = {
    "fp32": AttentionTile(16, 16, 8, 1),
    "bf16": AttentionTile(32, 32, 8, 1),
    "fp16": AttentionTile(32, 32, 8, 1),
}


def padded(columns: int) -> int:
    """A head's columns in a tile: a power of two that tensor cores take."""
    return max(16, 1 << (columns - 1).bit_length())


def _operands(dtype: str, arch: int) -> str:
    """The row of the tables: fp16 takes the registers, bytes and cycles that bf16 takes."""
    if dtype == "fp32":
        return dtype
    return "bf16 in registers" if alike(arch) < 90 else "bf16"


def attention_tile(role: str, head: int, dtype: str, arch: int) -> AttentionTile:
    """`role`: "forward"; "keys" (dk, dv), "shared keys" of heads that serve several, and "queries" (dq) of the backward pass; "few"
    or "many" new tokens over a cache. `head`: padded columns of a head. Blocks of keys are 16 or multiples of 32, for the random
    bits; in the forward pass and for dq they divide the block of queries."""
    table = _ATTENTION[_operands(dtype, arch)]
    if role == "shared keys" and (role, 64) not in table:
        role = "keys"
    elif role == "keys" and (f"shared {role}", 64) in table and arch != 90:
        role = "shared keys"  # with sums in tensor memory, four warps spill
    fits = [(most, t) for (r, most), t in table.items() if r == role and head <= most]
    return min(fits, key=lambda row: row[0])[1] if fits else _ANY_HEAD[dtype]


def bounded_tile(role: str, head: int, dtype: str, arch: int) -> AttentionTile:
    """The tile for attention whose queries are bounded by windows or documents. There every block has masks, which take registers,
    and blocks that reach far beyond a window compute scores that nobody sees."""
    t = unlimited(attention_tile("shared keys" if role == "keys" else role, head, dtype, arch))
    if role == "forward" and t.queries > 64:
        return AttentionTile(64, 64, 4, 2)
    if role == "keys" and t.keys > 64:
        return (
            AttentionTile(32, 64, 4, 2)
            if _operands(dtype, arch) == "bf16 in registers"
            else AttentionTile(64, 64, 8, 2)
        )
    return t


def unlimited(t: AttentionTile) -> AttentionTile:
    """The same without a limit of registers, for forms that would spill under it."""
    return replace(t, registers=0)


# By columns of a head: the forward pass by warps with roles. Its blocks of keys give other bits than the defaults, so it is
# measured beside them (gpu-check's `sides`, `tune`), and taken only by making it the default here.
ROLES = {64: AttentionTile(128, 128, 4, 4, roles=True), 128: AttentionTile(128, 128, 4, 2, roles=True)}
# The same of the backward pass, by role and columns. Its sums have the default's order, but equal bits are for a GPU to show.
ROLES_BACKWARD = {
    ("keys", 64): AttentionTile(64, 128, 4, 4, roles=True),
    ("keys", 128): AttentionTile(64, 128, 4, 2, roles=True),
    ("queries", 64): AttentionTile(128, 64, 4, 4, roles=True),
    ("queries", 128): AttentionTile(128, 64, 4, 2, roles=True),
}

_Blocks = dict[tuple[str, int], tuple[tuple[int, ...], ...]]

# What the tuner tries besides: queries, keys, warps, stages and where it is limited registers, in bf16; the most promising first.
# None spills. On sm_90 four warps do 64 queries or keys in as many registers as eight do 128, twice as many programs at a time.
_TRIED: dict[str, _Blocks] = {
    "bf16": {
        ("forward", 64): (
            (64, 64, 4, 3, 128),
            (128, 64, 8, 2, 128),
            (128, 64, 8, 4, 128),
            (128, 64, 4, 3),
            (64, 128, 4, 3),
            (128, 128, 8, 3),
            (128, 128, 8, 2),
        ),
        ("forward", 128): ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)),
        ("keys", 64): ((64, 128, 8, 3), (32, 64, 4, 3, 168), (64, 64, 4, 2), (32, 128, 8, 3, 128), (64, 128, 8, 2)),
        ("keys", 128): ((32, 128, 8, 2), (64, 64, 8, 2), (32, 128, 8, 3)),
        ("shared keys", 64): ((64, 64, 4, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 1)),
        ("shared keys", 128): ((64, 64, 8, 2), (32, 64, 8, 2)),
        ("queries", 64): (
            (64, 64, 4, 3, 168),
            (128, 64, 8, 2, 128),
            (128, 64, 8, 3),
            (64, 64, 4, 3, 128),
            (128, 128, 8, 2),
            (128, 32, 8, 3, 128),
        ),
        ("queries", 128): ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 1)),
    },
    "bf16 in registers": {
        ("forward", 64): ((64, 64, 4, 3), (128, 128, 8, 3)),
        ("forward", 128): ((64, 64, 4, 2),),
        ("keys", 64): ((64, 128, 8, 3), (32, 128, 8, 3)),
        ("shared keys", 64): ((64, 128, 8, 3), (32, 128, 8, 3)),
        ("queries", 64): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3)),
        ("queries", 128): ((128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 1)),
    },
}


def attention_tiles(role: str, head: int, dtype: str, arch: int) -> tuple[AttentionTile, ...]:
    """All that a kernel of attention may be cut into on this architecture, the default first. Those of sm_90 were looked at there
    only."""
    usual = attention_tile(role, head, dtype, arch)
    tried = _TRIED.get(_operands(dtype, arch), {}).get((role, head), ()) if arch <= 90 or alike(arch) < 90 else ()
    return (usual, *(AttentionTile(*t) for t in tried if AttentionTile(*t) != usual))


def equal_bits(role: str, a: AttentionTile, b: AttentionTile) -> bool:
    """Whether both give the same bits. Gradients are chains over the keys, or the queries, in their order, of probabilities that
    each has its own; what a block adds beyond the diagonal are zeros. The forward pass scales its sums for every block of keys."""
    return a.roles == b.roles and (role != "forward" or a.keys == b.keys)


def with_roles(role: str, head: int, dtype: str, arch: int) -> AttentionTile | None:
    """The tile of the kernel whose warps have roles; None where it does not go."""
    if arch != 90 or dtype == "fp32":
        return None
    return ROLES.get(head) if role == "forward" else ROLES_BACKWARD.get((role, head))
