"""The self-check of a GPU: kernels are used once they were right on this card, with this driver and these sources.

A child process, with a time limit for each case, holds them against float64 (`tools/profile/self_check.py`): GEMMs with more tiles
than multiprocessors, attention over several blocks, and each op of a small model with the user's options. Verdicts are kept beside
the cubins. Where Hopper's GEMM or attention is wrong, hangs or crashes, Triton's takes its place; else nothing runs."""

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from barellm.cuda import driver, step
from barellm.cuda.compile import ptxas_variable
from barellm.cuda.kernel import Launch, Specialisation, Target
from barellm.cuda.lang import TRITON
from barellm.cuda.tuner.candidates import EPILOGUES_BY_KIND, specs_of
from barellm.cuda.tuning import AttentionProblem, GemmProblem
from barellm.errors import UserError
from barellm.program.builder import Program
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS
from barellm.runtime import artefacts
from barellm.runtime.tuner.database import Database, Entry
from barellm.runtime.tuner.problem import Candidate
from barellm.runtime.tuner.worker import Lost, Worker

CHILD = "barellm.tools.profile.self_check"
SWITCH = "BARELLM_SELF_CHECK"
LIMIT_S = 20.0  # of a case, and a minute more for the start of the child
SIZE, TOKENS, FEW_TOKENS = (1152, 1280, 576), 2000, 256  # of a GEMM; of a weight gradient in slices, and in one
ATTENTION = (2, 300)  # sequences, and their tokens
FAULTS = ("wrong values", "it wrote outside", "no answer", "its process")  # of kernels, as the child's side words them
REPORT = "`barellm doctor --gpu` shows all, please send us what it prints"


@cache
def proven(matmul: str, config: Any, build: Callable[[Any], dict[str, Program]] | None) -> dict[str, Any]:
    """The options of a session with the GEMM backend `matmul`, after the self-check: if Hopper's GEMM or attention fails, Triton's
    is used. `config`: that of a small model with the same ops, whose programs `build` gives; without `build`, that of the run.
    UserError if a kernel fails that none can replace."""
    on = driver.device()
    options: dict[str, Any] = {"matmul": matmul}
    if os.environ.get(SWITCH) == "0":
        return options
    results = verdicts(on, config, build(config) if build else {}, Target.of(on, matmul, config.train.tf32))
    for name, entry in sorted(results.items()):
        if entry["wrong"] and name.startswith("Hopper"):
            kind = name.split()[1]
            _tell(f"warning: {name} fails on {on.name}: {entry['wrong']}: Triton's {kind} takes its place; {REPORT}")
            options |= {"matmul": "triton"} if kind == "GEMM" else {"plain_attention": True}
        elif entry["wrong"]:
            raise UserError(f"{name} fails on {on.name}: {entry['wrong']}: use --device cpu; {REPORT}")
    return options


def verdicts(
    on: driver.Device, config: Any, programs: dict[str, Program], target: Target, kept: dict[str, Entry] | None = None
) -> dict[str, Entry]:
    """For each case {"kernels": {kernel: largest error over its bound}, "wrong": why it fails, or ""}. Cases that are not in `kept`
    (None: those on disk) are run now, in a child process."""
    works, specs = _cases(config, programs, target)
    database, at = _database(), f"{on.name}, sm_{on.arch}, driver {on.driver}: "
    if kept is None:
        kept = {name: e for name in works if isinstance((e := database.entries.get(at + name, {})).get("wrong"), str)}
    missing = {name: work for name, work in works.items() if name not in kept}
    if not missing:
        return kept
    _tell(f"{on.name}: its first use with these kernels, so they are checked (once, for about a minute)")
    for work in missing.values():
        if isinstance(work, tuple):
            specs |= specs_of(work[0], [Candidate(work[1])], target)
    step.compiled(specs, on.arch, processes=step.processes())  # not while the child's time runs
    new_verdicts: dict[str, Entry] = {}
    worker = Worker(CHILD, limit=LIMIT_S, environment={SWITCH: "0"})
    try:
        for name, work in missing.items():
            try:
                worker.open(work)
                new_verdicts[name] = {"kernels": worker.ask("kernels")["ratios"], "wrong": ""}
            except Lost as lost:
                worker.close()  # the next case gets a child that nothing has happened to
                why = str(lost).removeprefix("the default: ")
                if not why.startswith(FAULTS) and driver.LOST_WORDS not in why:  # no kernel's fault: not to be remembered
                    raise UserError(f"the self-check of {on.name} cannot run: {why}") from None
                new_verdicts[name] = {"kernels": {}, "wrong": why}
    finally:
        worker.close()
    with suppress(OSError):
        database.change({at + name: entry for name, entry in new_verdicts.items()})
    return kept | new_verdicts


