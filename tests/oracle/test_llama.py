"""Llama against transformers' LlamaForCausalLM with the same weights: logits, loss, every gradient, greedy text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.checkpoint.weights import Weights
from barellm.cli.main import main
from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.data.tokenizers import Chars
from barellm.generation.decode import Decoder
from barellm.generation.samplers import Sampling
from barellm.interop.sources import open_weights
from barellm.models.llama3 import Config
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession
from tests.interop.models import checkpoint_of, random_arrays

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
LlamaForCausalLM = transformers.LlamaForCausalLM

from tests.oracle.llama import LLAMA_3_1, SHAPES, greedy, outcome, saved  # noqa: E402
from tests.oracle.test_gpt2 import tokens_and_targets  # noqa: E402
from tests.oracle.torch_gpt2 import relative  # noqa: E402

pytestmark = pytest.mark.oracle
LIMIT = 1e-5  # relative, per tensor: transformers' norms and angles are fp32 whatever the weights are
BACKENDS = {
    "float64": partial(ReferenceSession, dtype="float64"),
    "float32": partial(ReferenceSession, dtype="float32"),
    "cpu": CpuSession,
}


@contextmanager
def opened(programs: dict, backend: str) -> Iterator[Any]:
    session = BACKENDS[backend](programs)
    try:
        yield session
    finally:
        if backend == "cpu":
            session.close()


def tokenizer_of(folder: Path, ids: int) -> Path:
    """A tokenizer of so many ids."""
    folder.mkdir()
    Chars(chr(ord("0") + i) for i in range(ids)).save(folder)
    return folder


def ours_of(weights: Weights, tokens, targets, *, backend: str = "float64", compute: str = "fp32", recompute=False) -> dict:
    """Logits of valid ids, the mean loss and every gradient."""
    batch, seq = tokens.shape
    sizes = {"batch": batch, "seq": seq, "compute": compute, "recompute": recompute}
    _, programs = build(weights.model, **sizes, optimizer=partial(adamw, config=OptimConfig()))
    micro = programs["forward_backward"]
    micro.output("logits", next(op.logits for op in micro.ops if op.name == "cross_entropy"))
    with opened(programs, backend) as session:
        weights.load(session)
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", batch=batch, seq=seq, accumulate=0, inv_targets=1 / (targets >= 0).sum(), step=1)
        names = ["loss", *(name for name, t in session.tensors.items() if t.role == "gradient")]
        logits = session.read("logits")[..., : weights.model.vocab_size].astype(np.float64)
        return {"logits": logits} | {name: session.read(name).copy() for name in names}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_loss_and_gradients_are_theirs(tmp_path, name, backend):
    model = saved(tmp_path / "hf", **SHAPES[name])
    weights = open_weights(tmp_path / "hf", tokenizer="")
    tokens, targets = tokens_and_targets(weights.model, 2, 29)
    ours = ours_of(weights, tokens, targets, backend=backend, recompute=backend == "cpu")
    expected = outcome(model.double(), weights.model, tokens, targets)
    assert ours.keys() == expected.keys()
    for key, theirs in expected.items():
        error = relative(ours[key][: len(theirs)], theirs)
        print(f"{key:28} error {error:.1e} limit {LIMIT:.0e}")
        assert error <= LIMIT, key
        assert not ours[key][len(theirs) :].any()  # rows of padded ids


@pytest.mark.parametrize("name", ["grouped", "untied and stretched"])
def test_bf16_is_no_further_from_the_truth_than_autocast(tmp_path, name):
    model = saved(tmp_path / "hf", **SHAPES[name])
    weights = open_weights(tmp_path / "hf", tokenizer="")
    tokens, targets = tokens_and_targets(weights.model, 2, 29)
    ours = ours_of(weights, tokens, targets, backend="cpu", compute="bf16")
    autocast = outcome(model, weights.model, tokens, targets, autocast=True)
    truth = outcome(model.double(), weights.model, tokens, targets)
    worst = max(relative(autocast[key], truth[key]) for key in truth)
    for key, theirs in truth.items():
        error = relative(ours[key][: len(theirs)], theirs)
        print(f"{key:28} error {error:.1e} autocast's {relative(autocast[key], theirs):.1e}")
        assert error <= 1.5 * worst, key


@pytest.mark.parametrize("backend", ["float32", "cpu"])
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_text_is_that_of_their_generate(tmp_path, name, backend):
    model = saved(tmp_path / "hf", **SHAPES[name])
    weights = open_weights(tmp_path / "hf", tokenizer="")
    _, programs = build(weights.model, decode_batch=1)
    prompt = [1, 4, 2, 3]
    with opened(programs, backend) as session:
        weights.load(session)
        decoder = Decoder(session, max_seq=weights.model.max_seq, vocab_size=weights.model.vocab_size)
        ours = list(decoder.tokens(prompt, count=20, how=Sampling(temperature=0.0)))
    assert ours == greedy(model, prompt, 20)


def test_the_stretch_matters_at_these_lengths(tmp_path):
    """Else the tests above would not see it."""
    tokens = np.arange(58, dtype=np.int32).reshape(2, 29)
    plain = {"rope_type": "default", "rope_theta": LLAMA_3_1["rope_theta"]}
    logits = []
    for i, rope in enumerate((LLAMA_3_1, plain)):
        model = saved(tmp_path / str(i), rope_parameters=rope)
        with torch.no_grad():
            logits.append(model(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy())
    assert relative(*logits) > 0.01


@pytest.mark.parametrize("name", SHAPES)
def test_an_exported_model_is_what_was_imported(tmp_path, monkeypatch, name):
    """Every bit of every tensor and the configuration, read back by transformers: so its logits are equal too."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    model = saved(tmp_path / "hf", shards=True, dtype=torch.bfloat16, **SHAPES[name])
    vocab = ["--tokenizer", str(tokenizer_of(tmp_path / "tokenizer", model.config.vocab_size))]
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), *vocab]) == 0
    command = ["export", str(tmp_path / "run"), "--format", "huggingface", "--dtype", "bf16"]
    assert main([*command, "--out", str(tmp_path / "again")]) == 0
    again, said = LlamaForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True, dtype="auto")
    assert again.dtype == torch.bfloat16 and not any(said.values()), said
    found, expected = again.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    tokens = torch.arange(2 * 29).reshape(2, 29) % model.config.vocab_size
    before = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")  # with RoPE's angles in fp32 again
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, before.eval()(tokens).logits)


def test_a_model_that_was_made_here_has_our_logits_there(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    cfg = Config(layers=2, heads=6, kv_heads=3, d_model=48, d_ff=33, vocab_size=256, max_seq=40, rope_factor=4.0,
                 rope_old_seq=8, rope_theta=50.0, tied=False)  # fmt: skip
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    model, said = LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(said.values()), said
    tokens, targets = tokens_and_targets(cfg, 2, 37)
    ours = ours_of(open_weights(step), tokens, targets)
    assert relative(ours["logits"], outcome(model.eval().double(), cfg, tokens, targets)["logits"]) <= LIMIT
