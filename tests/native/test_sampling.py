"""Programs without Python write the texts that `barellm sample` writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.data.kinds import load_tokenizer
from tests.native.test_native import pytestmark  # noqa: F401

SMALL = ("--model.layers", "1", "--model.heads", "2", "--model.d_model", "16", "--model.max_seq", "16", "--seq", "16")
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
    done = subprocess.run([*command, folder / "run"], capture_output=True, text=True, errors="replace")
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
    ("--max-new-tokens", "50"),  # thrice as many as the model has positions
    ("--prompt", "12² is ", "--max-new-tokens", "20"),
    ("--prompt", "12 is 144.\n13 is 169.", "--max-new-tokens", "9"),  # longer than the model's positions
    ("--temperature", "0", "--max-new-tokens", "20"),
    ("--top-k", "3", "--seed", "5"),
    ("--top-p", "0.6", "--seed", "18446744073709551615"),
    ("--min-p", "0.3", "--top-k", "9", "--top-p", "0.95", "--max-new-tokens", "30"),
    ("--repetition-penalty", "1.7", "--max-new-tokens", "30", "--temperature", "1.5"),
])  # fmt: skip
@pytest.mark.extended
def test_the_text_is_that_of_python(chars, capfd, options):
    options = (*options, *(() if "--max-new-tokens" in options else ("--max-new-tokens", "25")))
    found = sampled(chars, *options)
    expected = pythons(chars, capfd, *options)
    assert found.stdout.decode() == expected["prompt"] + expected["text"] + "\n", found.stderr
    assert len(set(expected["tokens"])) > 1


@pytest.mark.extended
def test_a_model_without_a_cache(tmp_path, capfd):
    folder = built(tmp_path, "sparse-char", "--model.block", "16", "--model.layout", "local:8")
    expected = pythons(folder, capfd, "--max-new-tokens", "30")
    assert sampled(folder, "--max-new-tokens", "30").stdout.decode("utf-8", "replace") == expected["text"] + "\n"


@pytest.mark.extended
def test_a_tokenizer_whose_rules_are_not_there(tmp_path, capfd):
    """A text goes on from ids, and ends where the model draws the end."""
    folder = built(tmp_path, "shakespeare-char", "--data.tokenizer", "bpe", "--data.bpe_vocab", "300")
    expected = pythons(folder, capfd, "--max-new-tokens", "30")
    assert sampled(folder, "--max-new-tokens", "30").stdout.decode("utf-8", "replace") == expected["text"] + "\n"
    tokenizer = load_tokenizer(checkpoint.find(folder / "run")[0])
    ids = f"{tokenizer.start},{tokenizer.tokens.index(b'1')}"
    assert sampled(folder, "--ids", ids, "--max-new-tokens", "1").stdout.startswith(b"1")
    ends = sampled(folder, "--max-new-tokens", "4000", "--temperature", "30").stdout  # one of 300 nearly equal tokens is the end
    assert 0 < len(ends) < 4000
    done = sampled(folder, "--prompt", "12")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"give the ids of its tokens" in done.stderr


@pytest.mark.parametrize("options, says", [
    (("--prompt", "12?"), "? at byte 2 is not among the"),
    (("--prompt", "1é"), "é at byte 1 is not among the"),
    (("--ids", "1,x"), "one of --ids is x, expected a whole number from 0 to"),
    (("--ids", "1,1000"), "one of --ids is 1000, expected"),
    (("--prompt", "1", "--ids", "1"), "choose one"),
    (("--temperature", "-1"), "temperature is -1"),
    (("--temperature", "hot"), "--temperature is hot, expected a number"),
    (("--top-k", "-1"), "--top-k is -1, expected a whole number"),
    (("--top-p", "0"), "top_p is 0"),
    (("--min-p", "2"), "min_p is 2"),
    (("--repetition-penalty", "0"), "repetition_penalty is 0"),
    (("--max-new-tokens", "0"), "--max-new-tokens is 0, expected a whole number from 1"),
    (("--run", "nowhere"), "nowhere"),
    (("--threads", "1000"), "threads is 1000"),
])  # fmt: skip
@pytest.mark.extended
def test_what_is_wrong_is_said_in_one_line(chars, options, says):
    done = sampled(chars, *options)
    assert done.returncode == 2 and done.stderr.decode().count("\n") == 1 and says in done.stderr.decode(), done.stderr
    assert not done.stdout


CALLER = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.barellm_open.restype, lib.barellm_error.restype = ctypes.c_void_p, ctypes.c_char_p
lib.barellm_size.restype = lib.barellm_prompt.restype = lib.barellm_sample.restype = ctypes.c_int64
i64, f64 = ctypes.c_int64, ctypes.c_double
class How(ctypes.Structure):
    _fields_ = [(n, f64) for n in ("temperature", "top_p", "min_p", "repetition")] + [("top_k", i64), ("seed", ctypes.c_uint64)]
how, ids, logits = How(0, 1, 0, 1, 0, 1), (ctypes.c_int32 * 40)(1), (ctypes.c_float * 100)()
s = ctypes.c_void_p(lib.barellm_open(1))
def sample(known):
    return lib.barellm_sample(s, ids, i64(known), i64(3), ctypes.byref(how), None, None)
def says(words):
    assert words in lib.barellm_error(), lib.barellm_error()
assert sample(0) == -1; says(b"the text has no token")
assert lib.barellm_logits(s, ids, i64(1), i64(-1), logits) == -1; says(b"positions -1 to 0")
assert lib.barellm_prompt(b"12", ids, i64(1)) == -1; says(b"room for 1 ids, the text may need 2")
assert sample(1) == 3 and list(ids[1:4]) == [0, 0, 0]  # weights of zero: of equal logits the lowest id
how.top_k = -1
assert sample(1) == -1; says(b"top_k is -1")
how.top_k = 0
size = lib.barellm_size(s, b"wte")
values = (ctypes.c_float * size)(*[float("nan")] * size)
assert lib.barellm_write(s, b"wte", values, ctypes.c_size_t(size)) == 0
assert sample(1) == -1; says(b"logits are not finite")
print("done")
"""


@pytest.mark.extended
def test_a_caller_gets_errors_and_of_equal_tokens_the_first(chars):
    command = [sys.executable, "-S", "-c", CALLER, str(chars / "program/libbarellm.so")]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_a_checkpoints_folder_is_taken_too(chars):
    path, _ = checkpoint.find(chars / "run")
    command = [chars / "program/sample", "--run", path, "--tokens", "9"]  # an older version's name
    assert subprocess.run(command, capture_output=True).stdout == sampled(chars, "--max-new-tokens", "9").stdout
