"""Figures of a CPU core: registers, chains and Little's law, ports, VNNI pairs, AMX tiles, dynamic scheduling."""

from __future__ import annotations

import re

from anatomy import kernel_facts as facts
from anatomy import models
from anatomy.figures.style import BLUE, GREEN, INK, LINE, MINT, PALE, ROSE, SAND, SKY, STONE, Sheet, figure


def register_roles(name: str, isa: str) -> dict[int, str]:
    """Number of a vector register -> what the inner loop keeps there: "C", "B", "A" or "" for an unused one."""
    roles: dict[int, str] = {}
    for line in facts.inner_loop(name, isa):
        used = [int(n) for n in re.findall(r"%[yz]mm(\d+)", line)]
        if line.startswith(("vfmadd231ps", "vdpbf16ps")):
            roles[used[-1]] = "C"
        elif line.startswith("vbroadcastss"):
            roles[used[-1]] = "A"
        elif line.startswith("vmovups"):
            roles[used[-1]] = "B"
    return roles


@figure("What fills the vector registers of the inner loop", height=300)
def registers(s: Sheet) -> None:
    colours = {"C": MINT, "B": SAND, "A": ROSE, "": STONE}
    for y, isa, count, width in ((80, "avx2", 16, "ymm, 8 fp32 lanes"), (168, "avx512", 32, "zmm, 16 fp32 lanes")):
        roles = register_roles("shipped", isa)
        kinds = [roles.get(i, "") for i in range(count)]
        s.text(
            20,
            y - 16,
            f"{isa}: {count} registers ({width}): "
            + ", ".join(
                f"{kinds.count(k)} {w}" for k, w in (("C", "sums"), ("B", "of B"), ("A", "of A"), ("", "free")) if kinds.count(k)
            ),
            weight="bold",
        )
        s.grid(
            20,
            y,
            1,
            count,
            760 / count,
            40,
            lambda r, c, kinds=kinds: colours[kinds[c]],
            lambda r, c, kinds=kinds: f"{c}\n{kinds[c]}",
            9,
        )
    s.legend(20, 226, [(MINT, "sums of C"), (SAND, "vector of B"), (ROSE, "number of A"), (STONE, "not used")])
    s.note(
        246,
        "Read from the assembly that LLVM makes of the shipped kernel. A register tile is as large as the registers allow: one "
        "more row\n"
        "would need as many registers as the tile has vectors, and a register would go to the stack (a spill).",
    )


@figure("ILP and Little's law: independent chains hide the latency of an addition", height=345)
def littles_law(s: Sheet) -> None:
    latency, rate = 4, 2
    axes = s.chart(
        66,
        76,
        420,
        190,
        title=f"latency {latency} cycles, {rate} multiply-adds a cycle",
        xlabel="independent sums (chains)",
        ylabel="share of the peak, %",
    )
    counts = list(range(1, 17))
    values = [100 * models.chains(n, latency, rate) for n in counts]
    axes.bar(counts, values, color=[GREEN if n >= latency * rate else BLUE for n in counts], width=0.7)
    axes.set(ylim=(0, 112))
    axes.annotate("naive: 1 chain,\n12.5 %", (1, 14), (1, 45), fontsize=10, arrowprops={"arrowstyle": "-", "color": LINE})
    axes.annotate("from 8 chains on: 100 %", (8, 101), (2.4, 105), fontsize=10)
    s.box(
        515,
        80,
        265,
        186,
        STONE,
        "Little's law: under way =\nlatency x rate.\n\n4 cycles x 2 in a cycle = 8 sums that do\nnot wait for each other. A "
        "chain, where\n"
        "each addition needs the one before,\nhas one under way. The same law gives\nthe bytes that memory wants in flight.",
    )
    s.note(312, "Model of a core with two units for multiply-adds, such as most x86-64 processors with AVX2.")