def _cases(config: Any, programs: dict[str, Program], target: Target) -> tuple[dict[str, Any], dict[Specialisation, str]]:
    """What the child must prove, by name: problems of the tuner with configurations, and the small model's; what that launches."""
    model, train = config.model, config.train
    dtype, (rows, cols, depth) = "tf32" if train.tf32 else train.dtype, SIZE
    problems: dict[str, GemmProblem] = {}
    activation = ACTIVATIONS.get(getattr(model, "activation", ""), ACTIVATIONS["gelu"])
    epilogues = ("", "residual", "add", "start", activation.name, activation.backward.name)
    for kind, known in EPILOGUES_BY_KIND.items():
        size = rows, cols, TOKENS if kind == "tn" else depth
        problems[f"Triton GEMM {kind} {dtype}"] = GemmProblem(kind, dtype, *size)
        hopper = target.hopper and target.matmul != "triton" and dtype in ("bf16", "fp16")
        for epilogue in (e for e in epilogues if hopper and e in known):
            size = rows, cols, FEW_TOKENS if kind == "tn" and epilogue else size[2]
            problems[f"Hopper GEMM {kind} {dtype} {epilogue}".strip()] = GemmProblem(kind, dtype, *size, "hopper", epilogue)
    cases: dict[str, Any] = {name: (problem, problem.default(target.arch)) for name, problem in problems.items()}
    heads = getattr(model, "heads", 0)
    kv_heads, head = getattr(model, "kv_heads", heads), getattr(model, "head_dim", 0) or model.d_model // max(heads, 1)
    shared = kv_heads if kv_heads < heads else 0
    for operation in ("forward", "keys", "queries") if heads else ():
        name = f"attention {operation} {train.dtype}, {heads} over {kv_heads} heads of {head}"
        problem = AttentionProblem(operation, train.dtype, *ATTENTION, heads, head, kv_heads=shared)
        cases[f"Triton {name}"] = problem, problem.configs_in_triton(target.arch)[0]
        if config_of_hopper := problem.warp_specialized(target.arch):
            cases[f"Hopper {name}"] = problem, config_of_hopper
    plain = replace(target, matmul="triton", plain_attention=True)
    launches = [call for p in programs.values() for call in step.Lowered(p, plain).launches if isinstance(call, Launch)]
    specs = {call.spec: call.op.name for call in launches}
    if specs:
        digest = hashlib.sha256("".join(sorted(spec.key for spec in specs)).encode()).hexdigest()[:8]
        cases[f"{type(model).__module__.rpartition('.')[2]} model {train.dtype} {digest}"] = config
    return cases, specs


@cache
def _database() -> Database:
    """Of these sources, this Triton and its ptxas."""
    h = hashlib.sha256(f"{TRITON}|{[os.environ.get(ptxas_variable(arch), '') for arch in (80, 100)]}".encode())
    artefacts.add_sources(h, sorted(Path(__file__).parent.rglob("*.py")))
    return Database.opened(artefacts.cache_folder("checks"), f"cuda-{h.hexdigest()[:16]}")


@cache
def _tell(words: str) -> None:
    """Once a process."""
    print(f"barellm: {words}", file=sys.stderr, flush=True)
