"""Kills and errors of the disk at random calls of every command that writes: the same command then ends with the same bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from barellm.cli.main import main
from barellm.cpu.isa import host
from barellm.native import build
from tests.interop import models
from tests.native.test_native import pytestmark  # noqa: F401

ROOT = Path(__file__).parents[2]
SIZES = ("--model.layers", "1", "--model.heads", "2", "--model.d_model", "8", "--model.max_seq", "16", "--seq", "16")
SIZES += ("--batch", "2", "--steps", "4", "--train.eval_every", "2", "--train.eval_tokens", "64", "--optim.warmup", "1")
SIZES += ("--train.checkpoint_every", "2", "--train.save_total_limit", "1")
KINDS = {"kill": "kill", "ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
TRIALS = {"train": 30, "import": 20, "quantize": 15, "prepare": 20, "export-huggingface": 12, "export-llmc": 5}
TRIALS |= {"export-gguf": 5, "build": 10, "native": 21, "ranks": 12}
SAVES = {"open", "write", "posix_fallocate", "fsync", "mkdir", "rename"}
CALLS = {
    "train": SAVES | {"pwrite", "unlink", "rmdir"},
    "ranks": SAVES | {"pwrite", "unlink", "rmdir"},
    "prepare": {"open", "write", "fsync", "mkdir", "rename", "unlink"},
    "build": {"open", "write", "sendfile", "mkdir", "rename"},
    "native": {"open", "write", "pwrite", "fsync", "mkdir", "rename", "unlinkat"},
    "export-llmc": SAVES - {"mkdir"},
    "export-gguf": {"open", "fsync", "rename"},
}
TIMES = ("seconds", "seconds_all_sessions", "tokens_per_s")


@dataclass
class Done:
    status: int
    stdout: str
    stderr: str


class Place:
    """The inputs of all commands, and a folder `work` for what one of them makes. All trials have one path: files name it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work, self.preloaded = folder, folder / "work", folder / "disk.so"
        source = [str(Path(__file__).with_name("disk.c")), "-shared", "-fPIC", "-O1", "-ldl", "-o", str(self.preloaded)]
        subprocess.run([*build.compiler(host()), *source], check=True)
        (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
        environment = {"LD_PRELOAD": str(self.preloaded), "PYTHONPATH": str(ROOT), "BARELLM_RANK_LIMIT": "5"}
        for number in range(3):  # for prepare
            (folder / f"text{number}.txt").write_text("".join(f"{number} + {i} is {number + i}.\n" for i in range(200)))
        self.env = os.environ | environment | {"BARELLM_CACHE": os.environ["BARELLM_CACHE"], "BARELLM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            env=self.env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def command(self, name: str) -> list[str]:
        """Without `barellm`; a path where it is another program."""
        out, text, kind = str(self.work / "out"), str(self.folder / "text.txt"), name.removeprefix("export-")
        data = self.folder / "program/data"
        return {
            "train": ["train", "shakespeare-char", "--data", text, "--out", out, *SIZES, "--device", "reference"],
            "ranks": ["train", "shakespeare-char", "--data", text, "--out", out, *SIZES, "--ranks", "2"],
            "import": ["import", str(self.folder / "theirs"), "--tokenizer", "bytes", "--out", out],
            "quantize": [
                *("quantize", str(self.folder / "ours"), "--weights", "int8", "--tokens", "0"),
                *("--device", "reference", "--out", out),
            ],
            "prepare": ["prepare", f"{self.folder}/text*.txt", "--tokenizer", "chars", "--shard-tokens", "1000", "--out", out],
            "build": ["build", "shakespeare-char", "--data", text, *SIZES, "--out", out],
            "native": [
                *(str(self.folder / "program/train"), "--train", f"{data}/train_*.bin", "--val", f"{data}/val_*.bin"),
                *("--threads", "1", "--out", out),
            ],
        }.get(name) or ["export", str(self.folder / "ours"), "--format", kind, "--out", out]

    def run(self, command: list[str], **faults: object) -> Done:
        """One process, whose calls below `work` are logged."""
        told = {"under": self.work, "log": self.log, "count": self.folder / "count", "first": 0, "do": "kill"} | faults
        for path in (self.log, self.folder / "count"):
            path.unlink(missing_ok=True)
        env = {f"FAULTS_{name.upper()}": str(value) for name, value in told.items()}
        streams = {name: str(self.folder / name) for name in ("stdout", "stderr")}
        if "--ranks" in command or command[0].startswith("/"):
            command = command if command[0].startswith("/") else [sys.executable, "-m", "barellm", *command]
            with open(streams["stdout"], "wb") as out, open(streams["stderr"], "wb") as err:
                done = subprocess.run(command, env=self.env | env, cwd=self.folder, stdout=out, stderr=err, timeout=240)
            status = done.returncode
        else:
            assert self.server.stdin and self.server.stdout
            self.server.stdin.write(json.dumps({"argv": command, "env": env, **streams}) + "\n")
            self.server.stdin.flush()
            status = int(self.server.stdout.readline())
        return Done(status, *(Path(path).read_text(errors="replace") for path in streams.values()))

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def clean(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def state(self) -> dict[str, Any]:
        """Every file below `work`, without what depends on the time that it took."""
        return {
            str(path.relative_to(self.work)): timeless(path) if path.is_file() else "folder"
            for path in sorted(self.work.rglob("*"))
        }

    def finished(self, command: list[str]) -> Done:
        """The same command again, as its own words say: with --resume where there is something to resume. Where all was there
        already, it says so."""
        done = self.run(command)
        if done.status == 2 and "resume it with --resume" in done.stderr:
            done = self.run([*command, "--resume"])
        elif done.status == 2 and (" is not empty (it has checkpoints/step-" in done.stderr or said_there(done.stderr)):
            done.status = 0
        return done


def said_there(error: str) -> bool:
    return "/out exists, expected a new " in error or "/out is not empty: name another folder" in error


def timeless(path: Path) -> Any:
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return [masked(json.loads(line)) for line in data.splitlines()]
    return masked(json.loads(data)) if (path.suffix == ".json" and b'"seconds"' in data) or path.name == "manifest.json" else data


def masked(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: masked(part) for name, part in value.items() if name not in TIMES}
        if "meta.json" in value.get("files", ()):  # its hash
            del kept["files"]["meta.json"]
        return kept
    return [masked(part) for part in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trials")
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        made = Place(folder)
        arrays = models.random_arrays(models.TINY)
        models.hugging_face(folder / "theirs", models.TINY, models.their_tensors(arrays))
        models.checkpoint_of(folder / "ours", models.TINY, arrays)
        assert main(["build", "shakespeare-char", "--data", str(folder / "text.txt"), *SIZES, "-o", f"{folder}/program"]) == 0
        yield made
        assert made.server.stdin
        made.server.stdin.close()
        made.server.wait(60)


def trials(place: Place, name: str, count: int, seed: int) -> tuple[Counter, list[str]]:
    """Outcomes of so many trials of a command, and what was wrong."""
    draw, command = random.Random(f"{name} {seed}"), place.command(name)
    place.clean()
    whole = place.run(command)
    assert whole.status == 0, whole
    calls, expected = place.log.read_text().splitlines(), place.state()
    assert CALLS.get(name, SAVES) <= {line.split()[0] for line in calls}, "a call that is not counted never fails"
    outcomes, wrong = Counter(), []
    for _ in range(count):
        n, kind = draw.randint(1, len(calls)), draw.choice(list(KINDS))
        place.clean()
        done = place.run(command, first=n, do=KINDS[kind])
        where = f"{name}, {kind} at call {n}, {calls[n - 1]}"
        own = [line for line in done.stderr.splitlines() if line not in whole.stderr.splitlines()]
        said = [line for line in own if not line.startswith("warning: ")]
        outcomes[kind, done.status] += 1
        killed = kind == "kill" and done.status == -signal.SIGKILL
        good = killed or (done.status == 0 and not said) or (done.status == 2 and len(said) == 1)
        if kind == "kill" and name == "ranks":  # the launcher tells which rank is gone
            good = done.status == 1 and len(said) == 1 and "was ended by SIGKILL" in said[0]
        elif kind == "kill" and name != "build":  # there it may be the compiler that is killed
            good = killed
        if not good:
            wrong.append(f"{where}: exit {done.status}, {done.stderr[-1500:]}")
        again = place.finished(command)
        found = place.state()
        if again.status:
            wrong.append(f"{where}: after {done.stderr[-300:]!r} again exit {again.status}, {again.stderr[-1500:]}")
        elif found != expected:
            names = [path for path in sorted({*found, *expected}) if found.get(path) != expected.get(path)]
            more = [str(d.get(names[0]))[-1200:] for d in (found, expected)] if names[0].endswith("l") else ""
            wrong.append(f"{where}: after exit {done.status} {done.stderr[-300:]!r} not the same: {names} {more} {again}")
    return outcomes, wrong


def possible(name: str) -> None:
    if name == "ranks" and not find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed")
    if name == "export-gguf" and not find_spec("gguf"):
        pytest.skip("the package gguf is not installed")


@pytest.mark.extended
def test_a_dozen_faults(place):
    """In one test: of several, each process that runs tests would build the program."""
    names = [name for name in TRIALS if name not in ("ranks", "build", "export-gguf")]
    wrong = [line for name in names for line in trials(place, name, 2, seed=0)[1]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.extended
@pytest.mark.parametrize("name", TRIALS)
def test_150_faults(place, name):
    possible(name)
    outcomes, wrong = trials(place, name, TRIALS[name], seed=int(os.environ.get("TRIALS_SEED", "1")))
    print(name, dict(outcomes))
    assert not wrong, "\n".join(wrong)
