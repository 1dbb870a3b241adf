"""What kernels take is written down, anything else is refused in one line, and what is written down is a table of the docs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import barellm.cpu.kernels
import barellm.cuda.kernels  # noqa: F401  (both fill their registries)
from barellm.cpu import fuse as cpu_fuse
from barellm.cpu import kernel as cpu
from barellm.cpu.isa import host
from barellm.cpu.step import Lowered
from barellm.cuda import fuse as cuda_fuse
from barellm.cuda import kernel as cuda
from barellm.cuda.kernel import Target
from barellm.cuda.step import Lowered as CudaLowered
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, View
from barellm.runtime.registry import Registry

BACKENDS = {"cpu": lambda p: Lowered(p, host(), 2), "cuda": lambda p: CudaLowered(p, Target())}
each_backend = pytest.mark.parametrize("backend", BACKENDS)
GELU = ops.ACTIVATIONS["gelu"].forward
SHAPE = (Dim("batch", 2), Dim("seq", 5), 24)


def program(op_type, modes, dtype="fp32", **operands):
    """One op with inputs (batch, seq, 24) in a dtype."""
    p = Program(Store())
    into = {name: (p.input(f"{name}.out", SHAPE, "fp32"), mode) for name, mode in modes.items()}
    return p, p.apply(op_type, into=into, **{name: p.input(name, SHAPE, d) for name, d in operands.items()})


@each_backend
def test_a_mode_that_a_kernel_does_not_know_is_refused(backend):
    p = Program(Store())
    x, weight = p.input("x", SHAPE, "fp32"), p.parameter("w", (24,))
    p.apply(ops.LayerNorm, into={"y": (p.input("y", SHAPE, "fp32"), "add")}, x=x, weight=weight, eps=1e-5, dtype="fp32")
    with pytest.raises(ValueError) as refused:
        BACKENDS[backend](p)
    message = f"the {backend} backend's kernel for layernorm cannot write y (fp32) in mode 'add', only store"
    assert str(refused.value) == message


FLOATS = "fp32, bf16 or fp16"


@each_backend
def test_a_dtype_that_a_kernel_does_not_know_is_refused(backend):
    p, _ = program(GELU, {"y": "add"}, x="e6m9")
    with pytest.raises(ValueError) as refused:
        BACKENDS[backend](p)
    assert str(refused.value) == f"the {backend} backend's kernel for gelu takes no e6m9 for x, only {FLOATS}"


def test_positions_of_each_token_are_refused_on_a_gpu():
    p = Program(Store())
    at = p.input("at", SHAPE[:2])
    p.rope(p.input("x", SHAPE, "fp32"), p.rope_tables(5, 4, theta=10.0), heads=2, positions=at)
    BACKENDS["cpu"](p)
    with pytest.raises(
        ValueError, match=r"^the cuda backend's kernel for rope takes no i32 for positions, only fp32, bf16 or fp16$"
    ):
        BACKENDS["cuda"](p)


@each_backend
def test_a_view_that_a_kernel_would_read_as_dense_is_refused(backend):
    p = Program(Store())
    p.apply(GELU, x=View(p.input("x", SHAPE, "fp32"), 8, 12))
    with pytest.raises(ValueError) as refused:
        BACKENDS[backend](p)
    found = "x (batch<=2, seq<=5, 12) fp32"
    assert str(refused.value) == f"the {backend} backend's kernel for gelu takes no view for x, found {found}"


@each_backend
def test_an_op_without_a_kernel_is_refused(backend):
    class Cube(GELU):
        name = "cube"

    p, _ = program(Cube, {}, x="fp32")
    with pytest.raises(ValueError, match=rf"^the {backend} backend has no kernel for cube \(fp32\)$"):
        BACKENDS[backend](p)


# --- the table of docs/ops.md ---

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"
REGISTRIES = {"cpu": cpu.REGISTRY, "cuda": cuda.REGISTRY}
COMPUTE = tuple(PRECISIONS)  # dtypes that a program may compute in
OPTIMIZER = "fp32 numbers, or the formats of storage that the last column names"
SCHEDULED = "gradients and their sums are fp32 in every program"
IMAGES = tuple(f"conv2d{part}" for part in ("", "_dx", "_dw"))
IMAGES += ("mean_pixels", "mean_pixels_backward", *(f"group_norm{part}" for part in ("", "_dx", "_dparams")))
ALONE = ("pack_signs", "unpack_signs", "straight_through", "binary_matmul", "top_k", "top_k_dx", "softmax", "softmax_dx")
SCALES = "scales and what they are made of are fp32 in every program"
TOGETHER = (
    "sum_over_ranks",
    "start_all_to_all",
    "wait_all_to_all",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "factor",
    "feedback",
    "householder",
)
EXCUSED = {
    **{
        (op, dtype): OPTIMIZER
        for op in ("adamw", "cautious_adam", "normal_init", "uniform_init", "constant_init")
        for dtype in ("bf16", "fp16")
    },
    **{
        (op, dtype): SCHEDULED
        for op in ("sum_squares", "block_squares", "clip_scale", "update_scale", *TOGETHER)
        for dtype in ("bf16", "fp16")
    },
    ("block_squares", "cuda"): "only AMX tiles sum squares where they store a gradient",
    ("reduce_scatter", "cuda"): "a rank does not read the memory of another's GPU",
    **{(op, "cuda"): "gradients are compressed on CPUs only" for op in ("factor", "feedback", "householder")},
    **{(op, "cuda"): "no program trains images there" for op in IMAGES},
    **{(op, "cuda"): "no model of the command line has it" for op in ALONE},
    **{(op, "cuda"): "weights are frozen on CPUs only" for op in ("low_rank_update", "quantized_matmul_dx")},
    **{(op, dtype): SCALES for op in ("delayed_scale", "remember", "float_bias") for dtype in ("bf16", "fp16")},
    ("matmul_dw_dbias", "cpu"): "each has a kernel of its own",
    ("add_layernorm", "cpu"): "a sum and its norm stay in the second cache between the two",
    ("dropout_add_layernorm", "cpu"): "as without dropout",
    ("add_rmsnorm", "cpu"): "a sum and its norm stay in the second cache between the two",
}


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))


def primitive_ops() -> list[str]:
    """Every op of program/ops/."""
    return sorted(op.name for op in subclasses(Op) if op.__module__.startswith(ops.__name__) and "name" in vars(op))


def fused_ops() -> list[str]:
    return sorted({row.kernel or row.name for row in (*cpu_fuse.FUSIONS, *cuda_fuse.FUSIONS)})


def cell(op: str, backend: str, dtype: str) -> str:
    """Whether a backend does an op in a dtype; else why not."""
    entry = REGISTRIES[backend].entries.get(op)
    if entry and dtype in entry.floats:
        return "yes"
    return "no" if {(op, backend), (op, dtype)} & set(EXCUSED) else "hole"


def table() -> str:
    columns = [(backend, dtype) for backend in REGISTRIES for dtype in COMPUTE]
    head = ["op", *(f"{b} {d}" for b, d in columns), *(f"{b} adds to" for b in REGISTRIES), "takes too"]
    rows = [head, ["---"] * len(head)]
    for op in [*primitive_ops(), *fused_ops()]:
        adds, also = [], {}
        for registry in REGISTRIES.values():
            entry = registry.entries.get(op)
            modes = entry.modes if entry else {}
            adds.append(", ".join(name if "start" in found else f"{name} (no start)" for name, found in modes.items()))
            also |= {(name, dtype): None for name, dtypes in (entry.also.items() if entry else ()) for dtype in dtypes}
            also |= {(name, "view"): None for name in sorted(entry.views if entry else ())}
        more = ", ".join(f"{name}: {dtype}" for name, dtype in also)
        rows.append([f"`{op}`", *(cell(op, *column) for column in columns), *adds, more])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    reasons: dict[tuple[str, str], list[str]] = {}
    for (op, what), reason in EXCUSED.items():
        reasons.setdefault((what, reason), []).append(f"`{op}`")
    why = "\n".join(f"- {what}: {', '.join(names)}: {reason}." for (what, reason), names in reasons.items())
    return f"{text}\n\nWhat is missing on purpose:\n\n{why}\n"


def test_every_op_has_a_kernel_on_every_backend_in_every_dtype():
    holes = [(op, b, d) for op in [*primitive_ops(), *fused_ops()] for b in REGISTRIES for d in COMPUTE
             if cell(op, b, d) == "hole"]  # fmt: skip
    assert not holes, "write the kernel, or the reason into EXCUSED"
    known = {*primitive_ops(), *fused_ops()}
    for op, what in EXCUSED:
        cells = [cell(op, b, d) for b in REGISTRIES for d in COMPUTE if what in (b, d)]
        assert op in known and "no" in cells, f"{op} needs no excuse for {what}"
    for backend, registry in REGISTRIES.items():
        assert set(registry.entries) <= known, f"{backend} has a kernel for an op that does not exist"


def test_the_table_of_the_docs_is_what_the_kernels_take():
    """BARELLM_GOLDEN=write writes it anew."""
    head, _, _ = PAGE.read_text().partition("| op |")
    if os.environ.get("BARELLM_GOLDEN") == "write":
        PAGE.write_text(head + table())
    assert PAGE.read_text() == head + table()


@pytest.mark.parametrize("mode, expected", [("add", ["linear"]), ("start", ["matmul", "bias"])])
def test_a_sequence_whose_fused_kernel_has_not_its_mode_stays_a_sequence(mode, expected):
    p = Program(Store())
    x, weight, bias = p.input("x", SHAPE, "fp32"), p.parameter("w", (24, 24)), p.parameter("b", (24,))
    y = p.apply(ops.Matmul, x=x, weight=weight).y
    p.apply(ops.Bias, into={"y": (p.input("y", SHAPE, "fp32"), mode)}, x=y, bias=bias)
    assert [op.name for op in Lowered(p, host(), 2).ops] == expected


def test_a_kernel_that_is_defined_again_takes_the_place_of_the_first():
    forgotten: list[str] = []
    registry: Registry[list] = Registry("cpu", floats=("fp32",), replaced=lambda: forgotten.append("add"))
    registry.add("gelu", lambda into: None)
    for number in (1, 2):
        registry.add("add", lambda into, number=number: into.append(number))
    found: list[int] = []
    _, op = program(ops.Add, {}, a="fp32", b="fp32")
    registry.lower(op, found)
    assert found == [2] and forgotten == ["add"]
