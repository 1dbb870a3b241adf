"""Horizontal fusion: ops of one kind that do not depend on each other become one, which a backend may do in one launch.

`program.fusion` joins different ops along the dataflow; a group joins equal ones: the updates of all parameters (multi-tensor)."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from barellm.program.ops.base import Op, Tensor

Alike = Callable[[Any], Hashable]  # op -> a key that is equal for all ops of one group


class GroupedOp(Op):
    """Several ops of one name, in any order. Its meaning is that of its `sequence`.

    Operands are called "i.name", i counting the ops. Attributes are those that all have with one value."""

    def __init__(self, sequence: Sequence[Op]) -> None:
        """Operands, modes and `rounded` of all ops under their numbered names; of `attrs` those that are equal in all."""
        super().__init__({}, {})
        self.name = sequence[0].name
        self.sequence = list(sequence)
        self.segment = sequence[0].segment
        self.scalars = sequence[0].scalars
        for i, op in enumerate(sequence):
            self.inputs |= {f"{i}.{name}": t for name, t in op.inputs.items()}
            self.outputs |= {f"{i}.{name}": t for name, t in op.outputs.items()}
            self.modes |= {f"{i}.{name}": mode for name, mode in op.modes.items()}
        self.rounded = tuple(f"{i}.{name}" for i, op in enumerate(sequence) for name in op.rounded)
        self.attrs = {k: v for k, v in sequence[0].attrs.items() if all(op.attrs.get(k) == v for op in sequence)}

    def reference(self, **arrays: Any) -> dict[str, np.ndarray]:
        """The outputs where there is nothing to add to."""
        return self.run(arrays, arrays, {})

    def run(self, arrays, scalars, current):
        found = {}
        for i, op in enumerate(self.sequence):
            given = {name: arrays[f"{i}.{name}"] for name in op.inputs}
            before = {name: current[f"{i}.{name}"] for name in op.outputs if f"{i}.{name}" in current}
            found |= {f"{i}.{name}": result for name, result in op.run(given, scalars, before).items()}
        return found

    def flops(self) -> int:
        return sum(op.flops() for op in self.sequence)


def members(op: Op) -> list[Op]:
    """The ops of a group, or an op that is no group itself."""
    return op.sequence if isinstance(op, GroupedOp) else [op]


def group(ops: Sequence[Op], table: Mapping[str, Alike]) -> list[Op]:
    """Join ops of one name and one key (`table`: name -> key function) to a `GroupedOp`. Only within a run of consecutive, mutually
    independent ops of the table, whose order is free."""
    result: list[Op] = []
    run: list[Op] = []
    touched: set[Tensor] = set()  # read or written by the run's ops
    written: set[Tensor] = set()

    def flush() -> None:
        """Append the run's groups and start a new run."""
        groups: dict[Hashable, list[Op]] = {}
        for op in run:
            groups.setdefault((op.name, table[op.name](op)), []).append(op)
        result.extend(GroupedOp(alike) if len(alike) > 1 else alike[0] for alike in groups.values())
        run.clear()
        touched.clear()
        written.clear()

    for op in ops:
        reads, writes = ({t.base for t in tensors.values()} for tensors in (op.inputs, op.outputs))
        # An op that writes what the run has touched, or reads what it wrote, must come after the run: it ends here.
        if op.name not in table or writes & touched or reads & written:
            flush()
        if op.name in table:
            run.append(op)
            touched.update(reads | writes)
            written.update(writes)
        else:
            result.append(op)
    flush()
    return result
