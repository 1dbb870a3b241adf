"""Hugging Face's folders: config.json and model.safetensors, whole or in shards. Its module says what an
architecture is called there (`models.hf_mapping.HuggingFace`)."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from barellm import models
from barellm.checkpoint import storage, tensorfile
from barellm.checkpoint.checkpoint import read_json
from barellm.checkpoint.weights import Reordered, RowsOfArray, Stack, Weights, parameters
from barellm.config import ModelConfig
from barellm.config.fields import converted, entries
from barellm.errors import UserError
from barellm.interop import vocabulary
from barellm.models.decoders import architectures, hugging_face
from barellm.models.hf_mapping import HuggingFace
from barellm.program.tensor import Tensor

CONFIG, FILE, INDEX, PICKLE = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
CARD = "README.md"
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # torch.compile and DistributedDataParallel put these before names


def is_folder(path: Path) -> bool:
    """Whether a folder is Hugging Face's: a run of barellm has a config.json too."""
    if any((path / name).exists() for name in (FILE, INDEX, PICKLE)):
        return True
    return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)


def read(folder: Path) -> Weights:
    """The weights of a folder, without its tokenizer. UserError for an unknown architecture or an incomplete folder."""
    model = read_model(folder)
    return whole(folder, model, *_tensors(folder, hugging_face(model)))


def whole(
    path: Path, model: ModelConfig, tensors: dict[str, Any], origin: dict[str, tuple[str, str]], *, rows_are_out: bool = False
) -> Weights:
    """Weights from arrays by Hugging Face's names; `origin`: each one's file and full name there. With `rows_are_out` every matrix
    is (out, in). UserError for missing, extra or wrongly shaped tensors. A tied matrix under the head's name is renamed in both."""
    known = hugging_face(model)
    if rows_are_out:
        known = replace(known, transposed=lambda ours: False)
    expected = {part.name: part for part in parts(known, model, parameters(model))}
    # A tied matrix may be there as the embedding, as the head, or as both.
    tied = known.tied(model)
    embedding = next((name for name, part in expected.items() if part.ours == tied), "")
    if tied and embedding not in tensors and known.head in tensors:
        tensors[embedding], origin[embedding] = tensors.pop(known.head), origin[known.head]
    # The same names, compared as they stand in the file: with its prefix, if it has one.
    prefix = known.prefix if any(known.prefix in full for _, full in origin.values()) else ""
    full_names = {name: name if name == known.head else prefix + name for name in expected}
    full_names |= {name: full for name, (_, full) in origin.items()}
    found_names = {full_names[name] for name in tensors if not (tied and name == known.head)}
    tensorfile.check_names(path, found_names, {full_names[name] for name in expected})
    # Each parameter of ours is made of one or several of theirs, one below the other.
    stacked: dict[str, list[np.ndarray | Reordered]] = {}
    for theirs, part in expected.items():
        array = tensors[theirs]
        if array.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
            raise UserError(f"{': '.join(origin[theirs])} is {array.dtype}, expected float32, bfloat16 or float16")
        if array.shape != part.shape:
            raise UserError(f"{': '.join(origin[theirs])} is {array.shape}, expected {part.shape} by {CONFIG}")
        if part.transposed:
            array = array.T
        stacked.setdefault(part.ours, []).append(array if part.order is None else Reordered(array, part.order))
    if tied and known.head in tensors and not _equal(tensors[known.head], tensors[embedding]):
        other = origin[embedding][1]
        raise UserError(f"{': '.join(origin[known.head])} is not {other}, expected a classifier that is tied to it")
    arrays: dict[str, RowsOfArray] = {name: one[0] if len(one) == 1 else Stack(one) for name, one in stacked.items()}
    return Weights(path, model, arrays, tokenizer=None)


