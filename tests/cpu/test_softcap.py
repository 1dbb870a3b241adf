"""Softcapped losses over several next tokens, alone and as a classifier in chunks, against the float64 references."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.cpu.kernels.loss import classifier
from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from tests.cases import check_model, loss_operands
from tests.cpu.check import ISAS, check_op, isa_named
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

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@each_isa
@each_case
@each_dtype
def test_loss(isa, case, dtype):
    check_op(ops.SoftcapCrossEntropy, isa, **softcap_case(case, dtype))


@each_isa
@each_case
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_gradient(isa, case, dtype, mode):
    check_op(ops.SoftcapCrossEntropyBackward, isa, **softcap_gradient_case(case, dtype, mode))


@each_dtype
def test_a_whole_vocabulary(dtype):
    isa = isa_named(ISAS[0])
    check_op(ops.SoftcapCrossEntropy, isa, **softcap_case(LARGE, dtype))
    check_op(ops.SoftcapCrossEntropyBackward, isa, **softcap_gradient_case(LARGE, dtype, "store"))


@each_isa
@pytest.mark.parametrize("cap", [None, SPEEDRUN])
def test_a_logit_that_is_no_number_shows_in_the_loss(isa, cap):
    given = loss_operands((1, 5, 65, 60), "fp32")
    given["logits"].values[0, 3, 33] = np.nan
    attrs = {"valid_vocab": 60, "cap": cap, "predict": 1, "bounds": dict.fromkeys(("loss", "next_loss", "lse"))}
    with np.errstate(invalid="ignore"):
        got = check_op(ops.SoftcapCrossEntropy, isa, given, scalars=WEIGHTS, **attrs)
    assert np.isnan(got["loss"]).all() and np.isnan(got["next_loss"]).all()


@each_isa
@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2), ("fp16", 4e-3)])
@pytest.mark.parametrize("activation, cap, transposed", [("relu2", SPEEDRUN, True), ("gelu", None, True), ("relu2", TANH, False)])
@pytest.mark.extended
def test_a_network_of_transposed_weights(isa, compute, limit, activation, cap, transposed, monkeypatch):
    monkeypatch.setattr(classifier, "CHUNK", 8)  # 33 tokens: chunks end inside sequences, the last is not full
    declare = partial(transposed_network, C=24, F=41, V=53, activation=activation, cap=cap, transposed=transposed)
    session = partial(CpuSession, isa=isa, threads=2)
    found = check_model(session, declare, compute=compute, limit=limit, ids=51, scalars=WEIGHTS)
    assert found >= transposed_rows(activation)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_bits_do_not_depend_on_threads(compute, monkeypatch):
    """Loss and gradients of the whole network, whose classifier has five chunks."""
    monkeypatch.setattr(classifier, "CHUNK", 8)
    found: list[dict[str, np.ndarray]] = []
    for threads in (1, 2, 5):
        p = Program(Store(), compute=compute)
        transposed_network(p, C=24, F=41, V=53, activation="relu2")
        p.backward(p.named["loss"])
        session = CpuSession({"train": p}, threads=threads)
        r = np.random.default_rng(0)
        try:
            for t in p.store.of_role("parameter"):
                session.write(t.name, 0.3 * r.normal(size=t.shape))
            for name in ("tokens", "targets"):
                session.write(name, r.integers(0, 51, (3, 11), dtype=np.int32))
            session.run("train", batch=3, seq=11, accumulate=0, inv_targets=0.1, **WEIGHTS)
            found.append({"loss": session.read("loss")} | {t.name: session.read(t.name) for t in p.store.of_role("gradient")})
        finally:
            session.close()
    for name, value in found[0].items():
        assert np.abs(value).max() > 0 and all(np.array_equal(value, other[name]) for other in found[1:]), name


@each_isa
@each_dtype
def test_capped_logits(isa, dtype):
    for cap in (SPEEDRUN, TANH):
        check_op(ops.Softcap, isa, **capped_logits_case(dtype, cap))
