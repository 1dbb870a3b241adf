"""LoRA adapters in files: PEFT folders, and checkpoints of runs that trained adapters or some parameters. An adapter is merged into
the weights of its base as they are read, W + s B A, so readers of weights need not know of adapters."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from barellm.checkpoint import checkpoint, storage, tensorfile
from barellm.checkpoint.weights import RowsOfArray, Weights
from barellm.config import AdapterConfig, Config, ModelConfig, overrides
from barellm.errors import UserError, nearest, shown
from barellm.models.adapters import Module, family, modules, targeted
from barellm.program import quantization
from barellm.program.tensor import Tensor

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Keys of adapter_config.json of which barellm knows these values alone; the first is that of a missing key.
KNOWN = {
    "peft_type": ("LORA",), "use_dora": (False, None), "bias": ("none",), "modules_to_save": (None, []), "lora_bias": (False, None),
    "layer_replication": (None, []), "trainable_token_indices": (None, []), "target_parameters": (None, []),
    "use_qalora": (False, None), "alora_invocation_tokens": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """The adapter of one module: A (rank, K), B (rows, rank) and the scale of their product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclass(frozen=True)
class Adapter:
    """What a run or PEFT has trained on top of a base: pairs, or whole parameters by name. `codes`: the scheme of the base's linear
    layers while it was trained, "" where they were numbers."""

    path: Path
    pairs: Mapping[Module, Pair]
    whole: Mapping[str, np.ndarray]
    codes: str = ""


@dataclass(frozen=True)
class MergedRows:
    """The rows of a weight with the adapters of its blocks of rows."""

    base: RowsOfArray
    blocks: tuple[tuple[int, Pair], ...]
    how: quantization.Scheme | None

    def __getitem__(self, rows: slice) -> np.ndarray:
        """fp32 rows of the merged weight. `how`: the base was quantized during the adapter's training, so its rows are rounded to
        that scheme before the adapter is added."""
        merged_rows = np.array(self.base[rows], np.float32)
        if self.how is not None and len(merged_rows):
            merged_rows = quantization.dequantize(*quantization.quantize(merged_rows, self.how), self.how)
        start = rows.start or 0
        for first, pair in self.blocks:
            lo, hi = max(start, first), min(start + len(merged_rows), first + len(pair.b))
            if lo < hi:
                merged_rows[lo - start : hi - start] += np.float32(pair.scale) * (pair.b[lo - first : hi - first] @ pair.a)
        return merged_rows


def merged(base: Weights, adapter: Adapter, *, path: Path | None = None) -> Weights:
    """The weights of `base` with an adapter merged in. UserError if it belongs to another model."""
    arrays: dict[str, RowsOfArray] = dict(base.arrays)
    scheme = quantization.scheme(adapter.codes) if adapter.codes else None
    linears = dict.fromkeys(m.weight for m in modules(base.model)) if scheme is not None else {}
    blocks: dict[str, list[tuple[int, Pair]]] = {name: [] for name in linears}
    for m, pair in adapter.pairs.items():
        blocks.setdefault(m.weight, []).append((m.first, pair))
    for name, found in blocks.items():
        arrays[name] = MergedRows(base.arrays[name], tuple(found), scheme)
    for name, array in adapter.whole.items():
        if name not in base.tensors or array.shape != tuple(base.tensors[name].shape):
            raise UserError(f"{adapter.path} has {name} {array.shape}, which {base.path} lacks: it is of another base")
        arrays[name] = array
    return replace(base, arrays=arrays, path=path or base.path)


def open_adapter(path: Path, base: Weights) -> Adapter:
    """The adapter for `base` in a PEFT folder, run or checkpoint. UserError for another base, or if there is none."""
    if (path / CONFIG).is_file():
        return read(path, base.model)
    checkpoint.must_exist(path, expected="a run with an adapter, or a folder of PEFT's")
    if not checkpoint.holds_any(path):
        raise UserError(f"{path} holds no adapter, expected {CONFIG} or a run that trained one")
    step, _ = checkpoint.find(path, optimizer=False)
    meta = checkpoint.read_meta(step)
    known = meta.get("base", {}).get("hash")
    if known is None:
        raise UserError(f"{step} holds all weights of a model, expected an adapter")
    if (found := base.digest()) != known:
        theirs = meta["base"].get("path")
        expected = f"name {theirs} with this adapter, or {path} alone, without --adapter"
        raise UserError(f"{step} was trained on top of {theirs}, with the hash {known}, and {base.path} has {found}: {expected}")
    return of_checkpoint(step, base.model)


