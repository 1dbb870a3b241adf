"""Configuration values as flat keys: "model.layers" -> 6. Strict: unknown keys and wrong types are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from barellm.config import Config
from barellm.errors import UserError

EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint `, did you mean 'x'?` where something known is close, else "". Of `gpt2` it is the first that begins so, of
    `layers` it is `model.layers`."""
    from difflib import get_close_matches

    known = list(known)
    word = name.lstrip("-")
    found = [k for k in known if word and k.startswith(name)][:1] or get_close_matches(name, known, n=1)
    found = found or [k for k in known if word and k.rpartition(".")[2] == word][:1]
    if not found:
        tails = {k.rpartition(".")[2]: k for k in known}
        found = [tails[tail] for tail in get_close_matches(word.rpartition(".")[2], tails, n=1)]
    return f", did you mean {found[0]!r}?" if found else ""


@cache
def known_keys() -> dict[str, type]:
    """Every configuration key with its type, in the order of the dataclasses."""
    hints = {name: kind for name, kind in get_type_hints(Config).items() if name != "preset"}
    return {
        f"{section}.{f.name}": get_type_hints(kind)[f.name] for section, kind in hints.items() for f in fields(kind)
    }


def _convert(key: str, value: Any, kind: type) -> Any:
    problem = UserError(f"{key} is {value!r}, expected {EXPECTED[kind]}")
    if isinstance(value, str) and kind is not str:
        try:
            return BOOLS[value.lower()] if kind is bool else _finite(kind(value), problem)
        except (ValueError, KeyError):
            raise problem from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise problem
    return _finite(value, problem) if isinstance(value, float) else value


def _finite(value: float, problem: UserError) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise problem
    return value


def checked(changes: Mapping[str, object]) -> dict[str, Any]:
    """The same changes with values of the right type; texts are parsed. UserError for an unknown key or type."""
    known = known_keys()
    for key in changes:
        if key not in known:
            raise UserError(f"unknown key {key!r}{nearest(key, known)}")
    return {key: _convert(key, value, known[key]) for key, value in changes.items()}


def changed(config: Config, changes: Mapping[str, object]) -> Config:
    """`config` with keys replaced. Another vocabulary size brings its own padding unless that is given too; and who says when a
    run ends, by steps or by minutes, does not mean the other limit of the preset."""
    changes = checked(changes)
    if "train.steps" in changes:
        changes.setdefault("train.minutes", 0.0)
    elif changes.get("train.minutes", 0) > 0:
        changes["train.steps"] = 0
    if "model.vocab_size" in changes and changes["model.vocab_size"] != config.model.vocab_size:
        changes.setdefault("model.padded_vocab", 0)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in sections.items()})


def flat(config: Config) -> dict[str, Any]:
    """{key: value} of every key."""
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in known_keys()}


def to_json(config: Config) -> dict[str, Any]:
    return asdict(config)


def from_json(tree: Mapping[str, Any]) -> Config:
    """The inverse of `to_json`; a key that this version does not know is refused."""
    name, changes = _flatten(tree, "the saved configuration")
    return changed(replace(Config(), preset=name or "default"), changes)


def read_file(path: Path) -> tuple[str | None, dict[str, object]]:
    """(preset or None, {key: value}) of a TOML file, or of a run's config.json."""
    import json
    import tomllib

    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_bytes().decode()
        tree = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except ValueError as error:  # of either kind, and of bytes that are no text
        raise UserError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds {type(tree).__name__}, expected the configuration of a run")
    return _flatten(tree, str(path))


def _flatten(tree: Mapping[str, Any], origin: str) -> tuple[str | None, dict[str, object]]:
    name = tree.get("preset")
    if name is not None and not isinstance(name, str):
        raise UserError(f"{origin}: preset is {name!r}, expected a text")
    sections = {key.partition(".")[0] for key in known_keys()}
    flattened: dict[str, object] = {}
    for section, values in tree.items():
        if section == "preset":
            continue
        if section not in sections:
            hint = nearest(section, [*sections, "preset", *known_keys()])
            raise UserError(f"{origin}: unknown key {section!r}{hint}")
        if not isinstance(values, Mapping):
            raise UserError(f"{origin}: {section} is {values!r}, expected a table of keys")
        flattened |= {f"{section}.{key}": value for key, value in values.items()}
    try:
        return name, dict(checked(flattened))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
