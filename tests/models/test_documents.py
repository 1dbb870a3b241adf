"""Packed documents: the loss of a row with a and b is that of a plus that of b, and so are its gradients, in every architecture."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from barellm import models
from barellm.assembly.build import opened
from barellm.assembly.programs import build
from barellm.config import ModelConfig, OptimConfig
from barellm.evaluation.validation import write_batch
from barellm.models import gpt2, llama3
from barellm.optim.adamw import adamw
from barellm.runtime import reference

SIZES: dict[str, Any] = {"layers": 3, "heads": 4, "d_model": 32, "vocab_size": 61, "max_seq": 96}
LLAMA: dict[str, Any] = SIZES | {"kv_heads": 2, "d_ff": 40}
MODELS: dict[str, ModelConfig] = {
    "gpt2": gpt2.Config(**SIZES),
    "gpt2-unit": gpt2.Config(**SIZES, bias=False, unit_scaling=True),
    "llama": llama3.Config(**LLAMA),
    "window": llama3.Config(**LLAMA, sliding_window=7, window_layers="0,2"),
    "softcap": llama3.Config(**LLAMA, attention_softcap=2.0, logits_softcap=3.0, qk_norm="head"),
    "no-rope": llama3.Config(**LLAMA, nope_layers="0,1,2"),
}
LENGTHS = (1, 17, 30, 2, 33)  # of the documents, in tokens that have a target


def programs(model: ModelConfig, *, documents: bool = True, compute: str = "fp32", seq: int = sum(LENGTHS)) -> Any:
    how = {"optimizer": partial(adamw, config=OptimConfig()), "compute": compute, "documents": documents, "recompute": True}
    return build(model, batch=1, seq=seq, **how)[1]


def texts(model: ModelConfig) -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(0, model.vocab_size, n + 1, dtype=np.int32) for n in LENGTHS]


def trained_on(session: Any, rows: list[list[np.ndarray]], *, documents: bool = True) -> dict[str, np.ndarray]:
    """The loss, summed over the rows of texts, and the gradients of all of them."""
    total = 0.0
    for number, row in enumerate(rows):
        tokens, targets = (np.concatenate([text[lo:hi] for text in row])[None] for lo, hi in ((0, -1), (1, None)))
        begins = np.cumsum([0, *(len(text) - 1 for text in row)])
        starts = np.repeat(begins[:-1], np.diff(begins)).astype(np.int32)[None] if documents else None
        write_batch(session, tokens, targets, starts)
        how = {"batch": 1, "seq": tokens.shape[1], "inv_targets": 1.0}
        session.run("forward_backward", accumulate=int(number > 0), **how, step=1)
        total += (loss := float(session.read("loss")[0]))
        session.run("eval", **how)
        assert float(session.read("loss")[0]) == pytest.approx(loss, rel=1e-6)
    found = {name: session.read(name).copy() for name, t in session.tensors.items() if t.role == "gradient"}
    return {"loss": np.array([total])} | found


def check_packed(session: Any, model: ModelConfig, limit: float) -> None:
    """One row of all documents beside a row for each, in one session."""
    each = texts(model)
    packed, alone = trained_on(session, [each]), trained_on(session, [[text] for text in each])
    for name, wanted in alone.items():
        error = np.linalg.norm(packed[name] - wanted) / max(np.linalg.norm(wanted), 1e-30)
        assert error <= limit, f"{name} {error:.1e}"
    unmasked = trained_on(session, [[np.concatenate([text[:-1] for text in each] + [each[-1][-1:]])]])
    assert abs(packed["loss"] - unmasked["loss"]) > 1e-4  # what documents see is not nothing


def drawn(session: Any, model: ModelConfig) -> None:
    """Every parameter random, norms and biases too."""
    rng = np.random.default_rng(0)
    for name, t in session.tensors.items():
        if t.role == "parameter":
            values = 0.3 * rng.standard_normal([int(n) for n in t.shape]) + (len(t.shape) == 1)
            session.write_rows(name, 0, values.astype(np.float32))


@pytest.mark.parametrize("name", MODELS)
def test_packed_losses_and_gradients_are_those_of_each_document(name):
    """By the reference to the last digits, and by kernels to fp32's rounding."""
    model, made = MODELS[name], programs(MODELS[name])
    with opened(made, "cpu") as session:
        drawn(session, model)
        check_packed(session, model, 2e-6)
    session = reference.open(made, dtype="float64")
    drawn(session, model)
    check_packed(session, model, 1e-12)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_row_of_one_document_has_the_bits_of_a_program_without_a_mask(compute):
    for model in (MODELS["gpt2"], MODELS["llama"]):
        found = []
        for documents in (True, False):
            with opened(programs(model, documents=documents, compute=compute), "cpu") as session:
                drawn(session, model)
                found.append(trained_on(session, [[texts(model)[-1]]], documents=documents))
        assert all(np.array_equal(found[0][key], found[1][key]) for key in found[1] if not key.startswith("wpe"))
        assert all(np.allclose(found[0][key], found[1][key], rtol=1e-5, atol=1e-6) for key in found[1])


def test_models_with_layouts_of_their_own_have_no_such_mask():
    assert models.masks_documents(MODELS["gpt2"]) and models.masks_documents(MODELS["llama"])
    assert not any(models.masks_documents(models.preset(name).model) for name in ("sparse-char", "speedrun-small"))
