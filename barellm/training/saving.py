"""The checkpoints of a run: written by a thread while steps go on, and the last one before the run ends."""

import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from barellm.checkpoint import checkpoint, storage
from barellm.checkpoint.shards import ShardedState
from barellm.checkpoint.snapshot import Snapshot, pieces_of
from barellm.program.ranks import Ranks
from barellm.runtime.session import Session
from barellm.training.console import Console, duration
from barellm.training.stopping import Stopping

FULL_DISK_S, FULL_DISK_PAUSE_S = 3600.0, 10.0  # the last save waits for room so long, and tries so often


@dataclass(frozen=True)
class Point:
    """The part of a checkpoint that no session has. With `gradients`, the next step adds to those of the last."""

    step: int
    meta: Mapping[str, Any]
    keep: int
    gradients: bool


class Saving:
    """`written`: the persistent tensors that each program changes; of a program that is not in it, all. `shared`: whether a second
    thread may read the session while a program runs; where it may not, a save begins with a copy of everything. `changing` is held
    while an update makes one step's weights the next one's, and while a save begins: a thread that holds it may save itself."""

    def __init__(
        self, folder: Path, session: Session, *, written: Mapping[str, frozenset[str]], shared: bool, threads: int,
        tokenizer: Mapping[str, bytes], console: Console, stop: Stopping, saved: Path | None = None,
    ) -> None:  # fmt: skip
        """Parameters as in the class's docstring; `saved`: the checkpoint that the run resumed from."""
        self.folder, self.session, self.saved = folder, session, saved
        self.changing = threading.Lock()
        self.last_began = False
        self._written, self._shared, self._threads = written, shared, threads
        self._tokenizer, self._console, self._stop = tokenizer, console, stop
        self.writer: _Writer | None = None
        self._left: dict[str, bool] = {}  # warnings about what could not be removed, and whether they were shown

    def _names(self, point: Point) -> frozenset[str]:
        roles = {"parameter", "state"} | ({"gradient"} if point.gradients else set())
        return frozenset(name for role in roles for name in checkpoint.of_role(self.session, role))

    def still(self, program: str, point: Point) -> bool:
        """Whether what a checkpoint holds can be read, and does not change, while this program runs."""
        return self._shared and not self._names(point) & self._written.get(program, self._names(point))

    def begin(self, point: Point) -> None:
        """Start a background save. Only what the next update changes is copied, unless a thread may not read the session."""
        self.wait()
        begin = time.perf_counter()
        names = self._names(point)
        snapshot = Snapshot(self.session, pieces_of(self.session.tensors, names), threads=self._threads)
        if not self._shared:
            snapshot.keep(names)
        self.writer = _Writer(point, snapshot, lambda: self._write(snapshot, point))
        self.writer.stalled = time.perf_counter() - begin
        self.writer.start()

    def before(self, program: str) -> None:
        """To be called before a program runs: what it changes is copied first, if it still has to be saved."""
        if (writer := self.writer) is not None:  # another thread may end the save meanwhile
            begin = time.perf_counter()
            writer.snapshot.keep(self._written.get(program, self._names(writer.point)))
            writer.stalled += time.perf_counter() - begin

    def report(self) -> None:
        """Report a finished background save. A failed one costs only itself: older checkpoints stay, and the training continues."""
        writer = self.writer
        if writer is None or writer.is_alive():
            return
        writer.join()
        self.writer = None
        self._show_left()
        if isinstance(writer.error, OSError):
            self._console.line(self._warning(writer.point, writer.error))
        elif writer.error is not None:
            raise writer.error
        else:
            self.saved = writer.path
            waited = f", of which the training waited {writer.stalled:.2f} s" * (writer.seconds >= 0.1)
            self._console.line(f"saved {self.saved} in {writer.seconds:.1f} s{waited}")

    def _show_left(self) -> None:
        """Say what old checkpoints could not be removed, each once: the next save tries again."""
        for line in [line for line, shown in self._left.items() if not shown]:
            self._left[line] = True
            self._console.line(line)

    @staticmethod
    def _warning(point: Point, error: OSError) -> str:
        return f"warning: no checkpoint of step {point.step}: {error.strerror}: {error.filename}"

    def wait(self) -> None:
        """Until no save is under way."""
        if (writer := self.writer) is not None:
            writer.join()
            self.report()

    close = wait

    def thin(self, point: Point) -> None:
        """Remove what the run's last save should have removed: it was killed behind the checkpoint that it wrote."""
        checkpoint.thin(self.folder, step=point.step, keep=point.keep, warn=self._not_removed)
        self._show_left()

    def _not_removed(self, line: str) -> None:
        self._left.setdefault(line, False)

    def best(self, point: Point) -> None:
        """Replace the checkpoint in the run's folder "best"; a full disk costs only this."""
        self.wait()
        folder = self.folder.parent / "best"
        try:
            saved = self._write(self.session, replace(point, gradients=False), folder=folder)
        except OSError as error:
            self._console.line(self._warning(point, error))
            return
        for path in checkpoint.steps(folder):
            if path != saved:  # of before a resume it may be a later one
                storage.remove_checkpoint(path, self._not_removed)

    def now(self, point: Point) -> None:
        """Save, and return when it is done. OSError where it failed."""
        self.wait()
        self.saved = self._write(self.session, point)
        self._show_left()
        self._console.line(f"saved {self.saved}")

    def now_or_warn(self, point: Point) -> bool:
        """Whether it was saved. If not, a line says why."""
        try:
            self.now(point)
        except OSError as error:
            self._console.line(self._warning(point, error))
            return False
        return True

    def last(self, point: Point) -> None:
        """Save the last checkpoint. Nothing else holds these weights, so if the disk is full, wait for room. Ctrl-C gives up."""
        with self.changing:
            self.last_began = True
            self._last(point)

    def _last(self, point: Point) -> None:
        """Save the last step; while the disk is full, retry every FULL_DISK_PAUSE_S up to FULL_DISK_S, or until Ctrl-C."""
        self.wait()
        begin, stopped = time.monotonic(), bool(self._stop)
        while True:
            try:
                return self.now(point)
            except OSError as error:
                waited = time.monotonic() - begin
                gave_up = bool(self._stop) and not stopped
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or gave_up or waited > FULL_DISK_S:
                    raise
                megabytes = checkpoint.checkpoint_bytes(self.session) / 1e6
                found = f"{error.filename}: {error.strerror}. The last checkpoint needs {megabytes:,.0f} MB"
                plan = f"it is tried again every {FULL_DISK_PAUSE_S:g} s, {duration(FULL_DISK_S - waited)} more"
                self._console.line(f"warning: {found}; {plan}. Ctrl-C gives up")
            again = time.monotonic() + FULL_DISK_PAUSE_S
            while time.monotonic() < again and bool(self._stop) == stopped:
                time.sleep(0.05)  # a signal does not end a sleep

    def _write(self, source: checkpoint.Source, point: Point, *, folder: Path | None = None) -> Path:
        return checkpoint.save(
            folder or self.folder, source, step=point.step, meta=point.meta, tokenizer=self._tokenizer, keep=point.keep,
            gradients=point.gradients, warn=self._not_removed,
        )  # fmt: skip