def of_checkpoint(step: Path, model: ModelConfig) -> Adapter:
    """The adapter, or the trained parameters, in a checkpoint whose meta.json names its base."""
    config = overrides.from_json(checkpoint.read_meta(step)["config"], step / checkpoint.META)
    adapter, file = config.adapter, step / checkpoint.WEIGHTS
    arrays = tensorfile.mapped(file)
    if not adapter.rank:
        return Adapter(step, {}, arrays, adapter.codes)
    pairs: dict[Module, Pair] = {}
    rows_used: dict[str, int] = {}  # rows of each A that earlier modules have
    expected: set[str] = set()
    for m in targeted(model, adapter.targets):
        (name_a, name_b), first = m.factors, rows_used.get(m.weight, 0)
        a, b = arrays.get(name_a), arrays.get(name_b)
        rows_used[m.weight] = first + adapter.rank
        expected |= {name_a, name_b}
        if a is None or b is None or a.ndim != 2 or len(a) < rows_used[m.weight] or b.shape != (m.rows, adapter.rank):
            raise UserError(f"{file} has no adapter of rank {adapter.rank} for {m.name}")
        pairs[m] = Pair(a[first : rows_used[m.weight]], b, adapter.scale)
    tensorfile.check_names(file, arrays, expected)
    return Adapter(step, pairs, {}, adapter.codes)


def continued(base: Weights, adapter: Adapter, config: Config, changes: Mapping[str, Any]) -> tuple[Config, Weights]:
    """(`config` with the adapter's rank, scale and modules, `base` with its A and B as `trained`), for a run that trains it on.
    UserError if `changes`, what the command line says, ask for others, or if the modules differ in rank or scale."""
    shapes = {(len(pair.a), pair.scale) for pair in adapter.pairs.values()}
    if len(shapes) > 1:
        found = f"{adapter.path} has modules of different ranks or scales"
        raise UserError(f"{found}, expected one for all: merge it by barellm export")
    rank, scale = shapes.pop()
    config = base.configured(config, changes)
    targets = ",".join(_targets(base.model, adapter))
    options = {"method": f"lora:{rank}", "alpha": float(f"{scale * rank:.12g}"), "rslora": False, "targets": targets}
    requested = {key: getattr(config.adapter, key) for key in options if f"adapter.{key}" in changes}
    # What codes the base has is the run's choice, where it made one; all else the adapter's file fixes.
    if adapter.codes and "adapter.base" not in changes:
        options["base"] = adapter.codes
    adapted = replace(config.adapter, **options)
    # What the command line asks for must be the same; "--adapt lora" names no rank, so the adapter's is meant.
    combined = replace(adapted, **{key: value for key, value in requested.items() if (key, value) != ("method", "lora")})
    same_modules = set(targeted(base.model, combined.targets)) == set(adapter.pairs)
    if combined.rank != rank or not isclose(combined.scale, scale) or not same_modules:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in requested.items()}
        typed = " ".join(f"--adapter.{key} {text}" for key, text in texts.items()).replace("--adapter.method", "--adapt")
        found = f"{adapter.path} is an adapter of rank {rank}, scale {scale:g}, on {targets}"
        expected = "say --adapt lora alone, or begin with what barellm export --merge makes of it"
        raise UserError(f"{found}, and the command line asks for another by {typed}: {expected}")
    trained: dict[str, np.ndarray] = {}
    for m in targeted(base.model, adapted.targets):
        name_a, name_b = m.factors
        pair = adapter.pairs[m]
        # Modules in one matrix share an A, in rows.
        trained[name_a] = np.concatenate([trained[name_a], pair.a]) if name_a in trained else pair.a
        trained[name_b] = pair.b
    return replace(config, adapter=adapted), replace(base, trained=trained)


def read(folder: Path, model: ModelConfig) -> Adapter:
    """Read a PEFT folder for a model. UserError for anything but LoRA with options in KNOWN, and for another model's adapter."""
    config = checkpoint.read_json(folder / CONFIG)
    for key, values in KNOWN.items():
        if (found := config.get(key, values[0])) not in values:
            raise UserError(f"{folder / CONFIG}: {key} is {shown(found)}, expected {json.dumps(values[0])}")
    file, known = folder / FILE, {m.name: m for m in modules(model)}
    if not file.is_file():
        raise UserError(f"{file} is missing (adapter_model.bin is a pickle, which is never read)")
    matrices: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensorfile.mapped(file).items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(\.default)?\.weight", name)
        if match is None or match[1] not in known:
            hint = nearest(match[1], known) if match else ""
            raise UserError(f"{file} has the tensor {name!r}, which is no adapter of a linear layer of this model{hint}")
        matrices.setdefault(match[1], {})[match[2]] = array
    if not matrices:
        raise UserError(f"{file} has no tensor, expected pairs of lora_A and lora_B")
    return Adapter(folder, {known[name]: _pair(file, config, model, known[name], both) for name, both in matrices.items()}, {})


