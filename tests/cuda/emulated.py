"""Two training steps of a small model through NVIDIA's bindings, the driver library in C and the PTX machine, beside the CPU
backend. A process of its own, which test_emulated.py starts on that library:

    python -m tests.cuda.emulated gpt2

It prints a line of JSON: losses and the CPU's, how far gradients and weights are from the CPU's, what ran and what it did. With
--first one step without the comparison, with --planted and the names of kernels what became of each planted fault in them
(simulators/planted.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from barellm.assembly.programs import build
from barellm.config import Config as RunConfig
from barellm.config import OptimConfig, TrainConfig
from barellm.cpu.step import CpuSession
from barellm.cuda import driver, gemm_config
from barellm.cuda.step import CudaSession
from barellm.models.gpt2 import Config as Gpt2
from barellm.models.llama3 import Config as Llama
from barellm.models.speedrun import Config as Speedrun
from barellm.models.speedrun import training_schedule
from barellm.models.stages import Stage, table
from barellm.models.training_schedule import on_step
from barellm.optim.adamw import adamw
from barellm.optim.recipes import updates
from tests.cpu.test_models import OPTIM, train
from tests.simulators import emulator
from tests.simulators.planted import Planted

SHAPE = (2, 72)  # sequences and their tokens: no multiple of a tile
ROW = 72  # tokens of a row of documents
STAGES = table([Stage(ROW, (1, 2), Fraction(1), mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)), Stage(ROW, (2, 5))])
SPEEDRUN_OPTIM = OptimConfig(name="speedrun", lr=0.008, muon_lr=0.023, weight_decay=1.2, cautious=True, normuon=0.95, clip=0.0)


def train_on_documents(session: Any, model: Speedrun, count: int) -> list[float]:
    """Losses of the first steps of the speedrun's schedule: the first ends with Muon's update, the second with Adam's as well."""
    run = RunConfig(preset="", model=model, optim=SPEEDRUN_OPTIM, train=TrainConfig(micro_batch_size=1, seq=ROW, steps=4))
    schedule, rng, losses = training_schedule(run), np.random.default_rng(3), []
    for index in range(count):
        step = schedule.step(index, 4)
        on_step(session, run, index, 4)
        row = rng.integers(0, model.vocab_size, (1, step.seq + 1)).astype(np.int32)
        row[0, [5, 6, 17]] = model.separator
        session.write("tokens", row[:, :-1])
        session.write("targets", row[:, 1:])
        scalars = {"batch": 1, "seq": step.seq, "inv_targets": step.inv_targets}
        session.run("forward_backward", accumulate=int(step.adds), **scalars)
        losses.append(float(session.read("loss")[0]) * step.shown)
        for program, values in step.updates:
            session.run(program, **values)
    return losses


@dataclass(frozen=True)
class Case:
    """A model, how its programs are built and how they train; `first`: as its first step alone. `sizes`: of a micro-batch."""

    model: Any
    optimizer: Any
    steps: Callable[[Any], Any]
    first: Callable[[Any], Any]
    sizes: tuple[int, int] = SHAPE
    compute: str = "bf16"

    def open(self, kind: Any, **options: Any) -> Any:
        batch, seq = self.sizes
        _, programs = build(self.model, batch=batch, seq=seq, compute=self.compute, optimizer=self.optimizer)
        session = kind(programs, **options)
        session.run("init", seed=3)
        return session


def usual(model: Any, sizes: tuple[int, int] = SHAPE, **options: Any) -> Case:
    """Two steps of two micro-batches, the second of a smaller batch and half the length."""

    def steps(session: Any, count: int) -> list[float]:
        return train(session, model, sizes, steps=count, micros=count)

    return Case(model, partial(adamw, config=OPTIM), partial(steps, count=2), partial(steps, count=1), sizes, **options)