@dataclass(frozen=True)
class Part:
    """A tensor of theirs, by its name without the prefix: rows `first` and on of the parameter `ours`."""

    name: str
    ours: str
    first: int
    shape: tuple[int, ...]  # as it lies there
    transposed: bool
    made_order: Callable[[], list[int] | None]

    @cached_property
    def order(self) -> np.ndarray | None:
        """Where our rows lie in theirs, if not in the same order. For shapes that were checked: a config.json may ask for any."""
        order = self.made_order()
        return None if order is None else np.array(order)


def parts(known: HuggingFace, model: ModelConfig, expected: Mapping[str, Tensor]) -> Iterator[Part]:
    """All tensors that Hugging Face stores for a model, in the order of ours (`expected`); one of ours may be several there."""
    for ours, t in expected.items():
        first, transposed = 0, known.transposed(ours)
        for theirs, rows in known.parts(model, ours).items():
            shape = (rows or t.valid_rows, *t.shape[1:])
            order = partial(known.order, model, ours, theirs)
            yield Part(theirs, ours, first, shape[::-1] if transposed else shape, transposed, order)
            first += shape[0]
        assert first == t.valid_rows, ours


def read_model(folder: Path) -> ModelConfig:
    """The configuration that the config.json of a folder says."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder / CONFIG} is missing, expected the sizes of the model in it")
    return model_of(folder / CONFIG, read_json(folder / CONFIG))


def model_of(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    """Our configuration for the config.json `config`, read from `path`. UserError for values that our model does not support."""
    arch, module = _known(path, config)
    try:
        for key, values in arch.kinds.items():
            _one_of(key, config.get(key, values[0]), values)
        found = {name: (key, config.get(key, default)) for key, (name, default) in arch.sizes.items()}
        for key, (name, default, values) in arch.words.items():
            found[name] = key, values[_one_of(key, config.get(key, default), tuple(values))]
        found |= arch.read(config)
        kinds = {name: entry.kind for name, entry in entries(module.Config).items()}
        model = module.Config(**arch.fixed, **{name: converted(key, value, kinds[name]) for name, (key, value) in found.items()})
        if hugging_face(model) is not arch:
            model = replace(model, family=arch.model_type)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for key, value in arch.derived.items():
        if config.get(key) not in (None, value(model)):
            raise UserError(f"{path}: {key} is {config[key]!r}, expected {value(model)!r} by the other keys")
    return model


def _one_of(key: str, found: Any, values: tuple[Any, ...]) -> Any:
    if not isinstance(found, str | bool | int | float | None) or found not in values:
        raise UserError(f"{key} is {found!r}, expected {' or '.join(map(repr, values))}")
    return found


def _known(path: Path, config: Mapping[str, Any]) -> tuple[HuggingFace, ModuleType]:
    """The architecture named by config.json's `model_type`, or by its class. UserError for unknown and for quantized ones."""
    found: dict[str, tuple[HuggingFace, ModuleType]] = {}
    for module in map(models.module, models.names()):
        found |= {known.model_type: (known, module) for known in architectures(module)}
    classes = config.get("architectures") or ()
    named = (one.model_type for one, _ in found.values() if isinstance(classes, list) and one.class_name in classes)
    # By model_type; without one by the class; without either, as in GPT-2's first files, by a key that only GPT-2 has.
    oldest = models.BEFORE_NAMES if "n_embd" in config else None
    name = config["model_type"] if "model_type" in config else next(named, oldest)
    if not isinstance(name, str) or name not in found:
        missing = [what for what, has in MISSING.items() if has(config)]
        why = f" (it has {' and '.join(missing)}, which no architecture here has)" if missing else ""
        raise UserError(f"{path}: model_type is {name!r}, expected {' or '.join(map(repr, found))}{why}")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        rejected = f"{path}: quantization_config.quant_method is {method!r}, weights of few bits"
        hint = "import the folder that they were made of, and give sample or eval --weights int8, int4 or nf4"
        raise UserError(f"{rejected}, expected float32, bfloat16 or float16: {hint}")
    return found[name]


