"""The folder of a run: made, locked, and tried for writing before anything slow begins."""

import contextlib
import os
from itertools import count
from pathlib import Path
from types import TracebackType

from barellm.checkpoint import storage
from barellm.errors import UserError


class RunFolder:
    """While entered, this process alone writes to `path`. A new run wants a folder that is not there, empty, or with nothing but
    what a killed process left of an unfinished save; a resumed one a folder with checkpoints. `resume` None is like False, for
    commands that cannot resume. With `numbered` a path that is taken becomes path-2, path-3 and so on: names made of the time are
    equal where several runs start in one second. A folder that was made here and stayed empty is removed again."""

    def __init__(self, path: Path, *, resume: bool | None, numbered: bool = False) -> None:
        self.path = path
        self.resume = resume
        self.numbered = numbered
        self._made: list[Path] = []
        self._lock = -1

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def __enter__(self) -> "RunFolder":
        """Create or check the folder, lock it, remove temporaries, and probe that it can be written. After an error nothing that
        was made here stays. UserError for a finished run without `resume`, and for a file in the folder's place."""
        missing_parents = [folder for folder in self.path.parents if not folder.exists()]
        if self.numbered:
            self.path = made_new(self.path)
        elif self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file, expected a folder")
        if not self.resume and self.path.is_dir():
            self._need_nothing_finished()
        created = [self.path] * (self.numbered or not self.path.exists())
        self.path.mkdir(parents=True, exist_ok=True)
        self._made = [*created, *missing_parents]
        try:
            self._take_lock()
            storage.remove_temporaries(self.path)
            probe = self.path / f"{storage.TEMPORARY}probe"
            storage.write_file(probe, b"")
            storage.remove(probe)
            if self.checkpoints.is_dir() and not self.checkpoints.is_symlink():
                storage.remove_temporaries(self.checkpoints)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _need_nothing_finished(self) -> None:
        """UserError where the folder holds a run, a checkpoint or somebody's files. What a kill or a full disk left of an
        unfinished save is nobody's: it is removed once the lock is taken, and the same command works."""
        finished = [entry.name for entry in _finished(self.path) if entry != self.checkpoints]
        if self.checkpoints.is_dir():
            finished += [f"checkpoints/{entry.name}" for entry in _finished(self.checkpoints)]
        if finished:
            hint = "name another folder" if self.resume is None else "resume it with --resume, or name another folder"
            raise UserError(f"--out {self.path} is not empty (it has {min(finished)}): {hint}")

    def _take_lock(self) -> None:
        import fcntl

        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another barellm process is writing to {self.path}") from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self.checkpoints.rmdir()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()
        if self._lock >= 0:
            os.close(self._lock)

    def need_space(self, nbytes: int) -> None:
        """Raise a UserError unless a checkpoint of this size fits on the disk now."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise UserError(f"a checkpoint needs {nbytes} bytes in {self.path}, free are {free}")


def _finished(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(storage.TEMPORARY)]


def made_new(path: Path) -> Path:
    """The first of path, path-2, path-3 and so on that nobody had: a folder that this call made."""
    for number in count(1):
        chosen = path.with_name(f"{path.name}-{number}") if number > 1 else path
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(parents=True)
            return chosen
    raise AssertionError("count() ends")
