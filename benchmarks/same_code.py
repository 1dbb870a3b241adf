"""Is the machine code of two builds the same? For a change that must change none (a renaming, moved files).

    python -m benchmarks.same_code write before.json                    # in the old tree: about ten minutes on two cores
    python -m benchmarks.same_code write after.json                     # in the new one
    python -m benchmarks.same_code compare before.json after.json
    python -m benchmarks.same_code show "default fp32 avx2" 7           # the code that a digest is of, to be compared as text

A record has parts, each made by itself with --parts:

- code: for each preset, dtype and instruction set, a digest of each kernel instance's LLVM IR in the order of its first use,
  without names. From equal IR the same LLVM makes equal machine code, and IR takes a tenth of the time. Every instruction set is
  given by value, so that the code of two machines' records can be compared.
- ptx: the same of PTX for NVIDIA GPUs. It needs Triton, no GPU, and half a second a kernel.
- losses: loss and gradient norm of 20 steps, in full precision, on this processor's instruction set.
- outputs: a digest of the bits of each output that a kernel test checks (tests/check.py), on every instruction set that this
  processor runs and in Triton's interpreter.

Names of presets, programs, kernels, parameters and tests may differ: what is not found under its name is looked for by its content.
A record starts with an empty cache, so nothing that was tuned or compiled before decides what is in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# What a renaming may change for this file: these names, the keys in `configurations`, MORE and `losses`, and `tests_of_kernels`.
from barellm import models, train
from barellm.config.overrides import changed
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.tools.inspect import kernels

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
ISAS = [(name, X86) for name in ("amx_bf16", "avx512_bf16", "avx512", "avx2", "generic")] + [
    (name, ARM) for name in ("neon_bf16", "neon")
]
ARCHS = ("sm_80", "sm_90")
FEW_BITS = ("int8", "int4", "nf4")
RUNS = ("default", "shakespeare-char", "shakespeare-muon", "shakespeare-unit", "sparse-char", "speedrun-small")
STEPS = 20
STAGES = "share=1/2 seq=32 windows=1,2 mtp=1,0.5; share=1/2 seq=64 windows=1,3 lr=2; seq=64 windows=1,4"
MORE = {"speedrun-small": {"batch": 1, "model": {"stages": STAGES, "block": 8, "extension": 2}}}  # settings of runs
PARTS = ("code", "ptx", "losses", "outputs")
MARKS = "not oracle and not alone and not extended and not slow"
ROOT = Path(__file__).parents[1]

Record = dict[str, dict[str, list[str]]]  # part -> the name of a program, run or test -> its digests or numbers


def configurations() -> dict[str, tuple[Any, str]]:
    """{name: (configuration, format of the weights or "")}. Constants of code depend on widths; of the run-time sizes on these
    two alone."""
    found = {}
    for name in sorted(models.presets()):
        base = models.preset(name)
        size = {"train.micro_batch_size": 4, "train.seq": min(64, base.model.max_seq)}
        for dtype in ("fp32", "bf16"):
            found[f"{name} {dtype}"] = changed(base, size | {"train.dtype": dtype}), ""
    small = changed(models.preset("gpt2-124m"), {"train.micro_batch_size": 4, "train.seq": 64, "train.dtype": "fp32"})
    return found | {f"gpt2-124m {weights}": (small, weights) for weights in FEW_BITS}


def losses(preset: str) -> list[str]:
    """Loss and gradient norm of each step as hexadecimal numbers, on this processor."""
    choice = random.Random(1).choices
    text = "".join("".join(choice("aeiou nrst hld,.", k=60)) + "\n" for _ in range(4000))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text(text)
        changes = {"steps": STEPS, "batch": 4, "seq": 64, "data": f"{folder}/text.txt", "train": {"eval_every": 0}}
        run = train(preset, out=f"{folder}/run", quiet=True, **changes | MORE.get(preset, {}))
        rows = [row for row in run.rows if row["kind"] == "train"]
        return [f"{float(row['loss']).hex()} {float(row['grad_norm']).hex()}" for row in rows]


def tests_of_kernels() -> list[str]:
    """The test files that import the check of kernels."""
    folders = [ROOT / "tests" / name for name in ("cpu", "cuda", "simulators/ptx")]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    return [str(path.relative_to(ROOT)) for path in files if re.search(r"tests\.(\w+\.)?check import", path.read_text())]


def anonymous(code: str) -> str:
    """LLVM IR in which labels, values and the function are numbered as they come, without comments. Machine code is a function of
    the rest."""
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        kind, name = ("%", found[3]) if found[3] else (found[1], found[2])
        name = name.strip('"')
        if kind == "@" and (name.startswith("llvm.") or name in jit.ALLOWED):
            return found[0]
        new = names.setdefault(kind + name, f"{len(names)}")
        return f"{new}:" if found[3] else f"{kind}{new}"

    code = re.sub(r'(?m)[ \t]*;[^"\n]*$', "", code)
    return re.sub(r'(?m)([%@])([\w.$-]+|"[^"]*")|^([\w.$-]+|"[^"]*"):', number, code)


def without_names(code: str) -> str:
    """PTX without comments, in which functions and their parameters are numbered as they come. (A kernel may have the name of an
    instruction.)"""
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return found[1] + names.setdefault(found[2], f"n{len(names)}")

    code = re.sub(r"(?m)^\s*\.(file|section\s+\.debug).*\n", "", re.sub(r"[ \t]*//.*", "", code))
    code = re.sub(r"(\.(?:entry|func)\s+(?:\([^)]*\)\s*)?|\bcall(?:\.uni)?\s+(?:\([^)]*\),\s*)?)([\w$]+)", number, code)
    return re.sub(r"(?<![\w$])()([\w$]+?)(?=_param_\d+\b)", number, code)


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def codes(key: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """What tells each kernel instance of a configuration and an instruction set or a GPU from others, and how its code without
    names is made."""
    name, target = key.rsplit(" ", 1)
    config, weights = configurations()[name]
    device = target in ARCHS
    machine = kernels.arch_named(target) if device else isas.cross(target, dict(ISAS)[target])
    for used in kernels.used_by(config, machine, weights=weights):
        if device:
            yield f"{target} {used.spec.key}", lambda spec=used.spec: without_names(kernels.text(spec, machine, "ptx"))
        else:
            yield f"{target} {used.spec.key}", lambda spec=used.spec: anonymous(kernels.text(spec, machine, "ir"))


def digests(key: str) -> list[str]:
    """The digests of `codes`. Those that another configuration has as well are found in the cache."""
    found = []
    for spec, code in codes(key):
        kept = Path(os.environ["BARELLM_CACHE"]) / f"{digest(spec)}.code"
        if not kept.exists():
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text(digest(code()))
            new.replace(kept)
        found.append(kept.read_text())
    return found


def outputs(files: list[str], processes: int) -> dict[str, list[str]]:
    """{test: digests of the outputs that it checks, in their order}."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "outputs"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n", f"{processes}", "--cases", "pairs", "-m", MARKS, *files]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"BARELLM_RECORD_OUTPUTS": str(lines)}, stdout=sys.stderr, check=False)
        found: dict[str, list[str]] = {}
        for line in lines.read_text().splitlines():
            test, value = line.rsplit(" ", 1)
            found.setdefault(test, []).append(value)
        return found


