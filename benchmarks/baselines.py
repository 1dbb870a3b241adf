"""Our step beside others', interleaved: PyTorch in two environments, and llm.c. `barellm bench --baselines` asks for it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from barellm import models
from barellm.config import Config
from barellm.cpu import isa, threads
from barellm.errors import UserError, nearest
from barellm.models import gpt2, training_schedule
from barellm.tools.bench.description import description, machine
from barellm.tools.plan.devices import device_bytes
from barellm.tools.profile.step import one_micro_batch
from benchmarks.interleaved import Variant, interleave, ours

FOLDER = Path(__file__).parent
__all__ = ["description", "machine", "ours"]  # for those who ask here
BASELINES = ("torch", "llmc")
MODES = ("eager", "compile")
LLMC = "it knows fp32 only, clips nothing, and decays all weights alike (by 0)"
LLMC_README = {"OMP_NUM_THREADS": "8"}  # what its README starts it with, on any machine


def chosen(requested: str) -> dict[str, str]:
    """`--baselines` as {peer: path}: "all" is every one that is installed here, "torch" PyTorch, "llmc=PATH" llm.c's train_gpt2.

    UserError for others, and where one that is named cannot run here or "all" finds none."""
    if sys.platform != "linux":
        raise UserError("--baselines needs Linux: /proc tells what time and memory a peer's process took")
    names: dict[str, str] = {}
    for word in requested.split(","):
        name, _, path = word.strip().partition("=")
        if name not in ("all", *BASELINES):
            raise UserError(f"--baselines has {word.strip()!r}{nearest(name, ('all', *BASELINES))} (known: all, torch, llmc=PATH)")
        names[name] = path
    everything = "all" in names
    names.pop("all", None)
    if everything and importlib.util.find_spec("torch"):
        names["torch"] = ""
    if not names:
        raise UserError("--baselines all finds none here: pip install torch, or name llm.c's program with --baselines llmc=PATH")
    if "torch" in names:
        baseline_script("torch_step.py")
    if "llmc" in names:
        names["llmc"] = _program(names["llmc"])
    return names


def _program(path: str) -> str:
    if not path:
        raise UserError("--baselines llmc needs the path of llm.c's program, as llmc=PATH/train_gpt2")
    found = Path(path).expanduser().absolute()
    if not found.is_file():
        raise UserError(f"{path} is no file: llmc=PATH names llm.c's program, built from train_gpt2.c")
    if not os.access(found, os.X_OK):
        raise UserError(f"{path} is not executable: llmc=PATH names llm.c's program, built from train_gpt2.c")
    return str(found)


def baseline_script(name: str) -> Path:
    """The script of a baseline. It is a UserError if the folder of baselines is missing, or PyTorch for torch_*."""
    script = FOLDER / "peers" / name
    if not script.exists():
        raise UserError(f"{script} is missing: --baselines needs a checkout of the project, not an installed package")
    if name.startswith("torch") and importlib.util.find_spec("torch") is None:
        raise UserError("PyTorch is not installed for this Python (pip install torch): bench compares with it")
    return script


def environments() -> dict[str, dict[str, Any]]:
    """The baseline's environments by name, with this process's processors filled in."""
    found = json.loads((FOLDER / "peers" / "environments.json").read_text())
    cpus = ",".join(map(str, threads.logical_cpus()))
    return {n: e | {"set": {k: v.format(cpus=cpus) for k, v in e["set"].items()}} for n, e in found.items()}


def gpt2_of(config: Config) -> gpt2.Config:
    """The model whose single ops peers/torch_ops.py has, and whose step llm.c has. UserError for another architecture."""
    if not isinstance(config.model, gpt2.Config):
        architecture = models.name_of(config.model)
        raise UserError(f"this peer has gpt2 only, the preset {config.preset!r} is {architecture}")
    return config.model


def torch_baseline(config: Config) -> list[str]:
    """The command of the model's twin in PyTorch, with the model's sizes. UserError for an architecture that has none."""
    found = getattr(models.of(config.model), "TORCH_TWIN", None)
    if found is None:
        architecture = models.name_of(config.model)
        raise UserError(f"no peer in PyTorch: the preset {config.preset!r} is {architecture}, which names no TORCH_TWIN")
    script, fields, *usual = found
    for name in (name for names in usual for name in names):
        if (value := getattr(config.model, name)) != (one := getattr(type(config.model), name)):
            raise UserError(f"no peer in PyTorch: model.{name} is {value!r}, {script} has {one!r}")
    values = {name: getattr(config.model, name) for name in fields}
    words = [f"--{name}={int(n) if isinstance(n, bool) else n}" for name, n in values.items()]
    return [sys.executable, str(baseline_script(script)), *words]


def variants(config: Config, baselines: dict[str, str], device: str = "cpu") -> list[Variant]:
    """Ours; PyTorch eager and compiled, on the CPU in each environment; llm.c's program for the CPU."""
    train = config.train
    if dropout := getattr(config.model, "dropout", 0):
        raise UserError(f"the peers' step has no dropout: model.dropout is {dropout}, expected 0")
    sizes = {"vocab": config.model.padded_vocab, "batch": train.micro_batch_size, "seq": train.seq}
    words = [f"--{name}={n}" for name, n in sizes.items()]
    made = [ours(config, device=device)]
    if "torch" in baselines:
        if train.dtype == "fp16":
            raise UserError("the peers in PyTorch have no loss scale: train.dtype is fp16, expected fp32 or bf16")
        script = [*torch_baseline(config), *words, f"--dtype={train.dtype}", f"--device={device}"]
        made += [Variant(name, [*script, f"--mode={mode}"], set_, why) for mode, name, set_, why in _torch_variants(device)]
    if "llmc" in baselines:
        if device != "cpu":
            raise UserError("--baselines llmc runs llm.c's train_gpt2.c, which is for --device cpu")
        model = gpt2_of(config)
        if not model.bias:
            raise UserError("llm.c's model has biases: model.bias is false, expected true")
        words += [f"--layers={model.layers}", f"--heads={model.heads}", f"--d_model={model.d_model}"]
        script = [sys.executable, str(baseline_script("llmc.py")), "--program", baselines["llmc"]]
        made += [
            Variant(f"llm.c, fp32, {name}", [*script, *words], set_, f"{why}; {LLMC}")
            for name, set_, why in (
                ("as in its README", LLMC_README, "OMP_NUM_THREADS=8"),
                ("tuned", environments()["tuned"]["set"], "threads pinned, memory in huge pages"),
            )
        ]
    return made


