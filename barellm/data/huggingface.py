"""A tokenizer.json as the library `tokenizers` writes it, for byte-level BPEs of any size: Llama-3's has 128,256 ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from barellm.data.bpe import printable_bytes
from barellm.data.cache import new_file
from barellm.data.tokenizers import FILE, Tokenizer, utf8
from barellm.data.unpacking import MARK
from barellm.errors import UserError
from barellm.jsontext import loads

# Special tokens by what they are used for, best known first.
BEFORE_TEXT = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<|end_of_text|>", "</s>")
AFTER_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>")


class HuggingFace(Tokenizer):
    """The library encodes; the file is kept byte for byte, so that transformers and llm.c see the same ids.

    Special tokens stand for no text, and a text that spells one is text. UserError, in which `path` names the file, for a
    tokenizer that is no BPE of bytes or that changes the text before it cuts it: its tokens would not give the text back.
    """

    name = "huggingface"

    def __init__(self, content: bytes, *, path: Path) -> None:
        self.content, self.path = content.removeprefix(MARK), path
        found = loads(self.content)
        check(found, path)
        self.special = {token["content"]: token["id"] for token in found["added_tokens"] if token.get("special")}
        self.tokens = _tokens(found, self.special.values(), path, most=len(content))
        self.eot = _before_text(found, self.special)

    @property
    def ends(self) -> frozenset[int]:
        return super().ends | {self.special[name] for name in AFTER_TEXT if name in self.special}

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def encoder(self) -> Any:
        """The library's tokenizer, which takes a second to load for 128,000 ids."""
        from tokenizers import Tokenizer as Encoder

        try:
            encoder = Encoder.from_buffer(self.content)
        except Exception as error:  # the library has no class of its own for what it refuses
            raise UserError(f"{self.path} is refused by the library tokenizers: {error}") from error
        encoder.encode_special_tokens = True  # what looks like a special token in a text is text
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            utf8(text)
        found = self.encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

    def save(self, folder: Path) -> None:
        with new_file(folder / FILE) as file:
            file.write(self.content)


def check(found: dict[str, Any], path: Path) -> None:
    """Raise a UserError unless the tokens of a text, joined, are its bytes."""
    model, normalizer = found["model"], found.get("normalizer")
    kinds = steps(found["pre_tokenizer"], "pretokenizers")
    wrong = {
        f"its model is of type {model['type']!r}": model["type"] != "BPE",
        "it drops merges at random": bool(model.get("dropout")),
        "it has bytes as <0x..>": bool(model.get("byte_fallback")),
        "it marks parts of words": bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")),
        "it normalizes the text": normalizer is not None and steps(normalizer, "normalizers") != [],
        "its words are not cut in bytes": [part["type"] for part in kinds].count("ByteLevel") != 1,
        "it puts a space before the text": any(part.get("add_prefix_space") for part in kinds),
        "it drops what it cuts at": any(part.get("behavior") == "Removed" for part in kinds),
        "an added token swallows white space": any(t.get("lstrip") or t.get("rstrip") for t in found["added_tokens"]),
        "it lacks some of the 256 bytes": not model["vocab"].keys() >= printable_bytes().keys(),
    }
    if reasons := [reason for reason, holds in wrong.items() if holds]:
        raise UserError(f"{path} is not a BPE of bytes as barellm reads it: {reasons[0]}")


def steps(step: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The steps of which one consists that may be a sequence of several, whose own name for them is `inside`."""
    if step is None:
        return []
    return [p for one in step[inside] for p in steps(one, inside)] if step["type"] == "Sequence" else [step]


def _tokens(found: dict[str, Any], special: Any, path: Path, *, most: int) -> list[bytes]:
    """The bytes of each id: none for special ones and for ids that nobody has. UserError for an id that is no number from 0 on, or
    not below `most`, the bytes of the file: a small file must not ask for a large table."""
    for name, i in [*found["model"]["vocab"].items(), *((t["content"], t["id"]) for t in found["added_tokens"])]:
        if type(i) is not int or not 0 <= i < most:
            raise UserError(
                f"{path}: the token {name!r} has the id {i!r}, expected a whole number from 0 to {most - 1}"
            )
    byte_of = printable_bytes()
    added = {token["id"]: token["content"].encode() for token in found["added_tokens"]}
    known = {i: bytes(byte_of[c] for c in name) for name, i in found["model"]["vocab"].items() if i not in added}
    known |= added | dict.fromkeys(special, b"")
    return [known.get(i, b"") for i in range(max(known) + 1)]


def _before_text(found: dict[str, Any], special: dict[str, int]) -> int | None:
    """The special token that the tokenizer itself puts before a text, else the first that is known to stand there."""
    for step in steps(found.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing":
            first = step["single"][0].get("SpecialToken", {}).get("id")
            if first in special:
                return special[first]
    return next((special[name] for name in BEFORE_TEXT if name in special), None)
