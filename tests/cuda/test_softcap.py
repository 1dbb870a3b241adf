"""Softcapped losses over several next tokens, alone and as a classifier in chunks, against the float64 references."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from barellm.cuda.gemm_config import GemmConfig
from barellm.cuda.kernels.loss import classifier, cross_entropy
from barellm.program import ops
from tests.cases import check_model, loss_operands
from tests.cuda.check import PLAIN, InterpretedSession, check_op
from tests.softcap_cases import (
    LARGE,
    SPEEDRUN,
    TANH,
    WEIGHTS,
    capped_logits_case,
    each_case,
    softcap_case,
    softcap_gradient_case,
    transposed_network,
    transposed_rows,
)

each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


SmallTiles = partial(InterpretedSession, target=replace(PLAIN, config=GemmConfig(32, 32, 16, 4, 2)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    monkeypatch.setattr(cross_entropy, "LOSSES", 16)


@each_case
@each_dtype
def test_loss(case, dtype):
    check_op(ops.SoftcapCrossEntropy, **softcap_case(case, dtype))


@each_case
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_gradient(case, dtype, mode):
    check_op(ops.SoftcapCrossEntropyBackward, **softcap_gradient_case(case, dtype, mode))


@each_dtype
def test_a_whole_vocabulary(dtype, monkeypatch):
    monkeypatch.undo()
    check_op(ops.SoftcapCrossEntropy, **softcap_case(LARGE, dtype))
    check_op(ops.SoftcapCrossEntropyBackward, **softcap_gradient_case(LARGE, dtype, "store"))


@pytest.mark.parametrize("cap", [None, SPEEDRUN])
def test_a_logit_that_is_no_number_shows_in_the_loss(cap):
    given = loss_operands((1, 5, 65, 60), "fp32")
    given["logits"].values[0, 3, 33] = np.nan
    attrs = {"valid_vocab": 60, "cap": cap, "predict": 1, "bounds": dict.fromkeys(("loss", "next_loss", "lse"))}
    with np.errstate(invalid="ignore"):
        got = check_op(ops.SoftcapCrossEntropy, given, scalars=WEIGHTS, **attrs)
    assert np.isnan(got["loss"]).all() and np.isnan(got["next_loss"]).all()


@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2), ("fp16", 4e-3)])
@pytest.mark.parametrize("activation, cap, transposed", [("relu2", SPEEDRUN, True), ("gelu", None, True), ("relu2", TANH, False)])
@pytest.mark.extended
def test_a_network_of_transposed_weights(compute, limit, activation, cap, transposed, monkeypatch):
    monkeypatch.setattr(classifier, "chunk_tokens", lambda V, itemsize: 13)  # chunks end inside sequences
    declare = partial(transposed_network, C=24, F=41, V=53, activation=activation, cap=cap, transposed=transposed)
    found = check_model(SmallTiles, declare, compute=compute, limit=limit, ids=51, scalars=WEIGHTS)
    assert found >= transposed_rows(activation)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_capped_logits(dtype):
    for cap in (SPEEDRUN, TANH):
        check_op(ops.Softcap, **capped_logits_case(dtype, cap))
