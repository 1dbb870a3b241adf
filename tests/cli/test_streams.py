"""Standard streams that are closed, full, or no longer read: no traceback, and no run is lost."""

import os
import subprocess
import sys

import pytest

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


def shell(redirections: str, *words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "barellm", *map(str, words)]
    # Text that was not written is then still in Python's buffer at the end of the process.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, env=environment | (env or {}))


@pytest.mark.parametrize("streams", CLOSED)
@pytest.mark.parametrize("words, status", [(["--version"], 0), (["plan", "--help"], 0), (["plan", "--bad"], 2)])
def test_a_closed_stream_is_like_dev_null(streams, words, status):
    done = shell(streams, *words)
    assert done.returncode == status and "Traceback" not in done.stderr
    if status and "2>&-" not in streams:
        assert done.stderr.startswith("barellm: error: unknown option --bad") and done.stderr.count("\n") == 1
    if ">&-" not in streams.replace("2>&-", ""):
        assert done.stdout if not status else not done.stdout


@pytest.mark.parametrize("streams", [*CLOSED, "2>/dev/full"])
@pytest.mark.extended
def test_a_run_whose_streams_are_closed_trains_and_saves(tiny, tmp_path, streams):
    done = shell(streams, *tiny())
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "run" / "checkpoints" / "step-000004" / "manifest.json").is_file()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 4


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "shakespeare-char"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output_is_one_line(words, unbuffered):
    done = shell(">/dev/full", *words, env={"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 2
    assert done.stderr.endswith("No space left on device\n") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("barellm: error: ") and (unbuffered or "standard output: " in done.stderr)


@pytest.mark.extended
def test_a_run_that_began_loses_only_its_text_on_a_full_disk(tiny, tmp_path):
    """What is printed before the training is an error; then only text is lost."""
    assert shell("", *tiny(out=tmp_path / "first")).returncode == 0  # the tokens are in the cache now
    done = shell(">/dev/full", *tiny())
    assert (done.returncode, done.stderr) == (0, "")


def test_help_whose_reader_goes_away_ends_silently():
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -m barellm --help | head -1'], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("usage: barellm")


def test_standard_input_that_is_closed_is_empty(tmp_path):
    done = shell("<&-", "prepare", "-", "--tokenizer", "bytes", "--out", tmp_path / "shards")
    assert done.returncode == 2 and done.stderr.endswith("error: standard input is empty, expected text\n")
