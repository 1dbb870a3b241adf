"""The rows of metrics.jsonl in other programs too: TensorBoard, Weights & Biases, trackio.

They get the same numbers under the names KIND/KEY ("train/loss", "eval/val_nats") at the row's step. Each has a thread that talks
to it, so that a slow one does not slow the training, and one that fails is dropped with a line. Their packages are extras."""

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from barellm.checkpoint import checkpoint, storage
from barellm.errors import UserError

END_S = 30.0  # the end of a run waits so long for what is still to be sent
MOST_WAITING = 100_000  # rows; a tracker that hangs must not fill the memory
IDENTITY = "tracking.json"  # in the run's folder: its id where trackers keep runs of many folders


@dataclass(frozen=True)
class Subject:
    """The tracked run. It continues behind `step` (0: a new run); `id` is the same in all its sessions."""

    folder: Path
    project: str
    id: str
    step: int
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(Protocol):
    """A program that shows runs, opened for a Subject by `Tracker(subject)`."""

    def log(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


def chosen(track: str) -> list[str]:
    """The names in the value of `train.track`. UserError for one whose package is not there."""
    names = [name.strip() for name in track.split(",") if name.strip()]
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"train.track names {name}, which is not installed: pip install {name}")
    return names


def subject(folder: Path, *, project: str, step: int, config: Mapping[str, Any]) -> Subject:
    """The run in a folder, with the id that it got in its first session."""
    path = folder / IDENTITY
    if not path.exists():
        storage.replace_file(path, f'{{"id": "{uuid4().hex[:12]}"}}\n'.encode())
    found = checkpoint.read_json(path).get("id")
    if not isinstance(found, str) or not found:
        raise UserError(f"{path} has no id of the run, expected what barellm writes there: without the file it gets a new one")
    return Subject(folder, project, found, step, config)


def parts(row: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Gives the numbers and the texts of a row, by the names that trackers show. What is None is left out."""
    named = {f"{row['kind']}/{key}": value for key, value in row.items() if key not in ("kind", "step")}
    numbers = {name: float(value) for name, value in named.items() if isinstance(value, (int, float))}
    return numbers, {name: value for name, value in named.items() if isinstance(value, str)}


class Tracking:
    """The trackers of a run. `say` is told, in the main thread, of one that failed."""

    def __init__(self, names: Sequence[str], subject: Subject | None, *, say: Callable[[str], None]) -> None:
        self._say = say
        self._lines = [_Line(name, subject) for name in names] if subject else []

    def add(self, row: Mapping[str, Any]) -> None:
        for line in self._lines:
            line.put(row)
        self._report()

    def _report(self) -> None:
        for line in [line for line in self._lines if line.problem]:
            self._lines.remove(line)
            self._say(f"warning: {line.name} hears no more of this run: {line.problem}")

    def close(self) -> None:
        for line in self._lines:
            line.end()
        self._report()


class _Line:
    """One tracker with its thread. The thread is a daemon: a tracker that hangs does not keep the process alive."""

    def __init__(self, name: str, subject: Subject) -> None:
        self.name, self.problem = name, ""
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, args=(subject,), name=name, daemon=True)
        self._thread.start()

    def put(self, row: Mapping[str, Any]) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.problem = f"{MOST_WAITING:,} rows wait for it"

    def end(self) -> None:
        """Let it finish."""
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=END_S)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self.problem = f"it did not end within {END_S:g} s"

    def _run(self, subject: Subject) -> None:
        try:
            tracker: Tracker = import_module(f"barellm.training.tracking.{self.name}").Tracker(subject)
            while not self.problem and (row := self._rows.get()) is not None:  # one that was dropped may wake up again
                tracker.log(int(row["step"]), *parts(row))
            tracker.close()
        except Exception as error:  # whatever it is, the training goes on
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
