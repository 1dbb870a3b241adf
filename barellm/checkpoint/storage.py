"""Files that appear whole or not at all. Calls that change the disk go through `system`: tests fail each."""

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from barellm.data.mapping import check
from barellm.errors import UserError

system: Any = os

# Files of so many bytes go past the system's cache, from a buffer whose address and length are multiples of ALIGN. The cache would
# take as much memory as the file, and filling it took four times as long as the disk itself.
DIRECT_FROM, BUFFER, ALIGN = 64 << 20, 8 << 20, 4096
TEMPORARY = ".tmp-"  # a folder of this prefix is rubbish: an unfinished save, or an unfinished removal


class NewFile:
    """A new file: hashed while it is written, on disk when closed. `size` reserves the space first, so that a full
    disk shows before anything is written."""

    def __init__(self, path: Path, *, size: int = 0) -> None:
        """Create the file and reserve `size` bytes; large files bypass the page cache (O_DIRECT) if the file system can."""
        from xxhash import xxh3_64

        self.path = path
        self.bytes = 0
        self._hash = xxh3_64()
        self._buffer: mmap.mmap | None = None  # where writes go past the cache: what is not written yet
        self._filled = 0
        self._fd = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        if size >= DIRECT_FROM and self._direct(True):
            self._buffer = mmap.mmap(-1, BUFFER)
        try:
            if size and hasattr(os, "posix_fallocate"):
                try:
                    system.posix_fallocate(self._fd, 0, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
        except OSError as error:
            self.abandon()
            with contextlib.suppress(OSError):  # no room for it: nothing of it stays
                system.unlink(path)
            raise named(error, path) from None

    def write(self, data: Any) -> None:
        """Append the bytes of any contiguous buffer, and hash them. OSError that names the file, such as for a full disk."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.bytes += len(view)
        try:
            if self._buffer is None:
                self._write(view)
                return
            while view:
                part = view[: BUFFER - self._filled]
                self._buffer[self._filled : self._filled + len(part)] = part
                self._filled, view = self._filled + len(part), view[len(part) :]
                if self._filled == BUFFER:
                    self._write_buffer()
        except OSError as error:
            raise named(error, self.path) from None

    def _write_buffer(self) -> None:
        if self._buffer is not None:
            if self._filled % ALIGN:  # the end of the file
                self._direct(False)
            with memoryview(self._buffer) as whole, whole[: self._filled] as filled:
                self._write(filled)
            self._filled = 0

    def _write(self, view: memoryview) -> None:
        """Write all bytes; falls back from O_DIRECT if the file system refuses the size."""
        while view:
            try:
                done = system.write(self._fd, view)
            except OSError as error:
                # Not every file system that takes the flag can do it, and none can after a part of an odd length.
                if error.errno != errno.EINVAL or not self._direct(False):
                    raise
                continue
            view = view[done:]

    def _direct(self, wanted: bool) -> bool:
        """Switch O_DIRECT on or off; returns whether it changed."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if bool(flags & flag) == wanted or not flag:
            return False
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags ^ flag)
        except OSError:
            return False
        return True

    def close(self) -> dict[str, Any]:
        """Sync and close; returns the file's manifest entry."""
        try:
            self._write_buffer()
            sync(self._fd)
        except OSError as error:
            raise named(error, self.path) from None
        finally:
            self.abandon()
        return {"bytes": self.bytes, "xxh3_64": self._hash.hexdigest()}

    def abandon(self) -> None:
        if self._fd >= 0:
            system.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()


def sync(fd: int) -> None:
    """Until it is on the disk: macOS's fsync may leave it in the drive's own cache."""
    with contextlib.suppress(OSError):  # not every file system knows the stronger one
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    system.fsync(fd)


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name: calls on descriptors do not know it."""
    return type(error)(error.errno, error.strerror, str(path))


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    with NewFile(path) as file:
        file.write(data)
        return file.close()


def sync_folder(path: Path) -> None:
    fd = system.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        system.close(fd)


def _temporary(target: Path) -> Path:
    """A free temporary name beside `target`. Leftovers of earlier processes there are removed first; those that cannot be (busy),
    or lie behind a symlink and so are not ours, are skipped."""
    for number in count(1):
        candidate = target.with_name(f"{TEMPORARY}{target.name}{f'-{number}' if number > 1 else ''}")
        if not target.parent.is_symlink():
            with contextlib.suppress(OSError):
                remove(candidate)
        if not os.path.lexists(candidate):
            return candidate
    raise AssertionError("count() ends")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Context manager: a temporary folder to fill, synced and renamed to `target` at the end; removed on error."""
    temporary = _temporary(target)
    system.mkdir(temporary)
    try:
        yield temporary
        sync_folder(temporary)
        check()  # what was copied into it
        system.rename(temporary, target)
        sync_folder(target.parent)
    except (OSError, UserError, KeyboardInterrupt):
        # This error is the one to report, whatever the removal says; the next save removes what is left.
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


@contextlib.contextmanager
def new_file(target: Path, *, size: int) -> Iterator[NewFile]:
    """A file of `size` bytes to write, which becomes `target` at the end, on disk and whole."""
    with new_path(target) as temporary, NewFile(temporary, size=size) as file:
        yield file
        file.close()


@contextlib.contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Context manager: a temporary path for a file that the caller writes and syncs, renamed to `target` at the end."""
    temporary = _temporary(target)
    try:
        yield temporary
        check()
        system.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            system.unlink(temporary)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file: it has the new content or the old one, also after a power cut. A link itself is replaced."""
    temporary = _temporary(path)
    write_file(temporary, data)
    system.replace(temporary, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove what stands at `path`, a folder with all that is in it. Of a link the link alone: it points to somebody's file."""
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            remove(entry)
        system.rmdir(path)
    elif os.path.lexists(path):
        system.unlink(path)


def set_aside(path: Path) -> Path:
    """Give a folder or a link a temporary name: a removal that is cut short never looks like a checkpoint."""
    doomed = _temporary(path)
    system.rename(path, doomed)
    return doomed


def remove_checkpoint(path: Path, warn: Callable[[str], object]) -> None:
    """Remove an old checkpoint as far as the system lets us. The rest goes to `warn`, in a line; the next save tries again."""
    try:
        remove(path if path.name.startswith(TEMPORARY) else set_aside(path))
    except OSError as error:
        warn(f"warning: {path} is not removed: {error.filename or path}: {error.strerror}")


def remove_temporaries(folder: Path, warn: Callable[[str], object] = lambda line: None) -> None:
    """Remove what unfinished saves and removals left in `folder`."""
    for entry in sorted(folder.glob(f"{TEMPORARY}*")):
        remove_checkpoint(entry, warn)
