"""Loading the error-feedback state of compressed gradients (PowerSGD, Vogels et al. 2019), of which each rank has its own.

A checkpoint has the errors of all ranks one below the other. With the same number of ranks each gets its own back, bitwise. Another
number of ranks gets sums: what rank r of V had goes to rank r mod W. Their sum stays the same but for rounding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from barellm.checkpoint import tensorfile
from barellm.program.ranks import Ranks
from barellm.program.tensor import Tensor
from barellm.runtime.session import Session


class ErrorFeedbackState:
    """A session as a checkpoint's reader has it: `stored`, which has all of a run's tensors, but for those whose names end with
    `suffix`. They have as many blocks of rows as ranks wrote the file, and go to `session`, which is this rank's."""

    def __init__(self, stored: Any, session: Session, ranks: Ranks, file: Path, *, suffix: str) -> None:
        self._stored, self._session, self._ranks = stored, session, ranks
        self.tensors: dict[str, Tensor] = dict(stored.tensors)
        self.blocks = ranks.count
        entries, _ = tensorfile.read_header(file)
        self._kept = {name: t for name, t in session.tensors.items() if t.role == "state" and name.endswith(suffix)}
        for name, t in self._kept.items():
            self.blocks = _blocks(entries.get(name, {}), t) or ranks.count
            self.tensors[name] = Tensor(name, (self.blocks * int(t.shape[0]), *t.shape[1:]), t.dtype, t.role)

    def write_rows(self, name: str, lo: int, values: np.ndarray) -> None:
        """Write rows of a tensor; of error feedback only this rank's blocks, summed with those of ranks that no longer exist."""
        if name not in self._kept:
            self._stored.write_rows(name, lo, values)
            return
        rows, done = int(self._kept[name].shape[0]), 0
        while done < len(values):
            block, offset = divmod(lo + done, rows)
            piece = values[done : done + rows - offset]
            done += len(piece)
            if block % self._ranks.count != self._ranks.rank:
                continue
            if block >= self._ranks.count:
                piece = self._session.read_rows(name, offset, offset + len(piece)) + piece
            self._session.write_rows(name, offset, piece)


def _blocks(entry: Mapping[str, Any], t: Tensor) -> int:
    """How many tensors like `t` an entry of a file has, one below the other; 0 where it has something else."""
    shape = tuple(entry.get("shape", ()))
    fits = len(shape) == len(t.shape) and shape[1:] == tuple(t.shape[1:]) and shape[0] % int(t.shape[0]) == 0
    return shape[0] // int(t.shape[0]) if fits else 0
