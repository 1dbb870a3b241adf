"""Folders of Llamas: packed matrices come apart and together, whatever the layout and version; what is none is named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from barellm import models
from barellm.checkpoint import checkpoint, tensorfile
from barellm.cli.main import main
from barellm.config import overrides
from barellm.data.huggingface import HuggingFace
from barellm.interop.sources import open_weights
from barellm.models.llama3 import Config
from tests.data.llama import llama_json
from tests.interop.models import Arrays, checkpoint_of, in_folder, random_arrays, rounded

TINY = Config(layers=2, heads=4, kv_heads=2, d_model=24, d_ff=20, vocab_size=256, max_seq=20, tied=False, rope_theta=1e4)
ODD = Config(layers=1, heads=5, kv_heads=1, d_model=30, d_ff=7, vocab_size=97, max_seq=9, norm_eps=1e-6, rope_factor=2.0)
BFLOAT16 = ml_dtypes.bfloat16


def their_tensors(cfg: Config, arrays: Arrays, *, prefix: str = "model.") -> Arrays:
    """As LlamaForCausalLM's state dict, written down without barellm's table."""
    D, H, G, F = cfg.head_size, cfg.heads, cfg.kv_heads, cfg.d_ff
    found = {"embed_tokens": arrays["wte"], "norm": arrays["norm.weight"]}
    for i in range(cfg.layers):
        qkv, gate_up = (arrays[f"h.{i}.{name}.weight"] for name in ("attn.qkv", "mlp.gate_up"))
        block = {
            "self_attn.q_proj": qkv[: H * D],
            "self_attn.k_proj": qkv[H * D : H * D + G * D],
            "self_attn.v_proj": qkv[H * D + G * D :],
            "self_attn.o_proj": arrays[f"h.{i}.attn.proj.weight"],
            "mlp.gate_proj": gate_up[:F],
            "mlp.up_proj": gate_up[F:],
            "mlp.down_proj": arrays[f"h.{i}.mlp.down.weight"],
            "input_layernorm": arrays[f"h.{i}.attn_norm.weight"],
            "post_attention_layernorm": arrays[f"h.{i}.mlp_norm.weight"],
        }
        found |= {f"layers.{i}.{name}": array for name, array in block.items()}
    theirs = {f"{prefix}{name}.weight": np.ascontiguousarray(array) for name, array in found.items()}
    return theirs if cfg.tied else theirs | {"lm_head.weight": arrays["head"]}


def their_config(cfg: Config) -> dict[str, Any]:
    """As transformers 4 wrote it."""
    scaling = {
        "rope_type": "llama3",
        "factor": cfg.rope_factor,
        "low_freq_factor": cfg.rope_low,
        "high_freq_factor": cfg.rope_high,
        "original_max_position_embeddings": cfg.rope_old_seq,
    }
    return {
        "model_type": "llama",
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_seq,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling if cfg.rope_factor else None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "mlp_bias": False,
    }


ARRAYS = random_arrays(TINY)
THEIRS = their_tensors(TINY, ARRAYS)
BUFFERS = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32) for i in range(2)}


def folder_of(path: Path, tensors: Arrays, cfg: Config = TINY, *, shards: int = 0, **config: Any) -> Path:
    return in_folder(path, their_config(cfg) | config, tensors, shards=shards)


def imported(source: Path, out: Path) -> dict[str, np.ndarray]:
    assert main(["import", str(source), "--out", str(out), "--tokenizer", "bytes"]) == 0
    return load_file(out / "checkpoints" / "step-000000" / "weights.safetensors")


@pytest.mark.parametrize(
    "tensors",
    [THEIRS, their_tensors(TINY, ARRAYS, prefix=""), THEIRS | BUFFERS],
    ids=["as saved today", "without prefix", "with buffers"],
)
@pytest.mark.parametrize("shards", [0, 3])
def test_every_layout_gives_the_weights_bit_by_bit(tmp_path, tensors, shards):
    found = imported(folder_of(tmp_path / "hf", tensors, shards=shards), tmp_path / "run")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, name)


@pytest.mark.parametrize("piece", [1, 100, 8 << 20])
@pytest.mark.parametrize("cfg", [TINY, ODD], ids=["untied", "tied"])
def test_there_and_back_are_the_same_tensors_and_sizes(tmp_path, monkeypatch, cfg, piece):
    """However small the pieces; with a vocabulary that is padded here and not there."""
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    arrays = random_arrays(cfg)
    step = checkpoint_of(tmp_path / "run", cfg, arrays)
    out = tmp_path / "hf"
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(out)]) == 0
    found, expected = load_file(out / "model.safetensors"), their_tensors(cfg, arrays)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)
    assert their_config(cfg).items() <= json.loads((out / "config.json").read_text()).items()
    again = open_weights(out)
    assert again.model == cfg
    weights = load_file(step / "weights.safetensors")
    for name, t in again.tensors.items():
        np.testing.assert_array_equal(again.read_rows(name, 0, int(t.shape[0])), weights[name], name)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16])
def test_16_bit_tensors_are_widened_exactly_and_bf16_comes_back(tmp_path, dtype):
    theirs = rounded(THEIRS, dtype)
    found = imported(folder_of(tmp_path / "hf", theirs, shards=2), tmp_path / "run")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array.astype(dtype).astype(np.float32), name)
    if dtype == BFLOAT16:
        out = str(tmp_path / "again")
        assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--dtype", "bf16", "--out", out]) == 0
        again = load_file(tmp_path / "again" / "model.safetensors")
        assert again.keys() == theirs.keys()
        assert all(again[name].tobytes() == array.tobytes() for name, array in theirs.items())


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path, refused):
    arrays = random_arrays(ODD)
    theirs = their_tensors(ODD, arrays)
    assert "lm_head.weight" not in theirs
    found = open_weights(folder_of(tmp_path / "hf", theirs | {"lm_head.weight": arrays["wte"]}, ODD), tokenizer="")
    assert "head" not in found.arrays
    folder_of(tmp_path / "hf", theirs | {"lm_head.weight": arrays["wte"] + 1}, ODD)
    message = "lm_head.weight is not model.embed_tokens.weight, expected a classifier that is tied to it"
    assert message in refused("import", tmp_path / "hf", "--out", tmp_path / "run")


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_compiled_and_distributed_models_are_understood(tmp_path, wrapper):
    found = imported(folder_of(tmp_path / "hf", {wrapper + name: a for name, a in THEIRS.items()}), tmp_path / "run")
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_a_tied_matrix_may_have_the_name_of_the_head_alone(tmp_path):
    arrays = random_arrays(ODD)
    theirs = their_tensors(ODD, arrays)
    theirs["lm_head.weight"] = theirs.pop("model.embed_tokens.weight")
    found = open_weights(folder_of(tmp_path / "hf", theirs, ODD), tokenizer="")
    np.testing.assert_array_equal(found.read_rows("wte", 0, 97), arrays["wte"])


@pytest.mark.parametrize(
    "keys, missing",
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "a mixture of experts"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "cross attention"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
    ],
)
def test_what_an_unknown_architecture_has_that_we_have_not_is_said(tmp_path, refused, keys, missing):
    folder_of(tmp_path / "hf", THEIRS, **keys)
    said = refused("import", tmp_path / "hf", "--out", tmp_path / "run", "--tokenizer", "bytes")
    assert f"model_type is {keys['model_type']!r}, expected 'gpt2'" in said
    assert f"(it has {missing}, which no architecture here has)" in said


def test_an_import_holds_a_few_pieces_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", 1 << 16)
    cfg = Config(layers=2, heads=4, kv_heads=2, d_model=256, d_ff=512, vocab_size=256, max_seq=8)
    tensors = rounded(their_tensors(cfg, random_arrays(cfg)), BFLOAT16)
    source = folder_of(tmp_path / "hf", tensors, cfg, shards=2)
    del tensors
    imported(source, tmp_path / "before")  # imports of modules
    tracemalloc.start()
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * tensorfile.PIECE < 4 * cfg.d_model * 2 * cfg.d_ff  # less than the one matrix gate_up in fp32


def test_a_folder_brings_its_tokenizer_and_takes_it_along(tmp_path):
    content = llama_json(Path(__file__).read_text(), vocab=300)
    cfg = Config(layers=1, heads=2, kv_heads=1, d_model=8, d_ff=6, vocab_size=308, max_seq=16)
    source = folder_of(tmp_path / "hf", their_tensors(cfg, random_arrays(cfg)), cfg)
    (source / "tokenizer.json").write_bytes(content)
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 0
    assert open_weights(tmp_path / "run").tokenizer.hash == HuggingFace(content, path=source).hash
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == content
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (300, 301)


def test_an_import_is_called_after_the_preset_of_its_sizes(tmp_path):
    """Whatever its vocabulary and positions are; else after one of about its kind."""
    sizes = {"layers": 8, "heads": 8, "kv_heads": 4, "d_model": 384, "d_ff": 1024}
    for name, cfg in (("llama-15m", Config(**sizes, vocab_size=256, max_seq=9)), ("llama-124m", TINY)):
        imported(folder_of(tmp_path / f"hf-{name}", their_tensors(cfg, random_arrays(cfg)), cfg), tmp_path / name)
        meta = checkpoint.read_meta(checkpoint.find(tmp_path / name)[0])
        config = overrides.from_json(meta["config"])
        assert (config.preset, models.name_of(config.model), config.model) == (name, "llama3", cfg)


# --- config.json, of several versions ---

NEW = {"rope_type": "default", "rope_theta": 77.0}
STRETCH = {"factor": 4, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 6}
STRETCHED = {"rope_factor": 4.0, "rope_low": 2.0, "rope_high": 8.0, "rope_old_seq": 6}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is changed there -> here; None: the key is left out
    "as it was": ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
    "as it is": ({"rope_theta": None, "rope_parameters": NEW}, {"rope_theta": 77.0}),
    "transformers' default": ({"rope_theta": None}, {"rope_theta": 1e4}),
    "the norm's default": ({"rms_norm_eps": None}, {"norm_eps": 1e-6}),
    "stretched, as it was": ({"rope_scaling": {"type": "llama3", **STRETCH}}, STRETCHED),
    "stretched, as it is": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 9, **STRETCH}},
        STRETCHED | {"rope_theta": 9.0},
    ),
    "stretched by hand": (
        {"rope_theta": None, "rope_parameters": NEW, "rope_scaling": {"type": "llama3", **STRETCH}},
        STRETCHED | {"rope_theta": 1e4},
    ),
    "not stretched by hand": ({"rope_theta": None, "rope_parameters": NEW, "rope_scaling": {}}, {"rope_theta": 77.0}),
    "its own width of heads": ({"head_dim": 6}, {}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_versions_of_config_json(tmp_path, name):
    changes, expected = CONFIGS[name]
    config = {key: value for key, value in (their_config(TINY) | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(THEIRS, tmp_path / "model.safetensors")
    found = open_weights(tmp_path, tokenizer="bytes").model
    assert found == Config(**{**vars(TINY), **expected})


def test_without_the_key_each_head_has_its_own_keys(tmp_path):
    cfg = Config(**{**vars(TINY), "kv_heads": 4})
    folder_of(tmp_path, their_tensors(cfg, random_arrays(cfg)), cfg, num_key_value_heads=None)
    assert open_weights(tmp_path, tokenizer="bytes").model == cfg


SPIRAL = {"rope_type": "spiral", "factor": 2.0}
WRONG_CONFIGS: dict[str, tuple[object, str]] = {
    "attention_bias": (True, "lacks the tensor 'model.layers.0.self_attn.k_proj.bias' (8 missing in all)"),
    "mlp_bias": (True, "lacks the tensor 'model.layers.0.mlp.down_proj.bias' (6 missing in all)"),
    "hidden_act": ("mish", "hidden_act is 'mish', expected 'silu' or 'swish' or 'gelu'"),
    "head_dim": (8, "layers.0.self_attn.q_proj.weight is (24, 24), expected (32, 24) by config.json"),
    "rope_scaling": (SPIRAL, "rope_scaling.rope_type is 'spiral', expected 'default' or 'linear' or 'dynamic'"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor is 0.5, expected 1.0 in llama"),
    "quantization_config": (
        {"quant_method": "fp8"},
        "quantization_config.quant_method is 'fp8', weights of few bits, expected float32, bfloat16 or float16",
    ),
    "rope_parameters": ([3], "rope_parameters is [3], expected keys with values, or null"),
    "rope_theta": ("big", "rope_theta is 'big', expected a number"),
    "rms_norm_eps": (0, "model.norm_eps is 0.0, expected above 0"),
    "num_key_value_heads": (3, "model.kv_heads 3 does not divide model.heads 4"),
    "num_attention_heads": (8, "model.heads 8 divides model.d_model 24 into parts of 3, expected an even size"),
    "num_hidden_layers": (2.0, "num_hidden_layers is 2.0, expected an integer"),
    "tie_word_embeddings": ("no", "tie_word_embeddings is 'no', expected true or false"),
    "intermediate_size": (21, "layers.0.mlp.gate_proj.weight is (20, 24), expected (21, 24) by config.json"),
}


@pytest.mark.parametrize("key", WRONG_CONFIGS)
def test_another_model_is_refused_by_its_key(tmp_path, refused, key):
    value, message = WRONG_CONFIGS[key]
    folder_of(tmp_path / "hf", THEIRS, **{key: value})
    said = refused("import", tmp_path / "hf", "--out", tmp_path / "run", "--tokenizer", "bytes")
    assert message in said and said.startswith(str(tmp_path / "hf"))


def test_a_stretch_without_its_numbers_is_refused(tmp_path, refused):
    for key, missing in (("factor", None), ("high_freq_factor", 2.0)):
        folder_of(tmp_path / "hf", THEIRS, rope_scaling={"rope_type": "llama3", **STRETCH, key: missing})
        said = refused("import", tmp_path / "hf", "--out", tmp_path / "run", "--tokenizer", "bytes")
        wrong = "rope_scaling.factor is None, expected a number"
        assert (wrong if missing is None else "model.rope_high is 2.0, expected above model.rope_low 2.0") in said


def without(name: str) -> Arrays:
    return {key: array for key, array in THEIRS.items() if key != name}


K = "model.layers.1.self_attn.k_proj"
WRONG_TENSORS = {
    "a part is missing": (without(f"{K}.weight"), "lacks the tensor 'model.layers.1.self_attn.k_proj.weight' (1 missing in all)"),
    "the head is missing": (without("lm_head.weight"), "lacks the tensor 'lm_head.weight'"),
    "a bias": (THEIRS | {f"{K}.bias": np.ones(12, np.float32)}, "has the tensor 'model.layers.1.self_attn.k_proj.bias', which"),
    "keys of every head": (
        THEIRS | {f"{K}.weight": np.ones((24, 24), np.float32)},
        "layers.1.self_attn.k_proj.weight is (24, 24), expected (12, 24) by config.json",
    ),
    "8 bits": (THEIRS | {f"{K}.weight": np.ones((12, 24), np.int8)}, "k_proj.weight is int8, expected float32"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_an_unexpected_tensor_is_named(tmp_path, refused, wrong):
    tensors, message = WRONG_TENSORS[wrong]
    folder_of(tmp_path / "hf", tensors)
    assert message in refused("import", tmp_path / "hf", "--out", tmp_path / "run", "--tokenizer", "bytes")
    assert not (tmp_path / "run").exists()


def test_llmc_has_no_such_model(tmp_path, refused):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    message = refused("export", tmp_path / "run", "--format", "llmc", "--out", tmp_path / "there")
    assert message.endswith("is llama3, which --format llmc does not have")
