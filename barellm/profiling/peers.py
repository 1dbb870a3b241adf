"""Our step and PyTorch's beside each other: every variant in a process of its own, in turns, every sample kept."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from barellm.config import Config
from barellm.errors import UserError

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODES = ("eager", "compile")
PAUSE = 0.3  # seconds between turns: threads of the one before stop spinning
TURN = 1.0  # seconds that a turn's steps should take together


@dataclass
class Variant:
    """A way to run the step: its command line, and what is set in its environment beyond ours."""

    name: str
    command: list[str]
    environment: dict[str, str]
    why: str
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, caches: Path) -> None:
        """Until its first step is done. `caches`: an empty folder, so that everyone compiles what it needs."""
        cold = {"BARELLM_CACHE": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches)}
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | cold | self.environment,
        )
        self.facts = self._answer()

    def turn(self, steps: int) -> None:
        """One step that only warms the caches, and `steps` that count."""
        assert self._process and self._process.stdin
        self._process.stdin.write(f"{steps + 1}\n")
        self._process.stdin.flush()
        answer = self._answer()
        answer["warm_up_s"] = answer["step_s"].pop(0)
        self.turns.append(answer)

    def finish(self) -> None:
        assert self._process and self._process.stdin
        self._process.stdin.close()
        self.facts |= self._answer()
        self._process.wait()

    def kill(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process and self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}: {' '.join(self.command)}")
        return json.loads(line)

    @property
    def samples(self) -> list[float]:
        return [s for turn in self.turns for s in turn["step_s"]]

    def to_json(self) -> dict[str, Any]:
        command = [Path(sys.executable).name if c == sys.executable else c for c in self.command]
        return {
            "name": self.name,
            "why": self.why,
            "environment": self.environment,
            "command": [str(Path(c).relative_to(FOLDER.parent)) if c.startswith(str(FOLDER)) else c for c in command],
            "median_s": median(self.samples),
            "min_s": min(self.samples),
            "median_of_turns_s": [median(turn["step_s"]) for turn in self.turns],
            **self.facts,
            "turns": self.turns,
        }


def peer_script(name: str) -> Path:
    """UserError where the peers' folder or PyTorch is missing."""
    script = FOLDER / "peers" / name
    if not script.exists():
        raise UserError(
            f"{script} is missing: bench peers runs from a checkout of the project, not from an installed package"
        )
    if importlib.util.find_spec("torch") is None:
        raise UserError("PyTorch is not installed for this Python (pip install torch): bench compares with it")
    return script


def environments() -> dict[str, dict[str, Any]]:
    """The peer's environments by name, with this process's processors filled in."""
    found = json.loads((FOLDER / "peers" / "environments.json").read_text())
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {n: e | {"set": {k: v.format(cpus=cpus) for k, v in e["set"].items()}} for n, e in found.items()}


