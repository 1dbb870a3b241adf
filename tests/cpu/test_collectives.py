"""What ranks have found is added in their order, at every size; and calls out of a step."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from barellm.cpu.kernel import REGISTRY
from barellm.cpu.step import CpuSession
from barellm.distributed.memory import can_read
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.optim.optimizer import CHUNK
from barellm.program.tensor import Span, Tensor
from tests.cpu.check import ISAS, check_op, isa_named, persistent

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@each_isa
@pytest.mark.parametrize("n, others, rank", [(1, 1, 0), (17, 1, 1), (4099, 2, 1), (20011, 3, 3)])
def test_gradients_are_added_in_the_order_of_the_ranks(isa, n, others, rank):
    r = np.random.default_rng(n)
    given = {"own": persistent(r.standard_normal(n)), "others": persistent(r.standard_normal((others, n)))}
    parts = [*given["others"].values.astype(np.float32)]
    parts.insert(rank, given["own"].values.astype(np.float32))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    found = check_op(ops.SumOverRanks, isa, given, rank=rank, bounds={"y": 1e-6 * others * 8})
    assert np.array_equal(found["y"].astype(np.float32), total), "to the bit"


def test_shapes_that_do_not_fit_are_refused():
    p = Program(Store())
    own, others = p.input("own", (5,), "fp32"), p.input("others", (2, 5), "fp32")
    for wrong, rank in ((p.input("w", (2, 4), "fp32"), 0), (p.input("v", (10,), "fp32"), 0), (others, 3)):
        with pytest.raises(ValueError, match=r"^sum_over_ranks expects others \(ranks - 1, n\): own"):
            p.apply(ops.SumOverRanks, own=own, others=wrong, rank=rank)


def test_a_span_is_inside_its_tensor_and_is_refused_by_kernels_that_do_not_know_it():
    p = Program(Store())
    x = p.input("x", (4, 8), "fp32")
    for first, count in ((-1, 2), (31, 2), (3, 0)):
        with pytest.raises(ValueError, match=f"^elements {first} to {first + count} are not in tensor"):
            Span(x, first, count)
    op = p.apply(ops.Add, a=Span(x, 3, 5), b=Span(x, 8, 5))
    assert REGISTRY.refusal(op) == "the cpu backend's kernel for add takes no view for a, found a (5,) fp32"


class Neighbours:
    """Rank number `rank` of those that read each other's memory. `theirs[r][i]`: what rank r has found for share i."""

    direct = True

    def __init__(self, rank: int, theirs: list[list[np.ndarray]], process: int) -> None:
        self.rank, self.count, self.theirs, self.process = rank, len(theirs), theirs, process
        self.met: list[bool] = []

    def _others(self) -> list[list[np.ndarray]]:
        return [arrays for rank, arrays in enumerate(self.theirs) if rank != self.rank]

    def prepared(self, sends, receives):
        assert not sends

        def transfer():
            found = {rank: iter(arrays) for rank, arrays in enumerate(self.theirs)}
            for rank, array in receives:
                array[...] = next(found[rank])

        return transfer

    def peer_addresses(self, sends):
        assert not sends
        return [(self.process, [array.ctypes.data for array in arrays]) for arrays in self._others()]

    def barrier(self, *, complete: bool = True) -> None:
        self.met.append(complete)


def shares(sizes: tuple[int, ...], count: int) -> list[list[np.ndarray]]:
    r = np.random.default_rng(sum(sizes))
    return [[r.standard_normal(n).astype(np.float32) for n in sizes] for _ in range(count)]


WORD = np.arange(8, dtype=np.uint8)
can = pytest.mark.skipif(
    not can_read(os.getpid(), (WORD.ctypes.data, WORD.nbytes), WORD.tobytes()),
    reason="this system forbids to read the memory of a process",
)


@can
@each_isa
@pytest.mark.parametrize(
    "sizes, count, rank", [((1, 17), 2, 0), ((CHUNK + 5, 3), 2, 1), ((2 * CHUNK,), 3, 1), ((4099, CHUNK - 1, 2), 4, 3)]
)
def test_what_is_read_of_other_processes_is_added_in_the_order_of_the_ranks(isa, sizes, count, rank):
    theirs = shares(sizes, count)
    ranks = Neighbours(rank, theirs, os.getpid())
    given = {f"own{i}": persistent(values) for i, values in enumerate(theirs[rank])}
    bounds = {f"y{i}": 1e-6 * count for i in range(len(sizes))} | {f"p{i}": 1e-5 * CHUNK for i in range(len(sizes))}
    found = check_op(ops.ReduceScatter, isa, given, to=[()] * len(sizes), ranks=ranks, bounds=bounds)
    for i in range(len(sizes)):
        total = theirs[0][i]
        for values in theirs[1:]:
            total = total + values[i]
        assert np.array_equal(found[f"y{i}"].astype(np.float32), total), "to the bit"
    assert ranks.met and all(ranks.met)


