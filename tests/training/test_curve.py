from __future__ import annotations

import numpy as np
import pytest

from barellm.errors import UserError
from barellm.training import curve
from barellm.training.curve import Curve

TRAIN = [(step, 4.0 / step**0.3) for step in range(1, 500)]
VAL = [(step, 4.2 / (step + 1) ** 0.3) for step in range(0, 500, 100)]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_chart_has_its_size_its_range_and_its_marks(ascii_only):
    text = curve.terminal(Curve("", TRAIN, VAL), width=60, height=10, ascii_only=ascii_only)
    lines = text.splitlines()
    assert len(lines) == 13 and max(map(len, lines[:-1])) <= 60
    assert float(lines[0][:7]) == 4.2
    assert float(lines[9][:7]) == pytest.approx(min(loss for _, loss in TRAIN), abs=0.003)  # of a column's mean
    assert sum(line.count("o") for line in lines[:10]) == len(VAL)
    assert text.isascii() == ascii_only


def test_the_line_falls_from_left_to_right():
    rows = curve.terminal(Curve("", TRAIN, []), width=60, height=10, ascii_only=True).splitlines()[:10]
    first = [next(y for y, row in enumerate(rows) if row[8:].ljust(52)[x] == ".") for x in range(50)]
    assert first == sorted(first) and first[0] == 0


BRAILLE = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]  # Unicode's eight dots, bit by bit: (x, y)


def test_each_dot_of_a_diagonal_is_where_it_belongs():
    """Sixteen columns of dots in eight characters, as many rows in four."""
    rows = curve.terminal(Curve("", [(i, 15.0 - i) for i in range(16)], []), width=16, height=4).splitlines()[:4]
    found = {
        (2 * column + x, 4 * row + y)
        for row, line in enumerate(rows)
        for column, cell in enumerate(line[8:])
        for bit, (x, y) in enumerate(BRAILLE)
        if cell != " " and (ord(cell) - 0x2800) >> bit & 1
    }
    assert found == {(i, i) for i in range(16)} | {(i, i - 1) for i in range(1, 16)}  # joined by the dot above


def test_a_logarithmic_axis_begins_at_the_first_place():
    made = Curve("", [(10, 3.0), (100, 2.0), (1000, 1.0)], [])
    rows = [row[8:] for row in curve.terminal(made, log="x", width=58, height=9, ascii_only=True).splitlines()[:9]]
    assert [rows[y].index(".") for y in (0, 8)] == [0, 49] and rows[4][25] == "."


@pytest.mark.parametrize("train, val", [([(1, 2.0)], []), ([], [(0, 2.0)]), ([(1, 2.0), (2, 2.0)], [(2, 2.0)])])
def test_few_and_equal_points_are_drawn(train, val):
    assert "2.000" in curve.terminal(Curve("", train, val))


def test_nothing_to_draw_is_an_empty_text():
    assert curve.terminal(Curve("", [], [])) == ""
    assert curve.terminal(Curve("", [(1, float("nan")), (2, float("inf"))], [])) == ""


def test_series_leaves_out_what_is_not_finite():
    rows = [
        {"kind": "train", "step": 1, "loss": 2.0},
        {"kind": "train", "step": 2, "loss": None},
        {"kind": "eval", "step": 2, "val_nats": 3.0},
        {"kind": "sample", "step": 2, "text": ""},
    ]
    assert curve.series(rows) == ([(1, 2.0)], [(2, 3.0)])


ROWS = [
    {"kind": "eval", "step": 0, "val_nats": 5.0},
    {"kind": "sample", "step": 0, "text": ""},
    {"kind": "train", "step": 1, "loss": 4.0, "seconds": 1.5},
    {"kind": "train", "step": 2, "loss": 3.0, "seconds": 2.5},
    {"kind": "eval", "step": 2, "val_nats": 3.5},
    {"kind": "train", "step": 3, "loss": 2.0, "seconds": 60.0},
    {"kind": "result", "seconds": 90.0},
]


@pytest.mark.parametrize("axis, places", [("steps", [0, 1, 2, 3]), ("tokens", [0, 96, 192, 288]), ("seconds", [0, 1.5, 2.5, 60])])
def test_a_curve_runs_over_steps_tokens_or_seconds(axis, places):
    """An evaluation has the time of the step before it."""
    start, first, second, third = places
    train, val = curve.series(ROWS, axis=axis, before=lambda step: 96 * step)
    assert train == [(first, 4.0), (second, 3.0), (third, 2.0)]
    assert val == [(start, 5.0), (second, 3.5)]
    chart = curve.terminal(Curve("", train, val), axis=axis)
    assert chart.splitlines()[-2].split() == (["0", "step", "3"] if axis == "steps" else ["0", str(third), axis])