def write(path: Path, *, parts: list[str], processes: int, tests: list[str]) -> None:
    """Adds parts to a record, or makes them anew in it."""
    record: Record = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(processes) as pool:
        os.environ["BARELLM_CACHE"] = cache
        names = list(configurations())
        some = [name for name in names if name.split()[0] in RUNS or name.endswith(FEW_BITS)]
        keys = {
            "code": [f"{name} {isa}" for isa, _ in ISAS for name in names],
            "ptx": [f"{name} {arch}" for name in some for arch in ARCHS],
        }
        for part in parts:
            if part in keys:
                futures = {key: pool.submit(digests, key) for key in keys[part]}
                record[part] = {}
                for key, future in futures.items():
                    record[part][key] = future.result()
                    print(f"{key}: {len(record[part][key])} kernels", file=sys.stderr, flush=True)
            elif part == "losses":
                record[part] = {}
                for preset in RUNS:
                    record[part][f"{preset} {isas.host().name}"] = losses(preset)
                    print(f"{preset}: {STEPS} steps", file=sys.stderr, flush=True)
            else:
                record[part] = record.get(part, {}) | outputs(tests, processes)
            path.write_text(json.dumps(record, indent=0) + "\n")


def compare(before: Path, after: Path) -> int:
    """Prints how two records differ, and gives 1 if they do in a part that both have."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    wrong = 0
    for part in PARTS:
        if lacking := [str(path) for path, record in ((before, old), (after, new)) if part not in record]:
            print(f"{part}: not in {' and '.join(lacking)}")
            continue
        renamed, lost = differences(old[part], new[part])
        print(*(f"{part}: {line}" for line in lost), sep="\n", end="\n" * bool(lost))
        count = f"{sum(map(len, old[part].values()))} entries under {len(old[part])} names"
        print(f"{part}: {count}, {renamed} of them found under others: {len(lost) or 'no'} differences")
        wrong += len(lost)
    return int(wrong > 0)


def differences(old: dict[str, list[str]], new: dict[str, list[str]]) -> tuple[int, list[str]]:
    """How many entries have the same content under another name, and a line for each that is different or in one record only."""
    there = {key: values for key, values in new.items() if old.get(key) != values}
    contents: dict[str, list[str]] = {}
    for key, values in there.items():
        contents.setdefault(" ".join(values), []).append(key)
    renamed, left = 0, []
    for key, values in old.items():
        if new.get(key) == values:
            continue
        if contents.get(" ".join(values)):
            del there[contents[" ".join(values)].pop(0)]
            renamed += 1
        else:
            left.append(key)
    lines = []
    for key in left:
        if key not in there:
            lines.append(f"{key}: only before")
            continue
        a, b = old[key], there.pop(key)
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        how = (
            "the same ones in another order" if Counter(a) == Counter(b) else f"{(Counter(a) - Counter(b)).total()} not found again"
        )
        lines.append(f"{key}: {len(a)} and {len(b)} entries, different from {at} on, {how}")
    return renamed, lines + [f"{key}: only after" for key in there]


def main() -> int:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = a.add_subparsers(dest="command", required=True)
    w = commands.add_parser("write")
    w.add_argument("file", type=Path)
    w.add_argument("--processes", type=int, default=os.cpu_count())
    w.add_argument("--parts", nargs="+", choices=PARTS, default=["code", "losses", "outputs"])
    w.add_argument("--tests", nargs="+", default=tests_of_kernels(), help="files whose outputs are added to the record")
    c = commands.add_parser("compare")
    c.add_argument("before", type=Path)
    c.add_argument("after", type=Path)
    s = commands.add_parser("show")
    s.add_argument("program", help="a preset, a dtype and an instruction set or a GPU")
    s.add_argument("number", type=int)
    o = a.parse_args()
    if o.command == "compare":
        return compare(o.before, o.after)
    if o.command == "show":
        print([code for _, code in codes(o.program)][o.number]())
    else:
        write(o.file.resolve(), parts=o.parts, processes=o.processes, tests=o.tests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
