"""`barellm sample`: several texts side by side, prompts from a file, stop strings, a conversation."""

from __future__ import annotations

import gzip
import io
import json
import re

import pytest

from barellm.cli import sample
from barellm.cli.main import main
from barellm.cli.parsing.options import escaped
from barellm.interop.sources import open_weights

COLD = ("--device", "reference", "--max-new-tokens", "12", "--temperature", "1")


@pytest.fixture
def rows(trained, capsys):
    """What a command line writes, as its JSON objects."""

    def run(*words: str) -> list[dict]:
        capsys.readouterr()
        assert main(["sample", str(trained), *COLD, "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_texts_side_by_side_are_those_that_come_one_by_one(rows, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("12 squ\n\n3 squared is\n9\n")
    found = rows("--prompts", str(file), "--samples", "2", "--batch", "4")
    assert [(row["prompt"], row["seed"]) for row in found] == [
        (prompt, seed) for prompt in ("12 squ", "3 squared is", "9") for seed in (1337, 1338)
    ]
    for row in found:
        (alone,) = rows("--prompt", row["prompt"], "--seed", str(row["seed"]))
        assert (alone["text"], alone["tokens"]) == (row["text"], row["tokens"])
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in found[::2]))
    assert [row["text"] for row in rows("--prompts", str(tmp_path / "p.jsonl"))] == [row["text"] for row in found[::2]]


def test_a_text_ends_before_its_stop_string(rows):
    (whole,) = rows("--prompt", "12")
    stop = whole["text"][4:6]  # two tokens
    (found,) = rows("--prompt", "12", "--stop", stop, "--stop", "never")
    assert found["text"] == whole["text"][: whole["text"].index(stop)] and len(found["tokens"]) < 12


def test_options_reach_the_sampler(rows):
    (greedy,) = rows("--prompt", "1", "--temperature", "0")
    for words in (("--min-p", "1"), ("--top-k", "1"), ("--temperature", "1", "--top-p", "1e-9")):
        assert rows("--prompt", "1", *words)[0]["text"] == greedy["text"], words
    assert rows("--prompt", "1", "--temperature", "0", "--repetition-penalty", "50")[0]["text"] != greedy["text"]


def test_a_conversation_goes_on_from_all_before_it(trained, capsys, monkeypatch, rows):
    """The second answer is that to both lines and the first answer; a long history loses its oldest tokens."""
    monkeypatch.setattr("sys.stdin", io.StringIO("123 squared\n2\n"))
    capsys.readouterr()
    assert main(["sample", str(trained), *COLD, "--max-new-tokens", "3", "--interactive"]) == 0
    first, second, end = capsys.readouterr().out.split("\n")
    assert end == "" and len(first) == 3
    history = f"123 squared{first}\n2"[-13:]  # of 16 positions 3 are for the answer
    assert rows("--prompt", history, "--max-new-tokens", "3", "--seed", "1338")[0]["text"] == second


def test_what_a_stop_text_took_away_is_no_part_of_a_conversation(trained, capsys, monkeypatch, rows):
    (whole,) = rows("--prompt", "12", "--max-new-tokens", "5")
    monkeypatch.setattr("sys.stdin", io.StringIO("12\n3\n"))
    capsys.readouterr()
    stop = ("--stop", whole["text"][2:4])
    assert main(["sample", str(trained), *COLD, "--max-new-tokens", "5", *stop, "--interactive"]) == 0
    first, second, _ = capsys.readouterr().out.split("\n")
    assert first == whole["text"][: whole["text"].index(stop[1])]
    assert rows("--prompt", f"12{first}\n3", "--max-new-tokens", "5", "--seed", "1338", *stop)[0]["text"] == second


