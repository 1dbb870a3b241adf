from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.ops.pointwise.swiglu import GATED
from tests.cuda.check import EPS, check_op, tokens

SHAPES = [(1, 1, 1), (2, 3, 7), (3, 5, 65), (1, 2, 384)]
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_packing = pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])


def operands(shape, dtype, *, packed: bool):
    """gate and up, (operands, views): columns of one tensor, or tensors of their own."""
    gate, up = (4 * np.random.default_rng(seed).standard_normal(shape) for seed in (1, 2))
    gate, up = tokens(gate, dtype), tokens(up, dtype)
    if not packed:
        return gate.values, up.values, {"gate": gate, "up": up}, {}
    F = shape[-1]
    whole = tokens(np.concatenate([gate.values, up.values], -1), dtype)
    return gate.values, up.values, {"both": whole}, {"gate": ("both", 0, F), "up": ("both", F, F)}


@each_shape
@each_dtype
@each_packing
def test_swiglu(shape, dtype, packed):
    gate, up, given, views = operands(shape, dtype, packed=packed)
    bounds = {"y": 8 * EPS * np.abs(gate * up) * (1 + np.abs(gate))}
    check_op(ops.SwiGLU, given, views=views, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_shape
@each_dtype
@each_packing
@pytest.mark.parametrize("mode", ["store", "add"])
def test_swiglu_backward(shape, dtype, packed, mode):
    gate, up, given, views = operands(shape, dtype, packed=packed)
    F, dy = shape[-1], np.random.default_rng(3).standard_normal(shape)
    if packed:
        views |= {"dgate": ("dboth", 0, F), "dup": ("dboth", F, F)}
    size = np.abs(dy) * (1 + np.abs(gate)) ** 2
    check_op(
        ops.SwiGLUBackward,
        given | {"dy": tokens(dy, dtype)},
        views=views,
        modes=dict.fromkeys(("dgate", "dup"), mode),
        bounds={"dgate": 16 * EPS * (1 + size * np.abs(up)), "dup": 16 * EPS * (1 + size)},
        plan=(shape[0] + 1, shape[1] + 2),
    )


@each_dtype
@pytest.mark.parametrize("activation", [name for name in ops.ACTIVATIONS if name != "silu"])
def test_gates_by_other_activations(activation, dtype):
    gate, up, given, views = operands((3, 5, 65), dtype, packed=True)
    dy, size = np.random.default_rng(3).standard_normal(gate.shape), (1 + np.abs(gate)) ** 2
    check_op(GATED[activation], given, views=views, bounds={"y": 8 * EPS * size * np.abs(up)}, plan=(4, 7))
    bounds = {"dgate": 24 * EPS * size * (1 + np.abs(dy)) * (1 + np.abs(up)), "dup": 24 * EPS * size * (1 + np.abs(dy))}
    views |= {"dgate": ("dboth", 0, 65), "dup": ("dboth", 65, 65)}
    check_op(GATED[activation].backward, given | {"dy": tokens(dy, dtype)}, views=views, bounds=bounds, plan=(4, 7))


def test_gradients_of_tensors_of_their_own_have_modes_of_their_own():
    for name in ("dgate", "dup"):
        _, _, given, _ = operands((2, 3, 19), "fp32", packed=False)
        given["dy"] = tokens(np.random.default_rng(3).standard_normal((2, 3, 19)))
        check_op(ops.SwiGLUBackward, given, modes={name: "add"}, bounds=dict.fromkeys(("dgate", "dup"), 1e-4))


def test_gates_far_from_zero():
    gate = tokens(np.array([-1e6, -100.0, -20.0, 20.0, 100.0, 1e6]).reshape(1, 1, -1))
    ones = tokens(np.ones((1, 1, 6)))
    check_op(ops.SwiGLU, {"gate": gate, "up": ones}, bounds={"y": 1e-13})
    check_op(ops.SwiGLUBackward, {"dy": ones, "gate": gate, "up": ones}, bounds={"dgate": 1e-6, "dup": 1e-13})
