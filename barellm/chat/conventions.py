"""The one owner of how a model's texts begin and end: special tokens, ids that end a text, chat template, generation defaults.

It is read from the small files beside a Hugging Face model, which go with the tokenizer, byte for byte, into a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from barellm.errors import UserError, shown
from barellm.jsontext import loads

SETTINGS, GENERATION, CONFIG = "tokenizer_config.json", "generation_config.json", "config.json"
IDS = "token_ids.json"  # what config.json says of ids: a checkpoint has no config.json of Hugging Face's
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
NAMED = "additional_chat_templates"  # a folder there; here NAMED.x.jinja, since a checkpoint has no folders
FILES = (SETTINGS, "special_tokens_map.json", "added_tokens.json", GENERATION, TEMPLATE, OLD_TEMPLATE, IDS)
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
AFTER_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>")  # where no file says it


@dataclass(frozen=True)
class Conventions:
    """`begin` stands before a prompt, `end` behind an answer, and each of `ends` ends a text when a model draws it. `named` has the
    special tokens by their purpose, such as eos_token; `templates` the chat templates, of which "default" is the usual one;
    `sampling` what generation_config.json says of `Sampling`; `ids` what config.json says of ids."""

    begin: int | None
    end: int | None
    ends: frozenset[int]
    pad: int | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=dict)


def collect(folder: Path) -> dict[str, bytes]:
    """{name: content} of a folder's files that define special tokens, chat templates and generation defaults."""
    found = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    found |= {f"{NAMED}.{path.name}": path.read_bytes() for path in sorted((folder / NAMED).glob("*.jinja"))}
    found |= {path.name: path.read_bytes() for path in sorted(folder.glob(f"{NAMED}.*.jinja"))}
    if IDS not in found and (folder / CONFIG).is_file():
        ids = {key: value for key, value in _object(folder / CONFIG).items() if key in ID_KEYS}
        if ids:
            import json

            found[IDS] = json.dumps(ids).encode()
    return found


def _object(where: Path | str, content: bytes | None = None) -> dict[str, Any]:
    try:
        found = loads(Path(where).read_bytes() if content is None else content)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} is {shown(found)}, expected an object")
    return found


def read(files: Mapping[str, bytes], token_ids: Mapping[str, int], *, eot: int | None, leading: int | None = None) -> Conventions:
    """Parse the files of `collect` (name -> content). `token_ids`: name -> id of the tokenizer's tokens; `eot`: the token before
    documents, None without one; `leading`: the id that the tokenizer itself puts before texts, None for none. Tokens that the
    tokenizer's files name come before ids in generation_config.json, and these before config.json's. UserError: a damaged file."""
    found = {name: _object(name, files[name]) for name in files if name.endswith(".json")}
    settings = found.get(SETTINGS, {})
    generation = found.get(GENERATION, {})
    config = found.get(IDS, {})
    named = _named({**found.get("special_tokens_map.json", {}), **settings})  # tokenizer_config.json is the newer file: it wins

    def ids_of(purpose: str) -> list[int]:
        """Ids of "bos", "eos" or "pad": of the token that the tokenizer names, then the generation settings', then the model's."""
        token = named.get(f"{purpose}_token", "")
        own = [token_ids[token]] if token in token_ids else []
        key = f"{purpose}_token_id"
        return [*own, *_ids(GENERATION, key, generation), *_ids(CONFIG, key, config)]

    ids = {purpose: ids_of(purpose) for purpose in ("bos", "eos", "pad")}
    # A text ends at any of these; the first is the one that is written.
    documents = [] if eot is None else [eot]
    ends = ids["eos"] or [token_ids[name] for name in AFTER_TEXT if name in token_ids] or documents
    # Before a prompt: as add_bos_token says; where it says nothing, what the tokenizer puts there by itself. A tokenizer with
    # settings that has neither begins with nothing; only one without any settings, such as GPT-2's own, begins as documents do.
    add_bos = settings.get("add_bos_token")
    if isinstance(add_bos, bool):
        begin = token_ids.get(named.get("bos_token", "")) if add_bos else None
    else:
        begin = leading if leading is not None or settings else eot
    return Conventions(
        begin=begin, end=next(iter(ends), None), ends=frozenset(ends + documents), pad=next(iter(ids["pad"]), None), named=named,
        templates=_templates(files, settings, found.get(OLD_TEMPLATE, {})), sampling=_sampling(generation), ids=config,
    )  # fmt: skip


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """{purpose: token}, each as a name or as an object with one."""
    found = {}
    for key, value in settings.items():
        name = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(name, str):
            found[key] = name
    return found


def _ids(where: str, key: str, found: Mapping[str, Any]) -> list[int]:
    value = found.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise UserError(f"{where}: {key} is {shown(value)}, expected an id or a list of ids")
    return [i for i in ids if i >= 0]  # some files say -1 for none


def _templates(files: Mapping[str, bytes], settings: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. A template's own file (TEMPLATE, or NAMED.NAME.jinja) comes before one of its name in
    tokenizer_config.json (`settings`) or in the older `old`. Without a "default" the first one is it."""
    texts = {}
    for file in files:
        if file == TEMPLATE or file.startswith(f"{NAMED}."):
            try:
                texts["default" if file == TEMPLATE else file.split(".", 1)[1].removesuffix(".jinja")] = files[file].decode()
            except UnicodeDecodeError:
                raise UserError(f"{file} is not UTF-8") from None
    found = settings.get("chat_template") or old.get("chat_template") or {}
    several = found if isinstance(found, list) else [{"name": "default", "template": found}]
    pairs = [(one.get("name"), one.get("template")) for one in several if isinstance(one, dict)]
    texts = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)} | texts
    return {"default": next(iter(texts.values())), **texts} if texts else {}


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of sampling; `do_sample` false is a temperature of 0."""
    found = {key: generation[key] for key in SAMPLING if generation.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{GENERATION}: {key} is {shown(value)}, expected a number")
    return found | ({"temperature": 0} if generation.get("do_sample") is False else {})
