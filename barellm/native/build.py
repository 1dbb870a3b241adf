"""The way from a configuration to a folder with a program: lower, compile, write C, link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from barellm.assembly.machine import Machine, build_programs, resolved
from barellm.cpu import compilers, jit, sources
from barellm.cpu.isa import arm, host
from barellm.cpu.lang import sync
from barellm.cpu.step import LoweredPrograms, lower_and_plan
from barellm.cpu.threads import allowed_cpus, thread_count
from barellm.data.kinds import tokenizer_files
from barellm.data.shards import SHARD_TOKENS, TokenStream, magic_for, write_shard
from barellm.data.sources import find_shards
from barellm.errors import UserError
from barellm.models.course import own
from barellm.native.source import ORDERS, Image
from barellm.training.run import Run

C = Path(__file__).parent / "c"
PARTS = ("runtime.c", "checkpoint.c", "xxh3.c", "image.c")  # of the shared library, besides the kernels
DRIVER = ("train.c", "shards.c", "settings.c")
# Without contraction, as Python computes: a rate of the schedule must have the same bits. Tensors are read as bytes and as numbers.
OPTIONS = (
    "-std=gnu11",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
    "-Wall",
    "-Wno-format-truncation",
)
EXPORTED = "{ global: barellm_*; local: *; };\n"


@dataclass(frozen=True)
class Built:
    """What `build` made. `train` and `val`: patterns of the run's shards."""

    folder: Path
    train: str
    val: str

    @property
    def command(self) -> list[str]:
        return [str(self.folder / "train"), "--train", self.train, "--val", self.val]


def compiler() -> list[str]:
    """The command of a C compiler: $CC, the system's, or the package ziglang's. UserError where there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise UserError("there is no C compiler: install cc (Debian: apt install gcc libc6-dev), or pip install ziglang")


def check(run: Run) -> None:
    """Raise a UserError for what only the Python-driven loop does."""
    config = run.config
    if own(config) is not None:
        raise UserError(f"runs of {config.preset!r} have stages, expected a preset whose steps are all alike")
    for key, value, expected in (
        ("train.minutes", config.train.minutes, "0: say --train.minutes 0 and --steps N"),
        ("optim.skip_loss_z", config.optim.skip_loss_z, "0"),
        ("optim.skip_norm_z", config.optim.skip_norm_z, "0"),
    ):
        if value:
            raise UserError(f"{key} is {value:g}, and a program without Python does not do that, expected {expected}")
    if config.data.order not in ORDERS:
        raise UserError(f"data.order is {config.data.order!r}, a program has {', '.join(ORDERS)}")
    if run.data.examples is not None:
        raise UserError(f"{config.data.source} has prompts and answers, expected a text or shards")
    if sys.platform != "linux":
        raise UserError("barellm build makes programs for Linux, run it there")


def build(run: Run, folder: Path, *, threads: int | None = None, static: bool = False) -> Built:
    """Make `folder`, which must not be there yet, of a run that nobody has begun. `threads`: the most that a session can have.
    `static`: the driver alone too, with everything in it. UserError for what cannot be built."""
    check(run)
    command = compiler()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} is not empty: name another folder")
    config = resolved(run.config, "cpu")
    programs = build_programs(config)
    threads = threads or thread_count()
    lowered = lower_and_plan(programs, threads=threads)
    machine = Machine(config, "cpu", None, programs, lowered.plan)
    run.config = config
    meta = json.dumps(run.meta(machine), indent=2)
    image = Image(config, programs, lowered, host(), meta, tokenizer_files(run.data.tokenizer))
    kernels = objects(lowered)
    source = folder / "source"
    source.mkdir(parents=True)
    for path in C.iterdir():
        shutil.copy(path, source)
    (source / "layout.h").write_text(image.layout())
    (source / "image.c").write_text(image.source())
    final = run.final_evaluator.windows
    (source / "settings.c").write_text(image.settings(final_tokens=final.windows * config.train.seq))
    (source / "exported").write_text(EXPORTED)
    for name, data in image.blobs().items():
        (source / f"{name}.bin").write_bytes(data)
    for number, code in enumerate(kernels):
        (source / f"kernel{number}.o").write_bytes(code)
    shutil.copy(C / "barellm.h", folder)
    names = [f"kernel{i}.o" for i in range(len(kernels))]
    shared = [*OPTIONS, "-fPIC", "-fvisibility=default", *PARTS, *names]
    link = ["-shared", "-Wl,--version-script=exported", "-Wl,-z,noexecstack", "-lm", "-o", "../libbarellm.so"]
    _run([*command, *shared, *link], source)
    rpath = ["-L..", "-lbarellm", "-lm", "-Wl,-rpath,$ORIGIN", "-o", "../train"]
    _run([*command, *OPTIONS, *DRIVER, *rpath], source)
    if static:
        _run([*command, *OPTIONS, "-static", *DRIVER, *PARTS, *names, "-lm", "-o", "../train-static"], source)
    return Built(folder, *patterns(run, folder))


def objects(lowered: LoweredPrograms) -> list[bytes]:
    """The kernels and the threads' walk as objects for a linker."""
    import llvmlite.binding as llvm

    isa = replace(lowered.isa, triple=llvm.get_default_triple())
    emitters = {spec.key: partial(spec.ir, isa) for spec in lowered.specs}
    kernels = compilers.cached_objects(emitters, isa, processes=min(lowered.threads, len(allowed_cpus())))
    key = f"sync|{sources.digest(sync.__name__)}|{arm()}|linked"
    return [*kernels, jit.cached_object(key, isa, lambda: sync.ir(arm=arm(), futex=True))]


def patterns(run: Run, folder: Path) -> tuple[str, str]:
    """Patterns of the shards. Those of a folder that says which are for training stay there; others are written."""
    source = Path(run.config.data.source).expanduser()
    found = find_shards(run.config.data.source)
    if source.is_dir() and found and run.data.train.name.startswith("training shards"):
        return str(source.resolve() / "*train*.bin"), str(source.resolve() / "*val*.bin")
    data = folder / "data"
    data.mkdir()
    for name, stream in (("train", run.data.train), ("val", run.data.val)):
        _write(data, name, stream, run.data.tokenizer.vocab_size)
    return str(data / "train_*.bin"), str(data / "val_*.bin")


def _write(folder: Path, name: str, stream: TokenStream, vocab_size: int) -> None:
    for number, start in enumerate(range(0, len(stream), SHARD_TOKENS)):
        part = stream.slice(start, min(start + SHARD_TOKENS, len(stream)), name=name)
        write_shard(folder / f"{name}_{number:06d}.bin", part.parts, magic=magic_for(vocab_size))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line] or [done.stderr]
        raise UserError(f"{' '.join(command[:3])} does not build in {folder}: {lines[0].strip()}")
