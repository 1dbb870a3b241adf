"""docs/techniques.md is what its rows say, what they name is there, and a command that does not print what it must is a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from docs import techniques
from docs.techniques import Bad, Expected, Row, has_symbol, lost, row_of, rows
from docs.techniques.__main__ import main
from docs.techniques.check import check, chosen, furnish, outcome

ROW = Row("llmc", "A row", "what", "source", ("Makefile",), "runs", "not there", run="echo loss 2.5")
GIVEN = {"name": "A row", "what": "what", "source": "source", "where": ["Makefile"], "cpu": "runs", "gpu": "not there"}


def test_the_page_is_what_the_rows_say():
    assert techniques.PAGE.read_text() == techniques.page(), "run: python -m docs.techniques --write"


def test_rows_name_what_is_there():
    assert not [text for row in rows().values() for text in lost(row)]


def test_most_rows_have_a_command_and_few_commands_are_tests():
    commands = [row.run for row in rows().values() if row.run]
    assert len(commands) >= 105
    assert sum("pytest" in run for run in commands) < len(commands) / 5


def test_a_lost_symbol_a_lost_file_and_a_lost_page_are_found():
    row = replace(ROW, where=("docs/techniques/check.py:outcomes", "no/such.py", "Makefile:nothing"), page="nowhere.md")
    assert len(lost(row)) == 4
    there = "docs/techniques/check.py:Outcome.wrong", "docs/techniques/check.py:LIMIT", "Makefile:techniques"
    assert not lost(replace(ROW, where=there))
    assert not has_symbol(techniques.ROOT / "docs/techniques/check.py", "Outcome.LIMIT")


@pytest.mark.parametrize(
    "given",
    [
        {"run": "true", "expect": [""]},
        {"run": "true", "expect": [".*"]},
        {"run": "true", "expect": ["^$|a"]},
        {"run": "true"},
        {"run": "true", "expect": ["a"], "gap": "none"},
        {},
        {"gap": "none", "cpu": "perhaps"},
    ],
    ids=["empty", "anything", "empty line", "no expectation", "a gap with a command", "nothing", "unknown state"],
)
def test_a_row_that_cannot_fail_is_refused(given):
    with pytest.raises(Bad, match="A row"):
        row_of("llmc", GIVEN | given)


def test_a_command_that_prints_what_it_must_passes():
    assert not outcome(replace(ROW, expect=(Expected("^loss"), Expected(r"loss ([\d.]+)", 2.4, 2.6)))).wrong


@pytest.mark.parametrize(
    ("run", "expect", "wrong"),
    [
        ("echo loss 2.5", Expected("^loss 2.6$"), "no '^loss 2.6$'"),
        ("echo loss 2.5", Expected(r"loss ([\d.]+)", 2.6, 2.7), "expected 2.6 to 2.7"),
        ("echo loss 2.5; exit 3", Expected("loss"), "status 3"),
        ("false | echo loss", Expected("loss"), "status 1"),
        ("echo loss; while true; do :; done", Expected("loss"), "processor time"),
        ("echo loss; sleep 99", Expected("loss"), "did not end"),
    ],
    ids=["other text", "other number", "status", "status in a pipe", "too long", "hangs"],
)
def test_a_command_that_is_wrong_fails(run, expect, wrong):
    found = outcome(replace(ROW, run=run, expect=(expect,)), limit=1, patience=2 if "sleep" in run else 100)
    assert any(wrong in text for text in found.wrong), found


def test_the_status_of_the_checker(capsys):
    good, bad = (replace(ROW, name=name, expect=(Expected(name),)) for name in ("loss", "gain"))
    assert check([good]) == 0
    assert check([good, bad]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_commands_have_a_folder_with_the_files_that_they_read(tmp_path):
    furnish(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "lines.jsonl",
        "small.toml",
        "speedrun.toml",
        "text.txt",
        "uneven.py",
    ]
    assert not outcome(replace(ROW, run="pwd; ls", expect=(Expected("^text.txt$"),))).wrong


def test_parts_are_all_rows_once():
    parts = [row.name for k in range(5) for row in chosen([], f"{k}/5")]
    assert sorted(parts) == sorted(rows())
    assert chosen([], "7/5") == chosen([], "2/5")


@pytest.mark.parametrize("words", [["--check", "Polar"], ["--check", "--part", "3"], ["--check", "--part", "1/0"]])
def test_a_mistake_is_one_line(words, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("docs.techniques: error: ") and error.count("\n") == 1


@pytest.mark.alone
def test_a_row_of_the_page_passes():
    assert not outcome(rows()["Gradient accumulation"]).wrong
