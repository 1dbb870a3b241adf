"""Runs of several processes that are killed, stopped, held up or interrupted at random moments, with what becomes of each.

    python benchmarks/faults.py --trials 100 --out benchmarks/results/faults.json

A trial starts a small run as a user would, does one of these to it at some moment of its life, and waits for its end:

- kill: SIGKILL to one rank
- stop: SIGSTOP to one rank
- hold: the main thread of one rank is held by ptrace, so that the rank says that it is there, and does nothing
- slow: one rank is stopped and continued again and again for some seconds, and must not be taken for a lost one
- interrupt: SIGINT (Ctrl-C) to the launcher
- kill all: SIGKILL to all ranks and to everything that has started them

The moment is in the start of a run, in its steps, in an evaluation, while a checkpoint is written, or in the start of a run that
was killed and is resumed. All but the last kind must end within 30 s, with one line on stderr; for kill, stop and hold it names the
rank. Nothing may stay of its processes. Then every checkpoint must be whole, and the run resumed to its end must leave the same
bytes as one that was never disturbed. The file has a row for each. With --messages the ranks send each other messages, as those of
several machines do; else they read each other's memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from barellm.checkpoint import checkpoint, storage
from barellm.cpu.processor import brand, name
from barellm.distributed.supervisor import below, ranks_below

KINDS = ("kill", "stop", "hold", "slow", "interrupt", "kill all")
MOMENTS = ("start", "steps", "evaluation", "saving", "resume")
LONGEST_S = 30.0
STEPS = 240
EVERY, SAVES = 60, 20  # steps between two evaluations, and between two checkpoints
EVALUATION_S, SLOW_S = 0.15, 6.0
SEIZE, INTERRUPT = 0x4206, 0x4207  # requests of ptrace
RUN = (
    *("train", "shakespeare-char", "--steps", str(STEPS), "--batch", "12", "--seq", "8", "--train.eval_tokens", "8192"),
    *("--model.layers", "1", "--model.d_model", "32", "--model.heads", "2", "--model.max_seq", "8", "--optim.warmup", "1"),
    *("--train.eval_every", str(EVERY), "--train.checkpoint_every", str(SAVES), "--train.save_total_limit", "99"),
)
SAID = ("", "barellm: interrupted", "barellm: stopping after this step; once more to stop at once")  # to a user's Ctrl-C
Bytes = dict[str, bytes]


class Trials:
    """Runs in `place`, each of its own folder, whose ranks send messages or read each other's memory. `reference` is what a run
    leaves that nobody disturbs."""

    def __init__(self, place: Path, ranks: int, *, messages: bool = False) -> None:
        self.place, self.ranks, self.messages = place, ranks, messages
        (place / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
        begin = time.monotonic()
        assert self.finished(place / "reference") == (0, "")
        self.seconds = time.monotonic() - begin
        self.reference = left(place / "reference")

    def start(self, out: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "barellm", *RUN, "--data", str(self.place / "text.txt"), "--out", str(out), *more]
        command += ["--ranks", str(self.ranks)]
        own = os.environ | {"BARELLM_THREADS": "1", "BARELLM_MESSAGES": str(int(self.messages))}
        return subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finished(self, out: Path, *more: str) -> tuple[int, str]:
        process = self.start(out, *more)
        error = process.communicate(timeout=300)[1]
        return process.returncode, error

    def moment(self, name: str, r: random.Random, out: Path, process: subprocess.Popen[str]) -> None:
        """Wait for it."""

        def until(condition: Callable[[], bool], *, pause: float = 0.005) -> None:
            wait(lambda: process.poll() is not None or condition(), pause=pause)

        if name == "steps":
            step = r.randrange(STEPS)
            until(lambda: seen(out) >= step)
            time.sleep(r.random() * 0.05)
        elif name == "evaluation":
            step = EVERY * r.randrange(1, STEPS // EVERY + 1)
            until(lambda: seen(out) >= step)
            time.sleep(r.random() * EVALUATION_S)
        elif name == "saving":
            step = SAVES * r.randrange(1, STEPS // SAVES + 1)
            until(lambda: seen(out) >= step - 1, pause=0.001)
            temporary = out / "checkpoints" / f"{storage.TEMPORARY}step-{step:06d}"
            until(lambda: temporary.exists() or seen(out) > step, pause=0.0002)
            time.sleep(r.random() * 0.01)
        else:  # the time until a first step is about a third of that of all
            time.sleep(r.random() * self.seconds / 3)

    def one(self, number: int, seed: int) -> dict[str, Any]:
        r = random.Random(f"{seed} {number}")
        kind, moment = KINDS[number % len(KINDS)], MOMENTS[number // len(KINDS) % len(MOMENTS)]
        rank, out = r.randrange(self.ranks), self.place / f"trial-{number}"
        process = self.start(out)
        if moment == "resume":
            self.moment("steps", r, out, process)
            disturb("kill all", process, rank)
            process.communicate()
            process = self.start(out, *resumed(out))
        self.moment(moment, r, out, process)
        row: dict[str, Any] = {"trial": number, "ranks": self.ranks, "messages": self.messages}
        row |= {"kind": kind, "moment": moment, "rank": rank}
        row |= {"step": seen(out), "pid": disturb(kind, process, rank)}
        begin = time.monotonic()
        try:
            error = process.communicate(timeout=2 * LONGEST_S)[1].strip()
        except subprocess.TimeoutExpired:
            disturb("kill all", process, rank)
            error = process.communicate()[1].strip() + " (hung)"
        row |= {"seconds": round(time.monotonic() - begin, 2), "status": process.returncode, "said": error}
        row["behind"] = behind(out)
        found = checkpoint.steps(out / "checkpoints") if out.is_dir() else []
        row["broken"] = [str(path) for path in found if checkpoint.problem(path)]
        row["checkpoints"] = len(found)
        status, said = self.finished(out, *resumed(out))
        row |= {"resumed": status, "resume_said": said.strip(), "same": status == 0 and left(out) == self.reference}
        row["well"] = well(row)
        if row["well"]:
            shutil.rmtree(out)
        return row


def resumed(out: Path) -> tuple[str, ...]:
    """What goes on with a run that may not have begun yet."""
    return ("--resume",) if (out / "config.json").exists() else ()


def behind(out: Path) -> int:
    """How many processes there still are of a run that has ended, two seconds later."""
    for _ in range(20):
        found = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                found += str(out).encode() in path.read_bytes()
        if not found:
            return 0
        time.sleep(0.1)
    return found


def well(row: dict[str, Any]) -> bool:
    """Whether all is as it should be. A run may have ended before anything happened to it."""
    whole = not row["broken"] and not row["behind"] and row["same"] and row["seconds"] < LONGEST_S
    if row["kind"] == "kill all" or row["pid"] is None:
        return whole
    if row["kind"] == "interrupt":
        # `python -m` ends by the signal if that came in an exec of text, which dataclasses use: a shell calls both 130.
        return whole and row["status"] in (130, -signal.SIGINT, 0) and row["said"] in SAID
    if row["kind"] == "slow":
        return whole and (row["status"], row["said"]) == (0, "")
    lines = row["said"].splitlines()
    named = len(lines) == 1 and re.match(rf"barellm: error: rank {row['rank']} ", lines[0])
    return whole and (bool(named) or row["status"] == 0)


def disturb(kind: str, process: subprocess.Popen[str], rank: int) -> int | None:
    """Do it to a run. Gives the process that it was done to; None if the run has ended."""
    if kind == "interrupt":
        if process.poll() is not None:
            return None
        process.send_signal(signal.SIGINT)
        return process.pid
    if kind == "kill all":
        every = [*below(process.pid), process.pid]
        for number in every:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        return process.pid
    found: list[int] = []

    def there() -> bool:
        found[:] = [number for number, of in ranks_below(process.pid) if of == rank]
        return bool(found) or process.poll() is not None

    wait(there)
    with suppress(ProcessLookupError):
        for number in found:
            DISTURBANCES[kind](number)
            return number
    return None


def hold(process: int) -> None:
    """Until it is killed. A thread of its own does it, for the system tells whoever holds a process of its end, and nobody else
    before."""
    held = threading.Event()

    def holder() -> None:
        call = ctypes.CDLL(None).ptrace
        with suppress(ChildProcessError):
            done = [call(request, process, None, None) for request in (SEIZE, INTERRUPT)]
            held.set()
            while not any(done) and os.WIFSTOPPED(os.waitpid(process, 0)[1]):
                pass

    threading.Thread(target=holder, daemon=True).start()
    held.wait()


def slow(process: int) -> None:
    end = time.monotonic() + SLOW_S
    while time.monotonic() < end:
        for sign, seconds in ((signal.SIGSTOP, 1.0), (signal.SIGCONT, 0.1)):
            os.kill(process, sign)
            time.sleep(seconds)


DISTURBANCES: dict[str, Callable[[int], None]] = {
    "kill": lambda process: os.kill(process, signal.SIGKILL),
    "stop": lambda process: os.kill(process, signal.SIGSTOP),
    "hold": hold,
    "slow": slow,
}


def wait(condition: Callable[[], bool], *, pause: float = 0.005) -> None:
    while not condition():
        time.sleep(pause)


def seen(out: Path) -> int:
    """The last step in the metrics of a run."""
    with suppress(OSError, IndexError, ValueError):
        return int(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return -1


def left(out: Path) -> Bytes:
    """The tensors of a run's last checkpoint."""
    path = checkpoint.step_folder(out / "checkpoints", STEPS)
    return {name: (path / name).read_bytes() for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)}


def mpi() -> str:
    """The MPI of this environment, with its version."""
    for package in ("mpich", "openmpi"):
        with suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=int, default=2, help="trials at a time")
    parser.add_argument("--messages", action="store_true", help="ranks send messages, as between machines")
    parser.add_argument("--out", type=Path, help="rows are added to those of a file that is there")
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    about = {"processor": brand() or name(), "mpi": mpi()}
    kept = found.pop("trials", [])
    if found not in ({}, about):
        raise SystemExit(f"{args.out} has trials of {found}, and this is {about}: expected a new file")
    with tempfile.TemporaryDirectory(prefix="barellm-faults-") as folder, ThreadPoolExecutor(args.beside) as pool:
        trials = Trials(Path(folder), args.ranks, messages=args.messages)
        numbers = range(args.first, args.first + args.trials)
        for row in pool.map(lambda number: trials.one(number, args.seed), numbers):
            kept.append(row)
            print(json.dumps(row), flush=True)
            if args.out:
                args.out.write_text(json.dumps(about | {"trials": kept}, indent=1) + "\n")
    bad = sum(not row["well"] for row in kept)
    print(f"{len(kept)} trials, {bad} not as they should be, the slowest end {max(row['seconds'] for row in kept):.1f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
