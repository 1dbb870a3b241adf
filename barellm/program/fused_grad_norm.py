"""Fusing the gradient norm into weight-gradient kernels: squares are summed where gradients are stored.

An optimizer step reads each gradient twice: for the norm, and to change the weight. The first read is spared where the kernel that
stores a gradient adds up the squares of what it stores. A step may have several micro-batches: each of them overwrites the sums,
and those of the last one are those of the gradient that the optimizer step finds."""

from collections.abc import Callable, Mapping
from copy import copy

from barellm.program.builder import Program, Store
from barellm.program.ops.base import Op, Tensor
from barellm.program.ops.gemm.block_squares import BlockSquares
from barellm.program.ops.optim.optimizer import SumSquares

SquareSums = dict[Tensor, Tensor]  # gradient -> the sums of its squares, which outlive a run


def fuse_grad_norm(programs: Mapping[str, Program], takes: Callable[[Op], bool]) -> tuple[Mapping[str, Program], SquareSums]:
    """Replace `SumSquares` of gradients by `BlockSquares` behind the ops that store them, which backends fuse into the GEMM.
    Returns the programs and the kept sums. Done for matrices with one writer per program, accepted by `takes`, and not written by a
    program that computes the norm (their value would not be final)."""
    writers: dict[Tensor, list[tuple[str, Op]]] = {}  # gradient -> (program, op) of each op that writes it
    wanted: dict[Tensor, set[str]] = {}  # gradient -> the programs that sum its squares
    for name, p in programs.items():
        for op in p.ops:
            for base in {t.base for t in op.outputs.values() if t.base.role == "gradient"}:
                writers.setdefault(base, []).append((name, op))
            if isinstance(op, SumSquares):
                wanted.setdefault(op.x, set()).add(name)
    kept: SquareSums = {}
    for x, readers in wanted.items():
        found = writers.get(x, [])
        names = {name for name, _ in found}
        final = len(names) == len(found) > 0 and names.isdisjoint(readers)
        if final and len(x.shape) == 2 and all(x in op.outputs.values() and takes(op) for _, op in found):
            ((shape, dtype),) = BlockSquares({"x": x}, {}).infer(x).values()
            kept[x] = programs[found[0][0]].store.get(f"{x.name}.squares", shape, dtype, "cache")
    return ({name: _with_fused_sums(p, kept) for name, p in programs.items()} if kept else programs), kept


def recompute_square_sums(store: Store, kept: SquareSums, compute: str) -> Program:
    """The program that finds the sums of gradients as they are in memory."""
    p = Program(store, compute=compute)
    for x, sums in kept.items():
        p.apply(BlockSquares, into={"partials": (sums, "store")}, x=x)
    return p


def _with_fused_sums(p: Program, kept: SquareSums) -> Program:
    """A copy of the program in which `BlockSquares` follow the stores of `kept` gradients and replace their `SumSquares`."""
    made = copy(p)
    made.ops = []
    instead: dict[Tensor, Tensor] = {}  # partial sums of an op that is left out -> those that are kept
    for op in p.ops:
        if isinstance(op, SumSquares) and op.x in kept:
            instead[op.partials] = kept[op.x]
            continue
        if not instead.keys().isdisjoint(op.inputs.values()):
            op = copy(op)
            op.inputs = {name: instead.get(t, t) for name, t in op.inputs.items()}
        made.ops.append(op)
        for t in op.outputs.values():
            if t in kept:
                with made.segment(op.segment):
                    made.apply(BlockSquares, into={"partials": (kept[t], "store")}, x=t)
    return made
