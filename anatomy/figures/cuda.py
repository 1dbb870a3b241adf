"""Figures of the CUDA model: grid, warps, layouts, latency, divergence, occupancy."""

from __future__ import annotations

from dataclasses import replace

from anatomy import kernel_facts as facts
from anatomy import models
from anatomy.figures.style import BLUE, INK, LINE, MINT, PALE, RED, ROSE, SAND, SKY, STONE, VIOLET, Sheet, figure
from barellm.tools.plan.waves import MULTIPROCESSORS

HOPPER = MULTIPROCESSORS[90]
SHOWN = ("shared", "1-D tile", "2-D tile", "wgmma and TMA", "larger tile", "persistent")


@figure("A launch is a grid of blocks, a block is warps, a warp is 32 threads", height=330)
def grid(s: Sheet) -> None:
    s.text(20, 60, "grid: all blocks of a launch", weight="bold")
    s.grid(20, 76, 6, 6, 30, 30, lambda r, c: SAND if (r, c) == (2, 5) else STONE, lambda r, c: f"{c},{r}")
    s.text(270, 60, "block: 8 warps", weight="bold")
    s.grid(270, 76, 8, 1, 150, 22, lambda r, c: SKY if r == 5 else STONE, lambda r, c: f"warp {r}", 10)
    s.text(490, 60, "warp: 32 threads (lanes)", weight="bold")
    s.grid(490, 76, 4, 8, 34, 30, lambda r, c: MINT, lambda r, c: str(8 * r + c), 10)
    s.arrow(201, 151, 268, 185)
    s.arrow(421, 197, 488, 150)
    s.note(
        268,
        "A block stays on one multiprocessor, and its threads share its shared memory and barriers. The 32 threads of a warp\n"
        "execute one instruction together. Numbers of blocks are x,y: x counts columns of tiles, y rows of tiles.",
    )


@figure("A streaming multiprocessor (SM) of Hopper", height=340)
def multiprocessor(s: Sheet) -> None:
    s.box(20, 50, 760, 226, STONE)
    for i in range(4):
        x = 34 + 186 * i
        s.box(x, 62, 174, 128, "white", f"partition {i}", at_top=True, weight="bold")
        s.rect(x + 10, 86, 154, 24, SKY, "scheduler: 1 warp a cycle", size=9.5)
        s.rect(x + 10, 114, 154, 24, MINT, f"{HOPPER.registers // 4:,} registers", size=9.5)
        s.rect(x + 10, 142, 74, 40, SAND, "32 fp32\nlanes", size=9.5)
        s.rect(x + 90, 142, 74, 40, ROSE, "tensor\ncore", size=9.5)
    s.rect(34, 200, 732, 28, VIOLET, f"shared memory: {HOPPER.shared >> 10} KiB for all blocks on the SM", edge=LINE)
    s.rect(
        34,
        236,
        732,
        28,
        SAND,
        f"at most {HOPPER.threads:,} threads ({HOPPER.threads // 32} warps) and {HOPPER.blocks} blocks at a time",
        edge=LINE,
    )
    s.note(
        290,
        "Threads of all warps that are present keep their registers, so that changing from one warp to another costs nothing.\n"
        "An H100 SXM has 132 such multiprocessors.",
    )


@figure("Latency is hidden by other warps", height=345)
def latency_hiding(s: Sheet) -> None:
    busy, wait, until = 4, 12, 48
    y = 62
    for warps in (1, 2, 4):
        issued = models.issue(warps, busy, wait, until)
        share = sum(map(len, issued)) / until
        s.text(20, y, f"{warps} warp{'s' * (warps > 1)}: an instruction in {100 * share:.0f} % of the cycles", weight="bold")
        for w, cycles in enumerate(issued):
            s.rect(40, y + 14 + 15 * w, 15 * until, 13, STONE)
            for at in cycles:
                s.rect(40 + 15 * at, y + 14 + 15 * w, 15, 13, PALE[w], line=0.5)
        y += 30 + 15 * warps + 8
    s.note(
        288,
        f"Model: a warp issues {busy} instructions, then waits {wait} cycles for memory; one instruction is issued in a cycle. "
        f"Coloured: issued,\n"
        "grey: waiting. With four warps somebody is always ready, and the wait costs nothing.",
    )


@figure("Divergence: a warp executes both sides of a branch", height=290)
def divergence(s: Sheet) -> None:
    taken = [lane % 4 == 0 for lane in range(32)]
    steps = [
        ("if lane % 4 == 0:", [True] * 32, STONE),
        ("    then-side", taken, MINT),
        ("else:", [True] * 32, STONE),
        ("    else-side", [not t for t in taken], SKY),
        ("after", [True] * 32, STONE),
    ]
    for i, (words, mask, colour) in enumerate(steps):
        y = 62 + 30 * i
        s.text(20, y + 11, words, family="monospace")
        for lane, on in enumerate(mask):
            s.rect(190 + 18.5 * lane, y, 18.5, 22, colour if on else "white", str(lane) if on else "", edge=LINE, size=8.5)
    both = sum(taken) / 32 / 2 + sum(not t for t in taken) / 32 / 2
    s.note(
        226,
        f"Threads of the other side are switched off (white) and wait. Over both sides {100 * both:.0f} % of the lanes work. A "
        f"branch that all\n"
        "threads of a warp take alike costs nothing.",
    )


