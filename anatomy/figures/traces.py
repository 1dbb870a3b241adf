"""Figures of recorded timelines: a step, a part of it, two ranks with and without a gap, and the five slow steps."""

from __future__ import annotations

from statistics import median
from typing import Any

from anatomy import timelines
from anatomy.figures.style import BLUE, GOLD, GREEN, LILAC, LINE, RED, SOFT, STONE, TEAL, Sheet, figure

FAMILIES = [
    ("exchanges", RED, timelines.EXCHANGES),
    ("matmuls", BLUE, ("matmul", "linear", "qkv")),
    ("attention", GOLD, ("attention",)),
    ("loss", LILAC, ("classifier", "cross_entropy", "loss", "softmax")),
    (
        "optimizer",
        GREEN,
        ("adamw", "muon", "sum_squares", "newton", "momentum", "update", "clip", "grad_norm", "scale", "ns_", "cast"),
    ),
    ("barrier", "#d8dee4", ("barrier",)),
]
OTHER = ("other ops", TEAL)
LEFT, RIGHT = 120, 780


def family(event: dict[str, Any]) -> tuple[str, str]:
    """(name, colour) of a slice of a thread."""
    return next(((name, colour) for name, colour, starts in FAMILIES if event["cat"].startswith(starts)), OTHER)


def tracks(s: Sheet, name: str, y: float, *, first: float = 0, last: float = 0, height: float = 26, axis: bool = True) -> float:
    """Draw a recorded timeline from `first` to `last` microseconds (0: all of it), from y on. Returns the y below it."""
    events = timelines.slices(name)
    last = last or max(e["ts"] + e["dur"] for e in events)
    scale = (RIGHT - LEFT) / (last - first)
    rows = sorted({(e["pid"], e["tid"]) for e in events})
    ranks = len({pid for pid, _ in rows})
    for row, (pid, tid) in enumerate(rows):
        top = y + (height + 3) * row
        label = "python" if tid == 0 else "worker" if ranks > 1 else f"thread {tid - 1}"
        s.text(20, top + height / 2, f"rank {pid - 1} {label}" if ranks > 1 else label, size=10)
        s.rect(LEFT, top, RIGHT - LEFT, height, STONE)
        for e in events:
            if (e["pid"], e["tid"]) != (pid, tid) or e["name"] == "step":
                continue
            begin, end = max(e["ts"], first), min(e["ts"] + e["dur"], last)
            if end - begin <= 0:
                continue
            width = (end - begin) * scale
            if tid == 0:
                words = e["name"] if 6.5 * len(e["name"]) < width else ""
                s.rect(LEFT + (begin - first) * scale, top, width, height, "white", words, edge=LINE, size=9.5)
            else:
                s.rect(LEFT + (begin - first) * scale, top, width, height, family(e)[1], edge="none", line=0)
    bottom = y + (height + 3) * len(rows)
    if axis:
        for i in range(5):
            at = first + (last - first) * i / 4
            s.text(
                LEFT + (at - first) * scale,
                bottom + 10,
                f"{at / 1000:.1f}" + " ms" * (i == 4),
                size=9.5,
                colour=SOFT,
                ha="left" if i == 0 else "right" if i == 4 else "center",
            )
    return bottom + 22 * axis


def families(s: Sheet, y: float) -> None:
    s.legend(20, y, [(colour, name) for name, colour, _ in FAMILIES] + [(OTHER[1], OTHER[0])], step=108)


@figure("The timeline of a real training step on two threads", height=265)
def trace_step(s: Sheet) -> None:
    bottom = tracks(s, "step", 56, height=34)
    families(s, bottom + 16)
    s.note(
        bottom + 34,
        "Recorded by barellm profile's own code: a GPT of two blocks, 192 channels, 4 x 64 tokens, fp32. The first row shows "
        "which program\n"
        "runs, the others what each thread does.",
    )


