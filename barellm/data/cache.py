"""The place of prepared data, and how files get there whole or not at all."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from barellm.caches import temporary_cache, user_cache
from barellm.errors import UserError

STALE_SECONDS = 86400.0  # a temporary older than this was left by a killed process


def cache_folder(name: str) -> Path:
    """The folder `name` in the user's cache, made if needed.

    The cache is BARELLM_CACHE, else XDG_CACHE_HOME/barellm, else ~/.cache/barellm. Where that default cannot be written (no home,
    read-only disk) a folder in the system's temporary place serves; a BARELLM_CACHE that cannot be written is a UserError."""
    chosen = os.environ.get("BARELLM_CACHE")
    if chosen:
        folder = Path(chosen) / name
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise UserError(f"cannot write {folder} (from BARELLM_CACHE): permission denied")
        return folder
    for place in (user_cache, temporary_cache):
        with contextlib.suppress(OSError):
            if base := place():
                folder = base / name
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if os.access(folder, os.W_OK):
                    return folder
    raise UserError("no folder for cached data can be written: set BARELLM_CACHE to one that can")


@contextlib.contextmanager
def writing(path: object, doing: str = "write") -> Iterator[None]:
    """Turns a failing file system into one line: disk full, read-only, no permission."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {doing} {path}: {error.strerror or error}") from error


def reading(path: object) -> contextlib.AbstractContextManager[None]:
    """`writing` of what is read."""
    return writing(path, "read")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager: a binary file to write and seek in; renamed to `path` once complete and synced, removed on error."""
    temporary = _temporary(path)
    try:
        with writing(path), open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with writing(path):
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context manager: a folder to fill, renamed to `path` only when complete; removed on error.
    Raises FileExistsError if `path` exists by then and is not empty: another process was first."""
    temporary = _temporary(path)
    try:
        with writing(path):
            temporary.mkdir(parents=True)
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError as error:
            if path.is_dir():
                raise FileExistsError(f"{path} exists and is not empty") from error
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sweep(folder: Path) -> None:
    """Removes what killed processes left in `folder`."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