ODD = Gpt2(layers=1, heads=3, d_model=21, vocab_size=37, padded_vocab=41, max_seq=9, dropout=0.1)
ALIGNED = Gpt2(layers=1, heads=2, d_model=128, vocab_size=320, padded_vocab=320, max_seq=64)
GPT2 = Gpt2(layers=1, heads=2, d_model=128, vocab_size=130, padded_vocab=192, max_seq=72)
LLAMA = Llama(
    layers=1, heads=2, kv_heads=1, d_model=128, d_ff=192, vocab_size=130, padded_vocab=192, max_seq=72, tied=False
)  # fmt: skip
SPEEDRUN = Speedrun(
    layers=4, heads=2, d_model=128, d_ff=128, vocab_size=61, max_seq=ROW, block=8, stages=STAGES, separator=3, extension=2,
    untie=1, long="1", paired="0", values="1,3", skipped="2", skip_from=1, lanes_from=2, backout=2,
)  # fmt: skip
CASES = {
    "odd": usual(ODD, (2, 9), compute="fp32"),
    "aligned": usual(ALIGNED, (2, 64)),
    "gpt2": usual(GPT2),
    "llama": usual(LLAMA),
    "speedrun": Case(
        SPEEDRUN, updates(SPEEDRUN_OPTIM, ""), partial(train_on_documents, model=SPEEDRUN, count=2),
        partial(train_on_documents, model=SPEEDRUN, count=1), (1, ROW),
    ),
}  # fmt: skip


def small_card() -> None:
    """Products of a small model are worth Hopper's kernels, and sums over tokens are in up to three parts where the result has two
    tiles or more."""
    gemm_config.WAVE = 1
    gemm_config.num_splits = lambda tiles, rows: min(3, max(rows // 32, 1)) if tiles > 1 else 1


def beside_the_cpu(case: Case, cuda: Any) -> dict[str, Any]:
    """Trains both, from the GPU's first weights. Distances: of a gradient relative to its norm, or to that of numbers of 1e-3; of
    weights relative to how far the CPU's have moved."""
    cpu, before = case.open(CpuSession, threads=1), {}
    for name, t in cpu.tensors.items():
        if t.role == "parameter":
            before[name] = cuda.read(name)
            cpu.write(name, before[name])
    got, want = case.steps(cuda), case.steps(cpu)
    gradients, weights = {}, {}
    for name, t in cpu.tensors.items():
        if t.role in ("parameter", "gradient"):
            a, b = cuda.read(name).astype(np.float64), cpu.read(name).astype(np.float64)
            distance = float(np.linalg.norm(a - b))
        if t.role == "gradient":
            gradients[name] = distance / max(float(np.linalg.norm(b)), 1e-3 * np.sqrt(b.size))
        elif t.role == "parameter":
            weights[name] = distance / (float(np.linalg.norm(b - before[name].astype(np.float64))) or 1.0)
    cpu.close()
    return {"losses": [got, want], "gradients": gradients, "weights": weights}


def main() -> None:
    case = CASES[sys.argv[1]]
    small_card()
    on = driver.device()  # here the emulator begins
    machine = emulator.current
    assert machine is not None, "LIBCUDA_PYTHON names no emulator"
    planted = Planted(on.arch, set(sys.argv[3:]))
    if "--planted" in sys.argv:
        machine.before.append(planted)
    cuda = case.open(CudaSession)
    found: dict[str, Any] = {}
    if len(sys.argv) > 2:
        case.first(cuda)
    else:
        found |= beside_the_cpu(case, cuda)
    found |= {"planted": planted.found, "digest": cuda.digest(), "launched": machine.launched}
    cuda.close()
    of = lambda c: [c.instructions, c.sectors, c.asked, c.passes, c.needed]  # noqa: E731
    counts = {name: [one.total() for one in of(c)] for name, c in machine.counts.items()}
    print(json.dumps(found | {"counts": counts}), flush=True)


if __name__ == "__main__":
    main()
