"""Text on this machine, cut into a training and a validation part: Python's own library, or files of text and records."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from barellm.data.cache import reading
from barellm.data.reading import Block, Layout, blocks, documents, is_whole, reading_of
from barellm.data.shards import remembered
from barellm.data.unpacking import CHUNK
from barellm.errors import UserError

# Tests, other people's packages, and tables that programs wrote (character maps, the help texts in pydoc_data).
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Piece:
    """The part [start, stop) of a file, in units of `Block.end`. `begins`: a document begins here, not in the other split."""

    path: Path
    start: int
    stop: int
    begins: bool = True


@dataclass(frozen=True)
class Input:
    """A file that a corpus was made of; `digest` is a hash, of the kind `hashed`, of its bytes as they lie on disk."""

    path: str
    bytes: int
    digest: str
    hashed: str = "xxh3_128"


@dataclass(frozen=True)
class Corpus:
    """Pieces of both parts; `hash` is of their contents and of where they are cut. `bytes`: of the files' text, for progress."""

    name: str
    train: tuple[Piece, ...]
    val: tuple[Piece, ...]
    hash: str
    inputs: tuple[Input, ...]
    bytes: int
    layout: Layout = field(default_factory=Layout)

    def blocks(self, piece: Piece, *, start: int = -1, begins: bool = True) -> Iterator[Block]:
        """The text blocks of a piece, or those from position `start` on (-1: its beginning); `begins`: a document begins there."""
        if start < 0:
            start, begins = piece.start, piece.begins
        return blocks(piece.path, self.layout, start=start, stop=piece.stop, begins=begins)

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Called when these pieces will not be read again; `FetchedCorpus` deletes their files."""

    def texts(self, pieces: Iterable[Piece]) -> Iterator[str]:
        for piece in pieces:
            for block in self.blocks(piece):
                yield block.text

    def documents(self, pieces: Iterable[Piece]) -> list[str]:
        """The documents in these pieces, each joined from its blocks."""
        return [text for piece in pieces for text in documents(self.blocks(piece))]


def stdlib_corpus(val_fraction: float, *, root: Path | None = None) -> Corpus:
    """The source of the running Python's standard library, one document per file, split into training and validation by whole
    files.
    Files go to validation in the order of a hash of their names until they hold `val_fraction` of the bytes, so another Python
    version has nearly the same split. Files that are empty, no UTF-8, or a copy of an earlier one are left out."""
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
    val_limit = val_fraction * sum(size for _, size in files.values())
    val: set[str] = set()
    val_bytes = 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if val and (val_bytes >= val_limit or len(val) == len(files) - 1):  # one file at least for each part
            break
        val.add(name)
        val_bytes += files[name][1]
    content_hash = xxhash.xxh3_128()
    for name, (digest, _) in files.items():
        content_hash.update(f"{digest} {name in val}\n".encode())
    pieces = {name: Piece(root / name, 0, size) for name, (_, size) in files.items()}
    return Corpus(
        name=f"Python's standard library in {root}", hash=content_hash.hexdigest(), bytes=sum(size for _, size in files.values()),
        train=tuple(piece for name, piece in pieces.items() if name not in val),
        val=tuple(piece for name, piece in pieces.items() if name in val),
        inputs=tuple(Input(name, size, digest) for name, (digest, size) in files.items()),
    )  # fmt: skip


def _python_files(root: Path) -> Iterator[Path]:
    """All readable .py files under `root` but for tests, tables and installed packages (NOT_LIBRARY)."""
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


def text_corpus(
    paths: Iterable[Path],
    val_fraction: float,
    *,
    name: str,
    layout: Layout = Layout(),  # noqa: B008
    reported: Callable[[int, int], None] = lambda done, total: None,
) -> Corpus:
    """Split files, taken in the given order as one text: the last `val_fraction` of the characters is for validation, as in
    nanoGPT, from the first document that begins there on; if none does, the last document. Plain text without separators is cut at
    the character. val_fraction 0: all is for training.
    `reported(done, total)` is called with the bytes scanned so far and in all. The corpus's hash covers contents and suffixes of
    the files, the layout and the cut. UserError if there is no character."""
    paths = list(paths)
    total, done, scans = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        scans.append(remembered(path, lambda path=path: _walk(path, layout), about=f"{layout!r}{reading_of(path, layout)}"))
        done += scans[-1]["stored"]
        reported(done, total)
    characters = sum(scan["characters"] for scan in scans)
    if characters == 0:
        raise UserError(f"{name} is empty, expected text")
    cut = int(characters * (1 - val_fraction))  # characters of training that remain, from the next file's beginning on
    train, val = [], []
    digest = xxhash.xxh3_128(f"{cut} {asdict(layout)}\n".encode())
    for path, scan in zip(paths, scans, strict=True):
        digest.update(f"{scan['digest']} {path.suffixes}{reading_of(path, layout)}\n".encode())
        # `position`: where the file's validation part begins. All of it is for training, or none, or the cut is inside.
        if cut >= scan["characters"]:
            position, begins = scan["end"], True
        elif cut <= 0:
            position, begins = 0, True
        else:
            position, begins = _place_of_character(path, layout, cut)
        if position > 0:
            train.append(Piece(path, 0, position))
        if position < scan["end"]:
            val.append(Piece(path, position, scan["end"], begins=begins))
        cut -= scan["characters"]
    if val_fraction and not val and (position := _last_document(train[-1].path, layout)):
        digest.update(b"the last document is for validation\n")
        last = train.pop()
        train.append(replace(last, stop=position))
        val.append(replace(last, start=position))
    inputs = tuple(Input(str(path), scan["stored"], scan["digest"]) for path, scan in zip(paths, scans, strict=True))
    size = sum(scan["bytes"] for scan in scans)
    return Corpus(name, tuple(train), tuple(val), digest.hexdigest(), inputs, size, layout)


def _walk(path: Path, layout: Layout) -> dict:
    """Scan a file: `stored` bytes on disk and their XXH3-128 `digest`; the `bytes` (UTF-8) and `characters` of its text, and `end`,
    the position behind its last block (as `blocks` counts positions). Errors anywhere in it are raised here, before the split, so
    the first faulty place in the file is named, whichever part a tokenizer reads first."""
    digest, stored = xxhash.xxh3_128(), 0
    with reading(path), open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            stored += len(chunk)
    size = characters = end = 0
    for block in blocks(path, layout):
        size += len(block.text.encode())
        characters += len(block.text)
        end = max(end, block.end)
    return {"stored": stored, "digest": digest.hexdigest(), "bytes": size, "characters": characters, "end": end}


def _last_document(path: Path, layout: Layout) -> int:
    """Position where the last non-empty document of a file begins; 0 if that is its first."""
    position = last = 0
    for block in blocks(path, layout):
        last = position if block.begins and block.text else last
        position = max(position, block.end)
    return last


def _place_of_character(path: Path, layout: Layout, character: int) -> tuple[int, bool]:
    """The position at which to cut a file whose character number `character` (from 0) begins the validation text, and whether a
    document begins there: at the character itself in plain text, else where the next document begins."""
    position = 0
    for block in blocks(path, layout):
        if is_whole(path, layout) and character < len(block.text):
            position = block.end - len(block.text[character:].encode())
            return position, position == 0
        if character <= 0 and block.begins and block.text:
            break
        position = max(position, block.end)
        character -= len(block.text)
    return position, True
