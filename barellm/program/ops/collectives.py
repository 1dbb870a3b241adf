"""What the ranks of a run do together: ranks are processes that each hold a whole model and a share of its optimizer's state.

A gradient is summed where it is needed: every rank gets, for its own share, the gradients that the others have found
(`Exchange`, or `BeginExchange` and `EndExchange` where they travel while the backward pass goes on), and adds them to its own in
the order of the ranks (`AddRanks`), so that the sum's bits depend on nothing else.
After the update each share is given to all (`Gather`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from barellm.program.dtypes import FORMATS
from barellm.program.ops.base import Op, Spec, operand_bytes
from barellm.program.ops.optim.optimizer import CHUNK
from barellm.program.tensor import Tensor, describe

# The arrays that a tensor is: one, or one for each of its planes that travel.
Arrays = Mapping[str, Sequence[np.ndarray]]


class Transfer(Op):
    """Tensors travel between ranks. Input number i goes to the ranks `to[i]`. What one rank sends to another arrives in the
    order of the inputs, so the programs of all ranks name tensors in one order."""

    def departing(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        """What is sent, in its order, of the arrays that the inputs are."""
        to = zip(self.inputs, self.attrs["to"], strict=True)
        return [(rank, array) for name, ranks in to for rank in ranks for array in arrays[name]]

    def arriving(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        """Where what the others send belongs, in the order of each, in the arrays that the outputs are."""
        raise NotImplementedError(self.name)

    def reference(self, **arrays: Any) -> dict[str, np.ndarray]:
        kind = next(iter(arrays.values())).dtype if arrays else np.dtype(np.float64)
        found = {name: np.empty(t.size, kind) for name, t in self.outputs.items()}
        sent = {name: [np.ascontiguousarray(array)] for name, array in arrays.items()}
        self.attrs["ranks"].prepared(self.departing(sent), self.arriving({name: [a] for name, a in found.items()}))()
        return found

    def expect(self, inputs: Mapping[str, Tensor]) -> None:
        if len(self.attrs["to"]) != len(inputs):
            raise ValueError(f"{self.name} is given {len(inputs)} tensors, expected {len(self.attrs['to'])}")

    def bytes(self) -> int:
        """Those that are sent, and those that arrive."""
        sent = [t for t, to in zip(self.inputs.values(), self.attrs["to"], strict=True) if to]
        return sum(t.nbytes for t in (*sent, *self.outputs.values()))


class Exchange(Transfer):
    """Each rank's part of a gradient goes to that rank: y_i (ranks - 1, n_i) has what the others have found for this rank's
    elements of tensor number i, by their ranks. `own[i]` is n_i, and `dtypes[i]` its dtype; all are fp32 where none is given."""

    name = "exchange"

    def infer(self, **inputs: Tensor) -> dict[str, Spec]:
        self.expect(inputs)
        own = self.attrs["own"]
        found = zip(own, self.attrs.get("dtypes", ("fp32",) * len(own)), strict=True)
        return {f"y{i}": ((self.ranks.count - 1, n), dtype) for i, (n, dtype) in enumerate(found)}

    def arriving(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        others = [rank for rank in range(self.ranks.count) if rank != self.ranks.rank]
        rows = [array.reshape(len(others), -1) for name in self.outputs for array in arrays[name]]
        return [(rank, row[i]) for row in rows for i, rank in enumerate(others)]


class BeginExchange(Exchange):
    """The same, begun in the last micro-batch of a step (the scalar `last`) as soon as these gradients are whole, and not waited
    for: `EndExchange` of the same `number` does that. y_i are caches. It stands behind the ops that find the gradients, and no op
    is fused another way because of it."""

    name = "begin_exchange"
    scalars = ("last",)
    observer: ClassVar[bool] = True

    def reference(self, *, last: int, **arrays: Any) -> dict[str, np.ndarray]:
        if last:
            return super().reference(**arrays)
        return {name: np.zeros(t.size) for name, t in self.outputs.items()}


class EndExchange(Op):
    """Waits until the exchange `number` is over. y_i is x_i, into which it has written meanwhile."""

    name = "end_exchange"

    def infer(self, **inputs: Tensor) -> dict[str, Spec]:
        return {name.replace("x", "y"): (t.shape, t.dtype) for name, t in inputs.items()}

    def reference(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        return {name.replace("x", "y"): array for name, array in arrays.items()}

    def bytes(self) -> int:
        """None: what arrives is counted where it begins to travel."""
        return 0


class Gather(Transfer):
    """Each rank's parts of some tensors go to all others, to the same places: output number i comes from rank `source[i]` and has
    the shape and dtype `specs[i]`. Of a parameter with two planes the one travels that products read, and both if the parameter is
    in `exact`: somebody reads it as it is."""

    name = "gather"

    @property
    def rounded(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(name for name, t in self.inputs.items() if self.planes(t) == [0])

    def planes(self, t: Tensor) -> list[int]:
        """The planes of a tensor that travel; none where it has no planes."""
        count = len(FORMATS[t.dtype].planes)
        return list(range(count if t.base in self.attrs["exact"] else min(1, count)))

    def infer(self, **inputs: Tensor) -> dict[str, Spec]:
        self.expect(inputs)
        return {f"y{i}": spec for i, spec in enumerate(self.attrs["specs"])}

    def arriving(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        source = zip(self.attrs["source"], self.outputs, strict=True)
        return [(rank, array) for rank, name in source for array in arrays[name]]

    def bytes(self) -> int:
        tensors = (*self.inputs.values(), *self.outputs.values())
        return sum(operand_bytes(t) if self.planes(t) == [0] else t.nbytes for t in tensors)


def _added(own: np.ndarray, others: np.ndarray, rank: int) -> np.ndarray:
    """The sum of all ranks' values in their order: `own` is of `rank`, the rows of `others` of the rest."""
    parts = np.insert(others, rank, own.reshape(-1), axis=0)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.reshape(own.shape)


