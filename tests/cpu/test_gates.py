"""Gates and mixes on the CPU against their references."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.cpu.step import CpuSession
from barellm.program import ops
from tests.cases import normal
from tests.cpu.check import ISAS, changed, check_op, isa_named, tokens
from tests.gates_cases import (
    GATED,
    LOGITS,
    MIXES,
    by_mode,
    check_small_model,
    gated_backward_case,
    gated_case,
    logits_backward_case,
    logits_case,
    mix_backward_case,
    mix_case,
    turns,
)

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


def check(op_type, isa, case, **more):
    case = by_mode(case)
    return check_op(op_type, isa, case.pop("given"), **case, **more)


@each_isa
@turns(LOGITS)
def test_gate_logits(isa, shape, dtype, mode):
    plan = (shape[0] + 1, shape[1] + 2)
    check(ops.GateLogits, isa, logits_case(shape, dtype), plan=plan)
    check(ops.GateLogitsBackward, isa, logits_backward_case(shape, dtype, mode), plan=plan)


@each_isa
@turns(GATED)
@pytest.mark.extended
def test_gated(isa, shape, dtype, mode):
    plan = (shape[0] + 1, shape[1] + 2)
    check(ops.Gated, isa, gated_case(shape, dtype, mode), plan=plan)
    check(ops.GatedBackward, isa, gated_backward_case(shape, dtype, mode), plan=plan)


@each_isa
@turns(MIXES)
def test_mix(isa, shape, dtype, mode):
    plan = (shape[0][0] + 1, shape[0][1] + 2)
    stream = dtype if mode == "add" else "fp32"
    check(ops.Mix, isa, mix_case(shape, dtype, mode, stream), plan=plan)
    check(ops.MixBackward, isa, mix_backward_case(shape, dtype, mode, stream), plan=plan)


@each_isa
@pytest.mark.extended
def test_results_written_past_the_caches(isa, monkeypatch):
    """With the limit at zero. Rows that are no whole groups of vectors cannot go there."""
    changed(monkeypatch, loops, STREAM_BYTES=0)
    for C, N in ((256, 2), (128, 1), (96, 1)):
        for words in ("", "base factor"):
            shape = (2, 37, C, N, len(words) // 8, words)
            check(ops.Gated, isa, gated_case(shape, "bf16", stream="fp32"))
            check(ops.GatedBackward, isa, gated_backward_case(shape, "bf16"))
        case = (2, 37, C), (None, 0.5)
        check(ops.Mix, isa, mix_case(case, "bf16"))
        check(ops.MixBackward, isa, mix_backward_case(case, "bf16"))


@each_isa
def test_gradients_start_where_nothing_is_accumulated(isa):
    case = mix_backward_case(MIXES[2], "bf16", "start")
    check_op(ops.MixBackward, isa, case.pop("given"), **case, scalars={"accumulate": 0})
    case = gated_backward_case(GATED[2], "bf16", "start")
    check_op(ops.GatedBackward, isa, case.pop("given"), **case, scalars={"accumulate": 0})


@each_isa
def test_zeros_and_casts_of_columns(isa):
    x = tokens(normal(2, 5, 19))
    for mode, more in (("store", {}), ("add", {}), ("start", {"accumulate": 1}), ("start", {"accumulate": 0})):
        modes = {} if mode == "store" else {"y": mode}
        for views in ({}, {"y": ("whole", 3, 19)}, {"y": ("whole", 64, 19)}):
            check_op(ops.Cast, isa, {"x": x}, modes=modes, views=views, scalars=more, bounds={"y": 1e-6}, dtype="fp32")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_a_model_of_gates_and_mixes(compute):
    check_small_model(lambda programs: CpuSession(programs, isa=isa_named(ISAS[0]), threads=2), compute)


def test_gates_far_from_zero():
    z = tokens(np.array([-1e6, -100.0, -20.0, 20.0, 100.0, 1e6]).reshape(1, 1, -1))
    ones = tokens(np.ones((1, 1, 6)))
    attrs = {"scale": 1.0, "squash": False, "shift": 0}
    isa = isa_named(ISAS[-1])
    check_op(ops.Gated, isa, {"x": ones, "z": z}, bounds={"y": 1e-13}, **attrs)
    given = {"dy": ones, "x": ones, "z": z}
    check_op(ops.GatedBackward, isa, given, bounds={"dx": 1e-13, "dz": 1e-8}, **attrs)
