"""A program without Python keeps a run on a disk that fails, and when it is killed: faults/disk.c fails its calls one by one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from barellm.checkpoint import checkpoint
from barellm.checkpoint.folder import RunFolder
from barellm.cli.main import main
from barellm.cpu.isa import host
from barellm.data.shards import TokenStream, open_shard, write_shard
from barellm.errors import UserError
from barellm.native import build
from barellm.training import metrics
from tests.native.test_native import FILES, numbers, pytestmark  # noqa: F401

STEPS = 12
SIZES = ("--model.layers", "1", "--model.heads", "2", "--model.d_model", "16", "--model.max_seq", "16", "--seq", "16")
SIZES += ("--batch", "1", "--steps", str(STEPS), "--train.eval_every", "2", "--train.eval_tokens", "64")
SIZES += ("--train.checkpoint_every", "4", "--train.save_total_limit", "1", "--train.keep_every", "8", "--optim.warmup", "2")
TEXT = "".join(f"{i} squared is {i * i}.\n" for i in range(300))
FOR_EVER = "1000000000"


class Program:
    """A program, the library that makes a disk fail, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults, self.data = folder, folder / "faults.so", folder / "program/data"

    def command(self, run: Path | None, *options: str, data: Path | None = None) -> list:
        data = data or self.data
        shards = ["--train", data / "train_*.bin", "--val", data / "val_*.bin"]
        return [self.folder / "program/train", *shards, "--threads", "1", *(("--out", run) if run else ()), *options]

    def environment(self, run: Path, **faults: object) -> dict:
        log = run.with_name(f"{run.name}.log")
        log.unlink(missing_ok=True)
        told = {f"FAULTS_{name.upper()}": str(value) for name, value in faults.items()}
        return {"LD_PRELOAD": str(self.faults), "FAULTS_UNDER": str(run), "FAULTS_LOG": str(log), **told}

    def train(self, run: Path, *options: str, **faults: object) -> subprocess.CompletedProcess:
        env = self.environment(run, **faults) if faults else {}
        return subprocess.run(self.command(run, *options), env=env, capture_output=True, text=True, errors="replace", timeout=120)

    def calls(self, run: Path) -> list[str]:
        return run.with_name(f"{run.name}.log").read_text().splitlines()

    def places(self, calls: list[str]) -> list[tuple[int, str]]:
        """The calls with their numbers. Of writes to one file in a row the first and the last."""
        around = zip(["", *calls], calls, [*calls[1:], ""], strict=False)
        return [(n, line) for n, (a, line, b) in enumerate(around, 1) if not a == line == b]

    def logged(self, run: Path, *options: str) -> list[str]:
        """The calls of a run that nothing disturbs."""
        done = self.train(run, *options, first=0, do="kill")
        assert done.returncode == 0, done.stderr
        return self.calls(run)

    @contextmanager
    def halted(self, run: Path, call: int, *, data: Path | None = None, streams: str = "") -> Iterator[Any]:
        """A process that stands still before a call, and goes on behind the block."""
        env = self.environment(run, first=call, do="stop")
        command = ["sh", "-c", f'exec "$@" {streams}', "sh", *self.command(run, data=data)]
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
                yield process
                process.send_signal(signal.SIGCONT)
                process.said = process.communicate(timeout=60)[1]
            finally:
                process.kill()

    def first_save(self, tmp_path: Path) -> int:
        """The number of the call that begins the first save."""
        return self.logged(tmp_path / "counted").index("mkdir /checkpoints") + 1


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Program:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        patch.setenv("BARELLM_THREADS", "2")
        options = ["shakespeare-char", "--data", str(folder / "text.txt"), *SIZES, "-o", str(folder / "program")]
        assert main(["build", *options]) == 0
    made = Program(folder)
    source = str(Path(__file__).parents[1] / "faults/disk.c")
    library = [source, "-shared", "-fPIC", "-O1", "-ldl", "-o", str(made.faults)]
    subprocess.run([*build.compiler(host()), *library], check=True)
    assert made.train(folder / "whole").returncode == 0
    assert made.train(folder / "begun", "--stop", "7").returncode == 0
    return made