def test_what_is_wrong_is_said_in_one_line(trained, tmp_path, refused):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "empty.txt").write_text("\n")
    assert "p.jsonl, line 2 has no text in a field 'prompt', it has: text" in refused(
        "sample", trained, "--prompts", tmp_path / "p.jsonl"
    )
    (tmp_path / "wide.txt").write_text("words", encoding="utf-16")
    assert "wide.txt is UTF-16 text, expected UTF-8" in refused("sample", trained, "--prompts", tmp_path / "wide.txt")
    assert "has no prompt" in refused("sample", trained, "--prompts", tmp_path / "empty.txt")
    assert "choose one" in refused("sample", trained, "--prompt", "a", "--interactive")
    for option in ("--json", "--measure"):
        assert "leave out --samples, --json and --measure" in refused("sample", trained, "--interactive", option)
    assert "--batch is 65, expected at most 64" in refused("sample", trained, "--batch", "65")
    assert "--stop is '', expected a text" in refused("sample", trained, "--stop", "a", "--stop", "")
    assert "--batch is 0" in refused("sample", trained, "--batch", "0")


def test_escapes_mean_the_same_in_every_option_with_a_text(rows):
    """docs/generation.md writes --stop "\\n"; prepare --separator takes the same (tests/data/test_prepare.py)."""
    (whole,) = rows("--prompt", "1\\n2", "--max-new-tokens", "40")
    assert whole["prompt"] == "1\n2" and "\n" in whole["text"]
    (found,) = rows("--prompt", "1\n2", "--max-new-tokens", "40", "--stop", r"\n")
    assert found["text"] == whole["text"].partition("\n")[0]


@pytest.mark.parametrize(
    "words, meant",
    [
        (r"a\nb\r\t\f\0", "a\nb\r\t\f\0"),
        (r"\\n \\", "\\n \\"),
        (r"\x41\u00e9\U0001f642", "Aé🙂"),
        (r"\ud83d\ude42", "🙂"),
        (r"\d+ \section \N \X4 \(", r"\d+ \section \N \X4 \("),
        ("é 漢 \n", "é 漢 \n"),
        ("", ""),
    ],
)
def test_an_escape_is_what_it_stands_for_and_another_backslash_stays(words, meant):
    assert escaped(words) == meant


@pytest.mark.parametrize(
    "words, message",
    [
        (r"a\x4", r"argument --stop: 'a\\\\x4' ends in the middle of an escape at '\\\\x'"),
        (r"\u12g4", "ends in the middle of an escape"),
        ("a\\", "ends in the middle of an escape"),
        (r"\ud800", "has a character that is none in Unicode"),
        (r"\U00110000", "has a character that is none in Unicode"),
        ("\udcff", "has a character that is none in Unicode"),
    ],
)
def test_half_an_escape_is_refused_with_the_option_s_name(words, message, refused):
    assert re.search(message, refused("sample", "run", "--stop", words))


def test_only_line_feeds_part_the_prompts_of_a_file(tmp_path):
    prompts = ["1 \u2028\x0b\x0c\x1c\x85 2", "3\r4", "\\n stays", "5"]
    file = tmp_path / "prompts.txt"
    file.write_bytes(("\ufeff" + "\r\n".join(prompts[:2]) + "\n\r\n\n" + "\n".join(prompts[2:])).encode())
    assert sample._prompts(str(file)) == prompts
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": prompt} for prompt in prompts]))
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps({"prompt": p}).encode() + b"\n" for p in prompts)))
    for name in ("p.json", "p.jsonl.gz"):
        assert sample._prompts(str(tmp_path / name)) == prompts


def test_the_context_is_what_is_asked_for_and_what_the_model_has(trained, rows, refused):
    """A text that grows beyond it goes on from its newer half."""
    most = open_weights(trained).model.max_seq  # pyright: ignore[reportAttributeAccessIssue]
    (short,) = rows("--prompt", "12 squ", "--context", "8")
    (long,) = rows("--prompt", "12 squ")
    assert len(short["tokens"]) == len(long["tokens"]) == 12 and short["tokens"][:2] == long["tokens"][:2]
    said = refused("sample", trained, *COLD, "--context", str(most + 1))
    assert f"--context is {most + 1}, expected 1 to {most}, the model's positions (model.max_seq)" in said


def test_a_cache_that_does_not_fit_is_refused_with_its_arithmetic(trained, refused, monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "1000")
    said = refused("sample", trained, *COLD)
    assert re.search(r"\(KV caches: 1 texts x \d+ positions x \d+ bytes\): choose a smaller context, batch or model", said)
