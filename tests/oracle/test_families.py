"""Families of Hugging Face beside what `make families` shows: keys that a config leaves out, every kind of scaled RoPE, models that
were made here."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from barellm.cli.main import main  # noqa: E402
from barellm.interop import huggingface  # noqa: E402
from barellm.interop.sources import open_weights  # noqa: E402
from barellm.models import families, llama3  # noqa: E402
from barellm.models.llama3 import Config  # noqa: E402
from tests.interop.models import checkpoint_of, random_arrays  # noqa: E402
from tests.interop.test_families import MADE, SIZES  # noqa: E402
from tests.oracle.families import COLUMNS, FAMILIES, Case, batch_of, case, ours, theirs  # noqa: E402
from tests.oracle.torch_gpt2 import relative  # noqa: E402

pytestmark = pytest.mark.oracle
LIMIT = 1e-5
BETWEEN = {"rope_theta": 100.0, "original_max_position_embeddings": 20}
SPREAD = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 7.5]}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", **BETWEEN, "factor": 4.0},
    "yarn, its numbers": {
        "rope_type": "yarn", **BETWEEN, "factor": 4.0, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn, two scales": {"rope_type": "yarn", **BETWEEN, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "longrope": {"rope_type": "longrope", **BETWEEN, **SPREAD},
    "longrope, its numbers": {"rope_type": "longrope", **BETWEEN, **SPREAD, "factor": 8.0, "attention_factor": 1.1},
}  # fmt: skip


def test_every_family_has_a_row():
    assert list(FAMILIES) == [known.model_type for known in families.FAMILIES] == list(families.NAMES)


@pytest.mark.parametrize("known", huggingface.architectures(llama3), ids=lambda known: known.model_type)
def test_keys_that_a_config_leaves_out_are_what_transformers_takes(tmp_path, known):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": known.model_type}))
    there = transformers.AutoConfig.for_model(known.model_type)
    found: Any = huggingface.read_model(tmp_path)
    for key, (name, _) in known.sizes.items():
        assert getattr(found, name) == getattr(there, key), key
    for key, (name, _, values) in known.words.items():
        assert getattr(found, name) == values[getattr(there, key)], key
    rope = there.rope_parameters
    if "full_attention" in rope:
        rope, local = rope["full_attention"], rope["sliding_attention"]
        assert (found.rope_local_theta or found.rope_theta) == local["rope_theta"]
    usual = ["sliding_attention" if found.sliding_window else "full_attention"] * found.layers
    windows = [kind == "sliding_attention" for kind in getattr(there, "layer_types", usual)]
    assert [found.window_of(i) for i in range(found.layers)] == [
        getattr(there, "sliding_window", 0) if has else 0 for has in windows
    ]
    assert found.sliding_window == (there.sliding_window if any(windows) else 0)
    assert (found.rope_theta, found.rotary_fraction) == (rope["rope_theta"], rope.get("partial_rotary_factor", 1.0))
    assert found.head_size == getattr(there, "head_dim", there.hidden_size // there.num_attention_heads)
    assert found.kv_heads == getattr(there, "num_key_value_heads", there.num_attention_heads)
    assert found.rope_factor == 0


@pytest.mark.parametrize("seq", [17, 37], ids=["short", "long"])
@pytest.mark.parametrize("name", ROPES)
def test_scaled_rope(tmp_path, name, seq):
    """Of a dynamic one theirs depends on the text's length alone beyond the file's positions, and of longrope on whether it is
    longer than the first context; ours on the planned length."""
    most = {"max_position_embeddings": 20 if name == "dynamic" else 80, "rope_parameters": dict(ROPES[name])}
    one = case(tmp_path / "hf", "llama", "biases", **most)
    batch = batch_of(one.weights.model, 2, seq)
    found, expected = ours(one, *batch), theirs(one, *batch)
    for key in expected:
        assert relative(found[key], expected[key]) <= 2 * LIMIT, key
    COLUMNS["export, bit for bit"](one)
    plain = case(tmp_path / "plain", "llama", "biases", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    if name != "dynamic" or seq > 20:
        assert relative(theirs(plain, *batch)["logits"], expected["logits"]) > 0.01  # else nothing was seen here


@pytest.mark.parametrize("old", [24, 96], ids=["long", "short"])
def test_longrope_of_a_part_of_phi3_heads(tmp_path, old):
    """29 tokens are more or fewer than the first context; cosines are larger than 1 in both."""
    one = case(tmp_path / "hf", "phi3", "", original_max_position_embeddings=old, max_position_embeddings=192)
    batch = batch_of(one.weights.model)
    found, expected = ours(one, *batch), theirs(one, *batch)
    for key in expected:
        assert relative(found[key], expected[key]) <= 2 * LIMIT, key
    COLUMNS["export, bit for bit"](one)


@pytest.mark.parametrize("family", MADE)
def test_a_model_that_was_made_here_has_our_logits_there(tmp_path, monkeypatch, family):
    """Its family follows from its options."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    cfg = Config(**SIZES | MADE[family])
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == family
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said.values()), said
    one = Case(model.eval(), tmp_path / "hf", open_weights(step))
    batch = batch_of(cfg)
    assert relative(ours(one, *batch, device="reference")["logits"], theirs(one, *batch)["logits"]) <= LIMIT
