"""Equal ops as one: what may go together, and that it means the same."""

from __future__ import annotations

import numpy as np

from barellm.config import OptimConfig
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.grouping import GroupedOp, group, members

SHAPES = {"w": (5, 3), "b": (7,), "u": (2, 4), "c": (1,)}


def update() -> Program:
    p = Program(Store())
    for name, shape in SHAPES.items():
        p.parameter(name, shape, std=1.0)
    adamw(p, OptimConfig())
    return p


def test_a_group_means_its_ops():
    p, r = update(), np.random.default_rng(3)
    found = group(p.ops, {"sum_squares": lambda op: 0, "adamw": lambda op: len(op.param.shape)})
    assert [(op.name, len(members(op))) for op in found] == [("sum_squares", 4), ("clip_scale", 1), ("adamw", 2), ("adamw", 2)]
    matrices = found[2]
    assert isinstance(matrices, GroupedOp) and matrices.weight_decay == 0.1
    arrays = {name: r.random(t.shape) for name, t in matrices.inputs.items()}
    scalars = {"lr": 0.1, "step": 3, "seed": 0}
    got = matrices.run(arrays, scalars, {})
    for i, op in enumerate(matrices.sequence):
        want = op.run({name: arrays[f"{i}.{name}"] for name in op.inputs}, scalars, {})
        for name, value in want.items():
            assert np.array_equal(got[f"{i}.{name}"], value)
            assert matrices.outputs[f"{i}.{name}"] is op.outputs[name]
    (every,) = (op for op in group(p.ops, {"adamw": lambda op: 0}) if op.name == "adamw")
    assert every.beta1 == 0.9 and "weight_decay" not in every.attrs  # of which vectors have none


def test_a_group_costs_what_its_ops_cost():
    p = update()
    every = group(p.ops, {"adamw": lambda op: 0})[-1]
    apart = [op for op in p.ops if op.name == "adamw"]
    assert every.flops() == sum(op.flops() for op in apart)
    clip = 8  # bytes that all of them read
    assert every.bytes() == sum(op.bytes() - clip for op in apart) + clip


def casts(p: Program, *pairs: tuple[str, str]) -> None:
    """An op from tensor to tensor for each pair."""
    for source, to in pairs:
        into = {"y": (p.store.get(to, (4,), "fp32", "state"), "store")}
        p.apply(ops.Cast, into=into, x=p.store.get(source, (4,), "fp32", "state"), dtype="fp32")


def sizes(*pairs: tuple[str, str]) -> list[int]:
    p = Program(Store())
    casts(p, *pairs)
    return [len(members(op)) for op in group(p.ops, {"cast": lambda op: 0})]


def test_what_depends_on_a_group_is_not_in_it():
    assert sizes(("a", "b"), ("a", "c"), ("d", "e")) == [3]
    assert sizes(("a", "b"), ("b", "c")) == [1, 1]  # reads what is written
    assert sizes(("a", "b"), ("c", "a")) == [1, 1]  # writes what is read
    assert sizes(("a", "b"), ("c", "b")) == [1, 1]  # writes what is written
    assert sizes(("a", "b"), ("c", "d"), ("d", "e"), ("c", "f")) == [2, 2]


def test_kinds_may_take_turns():
    p = Program(Store())
    for i in range(3):
        x = p.store.get(f"x{i}", (4,), "fp32", "state")
        p.apply(ops.ConstantInit, param=x, value=float(i), valid_rows=4)
        if i < 2:
            y = p.store.get(f"y{i}", (4,), "fp32", "state")
            p.apply(ops.NormalInit, param=y, std=1.0, stream=i, valid_rows=4)
    found = group(p.ops, {"constant_init": lambda op: 0, "normal_init": lambda op: 0})
    assert [(op.name, len(members(op))) for op in found] == [("constant_init", 3), ("normal_init", 2)]
    p.apply(ops.NormalInit, param=p.store.get("x0", (4,), "fp32", "state"), std=1.0, stream=9, valid_rows=4)
    found = group(p.ops, {"constant_init": lambda op: 0, "normal_init": lambda op: 0})  # writes what another has
    assert [(op.name, len(members(op))) for op in found] == [("constant_init", 3), ("normal_init", 2), ("normal_init", 1)]


def test_only_neighbours_go_together():
    p = Program(Store())
    casts(p, ("a", "b"))
    p.apply(ops.SumSquares, x=p.store.get("x", (4,), "fp32", "state"))
    casts(p, ("a", "c"))
    assert group(p.ops, {"cast": lambda op: 0}) == p.ops
    assert group(p.ops, {}) == p.ops