def test_the_summary_says_where_a_run_is():
    """Its training loss is that of the last hundredth: 11 losses of 2 and 10 of 3 here."""
    noisy = [(step, 2.0 + step % 2) for step in range(1, 2001)]
    assert (
        curve.summary(Curve("", noisy, [(1000, 2.75)])) == "step 2,000, training loss 2.4762, validation loss 2.7500 at step 1,000"
    )
    assert curve.summary(Curve("", [], [(0, 8.0)])) == "step 0, validation loss 8.0000 at step 0"


def lines_of(curves, **more) -> dict[str, list[tuple[float, float]]]:
    """Label -> points of each line of a picture; those without a label are numbered."""
    (axes,) = curve.picture(curves, **more).axes
    return {
        line.get_label() if not str(line.get_label()).startswith("_") else str(i): list(zip(*line.get_data(), strict=True))
        for i, line in enumerate(axes.lines)
    }


def test_the_picture_of_one_run_has_every_step_their_smoothed_line_and_the_evaluations():
    train = [(step, 3.0 + (-1) ** step) for step in range(1, 2001)]
    found = lines_of([Curve("run", train, VAL)])
    assert found["training"] == train and found["validation"] == VAL
    places, losses = zip(*found["training, smoothed"], strict=True)
    assert len(losses) == curve.SMOOTH and list(places) == sorted(places)
    assert losses[1:] == pytest.approx([3.0] * 99, abs=0.1) and 1 < places[0] < 20 and 1980 < places[-1] < 2000


def test_several_runs_are_smoothed_over_the_same_parts_of_one_axis():
    """A run of a tenth of the length has a tenth of the points: noise looks alike."""
    long = Curve("long", [(step, 2.0) for step in range(1, 4001)], [(4000, 2.5)])
    short = Curve("_short$x$", [(step, 3.0) for step in range(1, 401)], [])
    found = lines_of([long, short])
    assert set(found) == {"long", "1", "./_short$x$"} and found["1"] == [(4000, 2.5)]
    assert (len(found["long"]), len(found["./_short$x$"])) == (100, 11)
    (axes,) = curve.picture([long, short]).axes
    legend = axes.get_legend()
    assert legend is not None
    assert [(text.get_text(), text.get_parse_math()) for text in legend.get_texts()] == [("long", False), ("./_short$x$", False)]
    colours = [line.get_color() for line in axes.lines]
    assert colours[0] == colours[1] != colours[2]


@pytest.mark.parametrize("axis", curve.AXES)
@pytest.mark.parametrize("train, val", [(TRAIN, VAL), ([], []), (TRAIN, []), ([], VAL), ([(1, 2.0)], [])])
@pytest.mark.extended
def test_the_image_is_a_png(tmp_path, train, val, axis):
    path = tmp_path / "loss.png"
    for curves in ([Curve("", train, val)], [Curve("a", train, val), Curve("$b_", val, train)]):
        curve.image(path, curves, title="a $title", axis=axis)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


