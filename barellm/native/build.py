"""The way from a configuration to a folder with a program: lower, compile, write C, link."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from barellm.assembly.build import CompiledModel, build_programs, resolved
from barellm.checkpoint.storage import TEMPORARY
from barellm.cpu import compilers, jit, sources, step
from barellm.cpu.isa import ISA, arm, host
from barellm.cpu.lang import sync
from barellm.cpu.threads import allowed_cpus, thread_count
from barellm.data.shards import SHARD_TOKENS, TokenStream, magic_for, write_shard
from barellm.data.sources import find_shards
from barellm.errors import UserError
from barellm.models.training_schedule import model_schedule
from barellm.native.source import ORDERS, Image
from barellm.training.run import Run

C = Path(__file__).parent / "c"
PARTS = ("runtime.c", "sampling.c", "checkpoint.c", "xxh3.c", "image.c")  # of the shared library, besides the kernels
DRIVERS = {"train": ("train.c", "driver.c", "shards.c", "settings.c"), "sample": ("sample.c", "driver.c")}
# Without contraction, as Python computes: a rate of the schedule must have the same bits. Tensors are read as bytes and as numbers.
OPTIONS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-Wall", "-Wno-format-truncation")
ADAPTED = "'': it draws all its weights from the seed, and has no file for those that are frozen"
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


def compiler(isa: ISA) -> list[str]:
    """The C compiler command for the machine of `isa`: $CC, the system's, or the package ziglang's. UserError if there is none."""
    machine = "aarch64" if for_arm(isa) else "x86_64"
    is_native = for_arm(isa) == arm()
    for name in (os.environ.get("CC", ""), *(("cc", "gcc", "clang") if is_native else (f"{machine}-linux-gnu-gcc",))):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu"]
    package = "gcc libc6-dev" if is_native else f"gcc-{machine.replace('_', '-')}-linux-gnu"
    raise UserError(f"there is no C compiler for {machine}: install one (Debian: apt install {package}), or pip install ziglang")


def statically(command: list[str]) -> list[str]:
    """The command for programs that need no shared library: ziglang has a C library for it that is not the usual one."""
    return [*(word.replace("-linux-gnu", "-linux-musl") if "zig" in "".join(command) else word for word in command), "-static"]


def for_arm(isa: ISA) -> bool:
    return isa.triple.startswith(("aarch64", "arm64")) if isa.triple else arm()


def check(run: Run) -> None:
    """UserError for settings of `run` that only the Python loop supports; each names the key and the value that is expected."""
    config = run.config
    if model_schedule(config) is not None:
        raise UserError(f"runs of {config.preset!r} have stages, expected a preset whose steps are all alike")
    for key, value, expected in (
        ("--adapt", config.adapter.method, ADAPTED), ("--train-only", config.adapter.train_only, ADAPTED),
        ("train.minutes", config.train.minutes, "0: say --train.minutes 0 and --steps N"),
        ("train.epochs", config.train.epochs, "0: say --steps N"), ("optim.skip_loss_z", config.optim.skip_loss_z, "0"),
        ("optim.skip_norm_z", config.optim.skip_norm_z, "0"),
        ("train.signal_grace_period", config.train.signal_grace_period, "0: the program saves after its step"),
        ("train.exponent_stats", config.train.exponent_stats, "0"), ("train.hellaswag", config.train.hellaswag, "none"),
        ("train.eval_from", "" if config.train.eval_from == "spread" else config.train.eval_from, "spread"),
        ("train.eval_seq", config.train.eval_seq, "0"), ("train.track", config.train.track, "none"),
        ("train.overfit", config.train.overfit, "0"), ("train.early_stopping", config.train.early_stopping, "0"),
        ("train.keep_best", config.train.keep_best, "false"),
        ("train.init_from", config.train.init_from, "none: make a run of it by barellm train, and resume from its checkpoint"),
    ):  # fmt: skip
        if value:
            value_text = f"{value:g}" if isinstance(value, (int, float)) else repr(value)
            raise UserError(f"{key} is {value_text}, and a program without Python does not do that, expected {expected}")
    if config.data.order not in ORDERS:
        raise UserError(f"data.order is {config.data.order!r}, a program has {', '.join(ORDERS)}")
    if run.data.examples is not None:
        raise UserError(f"{config.data.source} has prompts and answers, expected a text or shards")
    if config.data.document_mask == "on":
        raise UserError("data.document_mask is on, and a program without Python has no mask between documents, expected off")
    if sys.platform != "linux":
        raise UserError("barellm build makes programs for Linux, run it there")


def build(run: Run, folder: Path, *, threads: int | None = None, static: bool = False, isa: ISA | None = None) -> Built:
    """Build the program into the new folder `folder` (it appears when complete). `threads`: maximum of a session. `static`: also
    static drivers. `isa`: of the target machine, default this one. UserError for what cannot be built."""
    check(run)
    isa = isa or host()
    command = compiler(isa)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} is not empty: name another folder")
    # The program: configuration, lowered programs, and their kernels as objects.
    config = run.config
    if config.train.dtype == "auto":
        config = replace(config, train=replace(config.train, dtype="bf16" if isa.dot else "fp32"))
    config = resolved(config, "cpu")
    programs = build_programs(config, positions=config.model.max_seq)  # `sample` too reads its prompts with them
    lowered = step.lower_and_plan(programs, threads=threads or thread_count(), isa=isa)
    machine = CompiledModel(config, "cpu", None, programs, lowered.plan)
    run.config = config
    image = Image(config, programs, lowered, isa, json.dumps(run.meta(machine), indent=2), run.data.tokenizer)
    kernels = objects(lowered)
    # The folder, under a temporary name until all is in it.
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    if temporary.exists():  # of a build that was killed
        shutil.rmtree(temporary)
    source = temporary / "source"
    source.mkdir(parents=True)
    final_tokens = run.final_evaluator.windows.windows * config.train.seq
    _write_sources(source, image, settings=image.settings(final_tokens=final_tokens))
    shutil.copy(C / "barellm.h", temporary)
    _link(command, source, kernels, static=static)
    train, val = _shard_patterns(run, temporary)
    if folder.is_dir():  # and empty
        folder.rmdir()
    temporary.rename(folder)
    return Built(folder, train, val)


def _write_sources(source: Path, image: Image, *, settings: str) -> None:
    """Write what the C compiler reads: our C files, and those that are made of the run's programs."""
    for path in C.iterdir():
        shutil.copy(path, source)
    (source / "layout.h").write_text(image.layout())
    (source / "image.c").write_text(image.source())
    (source / "settings.c").write_text(settings)
    (source / "exported").write_text(EXPORTED)
    for name, data in image.blobs().items():
        (source / f"{name}.bin").write_bytes(data)


