"""A program built by `barellm build` takes the same steps as `barellm train`, to the bit, without Python."""

from __future__ import annotations

import ctypes
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from barellm import models
from barellm.assembly.build import build_programs, open_model, resolved
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.config import AdapterConfig, overrides
from barellm.cpu.isa import host
from barellm.cpu.step import lower_and_plan
from barellm.data.tokenizers import Bytes
from barellm.errors import UserError
from barellm.native.build import check, compiler
from barellm.native.source import Image
from barellm.training import metrics

SIZES = (
    *("--model.layers", "2", "--model.heads", "2", "--model.d_model", "32", "--model.max_seq", "16", "--seq", "16"),
    *(
        "--batch",
        "2",
        "--steps",
        "100",
        "--train.gradient_accumulation_steps",
        "3",
        "--train.batch_rampup_from",
        "1",
        "--train.batch_rampup_tokens",
        "300",
    ),
    *("--model.dropout", "0.1", "--optim.clip", "0.5", "--optim.warmup", "5", "--train.eval_every", "20"),
    *("--train.eval_tokens", "128", "--train.checkpoint_every", "15", "--train.keep_every", "40", "--train.save_total_limit", "3"),
    *("--train.sample_every", "50"),
)
MUON = ("--optim.name", "muon", "--optim.muon_lr_ratio", "7", "--optim.momentum_warmup", "9")
FILES = (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)
COMPILERS = ("cc", "gcc", "clang")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="barellm build makes programs for Linux"),
    pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A program in "program", and the run that Python drove in "python"."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        patch.setenv("BARELLM_THREADS", "2")
        common = ["shakespeare-char", "--data", str(folder / "text.txt"), *SIZES, *MUON]
        assert main(["build", *common, "-o", str(folder / "program"), "--static", "--threads", "5"]) == 0
        assert main(["train", *common, "--out", str(folder / "python")]) == 0
    return folder


def train(folder: Path, out: str, *more: str, program: str = "train") -> subprocess.CompletedProcess:
    data = folder / "program" / "data"
    command = [folder / "program" / program, "--train", data / "train_*.bin", "--val", data / "val_*.bin"]
    return subprocess.run([*command, "--out", folder / out, *more], env={}, capture_output=True, text=True, errors="replace")


def final(run: Path) -> list[bytes]:
    path, wrong = checkpoint.find(run)
    assert path.name == "step-000100" and not wrong
    return [(path / name).read_bytes() for name in FILES]


def numbers(run: Path) -> list[tuple]:
    """Everything that was measured on the model: not the time."""
    keys = ("kind", "step", "loss", "lr", "muon_lr", "grad_norm", "tokens", "val_nats", "val_bits_per_byte", "targets")
    rows = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] in ("train", "eval")]
    return [tuple(row.get(key) for key in keys) for row in rows]


def texts(out: str) -> dict[int, str]:
    """What the program has printed of texts, by step."""
    found = re.findall(r"sample of step (\d+): (.*?)\n(?=step \d+/|digest )", out, re.DOTALL)
    return {int(step): text for step, text in found}