def _torch_variants(device: str) -> list[tuple[str, str, dict[str, str], str]]:
    """(mode, name, environment, why). Nothing is known to set on a GPU."""
    if device == "cuda":
        return [
            (mode, f"torch {mode}", {}, "scaled_dot_product_attention as PyTorch does it ('attention' says how), fused AdamW")
            for mode in MODES
        ]
    found = environments().items()
    return [(mode, f"torch {mode}, {name}", e["set"], e["why"]) for name, e in found for mode in MODES]


def measure(
    config: Config, baselines: dict[str, str], *, rounds: int, report: Callable[[str], None] = print, device: str = "cpu"
) -> dict[str, Any]:
    """`baselines`: as `chosen` gives them."""
    from barellm.tools.plan.roofline import measured_ceiling

    all_variants = variants(config, baselines, device)
    if device == "cpu":  # before and after the rounds; a GPU's memory is for the variants
        measured_ceiling(device=device)
    load = os.getloadavg()
    steps = interleave(all_variants, rounds=rounds, report=report, device_bytes=device_bytes(device))
    return summary(config, all_variants, rounds=rounds, steps=steps, device=device) | {
        "load_before": load,
        "load_after": os.getloadavg(),
    }


def summary(config: Config, all_variants: list[Variant], *, rounds: int, steps: int, device: str = "cpu") -> dict[str, Any]:
    """Medians, ratios, and the roofline."""
    from barellm.assembly.build import build_programs
    from barellm.tools.plan.roofline import measured_ceiling
    from benchmarks.roofline import step_bound

    ceiling = measured_ceiling(device=device)
    ceiling.again()
    programs = build_programs(config)
    bound = step_bound(programs, config.train.dtype, ceiling, training_schedule.runs_per_step(one_micro_batch(config)))
    ours = median(all_variants[0].samples)
    baselines = {v.name: median(v.samples) for v in all_variants[1:]}
    best = min(baselines, key=lambda name: baselines[name])
    return {
        **description("peers", config, device), "flops": programs["forward_backward"].flops, "rounds": rounds,
        "steps_per_turn": steps, "ceiling": ceiling.to_json(), "bound_s": bound, "ours_s": ours,
        "percent_of_bound": 100 * bound / ours, "tokens_per_s": config.train.micro_batch_size * config.train.seq / ours,
        "ratios": {name: seconds / ours for name, seconds in baselines.items()}, "best_peer": best,
        "ratio_to_best": baselines[best] / ours, "variants": [v.to_json(FOLDER.parent) for v in all_variants],
    }  # fmt: skip


def results() -> Path:
    """The project's own results of processors like this one (benchmarks/table.py names the folders)."""
    return FOLDER / "results" / "xeon-amx" if isa.host().tiles else FOLDER / "results"


def write_tables() -> None:
    """The README's tables and its chart, and docs/results.md, from all results."""
    subprocess.run([sys.executable, str(FOLDER / "table.py"), "--write"], check=True)


def torch_ops(config: Config, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds to every row of `ops.measure` the seconds of PyTorch's own ops for the same work, in the tuned environment: `peer_s`,
    or None where PyTorch has no such op; and `times_peer`, ours over that, both called again and again."""
    script = baseline_script("torch_ops.py")
    model, train = gpt2_of(config), config.train
    sizes = {"batch": train.micro_batch_size, "seq": train.seq, "rows": train.micro_batch_size * train.seq, "heads": model.heads}
    sizes |= {"d_model": model.d_model, "vocab": model.padded_vocab, "dtype": train.dtype, "bias": model.bias}
    wanted = [sizes | {"op": row["op"], "shape": [int(n) for n in row["shape"].split("x")]} for row in rows]
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(wanted), stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | environments()["tuned"]["set"],
    )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    for row, seconds in zip(rows, answer["s"], strict=True):
        row["peer_s"] = None if seconds is None else seconds * row["count"]
        if seconds is not None:
            row["times_peer"] = row["alone_s"] / row["peer_s"]
    return {"peer": f"PyTorch {answer['version']}, tuned environment"}