def _any(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: any(config.get(key) for key in keys)


MISSING: dict[str, Callable[[Mapping[str, Any]], bool]] = {  # what architectures have that we have not -> whether it is one
    "a mixture of experts": _any("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "cross attention": _any("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"),
    "ALiBi": lambda config: config.get("model_type") == "bloom" or _any("alibi")({**config, **(config.get("attn_config") or {})}),
    "state spaces": _any("mamba_d_state", "state_size", "ssm_cfg"),
    "pictures or sound": _any("vision_config", "audio_config"),
}


def _tensors(folder: Path, known: HuggingFace) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, str]]]:
    """(arrays, {name: (file, full name)}) by Hugging Face's names without prefix; buffers that are no parameters are left out."""
    tensors: dict[str, np.ndarray] = {}
    origin: dict[str, tuple[str, str]] = {}
    for path, listed in _files(folder).items():
        arrays = tensorfile.mapped(path)
        if missing := sorted(listed - arrays.keys()):
            raise UserError(f"{path} lacks the tensor {missing[0]!r}, which {INDEX} lists")
        for full, array in arrays.items():
            name = WRAPPERS.sub("", full).removeprefix(known.prefix)
            if known.ignored(name):
                continue
            if name in tensors:
                raise UserError(f"{path} has the tensor {full!r}, and {' has it as '.join(origin[name])} too")
            tensors[name], origin[name] = array, (str(path), full)
    return tensors, origin


def _files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files of a folder: file -> the tensors that the index lists for it (empty set without an index)."""
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


class _Theirs:
    """The rows of what is written, by Hugging Face's names: some matrices are (in, out) there, some are several."""

    def __init__(self, weights: Weights) -> None:
        known = hugging_face(weights.model)
        self.weights = weights
        self.reordered = "", np.empty(0)  # the last tensor whose rows lie otherwise here, by its name
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
        """Rows [lo, hi) of a tensor in Hugging Face's layout: reordered, transposed or split off from one of ours."""
        part = self.parts[name]
        if part.order is not None:
            if self.reordered[0] != name:
                rows = self.weights.read_rows(part.ours, part.first, part.first + len(part.order))
                self.reordered = name, rows[np.argsort(part.order)]
            return self.reordered[1][lo:hi]
        if part.transposed:
            array = self.weights.arrays[part.ours]
            whole = array if isinstance(array, np.ndarray) else array[: part.shape[1]]
            return whole.T[lo:hi].astype(np.float32)
        return self.weights.read_rows(part.ours, part.first + lo, part.first + hi)


def write(weights: Weights, out: Path, *, dtype: str, card: str) -> list[str]:
    """Write the folder `out` for transformers (it appears when complete); returns its file names. OSError: nothing is left."""
    source = _Theirs(weights)
    files = {CONFIG: (json.dumps(_config(weights, dtype), indent=2) + "\n").encode(), CARD: card.encode()}
    if weights.tokenizer is not None:
        files |= vocabulary.files(weights.tokenizer, weights.model.max_seq)
    with storage.new_folder(out) as folder:
        tensorfile.write(folder / FILE, source, source.tensors(dtype), framework="pt")
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            storage.write_file(folder / name, content)
    return [FILE, *files]


def _config(weights: Weights, dtype: str) -> dict[str, Any]:
    """The content of config.json for these weights: rows of the family's tables, then `written`, which wins; derived keys null."""
    model, tokenizer = weights.model, weights.tokenizer
    known = hugging_face(model)
    return {
        "architectures": [known.class_name], "model_type": known.model_type,
        **{key: values[0] for key, values in known.kinds.items()},
        **{key: getattr(model, name) for key, (name, _) in known.sizes.items()},
        **{key: next(k for k, v in values.items() if v == getattr(model, name)) for key, (name, _, values) in known.words.items()},
        **dict.fromkeys(known.derived), **dict.fromkeys(known.rates, getattr(model, "dropout", 0.0)), **known.written(model),
        **vocabulary.ids_of_config(tokenizer), "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }  # fmt: skip
