"""Figures of tiles: outer products, register tiles, why squares, warp tiles, blocking of a CPU's loops."""

from __future__ import annotations

from anatomy import kernel_facts as facts
from anatomy import models
from anatomy.figures.style import (
    BLUE,
    GREEN,
    INK,
    LILAC,
    LINE,
    MINT,
    PALE,
    ROSE,
    SAND,
    SKY,
    SOFT,
    STONE,
    VIOLET,
    Sheet,
    figure,
)  # fmt: skip
from barellm.cpu import gemm_config
from barellm.cpu.isa import X86


@figure("A matmul is a sum of outer products", height=330)
def outer_product(s: Sheet) -> None:
    for x, title, dot in (
        (20, "dot products: one element at a time", True),
        (420, "outer products: all elements, one k at a time", False),
    ):
        s.text(x, 60, title, weight="bold")
        s.grid(x, 116, 6, 6, 20, 20, lambda r, c, dot=dot: SKY if (r == 2 if dot else c == 3) else STONE)
        s.text(x + 60, 252, "A", ha="center", weight="bold")
        s.grid(x + 136, 116, 6, 6, 20, 20, lambda r, c, dot=dot: SAND if (c == 4 if dot else r == 3) else STONE)
        s.text(x + 196, 252, "B", ha="center", weight="bold")
        s.text(x + 263, 176, "=", size=14, ha="center")
        s.grid(x + 272, 116, 6, 6, 14, 20, lambda r, c, dot=dot: MINT if not dot or (r, c) == (2, 4) else STONE)
        s.text(x + 314, 252, "C", ha="center", weight="bold")
        s.text(x, 88, "12 numbers read for 6 multiply-adds" if dot else "12 numbers read for 36 multiply-adds")
    s.note(
        276,
        "A step of an outer product takes one column of A and one row of B and adds to every element of C. What it reads "
        "grows as a\n"
        "side of the tile of C, what it computes grows as its area: that is why every fast matmul keeps a tile of C in registers.",
    )


@figure("A register tile: one step of the inner loop for AVX2", height=330)
def register_tile(s: Sheet) -> None:
    rows, cols = 6, 16
    s.grid(150, 108, rows, cols, 22, 22, lambda r, c: SKY if c < 8 else MINT)
    s.grid(150, 72, 1, cols, 22, 22, lambda r, c: SAND)
    s.grid(104, 108, rows, 1, 22, 22, lambda r, c: ROSE)
    s.text(510, 83, "2 vectors of B: 2 loads")
    s.text(20, 174, "6 numbers\nof A, each\nbroadcast:\n6 loads", linespacing=1.3)
    s.text(510, 174, "96 sums of C in 12 registers:\n12 multiply-adds of 8 lanes", linespacing=1.4)
    loop = facts.inner_loop("shipped", "avx2")
    loads = sum("(" in line.split(" ", 1)[1] and line.startswith(("vbroadcast", "vmovups")) for line in loop)
    fmas = sum(line.startswith("vfmadd") for line in loop)
    s.note(
        262,
        f"In the code that LLVM makes of the shipped kernel a step of the inner loop is {len(loop)} instructions: {loads} loads, "
        f"{fmas} multiply-adds,\n"
        f"{len(loop) - loads - fmas} for the loop itself. {models.reuse(rows, cols):.1f} FLOP for each number loaded.",
    )


