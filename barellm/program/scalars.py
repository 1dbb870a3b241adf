"""Run-time scalars: 8 bytes each, in a block that every kernel can read. Changing one recompiles nothing.

The rows are the layout of the block, which compiled code knows: they are appended to, never moved."""

import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MOST = 64  # rows that a block has room for
NBYTES = 8 * MOST


@dataclass(frozen=True)
class Scalar:
    """A row of the block. `default` is the value in a run that does not give one, so that nothing of an earlier run, such as the
    position of a decoding, reaches into the next. If it is None, the scalar keeps its value."""

    name: str
    kind: Literal["i64", "fp64"]
    says: str
    default: int | None
    index: int  # of its 8 bytes in the block

    @property
    def offset(self) -> int:
        return 8 * self.index


SCALARS: dict[str, Scalar] = {}
_declaring = threading.Lock()  # two threads that build programs must not give one row to two names
# A child that was forked while another thread held the lock would wait for ever.
os.register_at_fork(before=_declaring.acquire, after_in_parent=_declaring.release, after_in_child=_declaring.release)


def declare(name: str, kind: Literal["i64", "fp64"] = "i64", says: str = "a size", default: int | None = None) -> None:
    """Append a row; one that is there stays. Dims declare their names themselves."""
    with _declaring:
        if name not in SCALARS:
            if len(SCALARS) == MOST:
                raise ValueError(f"{name} would be run-time scalar number {MOST + 1}, there is room for {MOST}")
            SCALARS[name] = Scalar(name, kind, says, default, len(SCALARS))


declare("batch", says="sequences in this micro-batch")
declare("seq", says="tokens of each")
declare("pos", says="position of the first token: 0 but in decoding", default=0)
declare("accumulate", says="1: gradients are added to what is there", default=0)
declare("step", says="optimizer steps, from 1")
declare("seed", says="seed of all random bits", default=0)
declare("sample", says="global index of the first sample, for counter-based random bits", default=0)
declare("lr", "fp64", "learning rate of the step; of AdamW, where Muon has another")
declare("inv_targets", "fp64", "1 / valid targets of the whole batch")
declare("momentum", "fp64", "momentum of Muon, which has a schedule")
declare("mtp_0", "fp64", "weight of the loss of the next token", default=1)
declare("mtp_1", "fp64", "weight of the loss of the token after it", default=0)
declare("mtp_2", "fp64", "weight of the loss of the third token", default=0)
declare("last", says="1: the last micro-batch of a step, after which gradients are whole", default=1)
declare("muon_lr", "fp64", "learning rate of Muon")

BUILT_IN = len(SCALARS)


def defaults() -> dict[str, int]:
    return {s.name: s.default for s in SCALARS.values() if s.default is not None}


def layout(constants: Any) -> str:
    """The places of those scalars in the block that were declared at run time and that a kernel's `constants` name. Compiled code
    that knows them fits only processes that declared them in the same places."""
    if isinstance(constants, str):
        row = SCALARS.get(constants)
        return f" {constants}@{row.index}" if row is not None and row.index >= BUILT_IN else ""
    return "".join(map(layout, constants)) if isinstance(constants, tuple) else ""


def check_names(program: str, programs: Collection[str], values: Mapping[str, Any]) -> None:
    """Raise a ValueError if a run names a program or a scalar that does not exist."""
    if program not in programs:
        raise ValueError(f"no program is named {program!r}, there are {', '.join(programs)}")
    if not values.keys() <= SCALARS.keys():
        raise ValueError(f"unknown scalars {sorted(values.keys() - SCALARS.keys())}, expected some of {list(SCALARS)}")
