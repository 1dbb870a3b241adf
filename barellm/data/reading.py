"""How a file of text becomes blocks for a tokenizer: plain text, records of JSON lines and of Parquet, compressed or not.

A block is a function of the place where it begins and of the file alone, so whoever goes on at a block's end reads what one
who never stopped reads. Memory is bounded by a block, or by a record that is longer.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from barellm.errors import UserError

BLOCK = 1 << 18  # bytes of text that are handed to a tokenizer at once
LONGEST_WORD = 1 << 22  # bytes without a place to cut: then the cut falls anywhere
CHUNK = 1 << 20  # bytes read at once
ROWS = 1024  # rows of a Parquet file that are in memory at once
FORMATS = ("text", "jsonl", "parquet")
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PACKED = (".gz", ".zst", ".zstd")


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
    and JSON lines a byte of the uncompressed file, in Parquet a row; -1 inside a record, where nobody can."""

    text: str
    begins: bool
    closed: bool
    end: int


def required(package: str, what: str) -> Any:
    """A package of the extra `data`."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        raise UserError(f"{what} needs the package {name}: pip install {name}") from error


def format_of(path: Path, layout: Layout) -> str:
    """text, jsonl or parquet, by the file's name."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    found = SUFFIXES.get(Path(name.removesuffix(packed)).suffix, layout.format)
    if packed and found == "parquet":
        raise UserError(f"{path} is Parquet in {packed}, expected Parquet as it is: it is compressed inside")
    return found


def is_whole(path: Path, layout: Layout) -> bool:
    """Whether the file is one document, which may be cut anywhere."""
    return format_of(path, layout) == "text" and not layout.separator


def blocks(
    path: Path, layout: Layout, *, start: int = 0, stop: int | None = None, begins: bool = True
) -> Iterator[Block]:
    """The blocks of [start, stop) of a file. `begins`: whether a document begins at `start`. Documents without text have one
    empty block."""
    kind = format_of(path, layout)
    try:
        if kind == "parquet":
            yield from _parquet(path, layout.field, start, stop)
        else:
            found = _limited(chunks(path, start), None if stop is None else stop - start)
            if kind == "jsonl":
                yield from _json_lines(path, found, layout.field, start)
            else:
                yield from _plain(path, found, layout, start, begins)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def chunks(path: Path, start: int = 0) -> Iterator[bytes]:
    """The uncompressed bytes of a file from `start` on. UserError where a compressed file is damaged or cut short."""
    name = path.name.lower()
    if not name.endswith(PACKED):
        with open(path, "rb") as file:
            file.seek(start)
            while chunk := file.read(CHUNK):
                yield chunk
        return
    unpacked = _gzip(path) if name.endswith(".gz") else _zstd(path)
    for chunk in unpacked:
        if start < len(chunk):
            yield chunk[start:]
        start = max(0, start - len(chunk))


def _gzip(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is no whole gzip file: {error}") from error


def _zstd(path: Path) -> Iterator[bytes]:
    library = required("zstandard", path.name)
    unpacker, inside = library.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), False
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK // 16):
                while chunk:
                    yield unpacker.decompress(chunk)
                    chunk, inside = unpacker.unused_data, not unpacker.eof
                    if unpacker.eof:
                        unpacker = library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    except library.ZstdError as error:
        raise UserError(f"{path} is no whole zstd file: {error}") from error
    if inside:
        raise UserError(f"{path} is no whole zstd file: it ends inside a frame")


def _limited(found: Iterator[bytes], left: int | None) -> Iterator[bytes]:
    for chunk in found:
        yield chunk[:left]
        if left is not None:
            left -= len(chunk)
            if left <= 0:
                return


class _Buffer:
    """Bytes that come in chunks; `at` is where the first of those that are left stands in the file."""

    def __init__(self, found: Iterator[bytes], at: int) -> None:
        self._found, self._held, self._begin = found, b"", 0
        self.at, self.ended = at, False

    def __len__(self) -> int:
        return len(self._held) - self._begin

    def reach(self, size: int) -> None:
        """Hold so many bytes, if there are so many."""
        while not self.ended and len(self) < size:
            chunk = next(self._found, None)
            self.ended = chunk is None
            self._held, self._begin = self._held[self._begin :] + (chunk or b""), 0

    def find(self, part: bytes) -> int:
        """Where `part` is first in what is held, or -1."""
        return max(-1, self._held.find(part, self._begin) - self._begin) if part else -1

    def first(self, size: int) -> bytes:
        return self._held[self._begin : self._begin + size]

    def drop(self, size: int) -> None:
        self._begin, self.at = self._begin + size, self.at + size