@figure("Bytes in flight: Little's law for memory", height=355)
def bytes_in_flight(s: Sheet) -> None:
    found = facts.recorded("anatomy-1000")["levels"]
    names, values = [], []
    for name, level in found.items():
        names.append(f"{name}\n{level['latency_ns']:.1f} ns x {level['bytes_per_s'] / 1e9:.0f} GB/s")
        values.append(models.in_flight(level["latency_ns"] * 1e-9, level["bytes_per_s"]) / 64)
    axes = s.chart(
        66, 76, 700, 180, title="cache lines of 64 bytes on their way to one core at once, computed", xlabel="", ylabel="lines"
    )
    s.bars(axes, names, values, [PALE[2], PALE[0], PALE[3], PALE[1]])
    s.note(
        296,
        "Latency of a random load times bandwidth of a stream, both measured by one thread. Waiting for one line of memory at "
        "a time\n"
        "would give 64 bytes in 155 ns, 0.4 GB/s. 21 GB/s were measured, so by Little's law some 50 lines were under way; nobody "
        "counted\n"
        "them.",
    )


def schedule(loop: list[str], loads: int = 2, fmas: int = 2) -> list[tuple[int, str, str]]:
    """(cycle, unit, instruction) of one turn of a loop, greedily, with so many load ports and units for multiply-adds.
    Registers are ready when they are written: turns overlap, so only the ports are counted."""
    used: dict[tuple[int, str], int] = {}
    placed, ready = [], {}
    for line in loop:
        mnemonic, _, operands = line.partition(" ")
        names = re.findall(r"%[yz]mm\d+", operands)
        if mnemonic.startswith(("vbroadcast", "vmovups")):
            unit, most, at = "load", loads, 0
        elif mnemonic.startswith(("vfmadd", "vdpbf16")):
            unit, most = "multiply-add", fmas
            at = max((ready.get(n, 0) for n in names[:-1]), default=0)
        else:
            unit, most, at = "integer", 4, 0
        while used.get((at, unit), 0) >= most:
            at += 1
        placed.append((at, f"{unit} {used.get((at, unit), 0)}", line))
        used[at, unit] = used.get((at, unit), 0) + 1
        if unit == "load":
            ready[names[-1]] = at
    return placed


@figure("Ports: which unit does what in each cycle", height=350)
def ports(s: Sheet) -> None:
    placed = schedule(facts.inner_loop("shipped", "avx2"))
    units = ["load 0", "load 1", "multiply-add 0", "multiply-add 1", "integer 0", "integer 1", "integer 2", "integer 3"]
    last = max(at for at, *_ in placed) + 1
    colours = {"load": SAND, "multiply-add": MINT, "integer": SKY}
    width = min(70, 620 / last)
    for i, unit in enumerate(units):
        s.text(20, 84 + 21 * i, unit)
        s.grid(140, 75 + 21 * i, 1, last, width, 19, lambda r, c: STONE)
    for c in range(last):
        s.text(140 + width * (c + 0.5), 62, f"cycle {c}", ha="center", size=9.5, colour="#52606d")
    for at, unit, line in placed:
        row = units.index(unit)
        short = line.partition(" ")[0].replace("vbroadcastss", "A").replace("vmovups", "B").replace("vfmadd231ps", "fma")
        s.rect(140 + width * at, 75 + 21 * row, width, 19, colours[unit.rpartition(" ")[0]], short, size=9)
    fmas = sum("multiply" in unit for _, unit, _ in placed)
    s.note(
        260,
        f"Model: a greedy schedule of the real inner loop (AVX2) on two load ports and two units for multiply-adds. {fmas} "
        f"multiply-adds need\n"
        f"{fmas // 2} cycles at least, the 8 loads only 4: the units for multiply-adds are the bottleneck, which is what a matmul "
        f"should be. With a tile\n"
        "of 12 x 1 vectors, 13 loads for 12 multiply-adds, the load ports would be. In cycle 0 only one multiply-add has what it "
        "needs, so one\n"
        f"step by itself takes {last}; in the loop the next step's loads come early and fill the gap.",
    )


