"""Configurations as flat keys, "model.layers" -> 6, and as files. Strict: unknown keys and wrong types are refused by name.

Which keys [model] has depends on the architecture, which the class of a configuration's `model` says."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any

from barellm import models
from barellm.config import UNREAD, AdapterConfig, Config, DataConfig, OptimConfig, TrainConfig, adapter, aliases
from barellm.config.fields import Entry, Section, converted, entries, not_of
from barellm.errors import UserError, nearest, shown

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
SECTIONS = ("model", "optim", "data", "train", "adapter")
MOST_DOTS = 200  # in a line of TOML: a key of n parts costs the library n^2


SHORT_NAMES = {
    "model.layers": "layers", "model.heads": "heads", "model.d_model": "d_model", "data.source": "data",
    "data.tokenizer": "tokenizer", "train.steps": "steps", "train.epochs": "epochs", "train.micro_batch_size": "batch",
    "train.gradient_accumulation_steps": "gradient_accumulation_steps", "train.seq": "seq", "train.seed": "seed",
    "train.minutes": "minutes", "train.overfit": "overfit", "train.init_from": "init_from", "train.dtype": "dtype",
    "train.recompute": "recompute", "train.gemm_backend": "gemm_backend", "train.eval_every": "eval_every",
    "train.sample_every": "sample_every", "train.checkpoint_every": "checkpoint_every", "optim.name": "optimizer", "optim.lr": "lr",
    "optim.schedule": "schedule", "optim.warmup": "warmup", "optim.weight_decay": "weight_decay", "adapter.method": "adapt",
    "adapter.train_only": "train_only",
}  # fmt: skip


def named(changes: Mapping[str, object]) -> dict[str, object]:
    """{key: value} of Python keyword arguments: short names, `steps=100`, and sections, `model={"layers": 2}`."""
    short = {short: key for key, short in SHORT_NAMES.items()}
    key_of = aliases.KEYS | {"matmul": "train.gemm_backend"} | short
    found: dict[str, object] = {}
    for name, value in changes.items():
        if name in SECTIONS and isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name in key_of:
            found[key_of[name]] = value
        elif name in SECTIONS:
            raise UserError(f"{name} is {shown(value)}, expected keys and their values as in {name}={{...}}")
        else:
            hint = nearest(name, [*short, *SECTIONS])
            if instead := aliases.instead(name):
                hint = f": barellm has {instead}"
            raise UserError(f"unknown argument {name!r}{hint} (known: {', '.join([*short, *SECTIONS])})")
    return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


def every_key() -> dict[str, dict[str, Entry]]:
    """The keys of all architectures together: key -> {name of the architecture, or "" for other sections: entry}."""
    found: dict[str, dict[str, Entry]] = {}
    classes: list[tuple[str, type[Section]]] = [(name, models.module(name).Config) for name in models.names()]
    for owner, section in (*classes, ("", OptimConfig), ("", DataConfig), ("", TrainConfig), ("", AdapterConfig)):
        for name, entry in entries(section).items():
            found.setdefault(f"{section.section}.{name}", {})[owner] = entry
    return found


def known_keys(config: Config) -> dict[str, Entry]:
    """Every key of this configuration, in the order of its sections."""
    return {f"{section}.{name}": entry for section in SECTIONS for name, entry in entries(type(getattr(config, section))).items()}


def _convert(key: str, value: Any, kind: type) -> Any:
    """Convert a value to the type of its key; strings are parsed unless a string is expected."""
    if isinstance(value, str):
        value = aliases.VALUES.get(key, {}).get(value, value)
    if not isinstance(value, str) or kind is str:
        return converted(key, value, kind)
    try:
        if kind is int and (number := float(value)).is_integer() and abs(number) < 1 << 53:
            value = str(int(number)) if set(value) & set(".eE") else value  # 1e4
        return converted(key, BOOLS[value.lower()] if kind is bool else kind(value), kind)
    except (ValueError, KeyError, OverflowError):
        raise not_of(key, value, kind) from None


def _hint(key: str, known: Mapping[str, Entry]) -> str:
    name = key.rpartition(".")[2]
    if instead := aliases.instead(name):
        return f": barellm has {instead}"
    meant = aliases.KEYS.get(name, key)
    return f", did you mean {meant!r}?" if meant != key and meant in known else nearest(key, known)


def checked(changes: Mapping[str, object], config: Config) -> dict[str, Any]:
    """The changes with values converted to the keys' types, old key names replaced. UserError for unknown keys and wrong types."""
    known, found = known_keys(config), {}
    for alias, value in changes.items():
        key = alias if alias in known else aliases.RENAMED.get(alias, alias)
        if key in found:
            raise UserError(f"{alias} is another name of {key}, which is given too: expected one of them")
        found[key] = value
        if key not in known:
            hint = _hint(key, known)
            if owners := every_key().get(key):
                have = models.name_of(config.model)
                raise UserError(f"{have} has no key {key!r}, which is one of {' and '.join(owners)}{hint}")
            raise UserError(f"unknown key {key!r}{hint}")
    return {key: _convert(key, value, known[key].kind) for key, value in found.items()}


LIMITS = ("train.steps", "train.epochs", "train.minutes")  # where a run ends: who gives one does not mean another
LR, MUON_LR, MUON_LR_RATIO = "optim.lr", "optim.muon_lr", "optim.muon_lr_ratio"


