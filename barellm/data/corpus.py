"""Text on this machine, cut into a training and a validation part: Python's own library, or files of text and records."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from barellm.data.reading import Block, Layout, blocks, documents, is_whole, reading_of
from barellm.data.shards import remembered
from barellm.data.unpacking import CHUNK
from barellm.errors import UserError

# Tests, other people's packages, and tables that programs wrote (character maps, the help texts in pydoc_data).
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Piece:
    """The part [start, stop) of a file, in the unit of `Block.end`. `begins` says whether a document begins here (and not in the
    other part of the split)."""

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
        """The blocks of a piece, or those from `start` on, where a document begins or goes on."""
        if start < 0:
            start, begins = piece.start, piece.begins
        return blocks(piece.path, self.layout, start=start, stop=piece.stop, begins=begins)

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Called with pieces that nobody reads again."""

    def texts(self, pieces: Iterable[Piece]) -> Iterator[str]:
        for piece in pieces:
            for block in self.blocks(piece):
                yield block.text

    def documents(self, pieces: Iterable[Piece]) -> list[str]:
        """The texts that are whole in these pieces, whatever blocks they are read in."""
        return [text for piece in pieces for text in documents(self.blocks(piece))]


def stdlib_corpus(val_fraction: float, *, root: Path | None = None) -> Corpus:
    """The source of the running Python's standard library, a file a document, whole files in either part.

    Files are taken for validation in the order of a hash of their names until they hold `val_fraction` of the bytes,
    so a Python with a few other files has nearly the same split. A file with an earlier one's content is left out."""
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
        inputs=tuple(Input(name, size, digest) for name, (digest, size) in files.items()),
        bytes=sum(size for _, size in files.values()),
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


def text_corpus(
    paths: Iterable[Path],
    val_fraction: float,
    *,
    name: str,
    layout: Layout = Layout(),  # noqa: B008
    reported: Callable[[int, int], None] = lambda done, total: None,
) -> Corpus:
    """Files in the given order: of all characters the last `val_fraction` are for validation, as in nanoGPT, from the first
    document on that begins there, or where none does the last document; a file of plain text without separators is cut at the
    character. 0: all is for training.
    `told` hears how many bytes of how many were looked through."""
    paths = list(paths)
    total, done, found = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        about = f"{layout!r}{reading_of(path, layout)}"
        found.append(remembered(path, lambda path=path: _walk(path, layout), about=about))
        done += found[-1]["stored"]
        reported(done, total)
    characters = sum(one["characters"] for one in found)
    if characters == 0:
        raise UserError(f"{name} is empty, expected text")
    cut = int(characters * (1 - val_fraction))
    train, val = [], []
    digest = xxhash.xxh3_128(f"{cut} {asdict(layout)}\n".encode())
    for path, one in zip(paths, found, strict=True):
        digest.update(f"{one['digest']} {path.suffixes}{reading_of(path, layout)}\n".encode())
        if cut >= one["characters"]:
            place, begins = one["end"], True
        elif cut <= 0:
            place, begins = 0, True
        else:
            place, begins = _place_of_character(path, layout, cut)
        if place > 0:
            train.append(Piece(path, 0, place))
        if place < one["end"]:
            val.append(Piece(path, place, one["end"], begins=begins))
        cut -= one["characters"]
    if val_fraction and not val and (place := _last_document(train[-1].path, layout)):
        digest.update(b"the last document is for validation\n")
        last = train.pop()
        train.append(replace(last, stop=place))
        val.append(replace(last, start=place))
    inputs = tuple(Input(str(path), one["stored"], one["digest"]) for path, one in zip(paths, found, strict=True))
    size = sum(one["bytes"] for one in found)
    return Corpus(name, tuple(train), tuple(val), digest.hexdigest(), inputs, size, layout)


def _walk(path: Path, layout: Layout) -> dict:
    """Sizes and digest of a file, in one pass. Whatever is wrong in it is found here, before the text is cut: then it is the first
    wrong place that is named, whichever part a tokenizer reads first."""
    digest, stored = xxhash.xxh3_128(), 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                stored += len(chunk)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    size = characters = end = 0
    for block in blocks(path, layout):
        size += len(block.text.encode())
        characters += len(block.text)
        end = max(end, block.end)
    return {"stored": stored, "digest": digest.hexdigest(), "bytes": size, "characters": characters, "end": end}


def _last_document(path: Path, layout: Layout) -> int:
    """Where the last document with text begins; 0 if it is the first of its file, too."""
    place = last = 0
    for block in blocks(path, layout):
        last = place if block.begins and block.text else last
        place = max(place, block.end)
    return last


def _place_of_character(path: Path, layout: Layout, character: int) -> tuple[int, bool]:
    """Where a file is cut that the character at `character` is in, counted from 0, and whether a document begins there: at the
    character itself, or where the next document begins."""
    place = 0
    for block in blocks(path, layout):
        if is_whole(path, layout) and character < len(block.text):
            place = block.end - len(block.text[character:].encode())
            return place, place == 0
        if character <= 0 and block.begins and block.text:
            break
        place = max(place, block.end)
        character -= len(block.text)
    return place, True
