"""The harness reports each kind of wrong kernel, with a line that reproduces it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from barellm.cpu import jit
from barellm.cpu.kernel import REGISTRY, Lowering
from barellm.cpu.kernels.loops import vectors
from barellm.program import ops
from tests.cases import backward_case, forward_case, leading_case, loss_case
from tests.conv_cases import FORMS, WINOGRAD, winograd_case
from tests.conv_cases import case as conv_case
from tests.cpu import check
from tests.cpu.check import ISAS, check_op, isa_named, tokens

N = 5 * 7 * 13
SCRATCH_BYTES = 4096  # a whole page, behind which the arena leaves nothing


def slightly_wrong(k, y, a, b):
    with k.parallel_range(N, 64) as (begin, end):
        for i, mask, _ in vectors(k, begin, end):
            y.store((a.load(i, mask) + b.load(i, mask)) * (1 + 2**-22), i, mask)


def beyond_the_end(k, y, a, b):
    with k.parallel_for(1):
        for i, mask, _ in vectors(k, 0, N):
            y.store(a.load(i, mask) + b.load(i, mask), i, mask)
        y.put(0.0, N)


def into_an_input(k, y, a, b):
    with k.parallel_for(1):
        for i, mask, _ in vectors(k, 0, N):
            y.store(a.load(i, mask) + b.load(i, mask), i, mask)
        b.put(0.0, 3)


def not_everything(k, y, a, b):
    with k.parallel_for(1):
        for i, mask, _ in vectors(k, 0, N - 1):
            y.store(a.load(i, mask) + b.load(i, mask), i, mask)


def behind_its_scratch(k, y, a, b):
    with k.parallel_for(1):
        for i, mask, _ in vectors(k, 0, N):
            y.store(a.load(i, mask) + b.load(i, mask), i, mask)
        k.thread_scratch().put(0.0, SCRATCH_BYTES // 4)


def by_threads(k, y, a, b):
    with k.parallel_for(1):
        tiny = k.to(k.threads, "float") * 1e-10
        for i, mask, _ in vectors(k, 0, N):
            y.store(a.load(i, mask) + b.load(i, mask) + tiny, i, mask)


WRONG = [
    (slightly_wrong, "expected"),
    (beyond_the_end, "outside its tensors"),
    (into_an_input, "changed its input b"),
    (not_everything, "is nan, expected"),
    (behind_its_scratch, "up to 4 bytes behind its private scratch"),
    (by_threads, "different bits with 2 threads"),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel, message", WRONG, ids=[f.__name__ for f, _ in WRONG])
def test_a_wrong_kernel_is_reported(isa, kernel, message, monkeypatch):
    def lower(c: Lowering) -> None:
        c.thread_scratch(SCRATCH_BYTES)
        c.call(kernel, {"y": c.op.y, "a": c.op.a, "b": c.op.b}, writes="y")

    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    REGISTRY.add("add", lower)
    r = np.random.default_rng(1)
    given = {"a": tokens(r.standard_normal((5, 7, 13))), "b": tokens(1e-3 * r.standard_normal((5, 7, 13)))}
    with pytest.raises(AssertionError, match=message) as failure:
        check_op(ops.Add, isa_named(isa), given, plan=(5, 9), bounds={"y": 1e-9})
    assert str(failure.value).splitlines()[-1].startswith("reproduce: python -m pytest 'tests/cpu/test_check.py::")


LEVELS = {
    "matmul": lambda dtype: {"op_type": ops.Matmul, **leading_case(ops.Matmul, ((2, 37), False), dtype)},
    "matmul_dw": lambda dtype: {"op_type": ops.MatmulDw, **leading_case(ops.MatmulDw, ((2, 37), False), dtype)},
    "attention": lambda dtype: {"op_type": ops.Attention, **forward_case((2, 37, 2, 24), dtype, rate=0.3)},
    "attention_backward": lambda dtype: {"op_type": ops.AttentionBackward, **backward_case((2, 37, 2, 24), dtype)},
    "cross_entropy": lambda dtype: {"op_type": ops.CrossEntropy, **loss_case((2, 7, 101, 101), dtype)},
    **{name: lambda dtype, n=name: conv_case(n, FORMS["padded"], dtype) for name in ("conv2d", "conv2d_dx", "conv2d_dw")},
    "winograd": lambda dtype: winograd_case("conv2d", WINOGRAD["groups"], "winograd4", dtype),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.extended
def test_bits_do_not_depend_on_how_code_is_generated(isa, dtype, name, monkeypatch, own_cache):
    """With LLVM's optimisations and without, as tests have it for all instruction sets but the best; the code differs."""
    made: list[set[bytes]] = []
    keep = jit.keep
    monkeypatch.setattr(jit, "keep", lambda key, isa, code: made[-1].add(code) or keep(key, isa, code))

    def outputs(best: str) -> dict[str, bytes]:
        made.append(set())
        monkeypatch.setattr(check, "ISAS", [best, *ISAS])
        monkeypatch.setattr(check.Session, "_last", None)
        return {n: values.tobytes() for n, values in check_op(isa=isa_named(isa), **LEVELS[name](dtype)).items()}

    assert outputs(isa) == outputs("another")
    usual, unoptimised = made
    assert len(usual) == len(unoptimised) > 0 and not usual & unoptimised


def test_no_test_runs_on_an_instruction_set_by_name_that_a_processor_may_lack():
    """`isa_named("avx512")` raises an error where it is not: a test takes one of ISAS, says when it is skipped, or builds the ISA
    by value (`isas.cross`), for what only asks or compiles."""

    def named(node: ast.AST) -> list[int]:
        """The lines of such calls, without those in functions that are skipped somewhere."""
        if isinstance(node, ast.FunctionDef) and any("skipif" in ast.unparse(mark) for mark in node.decorator_list):
            return []
        found = [line for part in ast.iter_child_nodes(node) for line in named(part)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isa_named":
            found += [node.lineno for name in node.args if isinstance(name, ast.Constant) and name.value]
        return found

    found = {path.name: named(ast.parse(path.read_text())) for path in Path(__file__).parent.glob("test_*.py")}
    assert not {name: lines for name, lines in found.items() if lines}
