"""Which gradients have their squares summed where they are stored, and that the norm is the same then."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.fuse import SQUARES
from barellm.optim.adamw import AdamW
from barellm.optim.rules import Rule, update
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.fused_grad_norm import fuse_grad_norm, recompute_square_sums
from barellm.program.ops.gemm.block_squares import BLOCK, BlockSquares
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession

SHAPE = (Dim("batch", 3), Dim("seq", 5))
WIDTHS = {"one": (BLOCK + 3, 24), "two": (7, BLOCK + 3)}  # rows and columns of weights that have one writer
RULES = [Rule("*", optimizer=AdamW(0.9, 0.99, 0.1, 1e-8))]


def takes(op) -> bool:
    return op.name == "matmul_dw"


def micro(store: Store) -> Program:
    """Two weights with one writer, one with two, one of which columns are used, a head behind them, and biases."""
    p = Program(store)
    x = p.input("x", (*SHAPE, 24), "fp32")
    one, two = (p.parameter(name, shape) for name, shape in WIDTHS.items())
    twice, columns = p.parameter("twice", (24, 24)), p.parameter("columns", (9, 30))
    x = p.linear(p.linear(x, twice), twice)
    x = p.linear(p.linear(x, one, p.parameter("bias", (BLOCK + 3,))), two)
    x = p.linear(x, p.split(columns, (7, 23))[0])
    loss = p.classifier(x, p.parameter("head", (40, 9)), p.input("targets", SHAPE), valid_vocab=37)
    p.output("loss", loss)
    p.backward(loss)
    return p


def programs(**more) -> dict[str, Program]:
    store = Store()
    made = {"forward_backward": micro(store), "optimizer_step": Program(store)}
    update(made["optimizer_step"], RULES, clip=0.5)
    for name, append in more.items():
        made[name] = Program(store)
        append(made[name])
    return made


def names(ops_) -> list[str]:
    return [op.name for op in ops_]


def kept_of(made, takes=takes) -> list[str]:
    return sorted(t.name for t in fuse_grad_norm(made, takes)[1])


def test_matrices_with_one_writer_are_taken_and_nothing_else():
    assert kept_of(programs()) == ["head.grad", "one.grad", "two.grad"]


def test_the_sum_is_behind_the_writer_and_the_norm_reads_it():
    made = programs()
    before = {name: list(p.ops) for name, p in made.items()}
    moved, kept = fuse_grad_norm(made, takes)
    assert {name: p.ops for name, p in made.items()} == before, "the programs that were given stay as they are"
    for op, after in zip(moved["forward_backward"].ops, moved["forward_backward"].ops[1:], strict=False):
        grad = next((t for t in op.outputs.values() if t in kept), None)
        assert (grad is not None) == isinstance(after, BlockSquares)
        if grad is not None:
            assert after.x is grad and after.outputs == {"partials": kept[grad]} and after.segment == op.segment
            assert after.modes == {"partials": "store"} and not after.counted
    assert names(moved["optimizer_step"].ops).count("sum_squares") == names(made["optimizer_step"].ops).count("sum_squares") - 3
    (clip,) = (op for op in moved["optimizer_step"].ops if op.name == "clip_scale")
    (plain,) = (op for op in made["optimizer_step"].ops if op.name == "clip_scale")
    assert len(set(clip.inputs.values()) & set(kept.values())) == 3
    assert clip.inputs.keys() == plain.inputs.keys() and not set(plain.inputs.values()) & set(kept.values())


@pytest.mark.parametrize("why, taken, more", [
    ("nobody takes the writer", lambda op: False, {}),
    ("the writer is of another kind", lambda op: op.name == "matmul", {}),
])  # fmt: skip
def test_what_no_kernel_takes_stays(why, taken, more):
    made = programs(**more)
    moved, kept = fuse_grad_norm(made, taken)
    assert not kept and moved is made, why


def fills(p: Program) -> None:
    p.fill(p.gradient_of(p.store.tensors["one"]), 0.0)


def sums_after_change(p: Program) -> None:
    grad = p.gradient_of(p.store.tensors["one"])
    p.apply(ops.MatmulDw, into={"dweight": (grad, "add")}, dy=p.input("dy", (*SHAPE, BLOCK + 3)), x=p.input("by", (*SHAPE, 24)))
    p.apply(ops.SumSquares, x=grad)


@pytest.mark.parametrize("append", [fills, sums_after_change])
def test_a_gradient_that_another_program_changes_stays(append):
    assert kept_of(programs(other=append)) == ["head.grad", "two.grad"]


def test_all_programs_that_write_a_gradient_sum_its_squares():
    made = programs()
    made["forward_backward_stats"] = micro(made["forward_backward"].store)
    moved, kept = fuse_grad_norm(made, takes)
    for name in ("forward_backward", "forward_backward_stats"):
        assert sorted(op.x.name for op in moved[name].ops if isinstance(op, BlockSquares)) == sorted(t.name for t in kept)


def test_without_a_writer_nothing_is_taken():
    made = programs()
    del made["forward_backward"]
    assert kept_of(made) == []


@pytest.mark.parametrize("table", [(), SQUARES], ids=["alone", "fused"])
def test_the_norm_is_the_same(table, monkeypatch):
    """Over two micro-batches, the second of which adds; and of gradients that are written by hand."""
    for row in SQUARES:
        monkeypatch.setitem(row.__dict__, "when", None)  # in any dtype
    r = np.random.default_rng(3)
    made = programs()
    moved, kept = fuse_grad_norm(made, takes)
    again = recompute_square_sums(made["forward_backward"].store, kept, "fp32")
    sessions = [ReferenceSession(made), ReferenceSession({**moved, "again": again}, table=table)]
    fused = {op.name for op in sessions[1].ops["forward_backward"]}
    assert ("matmul_dw_squares" in fused) == bool(table) and ("block_squares" in fused) != bool(table)
    weights = {t.name: 0.3 * r.standard_normal(t.shape) for t in made["forward_backward"].store.of_role("parameter")}
    batches = [(r.standard_normal((2, 4, 24)), r.integers(0, 37, (2, 4))) for _ in range(2)]
    for session in sessions:
        for name, values in weights.items():
            session.write(name, values)
        for number, (x, targets) in enumerate(batches):
            session.write("x", x)
            session.write("targets", targets)
            session.run("forward_backward", batch=2, seq=4, accumulate=number, inv_targets=1 / 16)
        session.run("optimizer_step", lr=1e-2, step=1)
    clips = [session.read("clip") for session in sessions]
    assert clips[0][1] < 1
    np.testing.assert_allclose(clips[1], clips[0], rtol=1e-12)
    for session in sessions:
        session.write("one.grad", 3 * session.read("one.grad"))
    sessions[1].run("again")
    for session in sessions:
        session.run("optimizer_step", lr=1e-2, step=2)
    np.testing.assert_allclose(sessions[1].read("clip"), sessions[0].read("clip"), rtol=1e-12)
    assert sessions[0].read("clip")[0] > 1.01 * clips[0][0]


def test_sums_of_blocks_are_of_matrices():
    with pytest.raises(ValueError, match=r"block_squares expects a matrix: x \(3, 4, 5\)"):
        BlockSquares({"x": Program(Store()).input("x", (3, 4, 5), "fp32")}, {}).infer(
            Program(Store()).input("x", (3, 4, 5), "fp32")
        )
