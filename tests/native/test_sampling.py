"""Programs without Python write the texts that `barellm sample` writes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.data.kinds import load_tokenizer
from tests.native.test_native import pytestmark  # noqa: F401

SMALL = ("--model.layers", "1", "--model.heads", "2", "--model.channels", "16", "--model.max_seq", "16", "--seq", "16")
SMALL += ("--batch", "1", "--steps", "2", "--train.eval_every", "0", "--train.eval_tokens", "16", "--optim.lr", "0.1")
TEXT = "".join(f"{i}² is {i * i}.\n" for i in range(200))


def built(folder: Path, preset: str, *more: str) -> Path:
    """A folder with "program", and "run", two steps of it."""
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        patch.setenv("BARELLM_THREADS", "2")
        options = [preset, "--data", str(folder / "text.txt"), *SMALL, *more, "-o", str(folder / "program")]
        assert main(["build", *options]) == 0
    data = folder / "program/data"
    command = [folder / "program/train", "--train", data / "train_*.bin", "--val", data / "val_*.bin", "--out"]
    done = subprocess.run([*command, folder / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def chars(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("chars"), "shakespeare-char")


def sampled(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([folder / "program/sample", "--run", folder / "run", *options], capture_output=True)


def pythons(folder: Path, capfd, *options: str) -> dict:
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        assert main(["sample", str(folder / "run"), *options, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("options", [
    ("--tokens", "50"),  # thrice as many as the model has positions
    ("--prompt", "12² is ", "--tokens", "20"),
    ("--prompt", "12 is 144.\n13 is 169.", "--tokens", "9"),  # longer than the model's positions
    ("--temperature", "0", "--tokens", "20"),
    ("--top-k", "3", "--seed", "5"),
    ("--top-p", "0.6", "--seed", "18446744073709551615"),
    ("--min-p", "0.3", "--top-k", "9", "--top-p", "0.95", "--tokens", "30"),
    ("--repetition", "1.7", "--tokens", "30", "--temperature", "1.5"),
])  # fmt: skip
def test_the_text_is_that_of_python(chars, capfd, options):
    options = (*options, *(() if "--tokens" in options else ("--tokens", "25")))
    found = sampled(chars, *options)
    expected = pythons(chars, capfd, *options)
    assert found.stdout.decode() == expected["prompt"] + expected["text"] + "\n", found.stderr
    assert len(set(expected["tokens"])) > 1


def test_a_model_without_a_cache(tmp_path, capfd):
    folder = built(tmp_path, "sparse-char", "--model.block", "16", "--model.layout", "local:8")
    expected = pythons(folder, capfd, "--tokens", "30")
    assert sampled(folder, "--tokens", "30").stdout.decode("utf-8", "replace") == expected["text"] + "\n"


def test_a_tokenizer_whose_rules_are_not_there(tmp_path, capfd):
    """A text goes on from ids, and ends where the model draws the end."""
    folder = built(tmp_path, "shakespeare-char", "--data.tokenizer", "bpe", "--data.bpe_vocab", "300")
    expected = pythons(folder, capfd, "--tokens", "30")
    assert sampled(folder, "--tokens", "30").stdout.decode("utf-8", "replace") == expected["text"] + "\n"
    tokenizer = load_tokenizer(checkpoint.find(folder / "run")[0])
    ids = f"{tokenizer.start},{tokenizer.tokens.index(b'1')}"
    assert sampled(folder, "--ids", ids, "--tokens", "1").stdout.startswith(b"1")
    ends = sampled(
        folder, "--tokens", "4000", "--temperature", "30"
    ).stdout  # one of 300 nearly equal tokens is the end
    assert 0 < len(ends) < 4000
    done = sampled(folder, "--prompt", "12")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"give the ids of its tokens" in done.stderr


@pytest.mark.parametrize("options, says", [
    (("--prompt", "12?"), "? at byte 2 is not among the"),
    (("--prompt", "1é"), "é at byte 1 is not among the"),
    (("--ids", "1,x"), "--ids has something else"),
    (("--ids", "1,1000"), "id is 1000, expected 0 to"),
    (("--prompt", "1", "--ids", "1"), "choose one"),
    (("--temperature", "-1"), "temperature is -1"),
    (("--temperature", "hot"), "--temperature is hot, expected a number"),
    (("--top-k", "-1"), "top_k is -1"),
    (("--top-p", "0"), "top_p is 0"),
    (("--min-p", "2"), "min_p is 2"),
    (("--repetition", "0"), "repetition is 0"),
    (("--tokens", "0"), "--tokens is below 1"),
    (("--run", "nowhere"), "nowhere"),
    (("--threads", "1000"), "threads is 1000"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(chars, options, says):
    done = sampled(chars, *options)
    assert done.returncode == 2 and done.stderr.decode().count("\n") == 1 and says in done.stderr.decode(), done.stderr
    assert not done.stdout