def _link(command: list[str], source: Path, kernels: list[bytes], *, static: bool) -> None:
    """Make libbarellm.so of the kernels' objects and PARTS, and the DRIVERS beside it, above the folder `source`."""
    names = [f"kernel{i}.o" for i in range(len(kernels))]
    for name, code in zip(names, kernels, strict=True):
        (source / name).write_bytes(code)
    shared = [*OPTIONS, "-fPIC", "-fvisibility=default", *PARTS, *names]
    link = ["-shared", "-Wl,--version-script=exported", "-Wl,-z,noexecstack", "-lm", "-o", "../libbarellm.so"]
    _run([*command, *shared, *link], source)
    for name, parts in DRIVERS.items():
        _run([*command, *OPTIONS, *parts, "-L..", "-lbarellm", "-lm", "-Wl,-rpath,$ORIGIN", "-o", f"../{name}"], source)
        if static:
            _run([*statically(command), *OPTIONS, *parts, *PARTS, *names, "-lm", "-o", f"../{name}-static"], source)


def objects(lowered: step.LoweredPrograms) -> list[bytes]:
    """The kernels and the threads' walk as objects for a linker."""
    import llvmlite.binding as llvm

    isa = replace(lowered.isa, triple=lowered.isa.triple or llvm.get_default_triple())
    on_arm = for_arm(isa)
    emitters = {spec.key: partial(spec.ir, isa) for spec in lowered.specs}
    kernels = compilers.cached_objects(emitters, isa, processes=min(lowered.threads, len(allowed_cpus())))
    key = f"sync|{sources.digest(sync.__name__)}|{on_arm}|linked"
    return [*kernels, jit.cached_object(key, isa, lambda: sync.ir(arm=on_arm, futex=True))]


def _shard_patterns(run: Run, temporary: Path) -> tuple[str, str]:
    """(pattern of the training shards, pattern of the validation shards), for the program's --train and --val. A folder with named
    splits is used in place; other data is written below `temporary`, and the patterns name the folder that it becomes."""
    source = Path(run.config.data.source).expanduser()
    # `sources._from_shards` names the stream so only where files named train and val decided the split, not a share of the tokens.
    named_splits = run.data.train.name.startswith("training shards")
    if named_splits and source.is_dir() and find_shards(run.config.data.source):
        return str(source.resolve() / "*train*.bin"), str(source.resolve() / "*val*.bin")
    data = temporary / "data"
    data.mkdir()
    for name, stream in (("train", run.data.train), ("val", run.data.val)):
        _write_shards(data, name, stream, run.data.tokenizer.vocab_size)
    # Where they will lie: the caller renames `temporary` once the program is complete.
    last = temporary.with_name(temporary.name.removeprefix(TEMPORARY)) / "data"
    return str(last / "train_*.bin"), str(last / "val_*.bin")


def _write_shards(folder: Path, name: str, stream: TokenStream, vocab_size: int) -> None:
    for number, start in enumerate(range(0, len(stream), SHARD_TOKENS)):
        part = stream.slice(start, min(start + SHARD_TOKENS, len(stream)), name=name)
        write_shard(folder / f"{name}_{number:06d}.bin", part.parts, magic=magic_for(vocab_size))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line or "multiple" in line]
        raise UserError(f"{' '.join(command[:3])} does not build in {folder}: {(errors or [done.stderr])[0].strip()}")
