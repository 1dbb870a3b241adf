"""Figures of coalescing, banks of shared memory, padding and swizzles."""

from __future__ import annotations

from anatomy import kernel_facts as facts
from anatomy import models
from anatomy.figures.style import BLUE, GREEN, HUES, PALE, RED, SAND, SOFT, STONE, Sheet, figure


@figure("Coalescing: the sectors that one load of a warp touches", height=345)
def coalescing(s: Sheet) -> None:
    y = 66
    for name in ("naive", "coalesced"):
        points = [p[0] for p in facts.elements(facts.layout(name))]
        loads = (("A", [(r * facts.GPU_SIZE) * 4 for r, _ in points]), ("B", [c * 4 for _, c in points]))
        s.text(20, y, f'step "{name}"', weight="bold")
        for i, (operand, addresses) in enumerate(loads):
            touched = sorted({a // models.SECTOR for a in addresses})
            top = y + 16 + 40 * i
            s.text(20, top + 12, f"load of {operand}")
            for at in range(32):
                s.rect(110 + 15 * at, top, 14, 24, (RED if len(touched) > 8 else GREEN) if at < len(touched) else STONE)
            used = len(set(addresses)) * 4
            s.text(
                602,
                top + 12,
                f"{len(touched)} sector{'s' * (len(touched) > 1)}: {len(touched) * 32} bytes\nfor {used} useful ones",
                linespacing=1.2,
            )
        y += 112
    s.note(
        292,
        "A sector is 32 bytes, the least that a GPU moves. Both kernels compute the same; the only difference is which thread "
        "has which\n"
        "element. Addresses from the kernels' own layouts, for fp32 matrices with rows of 4096 numbers.",
    )


@figure("Stride against sectors", height=335)
def stride_sectors(s: Sheet) -> None:
    strides = [1, 2, 3, 4, 6, 8, 16, 32]
    axes = s.chart(
        66,
        72,
        420,
        190,
        title="32 lanes read fp32 numbers that lie a stride apart",
        xlabel="stride, numbers",
        ylabel="sectors moved",
    )
    values = [float(models.sectors([4 * k * lane for lane in range(32)])) for k in strides]
    s.bars(axes, [str(k) for k in strides], values, [GREEN] + [BLUE] * 4 + [RED] * 3, "{:.0f}")
    s.box(
        515,
        80,
        265,
        180,
        STONE,
        "Neighbours in a warp should read\nneighbours in memory. From a stride of\n8 numbers (32 bytes) on, each lane needs\na "
        "sector of its own: 8 times the bytes.",
    )
    s.note(306, "Counted by the same function as the figure before; the first address is a multiple of 32 bytes.")


@figure("Banks of shared memory: a column of a matrix, without and with padding", height=345)
def banks(s: Sheet) -> None:
    for x, pitch in ((20, 32), (420, 33)):
        addresses = [4 * pitch * r for r in range(32)]
        times = models.cycles(addresses)
        s.text(x, 60, f"rows of {pitch} numbers: a column takes {times} cycle{'s' * (times > 1)}", weight="bold")
        s.grid(
            x,
            76,
            12,
            32,
            11,
            14,
            lambda r, c, pitch=pitch: HUES[2 if pitch == 33 else 1] if models.bank(4 * pitch * r) == c else STONE,
        )
        s.text(x, 258, "bank 0")
        s.text(x + 352, 258, "bank 31", ha="right")
    s.note(
        276,
        "Each row of squares is one row of the matrix (12 of 32 are drawn); in colour the bank that holds its first number. "
        "Shared\n"
        "memory has 32 banks of 4 bytes, and each serves one word in a cycle. One unused number behind each row moves the "
        "next row\n"
        "by one bank, and a column is spread over all of them.",
    )


@figure("Stride against bank conflicts", height=340)
def bank_strides(s: Sheet) -> None:
    strides = list(range(0, 34))
    axes = s.chart(
        66,
        72,
        700,
        190,
        title="32 lanes read words of shared memory that lie a stride apart",
        xlabel="stride, words of 4 bytes",
        ylabel="cycles",
    )
    values = [models.cycles([4 * k * lane for lane in range(32)]) for k in strides]
    axes.bar(strides, values, color=[GREEN if v == 1 else RED if v > 4 else BLUE for v in values], width=0.7)
    for k in (2, 4, 8, 16, 32):
        axes.text(k, values[k] + 0.8, str(values[k]), ha="center", fontsize=10)
    axes.set(ylim=(0, 37), xlim=(-1, 34))
    s.note(
        304,
        "Odd strides meet every bank once. A stride of 0 is one word for all: it is broadcast, in one cycle. An even stride "
        "collides.",
    )


def chunk_grid(s: Sheet, x: float, y: float, width: int, lines: int, *, w: float = 38, h: float = 19) -> None:
    """Where the chunks of the first rows of a tile lie, in lines of 128 bytes; chunk 1 of each row is coloured."""
    per = width // 16
    at = {models.swizzled_in(width, row, c): (row, c) for row in range(8 * lines // per) for c in range(per)}
    s.grid(
        x,
        y,
        lines,
        8,
        w,
        h,
        lambda r, c: SAND if at[r, c][1] == min(1, per - 1) else PALE[0] if at[r, c][0] % 2 else STONE,
        lambda r, c: f"{at[r, c][0]}.{at[r, c][1]}",
        9,
    )


@figure("The 128-byte swizzle of TMA and the tensor cores", height=350)
def swizzle(s: Sheet) -> None:
    for x, title, where in (
        (20, "plain: chunk c of a row at place c", lambda r, c: c),
        (420, "swizzled: chunk c of row r at place c xor r", models.swizzled),
    ):
        s.text(x, 60, title, weight="bold")
        inverse = [{where(r, c): c for c in range(8)} for r in range(8)]
        s.grid(
            x + 44,
            78,
            8,
            8,
            38,
            19,
            lambda r, c, inverse=inverse: SAND if inverse[r][c] == 3 else STONE,
            lambda r, c, inverse=inverse: str(inverse[r][c]),
            10,
        )
        for r in range(8):
            s.text(x + 38, 87.5 + 19 * r, f"row {r}", ha="right", size=9.5, colour=SOFT)
        for c in range(8):
            s.text(x + 63 + 38 * c, 238, f"{4 * c}-{4 * c + 3}", ha="center", size=9, colour=SOFT)
        times = models.conflicts([where(r, 3) for r in range(8)])
        s.text(
            x,
            262,
            f"chunk 3 of all rows: {times} cycle{'s, a bank conflict' if times > 1 else ''}",
            colour=RED if times > 1 else GREEN,
            weight="bold",
        )
    s.note(
        284,
        "A chunk is 16 bytes, a row is 128 bytes: 64 numbers of bf16. The numbers below are banks. Tensor cores read one chunk "
        "of eight\n"
        "rows at once. The exclusive or moves chunks inside their row only, so nothing is padded, and a column of chunks meets\n"
        "all 32 banks.",
    )


@figure("Swizzles for rows of 32, 64 and 128 bytes", height=350)
def swizzle_widths(s: Sheet) -> None:
    for i, width in enumerate((32, 64, 128)):
        x = 20 + 258 * i
        s.text(x, 60, f"rows of {width} bytes", weight="bold")
        chunk_grid(s, x, 76, width, 8, w=30)
        s.text(x, 244, f"{8 * 8 // (width // 16)} rows in 1 KiB", colour=SOFT)
    s.legend(20, 268, [(SAND, "chunk 1 of a row"), (STONE, "other chunks of even rows"), (PALE[0], "of odd rows")], step=200)
    s.note(
        286,
        'Each line is 128 bytes, all 32 banks. "5.1" is chunk 1 of row 5. Rows of 128 bytes: address bits 7 to 9 '
        "are xored\n"
        "into bits 4 to 6; of 64: bits 7 and 8 into 4 and 5; of 32: bit 7 into bit 4. In each of them chunk 1 of eight "
        "neighbouring rows\n"
        "meets all 32 banks.",
    )
