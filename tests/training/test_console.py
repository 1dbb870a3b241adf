from __future__ import annotations

import io
import json
import os

import pytest

from barellm.training import console
from barellm.training.console import Console, duration, fitted, short


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_whole_lines_without_control_characters(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    c = Console(stream=out)
    shown = []
    for step in range(20):
        now[0] += 1.0
        if c.due():
            c.progress(f"step {step}")
            shown.append(step)
    c.line("done")
    assert shown == [0, 5, 10, 15]
    assert out.getvalue() == "step 0\nstep 5\nstep 10\nstep 15\ndone\n"


def test_a_terminal_gets_one_live_line_that_others_replace():
    out = Terminal()
    c = Console(stream=out)
    c.progress("step 1")
    c.progress("step 2")
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r\x1b[2Kstep 2")
    c.line("evaluation")
    assert out.getvalue().endswith("step 2\r\x1b[2Kevaluation\n")


def test_a_long_evaluation_says_how_far_it_is(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = Terminal()
    c = Console(stream=out)
    report = c.evaluating(40)
    report(10)
    assert out.getvalue() == ""  # it may be over at once
    now[0] += 1.5
    report(20)
    assert out.getvalue() == "\r\x1b[2Kevaluating: 20 of 40 windows"
    c.clear()
    assert out.getvalue().endswith("windows\r\x1b[2K")
    c.line("evaluation")
    assert out.getvalue().endswith("windows\r\x1b[2Kevaluation\n")


def test_json_lines_are_all_that_a_machine_sees():
    out = Terminal()
    c = Console(json_lines=True, stream=out)
    assert not c.due() and not c.live
    c.line("text")
    c.record({"step": 1})
    c.record({"step": 2})
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"step": 1}, {"step": 2}]


def test_a_full_disk_behind_the_output_costs_the_text_only(tmp_path):
    with open("/dev/full", "w") as full:
        c = Console(stream=full)
        with pytest.raises(OSError):
            c.line("before the training")
        c.on_lost = lambda: pytest.fail("the output is not lost for good")
        c.line("in the training")
        with open(tmp_path / "log", "w") as disk:  # there is room again
            os.dup2(disk.fileno(), full.fileno())
            c.line("with room")
    assert (tmp_path / "log").read_text() == "with room\n"


def test_output_that_nobody_reads_any_more_stops_the_run_once():
    reader, writer = os.pipe()
    os.close(reader)
    lost = []
    with open(writer, "w") as pipe:
        c = Console(stream=pipe)
        c.on_lost = lambda: lost.append(1)
        c.line("one")
        c.line("two")
    assert lost == [1]


def test_an_encoding_without_the_characters_is_noticed():
    assert Console(stream=io.TextIOWrapper(io.BytesIO(), "utf-8")).can_show("⣿│")
    assert not Console(stream=io.TextIOWrapper(io.BytesIO(), "ascii")).can_show("⣿│")


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (65.4, "1:05"), (3599.6, "1:00:00"), (7384, "2:03:04"), (-1, "0:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0"), (950, "950"), (999.6, "1k"), (999_950, "1M"), (12_345, "12.3k"), (4_560_000, "4.56M"), (7.89e9, "7.89G")],
)
def test_short_counts(count, text):
    assert short(count) == text


def test_a_text_that_takes_long_says_its_megabytes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = Terminal()
    tell = Console(stream=out).megabytes("tokenizing")
    tell(1_000_000, 9_000_000)
    assert out.getvalue() == ""
    now[0] += 1.5
    tell(2_500_000, 9_000_000)
    assert out.getvalue() == "\r\x1b[2Ktokenizing: 2.5 of 9.0 MB, 1.0 MB/s, 0:06 left"


def test_a_live_line_is_cut_before_the_terminals_last_column(monkeypatch):
    """A line as wide as the terminal would wrap, and could not be taken back."""
    monkeypatch.setattr(console.shutil, "get_terminal_size", lambda *_, **__: console.os.terminal_size((20, 5)))
    out = Terminal()
    Console(stream=out).progress("x" * 40)
    assert out.getvalue().count("x") == 19


def test_in_a_notebook_progress_is_one_line_without_terminal_codes():
    Stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    stream = Stream()
    console = Console(stream=stream)
    console.progress("step 10")
    console.progress("step 9")
    console.line("done")
    assert stream.getvalue() == "\r\rstep 10\r       \rstep 9\r      \rdone\n"


def test_nothing_is_cut_or_broken_in_a_narrow_terminal():
    assert fitted("dataset  a text with a long name", 24) == "dataset  a text with a\n         long name"
    assert fitted("step 1 sample\n  | " + "x" * 30, 24) == "step 1 sample\n  | " + "x" * 20 + "\n  | " + "x" * 10
    assert fitted("short", 24) == "short"
