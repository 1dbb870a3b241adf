"""Ids that index rows: what a run may be given. A kernel that reads row 10^8 of a table ends the process, so inputs are checked
where they are written, on the host: one pass over integers, microseconds for a batch."""

from collections.abc import Iterable

import numpy as np

from barellm.program.builder import Program


def index_limits(programs: Iterable[Program]) -> dict[str, tuple[int, int]]:
    """Least and most of each input that ops read as indices, by name: what all of them can take."""
    found: dict[str, tuple[int, int]] = {}
    for op in (op for p in programs for op in p.ops):
        for operand, (least, most) in op.index_limits().items():
            t = op.inputs.get(operand)
            if t is not None and t.role == "input":
                low, high = found.get(t.name, (least, most))
                found[t.name] = max(low, least), min(high, most)
    return found


def check_indices(name: str, array: np.ndarray, limits: tuple[int, int]) -> None:
    """Raise a ValueError, in one line, for an id that is out of range."""
    least, most = limits
    if array.size == 0 or (array.min() >= least and array.max() <= most):
        return
    at = np.unravel_index(np.argmax((array < least) | (array > most)), array.shape)
    place = ", ".join(str(int(i)) for i in at)
    raise ValueError(f"{name}[{place}] is {array[at]}, expected an id from {least} to {most}")