def resume(folder: Path, run: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        assert main(["train", "--out", str(folder / run), "--resume"]) == 0


@pytest.mark.parametrize("program, threads", [("train", 1), ("train-static", 2), ("train", 5)])
@pytest.mark.extended
def test_a_program_takes_the_steps_of_python(made, program, threads):
    out = f"{program}-{threads}"
    done = train(made, out, "--threads", str(threads), program=program)
    assert done.returncode == 0, done.stderr
    assert numbers(made / out) == numbers(made / "python")
    assert final(made / out) == final(made / "python")
    folders = [sorted(p.name for p in (made / run / "checkpoints").iterdir()) for run in (out, "python")]
    assert folders[0] == folders[1] == [f"step-{n:06}" for n in (40, 75, 80, 90, 100)], "milestones, and the newest three"
    drawn = texts(done.stdout)
    rows = {row["step"]: row["text"] for row in metrics.read(made / "python/metrics.jsonl") if row["kind"] == "sample"}
    assert drawn.keys() == rows.keys() == {50, 100}
    assert drawn[50] == rows[50] and drawn[100].startswith(rows[100]), "the last one is longer than Python's"


@pytest.mark.extended
def test_python_goes_on_where_a_program_stopped(made):
    assert train(made, "there", "--stop", "37").returncode == 0
    resume(made, "there")
    assert (numbers(made / "there"), final(made / "there")) == (numbers(made / "python"), final(made / "python"))


def test_a_program_goes_on_where_python_stopped(made):
    shutil.copytree(made / "python", made / "back")
    shutil.rmtree(made / "back/checkpoints/step-000100")  # of step 90 is the one before
    assert train(made, "back").returncode == 0
    assert (numbers(made / "back"), final(made / "back")) == (numbers(made / "python"), final(made / "python"))


def test_ctrl_c_saves_and_no_row_is_written_twice(made, tmp_path):
    """Interrupted at some step, then ended behind one that is evaluated and saved, then whole."""
    run, data = tmp_path / "run", made / "program" / "data"
    command = [made / "program/train", "--train", data / "train_*.bin", "--val", data / "val_*.bin", "--out", run]
    # Nobody reads on before the signal, and a page of lines holds half of the run at most: it cannot end first.
    with subprocess.Popen(command, env={}, stdout=subprocess.PIPE, bufsize=0, pipesize=4096) as process:
        assert process.stdout is not None
        seen = b""
        while b"\nstep 3/" not in seen:
            seen += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode(errors="replace")
    (stopped,) = re.findall(r"^stopped after step (\d+)$", rest, re.MULTILINE)
    assert process.returncode == 130 and checkpoint.find(run)[0].name == f"step-{int(stopped):06}"
    assert train(made, str(run), "--stop", "60").returncode == 0
    assert train(made, str(run)).returncode == 0
    assert numbers(run) == numbers(made / "python") and final(run) == final(made / "python")


@pytest.mark.extended
def test_a_checkpoint_of_another_model_is_refused(made, tmp_path):
    more = [
        "--data",
        str(made / "text.txt"),
        *SIZES,
        *MUON,
        "--model.layers",
        "1",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "small"),
    ]
    assert main(["train", "shakespeare-char", *more]) == 0
    done = train(made, str(tmp_path / "small"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{checkpoint.WEIGHTS} has other tensors than this program: it is of another model" in done.stderr


@pytest.mark.extended
def test_folders_of_others_and_of_a_save_that_was_killed_are_no_checkpoints(made, tmp_path):
    """A copy that somebody made stays and does not count; what is half written is written anew. The seconds of a run go on."""
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    assert train(made, str(run), "--stop", "60").returncode == 0
    seconds = checkpoint.read_meta(folder / "step-000060")["seconds"]
    shutil.copytree(folder / "step-000060", folder / "step-000010-copy")
    (folder / ".tmp-step-000075").mkdir()
    (folder / ".tmp-step-000075" / checkpoint.WEIGHTS).write_bytes(b"half")
    assert train(made, str(run), "--stop", "75").returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000010-copy", *(f"step-{n:06}" for n in (40, 45, 60, 75))
    ]  # fmt: skip
    assert checkpoint.read_meta(folder / "step-000075")["seconds"] > seconds


def test_it_needs_no_python_and_no_llvm(made):
    for name in ("train", "libbarellm.so"):
        lines = subprocess.run(["ldd", made / "program" / name], capture_output=True, text=True).stdout.splitlines()
        needed = {Path(line.split()[0]).name.split(".")[0] for line in lines}
        assert needed <= {"linux-vdso", "libbarellm", "libc", "libm", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}


CALLER = """
import ctypes, sys
assert "numpy" not in sys.modules
lib = ctypes.CDLL(sys.argv[1])
lib.barellm_open.restype = ctypes.c_void_p
lib.barellm_digest.restype, lib.barellm_digest.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
lib.barellm_error.restype = ctypes.c_char_p
lib.barellm_size.restype = ctypes.c_int64
ids = (ctypes.c_int32 * 96)(*(i % 7 for i in range(96)))
class Result(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("loss", "norm", "lr", "muon_lr")]
sessions = [ctypes.c_void_p(lib.barellm_open(n)) for n in (1, 2)]
for s in sessions:
    assert lib.barellm_initialize(s) == 0
for s in sessions * 2:
    result = Result()
    assert lib.barellm_step(s, ids, ids, ctypes.byref(result)) == 0 and result.loss > 0
    assert result.muon_lr == result.lr * 7 > 0
first, second = sessions
assert lib.barellm_digest(first) == lib.barellm_digest(second)
name = b"wte"
size = lib.barellm_size(first, name)
values = (ctypes.c_float * size)()
assert lib.barellm_read(first, name, values, ctypes.c_size_t(size)) == 0
before = lib.barellm_digest(first)
values[0] += 1
assert lib.barellm_write(first, name, values, ctypes.c_size_t(size)) == 0 and lib.barellm_digest(first) != before
values[0] -= 1
logits = (ctypes.c_float * 200)()
assert lib.barellm_logits(second, ids, ctypes.c_int64(5), ctypes.c_int64(0), logits) == 0 and any(logits)
for wrong in (lib.barellm_size(first, b"nobody") == -1 and b"nobody" in lib.barellm_error(),
              lib.barellm_read(first, name, values, ctypes.c_size_t(1)) == -1 and b"room for 1" in lib.barellm_error(),
              lib.barellm_open(6) is None and b"built for 1 to 5" in lib.barellm_error()):
    assert wrong, lib.barellm_error()
ids[3] = 10**6
assert lib.barellm_step(first, ids, ids, None) == -1 and lib.barellm_error() == sys.argv[2].encode(), lib.barellm_error()
for s in sessions:
    lib.barellm_close(s)
print("done")
"""


def test_two_sessions_in_a_python_without_numpy(made):
    vocabulary = len(set((made / "text.txt").read_text()))
    wrong = f"tokens[3] is 1000000, expected an id from 0 to {vocabulary - 1}"
    command = [sys.executable, "-S", "-c", CALLER, str(made / "program/libbarellm.so"), wrong]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


TOGETHER = """
import ctypes, sys, threading
lib = ctypes.CDLL(sys.argv[1])
lib.barellm_open.restype = ctypes.c_void_p
lib.barellm_digest.restype, lib.barellm_digest.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
STEPS = 40
meeting = threading.Barrier(2)
def train(threads, shift, together, found):
    ids = (ctypes.c_int32 * 96)(*((i + shift) % 7 for i in range(96)))
    session = ctypes.c_void_p(lib.barellm_open(threads))
    assert lib.barellm_initialize(session) == 0
    digests = []
    for _ in range(STEPS):
        if together:
            meeting.wait(60)
        assert lib.barellm_step(session, ids, ids, None) == 0
        digests.append(lib.barellm_digest(session))
    lib.barellm_close(session)
    found[shift] = digests
alone, found = {}, {}
for n, shift in ((1, 0), (2, 3)):
    train(n, shift, False, alone)
threads = [threading.Thread(target=train, args=(n, shift, True, found)) for n, shift in ((1, 0), (2, 3))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == alone and alone[0] != alone[3] and len(set(alone[0])) == STEPS
print("done")
"""


def test_two_sessions_step_at_the_same_time_in_two_threads(made):
    """Each with the bits of one that steps alone: ctypes lets go of Python while a step runs."""
    command = [sys.executable, "-S", "-c", TOGETHER, str(made / "program/libbarellm.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_the_c_code_of_the_page_takes_a_step(made, tmp_path):
    page = (Path(__file__).parents[2] / "docs/native.md").read_text()
    (code,) = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    call = "if (barellm_step(s, tokens, targets, &r)) puts(barellm_error());"
    assert call in code
    ids = "int32_t tokens[96], targets[96]; for (int i = 0; i < 96; i++) tokens[i] = targets[i] = i % 7;"
    shown = f'printf("%d %d %.3f\\n", (int)about.batch, (int)about.seq, r.loss);\n{call.replace("tokens", "wrong", 1)}'
    wrong = "int32_t wrong[96] = {1000000};"
    body = code.replace(call, f"{call}\n{shown}")
    (tmp_path / "main.c").write_text(
        f'#include "barellm.h"\n#include <stdio.h>\nint main(void) {{ {ids} {wrong}\n{body} return 0; }}\n'
    )
    program = made / "program"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-I", str(program), "-L", str(program), "-lbarellm"]
    build = [*compiler(host()), str(tmp_path / "main.c"), *flags, f"-Wl,-rpath,{program}", "-o", str(tmp_path / "main")]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "main"], env={}, capture_output=True, text=True)
    assert re.fullmatch(r"2 16 [1-9]\.\d{3}\ntokens\[0\] is 1000000, expected an id from 0 to \d+\n", done.stdout), done


@pytest.mark.parametrize(
    "options",
    [(), (*MUON[:2], "--lr", "0", "--optim.min_lr", "0", "--optim.muon_lr_ratio", "0", "--optim.muon_lr", "0.02", *MUON[4:])],
    ids=["adamw alone", "a rate of zero"],
)
@pytest.mark.extended
def test_other_rates_are_those_of_python_too(tmp_path, made, options, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    common = ["shakespeare-char", "--data", str(made / "text.txt"), *SIZES, "--steps", "4", "--model.layers", "1", *options]
    assert main(["build", *common, "-o", str(tmp_path / "program")]) == 0
    assert main(["train", *common, "--out", str(tmp_path / "python")]) == 0
    assert train(tmp_path, "own").returncode == 0
    assert numbers(tmp_path / "own") == numbers(tmp_path / "python")
    found = [checkpoint.find(tmp_path / run)[0] for run in ("own", "python")]
    assert [(found[0] / name).read_bytes() for name in FILES] == [(found[1] / name).read_bytes() for name in FILES]


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("bf16", ("--optim.moments", "16bit")),
        ("fp16", ()),
        ("fp16", ("--train.branch_scales", "true")),
        (
            "bf16",
            (
                "--train.matmul_formats",
                "e4m3,e4m3,e5m2",
                "--train.exponent_bias",
                "learned",
                "--train.stochastic_rounding",
                "gradients,weights",
            ),
        ),
    ],
)
@pytest.mark.extended
def test_every_format_of_weights_and_moments_is_kept(made, tmp_path, dtype, options):
    more = [*SIZES, *MUON, "--dtype", dtype, "--model.layers", "1", "--steps", "3", "--train.checkpoint_every", "2", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(made / "cache"))
        build = ["build", "shakespeare-char", "--data", str(made / "text.txt"), *more, "-o", str(tmp_path / "program")]
        assert main(build) == 0
    assert train(tmp_path, "whole").returncode == 0
    assert train(tmp_path, "parts", "--stop", "2").returncode == 0
    assert train(tmp_path, "parts").returncode == 0
    found = [checkpoint.find(tmp_path / run)[0] for run in ("whole", "parts")]
    assert [[(path / name).read_bytes() for name in FILES] for path in found][1:] == [
        [(found[0] / name).read_bytes() for name in FILES]
    ]
    config = overrides.from_json(checkpoint.read_meta(found[0])["config"])
    rounds_as_python(tmp_path / "program" / "libbarellm.so", config)