def variants(config: Config) -> list[Variant]:
    """Ours, and PyTorch eager and compiled in each environment."""
    script = peer_script("torch_gpt2.py")
    model, train = config.model, config.train
    sizes = {
        "layers": model.layers, "heads": model.heads, "channels": model.channels, "vocab": model.padded_vocab,
        "batch": train.batch, "seq": train.seq, "bias": int(model.bias),
    }  # fmt: skip
    theirs = [sys.executable, str(script), "--dtype", train.dtype]
    theirs += [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    ours = [sys.executable, "-m", "barellm", "bench", "step", config.preset, "--serve", "--dtype", train.dtype]
    ours += ["--batch", str(train.batch), "--seq", str(train.seq)]
    ours += [
        f"--model.{name}={getattr(model, name)}"
        for name in ("layers", "heads", "channels", "vocab_size", "padded_vocab")
    ]
    made = [Variant("barellm", ours, {}, "threads pinned, one arena")]
    for name, environment in environments().items():
        made += [
            Variant(f"torch {m}, {name}", [*theirs, "--mode", m], environment["set"], environment["why"]) for m in MODES
        ]
    return made


def measure(config: Config, *, rounds: int, report: Any = print) -> dict[str, Any]:
    """Every variant started once, then `rounds` rounds of turns, each round in another order."""
    all_variants = variants(config)
    load = os.getloadavg()
    with _killed_at_the_end(all_variants), tempfile.TemporaryDirectory() as caches:
        for i, v in enumerate(all_variants):
            v.start(Path(caches) / str(i))
            v.turn(2)
            report(
                f"{v.name}: first step {v.facts['first_step_s']:.2f} s after its start, then {v.turns[0]['step_s'][-1]:.4f} s"
            )
        steps = max(1, round(TURN / max(v.turns[0]["step_s"][-1] for v in all_variants)))
        for v in all_variants:
            v.turns.clear()
        for i in range(rounds):
            for v in all_variants[i % len(all_variants) :] + all_variants[: i % len(all_variants)]:
                time.sleep(PAUSE)
                v.turn(steps)
            report(
                f"round {i + 1} of {rounds}: "
                + ", ".join(f"{v.name} {median(v.turns[-1]['step_s']):.4f}" for v in all_variants)
            )
        for v in all_variants:
            v.finish()
    return summary(config, all_variants, rounds=rounds, steps=steps) | {
        "load_before": load,
        "load_after": os.getloadavg(),
    }


@contextlib.contextmanager
def _killed_at_the_end(all_variants: list[Variant]) -> Iterator[None]:
    try:
        yield
    finally:
        for v in all_variants:
            v.kill()


def summary(config: Config, all_variants: list[Variant], *, rounds: int, steps: int) -> dict[str, Any]:
    """Medians, ratios, and the bound: model FLOPs at the measured peak and one pass of AdamW over memory."""
    from barellm.profiling.roofline import measured_ceiling
    from barellm.training.machine import build_programs

    ceiling = measured_ceiling()
    programs = build_programs(config)
    update = sum(ceiling.seconds(op) for op in programs["update"].ops if op.name == "adamw")
    flops, dtype = programs["micro"].flops, config.train.dtype
    bound = flops / ceiling.flops[dtype] + update
    ours = median(all_variants[0].samples)
    peers = {v.name: median(v.samples) for v in all_variants[1:]}
    best = min(peers, key=lambda name: peers[name])
    return {
        "kind": "peers",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "preset": config.preset,
        "batch": config.train.batch,
        "seq": config.train.seq,
        "dtype": dtype,
        "flops": flops,
        "rounds": rounds,
        "steps_per_turn": steps,
        "machine": machine(),
        "ceiling": ceiling.to_json(),
        "bound_s": bound,
        "ours_s": ours,
        "percent_of_bound": 100 * bound / ours,
        "tokens_per_s": config.train.batch * config.train.seq / ours,
        "ratios": {name: seconds / ours for name, seconds in peers.items()},
        "best_peer": best,
        "ratio_to_best": peers[best] / ours,
        "variants": [v.to_json() for v in all_variants],
    }


def machine() -> dict[str, Any]:
    """What a reader needs to know of the machine that the numbers are from."""
    from barellm.cpu.backend import describe

    info = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        **describe(),
        "processor": f"{info.get('model name', platform.processor())} family {info.get('cpu family')} model {info.get('model')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "huge_pages": huge.read_text().strip() if huge.exists() else None,
    }


def torch_ops(config: Config, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds to every row of `ops.measure` the seconds of PyTorch's own ops for the same work, in the tuned environment: `peer_s`,
    or None where PyTorch has no such op; and `times_peer`, ours over that, both called again and again. Both parts of
    LayerNorm's backward stand against PyTorch's one."""
    script = peer_script("torch_ops.py")
    model, train = config.model, config.train
    sizes = {"batch": train.batch, "seq": train.seq, "rows": train.batch * train.seq, "heads": model.heads}
    sizes |= {"channels": model.channels, "vocab": model.padded_vocab, "dtype": train.dtype}
    wanted = [
        sizes
        | {
            "op": row["op"].replace("layernorm_dx", "layernorm_backward"),
            "shape": [int(n) for n in row["shape"].split("x")],
        }
        for row in rows
    ]
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(wanted),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | environments()["tuned"]["set"],
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    together = {row["program"]: row["alone_s"] for row in rows if row["op"] == "layernorm_dparams"}
    for row, seconds in zip(rows, answer["s"], strict=True):
        row["peer_s"] = None if seconds is None else seconds * row["count"]
        if seconds is not None:
            ours = row["alone_s"] + (together.get(row["program"], 0.0) if row["op"] == "layernorm_dx" else 0.0)
            row["times_peer"] = ours / row["peer_s"]
    return {"peer": f"PyTorch {answer['version']}, tuned environment"}
