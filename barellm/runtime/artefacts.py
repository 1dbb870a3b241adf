"""Compiled code on disk: files that are whole or count as missing, and a folder that stays small.

Files may be written, read and deleted by many processes at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
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
    folder = Path(base) / kind
    if problem := untrusted(folder):
        raise UserError(f"{folder} {problem}, and code in it would run: mend that, or set BARELLM_CACHE to another folder")
    return folder


def untrusted(folder: Path) -> str | None:
    """Why code in a folder must not be loaded: another user could have written it; None if it is safe. A group with the user's own
    number counts as private, as most systems give each user one."""
    try:
        info, user = folder.stat(), os.getuid()
    except OSError:  # not there yet
        return None
    if info.st_uid not in (user, 0):
        return f"belongs to user {info.st_uid}, expected {user} (this process) or 0"
    if info.st_mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {stat.S_IMODE(info.st_mode):o})"
    if info.st_mode & stat.S_IWGRP and info.st_gid not in (user, 0):
        return f"can be written by group {info.st_gid} (mode {stat.S_IMODE(info.st_mode):o})"
    return None


def load(path: Path) -> bytes | None:
    """The bytes that `keep` stored under this name; None if missing or damaged."""
    try:
        code = path.read_bytes()
        if code[-32:] != _digest(path, code[:-32]):  # a torn, edited or renamed file is compiled again
            return None
        if path.stat().st_mtime < time.time() - RECENT_S:
            os.utime(path)  # `prune` takes what was not used for longest
        return code[:-32]
    except OSError:
        return None


def _digest(path: Path, code: bytes) -> bytes:
    """Of the code and of its key, which is the file's name: the code of one kernel never runs as another's."""
    return hashlib.sha256(path.name.encode() + b"\0" + code).digest()


def keep(path: Path, code: bytes) -> None:
    """Store an artefact in the cache, with a digest; failures are ignored."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # not the group's, whatever the umask
        temporary.write_bytes(code + _digest(path, code))
        os.replace(temporary, path)
    except OSError:  # a cache that cannot be written only costs time
        with contextlib.suppress(OSError):
            temporary.unlink()


def prune(folder: Path, limit: int) -> None:
    """At most once per PRUNE_EVERY_S, if the folder exceeds `limit` bytes, delete the least recently used artefacts down to three
    quarters of it. They are recompiled on demand; a process that has one open can still read it."""
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
        target = total if total <= limit else limit * 3 // 4
        for used, size, path in sorted(found):
            torn = path.endswith(".tmp") and used < now - PRUNE_EVERY_S  # its process was killed
            if total > target or torn:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
    except OSError:
        pass
