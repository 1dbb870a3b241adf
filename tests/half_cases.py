"""What every backend is asked about fp16: ops against their references, and a loss scale that follows the gradients.

`check` is a backend's `check_op`, of one target where it has several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from barellm.optim.adamw import AdamW
from barellm.optim.rules import Rule, update
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS
from barellm.program.loss_scale import FIRST_SCALE, GROWTH_STEPS, LEAST_SCALE, MOST_SCALE
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS
from tests.cases import loss_case, normal
from tests.check import EPS, persistent, tokens

Check = Callable[..., Any]
PRODUCTS = [(1, 1, 1, 1), (2, 7, 37, 53), (1, 33, 70, 129)]


def check_products(check: Check, shape: tuple[int, int, int, int]) -> None:
    """A product of (batch, seq, N, K) in its three roles."""
    B, T, N, K = shape
    x, w, dy = normal(B, T, K), normal(N, K, seed=2), normal(B, T, N, seed=3)
    weight = persistent(w, "fp16_fp32")
    bound = 8 * EPS * K**0.5 * (np.abs(x) @ np.abs(w).T + 1) * 1.01
    check(ops.Matmul, {"x": tokens(x, "fp16"), "weight": weight}, bounds={"y": bound})
    bound = 8 * EPS * N**0.5 * (np.abs(dy) @ np.abs(w) + 1) * 1.01
    check(ops.MatmulDx, {"dy": tokens(dy, "fp16"), "weight": weight}, bounds={"dx": bound})
    size = np.abs(dy).reshape(-1, N).T @ np.abs(x).reshape(-1, K)
    operands = {"dy": tokens(dy, "fp16"), "x": tokens(x, "fp16")}
    check(ops.MatmulDw, operands, bounds={"dweight": 8 * EPS * (B * T) ** 0.5 * (size + 1) * 1.01})


def check_rows(check: Check) -> None:
    x = normal(2, 5, 67)
    affine = {"weight": persistent(normal(67, seed=2)), "bias": persistent(normal(67, seed=3))}
    bounds = {"y": 64 * EPS * 67**0.5, "mean": 16 * EPS, "rstd": 64 * EPS}
    check(ops.LayerNorm, {"x": tokens(x), **affine}, bounds=bounds, eps=1e-5, dtype="fp16")
    check(ACTIVATIONS["gelu"].forward, {"x": tokens(x, "fp16")}, bounds={"y": 16 * EPS * 4})
    given = {"dy": tokens(normal(2, 5, 67, seed=4), "fp16"), "x": tokens(x, "fp16")}
    check(ACTIVATIONS["gelu"].backward, given, bounds={"dx": 32 * EPS * 8}, modes={"dx": "add"})
    check(ops.CrossEntropy, **loss_case((2, 5, 67, 61), "fp16"))


def scaled_update(compute: str = "fp16") -> tuple[Program, Store]:
    """An update of one matrix of 35 elements."""
    store = Store()
    p = Program(store, compute=compute)
    p.parameter("w", (7, 5), std=1.0)
    p.gradient_of(store.tensors["w"])
    update(p, [Rule("*", optimizer=AdamW())], clip=1.0)
    return p, store


def check_branch_scales(open_session: Callable[[dict[str, Program]], Any]) -> None:
    """An update of two matrices, of which one belongs to a residual branch: each scale follows its own gradients, and both have one
    norm."""
    store = Store()
    p = Program(store, compute=replace(PRECISIONS["fp16"], branch_scales=True))
    for name in ("inside", "outside"):
        p.gradient_of(p.parameter(name, (7, 5), std=1.0))
    store.branches = {store.tensors["inside"]: "h.0.attn"}
    update(p, [Rule("*", optimizer=AdamW())], clip=0.0)
    session = open_session({"optimizer_step": p})
    states = {"h.0.attn.gradient_scale": (3, 5), "loss_scale": (-2, GROWTH_STEPS - 1)}

    def step(inside: float, outside: float) -> tuple[list[list[int]], np.ndarray]:
        for name, state in states.items():
            session.write(name, np.array(state, np.int32))
        session.write("inside.grad", np.full((7, 5), inside * 2.0 ** (FIRST_SCALE + 3), np.float32))
        session.write("outside.grad", np.full((7, 5), outside * 2.0 ** (FIRST_SCALE - 2), np.float32))
        session.run("optimizer_step", lr=0.1, step=1, seed=0)
        return [session.read(name).tolist() for name in states], session.read("clip")

    found, clip = step(0.3, -0.4)
    assert found == [[3, 6], [-1, 0]] and clip == pytest.approx([0.5 * 35**0.5, 2.0 ** (2 - FIRST_SCALE)], rel=1e-6)
    moments = [session.read(f"{name}.m")[0, 0] for name in ("inside", "outside")]
    assert moments == pytest.approx([0.03, -0.04], rel=1e-6)
    found, clip = step(np.inf, 1.0)
    assert found == [[2, 0], [-1, 0]] and np.isnan(clip[1])
    found, clip = step(1.0, np.nan)
    assert found == [[3, 6], [-3, 0]] and np.isnan(clip[1])
    assert session.read("skipped")[0] == 2


def check_loss_scale(open_session: Callable[[dict[str, Program]], Any]) -> None:
    """It grows after enough good updates, shrinks after a bad one, which changes no weight, and stays within its bounds."""
    session = open_session({"optimizer_step": scaled_update()[0]})
    session.write("w", normal(7, 5))

    def step(gradient: float, state: tuple[int, int]) -> tuple[list[int], np.ndarray]:
        session.write("loss_scale", np.array(state, np.int32))
        session.write("w.grad", np.full((7, 5), gradient, np.float32))
        session.run("optimizer_step", lr=0.1, step=1, seed=0)
        return session.read("loss_scale").tolist(), session.read("clip")

    state, clip = step(2.0**FIRST_SCALE * 0.01, (0, 0))
    assert state == [0, 1]
    assert clip == pytest.approx([0.01 * 35**0.5, 2.0**-FIRST_SCALE], rel=1e-6)
    _, clip = step(2.0 ** (FIRST_SCALE + 3), (2, 0))
    assert clip == pytest.approx([2 * 35**0.5, 2.0 ** -(FIRST_SCALE + 3) / 35**0.5], rel=1e-6)
    assert step(1.0, (2, GROWTH_STEPS - 1))[0] == [3, 0]
    assert step(1.0, (2, GROWTH_STEPS - 2))[0] == [2, GROWTH_STEPS - 1]
    assert step(1.0, (MOST_SCALE - FIRST_SCALE, GROWTH_STEPS - 1))[0] == [MOST_SCALE - FIRST_SCALE, 0]
    before = session.read("w")
    for bad in (np.inf, np.nan):
        state, clip = step(bad, (2, 70))
        assert state == [1, 0] and np.isnan(clip[1])
    assert step(np.inf, (LEAST_SCALE - FIRST_SCALE, 5))[0] == [LEAST_SCALE - FIRST_SCALE, 0]
    np.testing.assert_array_equal(session.read("w"), before)
    assert session.read("skipped")[0] == 3
