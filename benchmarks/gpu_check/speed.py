"""Stages that time: steps, matmuls, attention and streaming kernels beside baselines, and the way to the first step.

On the mock driver the same code runs on next to nothing; its times are made up, so no bar is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from barellm.assembly.build import build_programs
from barellm.config import Config
from barellm.cuda import attention_config, driver, tuning
from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernel import Target
from barellm.cuda.tuner import harness, tuner
from barellm.cuda.tuner.candidates import problems_of
from barellm.cuda.tuning import AttentionProblem, GemmProblem, Problem
from barellm.errors import UserError
from barellm.runtime.tuner.problem import Candidate
from barellm.tools.bench import attentions, gemms
from barellm.tools.plan.devices import device_bytes
from barellm.tools.profile import profile
from barellm.tools.profile import step as one_step
from benchmarks import baselines, interleaved
from benchmarks.gpu_check import processes
from benchmarks.gpu_check.bars import bar
from benchmarks.gpu_check.correct import model
from benchmarks.gpu_check.stages import Scale

BATCHES, SEQ = (64, 32), 1024  # what is asked for first
ROUNDS = 3
LAST_S = 12.0  # that a piece of work may go on being tuned when the time is up
FASTER, TOKENS_S, AT_BATCH = 1.15, 550e3, 64  # than torch.compile; on one H200
OF_CUBLAS, OF_COPY, WARM_START_S = 0.95, 0.88, 3.0
STREAMING = ("adamw", "layernorm", "add_layernorm", "cast", "embedding")  # ops of the step that only move bytes
MIB = 1 << 20
# llm.c at 124M with cuDNN, derived from its allocations: MiB of activations for a sequence of 1024 tokens by what it computes again
# (-r), bytes a parameter for weights, gradients, moments and master weights, and cuBLASLt's workspace.
LLMC_SEQUENCE_MIB = {"-r 0": 397.5, "-r 1": 331.5, "-r 2": 295.5}
LLMC_PARAMETERS, LLMC_PARAMETER_BYTES, LLMC_WORKSPACE_MIB = 124_475_904, 16, 32


def llmc_mib(batch: int) -> dict[str, float]:
    """Memory of llm.c's train_gpt2.cu at batch x 1024 tokens, by -r."""
    fixed = LLMC_PARAMETERS * LLMC_PARAMETER_BYTES / MIB + LLMC_WORKSPACE_MIB
    return {name: fixed + batch * each for name, each in LLMC_SEQUENCE_MIB.items()}


def step(scale: Scale) -> dict[str, Any]:
    """Ours and torch.compile in turns at both batches; memory that each has taken for its tensors."""
    if scale.mock:
        found = one_step.measure(model(scale), steps=2, device="cuda")
        return {"ours": found, "bars": []}
    found: dict[str, Any] = {"steps": [], "bars": [], "files": {}}
    errors = []
    for batch in BATCHES[:1] if scale.small else BATCHES:
        try:
            _steps(model(scale, batch=batch, seq=SEQ), batch, found)
        except UserError as error:  # the other batch may go better
            errors.append(error)
            print(error)
        scale.keep(found)
    if errors:
        raise errors[0]
    return found


def _steps(config: Config, batch: int, found: dict[str, Any]) -> None:
    variants = [v for v in baselines.variants(config, {"torch": ""}, "cuda") if "eager" not in v.name]
    steps = interleaved.interleave(variants, rounds=ROUNDS, report=print, device_bytes=device_bytes("cuda"))
    r = baselines.summary(config, variants, rounds=ROUNDS, steps=steps, device="cuda")
    mib = {v.name: v.peak_device_bytes / MIB for v in variants}
    theirs = llmc_mib(batch)
    for v in variants[1:]:  # which of PyTorch's backends it was faster than
        print(f"attention of {v.name}: {v.facts.get('attention')}")
    found["steps"].append(r | {"memory_mib": mib, "llmc_mib": theirs})
    found["files"][f"gpt2-124m-{batch}x{SEQ}-bf16-cuda.json"] = r
    bars = found["bars"]
    bars.append(bar(f"step {batch} x {SEQ}: times as fast as torch.compile", r["ratio_to_best"], FASTER, "x"))
    if batch == AT_BATCH:
        bars.append(bar(f"step {batch} x {SEQ}: tokens/s (asked on an H200)", r["tokens_per_s"], TOKENS_S))
    name = f"memory {batch} x {SEQ}: MiB, llm.c without recompute"
    bars.append(bar(name, mib["barellm"], round(theirs["-r 0"]), at_most=True))
    compiled = next(n for n in mib if n != "barellm")
    bars.append(bar(f"memory {batch} x {SEQ}: MiB, {compiled}", mib["barellm"], round(mib[compiled]), at_most=True))


