"""Figures of tile and wave quantization, split-K, orders of tiles, persistent kernels and clusters."""

from __future__ import annotations

from anatomy import kernel_facts as facts
from anatomy import models
from anatomy.figures.style import BLUE, GREEN, LINE, MINT, RED, ROSE, SAND, SKY, STONE, VIOLET, Sheet, figure
from barellm.program.integers import ceil_div

SMS = 132
TILE = (128, 256)


@figure("Tile quantization: whole tiles are paid for", height=335)
def tile_quantization(s: Sheet) -> None:
    for x, M, N in ((20, 512, 1024), (420, 576, 1088)):
        rows, cols = ceil_div(M, TILE[0]), ceil_div(N, TILE[1])
        scale = 0.26
        s.text(x, 60, f"C = {M} x {N}: {rows * cols} tiles", weight="bold")
        s.grid(x, 76, rows, cols, TILE[1] * scale, TILE[0] * scale, lambda r, c: ROSE)
        s.rect(
            x,
            76,
            N * scale,
            M * scale,
            MINT,
            f"{100 * M * N / (rows * cols * TILE[0] * TILE[1]):.0f} % of the work is C's",
            edge=LINE,
        )
    s.legend(20, 262, [(MINT, "C"), (ROSE, "beyond its edge: computed and dropped")], step=80)
    s.note(284, "Tiles of 128 x 256. 64 rows and 64 columns more cost nine tiles more.")


@figure("Wave quantization: the last wave is seldom full", height=345)
def wave_quantization(s: Sheet) -> None:
    axes = s.chart(66, 74, 700, 190, title=f"tiles on {SMS} multiprocessors, one at a time each", xlabel="tiles", ylabel="busy, %")
    counts = range(1, SMS * 5 + 1)
    axes.plot(counts, [100 * models.wave_efficiency(n, SMS) for n in counts], color=BLUE)
    for n in (132, 133, 265):
        value = 100 * models.wave_efficiency(n, SMS)
        axes.plot([n], [value], "o", color=RED, markersize=4)
        axes.annotate(f"{n}: {value:.0f} %", (n, value), (6, -3 if value < 90 else 4), textcoords="offset points", fontsize=10)
    axes.set(ylim=(0, 115), xlim=(0, SMS * 5 + 5))
    s.note(312, "133 tiles take two waves, twice as long as 132: in the second wave 131 multiprocessors have nothing to do.")


@figure("Small tiles waste less at edges and in waves, and reuse less", height=345)
def quantization_sizes(s: Sheet) -> None:
    axes = s.chart(
        66, 74, 700, 190, title="tile and wave quantization together, M = N = K", xlabel="M = N = K", ylabel="useful work, %"
    )
    sizes = range(256, 8193, 64)
    for tile, colour in ((TILE, BLUE), ((64, 64), GREEN)):
        words = f"tiles of {tile[0]} x {tile[1]}: {models.intensity(*tile):.0f} FLOP/byte"
        axes.plot(sizes, [100 * models.efficiency(n, n, tile, SMS) for n in sizes], color=colour, linewidth=1.2, label=words)
    axes.set(ylim=(0, 105), xlim=(200, 8250))
    axes.legend(fontsize=10, frameon=False, loc="lower right")
    s.note(
        312,
        "The FLOP for each byte are those of a block's tile with bf16 operands. A small matmul wants small tiles, a large one "
        "large tiles.",
    )


@figure("Split-K: more tiles for a matmul that has few", height=345)
def split_k(s: Sheet) -> None:
    cases = [(768, 768), (768, 2304), (768, 3072)]
    axes = s.chart(
        66,
        74,
        420,
        190,
        title="weight gradients of GPT-2 124M, tiles of 128 x 256",
        xlabel="slices of the depth (split-K)",
        ylabel="busy, %",
    )
    for (M, N), colour in zip(cases, (BLUE, GREEN, RED), strict=True):
        tiles = ceil_div(M, TILE[0]) * ceil_div(N, TILE[1])
        splits = range(1, 13)
        axes.plot(
            splits,
            [100 * models.wave_efficiency(tiles * n, SMS) for n in splits],
            color=colour,
            marker="o",
            markersize=4,
            label=f"{M} x {N}: {tiles} tiles",
        )
    axes.set(ylim=(0, 145))
    axes.legend(fontsize=10, frameon=False, loc="upper left", ncols=2)
    s.box(
        515,
        80,
        265,
        184,
        STONE,
        "The depth of a weight gradient is the\nnumber of tokens, tens of thousands.\nCut into slices, each slice is a tile of "
        "its\nown, with fp32 sums that are added\n"
        "at the end in a fixed order, so that the\nbits do not depend on who was first.",
    )
    s.note(312, "The share of 132 multiprocessors that has a tile, on average over the waves.")