@figure("VNNI layout: pairs along the depth lie side by side", height=320)
def vnni(s: Sheet) -> None:
    depth, cols = 4, 8
    s.text(20, 60, "B as it lies in memory: rows are the depth k", weight="bold")
    s.grid(20, 76, depth, cols, 40, 26, lambda r, c: PALE[r], lambda r, c: f"k{r} n{c}", 9)
    s.text(400, 60, "packed: each 32-bit lane has k and k + 1 of a column", weight="bold")
    packed = [[(2 * r + c % 2, c // 2) for c in range(2 * cols)] for r in range(depth // 2)]
    s.grid(
        400,
        76,
        depth // 2,
        2 * cols,
        23.5,
        26,
        lambda r, c: PALE[packed[r][c][0]],
        lambda r, c: f"{packed[r][c][0]},{packed[r][c][1]}",
        8.5,
    )
    for c in range(cols + 1):
        s.line([400 + 47 * c] * 2, [76, 128], colour=INK, width=1.4)
    s.text(400, 152, "vdpbf16ps: sum[n] += a[k] b[k, n] + a[k+1] b[k+1, n]", family="monospace", size=9.5)
    s.note(
        216,
        "bf16 numbers are 16 bits wide, sums are fp32, 32 bits wide. An instruction that adds two products into one lane wants "
        "the two\n"
        "numbers of B in that lane. Rows of A run along the depth already, so a pair of A is one broadcast of 32 bits. An odd "
        "depth is\n"
        "filled up with a zero.",
    )


@figure("AMX: one instruction multiplies two tiles", height=345)
def amx(s: Sheet) -> None:
    s.text(20, 62, "A: 16 x 32 bf16", weight="bold")
    s.grid(20, 80, 16, 16, 10, 10, lambda r, c: ROSE)
    s.text(215, 62, "B: 32 x 16 bf16, as pairs", weight="bold")
    s.grid(215, 80, 16, 16, 10, 10, lambda r, c: SAND)
    s.text(420, 62, "C: 16 x 16 fp32", weight="bold")
    s.grid(420, 80, 16, 16, 10, 10, lambda r, c: MINT)
    s.text(198, 160, "x", size=14, ha="center")
    s.text(398, 160, "+=", size=14, ha="center")
    loop = facts.inner_loop("shipped, 16 bits", "amx_bf16")
    kinds = ["C"] * 4 + ["A", "A", "B", "B"]
    s.text(610, 62, "8 tile registers, 1 KiB each", weight="bold")
    s.grid(
        610,
        80,
        4,
        2,
        80,
        40,
        lambda r, c: {"C": MINT, "A": ROSE, "B": SAND}[kinds[2 * r + c]],
        lambda r, c: f"tmm{2 * r + c}: {kinds[2 * r + c]}",
        10,
    )
    tiles, loads = sum(x.startswith("tdpbf16ps") for x in loop), sum(x.startswith("tileload") for x in loop)
    s.note(
        262,
        f"tdpbf16ps does 16 x 16 x 32 multiply-adds, {2 * 16 * 16 * 32:,} operations; vdpbf16ps does {2 * 2 * 16}. The inner loop "
        f"of the shipped kernel has {tiles}\n"
        f"of them for {loads} tile loads: two tiles of A and two of B give four tiles of C, so each tile that is loaded is used "
        f"twice. It is the\n"
        "register tile again, 2 x 2, with tiles for numbers.",
    )


@figure("Dynamic scheduling: whoever is free takes the next work item", height=320)
def work_stealing(s: Sheet) -> None:
    costs, slow = [10] * 16, {1: 1.8}
    y = 66
    for title, dynamic in (("fixed: each thread has eight items", False), ("dynamic: items are taken from a shared counter", True)):
        spans = models.dealt(costs, 2, slow, dynamic=dynamic)
        end = max(line[-1][1] for line in spans)
        s.text(20, y, f"{title}; done after {end:.0f}", weight="bold")
        for t, line in enumerate(spans):
            s.text(20, y + 29 + 28 * t, f"thread {t}")
            for begin, stop in line:
                s.rect(90 + 4.6 * begin, y + 18 + 28 * t, 4.6 * (stop - begin), 23, PALE[t])
            s.text(96 + 4.6 * line[-1][1], y + 29 + 28 * t, f"{len(line)} items", size=10)
        y += 100
    s.note(
        270,
        "Model: 16 equal work items of 10 units; thread 1 is disturbed and takes 1.8 times as long for each. Results do not "
        "depend on who\n"
        "does an item, so the bits stay the same.",
    )
