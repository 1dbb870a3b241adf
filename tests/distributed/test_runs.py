"""Runs of real processes: what they print and save, how they go on, and how they end when one of them is at fault."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from barellm.checkpoint import checkpoint, tensorfile
from barellm.cli.main import main
from barellm.cpu.threads import cores
from barellm.distributed import launchers
from barellm.distributed.launch import mpiexec
from barellm.distributed.supervisor import below, ranks_below

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[mpi]'", exc_type=ImportError)

# Ranks look for each other twice a second: beside other tests two cores have too many processes for that.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SIZES = (
    *("--model.layers", "1", "--model.d_model", "32", "--model.heads", "2", "--model.max_seq", "8", "--seq", "8"),
    *("--batch", "12", "--train.eval_tokens", "256", "--optim.warmup", "1"),
)
STEPS = ("--steps", "4", "--train.eval_every", "2", "--train.checkpoint_every", "2", "--train.save_total_limit", "9")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text, for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))
    return folder


def words(place: Path, out: str, *more: str) -> list[str]:
    return ["train", "shakespeare-char", "--data", str(place / "text.txt"), "--out", str(place / out), *SIZES, *more]


def environment(place: Path) -> dict[str, str]:
    own = {"BARELLM_THREADS": "1", "BARELLM_RANK_LIMIT": "3"}
    return os.environ | own | {"PYTHONPATH": str(ROOT)}


def finished(command: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(place), cwd=place, capture_output=True, text=True, timeout=60)


def by_mpi(place: Path, *programs: list[str]) -> subprocess.CompletedProcess[str]:
    """Programs for Python as ranks that MPI's own launcher starts, one of each; one program is for two ranks."""
    launcher = launchers.known(mpiexec())
    count = 2 if len(programs) == 1 else 1
    command = launcher.command(count, sys.executable, *programs[0])
    for program in programs[1:]:
        command += [":", "-n", "1", sys.executable, *program]
    return finished([word for word in command if word != "-disable-auto-cleanup"], place)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What the ranks have said on stderr, without the words of Open MPI's launcher, which `barellm train --ranks` keeps back."""
    lines: list[bytes] = []
    launchers.pass_on_errors(done.stderr.encode().splitlines(keepends=True), lines.append)
    return b"".join(lines).decode().strip()


def run(place: Path, out: str, *more: str) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, "-m", "barellm", *words(place, out, *more)], place)


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    path = checkpoint.step_folder(folder / "checkpoints", step)
    return {name: (path / name).read_bytes() for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)}