@figure("The same step, its last fifth: slices, barriers, and the gap between programs", height=285)
def trace_zoom(s: Sheet) -> None:
    events = timelines.slices("step")
    programs = [e for e in events if e["tid"] == 0 and e["name"] != "step"]
    end = max(e["ts"] + e["dur"] for e in programs)
    bottom = tracks(s, "step", 56, first=0.8 * end, last=end, height=34)
    families(s, bottom + 16)
    ops = [e for e in events if e["tid"] and e["cat"] != "barrier" and e["ts"] >= 0.8 * end]
    waits = [e["dur"] for e in events if e["tid"] and e["cat"] == "barrier" and e["ts"] >= 0.8 * end]
    share = sum(waits) / (sum(waits) + sum(e["dur"] for e in ops))
    s.note(
        bottom + 34,
        "A light slice behind an op is a barrier: this thread has finished and waits for the other one. Grey between slices of "
        "the first\n"
        "row is Python, which computes the next program's arguments. The slices of the threads here have a median of "
        f"{median(e['dur'] for e in ops):.1f} us;\n"
        f"{100 * share:.1f} % of the time of these slices and barriers is at barriers.",
    )


@figure("Two ranks: both work, and exchange gradients", height=285)
def trace_ranks(s: Sheet) -> None:
    bottom = tracks(s, "ranks", 56, height=30)
    families(s, bottom + 16)
    s.note(
        bottom + 34,
        "Two processes of one thread each, on one clock. Red are exchanges: a rank waits there until the other has come so far.\n"
        + between_ranks("ranks"),
    )


@figure("Two ranks with a gap: rank 1 begins late", height=285)
def trace_gap(s: Sheet) -> None:
    bottom = tracks(s, "gap", 56, height=30)
    families(s, bottom + 16)
    s.note(
        bottom + 34,
        "Rank 0 looks busy all the time: it waits inside an exchange, the long red slice. The cause is on the other rank, which "
        "does nothing at\n"
        "the beginning of the step. " + between_ranks("gap"),
    )


def between_ranks(name: str) -> str:
    """When rank 1 begins its first program, against rank 0, and the longest exchange of both."""
    events = timelines.slices(name)
    late = (timelines.waits(events, 1)[0][1] - timelines.waits(events, 0)[0][1]) / 1000
    longest = [
        max(e["dur"] for e in events if e["pid"] == pid and e["cat"].startswith(timelines.EXCHANGES)) / 1000 for pid in (1, 2)
    ]
    return (
        f"Rank 1 begins {abs(late):.1f} ms {'after' if late >= 0 else 'before'} rank 0; the longest exchange "
        f"takes {longest[0]:.1f} ms on rank 0, {longest[1]:.1f} ms on rank 1."
    )


def slow(s: Sheet, number: int) -> None:
    bottom = tracks(s, f"slow-{number}", 56, height=30)
    families(s, bottom + 16)
    if number == 3:
        s.note(bottom + 32, "Two ranks, on one clock. " + between_ranks("slow-3"))
        return
    events, healthy = (timelines.slices(name) for name in (f"slow-{number}", "step"))
    share, op = timelines.evidence(events, healthy)["kernel"]
    step, other = (timelines.step_us(e) / 1000 for e in (events, healthy))
    s.note(
        bottom + 32,
        f"This step takes {step:.1f} ms, the healthy one {other:.1f} ms. The op that grew most on all threads, over both blocks:\n"
        f"{op}, by {share * step:.2f} ms.",
    )


@figure("Slow step 1", height=252)
def slow_1(s: Sheet) -> None:
    slow(s, 1)


@figure("Slow step 2", height=252)
def slow_2(s: Sheet) -> None:
    slow(s, 2)


@figure("Slow step 3", height=290)
def slow_3(s: Sheet) -> None:
    slow(s, 3)


@figure("Slow step 4", height=252)
def slow_4(s: Sheet) -> None:
    slow(s, 4)


@figure("Slow step 5", height=252)
def slow_5(s: Sheet) -> None:
    slow(s, 5)