def limits(row: dict) -> dict[str, int]:
    """Blocks that each resource alone would let onto a multiprocessor."""
    free = {"registers": 1 << 40, "threads": 1 << 40, "shared": 1 << 50, "blocks": 1 << 40}
    need = {"threads": row["threads"], "registers": row["registers"], "shared": row["shared"]}
    return {
        name: min(replace(HOPPER, **{k: v for k, v in free.items() if k != name}).occupancy(**need), HOPPER.blocks)
        for name in ("threads", "registers", "shared")
    }


@figure("Occupancy: the scarcest of three resources decides", height=360)
def occupancy_limits(s: Sheet) -> None:
    rows = facts.resources()
    axes = s.chart(
        70, 84, 700, 182, title="blocks on one multiprocessor that each resource alone would allow", xlabel="", ylabel="blocks"
    )
    colours = {"threads": SAND, "registers": SKY, "shared": VIOLET}
    for i, name in enumerate(SHOWN):
        allowed = limits(rows[name])
        least = min(allowed.values())
        for j, (resource, blocks) in enumerate(allowed.items()):
            shown = min(blocks, 18)
            edge = RED if blocks == least else LINE
            axes.bar(
                i + 0.27 * (j - 1),
                shown,
                width=0.25,
                color=colours[resource],
                edgecolor=edge,
                linewidth=1.6 if edge == RED else 0.6,
            )
            axes.text(
                i + 0.27 * (j - 1),
                shown + 0.3,
                f"{blocks}" if shown == blocks else f"{blocks}+",
                ha="center",
                fontsize=10,
                color=INK,
            )
    names = [
        f"{name}\n{rows[name]['threads']} x {rows[name]['registers']} reg.\n{rows[name]['shared'] / 1024:.0f} KiB" for name in SHOWN
    ]
    axes.set_xticks(range(len(SHOWN)), names, fontsize=9.5)
    axes.set(ylim=(0, 21))
    s.legend(420, 44, [(colours[n], n if n != "shared" else "shared memory") for n in colours], step=110)
    s.note(
        326,
        "Steps of the GPU's ladder, as ptxas compiled them: threads x registers of each, shared memory of a block. Red: the "
        "limit.\n"
        "More than 18 blocks are cut off; no more than 32 fit in any case.",
    )


@figure("Registers of a thread against warps that fit", height=340)
def occupancy_curve(s: Sheet) -> None:
    axes = s.chart(
        70,
        72,
        700,
        190,
        title="blocks of 256 threads, no shared memory",
        xlabel="registers of a thread",
        ylabel="warps on a multiprocessor",
    )
    registers = list(range(16, 256))
    warps = [8 * HOPPER.occupancy(threads=256, registers=r, shared=0) for r in registers]
    axes.step(registers, warps, where="post", color=BLUE, linewidth=2)
    for r in (32, 64, 128):
        n = warps[registers.index(r)]
        axes.plot([r], [n], "o", color=INK)
        axes.annotate(f"{r} registers: {n}", (r, n), (6, 5), textcoords="offset points", fontsize=10)
    axes.set(ylim=(0, 72), xlim=(14, 258))
    s.note(
        304,
        f"65,536 registers are dealt out to warps in pieces of {HOPPER.unit}. One register more than 128 costs half of the warps: "
        f"from 2 blocks to 1.",
    )


@figure("Which thread has which element decides whether a load is coalesced", height=330)
def thread_layout(s: Sheet) -> None:
    for x, name in ((20, "naive"), (420, "coalesced")):
        first = [points[0] for points in facts.elements(facts.layout(name))]
        where = {point: lane for lane, point in enumerate(first)}
        s.text(x, 60, f'step "{name}"', weight="bold")
        s.grid(
            x,
            76,
            12,
            12,
            29,
            15,
            lambda r, c, where=where: MINT if (r, c) in where else STONE,
            lambda r, c, where=where: str(where.get((r, c), "")),
            9,
        )
        touched = models.sectors([(r * 4096 + c) * 4 for r, c in first])
        s.text(x, 270, f"a store of the warp to C touches {touched} sectors of 32 bytes")
    s.note(
        290,
        "Top left corner of C; the numbers are lanes of warp 0, from the kernels' own layouts. C has 4096 columns of fp32. 32 "
        "sectors\n"
        "are 1024 bytes moved for 128 bytes of results; 4 sectors are the 128 bytes alone.",
    )
