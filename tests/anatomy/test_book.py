"""The booklet: figures are drawn from today's code, no label collides, listings are what compilers emit, exercises have answers."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from anatomy import exercises, kernel_facts, listings, models, page, timelines
from anatomy.figures import FIGURES, cuda, schedule
from anatomy.figures.style import Drawing, collisions
from barellm.errors import UserError
from tests.simulators.ptx import fragments

CHAPTERS = [p for p in page.pages() if p.parent == page.BOOK]
SHOWN = re.compile(r"!\[(.*?)\]\(img/(\w+)\.svg\)")
VERSION = re.compile(r"Matplotlib v([\d.]+)")


def words_of(svg: str) -> list[str]:
    """The labels, which matplotlib writes as comments before their curves."""
    return re.findall(r"<!-- (.*?) -->", svg)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_from_the_code_and_its_labels_do_not_collide(name):
    drawing = FIGURES[name]
    assert not collisions(drawing.sheet())
    stored, drawn = (page.FIGURES_OF_BOOK / f"{name}.svg").read_text(), drawing.svg()
    again = f"python -m anatomy.page {name}"
    assert words_of(drawn) == words_of(stored), again
    if VERSION.findall(drawn) == VERSION.findall(stored):
        assert drawn == stored, again


def test_every_figure_stands_in_one_chapter_under_its_title():
    shown = [(name, title) for chapter in CHAPTERS for title, name in SHOWN.findall(chapter.read_text())]
    assert sorted(shown) == sorted((name, drawing.title) for name, drawing in FIGURES.items())
    assert sorted(p.stem for p in page.FIGURES_OF_BOOK.iterdir()) == sorted(FIGURES)


def test_axes_name_their_quantities():
    for name, drawing in FIGURES.items():
        charts = [axes for axes in drawing.sheet().figure.axes if axes.axison]
        assert all(axes.get_ylabel() and (axes.get_xlabel() or axes.get_xticklabels()) for axes in charts), name


@pytest.mark.parametrize("wrong, message", [
    (lambda s: (s.text(100, 100, "one label"), s.text(110, 102, "another")), "'one label' and 'another' overlap"),
    (lambda s: s.text(780, 100, "too far"), "'too far' leaves the sheet"),
])  # fmt: skip
def test_labels_that_collide_are_named(wrong, message):
    assert collisions(Drawing("Title", 200, wrong).sheet()) == [message]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_is_filled_with_todays_listings_and_exercises(chapter):
    assert page.filled(chapter) == chapter.read_text(), "python -m anatomy.page brings it up to date"


def test_numbers_of_the_text_are_those_of_the_kernels():
    def said(chapter: str) -> str:
        return " ".join((page.BOOK / f"{chapter}.md").read_text().split())

    work = 2 * 132 * 128 * 256 * 8192
    reuse = [work / (sum(schedule.wave_bytes(kind, 64, 32, 8192, w) for w in range(15)) / 15) for kind in ("rows", "grouped")]
    assert f"that is {reuse[1]:.0f} FLOP" in said("scheduling") and f"row by row it is {reuse[0]:.0f}" in said("scheduling")
    limits = [cuda.limits(row) for row in kernel_facts.resources().values()]
    assert len(limits) == 15 and all(row["registers"] == min(row.values()) for row in limits)
    assert sum(row["registers"] < min(row["threads"], row["shared"]) for row in limits) == 6  # "six of the fifteen steps"
    row, text = kernel_facts.resources()["persistent"], said("tensor_cores")
    assert f"{row['threads'] * row['registers']:,} of the 65,536 registers" in text and f"{row['registers']} here" in text
    assert f"fills {row['shared'] >> 10} of 228 KiB" in text
    moved = [set(re.findall(r"setmaxnreg\S+\s+(\d+)", kernel_facts.compiled(name)[0])) for name in ("persistent", "shipped")]
    assert moved == [{"24", "120", "240", "256"}, {"40", "120", "232", "256"}]
    assert "keeps 24" in text and "consumer gets 240" in text and "asks for 40 and 232" in text


# --- what the figures take from kernels ---


def test_layouts_are_those_of_the_kernels():
    naive, coalesced = (kernel_facts.elements(kernel_facts.layout(n)) for n in ("naive", "coalesced"))
    assert naive == [[(lane, 0)] for lane in range(32)] and coalesced == [[(0, lane)] for lane in range(32)]
    owned = [p for warp in range(8) for lane in kernel_facts.elements(kernel_facts.layout("warp tile"), warp) for p in lane]
    assert sorted(owned) == [(r, c) for r in range(64) for c in range(64)], "each element has one thread"


@pytest.mark.parametrize("kind", ["rows", "grouped", "Hilbert"])
@pytest.mark.parametrize("rows, columns", [(32, 16), (7, 5), (17, 3)])
def test_an_order_has_every_tile_once(kind, rows, columns):
    tiles = kernel_facts.order(kind, rows, columns)
    assert sorted(tiles) == [(r, c) for r in range(rows) for c in range(columns)]


def test_the_fragments_of_wgmma_are_those_of_the_simulator_of_ptx():
    held = kernel_facts.fragments(64, 64)
    assert len(held) == 64 * 64 and set(held.values()) == set(range(128))
    for (row, column), thread in held.items():
        assert thread == 32 * (row // 16) + 4 * (row % 8) + column % 8 // 2


@pytest.mark.parametrize("width", [32, 64, 128])
def test_swizzles_are_those_of_the_simulator_of_ptx(width):
    """Which multiplies the kernels' tiles right."""
    chunks = [(row, c) for row in range(32) for c in range(width // 16)]
    wanted = fragments.swizzled(np.array([width * row + 16 * c for row, c in chunks]), width)
    assert [128 * line + 16 * at for line, at in (models.swizzled_in(width, *chunk) for chunk in chunks)] == wanted.tolist()


# --- listings ---


@pytest.mark.parametrize("name", listings.LISTINGS)
def test_a_listing_explains_every_instruction(name):
    rows = listings.LISTINGS[name]()
    assert all(len(words) >= 6 and words.endswith((".", "?")) for _, words in rows)
    table = listings.table(name)
    assert table.count("\n") == len(rows) + 1


def test_a_listing_notices_another_instruction_and_another_order():
    loop = [line for line, _ in listings.amx()]
    swapped = [loop[1], loop[0], *loop[2:]]
    for wrong, message in (
        (swapped, "instruction 1 is movl, the listing has leaq"),
        (loop[:-1], "instruction 17 is the end, the listing has jle"),
        ([*loop, "nop"], "instruction 18 is nop, the listing has the end"),
    ):
        with pytest.raises(UserError, match=message):
            listings.explained(wrong, listings.AMX, "here")


def test_a_listing_of_x86_refuses_what_it_cannot_explain(monkeypatch):
    loop = kernel_facts.inner_loop("shipped", "avx2")
    monkeypatch.setattr(kernel_facts, "inner_loop", lambda *a: [*loop[:3], "vmovups %ymm0, 32(%rsp)", *loop[3:]])
    with pytest.raises(UserError, match=r"has 'vmovups %ymm0, 32\(%rsp\)', expected an instruction that a listing explains"):
        listings.x86("shipped", "avx2")


# --- exercises ---


@pytest.mark.parametrize("number", range(1, len(exercises.EXERCISES) + 1))
def test_an_exercise_takes_its_answer_and_no_other(number, capsys):
    exercise = exercises.EXERCISES[number - 1]
    answer = exercise.answer()
    assert exercises.main([str(number), str(answer)]) == 0 and capsys.readouterr().out == "right\n"
    other = next(w for w in exercise.words if w != answer) if isinstance(answer, str) else str(1.3 * answer + 1)
    assert exercises.main([str(number), other]) == 1
    assert f"docs/book/{exercise.chapter}.md" in capsys.readouterr().out
    assert (page.BOOK / f"{exercise.chapter}.md").read_text().count(exercise.question) == 1


@pytest.mark.parametrize("words, line", [
    (["99"], f"the exercise is '99', expected a number from 1 to {len(exercises.EXERCISES)}"),
    (["1", "many"], "the answer is 'many', expected a number"),
    (["8", "warps"], "the answer is 'warps', expected one of threads, registers, shared"),
])  # fmt: skip
def test_mistakes_are_answered_in_a_line(words, line, capsys):
    assert exercises.main(words) == 2
    assert capsys.readouterr().err == f"anatomy.exercises: error: {line}\n"


def test_exercises_are_listed_and_shown(capsys):
    assert exercises.main([]) == 0 and capsys.readouterr().out.count("\n") == len(exercises.EXERCISES)
    assert exercises.main(["3"]) == 0 and "panel of B" in capsys.readouterr().out


# --- traces ---

PLANTED = {1: "python", 2: "imbalance", 3: "rank", 4: "data", 5: "kernel"}


@pytest.mark.parametrize("number", PLANTED)
def test_what_was_planted_is_found(number):
    assert timelines.diagnosis(f"slow-{number}")[0] == PLANTED[number]


@pytest.mark.parametrize("name", ["step", "ranks", "gap", *(f"slow-{i}" for i in PLANTED)])
def test_a_trace_is_what_perfetto_opens(name):
    events = json.loads((timelines.FOLDER / f"{name}.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M"}
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0 and e["cat"] and isinstance(e["tid"], int)


def test_a_healthy_step_has_no_large_cause():
    events = timelines.slices("step")
    assert all(share < 0.2 for share, _ in timelines.evidence(events, events).values())
