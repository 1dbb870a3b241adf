from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cpu.check import EPS, ISAS, check_op, isa_named, persistent, tokens

SHAPES = [(1, 1, 1), (3, 1, 2), (2, 3, 7), (1, 37, 65), (3, 43, 64), (2, 5, 131), (1, 70, 768)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_mode = pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
VOCABULARY = 131  # ids are claimed three at a time, the last two


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).integers(0, VOCABULARY, shape, dtype=np.int32)


@each_isa
@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "bf16_u16"])
@pytest.mark.parametrize("pos", [0, 3])
def test_embedding(isa, shape, dtype, pos):
    B, T, C = shape
    given = {
        "tokens": tokens(ids(B, T), "i32"),
        "wte": persistent(normal(VOCABULARY, C), dtype),
        "wpe": persistent(normal(T + 5, C, seed=2), dtype),
    }
    check_op(ops.Embedding, isa, given, scalars={"pos": pos}, plan=(B + 1, T + 2))


@each_isa
@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "bf16_u16"])
def test_embedding_without_positions(isa, shape, dtype):
    B, T, C = shape
    given = {"tokens": tokens(ids(B, T), "i32"), "wte": persistent(normal(VOCABULARY, C), dtype)}
    check_op(ops.Embedding, isa, given, plan=(B + 1, T + 2))


@each_isa
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16"])
def test_embedding_with_a_position_for_each_token(isa, shape, dtype):
    B, T, C = shape
    at = np.random.default_rng(6).integers(0, T + 5, (B, T), dtype=np.int32)
    tables = {"wte": persistent(normal(VOCABULARY, C), dtype), "wpe": persistent(normal(T + 5, C, seed=2), dtype)}
    given = {"tokens": tokens(ids(B, T), "i32"), **tables, "positions": tokens(at, "i32")}
    got = check_op(ops.Embedding, isa, given, scalars={"pos": 3}, plan=(B + 1, T + 2))
    assert np.array_equal(got["y"], check_op(ops.Embedding, isa, given, scalars={"pos": 0}, plan=(B + 1, T + 2))["y"])


@each_isa
@each_shape
@each_mode
def test_embedding_dwte(isa, shape, mode):
    B, T, _ = shape
    given = {"tokens": tokens(ids(B, T), "i32"), "dy": tokens(normal(*shape))}
    scalars = {"accumulate": int(mode == "start again")}
    bounds = {"dweight": 4 * EPS * B * T}
    check_op(
        ops.EmbeddingDwte,
        isa,
        given,
        modes={"dweight": mode.split()[0]},
        scalars=scalars,
        rows=VOCABULARY,
        plan=(B + 1, T + 2),
        bounds=bounds,
    )


@each_isa
def test_embedding_dwte_of_few_ids(isa):
    """Many rows of an id are added several at a time, in the order of the tokens."""
    B, T, C = 3, 97, 65
    found = np.random.default_rng(5).choice([0, 2, 77, VOCABULARY - 1], (B, T), p=[0.6, 0.1, 0.25, 0.05])
    given = {"tokens": tokens(found.astype(np.int32), "i32"), "dy": tokens(normal(B, T, C))}
    bounds = {"dweight": 4 * EPS * B * T}
    got = check_op(ops.EmbeddingDwte, isa, given, modes={"dweight": "store"}, rows=VOCABULARY, plan=(B, T), bounds=bounds)
    want = np.zeros((VOCABULARY, C), np.float32)
    for token, row in zip(found.reshape(-1), given["dy"].values.reshape(-1, C).astype(np.float32), strict=True):
        want[token] += row
    assert np.array_equal(got["dweight"], want)


@each_isa
@each_shape
@each_mode
def test_embedding_dwpe(isa, shape, mode):
    B, T, _ = shape
    scalars = {"accumulate": int(mode == "start again")}
    given = {"dy": tokens(normal(*shape))}
    bounds = {"dweight": 4 * EPS * B}
    check_op(
        ops.EmbeddingDwpe,
        isa,
        given,
        modes={"dweight": mode.split()[0]},
        scalars=scalars,
        rows=T + 5,
        plan=(B + 1, T + 2),
        bounds=bounds,
    )