@figure("The order of tiles: which operands the blocks of a wave share", height=360)
def tile_order(s: Sheet) -> None:
    rows, cols = 32, 16
    for i, kind in enumerate(("rows", "grouped", "Hilbert")):
        x = 20 + 260 * i
        tiles = facts.order(kind, rows, cols)
        wave = {tile: t // SMS for t, tile in enumerate(tiles)}
        a, b = facts.patch(kind, rows, cols, SMS)
        nbytes = wave_bytes(kind, rows, cols, 4096, 0)
        s.text(x, 60, f"{kind}: {a} of A, {b} of B, {nbytes >> 20} MiB", weight="bold")
        s.grid(x, 74, rows, cols, 14.5, 6.6, lambda r, c, wave=wave: [MINT, SKY, SAND, VIOLET][wave[r, c] % 4])
    s.legend(20, 304, [(MINT, "wave 0"), (SKY, "wave 1"), (SAND, "wave 2"), (VIOLET, "wave 3")], step=120)
    s.note(
        322,
        "4096 x 4096 x 4096, bf16, tiles of 128 x 256, 132 at a time. A strip is 128 rows of A (1 MiB) or 256 columns of B "
        "(2 MiB); the\n"
        "titles count the strips that wave 0 needs, and their bytes. Orders are those of the kernels.",
    )


def wave_bytes(kind: str, rows: int, cols: int, depth: int, wave: int) -> int:
    """Bytes of bf16 operands that the tiles of a wave read from memory, if each strip is read once."""
    a, b = facts.patch(kind, rows, cols, SMS, wave)
    return 2 * depth * (a * TILE[0] + b * TILE[1])


@figure("Bytes that a wave of tiles needs, by the order of tiles", height=345)
def order_bytes(s: Sheet) -> None:
    rows, cols, depth = 64, 32, 8192
    waves = rows * cols // SMS
    axes = s.chart(66, 74, 420, 190, title="8192 x 8192 x 8192, bf16", xlabel="", ylabel="MiB for a wave, mean")
    kinds = ("rows", "grouped", "Hilbert")
    values = [sum(wave_bytes(k, rows, cols, depth, w) for w in range(waves)) / waves / 2**20 for k in kinds]
    s.bars(axes, ["row by row", "grouped\n(16 rows)", "Hilbert curve"], values, [ROSE, SKY, MINT], "{:.0f}")
    least = min(2 * depth * (a * TILE[0] + ceil_div(SMS, a) * TILE[1]) for a in range(1, SMS)) / 2**20
    work = 2 * SMS * TILE[0] * TILE[1] * depth
    reuse = ", ".join(f"{work / 2**20 / value:.0f}" for value in values)
    s.box(
        515,
        80,
        265,
        184,
        STONE,
        f"132 tiles in the best rectangle would\nneed {least:.0f} MiB. The L2 of an H100 has\n50 MB: what one wave needs does "
        f"not\nstay whole, but blocks of a wave walk\n"
        "the depth together, and share each piece\nwhile it is there.",
    )
    s.note(
        302,
        f"Counted from the kernels' own orders, over all full waves. A wave does {work / 1e9:.0f} GFLOP: {reuse} FLOP for each "
        f"byte from memory,\n"
        "in the order of the bars.",
    )


@figure("A persistent kernel: the next tile's copies begin before the last tile is stored", height=330)
def persistent(s: Sheet) -> None:
    scale, left = 10.8, 130
    fill, work, store = 6, 12, 6
    y = 66
    s.text(20, y, "a block for each tile", weight="bold")
    t = 0
    for name, colour_of in (("copies", 0), ("products", 1), ("stores", 2)):
        s.text(20, y + 27 + 24 * colour_of, name)
        s.rect(left, y + 16 + 24 * colour_of, scale * 60, 20, STONE)
    for i in range(2):
        for row, (begin, end, colour) in enumerate(
            ((t, t + fill + work - 3, SAND), (t + fill, t + fill + work, MINT), (t + fill + work, t + fill + work + store, SKY))
        ):
            s.rect(left + scale * begin, y + 16 + 24 * row, scale * (end - begin), 20, colour, f"tile {i}", size=9.5)
        t += fill + work + store
    first = t
    y = 172
    s.text(20, y, "persistent, a producer warp: the ring is full when the products of the next tile begin", weight="bold")
    for row, name in enumerate(("copies", "products", "stores")):
        s.text(20, y + 27 + 24 * row, name)
        s.rect(left, y + 16 + 24 * row, scale * 60, 20, STONE)
    spans = [[(0, 15, 0), (15, 27 + 6, 1)], [(6, 18, 0), (24, 36, 1)], [(18, 24, 0), (36, 42, 1)]]
    for row, line in enumerate(spans):
        for begin, end, i in line:
            s.rect(
                left + scale * begin, y + 16 + 24 * row, scale * (end - begin), 20, (SAND, MINT, SKY)[row], f"tile {i}", size=9.5
            )
    s.note(
        276,
        f"Model: filling the ring 6, products of a tile 12, storing it 6: two tiles in {first} and in 42. The number of waves is "
        f"the same; what is\n"
        "saved is waiting for the first copies of each tile.",
    )


@figure("A cluster of two blocks: each loads half of B for both (multicast)", height=345)
def multicast(s: Sheet) -> None:
    depth = 64
    a, b = TILE[0] * depth * 2 >> 10, TILE[1] * depth * 2 >> 10
    for x, title, both in ((20, "two blocks by themselves", False), (420, "a cluster of two, multicast", True)):
        s.text(x, 60, title, weight="bold")
        s.rect(x, 76, 360, 36, SAND, "L2", edge=LINE)
        for i in range(2):
            left = x + 190 * i
            s.rect(left, 176, 170, 60, SKY, f"block {i}\nrows {128 * i} to {128 * i + 127}", edge=LINE)
            s.arrow(left + 30, 113, left + 30, 174)
            s.text(left + 36, 136, f"A: {a} KiB", size=10)
            s.arrow(left + 110, 113, left + 110, 174)
            s.text(left + 116, 136, f"B: {b // 2 if both else b}", size=10)
            if both:
                other = x + 190 * (1 - i) + (12 if i else 158)
                s.arrow(left + 110, 113, other, 174, colour=RED)
        total = 2 * a + (b if both else 2 * b)
        s.text(x, 254, f"L2 delivers {total} KiB for a step of both: {total // 2} KiB a block", weight="bold")
    s.note(
        280,
        "A step of 64 of the depth, tiles of 128 x 256 one above the other: both need the same columns of B. Red: the half that "
        "arrives in the\n"
        "other block's shared memory. Both must have released a buffer before either may fill it again, so each consumer "
        "arrives on\n"
        "both blocks' barriers.",
    )
