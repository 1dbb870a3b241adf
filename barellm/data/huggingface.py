"""A tokenizer.json as the library `tokenizers` writes it, of any kind that the library runs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from barellm.chat import conventions, templates
from barellm.data import bpe, cache, unpacking
from barellm.data.tokenizers import FILE, Tokenizer, utf8
from barellm.errors import UserError
from barellm.jsontext import loads

# Special tokens that stand before texts, best known first.
BEFORE_TEXT = ("<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>", "<|end_of_text|>", "</s>")
ANCHORS = "\n\0\u2603"  # behind one a text is encoded that goes on from another, so that no space is put before it


class HuggingFace(Tokenizer):
    """The library encodes; the file is kept byte for byte, so that transformers and llm.c see the same ids.

    Special tokens stand for no text, and a text that spells one is text. UserError, in which `path` names the file, for one whose
    ids have no room in it, or that the library refuses."""

    name = "huggingface"

    def __init__(self, content: bytes, *, path: Path) -> None:
        """Parse `content` (tokenizer.json) and derive from its normalizer, pre-tokenizer and decoder whether it changes texts
        (`changes`), prepends spaces (`prefixed`) and strips them (`strips`). `path` is for error messages."""
        self.content, self.path = content.removeprefix(unpacking.MARK), path
        found = loads(self.content)
        self._added = {token["content"]: token["id"] for token in found["added_tokens"]}
        self._special = {token["content"]: token["id"] for token in found["added_tokens"] if token.get("special")}
        vocab = found["model"]["vocab"]  # which Unigram has as a list
        model_ids = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab.items())
        _check_ids(path, [*model_ids.items(), *self._added.items()], most=len(content))
        self.base_size = max(model_ids.values(), default=-1) + 1  # ids beyond it are of added tokens
        self.name_of = {i: name for name, i in (model_ids | self._added).items()}
        self._count = max(self.name_of, default=-1) + 1
        self.unused = sorted(set(range(self._count)) - self.name_of.keys())
        self.changes = changes(found)
        self.exact = not self.changes
        self.prefixed = _spaces(steps(found.get("normalizer"), "normalizers") + steps(found["pre_tokenizer"], "pretokenizers"))
        self.strips = _spaces([step for step in steps(found.get("decoder"), "decoders") if step["type"] != "ByteLevel"])
        self.byte_fallback = "ByteFallback" in {step["type"] for step in steps(found.get("decoder"), "decoders")}
        self._leading = _leading(found, self._special)
        bos = next((self._special[name] for name in BEFORE_TEXT if name in self._special), None)
        self.eot = bos if self._leading is None else self._leading
        self._encoders: dict[str, Any] = {}

    @property
    def vocab_size(self) -> int:
        return self._count

    @property
    def special(self) -> Mapping[str, int]:
        return self._special

    @property
    def added(self) -> Mapping[str, int]:
        return self._added

    @cached_property
    def conventions(self) -> conventions.Conventions:
        named = {name: i for i, name in self.name_of.items()}
        return conventions.read(self.files, named, eot=self.eot, leading=self._leading)

    @cached_property
    def tokens(self) -> Sequence[bytes]:
        """The bytes of each id, decoded between two letters (spaces depend on neighbours): empty for special and unused ones."""
        decoder = self._encoder("text").decoder
        byte_of = bpe.printable_bytes()
        special = set(self._special.values())
        plain = decoder is not None and type(decoder).__name__ == "ByteLevel"
        added = set(self._added.values()) if plain else set()  # other decoders make text of them too: Gemma 3's U+2581 are spaces
        found = [b""] * self._count
        tail = _joined(decoder, ["a", "b"])[1:]
        for i, name in self.name_of.items():
            if i in special or i in added:
                found[i] = b"" if i in special else name.encode()
            elif plain and all(c in byte_of for c in name):
                found[i] = bytes(byte_of[c] for c in name)
            elif self.byte_fallback and len(name) == 6 and name.startswith("<0x"):
                found[i] = bytes.fromhex(name[3:5])
            else:  # what the decoder makes of it between two others: without the "a" before it, and without what "b" alone adds
                found[i] = _joined(decoder, ["a", name, "b"])[1:].removesuffix(tail).encode()
        return found

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def _encoder(self, kind: str) -> Any:
        """The library's tokenizer, cached (it takes a second to load for 128,000 ids). `kind` "text": names of special tokens in a
        text are text; "special": they are tokens; "letters": names of all other added tokens are text, too."""
        if kind in self._encoders:
            return self._encoders[kind]
        from tokenizers import Tokenizer as Encoder

        content = self.content
        if kind == "letters":
            content = json.dumps(loads(content) | {"added_tokens": [], "post_processor": None}).encode()
        try:
            encoder = Encoder.from_buffer(content)
        except Exception as error:  # the library has no class of its own for what it refuses
            raise UserError(f"{self.path} is refused by the library tokenizers: {error}") from error
        if getattr(encoder.model, "dropout", None):
            encoder.model.dropout = None  # merges dropped at random: the same text would have other ids each time
        encoder.encode_special_tokens = kind != "special"
        encoder.no_truncation()
        encoder.no_padding()
        return self._encoders.setdefault(kind, encoder)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        return self._encode([text], "special" if special else "text")[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._encode(texts, "text")

    def encode_continued(self, text: str, kind: str = "text") -> np.ndarray:
        if not self.prefixed:
            return self._encode([text], kind)[0]
        for anchor in ANCHORS:  # the first whose own ids the text does not change
            first, both = self._encode([anchor, anchor + text], kind)
            if both[: len(first)].tolist() == first.tolist():
                return both[len(first) :]
        return self._encode([text], kind)[0]

    def _encode(self, texts: Sequence[str], kind: str) -> list[np.ndarray]:
        """Encode texts with the encoder of that kind (see `_encoder`). UserError for an id beyond the model's embedding rows."""
        for text in texts:
            utf8(text)
        found = self._encoder(kind).encode_batch_fast(texts, add_special_tokens=False)
        arrays = [np.array(one.ids, np.int32) for one in found]
        for ids in arrays if self.rows is not None and self._count > self.rows else ():
            if len(ids) and (i := int(ids.max())) >= self.rows:  # pyright: ignore[reportOperatorIssue]
                name = self.name_of.get(i)
                raise UserError(f"the text has the token {name!r}, id {i}, and the model has {self.rows} rows: it has none for it")
        return arrays

    def encode_piece(self, piece: templates.Piece, *, first: bool, before: str = "") -> np.ndarray:
        """Encode one piece (text, letters) of a rendered chat: `letters` pieces are user content, in which special tokens' names
        are text. `before` is the preceding text: its special token stands in front, for the library's spaces."""
        text, letters = piece
        kind = "letters" if letters else "special"
        if not first and not letters and self.prefixed:  # behind a special token some put a space before a text, others do not
            bare = before.rstrip()
            name = max((name for name in self._special if bare.endswith(name)), key=len, default="")
            anchor = name and before[len(bare) - len(name) :]
            ids, both = self._encode([anchor, anchor + text], kind)
            if anchor and both[: len(ids)].tolist() == ids.tolist():
                return both[len(ids) :]
        ids = self._encode([text], kind)[0] if first else self.encode_continued(text, kind)
        if letters and self._special.get(text, -1) in ids:
            raise UserError(f"a message has {text!r}, which this tokenizer cannot write as letters: it is a token in any text")
        return ids

    def save(self, folder: Path) -> None:
        with cache.new_file(folder / FILE) as file:
            file.write(self.content)
        self._write_files(folder)


