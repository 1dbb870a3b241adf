"""Files of records: JSON lines, arrays of JSON, CSV and Parquet. A record is what stands between two places to go on: in JSON lines
these are bytes of the uncompressed file, else the number of records before. One record is in memory at a time, or a batch of rows.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from barellm.data.unpacking import is_packed, not_utf8, required, text_chunks
from barellm.errors import UserError
from barellm.jsontext import TOO_DEEP, loads

ROWS = 1024  # rows of a Parquet file that are in memory at once
LONGEST = 1 << 26  # bytes of a record in a compressed file, which could claim to hold one of any length; and of a field of CSV
DELIMITERS = {"csv": ",", "tsv": "\t"}
DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\r\n]*")
CUT_END = 16  # characters before the end of what is held in which JSON that goes on can look wrong


def preferences(record: dict) -> str:
    """A hint for a record of preferences, or ""."""
    hint = "; there is no training on preferences (DPO): the chosen text may be the answer to a prompt"
    return hint if record.keys() >= {"chosen", "rejected"} else ""


def records(path: Path, kind: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, Any, int]]:
    """Gives of each record in [start, stop) where it stands, for messages, itself, and the place after it."""
    if kind == "jsonl":
        at, found = text_chunks(path, start, stop)
        yield from _json_lines(path, found, at)
        return
    if kind == "parquet":
        yield from _parquet_rows(path)
        return
    _, found = text_chunks(path)
    each = _json(path, found) if kind == "json" else _csv(path, found, DELIMITERS[kind])
    for number, (where, record) in islice(enumerate(each, 1), start, stop):
        yield where, record, number


def texts(path: Path, kind: str, field: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, int]]:
    """The text in a field of each record, and the place after the record. null is a text without characters."""
    if kind == "parquet":
        yield from _parquet(path, field, start, stop)
        return
    for where, record, end in records(path, kind, start, stop):
        yield _text(where, record, field), end


def _text(where: str, record: Any, field: str) -> str:
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if text is None:
        return ""
    if not isinstance(text, str):
        has, hint = type(record).__name__, ""
        if isinstance(record, dict):
            has = ", ".join(map(str, record))
            inner = [key for key, value in record.items() if isinstance(value, list) and value]
            hint = preferences(record) or (f"; only a list that is the whole file holds records, not {inner[0]!r}" if inner else "")
        raise UserError(f"{where} has no text in a field {field!r}, it has: {has}{hint}")
    need_characters(text, where)
    return text


def need_characters(text: str, where: str) -> None:
    """Raise a UserError, which begins with `where`, for a text with half of a surrogate pair: JSON can write one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"{where} has {half} alone in its text, which is half of a character: expected both halves") from error


def _json_lines(path: Path, found: Iterator[bytes], at: int) -> Iterator[tuple[str, Any, int]]:
    for number, line in enumerate(_lines(path, found), 1):
        at += len(line)
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, loads(line.decode()), at
            except json.JSONDecodeError as error:
                # What is missing at the end of the line is not at the beginning of the next one.
                column = min(error.pos, len(error.doc.rstrip())) + 1
                raise UserError(f"{where} is no JSON: {error.msg} at column {column}") from error
            except ValueError as error:
                raise UserError(f"{where} is no JSON: {error}") from error


def _lines(path: Path, found: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their ends, however the bytes come."""
    held: list[bytes] = []
    size, limit = 0, LONGEST if is_packed(path) else None
    for chunk in found:
        first, *others = chunk.split(b"\n")
        held.append(first)
        size += len(first)
        _check_length(path, size, limit)
        for line in others:
            yield b"".join(held) + b"\n"
            held, size = [line], len(line)
    if last := b"".join(held):
        yield last


def _check_length(path: Path, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise UserError(f"{path} has a record of more than {limit} bytes: expected shorter ones, or the file unpacked")


def _json(path: Path, found: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """The members of one array, or values that follow each other, as in JSON lines."""
    text, number = _Text(path, found), 0
    array = text.first() == "["
    text.at += array
    more = text.first() not in (("]", "") if array else ("",))
    while more:
        number += 1
        where = f"{path}, record {number}"
        yield where, text.value(where)
        mark = text.first()
        if array and mark not in (",", "]"):
            raise UserError(f"{path} {f'has {mark!r}' if mark else 'ends'} after record {number}, expected ',' or ']'")
        more = mark == "," if array else mark != ""
        text.at += array and more
    if array:
        end, text.at = text.first(), text.at + 1
        if wrong := "no end" if end != "]" else text.first() and "more behind its end":
            raise UserError(f"{path} is a list of JSON with {wrong}, expected one list of records")


class _Text:
    """Text of JSON that comes in pieces; what stands before `at` is done with."""

    def __init__(self, path: Path, found: Iterator[bytes]) -> None:
        self.at = 0
        self._path, self._found, self._held, self._read = path, found, "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._limit = LONGEST if is_packed(path) else None

    def first(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self.at = SPACE.match(self._held, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self.at < len(self._held) or not self._more():
                return self._held[self.at : self.at + 1]

    def value(self, where: str) -> Any:
        """The value that comes next. What is held may end inside it: then it is tried again with twice as much."""
        self.first()
        while True:
            found, end, wrong = None, 0, None
            try:
                found, end = DECODER.raw_decode(self._held, self.at)
                cut = end == len(self._held) and not isinstance(found, dict | list | str)
            except json.JSONDecodeError as error:
                wrong = f"{error.msg} at character {error.pos - self.at + 1}"
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self._held) - CUT_END
            except ValueError as error:
                wrong, cut = str(error), False
            except RecursionError:
                wrong, cut = TOO_DEEP, False
            if cut and self._more():
                continue
            if wrong:
                raise UserError(f"{where} is no JSON: {wrong}")
            self.at = end
            return found

    def _more(self) -> bool:
        """Hold at least twice of what is left; False at the end of the file."""
        left = len(self._held) - self.at
        _check_length(self._path, left, self._limit)
        new: list[str] = []
        size = 0
        while size < max(left, 1) and (chunk := next(self._found, None)) is not None:
            try:
                new.append(self._decoder.decode(chunk))
            except UnicodeDecodeError as error:
                raise not_utf8(self._path, error, self._read - len(error.object) + len(chunk)) from error
            self._read += len(chunk)
            size += len(new[-1])
        if not size and self._decoder.getstate()[0]:
            raise UserError(f"{self._path} is not UTF-8 text: it ends inside a character")
        if size:
            self._held, self.at = self._held[self.at :] + "".join(new), 0
        return size > 0


def _csv(path: Path, found: Iterator[bytes], delimiter: str) -> Iterator[tuple[str, Any]]:
    """The rows under the header, by its names. A cell in quotes may have line ends, which stay as they are."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))

    def lines() -> Iterator[str]:
        at = 0
        for line in _lines(path, found):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(path, error, at) from error
            at += len(line)

    rows, header, begins = csv.reader(lines(), delimiter=delimiter, strict=True), None, 1
    try:
        for row in rows:
            where, begins = f"{path}, line {begins}", rows.line_num + 1
            if not row:
                continue
            if header is None:
                header = row
                if twice := [name for name in header if name and header.count(name) > 1]:
                    raise UserError(f"{where} has the column {twice[0]!r} twice, expected a name for each")
                continue
            if len(row) != len(header):
                raise UserError(f"{where} has {len(row)} columns, expected the {len(header)} of the header")
            yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {begins} is no CSV: {error}") from error


def _batches(path: Path, field: str = "", start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
    """Batches of rows, of one column or with all, and how many rows are before each; those that have none of [start, stop) may be
    left out."""
    library = required("pyarrow.parquet", path.name)
    arrow = required("pyarrow", path.name)
    try:
        with library.ParquetFile(path) as file:
            schema = file.schema_arrow
            if field and (field not in schema.names or not _is_text(arrow, schema.field(field).type)):
                columns = ", ".join(f"{one.name} ({one.type})" for one in schema)
                raise UserError(f"{path} has no column {field!r} of text, it has: {columns}")
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start or (stop is not None and row >= stop):
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field] if field else None):
                    yield row, batch
                    row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path} is no whole Parquet file: {error}") from error


def _parquet(path: Path, field: str, start: int, stop: int | None) -> Iterator[tuple[str, int]]:
    for before, batch in _batches(path, field, start, stop):
        for row, cell in enumerate(batch.column(0), before + 1):
            if row > start and (stop is None or row <= stop):
                yield _cell(path, cell, row), row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Whole rows, as objects by the names of the columns."""
    for before, batch in _batches(path):
        for row in range(batch.num_rows):
            where = f"{path}, row {before + row + 1}"
            try:
                yield where, batch.slice(row, 1).to_pylist()[0], before + row + 1
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 text: {error.reason}") from error


def _is_text(arrow: Any, kind: Any) -> bool:
    """Whether a column's cells are text: of any of Arrow's kinds, bytes of UTF-8, or null alone."""
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    return any(getattr(arrow.types, f"is_{name}")(kind) for name in names)


def _cell(path: Path, cell: Any, row: int) -> str:
    try:
        text = cell.as_py()
        return text.decode() if isinstance(text, bytes) else text or ""
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, row {row} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at its byte {error.start}"
        ) from error