class SharedSaving(Saving):
    """The same of a run with several ranks, which each hold a share of what is saved: rank 0 writes, and the others give it their
    shares. On the way a thread of each rank does that, where all have memory for copies of what the next update changes; else the
    training waits, since ranks that wait for memory at different times would look lost. `shares` is the session."""

    def __init__(self, folder: Path, shards: ShardedState, *, ranks: Ranks, **how: Any) -> None:
        super().__init__(folder, shards, **how)  # pyright: ignore[reportArgumentType]
        self._shards, self._ranks = shards, ranks

    def begin(self, point: Point) -> None:
        """As `Saving.begin`, with all ranks: if one has no memory for the copies, all save in the foreground."""
        self.wait()
        begin = time.perf_counter()
        shards, snapshot = self._shards.snapshot(self._names(point), threads=self._threads)
        if not all(self._ranks.gather(snapshot.fits(), no_timeout=True)):
            self.now_or_warn(point)
            return
        self.writer = _Writer(point, snapshot, lambda: self._given(shards, lambda: self._write(shards, point)))
        self.writer.stalled = time.perf_counter() - begin
        self.writer.start()

    def _given(self, shards: ShardedState, write: Callable[[], Any]) -> Any:
        """What `write` gives on rank 0, while the others serve it."""
        if self._ranks.rank:
            return shards.serve()
        with shards.served():
            return write()

    def now_or_warn(self, point: Point) -> bool:
        return self._given(self._shards, lambda: super(SharedSaving, self).now_or_warn(point)) is not False

    def best(self, point: Point) -> None:
        self.wait()
        self._given(self._shards, lambda: super(SharedSaving, self).best(point))

    def last(self, point: Point) -> None:
        self.wait()
        self._given(self._shards, lambda: super(SharedSaving, self).last(point))


class _Writer(threading.Thread):
    """One save. `stalled` are the seconds in which the training waited for it."""

    def __init__(self, point: Point, snapshot: Snapshot, write: Callable[[], Path | None]) -> None:
        super().__init__(name="checkpoint")
        self.point, self.snapshot, self._write = point, snapshot, write
        self.path: Path | None = None
        self.error: BaseException | None = None
        self.seconds = self.stalled = 0.0

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            self.path = self._write()
        except BaseException as error:
            self.error = error
        finally:
            self.snapshot.end()
            self.seconds = time.perf_counter() - begin
