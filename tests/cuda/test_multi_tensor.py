"""Tables of operands: what lies in the GPU's memory is held against it, in the interpreter and on the driver in Python."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from barellm.config import OptimConfig
from barellm.cuda.kernel import Lowering, Table
from barellm.cuda.kernels.optim.multi_tensor import entry_constants, find_entry, first_programs, integer, number, pointer
from barellm.cuda.lang import device, tl
from barellm.cuda.step import CudaSession
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part
from tests.cuda.check import PLAIN, Sizes
from tests.simulators import interpreter
from tests.simulators.mock import Gpu

COUNTS = (1, 3, 0, 2)  # programs of each entry


@device
def marked(table, ENTRIES, WIDE, ALIGN):
    """Each program writes its entry's number, and how many programs of it came before."""
    entry, turn = find_entry(table, ENTRIES, WIDE)
    out = pointer(table, entry, 1, ENTRIES, tl.float32, ALIGN)
    tl.store(out + 2 * turn, number(table, entry, 2, ENTRIES).to(tl.float32))
    tl.store(out + 2 * turn + 1, integer(table, entry, 3, ENTRIES).to(tl.float32))


def run_marked(*, shorter: int = 0, skip: int = 0, writes: tuple[str, ...] = ("out",), align: int = 16) -> np.ndarray:
    """What the programs wrote. `shorter`: bytes that the lowering forgets; `skip`: where in memory the tensors begin."""
    memory = np.full(64, np.nan, np.float32)
    start = -(-memory.ctypes.data // 16) * 16 + skip
    tensors = [Tensor(f"t{i}", (8,), "fp32", "state") for i in range(len(COUNTS))]
    firsts, programs = first_programs(COUNTS)
    fields = {
        "first": ("i64", firsts),
        "out": ("*fp32", [part(t, 0, max(8 * n, 4) - shorter) for t, n in zip(tensors, COUNTS, strict=True)]),
        "value": ("fp64", [0.5 * i for i in range(len(COUNTS))]),
        "index": ("i64", list(range(len(COUNTS)))),
    }
    c = Lowering(ops.Cast({}, {}), PLAIN)
    operands = {"table": Table(fields, writes)}
    c.launch(marked, operands, {**entry_constants(len(COUNTS)), "ALIGN": align}, grid=lambda s: (programs,), writes="")

    def address(region: Region) -> tuple[int, int]:
        at = start + 32 * tensors.index(region.tensor)
        return at + region.start, at + region.stop

    interpreter.run(c.launches[0], Sizes(), address, (0, 0), interpreter.execute)
    first = (start - memory.ctypes.data) // 4
    return memory[first : first + 32].reshape(4, 8)


def test_programs_find_their_entries():
    got = run_marked()
    for entry, count in enumerate(COUNTS):
        assert np.array_equal(got[entry, : 2 * count], [0.5 * entry, entry] * count)
        assert np.isnan(got[entry, 2 * count :]).all()


def test_a_tensor_of_a_table_may_be_touched_where_the_lowering_says_so():
    with pytest.raises(interpreter.OutOfBounds, match="element 1 of the 1 of operand 0"):
        run_marked(shorter=4)
    with pytest.raises(interpreter.OutOfBounds, match="should only read"):
        run_marked(writes=())


def test_what_a_kernel_promises_of_an_address_must_be_so():
    run_marked(skip=4, align=4)
    with pytest.raises(AssertionError, match="no multiples of 16"):
        run_marked(skip=4)


def updated(monkeypatch) -> tuple[Gpu, CudaSession]:
    gpu = Gpu()
    gpu.install(monkeypatch)
    p = Program(Store())
    for i, shape in enumerate(((5, 3), (7,), (4, 4))):
        p.parameter(f"p{i}", shape, std=1.0)
    adamw(p, OptimConfig())
    return gpu, CudaSession({"optimizer_step": p})


def test_tables_are_written_once_when_the_session_is_made(monkeypatch):
    gpu, session = updated(monkeypatch)
    tables = [a for launch in session.calls["optimizer_step"] for a in launch.args if isinstance(a, Table)]
    assert len(tables) > 2
    for table in tables:
        at = session._address(table)
        start, stop = gpu.span(at, table.nbytes)
        assert at >= session.base + session.plan.arena_bytes and stop <= start + session.memory.nbytes
        assert ctypes.string_at(at, table.nbytes) == table.packed(session._address)
    gpu.calls.clear()
    for step in (1, 2):
        session.run("optimizer_step", step=step, lr=0.1)
    session.synchronize()
    assert gpu.calls.count("cuMemcpyHtoDAsync") == 2  # the run-time scalars


@pytest.mark.parametrize("wrong", [0, 1 << 40, -64], ids=["null", "elsewhere", "before the memory"])
@pytest.mark.parametrize("field", ["x", "partials"])
def test_the_mock_looks_at_every_address_of_a_table(monkeypatch, wrong, field):
    _, session = updated(monkeypatch)
    (table,) = session.calls["optimizer_step"][0].args
    column, entry = list(table.fields).index(field), table.entries - 1
    address = session.memory.address + wrong if wrong < 0 else wrong
    at = session._address(table) + 8 * (column * table.entries + entry)
    session.memory.write(at - session.memory.address, np.frombuffer(struct.pack("<q", address), np.uint8), session.stream)
    with pytest.raises(AssertionError, match="are not the device's"):
        session.run("optimizer_step", step=1, lr=0.1)
        session.synchronize()
