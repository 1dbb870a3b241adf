from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernel import Specialisation
from barellm.program import ops
from tests.cpu.check import ISAS, check_op, isa_named
from tests.muon_cases import (
    APPLIED,
    BANKS,
    MATRICES,
    SQUARES,
    apply_case,
    bank_cases,
    gram_case,
    momentum_case,
    normalize_case,
    polynomial_case,
    scales_case,
    update_case,
)
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED


def on_each_isa(values: list, few: list):
    """All values on the best ISA of this machine, a few on the others, whose cuts are the same."""
    isas = dict([*((name, isa_named(name)) for name in ISAS), *(("amx emulated", isa) for isa in EMULATED)])
    pairs = [(name, value) for name in isas for value in (values if name == ISAS[0] else few)]
    ids = [f"{name}-{value}" for name, value in pairs]
    return pytest.mark.parametrize("isa, size", [(isas[name], value) for name, value in pairs], ids=ids)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Kernels of the emulated ISA get functions for their tile instructions."""
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)


each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_matrix = on_each_isa(MATRICES, [(33, 131), (70, 1)])
FINITE = pytest.mark.parametrize("scale", [0.5, np.nan], ids=["finite", "nan"])


@each_dtype
@on_each_isa(SQUARES, [(37, 1), (65, 130), (131, 65), (401, 33)])
@pytest.mark.extended
def test_gram(isa, dtype, size):
    got = check_op(ops.Gram, isa, **gram_case(size, dtype))["a"]
    assert np.array_equal(got, got.T)


@each_dtype
@on_each_isa([1, 33, 48, 65, 401], [1, 65])
def test_gram_polynomial(isa, dtype, size):
    got = check_op(ops.GramPolynomial, isa, **polynomial_case(size, dtype))["b"]
    assert np.array_equal(got, got.T)


@each_dtype
@on_each_isa(APPLIED, [(65, 130), (131, 65)])
@pytest.mark.extended
def test_gram_apply(isa, dtype, size):
    check_op(ops.GramApply, isa, **apply_case(size, dtype))


@each_dtype
@each_matrix
@FINITE
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_momentum(isa, dtype, size, scale, nesterov):
    case = momentum_case(size, dtype, scale, nesterov)
    got = check_op(ops.MuonMomentum, isa, **case)
    if np.isnan(scale):
        assert np.array_equal(got["m"], case["given"]["m"].values) and not got["u"].any()


@each_dtype
@each_matrix
def test_muon_normalize(isa, dtype, size):
    check_op(ops.MuonNormalize, isa, **normalize_case(size, dtype))


@each_isa
@each_dtype
def test_zeros_are_divided_by_eps(isa, dtype):
    got = check_op(ops.MuonNormalize, isa, **normalize_case((3, 21), dtype, size=0.0))
    assert not got["x"].any()


@each_dtype
@each_matrix
@FINITE
def test_normuon_scales(isa, dtype, size, scale):
    check_op(ops.NorMuonScales, isa, **scales_case(size, dtype, scale))


@each_isa
@each_dtype
def test_normuon_of_zeros_is_zero(isa, dtype):
    got = check_op(ops.NorMuonScales, isa, **scales_case((5, 33), dtype, 1.0, size=0.0))
    assert not got["scales"].any()


@each_dtype
@each_matrix
@pytest.mark.parametrize("weight_decay, cautious", [(0.0, False), (0.3, False), (0.3, True)], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "normuon"])
def test_muon_update(isa, dtype, size, weight_decay, cautious, scaled):
    check_op(ops.MuonUpdate, isa, **update_case(size, dtype, weight_decay, cautious, scaled))


@each_isa
@each_dtype
def test_muon_update_changes_nothing_where_the_norm_is_not_finite(isa, dtype):
    case = update_case((3, 131), dtype, 0.3, True, True, scale=np.nan)
    got = check_op(ops.MuonUpdate, isa, **case)
    assert np.array_equal(got["param"], case["given"]["param"].values)


@each_dtype
@on_each_isa(BANKS, [(5, 9), (131, 33)])
@pytest.mark.extended
def test_each_matrix_of_a_bank_goes_its_own_way(isa, dtype, size):
    for op_type, case in bank_cases(size, dtype):
        check_op(op_type, isa, **case)


@each_isa
@each_dtype
@pytest.mark.parametrize("cautious", [True, False])
def test_a_decay_may_fall_with_the_square_of_the_rate(isa, dtype, cautious):
    check_op(ops.MuonUpdate, isa, **update_case((3, 131), dtype, 20.0, cautious, True, squared=True))


@each_isa
def test_muon_updates_truncated_weights(isa):
    check_op(ops.MuonUpdate, isa, **update_case((7, 131), "bf16", 0.3, True, True, storage="bf16_u16"))
