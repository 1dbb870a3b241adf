from __future__ import annotations

import numpy as np
import pytest

from barellm.cuda.kernels.embedding import embedding as kernels
from barellm.program import ops
from tests.cuda.check import EPS, check_op, persistent, tokens

SHAPES = [(1, 1, 1), (3, 1, 2), (2, 3, 7), (3, 43, 64), (1, 7, 384)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_mode = pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
VOCABULARY = 23


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).integers(0, VOCABULARY, shape, dtype=np.int32)


@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])
@pytest.mark.parametrize("pos", [0, 3])
def test_embedding(shape, dtype, pos):
    B, T, C = shape
    given = {
        "tokens": tokens(ids(B, T), "i32"),
        "wte": persistent(normal(VOCABULARY, C), dtype),
        "wpe": persistent(normal(T + 5, C, seed=2), dtype),
    }
    check_op(ops.Embedding, given, scalars={"pos": pos}, plan=(B + 1, T + 2))


@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])
def test_embedding_without_positions(shape, dtype):
    B, T, C = shape
    given = {"tokens": tokens(ids(B, T), "i32"), "wte": persistent(normal(VOCABULARY, C), dtype)}
    check_op(ops.Embedding, given, plan=(B + 1, T + 2))


def check_dwte(which: np.ndarray, C: int, mode: str, rows: int = VOCABULARY, dtype: str = "fp32") -> None:
    B, T = which.shape
    most = np.unique(which, return_counts=True)[1].max()
    check_op(
        ops.EmbeddingDwte,
        {"tokens": tokens(which, "i32"), "dy": tokens(normal(B, T, C), dtype)},
        modes={"dweight": mode.split()[0]},
        scalars={"accumulate": int(mode == "start again")},
        rows=rows,
        plan=(B + 1, T + 2),
        bounds={"dweight": 4 * EPS * (1 + most)},
    )


@each_shape
@each_mode
@pytest.mark.extended
def test_embedding_dwte(shape, mode):
    check_dwte(ids(*shape[:2]), shape[2], mode)


def test_embedding_dwte_in_bf16():
    check_dwte(ids(2, 9), 7, "store", dtype="bf16")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several merges, and tokens that reach over the borders of programs, of few tokens."""
    monkeypatch.setattr(kernels, "SORTED", 16)
    monkeypatch.setattr(kernels, "STEPS", 4)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33, 100, 129])
@pytest.mark.parametrize("kinds", [1, 2, 5, 100])
@pytest.mark.extended
def test_tokens_sorted_by_merging(small_blocks, count, kinds):
    """With one kind every program's keys are one token; with 100 hardly any two are."""
    which = np.random.default_rng(count).integers(0, kinds, (1, count), dtype=np.int32)
    check_dwte(which, 3, "store", rows=101)


def test_the_highest_ids_are_in_order(small_blocks):
    which = np.array([[2**16 + 1, 0, 2**16, 2**16 + 1, 1, 2**16 + 1, 2**16, 0]], np.int32)
    check_dwte(which, 1, "start", rows=2**16 + 2)


@each_shape
@each_mode
def test_embedding_dwpe(shape, mode):
    B, T, _ = shape
    check_op(
        ops.EmbeddingDwpe,
        {"dy": tokens(normal(*shape))},
        modes={"dweight": mode.split()[0]},
        scalars={"accumulate": int(mode == "start again")},
        rows=T + 5,
        plan=(B + 1, T + 2),
        bounds={"dweight": 4 * EPS * B},
    )
