"""The order in which processes exit, and their statuses.

A launcher that is told to end all ranks once it misses one then names any of them. So the order is found here, by files that stand
for processes (pidfd, Linux 5.3): they are ready in the order in which the processes end."""

import fcntl
import os
import selectors
import struct
from pathlib import Path

# ioctl PIDFD_GET_INFO with struct pidfd_info of linux/pidfd.h, of which the first and the last field of 64 bytes count.
INFO_BYTES, EXIT = 64, 1 << 3
GET_INFO = 3 << 30 | INFO_BYTES << 16 | 0xFF << 8 | 11


class ExitOrder:
    """`order`: the processes that have ended so far, of those that are followed."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._files: dict[int, int] = {}  # by process
        self._selector = selectors.DefaultSelector()
        self._asleep, self._awake = os.pipe()
        self._selector.register(self._asleep, selectors.EVENT_READ)

    def follow(self, process: int) -> None:
        """Watch for a process's exit; one that is gone counts as exited now. Does nothing if the system has no pidfd."""
        if process in self._files or process in self.order or not hasattr(os, "pidfd_open"):
            return
        try:
            file = self._files[process] = os.pidfd_open(process)
            self._selector.register(file, selectors.EVENT_READ, process)
        except ProcessLookupError:
            self.order.append(process)
        except OSError:
            pass

    def wait(self, seconds: float) -> None:
        """Until one ends, `wake` is called, or the time is over."""
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self.order.append(key.data)
                self._selector.unregister(key.fileobj)

    def wake(self) -> None:
        """End the `wait` of another thread, and all later ones at once."""
        os.write(self._awake, b"\0")

    def status(self, process: int) -> int | None:
        """Wait status of a followed process, as in `os.waitpid`; None if it runs, or was reaped (Linux before 6.15)."""
        answer = bytearray(INFO_BYTES)
        struct.pack_into("Q", answer, 0, EXIT)
        try:
            fcntl.ioctl(self._files[process], GET_INFO, answer)
        except (KeyError, OSError):
            return _status_of_zombie(process)
        (reported,), (status,) = struct.unpack_from("Q", answer), struct.unpack_from("i", answer, INFO_BYTES - 4)
        return status if reported & EXIT else _status_of_zombie(process)

    def close(self) -> None:
        self._selector.close()
        for file in (*self._files.values(), self._asleep, self._awake):
            os.close(file)


def _status_of_zombie(process: int) -> int | None:
    """The status that nobody has asked for yet."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] == "Z" else None
