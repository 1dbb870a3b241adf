"""Figures of tensor cores, TMA, mbarriers, warp specialization and their registers."""

from __future__ import annotations

import re

from anatomy import kernel_facts as facts
from anatomy import models
from anatomy.figures.style import (
    BLUE,
    GREEN,
    LINE,
    MINT,
    PALE,
    RED,
    ROSE,
    SAND,
    SKY,
    SOFT,
    STONE,
    VIOLET,
    Sheet,
    figure,
)  # fmt: skip


@figure("Operations of one instruction", height=340)
def instruction_work(s: Sheet) -> None:
    rows = [
        ("vfmadd231ss\n1 lane", 2, SKY),
        ("vfmadd231ps\nAVX2", 2 * 8, SKY),
        ("vfmadd231ps\nAVX-512", 2 * 16, SKY),
        ("vdpbf16ps\nAVX-512", 4 * 16, SKY),
        ("tdpbf16ps\nAMX", 2 * 16 * 16 * 32, BLUE),
        ("FFMA\nwarp", 2 * 32, MINT),
        ("HGMMA\n64x256x16", 2 * 64 * 256 * 16, GREEN),
    ]
    axes = s.chart(74, 70, 700, 190, title="floating-point operations", xlabel="", ylabel="FLOP", yscale="log")
    made = axes.bar(range(len(rows)), [r[1] for r in rows], color=[r[2] for r in rows], width=0.7)
    axes.bar_label(made, [f"{r[1]:,}" for r in rows], fontsize=10, padding=2)
    axes.set_xticks(range(len(rows)), [r[0] for r in rows], fontsize=9.5)
    axes.set_ylim(1, 4e6)
    s.note(
        306, "Fetching and decoding an instruction costs the same whatever it does. HGMMA is ordered by a warpgroup, four warps."
    )


@figure("Which thread holds which sum of a tensor-core instruction", height=350)
def fragments(s: Sheet) -> None:
    held = facts.fragments(16, 16)
    s.text(20, 60, "rows 0 to 15, columns 0 to 15 of the 64 x N sums of HGMMA; the number is the thread", weight="bold", size=10.5)
    s.grid(20, 76, 16, 16, 29, 12.5, lambda r, c: PALE[held[r, c] % 4], lambda r, c: str(held[r, c]), 8.5)
    s.legend(20, 288, [(PALE[i], f"thread mod 4 = {i}") for i in range(4)])
    s.box(
        510,
        84,
        270,
        180,
        STONE,
        "Four neighbouring threads have the same\nrow, two neighbouring columns each.\nThread 0 has rows 0 and 8 here, and the\n"
        "same pattern again every 8 columns.\n\nWarps 1 to 3 of the warpgroup have rows\n16 to 63 in the same way.",
    )
    s.note(
        304,
        "From Triton's own linear layout of the results. Pairs of columns are why a thread stores two numbers at a time, and why "
        "stmatrix\n"
        "exists: it collects whole rows of 16 bytes from four threads.",
    )


@figure("TMA copies a box of a matrix into shared memory", height=345)
def tma_box(s: Sheet) -> None:
    rows, cols, box, at = 9, 14, (4, 6), (6, 10)

    def inside(r: int, c: int) -> bool:
        return at[0] <= r < at[0] + box[0] and at[1] <= c < at[1] + box[1]

    s.text(20, 60, "matrix in global memory (9 x 14)", weight="bold")
    s.grid(20, 78, rows, cols, 20, 17, lambda r, c: SAND if inside(r, c) else STONE)
    s.rect(20 + 20 * at[1], 78 + 17 * at[0], 20 * box[1], 17 * box[0], "none", edge=RED, line=2)
    s.text(430, 60, "the box in shared memory (4 x 6)", weight="bold")
    s.grid(
        430,
        78,
        box[0],
        box[1],
        44,
        28,
        lambda r, c: SAND if at[0] + r < rows and at[1] + c < cols else "white",
        lambda r, c: f"{at[0] + r},{at[1] + c}" if at[0] + r < rows and at[1] + c < cols else "0",
        10,
    )
    s.rect(430, 78, 264, 112, "none", edge=LINE)
    s.arrow(320, 190, 426, 140)
    s.note(
        262,
        "One thread orders the copy with a tensor map (address, sizes, box, swizzle) and two coordinates; no thread computes "
        "addresses.\n"
        "What lies beyond the edge of the matrix arrives as zeros, so the kernel needs no masks. When all bytes are there, TMA "
        "says so on\n"
        "an mbarrier.",
    )


