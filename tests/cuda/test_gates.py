"""Gates and mixes on a GPU against their references."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cases import normal
from tests.cuda.check import InterpretedSession, check_op, tokens
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


@turns(LOGITS)
@pytest.mark.extended
def test_gate_logits(shape, dtype, mode):
    plan = (shape[0] + 1, shape[1] + 2)
    check_op(ops.GateLogits, **by_mode(logits_case(shape, dtype)), plan=plan)
    check_op(ops.GateLogitsBackward, **by_mode(logits_backward_case(shape, dtype, mode)), plan=plan)


@turns(GATED)
@pytest.mark.extended
def test_gated(shape, dtype, mode):
    plan = (shape[0] + 1, shape[1] + 2)
    check_op(ops.Gated, **by_mode(gated_case(shape, dtype, mode)), plan=plan)
    check_op(ops.GatedBackward, **by_mode(gated_backward_case(shape, dtype, mode)), plan=plan)


@turns(MIXES)
def test_mix(shape, dtype, mode):
    plan = (shape[0][0] + 1, shape[0][1] + 2)
    stream = dtype if mode == "add" else "fp32"
    check_op(ops.Mix, **by_mode(mix_case(shape, dtype, mode, stream)), plan=plan)
    check_op(ops.MixBackward, **by_mode(mix_backward_case(shape, dtype, mode, stream)), plan=plan)


@pytest.mark.extended
def test_sums_of_several_programs():
    """More elements than a program sums, and more partial sums than one reads at once."""
    case = (1, 900, 13), (None, None)
    check_op(ops.MixBackward, **by_mode(mix_backward_case(case, "fp32")))
    check_op(ops.GatedBackward, **by_mode(gated_backward_case((1, 700, 7, 7, 1, "factor"), "fp32")))


def test_casts_into_columns():
    x = tokens(normal(2, 5, 19))
    for mode in ("store", "add"):
        modes = {} if mode == "store" else {"y": mode}
        check_op(ops.Cast, {"x": x}, modes=modes, views={"y": ("whole", 3, 19)}, bounds={"y": 1e-6}, dtype="fp32")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_a_model_of_gates_and_mixes(compute):
    check_small_model(InterpretedSession, compute)


def test_gates_far_from_zero():
    z = tokens(np.array([-1e6, -100.0, -20.0, 20.0, 100.0, 1e6]).reshape(1, 1, -1))
    ones = tokens(np.ones((1, 1, 6)))
    attrs = {"scale": 1.0, "squash": False, "shift": 0}
    check_op(ops.Gated, {"x": ones, "z": z}, bounds={"y": 1e-13}, **attrs)
    check_op(ops.GatedBackward, {"dy": ones, "x": ones, "z": z}, bounds={"dx": 1e-13, "dz": 1e-8}, **attrs)
