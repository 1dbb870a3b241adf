"""The plan of a training run in numbers: memory to the byte, operations and bytes by op, fusions. Allocates nothing."""

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from barellm.assembly.build import build_programs, gemm_options, model_flops
from barellm.config import Config
from barellm.models import hidden
from barellm.models.training_schedule import runs_per_step
from barellm.optim import recipes, rules
from barellm.program.ranks import Ranks
from barellm.program.tensor import PERSISTENT
from barellm.runtime.memory import PLURAL, memory_limit
from barellm.runtime.ranks import ALONE, Planned
from barellm.tools.plan import devices, roofline

if TYPE_CHECKING:
    from barellm.tools.plan.devices import Built

ROLES = {role: words.replace(" ", "_") for role, words in PLURAL.items()}
PRIVATE = "threads.scratch"  # scratch of the threads of a CPU, which outlives a program


def memory(built: "Built") -> dict[str, int]:
    """The bytes of the arena by what they are for, at the moment when most are alive. They add up to the arena."""
    parts = dict.fromkeys(ROLES.values(), 0)
    for role, nbytes in built.plan.by_role().items():
        parts[ROLES[role]] += nbytes
    private = sum(t.nbytes for t in built.plan.persistent if t.name == PRIVATE)
    parts["caches"] -= private
    parts["scratch"] += private
    return parts | {"unused": built.plan.arena_bytes - sum(parts.values())}


def report(
    config: Config, *, ceiling: roofline.Ceiling | None = None, device: str = "cpu", ranks: Ranks = ALONE, card: str = ""
) -> "tuple[dict[str, Any], Built]":
    """The numbers of a plan as one JSON object, and the lowered programs that they are from. The dtype in `config` must be
    resolved. With `ceiling`, each op also gets its roofline time. With several `ranks`, the numbers are one rank's. `card` names
    a GPU by its data sheet, in place of this machine's."""
    programs = build_programs(config, ranks=ranks)
    built = devices.lower(programs, devices.target_of(card) if card else device, **gemm_options(config.train, device))
    plan, train = built.plan, config.train
    largest = max(plan.peaks, key=lambda name: plan.peaks[name][0])  # the program with the most bytes alive at one op
    batch = train.micro_batch_size // ranks.count
    parameters, trained = programs["forward_backward"].store.counts
    step = runs_per_step(config)
    fused = (op.name for name in step for op in built.lowered[name].ops if len(roofline.primitives(op)) > 1)
    limit, limit_source = (devices.sheet(card).nbytes, f"{card}'s memory") if card else device_memory(device)
    numbers: dict[str, Any] = {
        "preset": config.preset, **({"rank": ranks.rank, "ranks": ranks.count} if ranks.count > 1 else {}),
        "batch": batch, "seq": train.seq, "accumulate": train.gradient_accumulation_steps,
        "dtype": train.dtype, "recompute": train.recompute, "moments": config.optim.moments, "device": device, **built.machine,
        "parameters": parameters, "trained": trained, "memory": memory(built),
        "arena_bytes": plan.arena_bytes, "live_peak_bytes": plan.live_peak_bytes, "ratio": plan.arena_bytes / plan.live_peak_bytes,
        "persistent_bytes": plan.persistent_bytes, "workspace_bytes": plan.workspace_bytes, "limit_bytes": limit,
        "limit_source": limit_source, "fits": None if limit is None else plan.arena_bytes <= limit,
        "peak_at": {"program": largest, "op": str(built.lowered[largest].ops[plan.peaks[largest][1]])},
        "model_flops": model_flops(programs, config), "tokens": batch * train.seq * train.gradient_accumulation_steps,
        "programs": {name: _program(built, name) for name in programs}, "kernels": len(built.specs), "step": step,
        "families": _families(built, step), "ops": _ops(built, step, ceiling), "fusions": dict(Counter(fused)),
    }  # fmt: skip
    if ceiling is not None:
        numbers["ceiling"] = ceiling.to_json()
        numbers["expected_s"] = sum(row["expected_s"] for row in numbers["ops"])
    return numbers, built