def rounds_as_python(program: Path, config: Any) -> None:
    """Numbers of every size, and those between two that a format has: the same bytes in a program's memory as in a session's."""
    lib = ctypes.CDLL(str(program))
    lib.barellm_open.restype, lib.barellm_digest.restype = ctypes.c_void_p, ctypes.c_uint64
    opened = ctypes.c_void_p(lib.barellm_open(1))
    assert lib.barellm_initialize(opened) == 0
    r = np.random.default_rng(3)
    with open_model(config, device="cpu") as machine:
        machine.initialize(0)
        session = machine.session
        for name, t in session.tensors.items():
            if t.role not in ("parameter", "state") or t.dtype == "i32":
                continue
            bits = r.integers(0, 1 << 32, t.size, dtype=np.uint32)
            bits[::3] = bits[::3] & 0xFFFFF000 | 0x1000  # halfway between two numbers of fp16
            bits[1::3] = bits[1::3] & 0xFFFFE000 | r.choice([0x1000, 0x2000, 0xFFF, 0x8000], bits[1::3].size)
            values = bits.view(np.float32).reshape(t.shape)
            most = 65504.0 if t.dtype == "fp16_fp32" else 1e30  # where a sum of squares or a weight may be
            values = np.where(np.isfinite(values) & (abs(values) < most), values, np.float32(0.1)).astype(np.float32)
            if t.dtype == "ue6m10":
                values = abs(values)
            session.write_rows(name, 0, values)
            of = (opened, name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), ctypes.c_size_t(t.size))
            assert lib.barellm_write(*of) == 0
            back = np.empty_like(values)
            assert lib.barellm_read(*of[:2], back.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), of[3]) == 0
            assert np.array_equal(back, session.read_rows(name, 0, t.shape[0])), (name, t.dtype)
        for name in ("skipped",):
            session.write_rows(name, 0, np.zeros(1, np.int32))
        assert f"{lib.barellm_digest(opened):016x}" == session.digest()
    lib.barellm_close(opened)


