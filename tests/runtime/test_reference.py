"""The reference session on whole models: sessions of the other backends must behave the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession

MODEL = ModelConfig(layers=2, heads=2, d_model=12, vocab_size=17, max_seq=10)


def session_of(model=MODEL, *, batch=4, seq=8, recompute=False, compute="fp32", decode_batch=0, optim=None, **options):
    optimizer = partial(adamw, config=optim or OptimConfig())
    sizes = {"batch": batch, "seq": seq, "decode_batch": decode_batch, "compute": compute}
    _, programs = build(model, **sizes, optimizer=optimizer, recompute=recompute)
    session = ReferenceSession(programs, **options)
    session.run("init", seed=1)
    rng = np.random.default_rng(0)
    for name, t in session.tensors.items():
        if t.role == "parameter":
            session.write(name, session.read(name) + rng.normal(size=t.shape) * 0.1)
    return session


def data(model=MODEL, batch=4, seq=8, seed=0):
    rng = np.random.default_rng(seed)
    targets = rng.integers(-1, model.vocab_size, (batch, seq))
    targets[0, 0] = 1
    return rng.integers(0, model.vocab_size, (batch, seq)), targets


def micro(session, tokens, targets, **scalars):
    session.write("tokens", tokens)
    session.write("targets", targets)
    shape = {"batch": tokens.shape[0], "seq": tokens.shape[1]}
    session.run("forward_backward", **shape, **({"inv_targets": 0.1, "step": 1} | scalars))
    return session.read("loss")[0]


def gradients(session) -> dict[str, np.ndarray]:
    return {t.name: session.read(t.name) for t in session.store.of_role("gradient")}


@st.composite
def models(draw):
    heads = draw(st.integers(1, 4))
    vocab = draw(st.sampled_from([2, 3, 13, 17, 31]))
    return ModelConfig(
        layers=draw(st.integers(1, 3)),
        heads=heads,
        d_model=heads * draw(st.integers(1, 5)),
        vocab_size=vocab,
        padded_vocab=vocab + draw(st.integers(0, 3)),
        max_seq=draw(st.sampled_from([1, 2, 7, 11])),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.25])),
    )


@settings(max_examples=25, deadline=None)
@given(model=models(), batch=st.integers(1, 3), recompute=st.booleans(), seed=st.integers(0, 1000))
def test_whole_models_of_any_shape_have_the_right_gradients(model, batch, recompute, seed):
    """The loss along a random direction of all weights at once, against finite differences."""
    session = session_of(model, batch=batch, seq=model.max_seq, recompute=recompute)
    tokens, targets = data(model, batch, model.max_seq, seed)
    micro(session, tokens, targets, seed=seed)
    found = gradients(session)
    rng = np.random.default_rng(seed)
    weights = {name: session.read(name) for name, t in session.tensors.items() if t.role == "parameter"}
    directions = {name: rng.normal(size=w.shape) for name, w in weights.items()}
    losses = []
    for sign in (1, -1):
        for name, w in weights.items():
            session.write(name, w + sign * 1e-6 * directions[name])
        losses.append(micro(session, tokens, targets, seed=seed))
    slope = sum((found[f"{name}.grad"] * d).sum() for name, d in directions.items())
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-5)
    assert (found["wte.grad"][model.vocab_size :] == 0).all()


@pytest.mark.parametrize("dropout, bits", [(0.0, "threefry"), (0.3, "threefry"), (0.3, "taus88")])
def test_micro_batches_accumulate_to_the_whole_batch(dropout, bits):
    """Any split, dropout included: gradients are those of one batch."""
    tokens, targets = data(batch=4)
    model = replace(MODEL, dropout=dropout, dropout_bits=bits)
    whole, parts = session_of(model), session_of(model)
    loss = micro(whole, tokens, targets, sample=20, seed=5)
    losses = [
        micro(parts, tokens[lo:hi], targets[lo:hi], sample=20 + lo, seed=5, accumulate=int(lo > 0)) for lo, hi in ((0, 1), (1, 4))
    ]
    assert sum(losses) == pytest.approx(loss, rel=1e-12)
    for name, expected in gradients(whole).items():
        np.testing.assert_allclose(gradients(parts)[name], expected, rtol=1e-9, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    "compute, storage, bits", [(c, s, "threefry") for c in ("fp32", "bf16") for s in (False, True)] + [("bf16", True, "lfsr113")]
)
def test_recompute_gives_equal_results(compute, storage, bits):
    found = []
    model = replace(MODEL, dropout=0.2, dropout_bits=bits)
    for recompute in (False, True):
        session = session_of(model, recompute=recompute, compute=compute, storage=storage)
        loss = micro(session, *data())
        session.run("optimizer_step", step=1, lr=1e-2)
        found.append({"loss": loss} | {name: session.read(name) for name in session.tensors})
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


def test_storage_in_fp32_is_close_and_bf16_is_rounded():
    exact = session_of()
    loss = micro(exact, *data())
    fp32 = session_of(storage=True)
    assert micro(fp32, *data()) == pytest.approx(loss, rel=1e-6)
    bf16 = session_of(compute="bf16", storage=True)
    error = abs(micro(bf16, *data()) / loss - 1)
    assert 1e-7 < error < 0.02


def test_split_parameters_are_exact_fp32():
    session = session_of(compute="bf16", storage=True)
    assert session.tensors["h.0.mlp.c_fc.weight"].dtype == "bf16_i16"
    w = np.random.default_rng(0).normal(size=(48, 12)).astype(np.float32)
    w[0, :4] = [0.0, -0.0, 1 + 2**-8, -(1 + 3 * 2**-8)]  # ties between two bf16 neighbours
    session.write("h.0.mlp.c_fc.weight", w)
    found = session.read("h.0.mlp.c_fc.weight")
    assert found.dtype == np.float32 and (found.view(np.int32) == w.view(np.int32)).all()


def test_evaluation_is_the_training_loss_without_dropout():
    tokens, targets = data()
    for dropout in (0.0, 0.4):
        session = session_of(replace(MODEL, dropout=dropout))
        loss = micro(session, tokens, targets)
        session.run("eval", inv_targets=0.1, batch=4, seq=8)
        assert (session.read("loss")[0] == pytest.approx(loss, rel=1e-12)) == (dropout == 0.0)


def test_decoding_gives_the_logits_of_the_whole_sequence():
    """Prefill and single steps, by one program, after the caches held something else."""
    session = session_of(decode_batch=2)
    tokens, _ = data(batch=2, seq=10, seed=3)

    def decode(lo: int, hi: int) -> np.ndarray:
        session.write("tokens", tokens[:, lo:hi])
        session.run("decode", batch=2, seq=hi - lo, pos=lo)
        return session.read("logits")[:, 0]

    whole = [decode(0, n) for n in range(1, 11)]
    stepped = [decode(0, 1), decode(1, 2), decode(2, 6), *(decode(n, n + 1) for n in range(6, 10))]
    for found, n in zip(stepped, (1, 2, 6, 7, 8, 9, 10), strict=True):
        np.testing.assert_allclose(found, whole[n - 1], rtol=1e-10, atol=1e-12)
    assert whole[0].shape == (2, MODEL.padded_vocab)


def test_a_skipped_update_changes_nothing_and_is_counted():
    session = session_of()
    micro(session, *data())
    before = {name: session.read(name) for name in session.tensors}
    bad = before["ln_f.weight.grad"].copy()
    bad[3] = np.inf
    session.write("ln_f.weight.grad", bad)
    session.run("optimizer_step", step=1, lr=0.1)
    assert session.read("skipped") == [1] and np.isnan(session.read("clip")[1])
    for name, t in session.tensors.items():
        if t.role in ("parameter", "state") and name != "skipped":
            np.testing.assert_array_equal(session.read(name), before[name], err_msg=name)


def test_padded_rows_stay_zero_under_weight_decay_and_adam():
    model = replace(MODEL, padded_vocab=24)
    session = session_of(model)
    session.run("init", seed=1)
    for step in range(1, 4):
        micro(session, *data(seed=step), step=step)
        session.run("optimizer_step", step=step, lr=0.01)
    wte = session.read("wte")
    assert (wte[17:] == 0).all() and (wte[:17] != 0).all()


def test_rows_are_read_and_written():
    session = session_of()
    rows = session.read_rows("wte", 3, 6)
    session.write_rows("wte", 3, rows + 1)
    np.testing.assert_allclose(session.read("wte")[3:6], rows + 1)
    np.testing.assert_array_equal(session.read_rows("wte", 6, 7), session.read("wte")[6:7])


def test_mistakes_are_named():
    session = session_of()
    with pytest.raises(ValueError, match=r"unknown scalars \['learning_rate'\]"):
        session.run("optimizer_step", step=1, learning_rate=1)
    with pytest.raises(ValueError, match=r"lacks the scalars \['lr'\]"):
        session.run("optimizer_step", step=1)
    with pytest.raises(ValueError, match="batch is 5, planned for 1 to 4"):
        micro(session, *data(batch=5))
    with pytest.raises(ValueError, match=r"wte has shape"):
        session.write("wte", np.zeros((3, 3)))
    with pytest.raises(KeyError, match="nothing"):
        session.write("nothing", np.zeros(1))
    with pytest.raises(ValueError, match="seq is 11, the model has 10 positions"):
        build(MODEL, batch=1, seq=11)
