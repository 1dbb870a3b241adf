"""A user's mistake is one line on stderr and status 2, and costs nothing that was there before."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.data.shards import write_shard
from barellm.errors import UserError
from barellm.training import saving
from tests.cli.conftest import TINY


@pytest.fixture
def out(tmp_path):
    """The run's folder, which a refusal must not leave behind."""
    path = tmp_path / "new" / "run"
    yield path
    assert not path.exists()


def test_unknown_command(refused):
    assert "unknown command 'trian', did you mean 'train'?" in refused("trian")


@pytest.mark.skipif(sys.platform == "win32", reason="is about everything else")
def test_windows_is_refused_with_one_line(refused, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows is not supported" in refused("train")


def test_missing_file(refused, out, tmp_path):
    assert "nowhere.txt" in refused("train", "shakespeare-char", "--data", tmp_path / "nowhere.txt", "--out", out, *TINY)


def test_no_file_named(refused, out):
    assert "no text: pass --data" in refused("train", "shakespeare-char", "--out", out, *TINY)


def test_empty_file(refused, out, tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    assert "empty.txt is empty" in refused("train", "shakespeare-char", "--data", path, "--out", out, *TINY)


def test_a_vocabulary_that_the_tokenizer_does_not_have(refused, out, text):
    message = refused("train", "shakespeare-char", "--data", text, "--out", out, *TINY, "--model.vocab_size", "1000")
    assert message.startswith("model.vocab_size is 1000, the tokenizer has ")


def test_folder_without_text(refused, out, tmp_path):
    (tmp_path / "folder").mkdir()
    message = refused("train", "shakespeare-char", "--data", tmp_path / "folder", "--out", out, *TINY)
    assert "has no text and no .bin shards" in message


def test_file_that_is_no_text(refused, out, tmp_path):
    path = tmp_path / "picture.txt"
    path.write_bytes(bytes(range(256)) * 8)
    assert "picture.txt" in refused("train", "shakespeare-char", "--data", path, "--out", out, *TINY)


def test_text_shorter_than_one_sequence(refused, out, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    message = refused("train", "shakespeare-char", "--data", path, "--out", out, *TINY, "--seq", "16")
    assert "one sequence of 16 needs 17" in message


def test_token_beyond_the_vocabulary(refused, out, tmp_path):
    path = tmp_path / "tokens.bin"
    write_shard(path, [np.array([1, 2, 60000] * 100)], magic=20240520)
    message = refused("train", "gpt2-124m", "--data", path, "--out", out, *TINY)
    assert "token id 60000, beyond the vocabulary" in message


def test_wrong_magic(refused, out, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(4096))
    message = refused("train", "gpt2-124m", "--data", path, "--out", out, *TINY)
    assert "starts with magic 0" in message and "20240520" in message


def test_truncated_shard(refused, out, tmp_path):
    path = tmp_path / "tokens.bin"
    write_shard(path, [np.arange(1000)], magic=20240520)
    os.truncate(path, 2000)
    assert "its header says 1000 tokens" in refused("train", "gpt2-124m", "--data", path, "--out", out, *TINY)


def test_unknown_preset(refused, out):
    assert "unknown preset 'gpt2-1240m', did you mean 'gpt2-124m'?" in refused("train", "gpt2-1240m", "--out", out)


def test_unknown_key(refused, out):
    assert "unknown option --model.layer, did you mean '--model.layers'?" in refused("train", "--model.layer", "3")


def test_a_text_in_the_place_of_a_preset(refused, out, text):
    message = refused("train", text, "--out", out)
    assert f"{text} is a file or folder, expected the name of a preset: a text is named with --data" in message


@pytest.mark.parametrize("command", ["train", "profile"])
def test_no_process_is_too_few(refused, command):
    assert refused(command, "--ranks", "0") == "--ranks is 0, expected at least 1"


def test_missing_configuration_file(refused, out, tmp_path):
    assert "No such file" in refused("train", "--config", tmp_path / "no.toml", "--out", out)


def test_heads_that_do_not_divide_channels(refused, out, text):
    message = refused("train", "shakespeare-char", "--data", text, "--out", out, "--model.heads", "5")
    assert "model.heads 5 does not divide model.d_model 128" in message


@pytest.mark.parametrize(
    "words, message",
    [
        (["--batch", "0"], "train.micro_batch_size is 0, expected at least 1"),
        (["--seq", "17"], "train.seq 17 is above model.max_seq 16"),
        (["--steps", "-3"], "train.steps is -3, expected at least 0"),
        (["--minutes", "-1"], "train.minutes is -1.0, expected at least 0"),
        (["--lr", "-1"], "optim.lr is -1.0, expected at least 0"),
        (["--lr", "1e-5"], "optim.min_lr 0.0001 is above optim.lr 1e-05: lower it too"),
        (["--schedule", "cosin"], "optim.schedule is 'cosin', expected cosine, linear, constant or wsd"),
        (["--schedule", "wsd", "--optim.decay_fraction", "1.5"], "optim.decay_fraction is 1.5, expected at most 1"),
        (["--schedule", "wsd", "--optim.decay_fraction", "-0.1"], "optim.decay_fraction is -0.1, expected at least 0"),
        (["--schedule", "wsd", "--lr", "1e-5"], "optim.min_lr 0.0001 is above optim.lr 1e-05: lower it too"),
        (["--schedule", "linear", "--optim.decay_fraction", "nan"], "optim.decay_fraction is 'nan', expected a number"),
        (["--optim.beta1", "1"], "optim.beta1 is 1.0, expected 0 <= beta1 < 1"),
        (["--optim.moments", "bf16"], "optim.moments is 'bf16', expected fp32, 16bit or 16bit-stochastic"),
        (["--model.d_model", str(10**9)], "no machine can address such a program, choose smaller sizes"),
        (["--model.layers", "100000"], "model.layers is 100000, expected at most 1024"),
        (["--dtype", "fp8"], "train.dtype is 'fp8', expected auto, fp32, bf16 or fp16"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--model.dropout", "1"], "model.dropout is 1.0"),
        (["--data.val_fraction", "1"], "data.val_fraction is 1.0"),
        (["--data.tokenizer", "byte"], "unknown tokenizer 'byte', did you mean 'bytes'?"),
        (["--data.order", "sorted"], "data.order is 'sorted', expected epoch, random, documents, sequential or llmc"),
        (["--seed", str(10**20)], f"train.seed is {10**20}, expected at most {2**32 - 1}"),
    ],
)
def test_values_that_no_run_can_have(refused, out, tiny, words, message):
    assert message in refused(*tiny(*words, out=out))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_batch_that_cannot_fit_is_refused_with_the_arithmetic(refused, out, tiny, monkeypatch, device):
    from barellm.runtime import memory

    monkeypatch.setattr(memory, "memory_limit", lambda: (256 << 20, "a test"))
    message = refused(*tiny("--batch", 100_000, "--device", device, out=out))
    assert "100000 x" in message and "a test is 256.0 MiB" in message and " + " in message


@pytest.mark.alone
def test_a_batch_that_nobody_can_run_is_refused_before_it_is_planned(refused, out, tiny):
    started = time.monotonic()
    message = refused(*tiny("--batch", 100_000_000, out=out))
    assert "100000000 x" in message and "its residual stream alone would need" in message and "MiB" in message
    assert time.monotonic() - started < 5


def test_a_folder_in_use_is_refused_without_resume(refused, tiny, tmp_path):
    note = tmp_path / "run" / "notes.txt"
    note.parent.mkdir()
    note.write_text("mine")
    assert "is not empty (it has notes.txt): resume it with --resume, or name another folder" in refused(*tiny())
    assert [path.name for path in note.parent.iterdir()] == ["notes.txt"]


def test_out_that_is_a_file(refused, tiny, tmp_path):
    (tmp_path / "run").write_text("mine")
    assert "is a file, expected a folder" in refused(*tiny())


def test_two_runs_in_one_folder(refused, tiny, tmp_path):
    from barellm.checkpoint.folder import RunFolder

    with RunFolder(tmp_path / "run", resume=False):
        assert "another barellm process is writing" in refused(*tiny())


def test_nothing_to_resume(refused, tiny, tmp_path, monkeypatch):
    assert "does not exist" in refused(*tiny("--resume"))
    (tmp_path / "run").mkdir()
    assert "has no checkpoint" in refused(*tiny("--resume"))
    monkeypatch.chdir(tmp_path)
    assert "nothing to resume: no run of default in runs/ has a checkpoint" in refused("train", "--resume")


def test_a_python_without_the_packages(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "barellm.cli.plan", None)  # imports as if it were not there
    with pytest.raises(ModuleNotFoundError):  # ours: a bug of ours
        main(["plan"])
    monkeypatch.setattr("barellm.cli.main.run_command", lambda argv: __import__("no_such_package"))
    assert "lacks the package no_such_package: pip install -e ." in refused("plan")


@pytest.mark.parametrize("command", [["sample"], ["eval"]])
def test_no_checkpoint(refused, trained, tmp_path, command):
    assert "does not exist" in refused(*command, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no checkpoint" in refused(*command, tmp_path / "empty")
    message = refused(*command, trained.parent)  # the folder above the run
    assert message == f"{trained.parent} has no checkpoint, did you mean {trained}?"
    (tmp_path / "run-20260101-120000").mkdir()
    assert f"did you mean {tmp_path / 'run-20260101-120000'}?" in refused(*command, tmp_path / "run")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--samples", "0"], "--samples is 0, expected at least 1"),
        (["-n", "many"], "invalid int value: 'many'"),
        (["--prompt", "\u4f60"], "character '\u4f60'"),
        (["--top-q", "1"], "unknown option --top-q, did you mean '--top-"),
    ],
)
def test_mistakes_in_sampling(refused, trained, words, message):
    assert message in refused("sample", trained, "--device", "reference", *words)


def test_a_damaged_checkpoint_is_named(refused, trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (weights,) = copy.rglob("weights.safetensors")
    os.truncate(weights, 100)
    assert "weights.safetensors has 100 bytes" in refused("sample", copy, "--device", "reference")


# --- disks ---


@pytest.fixture
def locked(tmp_path):
    """A folder that cannot be written. Root may write anywhere, so for root it is a file system mounted read-only."""
    path = tmp_path / "locked"
    path.mkdir()
    if os.geteuid() != 0:
        path.chmod(0o555)
        yield path
        path.chmod(0o755)
        return
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", path], capture_output=True)
    if made.returncode:
        pytest.skip("root without the right to mount: no folder is read-only for it")
    yield path
    subprocess.run(["umount", path], check=True)


def run(words: list[str], **options) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-m", "barellm", *words], cwd=root, capture_output=True, text=True, **options)


def check_refused(found: subprocess.CompletedProcess) -> str:
    assert found.returncode == 2, (found.stdout, found.stderr)
    assert found.stderr.startswith("barellm: error: ") and found.stderr.count("\n") == 1, found.stderr
    return found.stderr


@pytest.mark.parametrize("name", ["", "new"])
def test_a_folder_that_cannot_be_written(locked, refused, tiny, name):
    """The folder of the run itself is read-only, or the one that it is to be made in."""
    message = refused(*tiny(out=locked / name))
    assert str(locked) in message and ("Permission denied" in message or "Read-only file system" in message)
    assert not list(locked.iterdir())


def test_a_profile_that_is_refused_leaves_no_folder(refused, tmp_path, monkeypatch):
    from barellm.tools.profile import profile

    def measure(*args, **options):
        raise UserError("no GPU")

    monkeypatch.setattr(profile, "measure", measure)
    assert refused("profile", "shakespeare-char", "--out", tmp_path / "new") == "no GPU"
    assert not (tmp_path / "new").exists()


def test_bench_says_before_it_measures_that_it_cannot_write(locked, refused, monkeypatch):
    monkeypatch.setattr("barellm.cli.bench._measured", lambda *_: pytest.fail("measured first"))
    assert "result.json: " in refused("bench", "step", "shakespeare-char", "--out", locked / "result.json")


@pytest.mark.extended
def test_a_file_size_limit_costs_only_the_new_checkpoint(tiny, tmp_path):
    """RLIMIT_FSIZE stands for a quota: the write that crosses it fails, as on a full disk."""
    assert run(tiny()).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))

    words = ["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "6", "--device", "reference"]
    found = run([*words, "--train.save_total_limit", "5"], preexec_fn=limit)
    assert "File too large" in check_refused(found)
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()} == before
    again = run(words)
    assert again.returncode == 0, again.stderr
    assert checkpoint.find(tmp_path / "run")[0].name == "step-000006"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], capture_output=True)
    if made.returncode:
        pytest.skip("only root can make a small disk")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_disk_too_small_for_a_checkpoint_is_refused_before_training(small_disk, refused, tiny):
    (small_disk / "other").write_bytes(bytes(50_000))
    message = refused(*tiny(out=small_disk / "run"))
    assert "a checkpoint needs" in message and "free are" in message


def test_a_disk_that_fills_up_keeps_the_checkpoints_it_has(small_disk, tiny, tmp_path, refused, monkeypatch):
    """Room for one checkpoint: the second save fails and training goes on, the last save fails and, with the wait for room cut to
    nothing, that is the status."""
    monkeypatch.setattr(saving, "FULL_DISK_S", 0.0)
    assert main(tiny("--train.checkpoint_every", "1", out=tmp_path / "whole")) == 0
    out = small_disk / "run"
    message = refused(*tiny("--train.checkpoint_every", "1", out=out))
    assert "No space left on device" in message
    kept, wrong = checkpoint.find(out)
    assert checkpoint.step_of(kept) == 1 and not wrong
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    assert main(tiny("--train.checkpoint_every", "1", "--resume", out=out)) == 0
    whole, _ = checkpoint.find(tmp_path / "whole")
    path, _ = checkpoint.find(out)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (path / name).read_bytes() == (whole / name).read_bytes()