@pytest.mark.parametrize(
    "words, says",
    [(["--foo", "1"], "unknown option: --foo"), (["nix"], "unknown option: nix"), (["--seed"], "a value is missing: --seed")],
)
def test_a_wrong_word_is_named(made, words, says):
    done = subprocess.run([made / "program" / "sample", *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{says}\nusage: sample")


def test_the_hash_is_xxh3(made):
    """Of any number of bytes above 240, in pieces of any size."""
    source = made / "program/source"
    library = made / "hash.so"
    subprocess.run([*compiler(host()), "-shared", "-fPIC", "-O2", "-o", library, source / "xxh3.c"], check=True)
    lib = ctypes.CDLL(str(library))
    lib.hash_end.restype = ctypes.c_uint64
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    for size in (241, 256, 1023, 1024, 1025, 1088, 1089, 2048, 4999):
        for piece in (1, 63, 64, 65, 200, 5000):
            h = ctypes.create_string_buffer(1024)
            lib.hash_begin(h)
            for at in range(0, size, piece):
                part = data[at : min(at + piece, size)]
                lib.hash_add(h, part, ctypes.c_uint64(len(part)))
            assert lib.hash_end(h) == xxhash.xxh3_64_intdigest(data[:size]), (size, piece)


@pytest.mark.parametrize(
    "options, says",
    [
        (["nobody"], "unknown preset"),
        (["shakespeare-char", "--data.order", "llmc"], "data.order is 'llmc'"),
        (["shakespeare-char", "--optim.skip_loss_z", "3"], "optim.skip_loss_z is 3"),
        (["shakespeare-char", "--data.order", "documents"], "data.order is 'documents'"),
        (["shakespeare-char", "--train.minutes", "1"], "train.minutes is 1"),
        (["shakespeare-char", "--optim.skip_norm_z", "3"], "optim.skip_norm_z is 3"),
        (["shakespeare-char", "--train.signal_grace_period", "2.5"], "train.signal_grace_period is 2.5"),
        (["shakespeare-char", "--train.exponent_stats", "4"], "train.exponent_stats is 4"),
        (["shakespeare-char", "--threads", "0"], "--threads is 0"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(made, tmp_path, capsys, monkeypatch, options, says):
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    assert main(["build", *options, "--data", str(made / "text.txt"), "-o", str(tmp_path / "out")]) == 2
    found = capsys.readouterr().err
    assert says in found and found.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_compiler_is_one_line(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("barellm.native.build.find_spec", lambda name: None)
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    assert main(["build", "shakespeare-char", "--data", str(made / "text.txt"), "-o", str(tmp_path / "out")]) == 2
    assert "there is no C compiler" in capsys.readouterr().err


def test_after_a_build_that_was_killed_the_same_command_works(made, tmp_path, monkeypatch):
    """Killed while it links: nothing is at the folder's place, and what is left beside it is no obstacle."""
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    command = ["build", "shakespeare-char", "--data", str(made / "text.txt"), *SIZES, *MUON, "-o", str(tmp_path / "out")]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("barellm.native.build._run", killed)
        assert main(command) == 130
    assert not (tmp_path / "out").exists() and (tmp_path / ".tmp-out" / "source").is_dir()
    (tmp_path / "out").mkdir()
    assert main(command) == 0
    assert (tmp_path / "out" / "train").is_file() and list((tmp_path / "out" / "data").glob("train_*.bin"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.extended
def test_a_program_of_a_runs_folder_and_of_named_shards(made, monkeypatch):
    """The configuration comes from the run, and shards that say which are for training stay where they are."""
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    monkeypatch.setenv("BARELLM_THREADS", "2")
    shards = made / "program/data"
    options = ["shakespeare-char", "--data", str(shards), *SIZES, *MUON, "--data.tokenizer", "bytes", "--steps", "3"]
    assert main(["train", *options, "--out", str(made / "of-shards")]) == 0
    assert main(["build", str(made / "of-shards"), "-o", str(made / "again")]) == 0
    assert not (made / "again/data").exists()
    command = [made / "again/train", "--train", shards / "*train*.bin", "--val", shards / "*val*.bin"]
    assert subprocess.run([*command, "--out", made / "of-run"], env={}, capture_output=True).returncode == 0
    assert numbers(made / "of-run") == numbers(made / "of-shards")


ARM = next(filter(shutil.which, ("qemu-aarch64-static", "qemu-aarch64")), None)


@pytest.mark.skipif(
    not (ARM and shutil.which("aarch64-linux-gnu-gcc")), reason="there is no compiler for aarch64 or no emulator of it"
)
@pytest.mark.parametrize("isa", ["neon", "neon_bf16"])
def test_a_program_for_aarch64_runs_in_an_emulator(made, isa, monkeypatch):
    """Its numbers are Python's on this machine but for roundings, and its checkpoints are as good as any."""
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    common = ["shakespeare-char", "--data", str(made / "text.txt"), *SIZES, *MUON, "--steps", "22", "--threads", "2", "--isa", isa]
    assert main(["build", *common, "-o", str(made / isa), "--static", "--dtype", "fp32"]) == 0
    data = made / "program/data"
    command = [ARM, "-cpu", "max", made / isa / "train-static", "--train", data / "train_*.bin"]
    command += ["--val", data / "val_*.bin", "--out", made / f"run-{isa}"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert main(["train", *common[:-4], "--dtype", "fp32", "--out", str(made / f"python-{isa}")]) == 0
    theirs, ours = ([row for row in numbers(made / f"{x}-{isa}") if row[0] == "train"] for x in ("python", "run"))
    assert len(ours) == len(theirs) == 22
    for a, b in zip(ours, theirs, strict=True):
        assert a[2:5] == pytest.approx(b[2:5], rel=2e-4), (a, b)
    resume(made, f"run-{isa}")  # reads the checkpoint of the other machine


def test_the_checkpoints_say_what_pythons_say(made):
    assert train(made, "meta", "--stop", "1").returncode == 0
    path, _ = checkpoint.find(made / "meta")
    meta = json.loads((path / "meta.json").read_text())
    theirs = checkpoint.read_meta(checkpoint.find(made / "python")[0])
    assert {k: meta[k] for k in ("config", "data", "tokenizer", "versions", "total_steps")} == {
        k: theirs[k] for k in ("config", "data", "tokenizer", "versions", "total_steps")
    }
    assert (meta["step"], meta["samples"], meta["tokens"]) == (1, 2, 32)


REFUSED = {
    "minutes", "signal_grace_period", "exponent_stats", "hellaswag", "track", "init_from", "eval_from", "eval_seq", "epochs",
    "overfit", "early_stopping", "keep_best",
}  # fmt: skip
NOT_HERE = {"hellaswag_every", "gemm_backend", "tf32", "branch_scales"}  # without train.hellaswag, on a CPU, and but in fp16
OTHER = {"dtype": "bf16", "recompute": True, "micro_batch_size": 3, "seq": 8, "batch_rampup_from": 2, "batch_rampup_tokens": 400}
OTHER |= {"matmul_formats": "e4m3", "exponent_bias": "floating", "stochastic_rounding": "gradients"}


def image_of(config) -> str:
    """All C that is written of a configuration."""
    config = resolved(config, "cpu")
    programs = build_programs(config)
    image = Image(config, programs, lower_and_plan(programs, threads=1), host(), "{}", Bytes())
    return image.source() + image.settings(final_tokens=64)


def test_no_key_of_training_is_lost():
    """Each changes the program, or is refused where it says anything."""
    preset = models.preset("shakespeare-char")
    model = replace(preset.model, layers=1, heads=2, d_model=32, max_seq=16)
    train = replace(
        preset.train,
        micro_batch_size=2,
        seq=16,
        batch_rampup_from=1,
        batch_rampup_tokens=300,
        gradient_accumulation_steps=3,
        dtype="fp32",
        matmul_formats="e5m2",
        minutes=0.0,
    )
    config = replace(preset, model=model, train=train)
    for key in ("hellaswag", "init_from", "track"):
        job = SimpleNamespace(config=replace(config, train=replace(train, **{key: "tensorboard"})), data=None)
        with pytest.raises(UserError, match=f"^train.{key} is 'tensorboard', and a program without Python does not do that"):
            check(job)
    for option, key, value in (("--adapt", "method", "lora:8"), ("--train-only", "train_only", "h.0.*")):
        job = SimpleNamespace(config=replace(config, adapter=AdapterConfig(**{key: value})), data=None)
        with pytest.raises(
            UserError, match=f"^{option} is '{re.escape(value)}', and a program .*no file for those that are frozen$"
        ):
            check(job)
    plain = image_of(config)
    for key in {f.name for f in fields(train)} - REFUSED - NOT_HERE:
        changed = replace(train, **{key: OTHER[key] if key in OTHER else getattr(train, key) + 1})
        assert image_of(replace(config, train=changed)) != plain, key


@pytest.mark.skipif(not find_spec("ziglang"), reason="the package ziglang is not installed")
def test_ziglang_links_a_program_of_the_same_bits(made, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    monkeypatch.setenv("CC", f"{sys.executable} -m ziglang cc -target {platform.machine()}-linux-gnu")
    common = ["shakespeare-char", "--data", str(made / "text.txt"), *SIZES, *MUON, "--threads", "2"]
    assert main(["build", *common, "-o", str(made / "zig/program"), "--static"]) == 0
    for program in ("train", "train-static"):
        assert train(made / "zig", program, program=program).returncode == 0
        assert final(made / "zig" / program) == final(made / "python")


ZIG = """
import json, os, pathlib, subprocess, sys
pathlib.Path(__file__).with_name("asked.jsonl").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
assert sys.argv[1] == "cc" and sys.argv[2] == "-target"
sys.exit(subprocess.call([COMPILER, *sys.argv[4:]]))
"""


@pytest.mark.extended
def test_without_a_compiler_the_package_ziglang_is_asked(made, tmp_path, monkeypatch):
    """One that hands everything to this system's compiler, but for the target."""
    (found,) = [command for name in COMPILERS if (command := shutil.which(name))][:1]
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    (tmp_path / "ziglang" / "__main__.py").write_text(ZIG.replace("COMPILER", repr(found)))
    monkeypatch.setenv("BARELLM_CACHE", str(made / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    which = shutil.which
    monkeypatch.setattr("barellm.native.build.shutil.which", lambda name: None if name in COMPILERS else which(name))
    common = ["shakespeare-char", "--data", str(made / "text.txt"), *SIZES, *MUON, "--threads", "2"]
    assert main(["build", *common, "-o", str(made / "stub/program"), "--static"]) == 0
    requested = [json.loads(line) for line in (tmp_path / "ziglang" / "asked.jsonl").read_text().splitlines()]
    machine = platform.machine()
    targets = ({words[2] for words in requested if "-static" not in words}, {words[2] for words in requested if "-static" in words})
    assert targets == ({f"{machine}-linux-gnu"}, {f"{machine}-linux-musl"})
    assert train(made / "stub", "run").returncode == 0
    assert final(made / "stub" / "run") == final(made / "python")
