"""What ranks do together. Tensors travel by a call out of the step, on one thread; what has arrived is added by a kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.loops import sweep_result
from barellm.program.dtypes import PLANES
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, plane


def add_ranks(k: KernelBuilder, y, own, others, n, *, rank, count) -> None:
    """y (n) = the gradients of all ranks, in their order; those of the other ranks are others (count - 1, n)."""

    def vector(i, mask):
        terms = [others.load(n * j + i, mask) for j in range(count - 1)]
        terms.insert(rank, own.load(i, mask))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    sweep_result(k, n, y, vector)


@lowering("add_ranks", floats="fp32 bf16", spans="own y")
def lower_add_ranks(op: Op, c: Lowering) -> None:
    operands = {"y": op.y, "own": op.own, "others": op.others, "n": op.own.size}
    c.call(add_ranks, operands, {"rank": op.rank, "count": op.others.shape[0] + 1}, writes="y")


@lowering("exchange", floats="fp32 bf16", spans="*")
def lower_exchange(op: Op, c: Lowering) -> None:
    _transfer(op, c, lambda t: [part(t)])


@lowering("gather", floats=f"fp32 bf16 {PLANES}", spans="*")
def lower_gather(op: Op, c: Lowering) -> None:
    _transfer(op, c, lambda t: [plane(t, number)[0] for number in op.planes(t)] or [part(t)])


def _transfer(op: Op, c: Lowering, regions: Callable[[Tensor], list[Region]]) -> None:
    """A transfer between ranks of the bytes of the arena; `regions` names those of a tensor that travel."""
    named = {name: regions(t) for name, t in (op.inputs | op.outputs).items()}
    reads = [region for name in op.inputs for region in named[name]]
    writes = [region for name in op.outputs for region in named[name]]

    def prepare(arrays: list[np.ndarray]):
        left = iter(arrays)
        found = {name: [next(left) for _ in places] for name, places in named.items()}
        return op.ranks.prepared(op.departing(found), op.arriving(found))

    c.extern(prepare, reads, writes)