class AddRanks(Op):
    """y = what all ranks have found, added in their order: `own` is this one's, and `others` (ranks - 1, n) has the rest."""

    name = "add_ranks"

    def infer(self, own: Tensor, others: Tensor) -> dict[str, Spec]:
        if len(others.shape) != 2 or others.shape[1] != own.size or not 0 <= self.attrs["rank"] <= others.shape[0]:
            raise ValueError(f"add_ranks expects others (ranks - 1, n): {describe(own=own, others=others)}")
        return {"y": (own.shape, own.dtype)}

    def reference(self, own, others):
        return {"y": _added(own, others, self.attrs["rank"])}

    def flops(self) -> int:
        return self.others.size


class SumShares(Transfer):
    """y_i = what all ranks have found for this rank's share own_i, added in their order, and p_i = the partial sums of squares of
    y_i (as `SumSquares`), for ranks that read each other's memory. The inputs that are no shares go to the ranks `to`, those that
    are to none. What all have for one rank is in one order: that of its shares. `meets`: whether the ranks meet before it and
    after it, where the op is one of several that do this for parts of the model; both, unless it says so."""

    name = "sum_shares"

    @property
    def meets(self) -> tuple[bool, bool]:
        return self.attrs.get("meets", (True, True))

    @property
    def shares(self) -> list[Tensor]:
        return [t for name, t in self.inputs.items() if name.startswith("own")]

    def infer(self, **inputs: Tensor) -> dict[str, Spec]:
        self.expect(inputs)
        shares = [t for name, t in inputs.items() if name.startswith("own")]
        sums: dict[str, Spec] = {f"y{i}": (t.shape, t.dtype) for i, t in enumerate(shares)}
        return sums | {f"p{i}": ((-(-t.size // CHUNK),), "fp32") for i, t in enumerate(shares)}

    def reference(self, **arrays: Any) -> dict[str, np.ndarray]:
        ranks, found = self.attrs["ranks"], {}
        owned = [array for name, array in arrays.items() if name.startswith("own")]
        others = [np.empty((ranks.count - 1, array.size), array.dtype) for array in owned]
        sources = [rank for rank in range(ranks.count) if rank != ranks.rank]
        arriving = [(rank, rows[i]) for rows in others for i, rank in enumerate(sources)]
        sent = {name: [np.ascontiguousarray(array)] for name, array in arrays.items()}
        ranks.prepared(self.departing(sent), arriving)()
        for i, (own, rows) in enumerate(zip(owned, others, strict=True)):
            total = _added(own, rows, ranks.rank)
            squares = np.add.reduceat(total.reshape(-1) ** 2, np.arange(0, total.size, CHUNK))
            found |= {f"y{i}": total, f"p{i}": squares}
        return found

    def flops(self) -> int:
        return sum((self.ranks.count + 1) * t.size for t in self.shares)

    def bytes(self) -> int:
        """What is read of all ranks, and what is written."""
        return sum((self.ranks.count + 1) * t.nbytes for t in self.shares)
