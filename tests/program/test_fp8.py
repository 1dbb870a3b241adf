"""Products in 8 bits as ops: their gradients, and the scales that follow the numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from barellm.config.number_formats import number_format
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import LARGEST, round_to_eight
from barellm.program.ops.gemm.fp8 import Static, scaled_matmul
from barellm.program.ops.optim.scales import BLOCKSPARSE, Delayed, Floating, due, round_floating
from barellm.program.ops.pointwise.random import words
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.fp8_cases import codes_of, each_format, every_number, product_case
from tests.program.graphs import Leaf, Weigh

X, WEIGHT, DY = 0.5, 0.25, 0.125  # scales


def product(scaling, x: np.ndarray, weight: np.ndarray, runs: int = 1, grow: float = 1.0) -> ReferenceSession:
    """After some micro-batches of a product whose numbers grow; the gradient of y is that of `Weigh`, seed 1."""
    p = Program(Store())
    shape = (Dim("batch", x.shape[0]), Dim("seq", x.shape[1]))
    leaf = p.apply(Leaf, x=p.input("x", (*shape, x.shape[2]), "fp32")).y
    given = p.add(leaf, p.linear(leaf, p.parameter("zero", (x.shape[2], x.shape[2]))))  # so that x has a gradient
    y = p.output("y", scaled_matmul(p, given, p.parameter("w", weight.shape), scaling))
    p.output("loss", p.apply(Weigh, x=y, seed=1).loss)
    p.backward(p.named["loss"])
    session = ReferenceSession({"forward_backward": p})
    session.write("w", weight)
    for run in range(runs):
        session.write("x", x * grow**run)
        session.run("forward_backward", inv_targets=0.5)
    return session


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@each_format
def test_a_code_is_its_own_nearest_and_a_tie_goes_to_the_even_one(dtype):
    codes = codes_of(dtype)
    finite = np.unique(codes[np.isfinite(codes)])
    np.testing.assert_array_equal(round_to_eight(finite, dtype).astype(np.float64), finite)
    middle = (finite[1:] + finite[:-1]) / 2
    found = round_to_eight(middle, dtype)
    assert not (found.view(np.uint8) & 1).any()
    assert (np.abs(found.astype(np.float64) - middle) == (finite[1:] - finite[:-1]) / 2).all()
    assert round_to_eight(np.array([np.inf, -1e9]), dtype).astype(float).tolist() == [LARGEST[dtype], -LARGEST[dtype]]


def test_gradients_are_products_of_the_codes():
    x, weight, dy = numbers(2, 3, 5, seed=2), numbers(5, 7, seed=3), numbers(2, 3, 7, seed=1)
    session = product(Static("head", X, WEIGHT, DY), x, weight)
    codes = {name: round_to_eight(v / by, "e4m3").astype(float) * by for name, v, by in (("x", x, X), ("w", weight, WEIGHT))}
    dy = round_to_eight(dy / (DY * 0.5), "e5m2").astype(float) * (DY * 0.5)
    np.testing.assert_allclose(session.read("y"), codes["x"] @ codes["w"], rtol=1e-12)
    wanted = codes["x"].reshape(6, 5).T @ dy.reshape(6, 7)
    np.testing.assert_allclose(session.read("w.grad"), wanted, rtol=1e-12)
    dx = (dy @ codes["w"].T).reshape(6, 5)  # through the sum of x and x times zero
    np.testing.assert_allclose(session.read("zero.grad"), dx.T @ x.reshape(6, 5), rtol=1e-12)
    assert np.abs(session.read("y") - x @ weight).max() > 1e-3


def test_a_delayed_scale_knows_the_largest_number_of_before():
    x, weight = numbers(1, 4, 3, seed=4), numbers(3, 2, seed=5)
    session = product(Delayed("head", (X, WEIGHT, DY)), x, weight, runs=3, grow=2.0)
    top = np.float32(np.abs(x).max())
    np.testing.assert_array_equal(session.read("head.x.history")[:4], [4 * top, 2 * top, top, 0])
    # The third run used the largest of the first two, with room for numbers 1.5 times as large: here for none of 4 / 3 of that.
    scale = 1.5 * 2 * top / 448
    codes = round_to_eight(4 * x / scale, "e4m3").astype(float) * scale
    weight_scale = 1.5 * np.abs(weight).max() / 448
    wanted = codes @ (round_to_eight(weight / weight_scale, "e4m3").astype(float) * weight_scale)
    np.testing.assert_allclose(session.read("y"), wanted, rtol=1e-6)
    assert np.abs(codes).max() == pytest.approx(3 * top)  # it saturated


def test_a_floating_bias_is_updated_after_4_8_16_micro_batches():
    assert [n for n in range(4100) if due(n)] == [0, *(2**k for k in range(2, 11)), 2048, 3072, 4096]
    x, weight = numbers(1, 4, 3, seed=4), numbers(3, 2, seed=5)
    x *= 1.5 / np.abs(x).max()
    for runs, emax in ((1, 2), (4, 2), (5, 6), (8, 6), (9, 10)):
        session = product(Floating("head"), x, weight, runs=runs, grow=2.0)
        assert session.read("head.x.bias").tolist() == [emax, runs]


@pytest.mark.parametrize("denormals", [True, False])
def test_1_4_3_bits_are_those_numbers(denormals):
    """Every number goes to the nearest of a list that is written out here, ties away from zero."""
    emax, x = 3, np.abs(every_number().reshape(-1))
    x = x[x < 1e6]
    grid = [(1 + f / 8) * 2.0**e for e in range(emax - 14, emax + 1) for f in range(8)]
    grid = np.array([0.0, *([f / 8 * 2.0 ** (emax - 14) for f in range(1, 8)] if denormals else []), *grid])
    form = replace(BLOCKSPARSE, denormals=denormals)
    found = round_floating(x, emax, form, "away")
    assert set(found) <= set(grid) and len(set(found)) == len(grid)
    near = np.abs(grid[None, :] - x[:, None])
    best = near.min(1)
    largest = np.array([grid[row == least].max() for row, least in zip(near, best, strict=True)])
    inside = x >= 2.0 ** (emax - 14) if not denormals else x >= 0
    np.testing.assert_array_equal(found[inside], largest[inside])
    np.testing.assert_array_equal(round_floating(-x, emax, form, "away"), -found)


@pytest.mark.parametrize("name", ["e2m0", "e3m0", "e2m1", "e4m1", "e3m4", "e4m3", "e6m2b9"])
def test_any_format_has_the_numbers_of_its_codes(name):
    """They are written out here: of two that are as near, the code whose last bit is 0."""
    form, x_bits, y_bits = number_format(name), int(name[1]), int(name[3])
    assert form is not None
    bias = int(name[5:] or 2 ** (x_bits - 1) - 1)
    codes = 2 ** (x_bits + y_bits) - {"e4m3": 1}.get(name, 0 if x_bits + y_bits < 7 else 2**y_bits)
    grid = np.array([
        (code % 2**y_bits / 2**y_bits + (code >= 2**y_bits)) * 2.0 ** (max(code >> y_bits, 1) - bias) for code in range(codes)
    ])  # fmt: skip
    x = np.sort(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, np.abs(every_number().reshape(-1))]))
    x = x[x < 2 * grid[-1]]
    near = np.abs(grid[None, :] - x[:, None])
    best = near == near.min(1, keepdims=True)
    even = np.array([next(code for code in np.flatnonzero(row) if row.sum() == 1 or code % 2 == 0) for row in best])
    np.testing.assert_array_equal(round_floating(x, form.top, form), grid[even])


def test_the_mean_of_stochastic_roundings_is_the_number():
    """Numbers of every way between two neighbours, denormals and less than those; what the format has stays."""
    form, n = number_format("e4m3"), 20_000
    assert form is not None
    x = np.array([1.01, 1.06, 1.12, 100.7, 2.0**-9 * 0.3, 2.0**-9 * 2.9, -3.3, 448.0, -0.4375])
    bits = words(1, 1, 0, 7, np.arange(n), x.size)
    found = round_floating(np.tile(x, (n, 1)), form.top, form, "stochastic", bits)
    lower, upper = found.min(0), found.max(0)
    deviation = (upper - lower) / 2
    assert (np.abs(found.mean(0) - x.astype(np.float32)) <= 5 * deviation / np.sqrt(n)).all()
    assert (deviation[:7] > 0).all() and (deviation[7:] == 0).all()
    nearest = round_floating(x, form.top, form)
    assert ((nearest == lower) | (nearest == upper)).all() and (np.unique(found[:, 0]) == [1.0, 1.125]).all()


def test_the_three_products_cost_the_same():
    B, T, K, N = shape = (2, 3, 5, 7)
    for op_type in (ops.ScaledMatmul, ops.ScaledMatmulDx, ops.ScaledMatmulDw):
        given = {name: g.values for name, g in product_case(op_type, shape)["given"].items()}
        p = Program(Store())
        tensors = {name: p.state(name, v.shape, dtype="fp32") for name, v in given.items()}
        more = {} if op_type is ops.ScaledMatmulDw else {"dtype": "fp32"}
        more |= {"source": (), "scaling": None} if op_type is ops.ScaledMatmul else {}
        p.apply(op_type, **tensors, **more)
        assert p.ops[-1].flops() == 2 * B * T * K * N, op_type.name


def test_operands_that_do_not_fit_are_named():
    p = Program(Store())
    x, weight, scale = (p.input(n, s, d) for n, s, d in (("x", (2, 3), "e4m3"), ("w", (3, 4), "fp32"), ("s", (1,), "fp32")))
    with pytest.raises(
        ValueError, match=r"scaled_matmul expects operands that fit, all of e4m3 or e5m2 or of one dtype: x \(2, 3\)"
    ):
        p.apply(ops.ScaledMatmul, x=x, weight=weight, x_scale=scale, weight_scale=scale, dtype="fp32")
    with pytest.raises(ValueError, match=r"quantise expects a scale \(1,\) and one of e4m3, e5m2: scale \(1,\) fp32, fp16"):
        p.apply(ops.Quantise, x=weight, scale=scale, dtype="fp16", per_target=False)
    with pytest.raises(ValueError, match="expected fp32 or bf16, not fp16"):
        scaled_matmul(Program(Store(), compute="fp16"), x, weight, Static("head", X, WEIGHT, DY))
