"""Small models with weights that are nowhere 0 or 1, and writers of the foreign formats that know nothing of barellm's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from barellm.checkpoint.weights import Weights, parameters
from barellm.config import ModelConfig as AnyModel
from barellm.data.tokenizers import Bytes, Tokenizer
from barellm.interop import imported
from barellm.models.gpt2 import Config as ModelConfig

TINY = ModelConfig(layers=2, heads=2, d_model=12, vocab_size=256, max_seq=20)
ODD = ModelConfig(layers=3, heads=5, d_model=35, vocab_size=97, max_seq=31)
Arrays = dict[str, np.ndarray]


def random_arrays(model: AnyModel, seed: int = 1) -> Arrays:
    """By barellm's names, wte without padding; every element a different normal."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.3 * rng.standard_normal((t.valid_rows, *t.shape[1:]))).astype(np.float32) for name, t in parameters(model).items()
    }


def weights_of(model: AnyModel, arrays: Arrays, tokenizer: Tokenizer | None = None) -> Weights:
    return Weights(Path("made"), model, arrays, tokenizer or Bytes())


def checkpoint_of(folder: Path, model: AnyModel, arrays: Arrays, tokenizer: Tokenizer | None = None) -> Path:
    """A barellm checkpoint with these weights."""
    return imported.save(weights_of(model, arrays, tokenizer), folder)


def rounded(arrays: Arrays, dtype) -> Arrays:
    return {name: array.astype(dtype) for name, array in arrays.items()}


# --- Hugging Face ---

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def their_tensors(arrays: Arrays, *, prefix: str = "transformer.") -> Arrays:
    """As GPT2LMHeadModel's state dict: names, and Conv1D's (in, out)."""
    found = {}
    for name, array in arrays.items():
        theirs = prefix + (f"{name}.weight" if name in ("wte", "wpe") else name)
        found[theirs] = np.ascontiguousarray(array.T if name.endswith(CONV1D) else array)
    return found


def their_config(model: ModelConfig) -> dict[str, object]:
    sizes = {"n_layer": model.layers, "n_head": model.heads, "n_embd": model.d_model, "n_positions": model.max_seq}
    return {"model_type": "gpt2", "vocab_size": model.vocab_size, "layer_norm_epsilon": 1e-5, "n_inner": None, **sizes}


def hugging_face(folder: Path, model: ModelConfig, tensors: Arrays, *, shards: int = 0, **config: object) -> Path:
    return in_folder(folder, their_config(model) | config, tensors, shards=shards)


def in_folder(folder: Path, config: Mapping[str, object], tensors: Arrays, *, shards: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, place = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


# --- llm.c ---


def llmc_file(path: Path, model: ModelConfig, arrays: Mapping[str, np.ndarray], *, version: int, padded: int, **words: int) -> Path:
    """As write_model of llm.c's train_gpt2.py; `words` replace some of the header's by their place, w0 to w255."""
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, version, model.max_seq, model.vocab_size, model.layers, model.heads, model.d_model, padded]
    for word, value in words.items():
        header[int(word[1:])] = value
    dtype = {3: np.dtype("<f4"), 5: np.dtype(ml_dtypes.bfloat16)}[version]
    blocks = ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
              "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")  # fmt: skip
    pad = np.zeros((padded - model.vocab_size, model.d_model), np.float32)
    parts = [np.concatenate([arrays["wte"], pad]), arrays["wpe"]]
    parts += [arrays[f"h.{layer}.{name}"] for name in blocks for layer in range(model.layers)]
    parts += [arrays["ln_f.weight"], arrays["ln_f.bias"]]
    path.write_bytes(header.tobytes() + b"".join(part.astype(dtype).tobytes() for part in parts))
    return path
