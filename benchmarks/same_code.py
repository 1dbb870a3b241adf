"""Is the machine code of two builds the same? For a change that must change none (a renaming, moved files).

    python -m benchmarks.same_code write before.json            # in the old tree: about five minutes on two cores
    python -m benchmarks.same_code write after.json             # in the new one
    python -m benchmarks.same_code compare before.json after.json

A record has, for each preset, dtype and instruction set, a digest of each kernel instance's LLVM IR in the order of its first use,
without names: from equal IR the same LLVM makes equal machine code, and IR takes a tenth of the time. For NVIDIA GPUs it has the
same of PTX (--ptx, which needs Triton and no GPU). Loss and gradient norm of 20 steps, in full precision, are of what this
processor runs. Every instruction set is given by value, so that the code of two machines' records can be compared; losses can
where the processors have the same instruction set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
ISAS = [(name, X86) for name in ("amx_bf16", "avx512_bf16", "avx512", "avx2", "generic")] + [
    (name, ARM) for name in ("neon_bf16", "neon")
]
ARCHS = ("sm_80", "sm_90")
SIZE = {
    "train.micro_batch_size": 4,
    "train.seq": 64,
}  # constants of code depend on widths; of the run-time sizes on these alone
FEW_BITS = ("int8", "int4", "nf4")
RUNS = ("default", "shakespeare-char", "shakespeare-muon", "shakespeare-unit", "sparse-char", "speedrun-small")
STEPS = 20


def configurations() -> dict[str, tuple[Any, str]]:
    """{name: (configuration, format of the weights or "")}."""
    from barellm import models
    from barellm.overrides import changed

    found = {}
    for name in sorted(models.presets()):
        base = models.preset(name)
        size = SIZE | {"train.seq": min(64, base.model.max_seq)}
        for dtype in ("fp32", "bf16"):
            found[f"{name} {dtype}"] = changed(base, size | {"train.dtype": dtype}), ""
    small = changed(models.preset("gpt2-124m"), SIZE | {"train.dtype": "fp32"})
    return found | {f"gpt2-124m {weights}": (small, weights) for weights in FEW_BITS}


def anonymous(code: str) -> str:
    """LLVM IR in which labels, values and the function are numbered as they come. Machine code is a function of the rest."""
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        kind, name = ("%", found[3]) if found[3] else (found[1], found[2])
        if kind == "@" and (name.startswith("llvm.") or name in jit.ALLOWED):
            return found[0]
        new = names.setdefault(kind + name, f"{len(names)}")
        return f"{new}:" if found[3] else f"{kind}{new}"

    from barellm.cpu import jit

    return re.sub(r"(?m)([%@])([\w.$-]+)|^([\w.$-]+):", number, code)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kernels_ir(name: str, isa_name: str, triple: str) -> list[str]:
    """The digests of one configuration's kernels on one instruction set."""
    from barellm.cpu import isa as isas
    from barellm.inspect import kernels

    isa = isas.cross(isa_name, triple)
    config, weights = configurations()[name]
    return [digest(anonymous(kernels.text(u.spec, isa, "ir"))) for u in kernels.used_by(config, isa, weights=weights)]


def ptx(name: str, arch: str) -> list[str]:
    from barellm.inspect import kernels

    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    target = kernels.arch_named(arch)
    config, weights = configurations()[name]
    used = kernels.used_by(config, target, weights=weights)
    return [digest(without_names(kernels.text(u.spec, target, "ptx"))) for u in used]


def without_names(code: str) -> str:
    """PTX without comments, and with one name for its kernel."""
    code = re.sub(r"(?m)^\s*(//|\.file|\.section\s+\.debug).*\n", "", code)
    (name,) = re.findall(r"(?m)^\.visible \.entry (\w+)", code)
    return code.replace(name, "kernel")


def losses(preset: str) -> list[str]:
    """Loss and gradient norm of each step as hexadecimal numbers, on this processor."""
    from barellm import train

    text = Path(__file__).read_text() * 20
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text(text)
        changes = {"steps": STEPS, "batch": 4, "seq": 64, "data": f"{folder}/text.txt", "train": {"eval_every": 0}}
        run = train(preset, out=f"{folder}/run", quiet=True, **changes)
        rows = [row for row in run.rows if row["kind"] == "train"]
        return [f"{float(row['loss']).hex()} {float(row['grad_norm']).hex()}" for row in rows]


def write(path: Path, *, processes: int, with_ptx: bool) -> None:
    from barellm.cpu import isa as isas

    names = list(configurations())
    jobs = {f"{name} {isa}": partial(kernels_ir, name, isa, triple) for name in names for isa, triple in ISAS}
    if with_ptx:
        jobs |= {f"{name} {arch}": partial(ptx, name, arch) for name in names for arch in ARCHS}
    with ProcessPoolExecutor(processes) as pool:
        futures = {key: pool.submit(job) for key, job in jobs.items()}
        record: dict[str, Any] = {"code": {}}
        for key, future in futures.items():
            record["code"][key] = future.result()
            print(f"{key}: {len(record['code'][key])} kernels", file=sys.stderr, flush=True)
    record["losses"] = {f"{preset} {isas.host().name}": losses(preset) for preset in RUNS}
    path.write_text(json.dumps(record, indent=0) + "\n")


def compare(before: Path, after: Path) -> int:
    old, new = (json.loads(path.read_text()) for path in (before, after))
    wrong = 0
    for part in ("code", "losses"):
        for key in sorted(old[part].keys() & new[part].keys()):
            if old[part][key] != new[part][key]:
                pairs = zip(old[part][key], new[part][key], strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
                print(f"{key}: {len(old[part][key])} and {len(new[part][key])} entries, different from {at} on")
                wrong += 1
        for key in sorted(old[part].keys() ^ new[part].keys()):
            print(f"{key}: only in {before if key in old[part] else after}")
            wrong += 1
    count = sum(map(len, old["code"].values()))
    print(f"{count} kernels of {len(old['code'])} programs and {len(old['losses'])} runs: {wrong or 'no'} differences")
    return int(wrong > 0)


def main() -> int:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = a.add_subparsers(dest="command", required=True)
    w = commands.add_parser("write")
    w.add_argument("file", type=Path)
    w.add_argument("--processes", type=int, default=os.cpu_count())
    w.add_argument("--ptx", action="store_true")
    c = commands.add_parser("compare")
    c.add_argument("before", type=Path)
    c.add_argument("after", type=Path)
    o = a.parse_args()
    if o.command == "compare":
        return compare(o.before, o.after)
    write(o.file, processes=o.processes, with_ptx=o.ptx)
    return 0


if __name__ == "__main__":
    sys.exit(main())
