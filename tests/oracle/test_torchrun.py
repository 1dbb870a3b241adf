"""Runs that PyTorch's own launcher starts: the bits of `--ranks`, and an end with its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from barellm.checkpoint import checkpoint
from barellm.distributed.supervisor import below, ranks_below

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed: pip install -e '.[mpi]'"),
]

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
BARELLM = (sys.executable, "-m", "barellm")
STEPS, FOREVER = ("--steps", "4", "--train.eval_every", "2"), ("--steps", "100000000", "--train.eval_every", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text, for all tests."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))
    return folder


def start(place: Path, launcher: Sequence[str], out: str, *more: str) -> subprocess.Popen[str]:
    words = ["train", "shakespeare-char", "--data", str(place / "text.txt"), "--out", str(place / out)]
    sizes = ["--model.layers", "1", "--model.d_model", "32", "--model.heads", "2", "--model.max_seq", "8", "--seq", "8"]
    words += [*sizes, "--batch", "12", "--train.eval_tokens", "256", "--optim.warmup", "1", *more]
    own = os.environ | {"PYTHONPATH": str(ROOT), "BARELLM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, *words], env=own, cwd=place, **pipes)


def finished(place: Path, launcher: Sequence[str], out: str, *more: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    process = start(place, launcher, out, *more)
    said = process.communicate(timeout=120)
    return process.returncode, *said


@pytest.fixture(scope="module")
def pair(place) -> Path:
    status, _, error = finished(place, BARELLM, "pair", *STEPS, "--ranks", "2")
    assert status == 0, error
    return place / "pair"


@pytest.mark.parametrize("how", [("-m", "barellm"), ("--no-python", *BARELLM)], ids=["module", "program"])
def test_a_run_under_torchrun_has_the_bits_of_ranks(place, pair, how):
    out = how[0].strip("-")
    status, said, error = finished(place, (*TORCHRUN, *how), out, *STEPS)
    assert status == 0, error
    assert said.count("preset shakespeare-char") == 1 and said.count("done     4 steps") == 1, "one rank speaks"
    ours, theirs = (checkpoint.step_folder(folder / "checkpoints", 4) for folder in (place / out, pair))
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert checkpoint.read_meta(ours)["machine"]["ranks"] == 2


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_the_run_ends_with_torchrun_and_saves_once(place, sign):
    """Also where torchrun is killed, which can then not end what it has started: a run went on without it for ever."""
    process = start(place, (*TORCHRUN, "-m", "barellm"), sign.name, *FOREVER)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step     1/"):
                break
        ranks = list(ranks_below(process.pid))
        every = list(below(process.pid))
        assert len(ranks) == 2
        process.send_signal(sign)
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{number}").exists() for number in every):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    (saved,) = checkpoint.steps(place / sign.name / "checkpoints")
    assert checkpoint.problem(saved) is None


def test_a_mistake_is_told_once_and_fails(place):
    status, _, error = finished(place, (*TORCHRUN, "-m", "barellm"), "odd", *STEPS, "--batch", "11")
    assert status != 0
    line = "barellm: error: train.micro_batch_size is 11, and the run has 2 ranks, which do not divide it"
    assert error.count("barellm: error:") == 1 and line in error
