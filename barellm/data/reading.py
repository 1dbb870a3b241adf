"""How a file becomes blocks for a tokenizer: plain text, or records' texts (data/records.py), compressed or not.

A block is a function of the place where it begins and of the file alone, so whoever goes on at a block's end reads what one
who never stopped reads. Memory is bounded by a block, or by a record that is longer."""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barellm.data import cache, records
from barellm.data.unpacking import MARK, PACKED, chunks, not_utf8, text_chunks
from barellm.errors import UserError

BLOCK = 1 << 18  # bytes of text that are handed to a tokenizer at once
LONGEST_WORD = 1 << 22  # bytes without a place to cut: then the cut falls anywhere
FORMATS = ("text", "jsonl", "json", "csv", "tsv", "parquet")
SUFFIXES = {f".{name}": name for name in FORMATS[1:]} | {".ndjson": "jsonl"}


@dataclass(frozen=True)
class Layout:
    """Where the documents are. `field` of a record holds its text. In plain text a document is a file, or what lies between two
    `separator`s; with `keep` the separator stays at the end of the document. `format`: of files whose names do not say."""

    field: str = "text"
    separator: str = ""
    keep: bool = False
    format: str = "text"


@dataclass(frozen=True)
class Block:
    """A part of a document. `begins` and `closed` say whether it is its first and its last. `end` is where to go on: in plain text
    and JSON lines a byte of the uncompressed file, else a number of records; -1 inside a record, where nobody can."""

    text: str
    begins: bool
    closed: bool
    end: int


def format_of(path: Path, layout: Layout) -> str:
    """One of FORMATS, by the file's name."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    found = SUFFIXES.get(Path(name.removesuffix(packed)).suffix, layout.format)
    if packed and found == "parquet":
        raise UserError(f"{path} is Parquet in {packed}, expected Parquet as it is: it is compressed inside")
    return found


def is_whole(path: Path, layout: Layout) -> bool:
    """Whether the file is one document, which may be cut anywhere."""
    return format_of(path, layout) == "text" and not layout.separator


def reading_of(path: Path, layout: Layout) -> str:
    """A tag for the cache key of files that earlier versions decoded differently (JSON arrays, CSV, byte-order marks), so that
    their old cached tokens are not used; "" for all others."""
    kind = format_of(path, layout)
    if kind != "text":
        return f" {kind}" if kind in ("json", "csv", "tsv") else ""
    with cache.reading(path):
        return " behind its mark" if next(chunks(path), b"").startswith(MARK) else ""


def blocks(path: Path, layout: Layout, *, start: int = 0, stop: int | None = None, begins: bool = True) -> Iterator[Block]:
    """Iterate over the text blocks of a file's positions [start, stop). `begins`: whether a document begins at `start`. A document
    without text gives one empty block."""
    kind = format_of(path, layout)
    with cache.reading(path):
        if kind == "text":
            offset, chunks = text_chunks(path, start, stop)
            yield from _plain(path, chunks, layout, offset, begins)
        else:
            for text, end in records.texts(path, kind, layout.field, start, stop):
                yield from _record(text, end)


def documents(found: Iterable[Block]) -> Iterator[str]:
    """Join blocks into the texts of their documents."""
    held: list[str] = []
    for block in found:
        if block.begins and held:
            yield "".join(held)
            held = []
        held.append(block.text)
    if held:
        yield "".join(held)


def each_record(path: Path, *, format: str = "text") -> Iterator[tuple[str, Any]]:
    """Iterate over (location for error messages, record) of a file. `format` is used if the file's name has no known suffix."""
    with cache.reading(path):
        for where, record, _ in records.records(path, format_of(path, Layout(format=format))):
            yield where, record


class _Buffer:
    """A sliding buffer over chunks of bytes; `at` is the file offset of its first byte."""

    def __init__(self, found: Iterator[bytes], at: int) -> None:
        self._found, self._held, self._begin = found, b"", 0
        self.at, self.ended = at, False

    def __len__(self) -> int:
        return len(self._held) - self._begin

    def reach(self, size: int) -> None:
        """Read until the buffer has `size` bytes or the input ends."""
        while not self.ended and len(self) < size:
            chunk = next(self._found, None)
            self.ended = chunk is None
            self._held, self._begin = self._held[self._begin :] + (chunk or b""), 0

    def find(self, part: bytes) -> int:
        """Index of the first `part` in the buffer, or -1."""
        return max(-1, self._held.find(part, self._begin) - self._begin) if part else -1

    def first(self, size: int) -> bytes:
        return self._held[self._begin : self._begin + size]

    def drop(self, size: int) -> None:
        self._begin, self.at = self._begin + size, self.at + size


def _plain(path: Path, found: Iterator[bytes], layout: Layout, at: int, begins: bool) -> Iterator[Block]:
    """Split plain text from file offset `at` on into blocks: a document is one block, or if larger than BLOCK cut between words.
    `found`: the file's bytes from there on; `begins`: a document begins at `at`. With `layout.keep` a document's text includes its
    separator. An empty separator is never found: the file is one document."""
    separator, buffer = layout.separator.encode(), _Buffer(found, at)
    while True:
        index = buffer.find(separator)
        if index < 0:  # so much tells whether the document is longer than a block
            buffer.reach(BLOCK + len(separator))
            index = buffer.find(separator)
        if not buffer:
            return
        after = index + len(separator) if index >= 0 else len(buffer)
        size = after if index < 0 or layout.keep else index
        if size <= BLOCK and (index >= 0 or buffer.ended):
            text = _decoded(path, buffer.first(size), buffer.at)
            buffer.drop(after)
            yield Block(text, begins, True, buffer.at)
            begins = True
            continue
        text = _cut_text(path, buffer, separator) or _decoded(path, buffer.first(size), buffer.at)
        buffer.drop(len(text.encode()))
        yield Block(text, begins, buffer.ended and not buffer, buffer.at)
        begins = False


def _cut_text(path: Path, held: _Buffer, separator: bytes) -> str:
    """The first block of a document that is longer than one, cut between words; if LONGEST_WORD bytes have none, there."""
    window = BLOCK
    while True:
        held.reach(window + len(separator))
        place = held.find(separator)
        text = _whole_characters(path, held.first(window if place < 0 else min(window, place)), held.at)
        if cut := last_cut(text):
            return text[:cut]
        if window >= LONGEST_WORD or 0 <= place <= window or (held.ended and window >= len(held)):
            return text
        window = min(2 * window, LONGEST_WORD)


def last_cut(text: str) -> int:
    """The last place where a word of every tokenizer ends: before a space or tab that follows no white space, and before a line's
    end that follows a letter or digit. After a mark a line's end belongs to the mark's word in Llama-3's rule."""
    for at in range(len(text) - 1, 0, -1):
        if (text[at] in " \t" and not text[at - 1].isspace()) or (text[at] in "\r\n" and text[at - 1].isalnum()):
            return at
    return 0


def _decoded(path: Path, raw: bytes, at: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, error, at) from error


def _whole_characters(path: Path, raw: bytes, at: int) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError:
        return _decoded(path, raw, at)


def _record(text: str, end: int) -> Iterator[Block]:
    """The blocks of one record's text."""
    begins = True
    while len(text) > BLOCK:
        cut = last_cut(text[:BLOCK]) or last_cut(text[:LONGEST_WORD]) or LONGEST_WORD
        if cut >= len(text):
            break
        yield Block(text[:cut], begins, False, -1)
        text, begins = text[cut:], False
    yield Block(text, begins, True, end)