def state(run: Path) -> tuple:
    """Everything of a run that no fault may change."""
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    path, wrong = checkpoint.find(run)
    return folders, wrong, path.name, [(path / name).read_bytes() for name in FILES], numbers(run)


def damaged(path: Path, name: str, *, cut: int = 0) -> None:
    content = bytearray((path / name).read_bytes())
    content[-2] ^= 1
    (path / name).write_bytes(content[: len(content) - cut])


def with_files(path: Path, **changed: bytes) -> None:
    """A checkpoint with other contents, whose manifest is right."""
    manifest = json.loads((path / checkpoint.MANIFEST).read_bytes())
    for name, data in {name.replace("_", "."): data for name, data in changed.items()}.items():
        (path / name).write_bytes(data)
        manifest["files"][name] = {"bytes": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


# --- killed ---


@pytest.mark.extended
def test_a_program_that_is_killed_at_any_call_loses_nothing(program, tmp_path):
    """With half of the bytes written where the call is a write. The checkpoint from before is there, and the run ends alike."""
    expected = state(program.folder / "whole")
    assert [step for kind, step, *_ in expected[-1] if kind == "train"] == list(range(1, STEPS + 1))
    shutil.copytree(program.folder / "begun", tmp_path / "counted")
    calls = program.logged(tmp_path / "counted")
    kinds = {line.split()[0] for line in calls}
    assert kinds == {"open", "write", "pwrite", "fsync", "rename", "mkdir", "unlink", "unlinkat", "rmdir"}
    for n, call in program.places(calls):
        run = tmp_path / "run"
        shutil.copytree(program.folder / "begun", run)
        killed = program.train(run, first=n, do="kill")
        assert killed.returncode == -signal.SIGKILL, (n, call)
        path, wrong = checkpoint.find(run)
        assert checkpoint.step_of(path) >= 7 and not wrong, (n, call)
        rows = [row for row in numbers(run) if row[0] == "train"]
        assert rows == [row for row in expected[-1] if row[0] == "train"][: len(rows)] and len(rows) >= 7, (n, call)
        again = program.train(run)
        assert again.returncode == 0 and not again.stderr, (n, call, again.stderr)
        assert state(run) == expected, (n, call)
        shutil.rmtree(run)


@pytest.mark.extended
def test_what_gets_its_name_is_on_the_disk(program, tmp_path):
    """After a power cut a file has what was synced: all of it is before the rename, and the rename before anything is removed."""
    shutil.copytree(program.folder / "begun", tmp_path / "run")
    calls = [line.split(" ", 1) for line in program.logged(tmp_path / "run")]
    renames = [(i, *path.split(f" -> {tmp_path}/run")) for i, (name, path) in enumerate(calls) if name == "rename"]
    published = [found for found in renames if "/.tmp-" not in found[2]]
    assert [new for _, _, new in published] == [
        "/metrics.jsonl", "/checkpoints/step-000008", "/checkpoints/step-000012"
    ]  # fmt: skip
    for at, old, new in published:
        before = calls[:at]
        written = {path for name, path in before if name in ("open", "write", "pwrite") and path.startswith(old)}
        folder = ["mkdir", old] in before
        assert len(written) == (5 if folder else 1)
        for path in written:
            last = max(i for i, (name, p) in enumerate(before) if p == path and name != "fsync")
            assert ["fsync", path] in before[last:], path
        if folder:
            last = max(i for i, (name, p) in enumerate(before) if p.startswith(f"{old}/"))
            assert ["fsync", old] in before[last:], "its list of files"
        assert calls[at + 1] == ["fsync", str(Path(new).parent).rstrip("/")]
    assert calls[calls.index(["mkdir", "/checkpoints"]) + 1][0] == "mkdir", "nothing to sync: it was there"
    first = [line.split(" ", 1) for line in program.logged(tmp_path / "first")]
    assert first[first.index(["mkdir", "/checkpoints"]) + 1] == ["fsync", ""], "the name of a folder that is new"


# --- a disk that fails ---


@pytest.mark.extended
def test_an_error_of_the_disk_costs_one_checkpoint_or_ends_in_one_line(program, tmp_path):
    """A save on the way costs itself. Where the run can't begin or its last save fails, the line names the path; the same command
    goes on from there."""
    expected = state(program.folder / "whole")
    calls = program.logged(tmp_path / "counted")
    saves = [i for i, line in enumerate(calls) if line == "mkdir /checkpoints"]
    assert len(saves) == 3
    for n, line in program.places(calls):
        run = tmp_path / "run"
        done = program.train(run, first=n, do=errno.EIO)
        said = done.stderr.splitlines()
        if line.startswith("pwrite /metrics.jsonl"):  # the next row takes it along, and where none comes it is lost
            assert done.returncode == 0 and [s[:34] for s in said] == ["warning: metrics wait in memory: /"]
        elif n <= saves[0] or n > saves[2]:
            assert done.returncode == 2 and said[-1].startswith("train: error: ") and len(said) == 1, (line, said)
            assert str(run) in said[0] and said[0].endswith(": Input/output error"), (line, said)
        else:
            step = 4 if n <= saves[1] else 8
            assert done.returncode == 0 and len(said) == 1, (line, said)
            assert said[0].startswith(f"warning: no checkpoint of step {step}: {run}/"), said
            assert said[0].endswith(": Input/output error"), said
        assert program.train(run).returncode == 0
        assert state(run)[1:] == expected[1:], line
        assert not list((run / "checkpoints").glob(".tmp-*"))
        shutil.rmtree(run)


def test_the_last_save_waits_for_room_on_a_full_disk(program, tmp_path):
    calls = program.logged(tmp_path / "counted")
    at = calls.index("open /checkpoints/.tmp-step-000012/weights.safetensors") + 1
    run = tmp_path / "run"
    # Each try opens a file behind two folders and removes one: the first is cut short by the first error, and so on.
    done = program.train(run, first=at, last=at + 5, do=errno.ENOSPC)
    said = done.stderr.splitlines()
    assert done.returncode == 0 and program.calls(run).count("sleep ") == len(said) > 1, done.stderr
    for i, line in enumerate(said):
        assert line.startswith(f"warning: {run}/checkpoints") and ": No space left on device. The last" in line
        assert line.endswith(f"is tried again every 10 s, {3600 - 10 * i} s more. Ctrl-C gives up")
    assert state(run) == state(program.folder / "whole")


@pytest.mark.parametrize("sleep, tries", [({}, 360), ({"sleep": int(signal.SIGINT)}, 1)])
def test_the_last_save_gives_up_after_an_hour_or_at_ctrl_c(program, tmp_path, sleep, tries):
    calls = program.logged(tmp_path / "counted")
    at = calls.index("mkdir /checkpoints/.tmp-step-000012") + 1
    done = program.train(tmp_path / "run", first=at, last=FOR_EVER, do=errno.ENOSPC, **sleep)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("train: error: ")
    assert program.calls(tmp_path / "run").count("sleep ") == tries
    assert program.train(tmp_path / "run").returncode == 0
    assert state(tmp_path / "run") == state(program.folder / "whole"), "the two before it stayed"


def test_rows_wait_for_room_on_a_full_disk(program, tmp_path):
    """Those that could not be written come behind, in order, when there is room."""
    calls = program.logged(tmp_path / "counted")
    at = [i for i, line in enumerate(calls) if line.startswith("pwrite")][3]
    done = program.train(tmp_path / "run", first=at + 1, last=at + 2, do=errno.ENOSPC)
    assert done.returncode == 0 and done.stderr.count("metrics wait in memory") == 1
    assert numbers(tmp_path / "run") == numbers(program.folder / "whole")


# --- a run's folder ---


def test_one_process_writes_to_a_run(program, tmp_path):
    run = tmp_path / "run"
    call = program.first_save(tmp_path)
    with program.halted(run, call) as process:
        with pytest.raises(UserError, match="another barellm process is writing to"):
            RunFolder(run, resume=True).__enter__()
        done = program.train(run)
        assert (done.returncode, done.stderr) == (2, f"train: error: another barellm process is writing to {run}\n")
    assert process.returncode == 0 and state(run) == state(program.folder / "whole")
    fd = os.open(run, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        assert program.train(run).returncode == 2
    finally:
        os.close(fd)


@pytest.mark.parametrize("cut", [0, 4])
@pytest.mark.parametrize("name", [*FILES, "meta.json", "tokenizer.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_and_written_again(program, tmp_path, name, cut):
    run, folder = tmp_path / "run", tmp_path / "run/checkpoints"
    shutil.copytree(program.folder / "whole", run)
    damaged(folder / "step-000012", name, cut=cut)
    problem = checkpoint.problem(folder / "step-000012")
    done = program.train(run)
    said = f"{folder}/step-000012: {problem}" + ", or of another version" * (name == "manifest.json")
    assert (done.returncode, done.stderr) == (0, f"warning: skipped {said}\n"), "as Python says it"
    assert "step 8 of 12," in done.stdout
    assert state(run) == state(program.folder / "whole")


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(program, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(program.folder / "whole", run)
    for path in checkpoint.steps(run / "checkpoints"):
        (path / checkpoint.WEIGHTS).unlink()
    before = (run / "metrics.jsonl").read_bytes()
    done = program.train(run)
    said = done.stderr.splitlines()
    assert done.returncode == 2 and said[-1] == f"train: error: no checkpoint in {run}/checkpoints is whole"
    assert said[0] == f"warning: skipped {run}/checkpoints/step-000012: weights.safetensors is missing"
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_whose_checkpoints_cannot_be_listed_does_not_begin_anew(program, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(program.folder / "begun", run)
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").write_text("")
    before = (run / "metrics.jsonl").read_bytes()
    done = program.train(run)
    assert (done.returncode, done.stderr) == (2, f"train: error: {run}/checkpoints: Not a directory\n")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_later_checkpoint_that_is_damaged_does_not_count(program, tmp_path):
    """With train.save_total_limit 1 it would push out the one that the run goes on from."""
    run, folder = tmp_path / "run", tmp_path / "run/checkpoints"
    assert program.train(run, "--stop", "5").returncode == 0
    shutil.copytree(program.folder / "whole/checkpoints/step-000012", folder / "step-000099")
    damaged(folder / "step-000099", checkpoint.WEIGHTS)
    done = program.train(run, "--stop", "6")
    assert done.returncode == 0 and "step-000099" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["step-000006", "step-000099"]
    assert checkpoint.find(run)[0].name == "step-000006"


def test_names_that_are_no_steps_and_links_stay(program, tmp_path):
    """What is called like a temporary folder is removed, but a link's target is somebody else's."""
    run, folder, elsewhere = tmp_path / "run", tmp_path / "run/checkpoints", tmp_path / "elsewhere"
    assert program.train(run, "--stop", "5").returncode == 0
    others = ["step-12", "step-", "step-000012x", "step-+00012", "step--00001"]
    for name in others:
        (folder / name).mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("somebody's")
    (folder / ".tmp-link").symlink_to(elsewhere)
    (folder / ".tmp-step-000012").mkdir()
    (folder / ".tmp-step-000012" / "unknown").write_text("half")
    assert program.train(run).returncode == 0
    assert (elsewhere / "file").read_text() == "somebody's"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*others, "step-000008", "step-000012"])


def test_a_finished_run_is_left_as_it_is_and_cleaned(program, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(program.folder / "whole", run)
    (run / "checkpoints/.tmp-step-000004").mkdir()
    for options in ((), ("--stop", "3")):
        done = program.train(run, *options)
        assert done.returncode == 0 and "step 1/" not in done.stdout
        assert state(run) == state(program.folder / "whole")


def test_stop_at_a_step_that_is_past_stops_at_once(program, tmp_path):
    shutil.copytree(program.folder / "begun", tmp_path / "run")
    done = program.train(tmp_path / "run", "--stop", "5")
    assert done.returncode == 0 and "\nstopped after step 7\n" in done.stdout and "step 8/" not in done.stdout


@pytest.mark.parametrize(
    "tail", [b'{"kind": "train", "step": 7, "lo', b"\0" * 40 + b"\n", b'{"kind": "tr\n{"kind": "train", "step": 6}\n']
)
def test_a_row_that_was_cut_short_is_dropped(program, tmp_path, tail):
    shutil.copytree(program.folder / "begun", tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert program.train(tmp_path / "run").returncode == 0
    assert state(tmp_path / "run") == state(program.folder / "whole")


@pytest.mark.parametrize(
    "key, value", [("step", 5.5), ("step", -1), ("step", 13), ("total_steps", None), ("seconds", 1e300), ("step", 1e300)]
)
def test_numbers_of_a_checkpoint_are_whole_and_in_range(program, tmp_path, key, value):
    path = tmp_path / "run/checkpoints/step-000007"
    shutil.copytree(program.folder / "begun", tmp_path / "run")
    meta = checkpoint.read_meta(path) | {key: value}
    with_files(path, meta_json=(json.dumps(meta, indent=2) + "\n").encode())
    done = program.train(tmp_path / "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{path}: meta.json has no {key} up to" in done.stderr


def test_weights_that_diverged_push_no_checkpoint_out(program, tmp_path):
    run, path = tmp_path / "run", tmp_path / "run/checkpoints/step-000001"
    assert program.train(run, "--stop", "1").returncode == 0
    weights = (path / checkpoint.WEIGHTS).read_bytes()
    nan = np.full(len(weights) // 8, np.nan, "<f4").tobytes()
    with_files(path, weights_safetensors=weights[: -len(nan)] + nan)
    done = program.train(run, "--stop", "3")
    assert done.returncode == 0 and [p.name for p in checkpoint.steps(run / "checkpoints")] == [
        "step-000003", "step-000001"
    ]  # fmt: skip
    shutil.rmtree(run / "checkpoints/step-000003")
    done = program.train(run)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "was not finite for 10 steps up to step 11 (loss nan" in done.stderr
    assert done.stderr.endswith(f"; {path} is the last checkpoint\n")
    assert checkpoint.steps(run / "checkpoints") == [path]
    assert [row["loss"] for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"][1:] == [None] * 10


def test_a_run_that_ended_with_weights_that_diverged_keeps_the_ones_before(program, tmp_path):
    """Also when the same command comes again and has nothing to do."""
    run, path = tmp_path / "run", tmp_path / "run/checkpoints/step-000011"
    assert program.train(run, "--stop", "11").returncode == 0
    weights = (path / checkpoint.WEIGHTS).read_bytes()
    nan = np.full(len(weights) // 8, np.nan, "<f4").tobytes()
    with_files(path, weights_safetensors=weights[: -len(nan)] + nan)
    for _ in range(2):
        assert program.train(run).returncode == 2  # there is nothing to sample
        found = [p.name for p in checkpoint.steps(run / "checkpoints")]
        assert found == ["step-000012", "step-000011", "step-000008"]


# --- signals and streams ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_a_second_one_ends_at_once(program, tmp_path, number):
    call = program.first_save(tmp_path)
    with program.halted(tmp_path / "once", call) as process:
        process.send_signal(number)
    assert process.returncode == 128 + number
    assert process.said == "\nbarellm: stopping after this step; once more to stop at once\n"
    assert checkpoint.find(tmp_path / "once")[0].name == "step-000004"
    with program.halted(tmp_path / "twice", call) as process:
        process.send_signal(number)
        process.send_signal(signal.SIGTERM if number != signal.SIGTERM else signal.SIGINT)
    assert process.returncode > 128 and process.said.endswith("barellm: stopped at once, without a checkpoint of the last steps\n")
    assert not checkpoint.steps(tmp_path / "twice/checkpoints")
    assert program.train(tmp_path / "twice").returncode == 0
    assert state(tmp_path / "twice") == state(program.folder / "whole")


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-", ">/dev/full 2>/dev/full", ">&- 2>/dev/full"])
def test_streams_that_are_closed_or_full_cost_the_text_only(program, tmp_path, streams):
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", *program.command(tmp_path / "run")]
    assert subprocess.run(command, env={}, capture_output=True).returncode == 0
    assert state(tmp_path / "run") == state(program.folder / "whole")


def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(program, tmp_path):
    """What is printed would go into it."""
    with program.halted(tmp_path / "run", 1, streams="<&- >&- 2>&-") as process:
        found = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
    assert found == ["/dev/null"] * 3 and process.returncode == 0


def test_a_reader_that_went_away_ends_the_run_with_a_checkpoint(program, tmp_path):
    with subprocess.Popen(program.command(tmp_path / "run"), env={}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 141
    found = checkpoint.step_of(checkpoint.find(tmp_path / "run")[0])
    assert 0 < found <= STEPS
    assert program.train(tmp_path / "run").returncode == 0
    assert state(tmp_path / "run") == state(program.folder / "whole")


# --- shards ---


def test_a_stream_of_several_shards_is_that_of_one(program, tmp_path, monkeypatch):
    """Of either width, as `barellm build` cuts them too."""
    tokens = open_shard(next(program.data.glob("train_*.bin")))
    for magic, name in ((20240520, "narrow"), (20240801, "wide")):
        (tmp_path / name).mkdir()
        for i, (a, b) in enumerate([(0, 1), (1, 700), (700, 707), (707, len(tokens))]):
            write_shard(tmp_path / name / f"train_{i}.bin", [tokens[a:b]], magic=magic)
        shutil.copy(next(program.data.glob("val_*.bin")), tmp_path / name)
    monkeypatch.setattr(build, "SHARD_TOKENS", 1000)
    (tmp_path / "cut").mkdir()
    build._write_shards(tmp_path / "cut", "train", TokenStream([tokens], name="text"), 65)
    shutil.copy(next(program.data.glob("val_*.bin")), tmp_path / "cut")
    counts = [len(open_shard(path)) for path in sorted((tmp_path / "cut").glob("train_*"))]
    assert counts == [1000] * (len(tokens) // 1000) + [len(tokens) % 1000]
    for name in ("narrow", "wide", "cut"):
        run = tmp_path / f"run-{name}"
        few = ["sh", "-c", 'ulimit -Sn 8; exec "$@"', "sh"]  # open files, below what all shards are
        command = [*few, *program.command(run, data=tmp_path / name)]
        assert subprocess.run(command, env={}, capture_output=True).returncode == 0
        assert state(run) == state(program.folder / "whole")


def copied(program: Program, folder: Path) -> SimpleNamespace:
    shutil.copytree(program.data, folder)
    return SimpleNamespace(**{name: next(folder.glob(f"{name}_*.bin")) for name in ("train", "val")})


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_a_shard_of_another_size_than_it_says_is_refused(program, tmp_path, change):
    shards = copied(program, tmp_path / "data")
    size = shards.train.stat().st_size + change
    os.truncate(shards.train, size)
    done = subprocess.run(program.command(None, data=tmp_path / "data"), env={}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{shards.train} is not a shard of tokens: " in done.stderr and f"in {size} bytes" in done.stderr


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_shard_that_is_cut_short_meanwhile_costs_no_step(program, tmp_path, name):
    """The steps before are saved, and the line names the file. Nothing is trained on zeros."""
    shards = copied(program, tmp_path / "data")
    run = tmp_path / "run"
    calls = program.logged(tmp_path / "counted")
    first = next(i for i, line in enumerate(calls, 1) if line.endswith("/step-000004"))
    rows = [i for i, line in enumerate(calls, 1) if i > first and line.startswith("pwrite")]
    with program.halted(run, rows[2], data=tmp_path / "data") as process:  # behind step 6
        os.truncate(getattr(shards, name), 1024 + 20)
    said = f"train: error: {getattr(shards, name)}: it has become shorter while the program read it\n"
    assert (process.returncode, process.said) == (2, said)
    path, wrong = checkpoint.find(run)
    assert path.name == "step-000006" and not wrong
    assert program.train(run).returncode == 0
    assert state(run)[1:] == state(program.folder / "whole")[1:]


# --- numbers ---


@pytest.mark.parametrize(
    "option, value",
    [
        *[("--stop", value) for value in ("x", "", "5x", "-1", " 5", "+5", "0x5", "1e1", "99999999999999999999")],
        *[("--threads", value) for value in ("x", "1.5", "4294967297", "-1")],
    ],
)
def test_a_number_that_is_none_is_refused_by_train(program, tmp_path, option, value):
    done = program.train(tmp_path / "run", option, value)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert done.stderr.startswith(f"train: error: {option} is {value}, expected a whole number from 0 to ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options, says",
    [
        (("--ids", "4294967297"), "one of --ids is 4294967297, expected a whole number from 0 to {last}"),
        (("--ids", "{vocabulary}"), "one of --ids is {vocabulary}, expected a whole number from 0 to {last}"),
        (("--ids", "1,,2"), "one of --ids is , expected"),
        (("--ids", "1,-2"), "one of --ids is -2, expected"),
        (("--seed", "-1"), "--seed is -1, expected a whole number from 0 to 18446744073709551615"),
        (("--seed", "18446744073709551616"), "--seed is 18446744073709551616, expected"),
        (("--max-new-tokens", "2.5"), "--max-new-tokens is 2.5, expected a whole number from 1 to"),
        (("--top-k", "1e3"), "--top-k is 1e3, expected a whole number"),
        (("--temperature", "0.5x"), "--temperature is 0.5x, expected a number"),
        (("--temperature", "nan"), "--temperature is nan, expected a number"),
        (("--min-p", "0x1"), "--min-p is 0x1, expected a number"),
        (("--top-p", ""), "--top-p is , expected a number"),
    ],
)
def test_a_number_that_is_none_is_refused_by_sample(program, options, says):
    known = {"vocabulary": len(set(TEXT)), "last": len(set(TEXT)) - 1}
    command = [program.folder / "program/sample", "--run", program.folder / "whole"]
    done = subprocess.run([*command, *(o.format(**known) for o in options)], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"sample: error: {says.format(**known)}")
    last = str(known["last"])
    done = subprocess.run([*command, "--ids", last, "--max-new-tokens", "1"], capture_output=True)
    assert done.returncode == 0 and len(done.stdout) == 3, "the last id is one"


def test_an_id_that_equals_the_vocabulary_is_refused(program):
    lib = ctypes.CDLL(str(program.folder / "program/libbarellm.so"))
    lib.barellm_open.restype, lib.barellm_error.restype = ctypes.c_void_p, ctypes.c_char_p
    lib.barellm_token.restype, lib.barellm_sample.restype = ctypes.c_char_p, ctypes.c_int64
    session, V = ctypes.c_void_p(lib.barellm_open(1)), len(set(TEXT))
    assert lib.barellm_initialize(session) == 0
    logits, length, loss = (ctypes.c_float * V)(), ctypes.c_int64(), ctypes.c_double()
    how = np.zeros(6, np.float64)  # temperature 0, top_p 1, no min_p, repetition 1, top_k 0, seed 0
    how[[1, 3]] = 1

    def tried(one: int) -> list[bool]:
        ids, good = (ctypes.c_int32 * 16)(*[0] * 15, one), (ctypes.c_int32 * 16)(*[0] * 16)
        text = (ctypes.c_int32 * 8)(one)
        count, sizes = ctypes.c_int64(16), (ctypes.c_int64(1), ctypes.c_int64(16))
        return [
            lib.barellm_step(session, ids, good, None) == 0,
            lib.barellm_step(session, good, ids, None) == 0,
            lib.barellm_evaluate(session, ids, good, *sizes, ctypes.byref(loss)) == 0,
            lib.barellm_evaluate(session, good, ids, *sizes, ctypes.byref(loss)) == 0,
            lib.barellm_logits(session, ids, count, ctypes.c_int64(0), logits) == 0,
            lib.barellm_sample(session, text, *sizes[:1], sizes[0], how.ctypes.data_as(ctypes.c_void_p), None, None) == 1,
            lib.barellm_token(one, ctypes.byref(length)) is not None,
        ]

    assert tried(V - 1) == [True] * 7 and tried(V) == [False] * 7
    assert lib.barellm_error().decode() == f"id is {V}, expected 0 to {V - 1}"
    # Of a long text the model is fed the end alone; the penalty for repetition looks at all of it.
    how[3] = 2
    text = (ctypes.c_int32 * 100)(V)
    sizes = ctypes.c_int64(99), ctypes.c_int64(1)
    assert lib.barellm_sample(session, text, *sizes, how.ctypes.data_as(ctypes.c_void_p), None, None) == -1
    assert lib.barellm_error().decode() == f"text[0] is {V}, expected an id from 0 to {V - 1}"
    lib.barellm_close(session)
