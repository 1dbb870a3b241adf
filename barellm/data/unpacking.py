"""The bytes of a file in chunks, uncompressed on the way. Memory is bounded whatever a compressed file claims to hold."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from barellm.errors import UserError

CHUNK = 1 << 20  # bytes read at once
PACKED = (".gz", ".zst", ".zstd")
FED = 1 << 9  # bytes that a zstd decompressor gets at once: a block of 4 bytes can hold 128 KB, so they become 16 MB at most
WINDOW = 1 << 27  # bytes of a zstd window that any file may ask for: the limit of the program zstd without --long
LARGE_WINDOW = 16  # a larger window is for files whose size times this reaches it, so that memory follows the file's size
MARK = b"\xef\xbb\xbf"  # U+FEFF in UTF-8, which some editors write before a text
WIDE_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32"}


def required(package: str, what: str) -> Any:
    """Import a package of the extra `data`, or raise a UserError that tells how to install it."""
    try:
        return resolve_name(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        raise UserError(f"{what} needs the package {name}: pip install {name}") from error


def not_utf8(path: Path, error: UnicodeDecodeError, at: int) -> UserError:
    """The mistake of a file whose bytes from offset `at` on could not be decoded."""
    byte, where = error.object[error.start], at + error.start
    return UserError(f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {where}")


def is_packed(path: Path) -> bool:
    return path.name.lower().endswith(PACKED)


def text_chunks(path: Path, start: int = 0, stop: int | None = None) -> tuple[int, Iterator[bytes]]:
    """Open UTF-8 text: the offset of its first byte (behind a byte-order mark) and its uncompressed bytes from there, limited to
    [start, stop). UserError for UTF-16 and UTF-32, with or without a mark."""
    found = chunks(path, start)
    if start:
        return start, _limited(found, stop, start)
    head, rest = next(found, b""), found
    while 0 < len(head) < len(MARK) + 1 and (more := next(rest, None)) is not None:
        head += more
    for mark, name in sorted(WIDE_MARKS.items(), key=lambda item: -len(item[0])):
        if head.startswith(mark):
            raise UserError(f"{path} is {name} text, expected UTF-8")
    if len(head) > 3 and (not any(head[:64:2]) or not any(head[1:64:2])):  # every other byte is zero
        raise UserError(f"{path} is UTF-16 text without its mark, as it seems, expected UTF-8")
    at = len(MARK) * head.startswith(MARK)

    def whole() -> Iterator[bytes]:
        yield head[at:]
        yield from rest

    return at, _limited(whole(), stop, at)


def chunks(path: Path, start: int = 0) -> Iterator[bytes]:
    """Iterate over the uncompressed bytes of a file from `start` on. UserError where a compressed file is damaged."""
    if not is_packed(path):
        with open(path, "rb") as file:
            file.seek(start)
            while chunk := file.read(CHUNK):
                yield chunk
        return
    unpacked = _gzip(path) if path.name.lower().endswith(".gz") else _zstd(path)
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
    """Decompress .zst frames in chunks. The window is limited by the file's size, so a crafted file cannot allocate more."""
    library = required("zstandard", path.name)
    window = min(1 << 31, max(WINDOW, LARGE_WINDOW * path.stat().st_size))
    unpacker, in_frame = library.ZstdDecompressor(max_window_size=window).decompressobj(), False
    buffered, size = [], 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(FED):
                while chunk:
                    buffered.append(unpacker.decompress(chunk))
                    size += len(buffered[-1])
                    if size >= CHUNK:
                        yield from _pieces(buffered)
                        buffered, size = [], 0
                    chunk, in_frame = unpacker.unused_data, not unpacker.eof  # what lies behind a frame begins the next one
                    if unpacker.eof:
                        unpacker = library.ZstdDecompressor(max_window_size=window).decompressobj()
    except library.ZstdError as error:
        if "too much memory" in str(error):
            found = f"a zstd window of more than {window >> 20} MiB, which a file of its size does not need"
            raise UserError(f"{path} asks for {found}: expected one that zstd wrote without --long") from error
        raise UserError(f"{path} is no whole zstd file: {error}") from error
    yield from _pieces(buffered)
    if in_frame:
        raise UserError(f"{path} is no whole zstd file: it ends inside a frame")


def _pieces(held: list[bytes]) -> Iterator[bytes]:
    whole = b"".join(held)
    for at in range(0, len(whole), CHUNK):
        yield whole[at : at + CHUNK]


def _limited(found: Iterator[bytes], stop: int | None, at: int) -> Iterator[bytes]:
    """Truncate chunks, the first of which begins at offset `at`, at offset `stop` (None: no limit)."""
    for chunk in found:
        if stop is not None and at + len(chunk) >= stop:
            yield chunk[: max(0, stop - at)]
            return
        yield chunk
        at += len(chunk)
