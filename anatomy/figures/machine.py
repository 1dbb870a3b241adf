"""Figures of the memory hierarchy, of the roofline and of the peak."""

from __future__ import annotations

from statistics import median

from anatomy import models
from anatomy.figures.style import (
    BLUE,
    GOLD,
    GREEN,
    INK,
    LINE,
    MARGIN,
    MINT,
    RED,
    ROSE,
    SAND,
    SKY,
    SOFT,
    STONE,
    Sheet,
    figure,
)  # fmt: skip
from anatomy.kernel_facts import recorded
from barellm.tools.plan.devices import CARDS

LEVELS = {"L1": (GREEN, MINT), "L2": (BLUE, SKY), "L3": (GOLD, SAND), "memory": (RED, ROSE)}
SXM_CLOCK = 1.83e9  # Hz, at which an H100 SXM has its published peak


def kib(nbytes: float) -> str:
    return f"{nbytes / 1024:.0f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.0f} MiB"


@figure("The memory hierarchy of one CPU core, measured", height=330)
def cpu_hierarchy(s: Sheet) -> None:
    found = recorded("anatomy-1000")
    s.text(420, 52, "size", colour=SOFT, ha="center")
    s.text(560, 52, "latency, ns", colour=SOFT, ha="center")
    s.text(705, 52, "one thread, GB/s", colour=SOFT, ha="center")
    registers = ("registers", 16 * 32, STONE)
    for i, name in enumerate(["registers", *found["levels"]]):
        y, half = 68 + 46 * i, 60 + 32 * i
        colour = registers[2] if not i else LEVELS[name][1]
        s.rect(180 - half * 0.75, y, half * 1.5, 38, colour, name, edge=LINE, weight="bold")
        if not i:
            s.text(420, y + 19, "16 x 32 B", ha="center")
            s.text(632, y + 19, "in the instruction itself", ha="center", colour=SOFT)
            continue
        level = found["levels"][name]
        size = kib(found["caches"][name]) if name in found["caches"] else "all the rest"
        s.text(420, y + 19, size, ha="center")
        s.text(560, y + 19, f"{level['latency_ns']:.1f}", ha="center")
        s.text(705, y + 19, f"{level['bytes_per_s'] / 1e9:.0f}", ha="center")
    s.note(
        304,
        f"{found['machine']['processor']}. A level holds more than the one above it, answers later, and gives less in a second.",
    )


@figure("Latency and bandwidth over the size of the buffer, measured", height=330)
def memory_curves(s: Sheet) -> None:
    found = recorded("anatomy-1000")
    sizes = [row["bytes"] for row in found["memory"]]
    for x, key, scale, title, unit in (
        (62, "latency_ns", 1, "random order: the latency shows", "latency of a load, ns"),
        (460, "bytes_per_s", 1e9, "in order: the bandwidth shows", "read bandwidth, GB/s"),
    ):
        axes = s.chart(x, 74, 320, 180, title=title, xlabel="size of the buffer", ylabel=unit, xscale="log")
        axes.plot(sizes, [row[key] / scale for row in found["memory"]], color=BLUE, marker="o", markersize=3)
        axes.set(**({"yscale": "log", "ylim": (1, 600)} if scale == 1 else {"ylim": (0, 190)}))
        for name, size in found["caches"].items():
            axes.axvline(size, color=LINE, linewidth=1, linestyle="--")
            axes.text(size, 0.98, f" {name}", transform=axes.get_xaxis_transform(), fontsize=10, color=SOFT, va="top")
        ticks = [1 << n for n in (13, 17, 21, 25)]
        axes.set_xticks(ticks, [kib(t) for t in ticks])
        axes.minorticks_off()
    s.note(
        302, "Dashed lines are the sizes of the caches. A pointer chase (left) cannot be prefetched; a sum of a buffer (right) is."
    )


@figure("The memory hierarchy of a Hopper GPU (H100 SXM), by its data sheet", height=320)
def gpu_hierarchy(s: Sheet) -> None:
    card = CARDS["h100"]
    rows = [
        ("registers", f"{card.sms} x 256 KiB", "of one thread", MINT),
        ("shared memory and L1", f"{card.sms} x 256 KiB", "of one block (228 KiB of them at most shared)", SKY),
        ("L2", "50 MB", "of the whole card", SAND),
        ("global memory (HBM)", f"{card.nbytes >> 30} GiB, {card.memory / 1e12:.2f} TB/s", "of the whole card", ROSE),
    ]
    s.text(445, 54, "size", colour=SOFT, ha="center")
    s.text(650, 54, "who sees it", colour=SOFT, ha="center")
    for i, (name, size, owner, colour) in enumerate(rows):
        y, w = 70 + 52 * i, 150 + 50 * i
        s.rect(180 - w / 2, y, w, 42, colour, name, edge=LINE, weight="bold")
        s.text(445, y + 21, size, ha="center")
        s.text(650, y + 21, owner.replace(" (", "\n("), ha="center", colour=SOFT, linespacing=1.2)
    s.note(
        278,
        "All registers of a multiprocessor together hold as many bytes as its shared memory and L1. Those of the CPU core "
        "above hold 512 bytes,\n"
        "and its L1 has 64 times as many. So a GPU can keep far larger tiles of sums in registers.",
    )