@can
def test_a_process_that_cannot_be_read_is_told_at_the_second_meeting():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    theirs = shares((CHUNK + 9,), 2)
    p = Program(Store())
    own = p.input("own", (CHUNK + 9,), "fp32")
    ranks = Neighbours(0, theirs, gone.pid)
    found = p.apply(ops.ReduceScatter, own0=own, to=[()], ranks=ranks)
    p.output("y", found.outputs["y0"])
    session = CpuSession({"op": p}, threads=2)
    try:
        session.write("own", theirs[0][0])
        for process, whole in ((gone.pid, False), (os.getpid(), False)):  # the place of each is asked for once
            ranks.process = process
            session.run("op")
            assert ranks.met[-2:] == [True, whole]
    finally:
        session.close()


@can
@pytest.mark.parametrize("process_gone", [False, True])
def test_ops_for_parts_of_a_model_meet_before_the_first_and_after_the_last(process_gone):
    """Any of them tells of a process that cannot be read, and the ranks go no further together."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    theirs = [[np.full(CHUNK + 9, rank + 1.0, np.float32)] for rank in range(2)]
    ranks = Neighbours(0, theirs, gone.pid if process_gone else os.getpid())
    p = Program(Store())
    for i, meets in enumerate(((True, False), (False, False), (False, True))):
        own = p.input(f"own{i}", (CHUNK + 9,), "fp32")
        p.output(f"y{i}", p.apply(ops.ReduceScatter, own0=own, to=[()], meets=meets, ranks=ranks).outputs["y0"])
    session = CpuSession({"op": p}, threads=2)
    try:
        for i in range(3):
            session.write(f"own{i}", theirs[0][0])
        session.run("op")
        assert ranks.met == ([True, False, False, False] if process_gone else [True, True])
        if not process_gone:
            assert all(np.all(session.read(f"y{i}") == 3) for i in range(3))
    finally:
        session.close()


class Doubles:
    """Ranks of which the other sends back the double of what it gets."""

    rank, count = 0, 2

    def prepared(self, sends, receives):
        def transfer():
            for (_, sent), (_, received) in zip(sends, receives, strict=True):
                received.view(np.float32)[:] = 2 * sent.view(np.float32)

        return transfer


@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_out_of_a_step_sees_what_was_written_before_it_and_is_seen_after_it(threads):
    """Between kernels of many rows, so that every thread writes and reads."""
    n = 1 << 18
    p = Program(Store())
    x = p.input("x", (n,), "fp32")
    more = p.apply(ops.Add, a=x, b=x).y
    sent = Span(more, 5, n // 2)
    found = p.apply(ops.AllToAll, x0=sent, to=[(1,)], own=[n // 2], ranks=Doubles()).outputs["y0"]
    p.output("y", p.apply(ops.Add, a=found, b=found).y)
    session = CpuSession({"op": p}, threads=threads)
    try:
        for seed in (1, 2):
            values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
            session.write("x", values)
            session.run("op")
            assert np.array_equal(session.read("y").reshape(-1), 8 * values[5 : 5 + n // 2])
    finally:
        session.close()


def test_what_a_share_costs():
    """Of three ranks: two additions an element, and the square and its addition; three are read and one is written."""
    p = Program(Store())
    own = [p.input(f"own{i}", (n,), "fp32") for i, n in enumerate((CHUNK + 9, 5))]
    op = p.apply(ops.ReduceScatter, own0=own[0], own1=own[1], to=[(), ()], ranks=Neighbours(1, [[]] * 3, 0))
    assert op.flops() == 4 * (CHUNK + 14) and op.bytes() == 4 * 4 * (CHUNK + 14)


def test_the_planes_of_a_parameter_that_travel():
    """The upper one, which products read; both if somebody reads the parameter as it is; of what has no planes the whole."""
    p = Program(Store())
    rounded, exact = (Tensor(name, (4, 6), "bf16_i16", "parameter") for name in ("rounded", "exact"))
    plain = Tensor("plain", (5,), "fp32", "parameter")
    inputs = {f"x{i}": t for i, t in enumerate((rounded, exact, plain))}
    op = p.apply(ops.AllGather, **inputs, to=[(1,)] * 3, source=[], specs=[], exact={exact}, ranks=Neighbours(0, [[]] * 2, 0))
    assert [op.planes(t) for t in (rounded, exact, plain)] == [[0], [0, 1], []]
    assert op.rounded == ("x0",) and op.bytes() == 2 * 24 + 4 * 24 + 4 * 5
