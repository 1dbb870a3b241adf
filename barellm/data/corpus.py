"""Text on this machine, cut into a training and a validation part: Python's own library, or text files."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from barellm.data.shards import remembered
from barellm.errors import UserError

BLOCK = 1 << 18  # bytes of text handed to a tokenizer at once
LONGEST_WORD = 1 << 22  # characters without a place to cut: then the cut falls anywhere
# Tests, other people's packages, and tables that programs wrote (character maps, the help texts in pydoc_data).
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Piece:
    """The bytes [start, stop) of a text file. `begins` says whether a document begins here (and not in the other part of the
    split)."""

    path: Path
    start: int
    stop: int
    begins: bool = True


@dataclass(frozen=True)
class Corpus:
    """Text pieces of both parts; `hash` is of their contents and of where they are cut."""

    name: str
    train: tuple[Piece, ...]
    val: tuple[Piece, ...]
    hash: str


def stdlib_corpus(val_fraction: float, *, root: Path | None = None) -> Corpus:
    """The source of the running Python's standard library, a file a document, whole files in either part.

    Files are taken for validation in the order of a hash of their names until they hold `val_fraction` of the bytes,
    so a Python with a few other files has nearly the same split. A file with an earlier one's content is left out.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    files: dict[str, tuple[str, int]] = {}  # relative name -> digest, bytes
    seen = set()
    for path in sorted(_python_files(root)):
        content = path.read_bytes()
        digest = xxhash.xxh3_128_hexdigest(content)
        if not content or digest in seen or not _is_utf8(content):
            continue
        seen.add(digest)
        files[path.relative_to(root).as_posix()] = digest, len(content)
    if len(files) < 2:
        raise UserError(f"Python's standard library has no readable source in {root}: pass --data FILE")
    wanted = val_fraction * sum(size for _, size in files.values())
    val: set[str] = set()
    held = 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if val and (held >= wanted or len(val) == len(files) - 1):
            break
        val.add(name)
        held += files[name][1]
    content_hash = xxhash.xxh3_128()
    for name, (digest, _) in files.items():
        content_hash.update(f"{digest} {name in val}\n".encode())
    pieces = {name: Piece(root / name, 0, size) for name, (_, size) in files.items()}
    return Corpus(
        name=f"Python's standard library in {root}",
        train=tuple(piece for name, piece in pieces.items() if name not in val),
        val=tuple(piece for name, piece in pieces.items() if name in val),
        hash=content_hash.hexdigest(),
    )


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        for name in files:
            path = Path(folder, name)
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            if os.access(path, os.R_OK) and not path.is_symlink():
                yield path


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def text_corpus(paths: Iterable[Path], val_fraction: float, *, name: str) -> Corpus:
    """Text files in the given order: of all characters the last `val_fraction` are for validation, as in nanoGPT."""
    paths = list(paths)
    found = [remembered(path, lambda path=path: _walk(path)) for path in paths]
    characters = sum(one["characters"] for one in found)
    if characters == 0:
        raise UserError(f"{name} is empty, expected text")
    cut = int(characters * (1 - val_fraction))
    train, val = [], []
    digest = xxhash.xxh3_128(f"{cut}\n".encode())
    for path, one in zip(paths, found, strict=True):
        digest.update(f"{one['digest']}\n".encode())
        here = min(max(cut, 0), one["characters"])  # characters of this file before the cut
        byte = one["bytes"] if here == one["characters"] else _byte_of_character(path, here)
        if byte > 0:
            train.append(Piece(path, 0, byte))
        if byte < one["bytes"]:
            val.append(Piece(path, byte, one["bytes"], begins=byte == 0))
        cut -= one["characters"]
    return Corpus(name, tuple(train), tuple(val), digest.hexdigest())


def _walk(path: Path) -> dict:
    """Size in bytes and characters and digest of a file, in one pass. UserError for bytes that are no UTF-8: said here, before
    the text is cut, the first of them is named whichever part a tokenizer reads first."""
    digest, size, characters = xxhash.xxh3_128(), 0, 0
    for block, text in _decoded(path, 0, path.stat().st_size):
        digest.update(block)
        size += len(block)
        characters += len(text)
    return {"bytes": size, "characters": characters, "digest": digest.hexdigest()}


def _begins_character(block: bytes) -> np.ndarray:
    return (np.frombuffer(block, np.uint8) & 0xC0) != 0x80


def _byte_of_character(path: Path, character: int) -> int:
    """The offset of the first byte of a character; both are counted from 0."""
    offset = 0
    for block in _raw_blocks(path, 0, None):
        starts = np.flatnonzero(_begins_character(block))
        if character < len(starts):
            return offset + int(starts[character])
        character -= len(starts)
        offset += len(block)
    return offset


def _raw_blocks(path: Path, start: int, stop: int | None) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while block := file.read(BLOCK if stop is None else min(BLOCK, stop - start)):
                start += len(block)
                yield block
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _decoded(path: Path, start: int, stop: int) -> Iterator[tuple[bytes, str]]:
    """(bytes, the characters that end in them) of a file's blocks. UserError with the offset for bytes that are no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for raw in _raw_blocks(path, start, stop):
        held = len(decoder.getstate()[0])
        try:
            yield raw, decoder.decode(raw, final=start + len(raw) == stop)
        except UnicodeDecodeError as error:
            at, byte = start - held + error.start, error.object[error.start]
            raise UserError(f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {at}") from error
        start += len(raw)


def texts(piece: Piece) -> Iterator[str]:
    """The piece's text in blocks, cut only where every tokenizer cuts too (`_last_cut`).

    UserError with the offset for bytes that are no UTF-8.
    """
    offset, carry, searched = piece.start, "", 1
    for raw, text in _decoded(piece.path, piece.start, piece.stop):
        carry += text
        offset += len(raw)
        cut = _last_cut(carry, searched) or (len(carry) if len(carry) > LONGEST_WORD else 0)
        if cut and offset < piece.stop:
            yield carry[:cut]
            carry = carry[cut:]
        searched = max(len(carry), 1)
    if carry:
        yield carry


def _last_cut(text: str, searched: int) -> int:
    """The last place, from `searched` on, where a word of every tokenizer ends: before a space or tab that follows no white
    space, and before a line's end that follows a letter or digit. After a mark a line's end belongs to the mark's word in
    Llama-3's rule."""
    for at in range(len(text) - 1, searched - 1, -1):
        if (text[at] in " \t" and not text[at - 1].isspace()) or (text[at] in "\r\n" and text[at - 1].isalnum()):
            return at
    return 0
