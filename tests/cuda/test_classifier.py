"""The classifier's loss, its gradient, and the whole of it in chunks, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from barellm.cuda import gemm_config
from barellm.cuda.fuse import FUSIONS
from barellm.cuda.gemm_config import GemmConfig
from barellm.cuda.kernel import Sizes
from barellm.cuda.kernels.loss import classifier, cross_entropy
from barellm.program import ops
from tests.cases import (
    check_classifier_of_inner_axes,
    check_network,
    check_scores,
    loss_case,
    loss_gradient_case,
    loss_of_scale_case,
    loss_operands,
    token_losses_case,
)
from tests.cuda.check import PLAIN, InterpretedSession, check_op

SHAPES = [(1, 1, 1, 1), (2, 3, 7, 7), (3, 5, 65, 65), (1, 37, 128, 97), (2, 3, 1031, 1000)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


SmallTiles = partial(InterpretedSession, target=replace(PLAIN, config=GemmConfig(32, 32, 16, 4, 2)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    monkeypatch.setattr(cross_entropy, "LOSSES", 16)


@each_shape
@each_dtype
def test_cross_entropy(shape, dtype):
    check_op(ops.CrossEntropy, **loss_case(shape, dtype))


@each_shape
@each_dtype
def test_token_losses(shape, dtype):
    got = check_op(ops.TokenLosses, **token_losses_case(shape, dtype))
    assert got["margins"][0, 0] == 0


@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
def test_scores_in_chunks(compute, limit, monkeypatch):
    monkeypatch.setattr(classifier, "chunk_tokens", lambda V, itemsize: 16)
    check_scores(SmallTiles, compute=compute, limit=limit)
    check_scores(SmallTiles, compute=compute, limit=limit, quantized=True)


@each_dtype
def test_a_vocabulary_as_large_as_the_block(dtype, monkeypatch):
    monkeypatch.undo()
    check_op(ops.CrossEntropy, **loss_case((1, 2, 50304, 50257), dtype))
    check_op(ops.CrossEntropyBackward, **loss_gradient_case((1, 2, 50304, 50257), dtype, "store", roundings=3))


@each_dtype
@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e30])
def test_logits_of_any_size(dtype, scale):
    check_op(ops.CrossEntropy, **loss_of_scale_case(scale, dtype))


@each_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_what_is_not_finite_shows_in_the_loss(dtype, bad):
    given = loss_operands((1, 5, 65, 60), dtype)
    given["logits"].values[0, 3, 33] = bad
    with np.errstate(invalid="ignore"):
        got = check_op(ops.CrossEntropy, given, valid_vocab=60, bounds={"loss": None, "lse": None})
    assert not np.isfinite(got["loss"]).any()


@each_shape
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_cross_entropy_backward(shape, dtype, mode):
    check_op(ops.CrossEntropyBackward, **loss_gradient_case(shape, dtype, mode, roundings=3))


@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes, activation", [((24, 40, 53), "gelu"), ((7, 5, 131), "gelu"), ((24, 41, 53), "relu2")], ids=str)
@pytest.mark.extended
def test_fused_ops_mean_their_sequence(compute, limit, bias, sizes, activation, monkeypatch):
    """Of a whole small model; its 33 tokens make three chunks, the last not full, and of fewer tokens some are empty."""
    monkeypatch.setattr(classifier, "chunk_tokens", lambda V, itemsize: 13)
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: 2)
    found = check_network(SmallTiles, compute=compute, limit=limit, bias=bias, sizes=sizes, activation=activation)
    assert found >= {"classifier", "classifier_loss", f"linear_{activation}", f"matmul_dx_{activation}"}
    assert found <= {f.name for f in FUSIONS} | {getattr(ops, name).name for name in ops.__all__ if name != "ACTIVATIONS"}


@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
def test_a_classifier_of_inner_axes(compute, limit, monkeypatch):
    monkeypatch.setattr(classifier, "chunk_tokens", lambda V, itemsize: 16)
    check_classifier_of_inner_axes(SmallTiles, compute=compute, limit=limit)


def test_chunks_cover_the_tokens_of_every_run():
    for tokens in (1, 12, 13, 27, 39):
        chunks = [classifier.Chunk(lambda s: s.tokens, first, 13) for first in range(0, 39, 13)]
        assert sum(chunk(Sizes(1, tokens)) for chunk in chunks) == tokens


def test_a_chunk_of_logits_stays_within_its_bytes():
    for V, itemsize in ((50304, 2), (50304, 4), (65, 2), (1 << 31, 4)):
        tokens = classifier.chunk_tokens(V, itemsize)
        assert tokens == 1 or tokens * V * itemsize <= classifier.LOGITS_BYTES < 2 * tokens * V * itemsize
