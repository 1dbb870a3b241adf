"""Products with weights, their gradients and what is fused with them, interpreted with small tiles, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from barellm.cuda import gemm_config
from barellm.cuda.gemm_config import GemmConfig, max_splits, num_splits
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.integers import ceil_div
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.cases import (
    COMMON,
    VIEWED,
    as_operand,
    assert_like_the_reference,
    chain_bound,
    check_products_of_views,
    check_products_that_add,
    each_leading,
    leading_case,
    operands,
    viewed_case,
)
from tests.cuda import check
from tests.cuda.check import EPS, PLAIN, InterpretedSession

each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
# (batch, seq, N, K): ones, primes, one more and one less than tiles of 32 x 64 x 16, more tiles than are grouped.
SHAPES = [(1, 1, 1, 1), (1, 3, 7, 5), (2, 17, 65, 33), (1, 31, 129, 48), (3, 97, 131, 31)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


SMALL_TILES = replace(PLAIN, config=GemmConfig(32, 64, 16, 4, 2))
check_op = partial(check.check_op, target=SMALL_TILES)


@each_dtype
@each_shape
def test_matmul(dtype, shape):
    x, _, weight = operands(shape, dtype)
    bounds = {"y": chain_bound(x.values, as_operand(weight, dtype).T)}
    check_op(ops.Matmul, {"x": x, "weight": weight}, bounds=bounds, plan=(shape[0], shape[1] + 2))


@each_dtype
@each_shape
@pytest.mark.parametrize("mode", ["store", "add"])
def test_matmul_dx(dtype, shape, mode):
    _, dy, weight = operands(shape, dtype)
    bounds = {"dx": chain_bound(dy.values, as_operand(weight, dtype)) + 2 * EPS}
    check_op(ops.MatmulDx, {"dy": dy, "weight": weight}, modes={"dx": mode}, bounds=bounds)


@each_dtype
@each_shape
@pytest.mark.parametrize("mode, accumulate", [("store", 0), ("start", 0), ("start", 1), ("add", 0)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.extended
def test_matmul_dw(dtype, shape, mode, accumulate, parts, monkeypatch):
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: parts)
    x, dy, _ = operands(shape, dtype)
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    check_op(
        ops.MatmulDw, {"dy": dy, "x": x}, modes={"dweight": mode}, scalars={"accumulate": accumulate},
        bounds={"dweight": chain_bound(flat[0].T, flat[1]) + 2 * EPS}, plan=(shape[0], shape[1] + 90),
    )  # fmt: skip


@each_dtype
@each_leading
@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
def test_axes_of_any_kind(dtype, leading, op_type):
    check_op(op_type, **leading_case(op_type, leading, dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
def test_columns_of_wider_tensors(dtype, op_type, monkeypatch):
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: 2)
    for viewed in VIEWED:
        check_op(op_type, **viewed_case(op_type, viewed, dtype, "add" if viewed[1] else "store"))


@each_dtype
def test_an_fp32_result_of_bf16_operands(dtype):
    x, _, weight = operands((1, 33, 40, 24), dtype)
    bounds = {"y": chain_bound(x.values, as_operand(weight, dtype).T)}
    check_op(ops.Matmul, {"x": x, "weight": weight}, bounds=bounds, dtype="fp32")


def test_tiles_give_equal_bits():
    """An element is one chain over the contraction, whatever the tile."""
    x, dy, weight = operands((1, 67, 51, 50), "bf16")
    cases = [(ops.Matmul, {"x": x, "weight": weight}), (ops.MatmulDx, {"dy": dy, "weight": weight})]
    for op_type, given in cases:
        got = []
        for tile in (GemmConfig(16, 16, 16, 1, 1), GemmConfig(64, 32, 16, 1, 1), GemmConfig(16, 128, 16, 1, 1)):
            got.append(check_op(op_type, given, bounds={"y": 1e-4, "dx": 1e-4}, target=replace(PLAIN, config=tile)))
        for other in got[1:]:
            assert all(np.array_equal(other[name], values) for name, values in got[0].items())


def forward(p: Program, x, bias: bool, C: int, F: int):
    w, b = p.parameter("w", (F, C), std=0.3), p.parameter("b", (F,), value=0.5) if bias else None
    return p.linear(x, w, b)


def linear(p: Program, x, bias, C, F):
    p.output("y", forward(p, x, bias, C, F))


def activated(name: str) -> Callable[..., None]:
    def build(p: Program, x, bias, C, F):
        y = forward(p, x, bias, C, F)
        p.output("y", p.activate(y, name))
        p.output("pre", y)

    build.__name__ = f"linear_{name}"
    return build


def linear_residual(p: Program, x, bias, C, F):
    residual = p.input("residual", (*x.shape[:-1], F), "fp32")
    p.output("y", p.add(residual, forward(p, x, bias, C, F)))


def sloped(name: str) -> Callable[..., None]:
    def build(p: Program, x, bias, C, F):
        dy = p.input("dy", (*x.shape[:-1], F), x.dtype)
        dx = p.apply(ops.MatmulDx, dy=dy, weight=p.parameter("w", (F, C), std=0.3)).dx
        p.output("dx", p.apply(ops.ACTIVATIONS[name].backward, dy=dx, x=x).dx)

    build.__name__ = f"matmul_dx_{name}"
    return build


def sloped_transposed(name: str) -> Callable[..., None]:
    def build(p: Program, x, bias, C, F):
        y = p.apply(ops.Matmul, x=x, weight=p.parameter("w", (F, C), std=0.3)).y
        pre = p.input("pre", (*x.shape[:-1], F), x.dtype)
        p.output("y", p.apply(ops.ACTIVATIONS[name].backward, dy=y, x=pre).dx)

    build.__name__ = f"matmul_{name}_backward"
    return build


FORWARD = [linear, linear_residual, *map(activated, COMMON), *map(sloped_transposed, COMMON)]
FUSED = [*FORWARD, *map(sloped, COMMON)]


@pytest.mark.parametrize("build", FUSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 4e-3)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("tile", [GemmConfig(32, 64, 16, 4, 2), GemmConfig(16, 256, 16, 4, 2)], ids=["one part", "four parts"])
def test_what_is_fused_means_its_sequence(build, compute, limit, bias, tile):
    C, F = 35, 77
    p = Program(Store(), compute=compute)
    build(p, p.input("x", (Dim("batch", 3), Dim("seq", 11), C), compute), bias, C, F)
    session = InterpretedSession({"op": p}, target=replace(PLAIN, config=tile))
    oracle = ReferenceSession({"op": p})
    names = [op.name for op in session.lowered["op"].ops]
    assert names == [build.__name__] or (build is linear and names == ["matmul"])
    for (batch, seq), seed in (((3, 11), 3), ((1, 1), 4)):
        assert_like_the_reference(p, session, oracle, batch=batch, seq=seq, seed=seed, limit=limit)


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 8e-3)])
def test_fused_products_that_add(compute, limit):
    check_products_that_add(partial(InterpretedSession, target=SMALL_TILES), compute=compute, limit=limit)


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 8e-3)])
@pytest.mark.parametrize("plan, forward", [((3, 11), "gemm"), ((2, 4), "skinny_gemm")], ids=["gemm", "few rows"])
def test_fused_products_of_columns(compute, limit, plan, forward):
    in_two_parts = partial(InterpretedSession, target=replace(PLAIN, config=GemmConfig(16, 128, 16, 4, 2)))
    made = check_products_of_views(in_two_parts, compute=compute, limit=limit, C=19, F=35, plan=plan)
    many = len(COMMON)
    assert [c.launches[0].spec.name for c in made] == [forward] * (2 + many) + ["gemm"] * many


def test_splits_grow_with_tokens_and_their_scratch_is_enough():
    for tiles in (1, 2, 18, 54, 72, 131, 1179):
        counts = [num_splits(tiles, 1 << i) for i in range(18)]
        assert counts[0] == 1 and max(counts) <= gemm_config.MAX_SPLITS
        for rows in (1, 255, 257, 4096, 5000, 65537):
            assert num_splits(tiles, rows) <= max_splits(tiles, rows)


def test_a_weight_gradient_of_few_tiles_fills_the_card():
    for N, K, rows in ((768, 768, 65536), (2304, 768, 65536), (768, 3072, 65536)):
        tile = GemmConfig(128, 256, 64, 8, 3)
        tiles = ceil_div(N, tile.tile_m) * ceil_div(K, tile.tile_n)
        programs = tiles * num_splits(tiles, rows)
        assert programs / (gemm_config.WAVE * ceil_div(programs, gemm_config.WAVE)) > 0.9