@pytest.fixture(scope="module")
def pair(place) -> subprocess.CompletedProcess[str]:
    """Two ranks that trained to the end, with a checkpoint in the middle."""
    done = run(place, "pair", *STEPS, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    return done


def test_one_rank_speaks_and_writes(place, pair):
    assert pair.stderr == ""
    assert pair.stdout.count("preset shakespeare-char") == 1 and pair.stdout.count("done     4 steps") == 1
    rows = [json.loads(line) for line in (place / "pair" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert len([row for row in rows if row["kind"] == "sample"]) == 1
    meta = checkpoint.read_meta(checkpoint.find(place / "pair")[0])
    assert meta["machine"]["ranks"] == 2 and meta["config"]["train"]["micro_batch_size"] == 12


def test_ranks_share_the_mean_over_all_targets_of_a_step_of_examples(place):
    """Rows have 1 to 10 targets, so each rank has another number of them; two micro-batches a step, each example sees itself."""
    lines = [json.dumps({"prompt": "a" * (i % 3), "completion": "b" * (1 + 7 * i % 10)}) for i in range(200)]
    (place / "examples.jsonl").write_text("\n".join(lines))
    more = (
        "--data",
        "examples.jsonl",
        "--data.tokenizer",
        "bpe",
        "--data.bpe_vocab",
        "262",
        "--model.max_seq",
        "16",
        "--seq",
        "16",
    )
    losses = []
    for name, ranks in (("one", "1"), ("two", "2")):
        done = run(place, f"examples-{name}", *STEPS, *more, "--gradient-accumulation-steps", "2", "--ranks", ranks)
        assert done.returncode == 0 and "each sees itself alone" in done.stdout, done.stderr
        rows = [json.loads(line) for line in (place / f"examples-{name}" / "metrics.jsonl").read_text().splitlines()]
        losses.append(
            [row["loss"] if row["kind"] == "train" else row["val_nats"] for row in rows if row["kind"] in ("train", "eval")]
        )
    assert len(losses[0]) == 7 and losses[0] == pytest.approx(losses[1], rel=1e-6)


MESSAGES = """
import atexit, sys, time
from barellm.cli.main import main
from barellm.distributed.world import rank_from_environment
atexit.register(lambda: (time.sleep(0.3 * rank_from_environment()), print("left"), sys.stdout.flush()))
sys.exit(main(sys.argv[1:]))
"""


def test_ranks_that_send_messages_find_the_bytes_of_those_that_read(place, pair, monkeypatch):
    """And none is killed while it ends: MPICH's launcher did that where a rank had not taken its leave."""
    monkeypatch.setenv("BARELLM_MESSAGES", "1")
    done = by_mpi(place, ["-c", MESSAGES, *words(place, "messages", *STEPS)])
    assert done.returncode == 0, done.stderr
    assert tensors(place / "messages", 4) == tensors(place / "pair", 4)
    assert done.stdout.count("left\n") == 2 and "TERMINATION" not in done.stdout


def test_ranks_train_the_model_of_one_process(place, pair, monkeypatch):
    for name, value in environment(place).items():
        monkeypatch.setenv(name, value)
    assert main(words(place, "alone", *STEPS)) == 0
    found = []
    for name in ("pair", "alone"):
        rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
        found.append([row.get("loss") or row["val_nats"] for row in rows if row["kind"] in ("train", "eval")])
    np.testing.assert_allclose(*found, rtol=2e-3)
    one, two = (checkpoint.find(place / name)[0] / checkpoint.OPTIMIZER for name in ("alone", "pair"))
    assert tensorfile.read_header(one) == tensorfile.read_header(two), "the files are those of one process"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_run_goes_on_with_any_number_of_ranks(place, pair, count):
    """With as many as before the bytes are those of a run never stopped."""
    folder = place / f"again-{count}"
    step = checkpoint.step_folder(folder / "checkpoints", 2)
    step.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(checkpoint.step_folder(place / "pair" / "checkpoints", 2)), str(step)], check=True)
    done = run(place, folder.name, "--resume", "--ranks", str(count))
    assert done.returncode == 0, done.stderr
    again, before = tensors(folder, 4), tensors(place / "pair", 4)
    if count == 2:
        assert again == before
        return
    assert again != before
    for name in before:
        paths = [checkpoint.step_folder(f / "checkpoints", 4) / name for f in (folder, place / "pair")]
        ours, theirs = (tensorfile.mapped(path) for path in paths)
        for tensor, values in ours.items():
            np.testing.assert_allclose(values, theirs[tensor], atol=2e-3, err_msg=tensor)


def losses_of(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss") or row["val_nats"] for row in rows if row["kind"] in ("train", "eval")]


@pytest.mark.parametrize(
    "adapted", [("--adapt", "lora:2", "--adapter.base", "nf4"), ("--train-only", "h.0.*")], ids=["qlora", "some"]
)
def test_adapters_train_on_ranks_and_go_on_with_another_number(place, pair, adapted):
    """The losses are those of one process; a checkpoint holds what is trained alone, and any number of ranks resumes from it."""
    name, start = adapted[0].strip("-"), (*STEPS, "--init-from", "pair", "--lr", "0.01", *adapted)
    command = [sys.executable, "-m", "barellm", "train", "shakespeare-char", "--data", "text.txt", *SIZES[8:], *start]
    for count in ("1", "2"):
        done = finished([*command, "--ranks", count, "--out", f"{name}-{count}"], place)
        assert done.returncode == 0, done.stderr
    one, two = (place / f"{name}-{count}" for count in (1, 2))
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=1e-5)
    files = [checkpoint.find(path)[0] / checkpoint.WEIGHTS for path in (one, two)]
    assert tensorfile.read_header(files[0]) == tensorfile.read_header(files[1])
    assert all(".lora_" in key or (adapted[1] == "h.0.*" and key.startswith("h.0.")) for key in tensorfile.mapped(files[0]))
    subprocess.run(["cp", "-r", str(two), str(place / f"{name}-again")], check=True)
    for folder, ranks in ((place / f"{name}-again", "3"), (two, "2")):
        before = tensors(folder, 4)
        subprocess.run(["rm", "-r", str(checkpoint.step_folder(folder / "checkpoints", 4))], check=True)
        done = finished([*command[:4], "--out", str(folder), "--resume", "--ranks", ranks], place)
        assert done.returncode == 0, done.stderr
        np.testing.assert_allclose(losses_of(folder), losses_of(one), rtol=1e-5)
        assert (tensors(folder, 4) == before) == (ranks == "2"), "with as many ranks as before the bytes are the same"


@pytest.mark.parametrize(
    "more, complaint",
    [
        (("--steps", "5"), r'the configuration is {"train": {"steps": 5}} on rank 1, and {"train": {"steps": 4}} on rank 0'),
        (("--data", __file__), r"the text is .*test_runs.py.* on rank 1, and .*text.txt"),
        (("--data", "/nowhere"), r"rank 1: no such file or folder: /nowhere"),
    ],
    ids=["configuration", "text", "missing"],
)
def test_a_rank_that_is_told_something_else_is_refused(place, more, complaint):
    told = ["-m", "barellm", *words(place, "other", "--steps", "4")]
    done = by_mpi(place, told, [*told, *more])
    assert done.returncode == 2
    assert re.fullmatch(f"barellm: error: {complaint}.*", said(done)), done.stderr


def test_a_compressed_run_goes_on_with_the_same_bytes_or_with_another_number_of_ranks(place):
    compressed = ("--optim.powersgd", "2")
    for name in ("whole", "half"):
        assert run(place, name, *STEPS, *compressed, "--ranks", "2").returncode == 0
    subprocess.run(["rm", "-r", str(checkpoint.step_folder(place / "half" / "checkpoints", 4))], check=True)
    subprocess.run(["cp", "-r", str(place / "half"), str(place / "single")], check=True)
    assert run(place, "half", "--resume", "--ranks", "2").returncode == 0
    assert tensors(place / "half", 4) == tensors(place / "whole", 4)
    done = run(place, "single", "--resume")
    assert done.returncode == 0, done.stderr
    assert "what compression has left out on 2 ranks is added up for 1 rank\n" in done.stdout


SPIKES = """
import sys
from pathlib import Path
from barellm.cli.main import main
from barellm.distributed.world import rank_from_environment
from barellm.training.spikes import Spikes
look, place = Spikes.look, Path(sys.argv.pop(1))
def told(self, **numbers):
    why = look(self, **numbers)
    with open(place / f"spikes-{rank_from_environment()}", "a") as file:
        file.write(f"{numbers} {why}\\n")
    return why
Spikes.look = told
sys.exit(main(sys.argv[1:]))
"""


def test_all_ranks_skip_the_same_spikes(place):
    """They look at the same numbers. One that went on alone would wait for the others in vain."""
    more = ("--steps", "180", "--train.eval_every", "0", "--optim.skip_norm_z", "1.5")
    done = by_mpi(place, ["-c", SPIKES, str(place), *words(place, "spiky", *more)])
    assert done.returncode == 0, done.stderr
    first, second = ((place / f"spikes-{rank}").read_text().splitlines() for rank in range(2))
    assert first == second and len(first) == 180
    skipped = sum("deviations above" in line for line in first)
    assert 0 < skipped < 52 and done.stdout.count("skipped: its norm") == skipped


OTHER_VERSION = """
import sys, barellm
barellm.__version__ = "0.0.9"
from barellm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_of_another_version_is_refused(place):
    told = words(place, "version", "--steps", "4")
    done = by_mpi(place, ["-m", "barellm", *told], ["-c", OTHER_VERSION, *told])
    assert done.returncode == 2
    found = re.fullmatch(r"barellm: error: .*0\.0\.9 .*on rank 1, and .* on rank 0.*", said(done))
    assert found, done.stderr
    assert not (place / "version").exists()


def test_a_batch_that_ranks_do_not_divide_is_refused_once(place):
    done = run(place, "odd", "--ranks", "5")
    assert done.returncode == 2
    line = "train.micro_batch_size is 12, and the run has 5 ranks, which do not divide it: each takes as many sequences"
    assert done.stderr.strip() == f"barellm: error: {line}"


class Started:
    """A run of two ranks that does not end by itself, in its steps."""

    def __init__(self, place: Path, out: str) -> None:
        command = [sys.executable, "-m", "barellm", *words(place, out, "--steps", "100000000", "--ranks", "2")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.launcher = subprocess.Popen(command, env=environment(place), cwd=place, **pipes)
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            if line.startswith("step     1/"):
                return
        raise AssertionError(self.launcher.communicate()[1])

    def rank(self, number: int) -> int:
        """Its process."""
        return {rank: process for process, rank in ranks_below(self.launcher.pid)}[number]

    def end(self) -> tuple[int, str, float]:
        """Exit status, stderr, and the seconds that it took."""
        begin = time.monotonic()
        try:
            error = self.launcher.communicate(timeout=25)[1]
        finally:
            self.launcher.kill()
        return self.launcher.returncode, error.strip(), time.monotonic() - begin


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@linux
@pytest.mark.parametrize(
    "number, sign, complaint",
    [
        (0, signal.SIGKILL, r"rank 0 \(process \d+\) was ended by SIGKILL: the run is ended; resume from .*"),
        (1, signal.SIGKILL, r"rank 1 \(process \d+\) was ended by SIGKILL: the run is ended; resume from .*"),
        (0, signal.SIGSTOP, r"rank 0 (has not been heard of|\(process \d+\) has been stopped) for \d s: the run is ended"),
        (1, signal.SIGSTOP, r"rank 1 (has not been heard of|\(process \d+\) has been stopped) for \d s: the run is ended"),
    ],
)
def test_a_rank_that_is_gone_ends_the_run_in_one_line(place, number, sign, complaint):
    started = Started(place, f"gone-{number}-{sign.name}")
    os.kill(started.rank(number), sign)
    status, error, seconds = started.end()
    assert status == 1 and seconds < 10
    assert re.fullmatch(f"barellm: error: {complaint}", error)


@linux
def test_a_rank_that_is_stopped_before_mpi_has_started_ends_the_run_under_mpirun(place):
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    done = by_mpi(place, ["-m", "barellm", *words(place, "early", "--steps", "4")], ["-c", stopped])
    assert done.returncode != 0
    line = r"barellm: error: rank 1 \(process \d+\) has been stopped for \d s: the run is ended"
    assert re.fullmatch(line, said(done)), done.stderr


APART = """
import argparse, sys
from barellm.distributed.dispatch import run_as_rank

def together(ranks):
    ranks.gather(None)

def asks(ranks):
    ranks.send(1 - ranks.rank, None)
    ranks.receive(1 - ranks.rank)

def serves(ranks):
    ranks.receive(1 - ranks.rank, no_timeout=True)

work = [eval(name) for name in sys.argv[1:]]
run_as_rank(argparse.Namespace(ranks=None), 2, lambda args, ranks: work[ranks.rank](ranks) or 0)
"""


@pytest.mark.parametrize("first, second, late", [("together", "serves", 1), ("asks", "together", 0)])
def test_ranks_that_wait_for_different_things_end_in_one_line(place, first, second, late):
    """As where one saves for the last time, and the other goes on: each had begun as many waits, and nobody spoke."""
    done = by_mpi(place, ["-c", APART, first, second])
    assert done.returncode != 0
    assert re.fullmatch(rf"barellm: error: rank {late} is \d s later than the others: the run is ended", said(done))


@linux
def test_ctrl_c_saves_once(place):
    started = Started(place, "stopped")
    started.launcher.send_signal(signal.SIGINT)
    status, error, seconds = started.end()
    assert status == 130 and seconds < 10
    assert error == "barellm: stopping after this step; once more to stop at once"
    (saved,) = checkpoint.steps(place / "stopped" / "checkpoints")
    assert checkpoint.problem(saved) is None


@linux
def test_ranks_that_are_all_killed_go_on_to_the_same_bytes(place):
    """By SIGKILL to them and to all that have started them, in the middle of a run that saves."""
    steps = ("--steps", "40", "--train.checkpoint_every", "5", "--train.eval_every", "10", "--train.save_total_limit", "99")
    assert run(place, "calm", *steps, "--ranks", "2").returncode == 0
    command = [sys.executable, "-m", "barellm", *words(place, "killed", *steps, "--ranks", "2")]
    launcher = subprocess.Popen(command, env=environment(place), cwd=place, stdout=subprocess.DEVNULL)
    folder = place / "killed" / "checkpoints"
    while not (folder.exists() and checkpoint.steps(folder)):
        assert launcher.poll() is None
        time.sleep(0.001)
    for process in [*below(launcher.pid), launcher.pid]:
        os.kill(process, signal.SIGKILL)
    launcher.wait()
    assert not checkpoint.step_folder(folder, 40).exists(), "it was killed too late to show anything"
    done = run(place, "killed", "--resume", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert tensors(place / "killed", 40) == tensors(place / "calm", 40)


@linux
def test_ranks_do_not_outlive_their_launcher(place):
    started = Started(place, "orphans")
    ranks = [started.rank(number) for number in range(2)]
    started.launcher.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SETTLED = """
import argparse, os
from barellm.distributed.dispatch import run_as_rank
run_as_rank(argparse.Namespace(ranks=None), 2, lambda args, ranks: print(sorted(os.sched_getaffinity(0)), flush=True) or 0)
"""


@pytest.mark.skipif(len(cores()) < 2, reason="one core")
def test_ranks_of_one_thread_each_have_cores_of_their_own(place, monkeypatch):
    """BARELLM_THREADS is a rank's, and says nothing of the cores that are dealt: two ranks have run on one."""
    monkeypatch.setenv("BARELLM_THREADS", "1")
    monkeypatch.setenv("BARELLM_PIN", "1")  # tests that run beside each other pin nothing
    done = by_mpi(place, ["-c", SETTLED])
    assert done.returncode == 0, done.stderr
    first, second = (set(json.loads(found)) for found in re.findall(r"\[.*?\]", done.stdout))
    assert first and second and not first & second
