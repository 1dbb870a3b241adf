from __future__ import annotations

import pytest

from barellm.training import curve

TRAIN = [(step, 4.0 / step**0.3) for step in range(1, 500)]
VAL = [(step, 4.2 / (step + 1) ** 0.3) for step in range(0, 500, 100)]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_chart_has_its_size_its_range_and_its_marks(ascii_only):
    text = curve.terminal(TRAIN, VAL, width=60, height=10, ascii_only=ascii_only)
    lines = text.splitlines()
    assert len(lines) == 13 and max(map(len, lines[:-1])) <= 60
    assert float(lines[0][:7]) == 4.2
    assert float(lines[9][:7]) == pytest.approx(min(loss for _, loss in TRAIN), abs=0.003)  # of a column's mean
    assert sum(line.count("o") for line in lines[:10]) == len(VAL)
    assert text.isascii() == ascii_only


def test_the_line_falls_from_left_to_right():
    rows = curve.terminal(TRAIN, [], width=60, height=10, ascii_only=True).splitlines()[:10]
    first = [next(y for y, row in enumerate(rows) if row[8:].ljust(52)[x] == ".") for x in range(50)]
    assert first == sorted(first) and first[0] == 0


@pytest.mark.parametrize("train, val", [([(1, 2.0)], []), ([], [(0, 2.0)]), ([(1, 2.0), (2, 2.0)], [(2, 2.0)])])
def test_few_and_equal_points_are_drawn(train, val):
    assert "2.000" in curve.terminal(train, val)


def test_nothing_to_draw_is_an_empty_text():
    assert curve.terminal([], []) == ""
    assert curve.terminal([(1, float("nan")), (2, float("inf"))], []) == ""


def test_series_leaves_out_what_is_not_finite():
    rows = [
        {"kind": "train", "step": 1, "loss": 2.0},
        {"kind": "train", "step": 2, "loss": None},
        {"kind": "eval", "step": 2, "val_nats": 3.0},
        {"kind": "sample", "step": 2, "text": ""},
    ]
    assert curve.series(rows) == ([(1, 2.0)], [(2, 3.0)])


@pytest.mark.parametrize("train, val", [(TRAIN, VAL), ([], []), (TRAIN, [])])
def test_the_image_is_a_png(tmp_path, train, val):
    path = tmp_path / "loss.png"
    curve.image(path, train, val, title="a title")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000
