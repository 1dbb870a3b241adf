"""`barellm.load`: every kind of model that the command line opens, and what it computes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import barellm
from barellm import models
from barellm.cli.main import main, parsed
from barellm.config import TrainConfig
from barellm.data.tokenizers import Bytes
from barellm.errors import UserError
from barellm.interop import imported
from barellm.models import gpt2, llama3, sparse
from tests.interop.models import checkpoint_of, hugging_face, random_arrays, their_tensors, weights_of
from tests.models.test_speedrun import SMALL as SPEEDRUN

MODEL = gpt2.Config(layers=1, heads=2, channels=24, vocab_size=256, max_seq=13)
TOKENS = np.random.default_rng(1).integers(0, 256, (3, 7))
TARGETS = np.where(TOKENS % 5 == 0, -1, (TOKENS * 7 + 1) % 256)


def mean_nats(logits: np.ndarray, targets: np.ndarray) -> float:
    """The loss by its formula, in float64."""
    z = logits.astype(np.float64)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return float(-chosen[targets >= 0].mean())


def checkpoint(folder, model=MODEL):
    return checkpoint_of(folder, model, random_arrays(model), Bytes())


@pytest.fixture
def model(tmp_path, own_cache):
    with barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device="reference") as opened:
        yield opened


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_logits_loss_and_what_decoding_draws_from_are_one_model(tmp_path, own_cache, device):
    model = barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device=device)
    logits = model.logits(TOKENS)
    assert (logits.shape, logits.dtype) == ((3, 7, 256), np.float32)
    assert model.loss(TOKENS, TARGETS) == pytest.approx(mean_nats(logits, TARGETS), rel=1e-6)
    ids = model.tokenizer.prompt("squared")
    greedy = model.tokenizer.decode([int(model.logits([ids])[0, -1].argmax())])
    assert model.generate("squared", tokens=1, temperature=0) == greedy


SMALL = {
    "llama-15m": llama3.Config(layers=1, heads=4, kv_heads=2, channels=24, hidden=40, vocab_size=61, max_seq=13),
    "sparse-char": sparse.Config(layers=1, heads=2, channels=24, vocab_size=61, max_seq=16, block=16, layout="local:8"),
}


@pytest.mark.parametrize("preset", [*SMALL, "speedrun-small"])
def test_the_loss_is_that_of_the_logits_for_every_architecture(tmp_path, own_cache, preset):
    """Also where logits are capped, and where the step says how far attention looks. The speedrun's loss counts padded ids too, so
    here it has none."""
    model = SMALL.get(preset) or replace(SPEEDRUN, vocab_size=64)
    config = replace(models.preset(preset), model=model, train=TrainConfig(batch=1, seq=40, steps=9, dtype="fp32"))
    imported.save(weights_of(model, random_arrays(model)), tmp_path / "run", config=config, step=7, total=9)
    with barellm.load(tmp_path / "run", device="reference") as opened:
        tokens, targets = TOKENS[:1] % 61, np.minimum(TARGETS[:1], 60)
        assert opened.loss(tokens, targets) == pytest.approx(mean_nats(opened.logits(tokens), targets), rel=1e-5)


def test_a_saved_model_has_the_same_bits_and_configuration(model, tmp_path, capsys):
    saved = model.save(tmp_path / "saved")
    with barellm.load(tmp_path / "saved", device="reference") as again:
        assert again.config == model.config
        assert (again.logits(TOKENS) == model.logits(TOKENS)).all()
    assert (saved / "weights.safetensors").read_bytes() == (
        next((tmp_path / "run").rglob("weights.safetensors")).read_bytes()
    )
    capsys.readouterr()
    sample = ["sample", str(tmp_path / "saved"), "--prompt", "a", "--tokens", "9", "--seed", "5"]
    assert main([*sample, "--device", "reference"]) == 0
    assert capsys.readouterr().out == "a" + model.generate("a", tokens=9, seed=5) + "\n"
    with pytest.raises(UserError, match="is not empty"):
        model.save(tmp_path / "saved")


def test_a_folder_of_hugging_face_is_the_same_model(model, tmp_path):
    arrays = {name: model.weight(name) for name in random_arrays(MODEL)}
    folder = hugging_face(tmp_path / "hf", MODEL, their_tensors(arrays))
    with pytest.raises(UserError, match=r"does not say of which tokenizer: .* barellm.load\(..., tokenizer=...\)"):
        barellm.load(folder)
    with barellm.load(folder, tokenizer="bytes", dtype="fp32", device="reference") as other:
        assert (other.logits(TOKENS) == model.logits(TOKENS)).all()
        assert other.parameters == model.parameters


def test_more_sequences_than_before_do_not_change_the_first(model):
    first = model.logits(TOKENS[:1, :5])
    assert (model.logits(TOKENS)[:1, :5] == model.logits(TOKENS[:, :5])[:1]).all()
    assert np.abs(model.logits(TOKENS)[:1, :5] - first).max() < 1e-5
    said = "the prompt has 20 tokens: the model has 13 positions and sees the last 6"
    with pytest.warns(UserWarning, match=said) as warned:
        assert model.generate("x" * 20, tokens=1, seed=2) == model.generate("x" * 6, tokens=1, seed=2)
    assert [w.filename for w in warned] == [__file__]  # of the line that asked


def test_what_is_not_said_is_what_the_command_takes():
    usual = vars(parsed(["sample", "run"]))
    for function in (barellm.Model.generate, barellm.Model.stream):
        given = {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default != p.empty}
        assert given.pop("prompt") == "" and list(given.pop("stop")) == usual["stop"]
        assert given == {name: usual[name] for name in given} and len(given) == 7


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: m.logits([1, 2]), r"tokens are int64 \(2,\), expected integers \(B, T\)"),
        (lambda m: m.logits([[0.5]]), r"tokens are float64 \(1, 1\), expected integers"),
        (lambda m: m.logits([[3, 256]]), r"tokens\[0, 1\] is 256, expected an id from 0 to 255"),
        (lambda m: m.logits([[1 << 32]]), r"tokens\[0, 0\] is 4294967296"),
        (lambda m: m.logits([[-1]]), r"tokens\[0, 0\] is -1, expected an id from 0"),
        (lambda m: m.logits([[0] * 14]), r"tokens are \(1, 14\), the model has 13 positions"),
        (lambda m: m.loss([[1, 2]], [[1]]), r"targets are \(1, 1\), expected the shape of tokens, \(1, 2\)"),
        (lambda m: m.loss([[1]], [[-1]]), "all targets are -1"),
        (lambda m: m.loss([[1]], [[-2]]), r"targets\[0, 0\] is -2, expected an id from -1"),
        (lambda m: m.generate(tokens=0), "tokens is 0, expected at least 1"),
        (lambda m: m.generate(top_p=0), "top_p is 0, expected 0 < top_p <= 1"),
        (lambda m: m.weight("wtf"), r"has no parameter 'wtf' \(known: wte, wpe, "),
    ],
)
def test_mistakes_are_named(model, call, message):
    with pytest.raises(UserError, match=message):
        call(model)


@pytest.fixture
def on_cpu(tmp_path, own_cache):
    """The same with sessions that are planned and closed."""
    with barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device="cpu") as opened:
        yield opened


def test_a_stream_ends_where_the_model_computes_something_else(on_cpu):
    """Whether that opens the session again or writes into its KV cache. Streams that have no piece yet are not disturbed."""
    whole = on_cpu.generate("ab", tokens=9, seed=3)
    assert "".join(on_cpu.stream("ab", tokens=9, seed=3)) == whole
    for other in (lambda: on_cpu.logits(TOKENS), lambda: next(on_cpu.stream("xyz", tokens=9))):
        stream, waiting = (on_cpu.stream("ab", tokens=9, seed=3) for _ in range(2))
        next(stream)
        other()
        with pytest.raises(UserError, match="this stream is over: the model has computed something else"):
            next(stream)
        assert "".join(waiting) == whole
    stream = on_cpu.stream("ab", tokens=9)
    next(stream)
    on_cpu.close()
    with pytest.raises(UserError, match="is closed: load it again"):
        next(stream)


def test_a_refused_opening_leaves_the_model_alive(on_cpu, monkeypatch):
    logits = on_cpu.logits(TOKENS)
    session = on_cpu._session
    many = np.broadcast_to(np.int8(0), (1 << 21, 9))
    with pytest.raises(UserError, match="expected at most 16777216"):
        on_cpu.loss(many, many)
    assert (on_cpu.logits(TOKENS) == logits).all() and on_cpu._session is session
    with monkeypatch.context() as patch:
        patch.setattr("barellm.api.enter", lambda *words: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            on_cpu.loss(TOKENS, TARGETS)
    assert (on_cpu.logits(TOKENS) == logits).all()


def test_a_growing_text_opens_no_session_for_each_token(model):
    sessions = set()
    for tokens in range(5, 9):
        model.logits(TOKENS[:, :tokens])
        sessions.add(model._session)
    assert len(sessions) == 1


def test_options_reach_the_sampler(model):
    greedy = model.generate("1", tokens=9, temperature=0)
    assert model.generate("1", tokens=9, min_p=1) == greedy
    assert model.generate("1", tokens=9, temperature=0, repetition=50) != greedy
    for stop in (greedy[4:6], ["never", greedy[4:6]]):
        assert model.generate("1", tokens=9, temperature=0, stop=stop) == greedy[: greedy.index(greedy[4:6])]
    with pytest.raises(UserError, match="min_p is 2"):
        model.stream(min_p=2)


def test_a_closed_model_says_so(model):
    model.logits(TOKENS)
    model.close()
    with pytest.raises(UserError, match="is closed: load it again"):
        model.logits(TOKENS)


def test_importing_barellm_is_light_and_unknown_names_are_errors():
    script = (
        "import barellm, sys; assert not {'numpy', 'barellm.api'} & set(sys.modules); print(dir(barellm)); barellm.lode"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "module 'barellm' has no attribute 'lode'" in done.stderr and "'train'" in done.stdout
