from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.program import ops
from barellm.program.ops.pointwise.elementwise import sigmoid
from barellm.program.ops.pointwise.swiglu import GATED
from tests.cases import normal
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, stored, tokens

SHAPES = [(1, 1, 1), (2, 3, 7), (3, 5, 65), (1, 37, 192), (2, 3, 3, 7)]
ROUGH = {"fp32": 0.0, "bf16": 2.0**-13}  # of the exponential
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_place = pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])


def operands(shape, dtype, *, packed: bool) -> tuple[np.ndarray, np.ndarray, dict]:
    """gate, up, and what `check_op` wants of them: columns of one tensor that has three more, or tensors of their own."""
    F = shape[-1]
    whole = stored(4 * normal(*shape[:-1], 2 * F + 3), dtype)
    gate, up = whole[..., 3 : 3 + F], whole[..., 3 + F :]
    if not packed:
        return gate, up, {"given": {"gate": tokens(gate.copy(), dtype), "up": tokens(up.copy(), dtype)}}
    return (gate, up, {"given": {"both": tokens(whole, dtype)}, "views": {"gate": ("both", 3, F), "up": ("both", 3 + F, F)}})


def check_forward(isa, shape, dtype, *, packed=True):
    gate, up, case = operands(shape, dtype, packed=packed)
    silu = gate * sigmoid(gate)
    bounds = {"y": (8 * EPS + ROUGH[dtype]) * np.abs(silu * up)}
    check_op(ops.SwiGLU, isa, **case, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


def check_backward(isa, shape, dtype, *, packed=True, modes=("store", "store")):
    gate, up, case = operands(shape, dtype, packed=packed)
    dy = tokens(normal(*shape, seed=2), dtype)
    F, bound = shape[-1], 16 * EPS + ROUGH[dtype]
    size = np.abs(dy.values) * (1 + np.abs(gate))
    bounds = {"dgate": bound * size * np.abs(up) + 4 * EPS, "dup": bound * size + 4 * EPS}
    views = case.get("views", {}) | ({"dgate": ("d", 0, F), "dup": ("d", F, F)} if packed else {})
    given = {"dy": dy, **case["given"]}
    added = {name: mode for name, mode in zip(("dgate", "dup"), modes, strict=True) if mode != "store"}
    check_op(ops.SwiGLUBackward, isa, given, views=views, modes=added, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@each_shape
@each_dtype
@each_place
def test_swiglu(isa, shape, dtype, packed):
    check_forward(isa, shape, dtype, packed=packed)


@each_isa
@each_shape
@each_dtype
@each_place
def test_swiglu_backward(isa, shape, dtype, packed):
    check_backward(isa, shape, dtype, packed=packed)


@each_isa
@each_dtype
@pytest.mark.parametrize("packed, modes", [(True, ("add", "add")), (False, ("store", "add")), (False, ("add", "store"))])
def test_gradients_are_added_to_what_is_there(isa, dtype, packed, modes):
    check_backward(isa, (2, 5, 65), dtype, packed=packed, modes=modes)


@each_isa
@each_dtype
@pytest.mark.parametrize("F", [64, 128, 97])
def test_results_written_past_the_caches(isa, dtype, F, monkeypatch):
    """With the limit at zero; where rows are no whole lines they cannot go there."""
    changed(monkeypatch, loops, STREAM_BYTES=0)
    check_forward(isa, (2, 3, F), dtype)
    check_backward(isa, (2, 3, F), dtype)


@each_isa
@each_dtype
@pytest.mark.parametrize("activation", GATED)
def test_gates_of_every_activation(isa, dtype, activation):
    """Columns of one matmul, whose gradients are those of its gradient."""
    op, (gate, up, case) = GATED[activation], operands((2, 5, 65), dtype, packed=True)
    rough = 32 * EPS + ROUGH[dtype]
    size = (1 + np.abs(gate)) * (1 + np.abs(up))
    check_op(op, isa, **case, bounds={"y": rough * size}, plan=(3, 7))
    dy = tokens(normal(2, 5, 65, seed=2), dtype)
    size = size * (1 + np.abs(dy.values))
    views = case["views"] | {"dgate": ("d", 0, 65), "dup": ("d", 65, 65)}
    check_op(
        op.backward, isa, {"dy": dy, **case["given"]}, views=views, bounds={"dgate": rough * size, "dup": rough * size}, plan=(3, 7)
    )
