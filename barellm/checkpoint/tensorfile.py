"""safetensors, written and read in pieces through a session: no second copy of the model in memory."""

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from barellm.checkpoint.storage import NewFile
from barellm.data import mapping
from barellm.errors import UserError
from barellm.program.dtypes import FORMATS
from barellm.runtime.session import Session


class RowReader(Protocol):
    """Something that tensors are read from, in rows: a session, or files of weights."""

    def read_rows(self, name: str, lo: int, hi: int, /) -> np.ndarray: ...


PIECE = 8 << 20  # bytes read from the session at a time
NEAR = 1 << 19  # bytes read from a file at a time: what is made of them stays in the second cache
# What a session gives as fp32 is kept as fp32: every value of a 16-bit format is one, and any reader knows it.
EXCHANGE = {"fp32": "F32", "fp64": "F64", "i32": "I32", "bf16": "BF16", "fp16": "F16", "i8": "I8"}
CODES = {name: EXCHANGE[f.exchange] for name, f in FORMATS.items() if f.exchange in EXCHANGE}
# Other programs' files may hold the others beside their weights.
NUMPY = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
ITEM = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MOST_HEADER, MOST_AXES = 100 << 20, 32  # bytes, as everywhere; axes of an array in every NumPy


def numpy_dtype(code: str) -> np.dtype:
    if code == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(NUMPY[code])


def header_of(tensors: Mapping[str, Any], framework: str = "barellm") -> tuple[bytes, int]:
    """(length and JSON header, bytes of data) of a safetensors file; padded so that the data starts at a multiple of 64."""
    entries: dict[str, Any] = {"__metadata__": {"format": framework}}
    offset = 0
    for name, t in tensors.items():
        code = CODES[t.dtype]
        end = offset + t.size * itemsize(t)
        entries[name] = {"dtype": code, "shape": [int(n) for n in t.shape], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def itemsize(t: Any) -> int:
    return ITEM[CODES[t.dtype]]


def pieces(shape: tuple[int, ...], itemsize: int, nbytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of leading rows that have about `nbytes` each, PIECE where that is None."""
    rows = int(shape[0])
    row = itemsize
    for n in shape[1:]:
        row *= int(n)
    step = max(1, (PIECE if nbytes is None else nbytes) // max(1, row))
    for lo in range(0, rows, step):
        yield lo, min(rows, lo + step)


def file_bytes(tensors: Mapping[str, Any], *, framework: str = "barellm") -> int:
    header, data = header_of(tensors, framework)
    return len(header) + data


def write(path: Path, session: RowReader, tensors: Mapping[str, Any], *, framework: str = "barellm") -> dict[str, Any]:
    """Stream `tensors` (name -> Tensor) of a session to a new file; returns its manifest entry. `framework`: metadata."""
    header, data = header_of(tensors, framework)
    with NewFile(path, size=len(header) + data) as file:
        file.write(header)
        for name, t in tensors.items():
            dtype = numpy_dtype(CODES[t.dtype])
            for lo, hi in pieces(t.shape, dtype.itemsize):
                file.write(np.ascontiguousarray(session.read_rows(name, lo, hi), dtype=dtype).reshape(-1).view(np.uint8))
        return file.close()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """({name: entry}, offset of the data) of a safetensors file. UserError unless the tensors tile the data exactly, each with the
    size of its dtype and shape; readers need no further checks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER, size - 8):
            raise UserError(f"{path} is not a safetensors file: its header would have {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_object)
    except UserError as error:
        raise UserError(f"{path}: its header has {error}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(entries, dict):
        raise UserError(f"{path} is not a safetensors file: its header is {type(entries).__name__}, expected an object")
    metadata = {} if (found := entries.pop("__metadata__", None)) is None else found
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: __metadata__ in its header is {metadata!r:.80}, expected an object of texts")
    for name, entry in entries.items():
        if problem := _problem(entry):
            raise UserError(f"{path}: the entry of {name!r:.80} in its header {problem}")
    end, actual = 0, size - 8 - length  # the file: 8 bytes with the header's length, the header, the data
    for lo, hi, name in sorted((*entry["data_offsets"], name) for name, entry in entries.items()):
        if lo != end:
            raise UserError(f"{path}: {name!r:.80} begins at byte {lo} of the data, expected {end}, where the one before ends")
        end = hi
    if end != actual:
        raise UserError(f"{path}: the data of its tensors has {end} bytes, the file has {actual}")
    return entries, 8 + length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. UserError for a name that stands twice: readers take different ones. ValueError for one that is no Unicode."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"the name {name!r:.80} twice")
        name.encode()
        found[name] = value
    return found


def _problem(entry: Any) -> str | None:
    """What is wrong with a tensor's header entry; None if nothing."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return f"is {entry!r:.80}, expected its dtype, shape and data_offsets"
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in ITEM:
        return f"has the dtype {code!r:.80}, expected one of {', '.join(ITEM)}"
    for what, sizes in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(sizes, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
            return f"has the {what} {sizes!r:.80}, expected integers from 0 on"
    if len(shape) > MOST_AXES or prod(n or 1 for n in shape) * ITEM[code] >= 1 << 63:  # an axis of 0 must not hide huge ones
        return f"has the shape {shape!r:.80}, expected at most {MOST_AXES} axes and fewer than 2^63 bytes"
    size = prod(shape) * ITEM[code]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        return f"has the data_offsets {offsets!r:.80}, expected two that are {size} bytes apart for {code} {shape}"
    return None


def mapped(path: Path) -> dict[str, np.ndarray]:
    """{name: array} of a safetensors file, read when it is used. UserError for what the file does not hold whole."""

    entries, start = read_header(path)
    data = mapping.mapped(path)[start:]
    return {
        name: data[slice(*entry["data_offsets"])].view(numpy_dtype(entry["dtype"])).reshape(entry["shape"])
        for name, entry in entries.items()
    }


def check_names(path: Path, found: Iterable[str], expected: Iterable[str]) -> None:
    """Raise a UserError for a tensor that is missing, or one too many."""
    found, expected = set(found), set(expected)
    if missing := sorted(expected - found):
        raise UserError(f"{path} lacks the tensor {missing[0]!r} ({len(missing)} missing in all)")
    if unknown := sorted(found - expected):
        raise UserError(f"{path} has the tensor {unknown[0]!r}, which this model lacks ({len(unknown)} in all)")


def checked_header(path: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """`read_header`. UserError if the file's tensors are not these, by name, dtype and shape."""
    entries, start = read_header(path)
    check_names(path, entries, tensors)
    for name, t in tensors.items():
        found = (entries[name]["dtype"], tuple(entries[name]["shape"]))
        expected = (CODES[t.dtype], tuple(int(n) for n in t.shape))
        if found != expected:
            raise UserError(f"{path}: {name} is {found[0]} {found[1]}, expected {expected[0]} {expected[1]}")
    return entries, start


def read(path: Path, session: Session, tensors: Mapping[str, Any]) -> None:
    """Stream a file into the session's tensors. UserError, before anything is written, if they differ."""
    entries, start = checked_header(path, tensors)
    with path.open("rb") as file:
        for name, t in tensors.items():
            file.seek(start + entries[name]["data_offsets"][0])
            dtype = numpy_dtype(CODES[t.dtype])
            width = t.size // max(1, int(t.shape[0]))
            for lo, hi in pieces(t.shape, dtype.itemsize, NEAR):
                piece = np.empty((hi - lo) * width, dtype)
                if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
                    raise UserError(f"{path} ends inside the tensor {name!r}")
                session.write_rows(name, lo, piece.reshape(hi - lo, *(int(n) for n in t.shape[1:])))