def _cublas() -> str:
    """The baseline of matmuls: cuBLASLt in this process or, where that does not work, PyTorch's cuBLAS in its own."""
    try:
        gemms.TimedOnGpu(gemms.Gemm("", "matmul", 64, 64, 16), "bf16", matmul="cublaslt").close()
    except (UserError, RuntimeError) as error:
        print(f"PyTorch is the peer: {error}")
        return "torch"
    return "cublaslt"


def gemm_model(scale: Scale) -> Config:
    """Its tokens are those of one long sequence."""
    return model(scale, batch=1, seq=9 if scale.small else BATCHES[-1] * SEQ)


def gemm(scale: Scale) -> dict[str, Any]:
    """Each matmul of the step in each pass with what is fused to it, beside cuBLAS without."""
    if scale.mock:
        gemms.MOST_COPIES, gemms.TABLE_SECONDS = 1, 0.0
    config = gemm_model(scale)
    tokens = config.train.seq
    rows, bars = [], []

    def report(p: dict[str, Any]) -> None:
        print({k: p[k] for k in ("layer", "op", "mode", "cold_s", "times_peer_cold") if k in p})
        rows.append(p)
        if "times_peer_cold" in p and not scale.mock:
            bars.append(bar(f"{p['layer']} {p['op']} {p['mode']}: of cuBLAS's speed", p["times_peer_cold"], OF_CUBLAS))
        scale.keep({"products": rows, "bars": bars})

    rounds = 1 if scale.mock else ROUNDS
    r = gemms.measure(config, tokens=[tokens], rounds=rounds, report=report, device="cuda", baseline=_cublas())
    return r | {"bars": bars, "files": {f"gemm-gpt2-124m-{tokens}-bf16-cuda.json": r}}


def attention_lengths(scale: Scale) -> tuple[int, ...]:
    return (9,) if scale.small else (512, 1024, 2048, 8192)


def attention_dtype(scale: Scale) -> str:
    return "fp32" if scale.mock else "bf16"


def attention(scale: Scale) -> dict[str, Any]:
    """Causal attention over lengths, beside each of PyTorch's backends that this card has."""
    lengths, dtype = attention_lengths(scale), attention_dtype(scale)
    if scale.small:
        attentions.TOKENS, attentions.WIDTH, attentions.PAUSE = {"cuda": 18}, 128, 0.0
        attentions.TURN = {"cuda": 0.0}
    rounds = 1 if scale.mock else ROUNDS
    r = attentions.measure(dtype, torch=not scale.mock, rounds=rounds, report=print, lengths=lengths, device="cuda")
    bars = [
        bar(f"T {c['seq']}, heads of {c['D']}, {c['what']}: times as fast as {name}", c["ratios"].get(name), 1.0, "x")
        for c in r["cases"]
        for name in (attentions.BACKENDS if "ratios" in c else ())
    ]
    return r | {"bars": bars, "files": {"attention-bf16-cuda.json": r}}


def streaming_model(scale: Scale) -> Config:
    return model(scale, batch=BATCHES[-1], seq=SEQ)


def streaming(scale: Scale) -> dict[str, Any]:
    """Bytes that must move over the time that it takes in the step, as a share of a copy's rate."""
    config = streaming_model(scale)
    with TemporaryDirectory() as folder:
        r = profile.measure(config, steps=1 if scale.mock else 7, folder=Path(folder), device="cuda")
    copy = r["ceiling"]["bandwidth"]["copy"]
    rows = [row for row in r["ops"] if row["op"].startswith(STREAMING)]
    bars = []
    for name in dict.fromkeys(row["op"] for row in rows):
        same = [row for row in rows if row["op"] == name]
        rate = sum(row["bytes"] for row in same) / sum(row["s"] for row in same)
        bars.append(bar(f"{name}: of copy bandwidth", None if scale.mock else rate / copy, OF_COPY))
    (classifier,) = [row for row in r["ops"] if row["op"] == "classifier"]
    loss_s = sum(part["s"] for symbol, part in classifier["kernels"].items() if symbol.startswith("row_losses"))
    moved = 2 * config.train.micro_batch_size * config.train.seq * config.model.padded_vocab * 2  # bf16 logits in, gradients out
    bars.append(bar("classifier's loss: of copy bandwidth", None if scale.mock else moved / loss_s / copy, OF_COPY))
    name = f"profile-gpt2-124m-{BATCHES[-1]}x{SEQ}-bf16-cuda.json"
    return {"copy_bytes_s": copy, "bars": bars, "files": {name: r}}


def sides_of(scale: Scale, target: Target) -> Iterator[tuple[AttentionProblem, list[AttentionConfig]]]:
    """Each kernel of attention, with Triton's first two configurations that are not the default."""
    for role in ("keys", "queries", "forward"):
        work = AttentionProblem(role, "bf16", *((1, 33, 1) if scale.mock else (BATCHES[0], SEQ, 12)), 64)
        yield work, [t for t in work.configs_in_triton(target.arch)[:2] if t != work.default(target.arch)]