def _pair(file: Path, config: Mapping[str, Any], model: ModelConfig, m: Module, matrices: Mapping[str, np.ndarray]) -> Pair:
    """Check the shapes of one module's A and B and return them in our row order, with their scale."""
    rank, alpha = _of_module(file, config, m, "r", 8), _of_module(file, config, m, "lora_alpha", 8)
    K = int(Weights(file, model, {}, None).tensors[m.weight].shape[1])
    for half, shape in (("A", (rank, K)), ("B", (m.rows, rank))):
        array = matrices.get(half)
        if array is None or array.shape != shape:
            found = "missing" if array is None else str(array.shape)
            raise UserError(f"{file}: lora_{half} of {m.name} is {found}, expected {shape} of this model and rank {rank}")
    order = _order(model, m)
    a, b = (np.asarray(matrices[half], np.float32) for half in "AB")
    return Pair(a, b if order is None else b[order], AdapterConfig(f"lora:{rank}", alpha, bool(config.get("use_rslora"))).scale)


def _of_module(file: Path, config: Mapping[str, Any], m: Module, key: str, usual: int) -> Any:
    """PEFT's `r` or `lora_alpha` of a module: from the first rank_pattern or alpha_pattern that its name ends with, else the
    general value (`usual`: the default if that is missing, too)."""
    found = config.get(key, usual)
    patterns = config.get("rank_pattern" if key == "r" else "alpha_pattern")
    for word, value in patterns.items() if isinstance(patterns, dict) else ():
        # A name, or a regular expression of one: only its dots are read as such, since a stranger's could take for ever.
        plain = word.strip("^$").replace("\\", "")
        if re.fullmatch(r"[\w.\\^$]+", word) and f".{m.name}".endswith(f".{plain}"):
            found = value
            break
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < 1 << 16
    if not is_number or (key == "r" and found % 1):
        raise UserError(f"{file.parent / CONFIG}: {key} of {m.name} is {shown(found)}, expected a number above 0")
    return found


def _order(model: ModelConfig, m: Module) -> np.ndarray | None:
    known = family(model)
    order = known.order(model, m.weight, f"{m.name.removeprefix(known.prefix)}.weight") if known else None
    return None if order is None else np.array(order)


def write(adapter: Adapter, out: Path, *, config: Config, base: str) -> list[str]:
    """Write an adapter as a PEFT folder, which appears only when complete; returns the names of its files. `config`: the run's;
    `base`: the path or name of the base model."""
    model, known = config.model, family(config.model)
    why = known.refused(model) if known else "it is of no architecture of Hugging Face's"
    if why or not adapter.pairs:
        raise UserError(f"{adapter.path} is no adapter for PEFT: {why or 'it has whole parameters'}")
    source = _Theirs(adapter, model)
    with storage.new_folder(out) as folder:
        tensorfile.write(folder / FILE, source, source.tensors, framework="pt")
        storage.write_file(folder / CONFIG, (json.dumps(_config(adapter, config, base), indent=2) + "\n").encode())
    return [FILE, CONFIG]


class _Theirs:
    """The rows of what is written, by PEFT's names."""

    def __init__(self, adapter: Adapter, model: ModelConfig) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        for m, pair in adapter.pairs.items():
            order = _order(model, m)
            self.arrays[f"{PREFIX}{m.name}.lora_A.weight"] = pair.a
            self.arrays[f"{PREFIX}{m.name}.lora_B.weight"] = pair.b if order is None else pair.b[np.argsort(order)]
        self.tensors = {name: Tensor(name, array.shape, "fp32", "parameter") for name, array in self.arrays.items()}

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        return self.arrays[name][lo:hi]


def _config(adapter: Adapter, config: Config, base: str) -> dict[str, Any]:
    """The content of PEFT's adapter_config.json."""
    known = family(config.model)
    assert known is not None
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": config.adapter.rank,
        "lora_alpha": config.adapter.alpha, "lora_dropout": config.adapter.dropout, "use_rslora": config.adapter.rslora,
        "target_modules": _targets(config.model, adapter), "bias": "none", "use_dora": False,
        "fan_in_fan_out": any(known.transposed(m.weight) for m in adapter.pairs), "init_lora_weights": True, "inference_mode": True,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip


def _targets(model: ModelConfig, adapter: Adapter) -> list[str]:
    """Names that match the adapter's modules and no others: the last parts of their names, if these do, else full names."""
    leaves = list(dict.fromkeys(m.leaf for m in adapter.pairs))
    unambiguous = len(adapter.pairs) == sum(m.leaf in leaves for m in modules(model))
    return leaves if unambiguous else [m.name for m in adapter.pairs]
