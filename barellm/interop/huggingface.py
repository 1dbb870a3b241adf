"""Hugging Face's folders: config.json and model.safetensors, whole or in shards. Its module says what an
architecture is called there (`models.hf_mapping.HuggingFace`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from barellm import models
from barellm.checkpoint import storage, tensorfile
from barellm.checkpoint.checkpoint import read_json
from barellm.checkpoint.weights import Stack, Weights, parameters
from barellm.config import ModelConfig
from barellm.config.fields import converted, entries
from barellm.errors import UserError
from barellm.interop import vocabulary
from barellm.models.hf_mapping import HuggingFace
from barellm.program.tensor import Tensor

CONFIG, FILE, INDEX, PICKLE = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
CARD = "README.md"


def is_folder(path: Path) -> bool:
    """Whether a folder is Hugging Face's: a run of barellm has a config.json too."""
    if any((path / name).exists() for name in (FILE, INDEX, PICKLE)):
        return True
    return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)


# --- reading ---


def read(folder: Path) -> Weights:
    """The weights of a folder, without its tokenizer. It is a UserError if the model is none of our architectures, or is not
    whole."""
    model = model_of(folder / CONFIG)
    known: HuggingFace = models.of(model).HUGGING_FACE
    tensors, origin = _tensors(folder, known)
    expected = parameters(model)
    places = {part.name: part for part in parts(known, model, expected)}
    tied = known.tied(model)
    tensorfile.check_names(folder, tensors.keys() - ({known.head} if tied else set()), places)
    found: dict[str, list[np.ndarray]] = {}
    for theirs, part in places.items():
        array, shape = tensors[theirs], part.shape
        if array.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
            raise UserError(f"{origin[theirs]}: {theirs} is {array.dtype}, expected float32, bfloat16 or float16")
        if array.shape != shape:
            raise UserError(f"{origin[theirs]}: {theirs} is {array.shape}, expected {shape} by {CONFIG}")
        found.setdefault(part.ours, []).append(array.T if part.transposed else array)
    if tied and known.head in tensors and not _equal(tensors[known.head], found[tied][0]):
        raise UserError(f"{origin[known.head]}: {known.head} is not {tied}, expected a classifier that is tied to it")
    arrays = {name: one[0] if len(one) == 1 else Stack(one) for name, one in found.items()}
    return Weights(folder, model, arrays, tokenizer=None)


@dataclass(frozen=True)
class Part:
    """A tensor of theirs, by its name without the prefix: rows `first` and on of the parameter `ours`."""

    name: str
    ours: str
    first: int
    shape: tuple[int, ...]  # as it lies there
    transposed: bool


def parts(known: HuggingFace, model: ModelConfig, expected: Mapping[str, Tensor]) -> Iterator[Part]:
    """All tensors that a model is there, in the order of our parameters."""
    for ours, t in expected.items():
        first, transposed = 0, known.transposed(ours)
        for theirs, rows in known.parts(model, ours).items():
            shape = (rows or t.valid_rows, *t.shape[1:])
            yield Part(theirs, ours, first, shape[::-1] if transposed else shape, transposed)
            first += shape[0]
        assert first == t.valid_rows, ours


def model_of(path: Path) -> ModelConfig:
    """The configuration that a config.json says."""
    if not path.is_file():
        raise UserError(f"{path} is missing, expected the sizes of the model in it")
    config = read_json(path)
    known, module = _known(path, config)
    for key, values in known.kinds.items():
        if (found := config.get(key, values[0])) not in values:
            raise UserError(f"{path}: {key} is {found!r}, expected {' or '.join(map(repr, values))}")
    try:
        found = {name: (key, config.get(key, default)) for key, (name, default) in known.sizes.items()}
        found |= known.read(config)
        kinds = {name: entry.kind for name, entry in entries(module.Config).items()}
        model = module.Config(**{name: converted(key, value, kinds[name]) for name, (key, value) in found.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for key, value in known.derived.items():
        if config.get(key) not in (None, value(model)):
            raise UserError(f"{path}: {key} is {config[key]!r}, expected {value(model)!r} by the other keys")
    return model


def _known(path: Path, config: Mapping[str, Any]) -> tuple[HuggingFace, ModuleType]:
    """The architecture whose name config.json has; where it has none, the first."""
    found = {}
    for module in map(models.module, models.names()):
        known: HuggingFace | None = getattr(module, "HUGGING_FACE", None)
        if known is not None:
            found[known.model_type] = known, module
    name = config.get("model_type", models.BEFORE_NAMES)
    if not isinstance(name, str) or name not in found:
        raise UserError(f"{path}: model_type is {name!r}, expected {' or '.join(map(repr, found))}")
    return found[name]


def _tensors(folder: Path, known: HuggingFace) -> tuple[dict[str, np.ndarray], dict[str, Path]]:
    """Arrays, and the file of each, by Hugging Face's names without their prefix; what is no parameter left out."""
    tensors: dict[str, np.ndarray] = {}
    origin: dict[str, Path] = {}
    for path, listed in _files(folder).items():
        arrays = tensorfile.mapped(path)
        if missing := sorted(listed - arrays.keys()):
            raise UserError(f"{path} lacks the tensor {missing[0]!r}, which {INDEX} lists")
        for full, array in arrays.items():
            name = full.removeprefix(known.prefix)
            if known.ignored(name):
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


class _Theirs:
    """The rows of what is written, by Hugging Face's names: some matrices are (in, out) there, some are several."""

    def __init__(self, weights: Weights) -> None:
        known: HuggingFace = models.of(weights.model).HUGGING_FACE
        self.weights = weights
        self.parts = {
            part.name if part.name == known.head else known.prefix + part.name: part
            for part in parts(known, weights.model, weights.tensors)
        }

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        return {
            name: replace(self.weights.tensors[part.ours], name=name, shape=part.shape, dtype=dtype)
            for name, part in self.parts.items()
        }

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        part = self.parts[name]
        if part.transposed:
            array = self.weights.arrays[part.ours]
            assert isinstance(array, np.ndarray)  # what is packed is never transposed
            return array.T[lo:hi].astype(np.float32)
        return self.weights.read_rows(part.ours, part.first + lo, part.first + hi)


def write(weights: Weights, out: Path, *, dtype: str, card: str) -> list[str]:
    """The folder `out`, which appears when it is whole. Returns the names of its files. OSError: nothing is there."""
    source = _Theirs(weights)
    files = {CONFIG: (json.dumps(_config(weights, dtype), indent=2) + "\n").encode(), CARD: card.encode()}
    if weights.tokenizer is not None:
        files |= vocabulary.files(weights.tokenizer, weights.model.max_seq)
    with storage.new_folder(out) as folder:
        tensorfile.write(folder / FILE, source, source.tensors(dtype), framework="pt")
        for name, content in files.items():
            storage.write_file(folder / name, content)
    return [FILE, *files]


def _config(weights: Weights, dtype: str) -> dict[str, Any]:
    model, tokenizer = weights.model, weights.tokenizer
    known: HuggingFace = models.of(model).HUGGING_FACE
    return {
        "architectures": [known.class_name],
        "model_type": known.model_type,
        **{key: values[0] for key, values in known.kinds.items()},
        **{key: getattr(model, name) for key, (name, _) in known.sizes.items()},
        **dict.fromkeys(known.derived),
        **dict.fromkeys(known.rates, getattr(model, "dropout", 0.0)),
        **known.written(model),
        **vocabulary.ids_of_config(tokenizer),
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }
