"""metrics.jsonl: one JSON object a line, appended and flushed; resumed without a step appearing twice."""

import json
import os
from pathlib import Path
from typing import Any

from barellm.checkpoint import storage
from barellm.errors import UserError
from barellm.jsontext import loads


def read(path: Path) -> list[dict[str, Any]]:
    """All complete rows; a line truncated by a kill ends the list. UserError for a row without kind or step."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                row = loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(row, dict):
                break
            if not isinstance(row.get("kind"), str) or type(row.get("step", 0 if row["kind"] == "result" else "")) is not int:
                raise UserError(f"{path}, line {len(rows) + 1} has no kind and step: no run wrote it")
            rows.append(row)
    return rows


def truncate(path: Path, *, step: int) -> list[dict[str, Any]]:
    """Drop the rows after the checkpoint of `step`: keep training rows up to it, and evaluations and samples before it (those at
    `step` come after the save and are repeated). Returns the rows kept."""
    rows = read(path)
    kept = [
        row
        for row in rows
        if "step" in row and (row["step"] < step or (row["step"] == step and row["kind"] in ("train", "exponent_stats", "ranges")))
    ]
    storage.replace_file(path, b"".join(_line(row) for row in kept))
    return kept


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


class Metrics:
    """Appends rows. A full disk does not stop the training: rows wait in memory until they can be written, and
    `problem` holds the last error. `rows` are all rows of the run. Without a path they are written nowhere."""

    def __init__(self, path: Path | None, *, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = list(rows or [])
        self.problem: OSError | None = None
        self._path = path or Path(os.devnull)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = os.fstat(self._fd).st_size
        self._waiting = b""

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; if the disk is full it waits in memory for the next attempt."""
        self.rows.append(row)
        self._waiting += _line(row)
        try:
            while self._waiting:
                done = os.pwrite(self._fd, self._waiting, self._end)
                self._end += done
                self._waiting = self._waiting[done:]
            self.problem = None
        except OSError as error:
            self.problem = storage.named(error, self._path)

    def close(self) -> None:
        os.close(self._fd)
