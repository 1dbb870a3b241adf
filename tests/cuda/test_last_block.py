"""Launches whose last program adds up what all of them left: in any order of blocks, with the counter at zero afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from barellm import models
from barellm.assembly.machine import build_programs
from barellm.cuda.kernel import COUNTER, Launch
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from tests.cuda.check import PLAIN, InterpretedSession
from tests.simulators import interpreter
from tests.simulators.interpreter import Execute
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run

pytestmark = pytest.mark.proof("barellm/cuda", "tests/simulators")

COUNTS = (3, 600, 70)  # partial sums of each tensor; a program adds up those of one
RUNS = 1000


def clips(execute: Execute) -> Callable[[], bytes]:
    """A run of the gradient's norm on given partial sums, which tells the bits of the result. The session holds the counter to zero
    after each launch."""
    p, r = Program(Store()), np.random.default_rng(0)
    partials = {f"p{i}": p.store.get(f"p{i}", (n,), "fp32", "gradient") for i, n in enumerate(COUNTS)}
    clip = p.apply(ops.ClipScale, skipped=p.state("skipped", (1,), "i32"), **partials, clip=1.0).outputs["clip"]
    p.output("clip", clip)
    session = InterpretedSession({"op": p}, execute=execute)
    for name, t in partials.items():
        session.write(name, r.random(t.shape) * 10.0 ** r.uniform(-6, 6, t.shape))

    def run() -> bytes:
        session.arena[session.plan.persistent_bytes :] = 0xFF
        session.run("op")
        return session.read("clip").tobytes()

    return run


def test_every_order_of_blocks_gives_the_same_bits():
    order = np.random.default_rng(1)
    blocks = [(x, 0, 0) for x in range(len(COUNTS))]

    def execute(spec, values, grid):
        drawn = [blocks[i] for i in order.permutation(len(blocks))]
        interpreter.execute(spec, values, grid, blocks=drawn)

    run = clips(execute)
    assert len({run() for _ in range(RUNS)}) == 1


def on_ptx_machine(change: Callable[[str], str] = lambda text: text) -> Execute:
    """Blocks whose warps interleave, in another order each time."""
    seeds = count()

    def execute(spec, values, grid):
        code = launch.code_of(spec, 80)
        changed = replace(code, cubin=change(code.cubin.decode()).encode())
        launch.execute(spec, values, grid, arch=80, run=Run(seed=next(seeds)), code=changed)

    return execute


def test_compiled_code_gives_the_same_bits_however_blocks_interleave():
    run = clips(on_ptx_machine())
    assert len({run() for _ in range(20)}) == 1


def without_the_reset(text: str) -> str:
    (counter,) = re.findall(r"atom\.global\S+ %r\d+, \[ (%rd\d+) ", text)
    changed, places = re.subn(rf"@%p\d+ st\.global\.b32 \[ {counter} \+ 0 \].*;", "", text)
    assert places == 1
    return changed


FAULTS = {
    "leaves the counter at 3": without_the_reset,
    "no machine knows atom.global.gpu.relaxed": lambda text: text.replace("acq_rel", "relaxed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_compiled_code_shows(fault):
    with pytest.raises(AssertionError, match=fault):
        clips(on_ptx_machine(FAULTS[fault]))()


def test_the_speedrun_saves_53_launches():
    """One launch for each op that has the gradients of scalars, where there were two."""
    config = models.preset("speedrun-small")
    programs = build_programs(replace(config, train=replace(config.train, dtype="bf16")))
    launches = lower_and_plan({"micro": programs["micro"]}, PLAIN).calls["micro"]
    counting = [c for c in launches if isinstance(c, Launch) and COUNTER in c.args]
    assert {c.spec.name for c in counting} == {"mix_backward", "gated_backward"} and len(counting) == 53
    assert all(sum(other.op is c.op for other in launches) == 1 for c in counting)
