"""PowerSGD's ops on the CPU: against float64, at odd sizes, with more columns of a factor than a tile has and with one."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.builder import Program, Store
from tests.cases import chain_bound, normal
from tests.cpu.check import EPS, ISAS, check_op, isa_named, persistent, stored

SIZES = [(1, 1, 1), (1, 70, 1), (70, 1, 1), (33, 131, 2), (131, 33, 5), (259, 257, 9), (2100, 20, 3)]
FEW = [(33, 131, 5), (131, 33, 2)]
CASES = [(name, size) for name in ISAS for size in (SIZES if name == ISAS[0] else FEW)]
each_size = pytest.mark.parametrize("isa, size", [(isa_named(n), s) for n, s in CASES], ids=[f"{n}-{s}" for n, s in CASES])
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


def matrices(rows: int, cols: int, **more):
    grad, error = normal(rows, cols), 0.3 * normal(rows, cols, seed=2)
    return {"grad": persistent(grad, role="gradient"), "error": persistent(error, role="state"), **more}


def clip(scale: float):
    return persistent(np.array([2.0, scale]), role="state")


@each_size
@pytest.mark.parametrize("transposed", [False, True], ids=["across", "down"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_factors(isa, size, transposed, dtype):
    rows, cols, rank = size
    f = persistent(normal(rank, rows if transposed else cols, seed=3), role="state")
    given = matrices(rows, cols, f=f)
    m = given["grad"].values + given["error"].values
    m = m.T if transposed else m
    bound = (chain_bound(m, f.values.T) + 4 * EPS * np.abs(m) @ np.abs(f.values.T)).T
    check_op(ops.Factor, isa, given, bounds={"y": bound}, rank=rank, transposed=transposed, dtype=dtype)


@each_isa
@pytest.mark.parametrize("n, rank", [(1, 1), (5, 1), (5, 5), (33, 4), (700, 7)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_basis_is_orthonormal_and_spans_what_it_was_made_of(isa, n, rank, dtype):
    x = stored(normal(rank, n), dtype)
    got = check_op(ops.Householder, isa, {"x": persistent(x, dtype, "state")}, bounds={"y": 1e-5}, rank=rank)["y"]
    assert np.abs(got @ got.T - np.eye(rank)).max() < 2e-6
    assert np.abs(x - x @ got.T @ got).max() < 1e-5 * np.abs(x).max()
    expected = np.linalg.qr(x.T)[0].T
    np.testing.assert_allclose(np.abs(got), np.abs(expected), atol=2e-5)


@each_isa
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30], ids=["zero", "small", "large"])
def test_dependent_columns_of_any_size_get_an_orthonormal_basis(isa, size):
    x = size * normal(4, 37).astype(np.float32)
    x[2], x[1] = 3 * x[0], 0.0
    got = check_op(ops.Householder, isa, {"x": persistent(x, role="state")}, bounds={"y": None}, rank=4)["y"]
    assert np.abs(got @ got.T - np.eye(4)).max() < 2e-6
    assert np.abs(x[3] - got.T @ (got @ x[3])).max() <= 1e-5 * size


@each_isa
def test_what_is_not_finite_stays_so(isa):
    x = normal(2, 9)
    x[1, 4] = np.inf
    with np.errstate(invalid="ignore"):
        got = check_op(ops.Householder, isa, {"x": persistent(x, role="state")}, bounds={"y": None}, rank=2)["y"]
    assert not np.isfinite(got).all()


def feedback_case(rows: int, cols: int, rank: int, tall: bool, scale: float, dtype: str = "bf16"):
    of_q, of_p = (rows, cols) if tall else (cols, rows)
    own, total = normal(rank, of_q, seed=5), 3 * normal(rank, of_q, seed=6)
    factors = {"own": persistent(own, dtype, "state"), "total": persistent(total, dtype, "state")}
    p, q = persistent(normal(rank, of_p, seed=4), role="state"), persistent(normal(rank, of_q, seed=7), role="state")
    return matrices(rows, cols, p=p, **factors, q=q, clip=clip(scale))


@each_size
@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
@pytest.mark.parametrize("scale", [0.5, np.nan], ids=["finite", "nan"])
def test_feedback(isa, size, tall, scale):
    given = feedback_case(*size, tall, scale)
    bound = 40 * EPS * np.sqrt(size[2]) * 12 * size[2]
    got = check_op(ops.Feedback, isa, given, bounds={"grad": bound, "error": bound}, rank=size[2], tall=tall)
    if np.isnan(scale):
        for name in ("grad", "error", "q"):
            assert np.array_equal(got[name], given[name].values.astype(np.float32)), name
        return
    assert np.array_equal(got["q"], given["total"].values)
    p, own = (given[name].values for name in ("p", "own"))
    m = given["grad"].values + given["error"].values
    product = own.T @ p if tall else p.T @ own
    np.testing.assert_allclose(got["error"] + product, m, atol=bound, err_msg="M = P Q' + E")


def test_operands_that_do_not_fit_are_refused():
    p = Program(Store())
    m, wrong, f = p.input("m", (4, 6), "fp32"), p.input("w", (6, 4), "fp32"), p.input("f", (2, 6), "fp32")
    attrs = {"rank": 2, "dtype": "bf16"}
    with pytest.raises(ValueError, match=r"^factor of rank 2 expects equal matrices and their factors: grad \(4, 6\)"):
        p.apply(ops.Factor, grad=m, error=wrong, f=f, transposed=False, **attrs)
    with pytest.raises(ValueError, match=r"^factor of rank 2 .*f \(2, 6\)"):
        p.apply(ops.Factor, grad=m, error=m, f=f, transposed=True, **attrs)
    with pytest.raises(ValueError, match=r"^factor expects a matrix: grad \(2, 6, 1\)"):
        p.apply(ops.Factor, grad=p.input("g", (2, 6, 1), "fp32"), error=m, f=f, transposed=True, **attrs)
    with pytest.raises(ValueError, match=r"^householder expects 5 columns of at least 5 numbers: x \(2, 6\)"):
        p.apply(ops.Householder, x=f, rank=5)
    with pytest.raises(ValueError, match=r"^householder expects 4 columns of at least 4 numbers: x \(2, 6\)"):
        p.apply(ops.Householder, x=f, rank=4)
    given = {name: f for name in ("p", "own", "total", "q")}
    with pytest.raises(ValueError, match=r"^feedback of rank 2 expects .*own \(2, 6\)"):
        p.apply(ops.Feedback, grad=m, error=m, clip=p.input("c", (2,), "fp32"), **given, rank=2, tall=False)
    with pytest.raises(ValueError, match=r"^feedback expects a matrix and clip \(2\): grad \(4, 6\) fp32, clip \(2, 6\)"):
        p.apply(ops.Feedback, grad=m, error=m, clip=f, **given, rank=2, tall=False)
