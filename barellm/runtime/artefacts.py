"""Compiled code on disk: files that are whole or count as missing, and a folder that stays small.

Files may be written, read and deleted by many processes at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from barellm.caches import temporary_cache, user_cache
from barellm.errors import UserError

IMPORTED = time.time()
RECENT_S, PRUNE_EVERY_S = 86400, 3600


def add_sources(h: hashlib._Hash, paths: Iterable[Path]) -> None:
    """Make a digest depend on what is in these files. Where one was edited after this process began, its code here is not the
    file's: the digest is one that no other process has."""
    now = time.time()
    for path in paths:
        h.update(path.read_bytes())
        if IMPORTED < path.stat().st_mtime <= now:
            h.update(os.urandom(16))


def cache_folder(kind: str) -> Path:
    """The folder of caches: `BARELLM_CACHE`, else one in the user's cache folder, else one in the system's temporary folder."""
    base = os.environ.get("BARELLM_CACHE") or user_cache() or temporary_cache()
    if base is None:
        raise UserError("there is no folder for compiled kernels: set BARELLM_CACHE to one that can be written")
    return Path(base) / kind


def load(path: Path) -> bytes | None:
    """The bytes that `keep` put there."""
    try:
        code = path.read_bytes()
        if code[-32:] != hashlib.sha256(code[:-32]).digest():  # a torn or edited file is compiled again
            return None
        if path.stat().st_mtime < time.time() - RECENT_S:
            os.utime(path)  # `prune` takes what was not used for longest
        return code[:-32]
    except OSError:
        return None


def keep(path: Path, code: bytes) -> None:
    """Put an artefact into the cache."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(code + hashlib.sha256(code).digest())
        os.replace(temporary, path)
    except OSError:  # a cache that cannot be written only costs time
        with contextlib.suppress(OSError):
            temporary.unlink()


def prune(folder: Path, limit: int) -> None:
    """Once in a while, delete the artefacts that were used longest ago, until the rest takes three quarters of `limit` bytes. A
    process that wants one of them compiles it again. A process that has one open can still read it."""
    now = time.time()
    stamp = folder / ".pruned"
    try:
        if stamp.exists() and 0 <= now - stamp.stat().st_mtime < PRUNE_EVERY_S:
            return
        stamp.touch()  # first: other processes need not do the same now
        found = []
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        total = sum(size for _, size, _ in found)
        left = total if total <= limit else limit * 3 // 4
        for used, size, path in sorted(found):
            torn = path.endswith(".tmp") and used < now - PRUNE_EVERY_S  # its process was killed
            if total > left or torn:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
    except OSError:
        pass
