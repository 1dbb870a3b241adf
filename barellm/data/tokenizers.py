"""Tokenizers: a table of byte strings, and a way to split text into them (data/kinds.py lists all kinds).
The bytes of a text's tokens, joined, are its UTF-8. So decoding, bytes per token (for bits per byte) and streaming decoding are
shared by all kinds. A tokenizer that is not `exact` changes some texts: it normalizes them or puts a space before them."""

import base64
import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from barellm.chat import conventions
from barellm.data import cache, chats
from barellm.errors import UserError

FILE = "tokenizer.json"
FORMAT = 1
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(chats.Chats):
    """The protocol, and what all kinds share. `tokens[id]` is the UTF-8 that an id stands for, empty for special ids.

    `eot`, where there is one, stands before every document, as in llm.c's shards: <|endoftext|>, or Llama-3's <|begin_of_text|>."""

    name: str
    tokens: Sequence[bytes]
    eot: int | None
    exact = True  # decode(encode(text)) is the text, byte for byte
    prefixed = False  # a space is put before a text when it is encoded
    strips = False  # decoding takes a space away from the beginning of a text
    rows: int | None = None  # of the model that it belongs to: an id beyond them is refused where it comes up
    files: Mapping[str, bytes] = {}
    unused: Sequence[int] = ()  # ids below vocab_size that stand for no token

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Token ids of a text, int32. Names of special tokens are plain text unless `special`. UserError without UTF-8 or id."""
        if not special or not self.special:
            return self.encode_many([text])[0]
        names = re.compile(f"({'|'.join(map(re.escape, sorted(self.special, key=len, reverse=True)))})")
        parts = [part for part in names.split(text) if part]
        ids = [[self.special[part]] if part in self.special else self.encode(part) for part in parts]
        return np.concatenate([np.empty(0, np.int32), *(np.array(part_ids, np.int32) for part_ids in ids)])

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of several texts, in parallel where the kind can."""
        return [self.encode(text) for text in texts]

    def encode_continued(self, text: str) -> np.ndarray:
        """Ids of a text that goes on from another."""
        return self.encode(text)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def special(self) -> Mapping[str, int]:
        """Special tokens by name. They stand for no text."""
        return {} if self.eot is None else {END_OF_TEXT: self.eot}

    @cached_property
    def conventions(self) -> conventions.Conventions:
        """What stands before and after texts, the chat template, the generation defaults."""
        return conventions.read(self.files, self.special, eot=self.eot, leading=self.eot)

    def with_files(self, files: Mapping[str, bytes], *, rows: int | None = None) -> "Tokenizer":
        """Itself, with what lies beside its model, and the rows of that. UserError for a damaged file."""
        self.files, self.rows = files, rows
        for made in ("conventions", "turn_ends"):
            vars(self).pop(made, None)
        _ = self.conventions
        return self

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text when a model draws them."""
        return self.conventions.ends

    @property
    def start(self) -> int:
        """The id that a text without a prompt goes on from: what stands before texts, else a line feed, else the first."""
        for known in (self.conventions.begin, self.eot):
            if known is not None:
                return known
        try:
            return int(self.encode("\n")[-1])
        except UserError:
            return 0

    def prompt(self, text: str, *, special: bool = False) -> list[int]:
        """The ids that a model is given to go on from a text: what stands before one, then those of the text; never none. With
        `special`, names of special tokens in it are those tokens."""
        begin, ids = self.conventions.begin, self.encode(text, special=special).tolist()
        if begin is not None and ids[:1] != [begin]:
            ids.insert(0, begin)
        return ids or [self.start]

    @property
    def added(self) -> Mapping[str, int]:
        """Tokens that are matched in a text before it is cut, special ones among them."""
        return self.special

    @property
    def hash(self) -> str:
        """A hash of the whole vocabulary: equal hashes mean equal ids for every text."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        return vocabulary_hash(self.name, self.eot, self.tokens)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: bytes of text that each id stands for, 0 for special ids."""
        return np.array([len(token) for token in self.tokens], np.int64)

    def token_bytes(self, token: int) -> bytes:
        return self.tokens[self._checked([token])[0]]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for; they need not be whole UTF-8."""
        tokens = self.tokens
        return b"".join([tokens[i] for i in self._checked(ids)])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 show as U+FFFD."""
        text = self.decode_bytes(ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips else text

    def _checked(self, ids: Iterable[int]) -> list[int]:
        checked = np.array(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).tolist()
        for i in (min(checked), max(checked)) if checked else ():
            if not 0 <= i < self.vocab_size:
                known = f"tokenizer {self.name} ({self.vocab_size} ids)"
                raise UserError(f"token id {i} is beyond the vocabulary of {known}")
        return checked

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a folder, and `files` beside it: all that `load_tokenizer` needs."""
        self._write(folder, [base64.b64encode(token).decode() for token in self.tokens])

    def _write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            with cache.new_file(folder / name) as file:
                file.write(content)

    def _write(self, folder: Path, tokens: list[str] | None) -> None:
        content = {"format": FORMAT, "kind": self.name, "eot": self.eot, "hash": self.hash, "tokens": tokens}
        content |= {"count": self.vocab_size} if self.name == Ids.name else {}
        with cache.new_file(folder / FILE) as file:
            file.write(json.dumps(content, separators=(",", ":")).encode())
        self._write_files(folder)


class Bytes(Tokenizer):
    """256 ids, one for each byte."""

    name = "bytes"
    eot = None
    tokens = tuple(bytes([i]) for i in range(256))

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)


class Ids(Tokenizer):
    """No tokenizer: the ids of a model of which nothing says what they stand for. It trains on shards, and has no text."""

    name = "ids"
    eot = None

    def __init__(self, count: int) -> None:
        self.count = self.rows = count

    @property
    def vocab_size(self) -> int:
        return self.count

    @property
    def hash(self) -> str:
        return hashlib.sha256(f"{self.name} {self.count}".encode()).hexdigest()

    @property
    def tokens(self) -> Sequence[bytes]:
        found = f"the model has {self.count} ids and no tokenizer, so there is no text"
        raise UserError(f"{found}: name one by --tokenizer when it is imported, or tokenizer= from Python")

    @property
    def start(self) -> int:
        return 0

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        return np.array(self.tokens)

    def save(self, folder: Path) -> None:
        self._write(folder, None)


class Chars(Tokenizer):
    """One id for each character, in code point order, as nanoGPT's shakespeare_char has it."""

    name = "chars"
    eot = None

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self.tokens = [character.encode() for character in self.characters]
        self._points = np.array([ord(character) for character in self.characters], np.uint32)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        utf8(text)
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.minimum(np.searchsorted(self._points, points), len(self._points) - 1)
        if wrong := np.flatnonzero(self._points[ids] != points)[:1].tolist():
            at, known = wrong[0], f"the {self.vocab_size} characters of the tokenizer"
            raise UserError(f"character {text[at]!r} at position {at} is not among {known}")
        return ids.astype(np.int32)


def utf8(text: str) -> bytes:
    """The text's UTF-8; UserError for a lone surrogate, which is how Python passes on bytes that were no UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise UserError(f"text is not valid Unicode: lone surrogate {text[at]!r} at position {at}") from error


def vocabulary_hash(name: str, eot: int | None, tokens: Iterable[bytes]) -> str:
    """sha256 over kind, end-of-text id and every token's bytes."""
    digest = hashlib.sha256(f"{name} {eot}".encode())
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


class StreamDecoder:
    """Text as tokens arrive: bytes that may still become a character are held back until they do. `begins`: the text has nothing
    before it, so a tokenizer's own space before texts is no part of it."""

    def __init__(self, tokenizer: Tokenizer, *, begins: bool = False) -> None:
        self.tokenizer, self._first = tokenizer, begins and tokenizer.strips
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that can be shown after this id; it may be empty."""
        text = self._decoder.decode(self.tokenizer.token_bytes(token))
        if self._first and text:
            self._first, text = False, text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """The rest that was held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
