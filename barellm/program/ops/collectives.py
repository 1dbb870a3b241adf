"""Collectives among ranks: reduce-scatter of gradients, all-gather of updated weights (ZeRO-1). A rank is a process that holds the
whole model and a shard of the optimizer state.

With message passing a reduce-scatter is an all-to-all (`AllToAll`; `StartAllToAll` and `WaitAllToAll` where it overlaps the
backward pass), then a local sum in rank order (`SumOverRanks`), so that the bits of the sum depend on nothing else. Ranks that
read each other's memory do all of it in one op (`ReduceScatter`). After the update the shards are all-gathered (`AllGather`)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from barellm.program.dtypes import FORMATS
from barellm.program.ops.base import Op, Spec, Tensor, describe, operand_bytes
from barellm.program.ops.optim.optimizer import CHUNK

# By the operand's name the arrays that a tensor consists of: one, or one for each of its planes that travel.
Arrays = Mapping[str, Sequence[np.ndarray]]


class Transfer(Op):
    """Point-to-point messages between ranks. Input number i is sent to the ranks `to[i]`. Messages between two ranks arrive in the
    order of the inputs, so the programs of all ranks name tensors in one order."""

    def departing(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        """(destination rank, array) of each message in the order of sending; `arrays`: those of the inputs."""
        to = zip(self.inputs, self.attrs["to"], strict=True)
        return [(rank, array) for name, ranks in to for rank in ranks for array in arrays[name]]

    def arriving(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        """(source rank, array to receive into) of each message, those of one rank in its order; `arrays`: those of the outputs."""
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


class AllToAll(Transfer):
    """All-to-all: each rank gets its shard of a gradient from all others. y_i (ranks - 1, n_i) has what the others have found for
    this rank's elements of tensor number i, by their ranks. `own[i]` is n_i, and `dtypes[i]` its dtype (none given: fp32)."""

    name = "all_to_all"

    def infer(self, **inputs: Tensor) -> dict[str, Spec]:
        self.expect(inputs)
        own = self.attrs["own"]
        found = zip(own, self.attrs.get("dtypes", ("fp32",) * len(own)), strict=True)
        return {f"y{i}": ((self.ranks.count - 1, n), dtype) for i, (n, dtype) in enumerate(found)}

    def arriving(self, arrays: Arrays) -> list[tuple[int, np.ndarray]]:
        others = [rank for rank in range(self.ranks.count) if rank != self.ranks.rank]
        rows = [array.reshape(len(others), -1) for name in self.outputs for array in arrays[name]]
        return [(rank, row[i]) for row in rows for i, rank in enumerate(others)]


class StartAllToAll(AllToAll):
    """The nonblocking all-to-all, started in the last micro-batch of a step (the scalar `last`) as soon as these gradients are
    complete: `WaitAllToAll` of the same `number` waits for it. y_i are receive buffers. It stands behind the ops that find the
    gradients, and no op is fused another way because of it."""

    name = "start_all_to_all"
    scalars = ("last",)
    observer: ClassVar[bool] = True

    def reference(self, *, last: int, **arrays: Any) -> dict[str, np.ndarray]:
        if last:
            return super().reference(**arrays)
        return {name: np.zeros(t.size) for name, t in self.outputs.items()}


class WaitAllToAll(Op):
    """Waits until the all-to-all `number` has completed. y_i is x_i, into which it has written meanwhile."""

    name = "wait_all_to_all"

    def infer(self, **inputs: Tensor) -> dict[str, Spec]:
        return {name.replace("x", "y"): (t.shape, t.dtype) for name, t in inputs.items()}

    def reference(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        return {name.replace("x", "y"): array for name, array in arrays.items()}

    def bytes(self) -> int:
        """None: what arrives is counted where it begins to travel."""
        return 0


class AllGather(Transfer):
    """All-gather: each rank's shards of some tensors go to all others, to the same places: output number i comes from rank
    `source[i]` and has the shape and dtype `specs[i]`. Of a parameter with two planes the one travels that matmuls read, and both
    if the parameter is in `exact`: somebody reads it as it is."""

    name = "all_gather"

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
        return [(rank, array) for rank, name in zip(self.attrs["source"], self.outputs, strict=True) for array in arrays[name]]

    def bytes(self) -> int:
        return sum(operand_bytes(t) if self.planes(t) == [0] else t.nbytes for t in (*self.inputs.values(), *self.outputs.values()))


def _sum_in_rank_order(own: np.ndarray, others: np.ndarray, rank: int) -> np.ndarray:
    """The sum of all ranks' terms in the order of the ranks, so that its bits are equal on each: `own` is that of `rank`, the rows
    of `others` (ranks - 1, n) are those of the rest."""
    parts = np.insert(others, rank, own.reshape(-1), axis=0)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.reshape(own.shape)


class SumOverRanks(Op):
    """y = the sum over ranks, in rank order: `own` is this rank's term, and `others` (ranks - 1, n) has the rest."""

    name = "sum_over_ranks"
    flops_per_element = (1, "others")

    def infer(self, own: Tensor, others: Tensor) -> dict[str, Spec]:
        if len(others.shape) != 2 or others.shape[1] != own.size or not 0 <= self.attrs["rank"] <= others.shape[0]:
            raise ValueError(f"sum_over_ranks expects others (ranks - 1, n): {describe(own=own, others=others)}")
        return {"y": (own.shape, own.dtype)}

    def reference(self, own, others):
        return {"y": _sum_in_rank_order(own, others, self.attrs["rank"])}


class ReduceScatter(Transfer):
    """Reduce-scatter by reading the other ranks' memory: y_i = the sum over ranks, in rank order, of this rank's shard own_i, and
    p_i = the partial sums of squares of y_i (as `SumSquares`), for ranks that read each other's memory. Input number i is read by
    the ranks `to[i]`, an own_i by none; all ranks have what one of them reads in one order, that of its own_i. `meets`: whether
    there is a barrier before the op and one after it (default: both), where several ops do this for parts of the model."""

    name = "reduce_scatter"

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
        """Exchange messages with the other ranks, then sum in rank order; see the class's docstring for y_i and p_i."""
        ranks, outputs = self.attrs["ranks"], {}
        owned = [array for name, array in arrays.items() if name.startswith("own")]
        others = [np.empty((ranks.count - 1, array.size), array.dtype) for array in owned]
        sources = [rank for rank in range(ranks.count) if rank != ranks.rank]
        arriving = [(rank, rows[i]) for rows in others for i, rank in enumerate(sources)]
        sent = {name: [np.ascontiguousarray(array)] for name, array in arrays.items()}
        ranks.prepared(self.departing(sent), arriving)()
        for i, (own_shard, rows) in enumerate(zip(owned, others, strict=True)):
            total = _sum_in_rank_order(own_shard, rows, ranks.rank)
            squares = np.add.reduceat(total.reshape(-1) ** 2, np.arange(0, total.size, CHUNK))
            outputs |= {f"y{i}": total, f"p{i}": squares}
        return outputs

    def flops(self) -> int:
        return sum((self.ranks.count + 1) * t.size for t in self.shares)

    def bytes(self) -> int:
        """What is read of all ranks, and what is written."""
        return sum((self.ranks.count + 1) * t.nbytes for t in self.shares)
