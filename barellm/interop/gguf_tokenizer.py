"""The tokenizer and the chat template in a file of llama.cpp's, as the files tokenizer.json and tokenizer_config.json that the
library `tokenizers` and transformers would have of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from barellm.chat import conventions
from barellm.data.kinds import fitting
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError
from barellm.interop import vocabulary
from barellm.interop.gguf import ADDED, BYTE, CONTROL, LLAMA_3_WORDS, QWEN_2_WORDS, UNKNOWN

SPACE = "\u2581"
RULES = {  # tokenizer.ggml.pre -> how it cuts words
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), LLAMA_3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN_2_WORDS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "granite-docling"), ""),
}


def read(path: Path, values: Mapping[str, Any], rows: int) -> Tokenizer | None:
    """The tokenizer of a GGUF file with these `values` (its keys) for a model of `rows` embedding rows; None if it has none.
    UserError for an unknown kind or pre-tokenizer rule: another rule would silently give other ids."""
    kind, names = values.get("tokenizer.ggml.model", "no_vocab"), values.get("tokenizer.ggml.tokens")
    if kind in ("no_vocab", "none") or not names:
        return None
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{path}: tokenizer.ggml.model is {kind!r}, expected 'gpt2' or 'llama': name one with --tokenizer")
    try:
        kinds = [int(n) for n in values.get("tokenizer.ggml.token_type", [1] * len(names))]
        content = _of_bytes(path, values, names) if kind == "gpt2" else _of_pieces(values, names, kinds)
        special = [i for i, k in enumerate(kinds) if k in (CONTROL, ADDED) or (k == UNKNOWN and kind == "llama")]
        content["added_tokens"] = [_added(i, names[i], kinds[i]) for i in special]
        ids = {p: values.get(f"tokenizer.ggml.{p}_token_id") for p in ("bos", "eos", "padding", "unknown", "eot", "eom")}
        begin = values.get("tokenizer.ggml.add_bos_token", kind == "llama") and ids["bos"] is not None
        if begin:
            name = names[ids["bos"]]
            one = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
            content["post_processor"] = {
                "type": "TemplateProcessing", "single": one, "pair": [*one, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {name: {"id": name, "ids": [ids["bos"]], "tokens": [name]}},
            }  # fmt: skip
        settings: dict[str, Any] = {"add_bos_token": bool(begin)}
        purposes = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
        settings |= {key: names[ids[p]] for p, key in purposes.items() if ids[p] is not None}
        named = {key.rpartition(".")[2]: value for key, value in values.items() if key.startswith("tokenizer.chat_template.")}
        if default_template := values.get("tokenizer.chat_template"):
            named = {"default": default_template} | named
        if named:
            settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        ends = [ids[p] for p in ("eos", "eot", "eom") if ids[p] is not None]
        files = {conventions.SETTINGS: settings, conventions.GENERATION: {"eos_token_id": ends}}
        json_files = {name: json.dumps(one).encode() for name, one in files.items()}
        tokenizer = vocabulary.of_one_file(path, json.dumps(content, ensure_ascii=False).encode(), json_files)
        assert len(set(names)) == len(names) == len(kinds), "a token stands twice, or has no type"
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        raise UserError(f"{path}: its tokenizer is damaged ({type(error).__name__}: {error}): name one with --tokenizer") from None
    return fitting(tokenizer.with_files(json_files), rows, path)


def _added(i: int, name: str, kind: int) -> dict[str, Any]:
    rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": name, "special": kind != ADDED, **rest}


def _of_bytes(path: Path, values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE, whose tokens GGUF stores in GPT-2's printable alphabet. Special tokens are in its
    vocabulary, too: the library counts the ids of others from its end on, and SmolLM2's are the first ones."""
    rule = RULES.get(values.get("tokenizer.ggml.pre", "default"))
    if rule is None:
        found = values.get("tokenizer.ggml.pre", "default")
        raise UserError(f"{path}: tokenizer.ggml.pre is {found!r}, expected {' or '.join(RULES)}: name one with --tokenizer")
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": rule in ("", "digits")}
    split = {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
    split = {"type": "Digits", "individual_digits": True} if rule == "digits" else split
    merges = [pair.split(" ") for pair in values["tokenizer.ggml.merges"]]
    return _content(
        {"vocab": {name: i for i, name in enumerate(names)}, "merges": merges, "ignore_merges": rule == LLAMA_3_WORDS},
        normalizer={"type": "NFC"} if rule == QWEN_2_WORDS else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, in_bytes]} if rule else in_bytes, decoder=in_bytes,
    )  # fmt: skip


def _of_pieces(values: Mapping[str, Any], names: list[str], kinds: list[int]) -> dict[str, Any]:
    """tokenizer.json of a SentencePiece BPE with byte fallback. If the file has no merges, they are derived from the scores: of all
    ways to make a piece of two, the highest score first."""
    ids = {name: i for i, name in enumerate(names)}
    merges = values.get("tokenizer.ggml.merges")
    if merges is None:
        pairs = pairs_by_score(ids, dict(enumerate(values["tokenizer.ggml.scores"].tolist())))
    else:
        pairs = [pair.split(" ") for pair in merges]
    prefix = values.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [{"type": "Prepend", "prepend": SPACE}] * bool(prefix)
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * bool(prefix)
    unknown = next((names[i] for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return _content(
        {"vocab": ids, "merges": pairs, "byte_fallback": BYTE in kinds, "unk_token": unknown, "fuse_unk": True},
        normalizer={"type": "Sequence", "normalizers": [*spaces, marked]}, pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )  # fmt: skip


def pairs_by_score(ids: Mapping[str, int], scores: Mapping[int, float]) -> list[list[str]]:
    """All ways to make a piece of two, the highest score of the piece first, as llama.cpp and SentencePiece merge."""
    candidates = [
        (scores[i], len(name[:cut]), len(name[cut:]), [name[:cut], name[cut:]])
        for name, i in ids.items() for cut in range(1, len(name)) if name[:cut] in ids and name[cut:] in ids
    ]  # fmt: skip
    return [pair for *_, pair in sorted(candidates, key=lambda one: one[:3], reverse=True)]


def _content(model: Mapping[str, Any], **steps: Any) -> dict[str, Any]:
    usual = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **steps, "model": {**usual, **model}}
