"""The table of rules: who decides, what one optimizer's own rate does, what counts as work of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from barellm.optim.adamw import AdamW, adamw_rules
from barellm.optim.rules import Rule, assign_rules, update
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Tensor
from barellm.runtime.backend import backend
from barellm.runtime.reference import ReferenceSession

SHAPES = {"wte": (5, 4), "h.0.w": (4, 4), "h.1.w": (4, 4), "h.0.norm": (4,)}
PLAIN = AdamW(eps=0.0, weight_decay=0.0)


def update_of(table: list[Rule], *, clip: float = 0.0) -> Program:
    p = Program(Store())
    for name, shape in SHAPES.items():
        p.parameter(name, shape, std=1.0)
    update(p, table, clip=clip)
    return p


def moved(session, **scalars) -> dict[str, np.ndarray]:
    """What one update of parameters of ones by gradients of ones subtracts."""
    for name, shape in SHAPES.items():
        session.write(name, np.ones(shape, np.float32))
        session.write(f"{name}.grad", np.ones(shape, np.float32))
    session.run("optimizer_step", **{"step": 1, "lr": 0.25} | scalars)
    return {name: 1 - session.read(name) for name in SHAPES}


def test_the_first_rule_that_matches_decides():
    table = [
        Rule("wte|*.norm", optimizer=AdamW(beta1=0.1)),
        Rule("h.*", ndim=1, optimizer=AdamW(beta1=0.2)),
        Rule("h.1.*", ndim=2, optimizer=AdamW(beta1=0.3)),
        Rule("*", optimizer=AdamW(beta1=0.4)),
    ]
    found = {op.param.name: op.beta1 for op in update_of(table).ops if op.name == "adamw"}
    assert found == {"wte": 0.1, "h.0.norm": 0.1, "h.1.w": 0.3, "h.0.w": 0.4}


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"no rule gives h.0.norm \(4,\) an optimizer, expected a last rule for '\*'"):
        update_of([Rule("*", ndim=2, optimizer=PLAIN)])


def test_the_default_rules_decay_and_pack_matrices_alone():
    from barellm.config import OptimConfig

    params = [Tensor("b", (3,), "fp32", "parameter"), Tensor("w", (3, 2), "fp32", "parameter")]
    config = OptimConfig(beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.3, moments="16bit-stochastic")
    vector, matrix = (rule.optimizer for _, rule in assign_rules(adamw_rules(config), params))
    assert vector == AdamW(0.5, 0.6, 1e-3, 0.0, "fp32")
    assert matrix == AdamW(0.5, 0.6, 1e-3, 0.3, "16bit-stochastic")


@dataclass(frozen=True)
class Descent:
    """param - lr_scale lr grad, of ops that other programs have: an optimizer that the house does not know."""

    lr_scale: float = 1.0

    def update(self, p: Program, params: Sequence[Tensor], clip: Tensor) -> None:
        for param in params:
            p.apply(ops.AdamW, param=param, grad=p.gradient_of(param), clip=clip, **{
                k: p.state(f"{param.name}.descent_{k}", param.shape) for k in "mv"
            }, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, lr_scale=self.lr_scale)  # fmt: skip


@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_one_tensor_has_an_optimizer_of_its_own(backend_name):
    """Its state is its own, and the others move as they did without it."""
    table = [Rule("h.1.w", optimizer=Descent(lr_scale=2.0)), Rule("*", optimizer=PLAIN)]
    results = []
    for rows in (table, table[1:]):
        programs = {"optimizer_step": update_of(rows)}
        session = ReferenceSession(programs) if backend_name == "reference" else backend("cpu").open_session(programs)
        results.append((moved(session), set(session.tensors)))
        if backend_name == "cpu":
            session.close()
    (own, names), (plain, _) = results
    assert "h.1.w.descent_m" in names and "h.1.w.m" not in names
    for name in SHAPES:
        expected = 0.25 if name != "h.1.w" else 2.0 * 0.25 / 2  # 1 / (|g| + eps) of eps 1
        np.testing.assert_allclose(own[name], expected, rtol=1e-6)
        np.testing.assert_allclose(plain[name], 0.25, rtol=1e-6)


@pytest.mark.parametrize("lr", [0.25, 0.5])
def test_a_rate_of_its_own_follows_the_schedule(lr):
    table = [Rule("wte", optimizer=AdamW(eps=0.0, weight_decay=0.5, lr_scale=3.0)), Rule("*", optimizer=PLAIN)]
    found = moved(ReferenceSession({"optimizer_step": update_of(table)}), lr=lr)
    np.testing.assert_allclose(found["wte"], 3 * lr * (0.5 + 1.0), rtol=1e-12)
    np.testing.assert_allclose(found["h.0.w"], lr, rtol=1e-12)


def test_products_of_an_optimizer_are_no_work_of_the_model():
    """Their FLOPs are in `plan`'s rows, and in no count of the model's; the norm of the gradients is no optimizer's step."""

    @dataclass(frozen=True)
    class Squares:
        lr_scale: float = 1.0

        def update(self, p: Program, params: Sequence[Tensor], clip: Tensor) -> None:
            (param,) = params
            grad = p.gradient_of(param)
            y = p.apply(ops.Matmul, x=p.apply(ops.Cast, x=grad, dtype="fp32").y, weight=param).y
            PLAIN.update(p, params, clip)
            assert y.shape == (4, 4)

    p = update_of([Rule("h.0.w", optimizer=Squares()), Rule("*", optimizer=PLAIN)])
    products = [op for op in p.ops if op.name == "matmul"]
    assert [op.flops() for op in products] == [2 * 4 * 4 * 4] and p.flops == 0
    assert {op.name for op in p.ops if op.update} == {"matmul", "cast", "adamw"}
    assert {op.name for op in p.ops if not op.update} == {"sum_squares", "clip_scale"}
    model = Program(Store())
    model.linear(model.input("x", (2, 4), "fp32"), model.parameter("w", (4, 4)))
    assert model.flops == 2 * 2 * 4 * 4 and not any(op.update for op in model.ops)


@pytest.mark.parametrize("name", ["adamw", "muon", "speedrun"])
def test_what_an_optimizer_is_said_not_to_read_changes_none_of_its_rules_and_the_rest_does(name):
    """Of the fields that rules may read; the others are those of the loop: rates, momentum's schedule, clipping, skips."""
    from barellm.config import UNREAD, OptimConfig
    from barellm.optim.recipes import rules_for

    other = {
        **{"beta1": 0.5, "beta2": 0.6, "eps": 1e-3, "weight_decay": 0.3, "moments": "16bit", "orthogonalization": "jordan"},
        **{"ns_steps": 3, "step_scale": "moonshot", "cautious": True, "normuon": 0.5},
    }
    usual = repr(rules_for(OptimConfig(name=name), "h.*"))
    read = {key for key, value in other.items() if repr(rules_for(OptimConfig(name=name, **{key: value}), "h.*")) != usual}
    assert read == other.keys() - UNREAD[name]
