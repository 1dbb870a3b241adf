"""Hugging Face's GPT-2: a folder with config.json and model.safetensors, whole or in shards.

Its names are ours with "transformer." before them, which older files lack, and ".weight" after the two embeddings. Its four
matrices of a block are of the class Conv1D, (in, out). The classifier is wte and need not be there.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from barellm.checkpoint import storage, tensorfile
from barellm.checkpoint.checkpoint import read_json
from barellm.checkpoint.weights import Weights, parameters
from barellm.config import ModelConfig
from barellm.errors import UserError
from barellm.interop import vocabulary
from barellm.program.tensor import Tensor

CONFIG, FILE, INDEX, PICKLE = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
PREFIX = "transformer."
HEAD = "lm_head.weight"
CONV1D = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")  # buffers of older versions: where attention looks
# Key -> what transformers takes where config.json does not say.
SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
# Key -> what this model can be; the first is transformers' default.
KINDS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the same formula
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def is_folder(path: Path) -> bool:
    """Whether a folder is Hugging Face's: a run of barellm has a config.json too."""
    if any((path / name).exists() for name in (FILE, INDEX, PICKLE)):
        return True
    return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)


def their_name(name: str) -> str:
    """Hugging Face's name of a parameter, without PREFIX."""
    return f"{name}.weight" if name in ("wte", "wpe") else name


# --- reading ---


def read(folder: Path) -> Weights:
    """Without its tokenizer. UserError for whatever is not GPT-2 as barellm has it, or not whole."""
    model = _model(folder / CONFIG)
    tensors, origin = _tensors(folder)
    expected = parameters(model)
    tensorfile.check_names(folder, tensors.keys() - {HEAD}, map(their_name, expected))
    arrays = {}
    for name, t in expected.items():
        theirs = their_name(name)
        array = tensors[theirs]
        if array.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
            raise UserError(f"{origin[theirs]}: {theirs} is {array.dtype}, expected float32, bfloat16 or float16")
        shape = (model.vocab_size, model.channels) if name == "wte" else t.shape
        shape = shape[::-1] if CONV1D.search(name) else shape
        if array.shape != shape:
            raise UserError(f"{origin[theirs]}: {theirs} is {array.shape}, expected {shape} by {CONFIG}")
        arrays[name] = array.T if CONV1D.search(name) else array
    if HEAD in tensors and not _equal(tensors[HEAD], arrays["wte"]):
        raise UserError(f"{origin[HEAD]}: {HEAD} is not wte, expected a classifier that is tied to it")
    return Weights(folder, model, arrays, tokenizer=None)


def _model(path: Path) -> ModelConfig:
    if not path.is_file():
        raise UserError(f"{path} is missing, expected the sizes of the model in it")
    config = read_json(path)
    for key, known in KINDS.items():
        if (found := config.get(key, known[0])) not in known:
            raise UserError(f"{path}: {key} is {found!r}, expected {' or '.join(map(repr, known))}")
    sizes = {key: config.get(key, default) for key, default in SIZES.items()}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{path}: {key} is {value!r}, expected an integer")
    C = sizes["n_embd"]
    if config.get("n_inner") not in (None, 4 * C):
        raise UserError(f"{path}: n_inner is {config['n_inner']!r}, expected {4 * C}, four times n_embd")
    try:
        return ModelConfig(
            layers=sizes["n_layer"],
            heads=sizes["n_head"],
            channels=C,
            vocab_size=sizes["vocab_size"],
            max_seq=sizes["n_positions"],
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _tensors(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Path]]:
    """Arrays, and the file of each, by Hugging Face's names without PREFIX; masks left out."""
    tensors: dict[str, np.ndarray] = {}
    origin: dict[str, Path] = {}
    for path, listed in _files(folder).items():
        arrays = tensorfile.mapped(path)
        if missing := sorted(listed - arrays.keys()):
            raise UserError(f"{path} lacks the tensor {missing[0]!r}, which {INDEX} lists")
        for full, array in arrays.items():
            name = full.removeprefix(PREFIX)
            if MASKS.match(name):
                continue
            if name in tensors:
                raise UserError(f"{path} has the tensor {full!r}, and {origin[name]} has it too")
            tensors[name], origin[name] = array, path
    return tensors, origin


def _files(folder: Path) -> dict[Path, set[str]]:
    """File -> the tensors that must be in it, as far as an index says."""
    if (folder / FILE).is_file():
        return {folder / FILE: set()}
    if not (folder / INDEX).is_file():
        hint = f": {PICKLE} is not read, save it with safe_serialization=True" if (folder / PICKLE).is_file() else ""
        raise UserError(f"{folder} has neither {FILE} nor {INDEX}{hint}")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) and Path(x).name == x for x in places.values()):
        raise UserError(f"{folder / INDEX}: weight_map is {str(places)[:60]!r}, expected tensors with names of files")
    files: dict[Path, set[str]] = {}
    for name, file in places.items():
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing, which {INDEX} lists")
        files.setdefault(folder / file, set()).add(name)
    return files


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    return all(np.array_equal(a[lo:hi], b[lo:hi]) for lo, hi in tensorfile.pieces(a.shape, itemsize=4))


# --- writing ---


class _Transposed:
    """The rows of what is written, by Hugging Face's names: Conv1D's matrices are (in, out)."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.ours = {PREFIX + their_name(name): name for name in weights.tensors}

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        found = {}
        for theirs, name in self.ours.items():
            t = self.weights.tensors[name]
            shape = t.shape[::-1] if CONV1D.search(name) else (t.valid_rows, *t.shape[1:])
            found[theirs] = replace(t, name=theirs, shape=shape, dtype=dtype)
        return found

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        ours = self.ours[name]
        if CONV1D.search(ours):
            return self.weights.arrays[ours].T[lo:hi].astype(np.float32)
        return self.weights.read_rows(ours, lo, hi)


def write(weights: Weights, out: Path, *, dtype: str) -> list[str]:
    """The folder `out`, which appears when it is whole. Returns the names of its files. OSError: nothing is there."""
    source = _Transposed(weights)
    files = {CONFIG: (json.dumps(_config(weights, dtype), indent=2) + "\n").encode()}
    if weights.tokenizer is not None:
        files |= vocabulary.files(weights.tokenizer, weights.model.max_seq)
    with storage.new_folder(out) as folder:
        tensorfile.write(folder / FILE, source, source.tensors(dtype), framework="pt")
        for name, content in files.items():
            storage.write_file(folder / name, content)
    return [FILE, *files]


def _config(weights: Weights, dtype: str) -> dict[str, Any]:
    model, tokenizer = weights.model, weights.tokenizer
    eot = tokenizer.eot if tokenizer else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: known[0] for key, known in KINDS.items()},
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_embd": model.channels,
        "n_inner": None,
        "vocab_size": model.vocab_size,
        "n_positions": model.max_seq,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.dropout),
        "bos_token_id": eot,
        "eos_token_id": eot,
        "tie_word_embeddings": True,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }
