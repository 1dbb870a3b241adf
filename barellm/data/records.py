"""Readers of files of records: JSON lines, JSON arrays, CSV/TSV and Parquet. Each record comes with a position from which reading
can resume: the byte offset behind it in the uncompressed JSON lines, else the number of records up to it. Only one record, or one
batch of Parquet rows, is in memory at a time."""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from barellm.data.unpacking import is_packed, not_utf8, required, text_chunks
from barellm.errors import UserError, shown
from barellm.jsontext import TOO_DEEP, loads

ROWS = 1024  # rows of a Parquet file per batch in memory
LONGEST = 1 << 26  # most bytes of a record in a compressed file (a crafted one could hold an endless record), and of a CSV field
DELIMITERS = {"csv": ",", "tsv": "\t"}
DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\r\n]*")
CUT_END = 16  # a parse error so near the buffer's end may be a cut escape or word, of up to 12 characters (\ud83d\ude00)


EXAMPLES = "prompt and answer (or completion), messages, conversations (ShareGPT), or instruction and output (Alpaca)"


def preferences(record: dict) -> str:
    hint = "; there is no training on preferences (DPO): the chosen text may be the answer to a prompt"
    return hint if record.keys() >= {"chosen", "rejected"} else ""


def records(path: Path, kind: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, Any, int]]:
    """Iterate over the records of a file in the positions [start, stop) (see the module's docstring; stop None: to the end). Yields
    (location for error messages, the parsed record, the position after it). `kind`: jsonl, json, csv, tsv or parquet."""
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
    """Iterate over (string in `field`, position after its record) of the records in [start, stop). null counts as ""."""
    if kind == "parquet":
        yield from _parquet(path, field, start, stop)
        return
    for where, record, end in records(path, kind, start, stop):
        yield _text(where, record, field), end


def _text(where: str, record: Any, field: str) -> str:
    """The string in `field` of a record; null gives "". Otherwise a UserError with the fields found and the likely mistake."""
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if text is None:
        return ""
    if not isinstance(text, str):
        fields, hint = type(record).__name__, ""
        if isinstance(record, dict):
            fields = f"{field} {shown(text)}" if field in record else ", ".join(map(str, record))
            nested = [key for key, value in record.items() if isinstance(value, list) and value]
            hint = f"; only a list that is the whole file holds records, not {nested[0]!r}" if nested else ""
            hint = preferences(record) or hint or (f"; expected text, or {EXAMPLES}" if field == "text" else "")
        raise UserError(f"{where} has no text in a field {field!r}, it has: {fields}{hint}")
    need_characters(text, where)
    return text


def need_characters(text: str, where: str) -> None:
    """Raise a UserError that begins with `where` if the text has an unpaired surrogate, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"{where} has {surrogate} alone in its text, which is half of a character: expected both halves") from error


def _json_lines(path: Path, chunks: Iterator[bytes], offset: int) -> Iterator[tuple[str, Any, int]]:
    """Parse JSON lines from byte chunks, the first of which begins at `offset`. Blank lines are skipped."""
    for number, line in enumerate(_lines(path, chunks), 1):
        offset += len(line)
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, loads(line.decode()), offset
            except json.JSONDecodeError as error:
                # A parse error at the line's end is reported at its last character, not on the next line
                column = min(error.pos, len(error.doc.rstrip())) + 1
                raise UserError(f"{where} is no JSON: {error.msg} at column {column}") from error
            except ValueError as error:
                raise UserError(f"{where} is no JSON: {error}") from error


def _lines(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Join chunks and split them again at line feeds, which stay at the ends of the lines; a line may span any number of chunks."""
    partial: list[bytes] = []
    size, limit = 0, LONGEST if is_packed(path) else None
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        partial.append(first)
        size += len(first)
        _check_length(path, size, limit)
        for line in others:
            yield b"".join(partial) + b"\n"
            partial, size = [line], len(line)
    if last := b"".join(partial):
        yield last


def _check_length(path: Path, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise UserError(f"{path} has a record of more than {limit} bytes: expected shorter ones, or the file unpacked")


def _json(path: Path, chunks: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """Iterate over (location, record) of a JSON file: the elements of one top-level array, or values that follow each other."""
    text, number = _Text(path, chunks), 0
    array = text.first() == "["
    text.at += array
    more = text.first() not in (("]", "") if array else ("",))  # "": the file's end; an array's missing end is reported below
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
    """Incremental JSON reader over chunks of UTF-8: `_held` is the decoded buffer, `at` the read position in it."""

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
        """Parse the next JSON value; `where` begins error messages. The buffer may end inside the value: then it is doubled
        (`_more`) and the parse is repeated, so the total work stays linear in the value's length."""
        self.first()
        while True:
            value, end, wrong = None, 0, None
            try:
                value, end = DECODER.raw_decode(self._held, self.at)
                # A number or word at the buffer's end may go on: 12 of 123
                cut = end == len(self._held) and not isinstance(value, dict | list | str)
            except json.JSONDecodeError as error:
                wrong = f"{error.msg} at character {error.pos - self.at + 1}"
                # The parser failed where the buffer ends, so more text may mend it
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
            return value

    def _more(self) -> bool:
        """Drop what was parsed and read until the unparsed rest has at least doubled; False if the file has no more text."""
        unparsed = len(self._held) - self.at
        _check_length(self._path, unparsed, self._limit)
        new: list[str] = []
        added = 0
        while added < max(unparsed, 1) and (chunk := next(self._found, None)) is not None:
            try:
                new.append(self._decoder.decode(chunk))
            except UnicodeDecodeError as error:
                raise not_utf8(self._path, error, self._read - len(error.object) + len(chunk)) from error
            self._read += len(chunk)
            added += len(new[-1])
        if not added and self._decoder.getstate()[0]:
            raise UserError(f"{self._path} is not UTF-8 text: it ends inside a character")
        if added:
            self._held, self.at = self._held[self.at :] + "".join(new), 0
        return added > 0


def _csv(path: Path, chunks: Iterator[bytes], delimiter: str) -> Iterator[tuple[str, Any]]:
    """Iterate over (location, {column name: cell}) of the rows below the header. Quoted cells may contain line ends, which are
    kept. Blank lines are skipped; a row with another number of cells than the header is a UserError."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))

    def lines() -> Iterator[str]:
        offset = 0
        for line in _lines(path, chunks):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(path, error, offset) from error
            offset += len(line)

    rows, header, first_line = csv.reader(lines(), delimiter=delimiter, strict=True), None, 1
    try:
        for row in rows:
            where, first_line = f"{path}, line {first_line}", rows.line_num + 1
            if not row:
                continue
            if header is None:
                header = row
                if duplicates := [name for name in header if name and header.count(name) > 1]:
                    raise UserError(f"{where} has the column {duplicates[0]!r} twice, expected a name for each")
                continue
            if len(row) != len(header):
                raise UserError(f"{where} has {len(row)} columns, expected the {len(header)} of the header")
            yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {first_line} is no CSV: {error}") from error


def _batches(path: Path, field: str = "", start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
    """Iterate over (index of the first row, Arrow record batch) of a Parquet file, with the text column `field` only, or all
    columns for "". Row groups that lie outside [start, stop) are skipped unread; the caller filters other rows outside."""
    library = required("pyarrow.parquet", path.name)
    arrow = required("pyarrow", path.name)
    try:
        with library.ParquetFile(path) as file:
            schema = file.schema_arrow
            if field and (field not in schema.names or not _is_text(arrow, schema.field(field).type)):
                columns = ", ".join(f"{column.name} ({column.type})" for column in schema)
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
        if isinstance(error, OSError) and error.errno:  # the system's error (no such file, no permission), not a damaged file
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
    """Whether an Arrow column holds text: a string type, binary (taken as UTF-8), null, or a dictionary of these."""
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    return any(getattr(arrow.types, f"is_{name}")(kind) for name in names)


def _cell(path: Path, cell: Any, row: int) -> str:
    """The text of one cell of a Parquet column; null gives ""."""
    try:
        text = cell.as_py()
        return text.decode() if isinstance(text, bytes) else text or ""
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at its byte {error.start}"
        raise UserError(f"{path}, row {row} is not UTF-8 text: {found}") from error
