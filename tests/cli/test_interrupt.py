"""Ctrl-C in a real process on the CPU backend: once, twice, and in the middle of a long step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barellm.checkpoint import checkpoint

LONG_STEP = (  # two billion scores of attention, in a model that is made at once: 5 s on two fast cores
    *("--model.layers", "1", "--model.d_model", "32", "--model.heads", "4", "--model.max_seq", "32768"),
    *("--batch", "1", "--seq", "32768", "--dtype", "fp32", "--train.eval_every", "0", "--data.val_fraction", "0.4"),
)
TELLS_WHEN_IT_RUNS = """
import sys
from barellm.cli.main import main
from barellm.cpu.step import CpuSession
run = CpuSession.run
def told(self, program, **values):
    print("runs", program, flush=True)
    run(self, program, **values)
CpuSession.run = told
sys.exit(main(sys.argv[1:]))
"""
TELLS_WHEN_IT_BEGINS = """
import sys
from barellm.cli import main
open_streams = main.open_closed_streams
def told():
    print("begins", flush=True)
    open_streams()
main.open_closed_streams = told
sys.exit(main.main(sys.argv[1:]))
"""
SHORT_STEPS = (
    *("--steps", "100000", "--batch", "2", "--seq", "16", "--model.layers", "1", "--model.d_model", "32"),
    *("--train.eval_every", "0"),
)


@pytest.fixture
def started(text, tmp_path):
    """Starts a training in its own session and waits until its output says a word. `program`: how Python gets barellm."""
    processes = []

    def start(word: str, *more: str, program: tuple[str, ...] = ("-m", "barellm")) -> subprocess.Popen:
        log = tmp_path / "log"
        words = ["train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / "run"), *more]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *program, *words], cwd=Path(__file__).parents[2], stdout=out, stderr=subprocess.STDOUT
            )
        processes.append(process)
        deadline = time.monotonic() + 60
        while word not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.extended
def test_one_signal_saves_and_exits(started, tmp_path, number, status):
    process = started("step     1/", *SHORT_STEPS)
    process.send_signal(number)
    assert process.wait(timeout=20) == status
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said and "resume with: barellm train --out" in said
    path, wrong = checkpoint.find(tmp_path / "run")
    assert not wrong and checkpoint.step_of(path) >= 1


@pytest.mark.extended
def test_output_that_nobody_reads_any_more_stops_the_run_with_a_checkpoint(text, tmp_path):
    """`barellm train | head -1`: the steps so far are not lost, and no process is left behind."""
    words = ["train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / "run"), "--json", *SHORT_STEPS]
    command = [sys.executable, "-m", "barellm", *words]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 141
    assert process.stderr.read() == b""
    assert checkpoint.step_of(checkpoint.find(tmp_path / "run")[0]) >= 1


@pytest.mark.alone
def test_two_signals_in_the_middle_of_a_long_step_exit_at_once(started, tmp_path, text, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "2")  # on more the step would not be long
    text.write_text(text.read_text() * 20)
    process = started("runs forward_backward", *LONG_STEP, program=("-c", TELLS_WHEN_IT_RUNS))
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "the step was not long enough to be interrupted"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - begin < 3  # the step would take longer
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert not checkpoint.steps(tmp_path / "run" / "checkpoints")


@pytest.mark.alone
def test_sigterm_in_the_middle_of_a_long_step_saves_within_its_grace(started, tmp_path, text, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "2")
    text.write_text(text.read_text() * 20)
    process = started("runs forward_backward", *LONG_STEP, "--train.signal_grace_period", "1", program=("-c", TELLS_WHEN_IT_RUNS))
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert time.monotonic() - begin < 3  # the step would take longer
    assert "stopped inside step 1" in (tmp_path / "log").read_text()
    path, wrong = checkpoint.find(tmp_path / "run")
    assert not wrong and checkpoint.step_of(path) == 0


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_signal_before_the_first_step_leaves_nothing(started, tmp_path, seconds):
    """Importing, preparing text and compiling: one Ctrl-C ends it, once Python itself is ready (its start may lose a signal)."""
    process = started("begins", *SHORT_STEPS, program=("-c", TELLS_WHEN_IT_BEGINS))
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert (tmp_path / "log").read_text().endswith("barellm: interrupted\n")
    assert not checkpoint.steps(tmp_path / "run" / "checkpoints")


INTERRUPTED_IMPORT = """
import signal
import sys
from barellm.cli.main import main

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "barellm.cli.train":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                %s

sys.meta_path.insert(0, Interrupts())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("what_happens", ["pass", "raise ImportError"])
def test_a_signal_during_an_import_is_not_lost(tmp_path, what_happens):
    """importlib's callbacks swallow KeyboardInterrupt (the command trained its 100,000 steps); NumPy makes ImportError of it."""
    words = ["train", "shakespeare-char", "--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT % what_happens, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "barellm: interrupted\n")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_kill_9_and_resume_with_another_number_of_threads_give_the_same_bits(started, tmp_path, text, dtype):
    """The CPU backend, killed once a checkpoint is there; 1 thread goes on where 2 were."""
    sizes = ["--batch", "3", "--seq", "24", "--model.layers", "2", "--model.d_model", "32", "--model.heads", "2"]
    run = [
        "--steps",
        "60",
        "--train.gradient_accumulation_steps",
        "2",
        "--train.checkpoint_every",
        "7",
        "--train.eval_every",
        "25",
        "--dtype",
        dtype,
    ]
    process = started("step-000007", *sizes, *run)
    process.kill()
    process.wait()

    def barellm(*words: str, threads: int) -> None:
        environment = os.environ | {"BARELLM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-m", "barellm", *words], check=True, env=environment, stdout=subprocess.DEVNULL)

    barellm("train", "--out", str(tmp_path / "run"), "--resume", threads=1)
    barellm("train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / "whole"), *sizes, *run, threads=2)
    one, other = (checkpoint.find(tmp_path / name)[0] for name in ("run", "whole"))
    assert one.name == other.name == "step-000060"
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
