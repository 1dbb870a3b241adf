"""What every model of ours has as a program: its presets' sizes, initial weights, what recomputation drops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import ModelConfig
from barellm.models import gpt2, llama3, preset
from barellm.runtime.reference import ReferenceSession

PARAMETERS = {  # without padded rows of the vocabulary
    "default": 1_350_400,
    "shakespeare-char": 804_096,
    "shakespeare-muon": 804_096,
    "shakespeare-unit": 802_944,
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "sparse-char": 1_676_416,
    "llama-15m": 14_555_520,
    "llama-124m": 114_114_048,
    # These two are the totals known for the released models, not checked against their cards.
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    # The published totals; rows of these vocabularies are multiples of 64.
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "qwen3-0.6b": 596_049_920,
    "gemma3-270m": 268_098_176,
    "llama3.2-1b": 1_235_814_400,
}


@dataclass(frozen=True)
class Model:
    """A small one. `ones`, `zeros`: how names of parameters begin or end that are so at first. `residual`: how those end that write
    to the residual stream. `vocabulary`: whose last rows no token has. `recomputed`: how many ops of a kind its blocks do again."""

    config: ModelConfig
    ones: str
    zeros: str
    residual: tuple[str, ...]
    vocabulary: tuple[str, ...]
    recomputed: dict[str, int]


SIZES = {"layers": 3, "d_model": 64, "vocab_size": 90, "padded_vocab": 128, "max_seq": 40}
MODELS = {
    "gpt2": Model(
        gpt2.Config(heads=2, **SIZES),
        ones="ln_",
        zeros="bias",
        residual=("c_proj.weight",),
        vocabulary=("wte",),
        recomputed={"layernorm": 6, "matmul": 9, "bias": 9, "attention": 3, "gelu": 3, "add": 3},
    ),
    "llama3": Model(
        llama3.Config(heads=4, kv_heads=2, d_ff=72, tied=False, **SIZES),
        ones="norm",
        zeros="bias",
        residual=("proj.weight", "down.weight"),
        vocabulary=("wte", "head"),
        recomputed={"rmsnorm": 6, "matmul": 9, "rope": 3, "attention": 3, "swiglu": 3, "add": 3},
    ),
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_their_parameters(name):
    store, _ = build(preset(name).model)
    assert sum(t.trained for t in store.of_role("parameter")) == PARAMETERS[name]


@each_model
def test_initial_weights(model):
    _, programs = build(model.config)
    session = ReferenceSession(programs)
    session.run("init", seed=5)
    for name, t in session.tensors.items():
        w = session.read(name)
        if name.endswith(model.zeros):
            assert (w == 0).all(), name
        elif model.ones in name:
            assert (w == 1).all(), name
        else:
            std = 0.02 / np.sqrt(2 * model.config.layers) if name.endswith(model.residual) else 0.02
            valid = w[: t.valid_rows]
            assert abs(valid.std() / std - 1) < 5 / np.sqrt(2 * valid.size), name
    for name in model.vocabulary:
        assert (session.read(name)[90:] == 0).all() and (session.read(name)[:90] != 0).all()


@each_model
def test_recompute_drops_what_the_blocks_computed(model):
    plain, again = (
        build(model.config, batch=2, seq=8, optimizer=lambda p: None, recompute=recompute)[1]["forward_backward"]
        for recompute in (False, True)
    )
    assert plain.flops == again.flops
    # All of a block but its last product and the residual sum behind it, which nobody reads again.
    assert Counter(op.name for op in again.ops if op.recomputed) == model.recomputed
    assert {op.segment for op in again.ops if op.recomputed} == {f"h.{i}" for i in range(3)}