def sides(scale: Scale) -> dict[str, Any]:
    """Attention in turns with Triton's, in one process."""
    rows, bars = [], []
    for work, tiles in sides_of(scale, Target.of(driver.device())):
        both = harness.Harness(work, calls=1 if scale.mock else harness.MAX_CALLS)
        usual = work.default(both.target.arch)
        ways = [Candidate(t, other_bits=not attention_config.bitwise_equal(work.operation, t, usual)) for t in tiles]
        for way in ways:
            both.check(way)
        ratios = both.time(ways, ROUNDS)
        for t, ratio in zip(tiles, ratios, strict=True):
            rows.append({"work": str(work), "default": str(usual), "default_s": both.seconds, "other": str(t), "ratios": ratio})
            print(rows[-1])
            name = f"attention {work.operation}: time of {t} over that of {usual}"
            bars.append(bar(name, None if scale.mock else median(ratio), 1.0))
        both.close()
        scale.keep({"turns": rows, "bars": bars})
    return {"turns": rows, "bars": bars}


def tuned(scale: Scale, target: Target) -> list[Problem]:
    """What is tuned: the pieces of work of a step, and the matmuls of one in TF32."""
    works = problems_of(build_programs(model(scale, batch=BATCHES[0], seq=SEQ)), target)
    if scale.mock:
        return [next(w for w in works if isinstance(w, kind)) for kind in (GemmProblem, AttentionProblem)]
    fp32 = build_programs(model(scale, batch=BATCHES[0], seq=SEQ, dtype="fp32"))
    return works + [w for w in problems_of(fp32, replace(target, tf32=True)) if w.dtype == "tf32"]


def tune(scale: Scale) -> dict[str, Any]:
    """How matmuls and attention of a step are cut best, what takes longest first, as far as the time goes; then matmuls in TF32.
    Every candidate is proved before it is timed; one that is wrong is a bar missed. The winners: `python -m benchmarks.gpu_check
    --ship`."""
    if scale.mock:
        tuner.HARNESS = "tests.cuda.tuner_child"
    target = Target.of(driver.device())
    works = tuned(scale, target)
    rows: list[dict[str, Any]] = []
    entries: dict[str, Any] = {}
    found = {"works": len(works), "tuned": rows, "files": {"tuned.json": {"kind": "tuned", "entries": entries}}}

    def each(verdict: Any) -> None:
        rows.append(verdict.to_json())
        print(rows[-1])
        if entry := tuning.database().entries.get(tuning.key(target, verdict.problem)):
            entries[tuning.key(target, verdict.problem)] = entry
        scale.keep(found)

    tuner.CudaTuner(target, works).tune(works, seconds=max(1.0, scale.left_s - LAST_S), each=each)
    wrong = sum(len(row["rejected"]) for row in rows)
    return found | {"bars": [bar("tiles that are rejected", wrong, 0, at_most=True)]}


def start(scale: Scale) -> dict[str, Any]:
    """Seconds from the command to the end of the first step, with empty caches and again."""
    if scale.mock:
        return {"skipped": "a process of its own has no mock driver"}
    config = model(scale, batch=BATCHES[-1], seq=SEQ)
    rows: dict[str, list[float]] = {}
    bars = []
    (variant,) = [v for v in baselines.variants(config, {"torch": ""}, "cuda") if v.name == "torch compile"]
    for name, command, repeats in (("barellm", _ours(config), 3), ("torch.compile", variant.command, 2)):
        with TemporaryDirectory() as caches:
            for _ in range(repeats):
                rows.setdefault(name, []).append(_first_step(command, caches, scale.left_s))
                print(name, rows[name], flush=True)
                scale.keep({"first_step_s": rows})
        if name == "barellm":
            bars.append(bar("first step, warm, s", median(rows[name][1:]), WARM_START_S, at_most=True))
    (cold, *warm), (their_cold, *their_warm) = rows["barellm"], rows["torch.compile"]
    bars.append(bar("first step, cold: times as soon as torch.compile", their_cold / cold, 1.0, "x"))
    ratio = median(their_warm) / median(warm)
    bars.append(bar("first step, warm: times as soon as torch.compile", ratio, 1.0, "x"))
    return {"first_step_s": rows, "bars": bars}


def _ours(config: Config) -> list[str]:
    return baselines.ours(config, device="cuda").command


def _first_step(command: list[str], caches: str, limit_s: float) -> float:
    """What the process says when its first step is done; it is then given no turn."""
    names = ("BARELLM_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
    done = processes.run(command, limit_s=limit_s, environment=dict.fromkeys(names, caches))
    if done.status != 0:
        raise RuntimeError(done.why)
    return float(json.loads(done.out.splitlines()[0])["first_step_s"])
