"""Rows of tables about a step: seconds of its calls of kernels, summed by op and by kind of op. The same for every backend.

`calls_s` is program -> (calls, 2): seconds of each call's work, and of waiting behind it where there is any. A session has
`lowered` (the ops of a program after fusion) and `calls` (its calls in order, each with `spec` and `op`)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from barellm.program.grouping import GroupedOp
from barellm.program.ops.base import Op
from barellm.tools.plan.roofline import Ceiling, Mix, mix_of, primitives

Kind = tuple[str, str, str]  # program, name of the op, shape: what a row of a table is about


def spans(session: Any, program: str) -> list[tuple[Op, int, int]]:
    """Each op of a program with its kernel calls as a range [first, stop) of the call table; the ranges cover the table."""
    calls, ranges, stop = session.calls[program], [], 0
    for op in session.lowered[program].ops:
        first = stop
        while stop < len(calls) and calls[stop].op is op:
            stop += 1
        ranges.append((op, first, stop))
    assert stop == len(calls), "calls out of their op's order"
    return ranges


def op_seconds(session: Any, calls_s: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """program -> (ops, 2): the sums of each op's calls."""
    found = {}
    for program, calls in calls_s.items():
        found[program] = np.array([calls[first:stop].sum(axis=0) for _, first, stop in spans(session, program)])
    return found


def by_kind(
    session: Any, seconds: dict[str, np.ndarray], ceiling: Ceiling, shares: Mapping[str, float],
    more: Callable[[str, Op], Any] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per kind of op (program, name, shape) with sums over its ops, for an average step: seconds `s`, of them `wait_s` in
    barriers, roofline `bound_s`, FLOPs, bytes. `seconds` is program -> (ops, 2), work and wait; `shares` how often a program runs
    per step; `more(program, op)` adds keys to a row when it is created."""
    rows: dict[Kind, dict[str, Any]] = {}
    for program, values in seconds.items():
        for op, (work, wait) in zip(session.lowered[program].ops, values, strict=True):
            key = kind(program, op)
            if key not in rows:
                rows[key] = {"program": program, "op": op.name, "shape": key[2], "family": family(op), "count": 0}
                rows[key] |= dict.fromkeys(("s", "wait_s", "bound_s", "flops", "bytes"), 0.0)
                rows[key] |= more(program, op) if more else {}
            row = rows[key]
            row["count"] += 1
            row["s"] += float(work + wait)
            row["wait_s"] += float(wait)
            row["bound_s"] += shares[program] * ceiling.seconds(op)
            row["flops"] += shares[program] * op.flops()
            row["bytes"] += shares[program] * op.bytes()
    for row in rows.values():
        # A GPU needs no time for a transfer that only begins.
        row["percent_of_bound"] = 100 * row["bound_s"] / row["s"] if row["s"] else 0.0
    return list(rows.values())


def by_kernel(session: Any, calls_s: dict[str, np.ndarray]) -> dict[Kind, dict[str, dict[str, Any]]]:
    """For kinds of ops that take several kernels: symbol -> calls, seconds, wait seconds. `calls_s` is program -> (calls, 2)."""
    kernels: dict[Kind, dict[str, dict[str, Any]]] = {}
    for program, seconds in calls_s.items():
        calls = session.calls[program]
        for op, first, stop in spans(session, program):
            for i in range(first, stop):
                rows = kernels.setdefault(kind(program, op), {})
                row = rows.setdefault(calls[i].spec.symbol(), {"calls": 0, "s": 0.0, "wait_s": 0.0})
                row["calls"] += 1
                row["s"] += float(seconds[i].sum())
                row["wait_s"] += float(seconds[i, 1])
    return {key: rows for key, rows in kernels.items() if len(rows) > 1}


def kind(program: str, op: Op) -> Kind:
    return program, op.name, shape(op)


def mixes(session: Any, programs: Iterable[str]) -> set[Mix]:
    """The mixes of traffic that a step's ops have: what their rooflines take a bandwidth of."""
    return {mix_of(op) for program in programs for op in session.lowered[program].ops}


def shape(op: Op) -> str:
    """The shape that characterizes an op's size: a matmul's weight, else the largest operand; of a group, its number of ops."""
    if isinstance(op, GroupedOp):
        return f"all {len(op.sequence)}"
    operands = [*op.inputs.items(), *op.outputs.items()]
    if not operands:
        return "none"  # an exchange of which nothing is this rank's
    weights = [t for name, t in operands if name in ("weight", "dweight")]
    t = weights[0] if weights else max((t for _, t in operands), key=lambda t: t.size)
    return "x".join(str(int(n)) for n in t.shape)


def place(op: Op) -> str:
    """The place of an op in the model: the parameter that it belongs to, else the layer, else nothing; for a group nothing."""
    if isinstance(op, GroupedOp):
        return ""
    tensors = [*op.inputs.values(), *op.outputs.values()]
    owners = [t.name for t in tensors if t.role == "parameter"]
    owners += [t.name.removesuffix(".grad") for t in tensors if t.role == "gradient"]
    return owners[0] if owners else op.segment or ""


def family(op: Op) -> str:
    """The file of program/ops/ that the op's main part is from: "matmul", "attention", ..."""
    parts = primitives(op)
    return type(next((p for p in parts if p.product), parts[0])).__module__.rpartition(".")[2]