@figure("Why a tile should be square", height=350)
def why_square(s: Sheet) -> None:
    shapes = [(1, 96), (2, 48), (3, 32), (4, 24), (6, 16), (8, 12), (12, 8)]
    axes = s.chart(
        66,
        76,
        420,
        190,
        title="96 sums in registers, arranged as rows x columns",
        xlabel="rows x columns",
        ylabel="FLOP per number loaded",
    )
    s.bars(axes, [f"{r} x {c}" for r, c in shapes], [models.reuse(*x) for x in shapes], [BLUE] * 4 + [GREEN] + [BLUE] * 2)
    s.text(515, 66, "the same area, other sides", weight="bold")
    s.rect(515, 84, 240, 10, SKY, edge=LINE)
    s.text(515, 108, "1 x 96: 97 numbers in")
    s.rect(515, 124, 120, 20, SKY, edge=LINE)
    s.text(645, 134, "2 x 48: 50 in")
    s.rect(515, 154, 40, 60, MINT, edge=LINE)
    s.text(565, 184, "6 x 16: 22 in")
    s.text(515, 240, "A tile of R rows and C columns loads R + C\nnumbers for 2 R C operations.", linespacing=1.35, colour=SOFT)
    s.note(
        312,
        "For a fixed area the sum of the sides is least in a square. The tile of AVX2 is 6 x 16, near a square, because a vector "
        "has 8 lanes.",
    )


@figure("Tiles inside tiles: each level of memory has its own", height=345)
def tile_levels(s: Sheet) -> None:
    s.text(20, 60, "C: 4096 x 4096", weight="bold")
    s.grid(20, 76, 8, 8, 23, 23, lambda r, c: SAND if (r, c) == (3, 5) else STONE)
    s.text(235, 60, "block: 128 x 128", weight="bold")
    s.grid(235, 76, 4, 2, 80, 46, lambda r, c: SKY if (r, c) == (1, 0) else STONE, lambda r, c: f"warp {2 * r + c}", 10)
    s.text(430, 60, "warp: 16 x 32, four times", weight="bold")
    layout = facts.layout("warp tile")
    owner = {point: lane for lane, points in enumerate(facts.elements(layout)) for point in points}
    s.grid(430, 76, 4, 8, 22, 46, lambda r, c: MINT if (r, c) == (1, 2) else STONE, lambda r, c: str(owner[4 * r, 4 * c]), 9.5)
    s.text(640, 60, "thread: 4 x 4 of each", weight="bold")
    s.grid(640, 76, 4, 4, 34, 46, lambda r, c: PALE[(r + c) % 2 + 2])
    for x0, x1 in ((206, 233), (397, 428), (608, 638)):
        s.arrow(x0, 168, x1, 168)
    s.note(
        276,
        "Step \"warp tile\" of the GPU's ladder, from its own layout; C is drawn with fewer tiles than it has. A block's "
        "operands lie in\n"
        "shared memory, a warp's reads serve many threads at once, and a thread's 64 sums lie in registers. Each level reuses "
        "what the\n"
        "level above it had to load.",
    )


def needed(layout) -> tuple[int, int]:
    """Different rows and columns that a warp's sums need of A and B, in one repetition of a layout."""
    points = [p for lane in facts.elements(layout) for p in lane]
    return len({r for r, _ in points}), len({c for _, c in points})


