"""What ranks have found is added in their order, at every size; and calls out of a step."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernel import REGISTRY
from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Span
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
    found = check_op(ops.AddRanks, isa, given, rank=rank, bounds={"y": 1e-6 * others * 8})
    assert np.array_equal(found["y"].astype(np.float32), total), "to the bit"


def test_shapes_that_do_not_fit_are_refused():
    p = Program(Store())
    own, others = p.input("own", (5,), "fp32"), p.input("others", (2, 5), "fp32")
    for wrong, rank in ((p.input("w", (2, 4), "fp32"), 0), (p.input("v", (10,), "fp32"), 0), (others, 3)):
        with pytest.raises(ValueError, match=r"^add_ranks expects others \(ranks - 1, n\): own"):
            p.apply(ops.AddRanks, own=own, others=wrong, rank=rank)


def test_a_span_is_inside_its_tensor_and_is_refused_by_kernels_that_do_not_know_it():
    p = Program(Store())
    x = p.input("x", (4, 8), "fp32")
    for first, count in ((-1, 2), (31, 2), (3, 0)):
        with pytest.raises(ValueError, match=f"^elements {first} to {first + count} are not in tensor"):
            Span(x, first, count)
    op = p.apply(ops.Add, a=Span(x, 3, 5), b=Span(x, 8, 5))
    assert REGISTRY.refusal(op) == "the cpu backend's kernel for add takes no view for a, found a (5,) fp32"


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
    found = p.apply(ops.Exchange, x0=sent, to=[(1,)], own=[n // 2], ranks=Doubles()).outputs["y0"]
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