@figure("mbarriers: a ring of buffers and the parity of its rounds", height=350)
def mbarriers(s: Sheet) -> None:
    buffers, steps = 3, 9
    times = models.ring(buffers, 2, 3, steps)
    scale, left = 22, 110
    for b in range(buffers):
        y = 70 + 44 * b
        s.text(20, y + 18, f"buffer {b}")
        s.rect(left, y, scale * 30, 36, STONE)
        for i in range(b, steps, buffers):
            load, loaded, start, done = times[i]
            s.rect(left + scale * load, y, scale * (loaded - load), 36, SAND, f"{i}", size=9.5)
            if start > loaded:
                s.rect(left + scale * loaded, y, scale * (start - loaded), 36, VIOLET, "full" if start - loaded > 1 else "", size=9)
            s.rect(left + scale * start, y, scale * (done - start), 36, MINT, f"{i}, phase {i // buffers & 1}", size=9)
    for t in range(0, 31, 5):
        s.text(left + scale * t, 212, str(t), ha="center", size=9.5, colour=SOFT)
    s.text(20, 212, "time", colour=SOFT)
    s.legend(110, 236, [(SAND, "TMA fills it"), (VIOLET, "full, waits"), (MINT, "being multiplied"), (STONE, "empty")])
    s.note(
        258,
        "Model: a copy takes 2, a multiplication 3, three buffers. full[s] completes when the bytes of buffer s have come; "
        "empty[s] when its\n"
        "readers have arrived. Step i uses buffer i mod 3, and waits for the phase with parity (i div 3) mod 2 of full[s]: so "
        "one bit tells\n"
        "this round from the one before. These are the expressions of the kernel (i % STAGES, i // STAGES & 1).",
    )


@figure("Warp specialization: copies and products at the same time", height=350)
def specialization(s: Sheet) -> None:
    y, scale, left = 66, 13.2, 130
    for title, buffers in (("one buffer: either a copy or a product", 1), ("ring of four: a producer warp is always ahead", 4)):
        times = models.ring(buffers, 3, 4, 8)
        end = times[-1][3]
        s.text(20, y, f"{title}; 8 steps in {end}", weight="bold")
        for row, (name, a, b, colour) in enumerate((("producer", 0, 1, SAND), ("consumers", 2, 3, MINT))):
            s.text(20, y + 30 + 32 * row, name)
            s.rect(left, y + 17 + 32 * row, scale * 48, 26, STONE)
            for i, t in enumerate(times):
                if t[a] < 48:
                    s.rect(left + scale * t[a], y + 17 + 32 * row, scale * (min(t[b], 48) - t[a]), 26, colour, str(i), size=9.5)
        y += 108
    s.note(
        290,
        "Model: a copy takes 3, a product 4. With one buffer the times add up (7 for each step); with a ring the larger of the "
        "two counts.\n"
        "The first row is cut off at 48.",
    )


@figure("setmaxnreg: the producer gives its registers to the consumers", height=420)
def register_pool(s: Sheet) -> None:
    row = facts.resources()["persistent"]
    compiled = row["registers"]
    moved = sorted({int(n, 16) for n in re.findall(r"USETMAXREG\S+ (?:UP0, )?(0x[0-9a-f]+)", facts.compiled("persistent")[1])})
    least, idle, most, wide = moved
    total = 65536
    for y, title, shares in (
        (
            78,
            f"as it was launched: {row['threads']} threads, {compiled} registers each",
            [("warpgroup 0", compiled), ("warpgroup 1", compiled), ("warpgroup 2", compiled)],
        ),
        (172, "before and behind the loops", [("warpgroup 0", wide), ("warpgroup 1", idle), ("warpgroup 2", idle)]),
        (266, "in the loops", [("consumer", most), ("consumer", most), ("producer and 3 idle warps", least)]),
    ):
        s.text(20, y - 16, title, weight="bold")
        x, used = 20.0, 0
        for name, count in shares:
            width = 760 * count * 128 / total
            colour = ROSE if name.startswith("producer") else MINT if name == "consumer" else SKY
            s.rect(x, y, width, 42, colour, f"{name}\n{count} x 128" if width > 80 else str(count), edge=LINE, size=9.5)
            if width <= 80:
                s.text(x + width, y + 52, name, ha="right", size=10, colour=SOFT)
            x, used = x + width, used + count * 128
        s.text(20, y + 52, f"{used:,} of {total:,} registers", colour=SOFT, size=10)
    s.note(
        340,
        f"The sums of 64 x 256 of a consumer are 64 KiB, 128 registers of each of its threads. A thread may name 255 at most, "
        f"and all\n"
        f"threads of a block start with the same number. The kernel asks setmaxnreg for {least} and {most}. Triton adds {wide} for "
        f"the first\n"
        f"warpgroup, which runs what stands before and behind the loops, and {idle} for the two that wait meanwhile. Numbers from "
        f"the\n"
        f'machine code of the step "persistent".',
    )