@figure("Warp tiling: the sums of a warp form squares, not a strip", height=345)
def warp_tile(s: Sheet) -> None:
    strip, square = needed(facts.layout("vector loads")), needed(facts.layout("warp tile"))
    tile = (128, 128)
    wide, block = facts.layout("vector loads").warps_per_cta, facts.layout("warp tile").warps_per_cta
    repeat_strip = (tile[0] // (strip[0] * wide[0]), tile[1] // (strip[1] * wide[1]))
    repeat_square = (tile[0] // (square[0] * block[0]), tile[1] // (square[1] * block[1]))
    for x, title, size, repeat, colour in (
        (20, 'step "vector loads"', strip, repeat_strip, SKY),
        (420, 'step "warp tile"', square, repeat_square, MINT),
    ):
        rows, cols = size[0] * repeat[0], size[1] * repeat[1]
        s.text(x, 60, title, weight="bold")
        s.rect(x, 76, 180, 180, STONE, edge=LINE)
        scale = 180 / 128
        for i in range(repeat[0]):
            for j in range(repeat[1]):
                dy, dx = tile[0] // repeat[0] * i, tile[1] // repeat[1] * j
                s.rect(x + dx * scale, 76 + dy * scale, size[1] * scale, size[0] * scale, colour, edge=INK)
        s.text(
            x + 196,
            130,
            f"rows of A: {rows}\ncolumns of B: {cols}\n\n{rows + cols} numbers for\n{rows * cols} multiply-adds",
            linespacing=1.4,
        )
    s.note(
        280,
        "The tile of 128 x 128 of a block; in colour what one of its 8 warps has, from the kernels' own layouts. Threads that "
        "need the\n"
        "same number get it in one read of shared memory, so what counts is the number of different rows and columns of a warp.",
    )


def walk(s: Sheet, y: float) -> None:
    """A with a block, B with a panel, and C with the tiles that are done, those of the loop's order."""
    left, cols, block, at = 210, 16, 4, (2, 5)
    s.text(70, y + 67, "A", weight="bold")
    s.grid(90, y + 62, 3 * block, 1, 90, 10, lambda r, c: SKY if r == at[0] else SAND if r < block else STONE)
    s.text(left - 20, y + 28, "B", weight="bold")
    s.grid(left, y + 8, 1, cols, 20, 44, lambda r, c: MINT if c == at[1] else STONE)

    def tile(r: int, c: int) -> str:
        return LILAC if (r, c) == at else VIOLET if r < block and (c, r) < at[::-1] else STONE

    s.grid(left, y + 62, 3 * block, cols, 20, 10, tile)
    s.text(left + 20 * cols + 10, y + 176, "C", weight="bold")
    s.arrow(left + 20 * (at[1] + 0.5), y + 88, left + 20 * (at[1] + 0.5), y + 102)
    s.arrow(left + 20 * (at[1] + 1), y + 68, left + 20 * (at[1] + 3), y + 68)
    s.arrow(left + 6, y + 104, left + 6, y + 140)
    s.text(
        left + 20 * cols + 30,
        y + 90,
        "1. down the block: the next MR rows of A,\nthe same panel of B (short arrow)\n"
        "2. to the right: the next panel, the same\nblock (second arrow)\n3. down: the next block, all panels again",
        linespacing=1.4,
    )


@figure("Blocking on a CPU: a tile, a panel, a block", height=500)
def cpu_blocking(s: Sheet) -> None:
    isa, n, k, m = X86["avx2"], 3072, 768, 1024
    made = gemm_config.default(isa, "forward", "fp32", n, k, m)
    mr, nr, kc = made.tile.mr, made.tile.nr(isa), made.kc or gemm_config.default_kc(isa, k, 4)
    rows = [
        ("tile of C", f"MR x NR = {mr} x {nr}", mr * nr * 4, "registers", VIOLET),
        ("rows of A of a tile", f"MR x KC = {mr} x {kc}", mr * kc * 4, "passes once for each tile", SKY),
        ("panel of B", f"KC x NR = {kc} x {nr}", kc * nr * 4, "is used by all tiles of a block", MINT),
        ("block of A", f"MC x KC = {made.mc} x {kc}", made.mc * kc * 4, "is used by all panels", SAND),
    ]
    for i, (what, shape, nbytes, use, colour) in enumerate(rows):
        y = 58 + 44 * i
        s.rect(20, y, 150, 36, colour, what, edge=LINE, weight="bold")
        s.text(190, y + 18, shape)
        s.text(420, y + 18, f"{nbytes / 1024:,.1f} KiB", ha="right", weight="bold")
        s.text(450, y + 18, use, colour=SOFT)
    walk(s, 246)
    s.note(
        446,
        f"What the shipped kernel chooses for fp32 on AVX2 by its own function gemm_config.default: {m} rows, {n} columns, a\n"
        f"depth of {k}. The picture has fewer tiles than C; light ones are done, the dark one is under way.",
    )
