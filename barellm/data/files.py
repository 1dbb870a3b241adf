"""Which files a source names: a file, a pattern, or a folder with all the text in it, and what is passed over there."""

import codecs
import glob
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from barellm.data import cache
from barellm.data.reading import Layout, each_record, format_of
from barellm.data.unpacking import chunks
from barellm.errors import UserError

DATA = (".txt", ".jsonl", ".ndjson", ".parquet")  # what a file of text beside shards would be called
SNIFFED = 1 << 16  # bytes that tell whether a file is text
SHOWN = 2  # names of skipped files


class Skipped:
    """Files of a folder that are not read, by the reason."""

    def __init__(self) -> None:
        self.reasons: dict[str, list[str]] = {}

    def add(self, reason: str, path: Path) -> None:
        self.reasons.setdefault(reason, []).append(str(path))

    def __str__(self) -> str:
        """One line for the user, with up to SHOWN names for each reason; empty if nothing was skipped."""
        reasons = []
        for reason, paths in sorted(self.reasons.items()):
            more = ", ..." if len(paths) > SHOWN else ""
            reasons.append(f"{len(paths)} {reason} ({', '.join(sorted(paths)[:SHOWN])}{more})")
        return f"skipped {'; '.join(reasons)}" if reasons else ""


def find_files(sources: Iterable[str], layout: Layout, skipped: Skipped) -> list[Path]:
    """List the files of all sources: in the sources' order, those of a pattern or folder sorted, each file once. UserError for a
    source that does not exist, has no text or cannot be read: silently training on a part of the text would give another model."""
    files: dict[str, Path] = {}  # by their absolute paths
    for source in sources:
        for path in named(source):
            if path.is_dir():
                inside = files_of(path, layout, skipped)
                if not inside:
                    raise UserError(f"folder {path} has no text and no .bin shards: {str(skipped) or 'it is empty'}")
            else:
                inside = [path]
            for one in inside:
                files.setdefault(os.path.abspath(one), one)
    return list(files.values())


def named(source: str) -> list[Path]:
    """The paths that a source (a path or a glob pattern) names."""
    if glob.has_magic(source) and not Path(source).expanduser().exists():
        found = sorted(glob.glob(os.path.expanduser(source), recursive=True))
        if not found:
            raise UserError(f"no file matches {source}")
        return [existing(path) for path in found]
    return [existing(source)]


def existing(source: str) -> Path:
    """The path that a source names; UserError if nothing is there or it cannot be read."""
    if not source:
        raise UserError("no text: pass --data FILE_OR_FOLDER (or 'stdlib' for Python's own source)")
    path = Path(source).expanduser()
    with cache.reading(source):
        if not path.exists():
            raise UserError(f"no such file or folder: {source} (expected text, .bin shards, a folder, or 'stdlib')")
        if path.is_dir():
            next(path.iterdir(), None)
        elif not path.is_file():
            raise UserError(f"{source} is neither a file nor a folder")
        elif path.stat().st_size == 0:
            raise UserError(f"{source} is empty, expected text or tokens")
    return path


def files_of(folder: Path, layout: Layout, skipped: Skipped) -> list[Path]:
    """All text files of a folder at any depth, sorted; the others, and hidden or linked folders, are added to `skipped`."""
    found = []
    for inside, folders, names in os.walk(folder, onerror=_refuse):
        for name in list(folders):
            path = Path(inside, name)
            reason = "hidden" if name.startswith(".") else "links to folders" if path.is_symlink() else ""
            if reason:
                folders.remove(name)  # os.walk does not go there
                skipped.add(reason, path)
        for name in names:
            path = Path(inside, name)
            if reason := _reason(path, layout):
                skipped.add(reason, path)
            else:
                found.append(path)
    return sorted(found)


def _reason(path: Path, layout: Layout) -> str:
    """Why a folder's file is not read, in words for the user; "" if it is read."""
    if path.name.startswith("."):
        return "hidden"
    try:
        found = path.stat()
    except FileNotFoundError:
        return "links to nothing"
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        return "no files"
    if found.st_size == 0:
        return "empty"
    kind = format_of(path, layout)
    if kind in ("json", "csv", "tsv"):  # a folder of a program's source has settings and tables, which are no texts
        return "" if _has_field(path, layout) else f"without records that have a field {layout.field!r}"
    return "" if kind != "text" or is_text(path) else "no UTF-8 text"


def _has_field(path: Path, layout: Layout) -> bool:
    """Whether the first record of a file has the field with the text."""
    try:
        _, first = next(each_record(path), ("", None))
    except UserError:
        return False
    return isinstance(first, dict) and isinstance(first.get(layout.field, 0), str | None)


def is_text(path: Path) -> bool:
    """Whether the beginning of a file is UTF-8 without a zero byte."""
    with cache.reading(path):
        head = next(chunks(path), b"")[:SNIFFED]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def has_text(folder: Path) -> bool:
    """Whether a folder holds a file that is called a text."""
    found = (suffix for _, _, names in os.walk(folder, onerror=_refuse) for name in names for suffix in Path(name).suffixes)
    return any(suffix in DATA for suffix in found)


def _refuse(error: OSError) -> None:
    with cache.reading(error.filename):
        raise error
