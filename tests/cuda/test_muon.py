from __future__ import annotations

import numpy as np
import pytest

from barellm.cuda import step
from barellm.cuda.kernels.optim import symmetric
from barellm.optim.muon import Muon
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.optim.muon import lines
from barellm.runtime.reference import ReferenceSession
from tests.cases import normal
from tests.cuda.check import InterpretedSession, check_op
from tests.muon_cases import (
    APPLIED,
    BANKS,
    MATRICES,
    apply_case,
    bank_cases,
    gram_case,
    momentum_case,
    normalize_case,
    polynomial_case,
    scales_case,
    update_case,
)
from tests.optim import test_normuon

each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_shape = pytest.mark.parametrize("shape", MATRICES, ids=str)
FINITE = pytest.mark.parametrize("scale", [0.5, np.nan], ids=["finite", "nan"])
SQUARES = [(1, 1), (1, 37), (37, 1), (65, 130), (131, 65), (33, 401)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(symmetric, "side_of", lambda n, dtype: 32)


@each_dtype
@pytest.mark.parametrize("shape", SQUARES, ids=str)
def test_gram(dtype, shape):
    got = check_op(ops.Gram, **gram_case(shape, dtype))["a"]
    assert np.array_equal(got, got.T)


@each_dtype
@pytest.mark.parametrize("n", [1, 37, 65, 97])
def test_gram_polynomial(dtype, n):
    got = check_op(ops.GramPolynomial, **polynomial_case(n, dtype))["b"]
    assert np.array_equal(got, got.T)


@each_dtype
@pytest.mark.parametrize("shape", APPLIED, ids=str)
@pytest.mark.extended
def test_gram_apply(dtype, shape):
    check_op(ops.GramApply, **apply_case(shape, dtype))


@each_dtype
@each_shape
@FINITE
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_momentum(dtype, shape, scale, nesterov):
    case = momentum_case(shape, dtype, scale, nesterov)
    got = check_op(ops.MuonMomentum, **case)
    if np.isnan(scale):
        assert np.array_equal(got["m"], case["given"]["m"].values) and not got["u"].any()


@each_dtype
@each_shape
def test_muon_normalize(dtype, shape):
    check_op(ops.MuonNormalize, **normalize_case(shape, dtype))


@each_dtype
@each_shape
@FINITE
def test_normuon_scales(dtype, shape, scale):
    check_op(ops.NorMuonScales, **scales_case(shape, dtype, scale))


@each_dtype
def test_normuon_of_zeros_is_zero(dtype):
    got = check_op(ops.NorMuonScales, **scales_case((5, 33), dtype, 1.0, size=0.0))
    assert not got["scales"].any()


@each_dtype
@each_shape
@pytest.mark.parametrize("weight_decay, cautious", [(0.0, False), (0.3, False), (0.3, True)], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "normuon"])
def test_muon_update(dtype, shape, weight_decay, cautious, scaled):
    check_op(ops.MuonUpdate, **update_case(shape, dtype, weight_decay, cautious, scaled))


@each_dtype
def test_muon_update_changes_nothing_where_the_norm_is_not_finite(dtype):
    case = update_case((3, 131), dtype, 0.3, True, True, scale=np.nan)
    got = check_op(ops.MuonUpdate, **case)
    assert np.array_equal(got["param"], case["given"]["param"].values)


@each_dtype
@pytest.mark.parametrize("shape", BANKS, ids=str)
@pytest.mark.extended
def test_each_matrix_of_a_bank_goes_its_own_way(dtype, shape):
    for op_type, case in bank_cases(shape, dtype):
        check_op(op_type, **case)


@each_dtype
@pytest.mark.parametrize("cautious", [True, False])
def test_a_decay_may_fall_with_the_square_of_the_rate(dtype, cautious):
    check_op(ops.MuonUpdate, **update_case((3, 131), dtype, 20.0, cautious, True, squared=True))


def test_muon_updates_truncated_weights():
    check_op(ops.MuonUpdate, **update_case((7, 131), "bf16", 0.3, True, True, storage="bf16_u16"))


@pytest.mark.extended
def test_the_ends_of_record_74s_steps_are_theirs():
    """One of each kind, tied and untied, beside NumPy (tests/optim/test_normuon.py)."""
    ours = InterpretedSession(test_normuon.programs())
    theirs = test_normuon.Theirs(test_normuon.begin(ours))
    for grads, told in test_normuon.drive(ours, steps=4, split=1):
        theirs.step(grads, **told)
    for name, want in theirs.all().items():
        np.testing.assert_allclose(ours.read(name), want, rtol=2e-3, atol=2e-3, err_msg=name)


# --- many matrices in a launch ---

SHAPES = [(48, 32), (32, 48), (7, 5), (48, 32), (32, 48), (33, 33)]


def updated(optimizer: Muon, compute: str, kind, *, shapes=SHAPES, **options):
    """(session, launches) after two updates of all."""
    p = Program(Store(), compute=compute)
    params = [p.parameter(f"p{i}", shape, std=1.0) for i, shape in enumerate(shapes)]
    optimizer.update(p, params, p.input("clip", (2,), "fp32"))
    session = kind({"optimizer_step": p}, **options)
    for t in params:
        session.write(t.name, normal(*t.shape, seed=t.size))
        session.write(f"{t.name}.m", np.zeros(t.shape))
        if optimizer.beta2:
            session.write(f"{t.name}.v", np.zeros(lines(t, optimizer.matrices)))
    session.write("clip", np.array([2.0, 0.5]))
    for i in range(2):
        for t in params:
            session.write(f"{t.name}.grad", normal(*t.shape, seed=10 * i + t.size))
        session.run("optimizer_step", lr=1e-2, momentum=0.9)
    return session, [x.spec.name for low in getattr(session, "lowered", {}).values() for x in low.launches]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_matrices_of_one_shape_in_a_launch_have_the_bits_of_single_ones(compute, monkeypatch):
    optimizer = Muon(beta2=0.9, weight_decay=0.1)
    together, launches = updated(optimizer, compute, InterpretedSession)
    monkeypatch.setattr(step, "GROUPS", {})
    apart, many = updated(optimizer, compute, InterpretedSession)
    assert together.digest() == apart.digest()
    assert many.count("gram_apply") == 5 * len(SHAPES) and launches.count("gram_apply") == 5 * len(set(SHAPES))
    for name in ("muon_momentum", "muon_normalize", "muon_update"):
        assert launches.count(name) < many.count(name) == len(SHAPES)


@pytest.mark.parametrize("matrices, shapes", [(1, SHAPES), (3, [(48, 24), (75, 9), (48, 24), (9, 40)])])
@pytest.mark.extended
def test_an_update_is_the_references(matrices, shapes):
    optimizer = Muon(beta2=0.9, weight_decay=0.1, cautious=True, squared=matrices > 1, matrices=matrices)
    session, launches = updated(optimizer, "fp32", InterpretedSession, shapes=shapes)
    oracle, _ = updated(optimizer, "fp32", ReferenceSession, shapes=shapes)
    assert launches.count("gram_apply") == 5 * len({(rows // matrices, cols) for rows, cols in shapes})
    for name in oracle.tensors:
        np.testing.assert_allclose(session.read(name), oracle.read(name), rtol=1e-4, atol=1e-5, err_msg=name)
