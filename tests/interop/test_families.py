"""Folders of other families than Llama, without transformers: a model comes back as it was, and what a family has not is named."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from barellm.cli.main import main
from barellm.interop.huggingface import hugging_face
from barellm.interop.sources import open_weights
from barellm.models.llama3 import Config
from tests.interop.models import checkpoint_of, random_arrays

SIZES: dict[str, Any] = {
    "layers": 2, "heads": 4, "kv_heads": 2, "d_model": 32, "d_ff": 33, "vocab_size": 256, "max_seq": 40, "tied": False,
}  # fmt: skip
MADE: dict[str, dict[str, Any]] = {  # family -> what makes one from scratch, beside sizes
    "mistral": {"sliding_window": 7},
    "qwen2": {"attention_bias": "qkv", "sliding_window": 7, "window_layers": "1"},
    "qwen3": {"qk_norm": "head", "head_dim": 10},
    "smollm3": {"nope_layers": "1"},
    "olmo2": {"qk_norm": "row", "norm_position": "post"},
    "olmo3": {"qk_norm": "row", "norm_position": "post", "sliding_window": 7, "window_layers": "0", "rope_local_theta": 300.0},
    "gemma2": {
        "norm_position": "both", "norm_unit_offset": True, "activation": "gelu", "embedding_multiplier": 32**0.5, "head_dim": 10,
        "sliding_window": 7, "window_layers": "0", "attention_softcap": 50.0, "logits_softcap": 30.0, "attention_multiplier": 0.5,
    },
    "gemma3_text": {
        "norm_position": "both", "norm_unit_offset": True, "activation": "gelu", "embedding_multiplier": 32**0.5, "head_dim": 10,
        "sliding_window": 7, "window_layers": "1", "rope_local_theta": 1e4, "qk_norm": "head", "rope_theta": 1e6,
    },
    "phi3": {
        "rotary_fraction": 0.75, "rope_type": "longrope", "rope_factor": 4.0,
        "rope_short": "1.0,2.0,3.0", "rope_long": "2.0,3.0,4.0",
        "rope_old_seq": 10, "sliding_window": 7,
    },
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    "arcee": {"mlp": "plain", "activation": "relu2"},
    "stablelm": {"norm": "layer", "rotary_fraction": 0.5, "attention_bias": "qkv"},
    "gpt_neox": {
        "norm": "layer", "mlp": "plain", "activation": "gelu_erf", "mlp_bias": True, "attention_bias": "all", "kv_heads": 4,
        "parallel_residual": True, "rotary_fraction": 0.25,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", MADE)
def test_there_and_back_are_the_same_weights_and_options(tmp_path, family):
    cfg = Config(**SIZES | MADE[family])
    arrays = random_arrays(cfg)
    step = checkpoint_of(tmp_path / "run", cfg, arrays)
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == family
    again = open_weights(tmp_path / "hf", tokenizer="bytes")
    assert again.model == cfg
    for name, array in arrays.items():
        np.testing.assert_array_equal(again.read_rows(name, 0, len(array)), array, name)


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "gpt_neox"])
def test_sizes_that_a_config_claims_take_no_memory(tmp_path, family, refused):
    """Each is refused by what the tensors are, before anything of that size is made; these have the names that the file has."""
    cfg = Config(**SIZES | MADE[family])
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    assert main(["export", str(step), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert f"A model of {family}'s architecture with {sum(a.size for a in random_arrays(cfg).values()):,} parameters" in (
        (tmp_path / "hf" / "README.md").read_text()
    )
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    claims = {"head_dim": 1 << 28, "num_hidden_layers": 1 << 30, "vocab_size": 1 << 30, "hidden_size": 1 << 28}
    tracemalloc.start()
    try:
        for key in claims.keys() & config.keys():
            path.write_text(json.dumps(config | {"no_rope_layers": None, key: claims[key]}))
            said = refused("import", tmp_path / "hf", "--out", tmp_path / "x", "--tokenizer", "bytes")
            assert "expected (" in said or "lacks the tensor" in said or "expected at most 1024" in said, said
            assert "layers.0" not in said or "model.layers.0" in said or "gpt_neox.layers.0" in said, said
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


WRONG = {  # of a Gemma 3: key -> value, and what is said
    "layer_types": (["sliding_attention"], "layer_types is ['sliding_attention'], expected full_attention or"),
    "sliding_window": (None, "sliding_window is None, expected an integer"),
    "query_pre_attn_scalar": (0, "query_pre_attn_scalar is 0, expected above 0"),
    "head_dim": (-2, "model.head_dim is -2, expected an even number"),
    "num_hidden_layers": ("many", "num_hidden_layers is 'many', expected an integer"),
    "hidden_size": (10**400, "..., expected an integer"),
    "sliding_window_pattern": (0, "sliding_window_pattern is 0, expected above 0"),
    "rope_parameters": (
        {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters.sliding_attention.rope_type is 'linear', expected 'default'",
    ),
    "final_logit_softcapping": (50.0, "model.logits_softcap is 50.0, expected at most 35"),
    "use_bidirectional_attention": (True, "use_bidirectional_attention is True, expected False or None"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_no_gemma_has_is_named(tmp_path, refused, key):
    cfg = Config(**SIZES | MADE["gemma3_text"])
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    assert main(["export", str(step), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text()) | {key: WRONG[key][0]}
    path.write_text(json.dumps(config | ({"layer_types": None} if key == "sliding_window_pattern" else {})))
    assert WRONG[key][1] in refused("import", tmp_path / "hf", "--out", tmp_path / "x", "--tokenizer", "bytes")


def test_a_stretch_added_by_hand_is_that_of_layers_without_a_window(tmp_path):
    cfg = Config(**SIZES | MADE["gemma3_text"])
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    assert main(["export", str(step), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}))
    found = open_weights(tmp_path / "hf", tokenizer="bytes").model
    assert found == replace(cfg, rope_type="linear", rope_factor=4.0, rope_old_seq=found.rope_old_seq)  # pyright: ignore


def test_a_window_of_some_layers_and_an_embedding_of_another_size_are_no_mistral_and_no_gemma(tmp_path, refused):
    for family, change, says in (
        ("mistral", {"window_layers": "1"}, "model.window_layers is '1', mistral has ''"),
        ("gemma2", {"embedding_multiplier": 2.0}, "model.embedding_multiplier is 2.0, a Gemma has the root of model.d_model, 5.65"),
    ):
        cfg = replace(Config(**SIZES | MADE[family]), family=family, **change)
        step = checkpoint_of(tmp_path / family, cfg, random_arrays(cfg))
        assert says in refused("export", step, "--format", "huggingface", "--out", tmp_path / "hf")


def test_a_file_without_model_type_is_known_by_its_class(tmp_path, refused):
    cfg = Config(**SIZES | MADE["qwen3"])
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    del config["model_type"]
    path.write_text(json.dumps(config))
    assert open_weights(tmp_path / "hf", tokenizer="bytes").model == cfg
    del config["architectures"]
    path.write_text(json.dumps(config))
    assert "model_type is None, expected 'gpt2' or 'llama' or" in refused("import", path.parent, "--out", tmp_path / "x")


def test_rows_of_a_fused_matrix_lie_head_by_head_there(tmp_path):
    """q, k and v of the first head, then of the second; a head begins with the two halves of the part that RoPE rotates."""
    cfg = Config(**SIZES | MADE["gpt_neox"])  # heads of 8 columns, of which the first 2 are rotated
    arrays = random_arrays(cfg)
    step = checkpoint_of(tmp_path / "run", cfg, arrays)
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    theirs = load_file(tmp_path / "hf" / "model.safetensors")["gpt_neox.layers.1.attention.query_key_value.weight"]
    ours = arrays["h.1.attn.qkv.weight"]
    k_of_head_2 = theirs[2 * 24 + 8 : 2 * 24 + 16]
    np.testing.assert_array_equal(k_of_head_2[[0, 2, 3, 4, 1, 5, 6, 7]], ours[32 + 16 : 32 + 24])
    np.testing.assert_array_equal(theirs[3 * 24 + 16 : 4 * 24], ours[64 + 24 : 96])  # v of the last head


@pytest.mark.parametrize("family", MADE)
def test_a_model_is_the_family_that_has_its_options(family):
    assert hugging_face(Config(**SIZES | MADE[family])).model_type == family
    assert hugging_face(Config(**SIZES)).model_type == "llama"


def test_an_option_that_the_family_has_not_is_named(tmp_path, refused):
    cfg = replace(Config(**SIZES | MADE["qwen3"]), family="olmo2")
    step = checkpoint_of(tmp_path / "run", cfg, random_arrays(cfg))
    said = refused("export", step, "--format", "huggingface", "--out", tmp_path / "hf")
    assert "model.head_dim" not in said and "model.qk_norm is 'head', olmo2 has 'row'" in said
    said = refused("export", step, "--format", "gguf", "--out", tmp_path / "x.gguf")
    assert "model.qk_norm" in said or "--format gguf has gpt2 and llama" in said


def test_an_imported_family_stays_what_it_was(tmp_path):
    """A SmolLM3 whose layers all have RoPE could be a Llama."""
    cfg = Config(**SIZES)
    step = checkpoint_of(tmp_path / "run", replace(cfg, family="smollm3"), random_arrays(cfg))
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert open_weights(tmp_path / "hf", tokenizer="bytes").model == replace(cfg, family="smollm3")