def _plain(path: Path, found: Iterator[bytes], layout: Layout, at: int, begins: bool) -> Iterator[Block]:
    """Blocks of plain text from offset `at` on."""
    separator, held = layout.separator.encode(), _Buffer(found, at)
    while True:
        place = held.find(separator)
        if place < 0:  # so much tells whether the document is longer than a block
            held.reach(BLOCK + len(separator))
            place = held.find(separator)
        if not held:
            return
        after = place + len(separator) if place >= 0 else len(held)
        size = after if place < 0 or layout.keep else place
        if size <= BLOCK and (place >= 0 or held.ended):
            text = _decoded(path, held.first(size), held.at)
            held.drop(after)
            yield Block(text, begins, True, held.at)
            begins = True
            continue
        text = _cut_text(path, held, separator) or _decoded(path, held.first(size), held.at)
        held.drop(len(text.encode()))
        yield Block(text, begins, held.ended and not held, held.at)
        begins = False


def _cut_text(path: Path, held: _Buffer, separator: bytes) -> str:
    """The first block of a document that is longer than one."""
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
        byte, where = raw[error.start], at + error.start
        raise UserError(f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {where}") from error


def _whole_characters(path: Path, raw: bytes, at: int) -> str:
    """The characters that end in `raw`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError:
        return _decoded(path, raw, at)


def _json_lines(path: Path, found: Iterator[bytes], field: str, at: int) -> Iterator[Block]:
    for where, record, end in _records(path, found, at):
        yield from _record(_text(where, record, field), end)


def _text(where: str, record: Any, field: str) -> str:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where} has no text in a field {field!r}, it has: {has}")
    need_characters(text, where)
    return text


def need_characters(text: str, where: str) -> None:
    """Raise a UserError, which begins with `where`, for a text with half of a surrogate pair: JSON can write one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where} has {half} alone in its text, which is half of a character: expected both halves"
        ) from error


def texts(path: Path, field: str) -> Iterator[str]:
    """The text in this field of each record of a file of JSON lines."""
    for where, record in records(path):
        yield _text(where, record, field)


def records(path: Path) -> Iterator[tuple[str, Any]]:
    """Gives each record of a file of JSON lines, and before it the file and the line, for messages."""
    try:
        for where, record, _ in _records(path, chunks(path), 0):
            yield where, record
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _records(path: Path, found: Iterator[bytes], at: int) -> Iterator[tuple[str, Any, int]]:
    """Gives of each line that is not blank the file and the line, the record, and the place after it."""
    for number, line in enumerate(_lines(found), 1):
        at += len(line)
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line), at
            except json.JSONDecodeError as error:
                # What is missing at the end of the line is not at the beginning of the next one.
                column = min(error.pos, len(error.doc.rstrip())) + 1
                raise UserError(f"{where} is no JSON: {error.msg} at column {column}") from error
            except ValueError as error:
                raise UserError(f"{where} is no JSON: {error}") from error
            except RecursionError as error:
                raise UserError(
                    f"{where} has lists or objects too deep in each other, expected a flat record"
                ) from error


def _lines(found: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their ends, however the bytes come."""
    held: list[bytes] = []
    for chunk in found:
        first, *others = chunk.split(b"\n")
        held.append(first)
        for line in others:
            yield b"".join(held) + b"\n"
            held = [line]
    if last := b"".join(held):
        yield last


def _parquet(path: Path, field: str, start: int, stop: int | None) -> Iterator[Block]:
    library = required("pyarrow.parquet", path.name)
    arrow = required("pyarrow", path.name)
    try:
        with library.ParquetFile(path) as file:
            schema = file.schema_arrow
            kind = schema.field(field).type if field in schema.names else None
            if kind not in (arrow.string(), arrow.large_string()):
                raise UserError(f"{path} has no column {field!r} of text, it has: {', '.join(schema.names)}")
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start or (stop is not None and row >= stop):
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if row > start and (stop is None or row <= stop):
                            yield from _record(text or "", row)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is no whole Parquet file: {error}") from error


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