@pytest.mark.parametrize("end, magic", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_the_name_s_ending_says_what_an_image_is(tmp_path, end, magic, recwarn):
    path = tmp_path / f"loss.{end}"
    curve.image(path, [Curve("\u4f60", TRAIN, VAL)] * 2, title="\u4f60")  # the font lacks it
    assert path.read_bytes().startswith(magic) and not recwarn.list


@pytest.mark.parametrize("name, end", [("loss", "''"), ("loss.txt", "'.txt'"), (".png", "''")])
def test_an_ending_that_no_image_has_is_refused(tmp_path, name, end):
    with pytest.raises(UserError, match=rf"ends in {end}, expected one of .*\.png.*\.svg"):
        curve.image(tmp_path / name, [Curve("", TRAIN, VAL)])
    assert not list(tmp_path.iterdir())


# --- other numbers, other axes, gzip's line ---

RUN = [
    {"kind": "train", "step": 1, "loss": 4.0, "lr": 1e-3, "grad_norm": 2.0, "tokens_per_s": 50.0, "tokens": 30, "seconds": 1.0},
    {"kind": "eval", "step": 1, "val_nats": 3.0, "val_bits_per_byte": 2.0},
    {"kind": "hellaswag", "step": 1, "acc": 0.5, "acc_norm": 0.25, "total": 8},
    {"kind": "train", "step": 2, "loss": 2.0, "lr": 1e-4, "grad_norm": None, "tokens_per_s": 60.0, "tokens": 90, "seconds": 2.0},
    {"kind": "result", "step": 2, "val_nats": 3.0, "val_bits_per_byte": 2.0, "gzip_bits_per_byte": 1.5},
]


@pytest.mark.parametrize(
    "y, train, val, gzip",
    [
        ("loss", [(30, 4.0), (90, 2.0)], [(30, 3.0)], 2.25),
        ("bits", [], [(30, 2.0)], 1.5),
        ("lr", [(30, 1e-3), (90, 1e-4)], [], None),
        ("norm", [(30, 2.0)], [], None),
        ("speed", [(30, 50.0), (90, 60.0)], [], None),
        ("hellaswag", [], [(30, 0.25)], None),
    ],
)
def test_a_curve_is_of_any_number_that_rows_have(y, train, val, gzip):
    """Tokens are those that the rows say, whatever a step has: a batch may have grown."""
    assert curve.series(RUN, axis="tokens", before=lambda step: 7 * step, y=y) == (train, val)
    assert curve.gzip_line(RUN, y=y) == gzip
    found = Curve("run", train, val, y=y, gzip=gzip)
    assert curve.QUANTITIES[y].label in curve.terminal(found, axis="tokens").splitlines()[-1]
    (axes,) = curve.picture([found], axis="tokens").axes
    assert axes.get_ylabel().startswith(curve.QUANTITIES[y].label)
    unseen = "accuracy on HellaSwag 0.2500 at 30 tokens" if y == "hellaswag" else "validation "
    assert bool(val) == (unseen in curve.summary(found, axis="tokens"))
    dashed = [line.get_ydata()[0] for line in axes.lines if line.get_label() == "gzip -9"]
    assert dashed == ([] if gzip is None else [gzip])


def test_the_line_of_gzip_is_drawn_and_said_once():
    both = [Curve(name, TRAIN, VAL, gzip=2.25) for name in ("a", "b")]
    (axes,) = curve.picture(both).axes
    assert [line.get_label() for line in axes.lines].count("gzip -9") == 1
    assert curve.summary(both[0]).endswith("gzip -9 2.2500")
    rows = curve.terminal(Curve("", [(1, 4.0), (9, 2.0)], [], gzip=3.0), height=9, ascii_only=True).splitlines()
    assert [i for i, row in enumerate(rows[:9]) if "-" in row] == [4]
    assert curve.gzip_line(RUN[:3], y="loss") is None


def test_runs_of_several_texts_have_a_line_of_gzip_each_and_names_without_training_curves():
    """Bits per byte have validation points alone: they name the run in the legend."""
    runs = [Curve(name, (), VAL, y="bits", gzip=gzip) for name, gzip in (("a", 2.25), ("b", 1.5))]
    (axes,) = curve.picture(runs).axes
    assert [text.get_text() for text in axes.legend().get_texts()] == ["a", "gzip -9, a", "b", "gzip -9, b"]
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert colours["gzip -9, a"] == colours["a"] != colours["b"] == colours["gzip -9, b"]


def test_a_power_law_is_straight_where_both_axes_are_logarithmic():
    points = [(step, 1000.0 / step) for step in range(0 + 1, 5001)]
    found = Curve("", [(0, 5.0), *points, (5001, 0.0)], [])
    chart = curve.terminal(found, log="xy", width=72, height=16, ascii_only=True).splitlines()
    assert float(chart[0][:7]) == pytest.approx(1000, rel=0.05) and chart[-2].split()[0] == "1"
    dots = [(x, y) for y, row in enumerate(chart[:16]) for x, cell in enumerate(row) if cell == "." and x > 7]
    slope, start = np.polyfit(*zip(*dots, strict=True), 1)
    assert slope == pytest.approx(16 / 64, rel=0.1) and max(abs(y - slope * x - start) for x, y in dots) < 2
    (axes,) = curve.picture([found], log="x").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    smooth = next(line for line in axes.lines if line.get_label() == "training, smoothed").get_xydata()
    assert smooth[0][0] == pytest.approx(1.0) and (np.diff(smooth[:, 0]) > 0).all()
