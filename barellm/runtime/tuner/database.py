"""The tuning database: what was measured to be the fastest way to do a piece of work on this machine, kept between processes.

One JSON file for each version of the code that was tuned: {"version": ..., "entries": {key: entry}}. A key names the work and
the machine in words, so the entries of another processor that shares the folder are simply never asked for. What an entry says
is the backend's matter. Only speed may depend on it: bits do not, so a database can be lost, copied or edited at any time."""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from barellm.errors import shown
from barellm.jsontext import loads

Entry = dict[str, Any]


def requested() -> bool:
    """Whether choices come from the database: `BARELLM_TUNING=0` gives the defaults."""
    return os.environ.get("BARELLM_TUNING", "1") != "0"


class Database:
    """The entries of one version. Read from disk once; what other processes add later is not seen."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder, self.version = folder, version
        self.path = folder / f"{version}.json"
        self._entries: dict[str, Entry] | None = None
        self._warned: set[str] = set()

    @property
    def entries(self) -> dict[str, Entry]:
        if self._entries is None:
            self._entries = self._read()
        return self._entries

    @classmethod
    @cache
    def opened(cls, folder: Path, version: str) -> "Database":
        """One object a process."""
        return cls(folder, version)

    def decoded(self, key: str, entry: Entry | None, decode: Callable[[Entry], Any]) -> Any:
        """What `decode` makes of an entry; None where there is none, or where it is a ValueError, which is reported once."""
        try:
            return None if entry is None else decode(entry)
        except ValueError as error:
            return self.ignore(f"{self.path}, {key!r}" if key in self.entries else key, str(error))

    def ignore(self, what: str, why: str) -> None:
        """Say once that a part of the database is not used, and why."""
        if what not in self._warned:
            self._warned.add(what)
            print(f"barellm: warning: tuning ignored: {what}: {why}", file=sys.stderr)

    def _read(self) -> dict[str, Entry]:
        """The usable entries of the file; a damaged file, or one of another code version, is reported to `ignore` and is empty."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self.ignore(str(self.path), f"cannot be read ({error})")
            return {}
        try:
            found = loads(text)
        except ValueError as error:
            self.ignore(str(self.path), f"not JSON ({error}); `barellm tune` writes it anew")
            return {}
        entries = found.get("entries") if isinstance(found, dict) else None
        if not isinstance(entries, dict) or found.get("version") != self.version:
            self.ignore(str(self.path), f"expected the entries of version {self.version}")
            return {}
        return {key: entry for key, entry in entries.items() if self._usable(key, entry)}

    def _usable(self, key: str, entry: Any) -> bool:
        if not isinstance(entry, dict):
            self.ignore(f"{self.path}, {shown(key)}", f"expected an object, found {shown(entry)}")
        return isinstance(entry, dict)

    def change(self, new: dict[str, Entry | None]) -> None:
        """Add or replace entries (None: remove) under a lock, so other processes' entries stay; the file is replaced atomically.
        OSError if the folder cannot be written."""
        with self._alone():
            self._entries = self._read()
            for key, entry in new.items():
                if entry is None:
                    self._entries.pop(key, None)
                else:
                    self._entries[key] = entry
            temporary = self.folder / f".{self.version}.{os.getpid()}.tmp"
            text = json.dumps({"version": self.version, "entries": self._entries}, indent=1, sort_keys=True)
            try:
                temporary.write_text(text + "\n")
                os.replace(temporary, self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Processes that write take turns. A lock that the file system does not know costs at worst an entry."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def clear(folder: Path) -> int:
    """Delete the entries of every version, and return how many files were removed."""
    files = list(folder.glob("*.json"))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