def _joined(decoder: Any, names: list[str]) -> str:
    return " ".join(names) if decoder is None else decoder.decode(names)


def _check_ids(path: Path, found: list[tuple[str, Any]], *, most: int) -> None:
    """UserError for an id outside [0, `most`), the bytes of the file: a small file must not ask for a large table."""
    for name, i in found:
        if type(i) is not int or not 0 <= i < most:
            raise UserError(f"{path}: the token {name!r} has the id {i!r}, expected a whole number from 0 to {most - 1}")


def changes(found: dict[str, Any]) -> str:
    """Why some texts do not round-trip byte for byte through this tokenizer.json; "" if all do."""
    model, normalizer = found["model"], found.get("normalizer")
    kinds = steps(found["pre_tokenizer"], "pretokenizers")
    wrong = {
        f"its model is of type {model['type']!r}": model["type"] != "BPE",
        "it has bytes as <0x..>": bool(model.get("byte_fallback")),
        "it marks parts of words": bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")),
        "it normalizes the text": normalizer is not None and steps(normalizer, "normalizers") != [],
        "its words are not cut in bytes": [part["type"] for part in kinds].count("ByteLevel") != 1,
        "it puts a space before the text": any(part.get("add_prefix_space") for part in kinds),
        "it drops what it cuts at": any(part.get("behavior") == "Removed" for part in kinds),
        "an added token swallows white space": any(t.get("lstrip") or t.get("rstrip") for t in found["added_tokens"]),
        "it lacks some of the 256 bytes": model["type"] == "BPE" and not model["vocab"].keys() >= bpe.printable_bytes().keys(),
    }
    return next((reason for reason, holds in wrong.items() if holds), "")


def steps(step: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The steps of which one consists that may be a sequence of several, whose own name for them is `inside`."""
    if step is None:
        return []
    return [p for one in step[inside] for p in steps(one, inside)] if step["type"] == "Sequence" else [step]


def _spaces(found: list[dict[str, Any]]) -> bool:
    """Whether a space is put before each text, or of a decoder's steps, whether one is taken away again."""
    does = {"Prepend", "Strip", "WordPiece", "Metaspace", "ByteLevel"}
    how = {"Metaspace": ("prepend_scheme", "always"), "Strip": ("start", 0), "ByteLevel": ("add_prefix_space", False)}
    for step in found:
        key, missing = how.get(step["type"], ("type", ""))
        if step["type"] in does and step.get(key, missing) not in (False, "never", 0):
            return True
    return False


def _leading(found: dict[str, Any], special: Mapping[str, int]) -> int | None:
    """The special token that the tokenizer itself puts before a text."""
    for step in steps(found.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing":
            return special.get(step["single"][0].get("SpecialToken", {}).get("id"))
    return None