def of_each_rank(config: Config, count: int) -> list[dict[str, int]]:
    """The bytes that each of so many ranks holds of the optimizer's state, and of its whole arena."""
    found = []
    for rank in range(count):
        built = devices.lower(build_programs(config, ranks=Planned(rank, count)), "cpu")
        found.append({"optimizer_state": memory(built)["optimizer_state"], "arena_bytes": built.plan.arena_bytes})
    return found


def device_memory(device: str) -> tuple[int | None, str]:
    """The limit of memory in bytes, and what sets it; None if there is no such device here."""
    if device == "cpu":
        return memory_limit()
    found = devices.device_bytes(device)
    return found, "no GPU here" if found is None else "this GPU's memory"


def _program(built: "Built", name: str) -> dict[str, int]:
    low = built.lowered[name]
    return {
        "ops": sum(len(roofline.primitives(op)) for op in low.ops), "fused_ops": len(low.ops),
        "calls": len(built.calls[name]), "live_peak_bytes": built.plan.peaks[name][0],
    }  # fmt: skip


def _families(built: "Built", step: dict[str, float]) -> dict[str, dict[str, float]]:
    """FLOPs and bytes of a step's primitive ops by family (module), each program once and before fusion."""
    rows: dict[str, dict[str, float]] = {}
    for name in step:
        for op in (p for fused in built.lowered[name].ops for p in roofline.primitives(fused)):
            row = rows.setdefault(type(op).__module__.rpartition(".")[2], {"count": 0, "flops": 0, "bytes": 0})
            row["count"] += 1
            row["flops"] += op.flops()
            row["bytes"] += op.bytes()
    return rows


def _ops(built: "Built", step: dict[str, float], ceiling: roofline.Ceiling | None) -> list[dict[str, Any]]:
    """One row per kind of op after fusion, for an average optimizer step with all micro-batches: FLOPs, bytes, roofline."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, times in step.items():
        for op in built.lowered[name].ops:
            row = rows.setdefault((name, op.name), {"program": name, "op": op.name, "count": 0, "flops": 0, "bytes": 0})
            row["count"] += times
            row["flops"] += times * op.flops()
            row["bytes"] += times * op.bytes()
            if ceiling is not None:
                row["expected_s"] = row.get("expected_s", 0.0) + times * ceiling.seconds(op)
    return list(rows.values())


def optimizers(built: "Built", config: Config) -> list[dict[str, Any]]:
    """Which optimizer updates which parameters: one row for all parameters of a shape whose names differ only in numbers."""
    parameters = [t for t in built.plan.persistent if t.role == "parameter" and not t.frozen]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    highest = config.optim.rates(lambda high, low: high)
    for param, rule in rules.assign_rules(recipes.rules_for(config.optim, hidden(config.model)), parameters):
        names = re.sub(r"\b\d+\b", "*", param.name)
        shape, optimizer = [int(n) for n in param.shape], rule.optimizer
        row = rows.setdefault((names, *shape, optimizer), {"names": names, "shape": shape, "count": 0})
        row["count"] += 1
        options = {k: v for k, v in vars(optimizer).items() if k not in ("rate", "lr_scale")}
        rate = highest[getattr(optimizer, "rate", "lr")] * optimizer.lr_scale
        row |= {"optimizer": type(optimizer).__name__, "rate": rate, "options": options}
    return list(rows.values())


def memory_map(built: "Built") -> list[dict[str, Any]]:
    """Every region of the arena, by address; `first` and `last` are ops of the program that owns it."""
    rows = []
    for r in built.plan.placements():
        row: dict[str, Any] = {"offset": r.offset, "bytes": r.nbytes, "name": r.name, "role": r.role}
        if r.role not in PERSISTENT:
            row |= {"program": r.program, "first": r.first, "last": r.last}
        rows.append(row)
    return rows