@figure("A cache line is 64 bytes: numbers along a row, and down a column", height=300)
def cache_line(s: Sheet) -> None:
    rows, cols, line = 8, 32, 16
    for x, title, mine in (
        (MARGIN, "along a row: 1 line is moved", lambda r, c: r == 0 and c < 16),
        (MARGIN + 400, "down a column: 8 lines for 8 numbers", lambda r, c: c == 0),
    ):
        s.text(x, 62, title, weight="bold")

        def colour(r: int, c: int, mine=mine) -> str:
            if mine(r, c):
                return BLUE
            return SKY if any(mine(r, line * (c // line) + k) for k in range(line)) else STONE

        s.grid(x, 78, rows, cols, 11, 17, colour)
        moved = len({(r, c // line) for r in range(rows) for c in range(cols) if mine(r, c)})
        used = sum(mine(r, c) for r in range(rows) for c in range(cols))
        s.text(x, 232, f"moved {moved * 64} bytes, used {used * 4}: {100 * used * 4 / (moved * 64):.0f} %")
    s.legend(MARGIN, 254, [(BLUE, "asked for"), (SKY, "comes with it"), (STONE, "stays")])
    s.note(272, "fp32 numbers, row-major. Each row here is two cache lines long.")


@figure("Sets of a cache: addresses a power of two apart fall on top of each other", height=315)
def cache_sets(s: Sheet) -> None:
    nbytes, ways = 32 << 10, 8
    for x, stride in ((20, 4096), (415, 4000)):
        at = [models.cache_set(i * stride, nbytes, ways) for i in range(64)]
        counts = [at.count(i) for i in range(64)]
        axes = s.chart(
            x + 44, 78, 310, 150, title=f"64 lines, {stride} bytes apart", xlabel="set of L1 (of 64)", ylabel="lines that want it"
        )
        axes.bar(range(64), counts, color=[RED if n > ways else BLUE for n in counts], width=1)
        axes.axhline(ways, color=INK, linewidth=1, linestyle="--")
        axes.text(12, ways * 1.04 + max(counts) / 60, "8 ways: no more fit", fontsize=10, color=INK)
        axes.set(ylim=(0, 1.15 * max(*counts, ways + 3)), xlim=(-2, 64))
    s.note(
        270,
        "A cache of 32 KiB with 8 ways and lines of 64 bytes has 64 sets. 1024 fp32 numbers are 4096 bytes: a column of such a "
        "matrix\n"
        "wants one set only, and the ninth line of it throws the first one out.",
    )


@figure("Pages: what a tile of B touches before and after packing", height=300)
def pages(s: Sheet) -> None:
    size, depth, span = 4096, 256, 16
    names, values = [], []
    for N in (1000, 1024, 4096):
        touched = {(k * N * 4 + c * 4) // size for k in range(depth) for c in range(span)}
        names.append(f"rows of B,\nN = {N}")
        values.append(len(touched))
    names.append("packed\npanel")
    values.append(-(-depth * span * 4 // size))
    axes = s.chart(70, 76, 400, 150, title="pages of 4 KiB for 256 x 16 numbers", xlabel="", ylabel="pages")
    s.bars(axes, names, [float(v) for v in values], [BLUE] * 3 + [GREEN], "{:.0f}")
    s.box(
        510,
        80,
        268,
        146,
        STONE,
        "Each page needs an entry in the TLB, the\ntable of translated addresses. A panel that\n"
        "is packed one row behind the other needs\nas few as its bytes allow, and its lines\nspread over all sets of the caches.",
    )
    s.note(272, "Counted from the addresses; the panel is the one that step 6 of the CPU's ladder packs, for AVX2.")


@figure("The roofline: what a kernel can reach at most", height=360)
def roofline(s: Sheet) -> None:
    found, card = recorded("anatomy-1000"), CARDS["h100"]
    (rates,) = [p["flops"] for p in found["peaks"] if (p["threads"], p["dtype"]) == (1, "fp32")][:1]
    cases = (
        (66, "one core, fp32, measured", median(rates), found["levels"]["memory"]["bytes_per_s"], 1e9, "GFLOP/s"),
        (464, "H100 SXM, bf16, data sheet", card.peak("bf16"), card.memory, 1e12, "TFLOP/s"),
    )
    for x, title, peak, bandwidth, scale, unit in cases:
        ridge = peak / bandwidth
        axes = s.chart(
            x, 76, 316, 200, title=title, xlabel="arithmetic intensity, FLOP/byte", ylabel=unit, xscale="log", yscale="log"
        )
        xs = [ridge / 100, ridge, ridge * 30]
        axes.plot(xs, [min(peak, i * bandwidth) / scale for i in xs], color=BLUE, linewidth=2)
        axes.axvline(ridge, color=LINE, linewidth=1, linestyle="--")
        axes.text(ridge * 1.15, peak / scale / 60, f"ridge point:\n{ridge:.1f} FLOP/byte", fontsize=10, color=SOFT)
        axes.text(xs[0] * 1.2, peak / scale * 1.25, f"peak {peak / scale:.0f} {unit}", fontsize=10, color=INK)
        axes.text(xs[0] * 2.6, peak / scale / 75, f"slope: {bandwidth / 1e9:.0f} GB/s\nof memory", fontsize=10, color=INK)
        axes.set(ylim=(peak / scale / 200, peak / scale * 2.5), xlim=(xs[0], xs[-1]))
    s.note(
        322,
        "Left of the ridge point memory is the limit (memory-bound), right of it arithmetic (compute-bound). The whole line "
        "is the\n"
        "speed of light of a kernel: nothing on this machine is above it.",
    )


@figure("Arithmetic intensity of a matmul grows with its size", height=345)
def intensity(s: Sheet) -> None:
    card = CARDS["h100"]
    axes = s.chart(
        66,
        72,
        420,
        196,
        title="bf16, each operand read once, C written once",
        xlabel="M = rows of A (N = K = 4096)",
        ylabel="FLOP/byte",
        xscale="log",
        yscale="log",
    )
    N = K = 4096
    sizes = [1 << i for i in range(14)]
    values = [2 * M * N * K / (2 * (M * K + K * N + M * N)) for M in sizes]
    axes.plot(sizes, values, color=BLUE, marker="o", markersize=4)
    ridge = card.peak("bf16") / card.memory
    axes.axhline(ridge, color=RED, linewidth=1.2, linestyle="--")
    axes.text(1.2, ridge * 1.25, f"ridge point of an H100: {ridge:.0f}", fontsize=10, color=RED)
    axes.set_ylim(0.6, 6000)
    first = next(M for M, v in zip(sizes, values, strict=True) if v > ridge)
    s.box(
        520,
        84,
        260,
        176,
        STONE,
        f"One row (M = 1): {values[0]:.2f} FLOP for each\nbyte. This is decoding of one text, a\nGEMV: memory-bound on both "
        f"machines.\n\n"
        f"From {first} rows on (of powers of two)\nthe matmul is compute-bound on an\nH100: this is training.",
    )
    s.note(314, "2 M N K operations over 2 (M K + K N + M N) bytes.")


@figure("The peak follows the clock, and power limits the clock", height=330)
def clock(s: Sheet) -> None:
    card = CARDS["h100"]
    per_cycle = card.peak("bf16") / card.sms / SXM_CLOCK
    axes = s.chart(74, 76, 410, 186, title="peak of tensor cores, bf16, 132 multiprocessors", xlabel="clock, MHz", ylabel="TFLOP/s")
    clocks = [1000, 1830]
    axes.plot(clocks, [card.sms * round(per_cycle) * c * 1e6 / 1e12 for c in clocks], color=BLUE, linewidth=2)
    for mhz in (1830, 1400):
        value = card.sms * round(per_cycle) * mhz * 1e6 / 1e12
        axes.plot([mhz], [value], "o", color=INK)
        axes.annotate(f"{mhz} MHz: {value:.0f}", (mhz, value), (-8, 6), textcoords="offset points", fontsize=10, ha="right")
    axes.set(ylim=(450, 1080), xlim=(950, 1900))
    s.box(
        515,
        80,
        265,
        180,
        STONE,
        f"One multiprocessor does {per_cycle:.0f} bf16\noperations in a cycle: 4 tensor cores\nof 512 multiply-adds each.\n\n"
        "At its power limit a card lowers the\nclock, and the peak falls with it. So a\nspeed of light holds for one clock.",
    )
    s.note(
        296,
        "Arithmetic from the data sheet: peak = multiprocessors x operations in a cycle x clock. The points are no measurements.",
    )
