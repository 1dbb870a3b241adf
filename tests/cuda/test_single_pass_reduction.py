"""Launches whose last program adds up what all of them left: in any order of blocks, with the counter at zero afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, permutations
from math import factorial

import numpy as np
import pytest

from barellm import models
from barellm.assembly.build import build_programs
from barellm.cuda.kernel import COUNTER, Launch, Specialisation
from barellm.cuda.kernels.single_pass_reduction import is_last_program
from barellm.cuda.lang import device, tl
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise.mix import COEFFICIENTS
from tests.cuda.check import PLAIN, InterpretedSession
from tests.simulators import interpreter
from tests.simulators.interpreter import Execute
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run

COUNTS = (3, 600, 70)  # partial sums of each tensor; a program adds up those of one
DK = [f"d{name}" for name in COEFFICIENTS]


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
    orders = permutations([(x, 0, 0) for x in range(len(COUNTS))])

    def execute(spec, values, grid):
        interpreter.execute(spec, values, grid, blocks=next(orders))

    run = clips(execute)
    assert len({run() for _ in range(factorial(len(COUNTS)))}) == 1


@pytest.mark.extended
def test_a_thousand_drawn_orders_give_the_same_bits():
    """Six programs end in 720 orders. Their numbers are of sizes so different that another order of additions is another sum."""
    draw = np.random.default_rng(1)
    programs, block = 6, 16
    x = (draw.normal(size=(programs, block)) * 10.0 ** draw.uniform(-4, 4, (programs, block))).astype(np.float32)
    places = [(0, y, z) for z in range(3) for y in range(2)]

    def execute(spec, values, grid):
        interpreter.execute(spec, values, grid, blocks=iter([places[i] for i in draw.permutation(programs)]))

    found = set(sums_of(x, (1, 2, 3), execute, runs=1000))
    wanted = np.zeros(block, np.float32)
    for row in x:
        wanted += row
    assert found == {wanted.tobytes()}
    assert len({x[draw.permutation(programs)].sum(0).tobytes() for _ in range(50)}) > 20


def on_ptx_machine(change: Callable[[str], str] = lambda text: text) -> Execute:
    """Blocks whose warps interleave, in another order each time."""
    seeds = count()

    def execute(spec, values, grid):
        code = launch.code_of(spec, 80)
        changed = replace(code, cubin=change(code.cubin.decode()).encode())
        launch.execute(spec, values, grid, arch=80, run=Run(seed=next(seeds), apart=True), code=changed)

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


@device
def sums(out, partials, counter, x, BLOCK):
    """out (BLOCK) = the sum of x (programs, BLOCK) over programs. All threads of a program leave something for the last one."""
    i, number = tl.arange(0, BLOCK), tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    tl.store(partials + number * BLOCK + i, tl.load(x + number * BLOCK + i))
    if is_last_program(counter):
        total = tl.zeros((BLOCK,), tl.float32)
        for program in range(tl.num_programs(1) * tl.num_programs(2)):
            total += tl.load(partials + program * BLOCK + i)
        tl.store(out + i, total)


def sums_of(x: np.ndarray, grid: tuple[int, int, int], execute: Execute, *, runs: int) -> Iterator[bytes]:
    """The bits of `sums` of x, of each run. The counter is zero after it."""
    block = x.shape[1]
    signature = (("out", "*fp32"), ("partials", "*fp32"), ("counter", "*i32"), ("x", "*fp32"))
    spec = Specialisation(sums, signature, (("BLOCK", block),), (("num_stages", 3), ("num_warps", 4)), ())
    out, partials = np.empty(block, np.float32), np.empty_like(x)
    counter = np.zeros(1, np.int32)
    values = []
    for array in (out, partials, counter, x):
        begin = array.ctypes.data
        values.append(interpreter.Pointer(begin, begin, begin + array.nbytes, array is not x))
    for _ in range(runs):
        out[:] = partials[:] = np.nan
        execute(spec, values, grid)
        assert counter[0] == 0
        yield out.tobytes()


def sums_are_right(change: Callable[[str], str], *, runs: int) -> bool:
    x = np.arange(6 * 128, dtype=np.float32).reshape(6, 128)
    return all(bits == x.sum(0).tobytes() for bits in sums_of(x, (1, 2, 3), on_ptx_machine(change), runs=runs))


def without_the_barrier(text: str) -> str:
    """The one that all threads' stores are before, when a program counts itself."""
    before, counts, after = text.partition("atom.global")
    barrier = before.rindex("bar.sync")
    return before[:barrier] + before[before.index("\n", barrier) :] + counts + after


def test_a_program_counts_itself_when_all_its_threads_have_stored():
    assert sums_are_right(lambda text: text, runs=20)
    assert not sums_are_right(without_the_barrier, runs=100)  # one in six shows it


def test_the_gradients_of_scalars_take_one_launch():
    """Each op of the speedrun's that has some, where there were two: 53 launches are saved."""
    config = models.preset("speedrun-small")
    programs = build_programs(replace(config, train=replace(config.train, dtype="bf16")))
    launches = lower_and_plan({"forward_backward": programs["forward_backward"]}, PLAIN).calls["forward_backward"]
    counting = [c for c in launches if isinstance(c, Launch) and COUNTER in c.args]
    scalars = {op for op in programs["forward_backward"].ops if any(name in ("dfactor", *DK) for name in op.outputs)}
    assert {c.spec.name for c in counting} == {"mix_backward", "gated_backward"} == {op.name for op in scalars}
    assert len(counting) == len(scalars)
    assert all(sum(other.op is c.op for other in launches) == 1 for c in counting)