def _with_muon_lr(changes: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `muon_lr_ratio` in the changes by `muon_lr`. If only `lr` changes, the ratio to it is kept."""
    before, lr = base[LR], changes.get(LR, base[LR])
    ratio = changes.pop(MUON_LR_RATIO, None)
    if ratio is not None and (problem := entries(OptimConfig)["muon_lr_ratio"].check(MUON_LR_RATIO, ratio, None)):
        raise UserError(problem)
    if MUON_LR in changes:
        if ratio is not None and lr and not isclose(ratio * lr, changes[MUON_LR], rel_tol=1e-3):
            found = f"{MUON_LR} is {changes[MUON_LR]:g} and {MUON_LR_RATIO} {ratio:g}"
            raise UserError(f"{found}, which is {ratio * lr:g} with optim.lr {lr:g}: expected one of them")
        return changes
    if ratio is None and lr != before:
        if not before and OptimConfig(name=changes.get("optim.name", base["optim.name"])).has_muon:
            raise UserError(f"{LR} was 0, of which {MUON_LR} {base[MUON_LR]:g} is no multiple: expected {MUON_LR} too")
        ratio = base[MUON_LR] / before if before else None
    # Without the last digits, which are rounding: 0.015 is shown, and not 0.015000000000000001.
    return changes if ratio is None else changes | {MUON_LR: float(f"{ratio * lr:.12g}")}


def changed(config: Config, *layers: Mapping[str, object]) -> Config:
    """The configuration after applying `layers` of changes in order. Implied changes: another vocabulary size resets its padding; a
    new limit (steps, epochs, minutes) replaces the old ones; Muon's rate follows `optim.lr`; adapters have their own defaults."""
    before, changes = flat(config), {}
    if not before["adapter.method"] and any(layer.get("adapter.method") for layer in layers):
        layers = (adapter.DEFAULTS, *layers)
    for layer in layers:
        new = _with_muon_lr(checked(layer, config), before | changes)
        if any(new.get(key) for key in LIMITS) or LIMITS[0] in new:
            new = dict.fromkeys(LIMITS, 0) | new
        changes |= new
    if "model.vocab_size" in changes and changes["model.vocab_size"] != config.model.vocab_size:
        changes.setdefault("model.padded_vocab", 0)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in sections.items()})


def unread(config: Config, keys: Iterable[str]) -> str:
    """A line about the keys, of those that a user gave, which this optimizer never reads; "" if there are none. It is no error: a
    loop over optimizers gives all of them one command."""
    name = config.optim.name
    found = ", ".join(key for key in keys if key.removeprefix("optim.") in UNREAD[name])
    return f"with optim.name {name} there is no effect of {found}" if found else ""


def flat(config: Config) -> dict[str, Any]:
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in known_keys(config)}


def to_json(config: Config) -> dict[str, Any]:
    return {"preset": config.preset, "architecture": models.name_of(config.model)} | asdict(config)


def from_json(tree: Any, origin: object = "the saved configuration") -> Config:
    """The inverse of `to_json`; a key that this version does not know is refused. `origin`: where it is from, for messages."""
    return of_file(_parsed(tree, str(origin)))


@dataclass(frozen=True)
class File:
    """The content of a file: `preset` and `architecture` as texts or None, and `keys` with their values as they stand there."""

    origin: str
    preset: str | None = None
    architecture: str | None = None
    keys: Mapping[str, object] = field(default_factory=dict)

    def changes(self, config: Config) -> dict[str, Any]:
        """The keys of the file, checked as changes of `config`."""
        have = models.name_of(config.model)
        if self.architecture not in (None, have):
            raise UserError(f"{self.origin}: architecture is {self.architecture!r}, the preset {config.preset!r} is {have}")
        try:
            return checked(self.keys, config)
        except UserError as error:
            raise UserError(f"{self.origin}: {error}") from None


def of_file(file: File) -> Config:
    """The configuration that a file alone says, whatever its preset is today: it was saved whole."""
    try:
        config = Config(preset=file.preset or "default", model=models.module(file.architecture or models.BEFORE_NAMES).Config())
        return changed(config, {"data.document_mask": "off", **file.keys})  # before there was that key there was no mask
    except UserError as error:
        raise UserError(f"{file.origin}: {error}") from None


def read_file(path: Path) -> File:
    """Read a TOML file, or a run's config.json (by the suffix .json). UserError for what is not valid, or has unknown sections."""
    import tomllib

    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if kind == "TOML" and (dots := max(line.count(".") for line in text.split("\n"))) > MOST_DOTS:
            raise ValueError(f"a line has {dots} dots, expected at most {MOST_DOTS}")
        tree = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of either kind, and of bytes that are no text
        raise UserError(f"{path} is not valid {kind}: {error}") from None
    return _parsed(tree, str(path))


def _parsed(tree: Any, origin: str) -> File:
    """Flatten a parsed file to keys "section.key", and check its sections. `origin`: its path, with which every UserError begins;
    values are checked later, when the architecture is known."""
    if not isinstance(tree, Mapping):
        raise UserError(f"{origin} holds {type(tree).__name__}, expected the configuration of a run")
    names: dict[str, Any] = {}
    flattened: dict[str, object] = {}
    for section, values in tree.items():
        if section in ("preset", "architecture") or (section == "device" and not origin.endswith(".toml")):
            if not isinstance(values, str):
                raise UserError(f"{origin}: {section} is {shown(values)}, expected a text")
            names[section] = values
        elif section not in SECTIONS:
            hint = nearest(section, [*SECTIONS, "preset", "architecture", *every_key()])
            raise UserError(f"{origin}: unknown key {section!r}{hint}")
        elif not isinstance(values, Mapping):
            raise UserError(f"{origin}: {section} is {shown(values)}, expected a table of keys")
        else:
            flattened |= {f"{section}.{key}": value for key, value in values.items()}
    names.pop("device", None)  # where a run was, for who reads the file
    return File(origin, **names, keys=flattened)
