"""An activation is one entry of program/ops/pointwise/elementwise.py and one emitter on each backend;
everything else follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

import barellm
from barellm.cpu import fuse as cpu
from barellm.cuda import fuse as cuda
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.fusion import FusedOp, fuse
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, SLOPES
from tests.cases import each_activation, network


def test_squared_relu_is_in_three_files_besides_the_options():
    package = Path(barellm.__file__).parent
    files = (path for path in package.rglob("*.py") if not {"models", "interop", "config"} & {*path.parts})  # may ask for it
    found = {str(path.relative_to(package)) for path in files if "relu2" in path.read_text()}
    assert found == {
        "program/ops/pointwise/elementwise.py",
        "cpu/kernels/pointwise/activations.py",
        "cuda/kernels/pointwise/activations.py",
    }


@each_activation
@pytest.mark.parametrize("table", [cpu.FUSIONS, cuda.FUSIONS], ids=["cpu", "cuda"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_products_take_it_along(activation, table, bias):
    """On both backends one kernel does all products; what follows them is data."""
    p = Program(Store())
    network(p, bias=bias, C=4, F=8, V=7, activation=activation)
    p.backward(p.named["loss"])
    fused = {op.name: op for op in fuse(p.ops, table) if isinstance(op, FusedOp) and op.kernel == "product"}
    forward, backward = fused[f"linear_{activation}"], fused[f"matmul_dx_{activation}"]
    assert forward.epilogues == (*(["bias"] if bias else []), activation)
    assert backward.epilogues == (f"{activation}_backward",)
    per_element = [o.flops() // o.outputs["y"].size for o in forward.sequence[1:]]
    assert per_element[-1] == ACTIVATIONS[activation].operations[0]
    assert backward.sequence[1].flops() == ACTIVATIONS[activation].operations[1] * backward.dx.size


def test_an_activation_that_is_not_known_is_refused():
    p = Program(Store())
    with pytest.raises(ValueError, match=r"unknown activation 'silu3' \(known: gelu, relu, relu2, gelu_erf, silu\)"):
        p.activate(p.input("x", (2, 3), "fp32"), "silu3")


def test_names_of_ops_and_of_slopes():
    assert {a.forward.name for a in ACTIVATIONS.values()} == set(ACTIVATIONS) == set(ops.ACTIVATIONS)
    assert set(SLOPES) == {f"{name}_backward" for name in ACTIVATIONS}
    assert all(SLOPES[a.backward.name] is a for a in ACTIVATIONS.values())
    assert ACTIVATIONS["gelu"].forward.__name__ == "Gelu" and ACTIVATIONS["gelu"].backward.__name__ == "GeluBackward"
