"""The end of a step as modded-nanogpt's record 74 has it, beside its train_gpt.py at commit 20dd1582 written out in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.optim.normuon import Adam, NorMuon, speedrun_rules, speedrun_update, untie
from barellm.optim.rules import assign_rules
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import encode
from barellm.program.ops.optim.muon import POLAR_EXPRESS
from barellm.runtime.reference import ReferenceSession
from tests.optim.test_muon import normal, orthogonalised

LR, MUON_LR = 0.008, 0.023  # of lines 1747 to 1758
OPTIM = OptimConfig(weight_decay=1.2, cautious=True, normuon=0.95, name="muon", lr=LR, muon_lr=MUON_LR, min_lr=0.0)
C, F, V = 8, 32, 11
SHAPES = {
    "embed": (V, C), "bigrams": (5 * V, C), "values.0": (V, C), "qkv.scale": (2,), "smear.scale": (1,), "resid.attn": (2,),
    "post.mlp": (2,), "x0.scale": (2,), "bigrams.scale": (2,), "smear.gate": (1, 4), "skip.gate": (1, 4),
    "h.0.attn.qkv": (3 * C, C), "h.0.attn.proj": (C, C), "h.0.attn.gate": (2, 4), "h.0.value.gate": (2, 4),
    "h.0.mlp.up": (F, C), "h.0.mlp.down": (F, C), "head": (C, V),
}  # fmt: skip

# Lines 1720 to 1736: betas, lr_mul, wd_mul.
THEIRS = {
    "embed|head": (0.5, 0.95, 1, 150), "bigrams|values.0": (0.75, 0.95, 75, 5), "qkv.scale|smear.scale": (0.9, 0.99, 5, 0),
    "resid.attn": (0.9, 0.95, 5, 0), "post.mlp|x0.scale|bigrams.scale": (0.9, 0.95, 1, 0), "smear.gate": (0.9, 0.99, 0.01, 0),
    "skip.gate": (0.9, 0.99, 0.05, 0), "h.0.attn.gate|h.0.value.gate": (0.9, 0.99, 1, 1),
}  # fmt: skip
ADAM = {name: row for names, row in THEIRS.items() for name in names.split("|")}
BANKS = {"h.0.attn.qkv": (3, 1.0), "h.0.attn.proj": (1, 1.0), "h.0.mlp.up": (1, 1.0), "h.0.mlp.down": (1, 2.0)}


class TheirAdam:
    """Lines 821 to 856."""

    def __init__(self, p: np.ndarray, beta1: float, beta2: float, lr_mul: float, wd_mul: float) -> None:
        self.p, self.beta1, self.beta2, self.lr_mul, self.wd_mul = p, beta1, beta2, lr_mul, wd_mul
        self.step, self.exp_avg, self.exp_avg_sq = 0, np.zeros_like(p), np.zeros_like(p)

    def update(self, grad: np.ndarray, schedule: float) -> None:
        lr = LR * schedule * self.lr_mul
        self.step += 1
        bias1, bias2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        self.exp_avg = self.exp_avg * self.beta1 + grad * (1 - self.beta1)
        self.exp_avg_sq = self.exp_avg_sq * self.beta2 + grad * grad * (1 - self.beta2)
        update = self.exp_avg / (self.exp_avg_sq**0.5 + 1e-10) * (lr * (bias2**0.5 / bias1))
        mask = update * self.p > 0
        update = update + self.p * mask * (lr * lr * 0.005 * self.wd_mul)
        self.p = self.p - update


class TheirNorMuon:
    """Lines 862 to 941, of the matrices (count, rows, cols) of one parameter."""

    def __init__(self, p: np.ndarray, count: int, per_matrix: float) -> None:
        self.p, self.per_matrix = p.reshape(count, -1, p.shape[1]), per_matrix
        rows, cols = self.p.shape[1:]
        self.lr_mul, self.red = max(1.0, rows / cols) ** 0.5, -1 if rows >= cols else -2
        self.momentum_buffer, self.second = np.zeros_like(self.p), np.zeros_like(self.p).sum(self.red, keepdims=True)

    def update(self, grad: np.ndarray, schedule: float, momentum: float) -> None:
        lr, grad = MUON_LR * schedule, grad.reshape(self.p.shape)
        self.momentum_buffer += (1 - momentum) * (grad - self.momentum_buffer)
        g = grad + momentum * (self.momentum_buffer - grad)
        v = np.stack([orthogonalised(one, POLAR_EXPRESS, 1.02, 1e-6) for one in g])
        mean, size = (v**2).mean(self.red, keepdims=True), v.shape[self.red]
        norm = (mean.sum((-2, -1), keepdims=True) * size) ** 0.5
        self.second += (1 - 0.95) * (mean - self.second)
        step_size = np.maximum(self.second, 1e-10) ** -0.5
        norm_new = (mean * size * step_size**2).sum((-2, -1), keepdims=True) ** 0.5
        v = v * (step_size * (norm / np.maximum(norm_new, 1e-10)))
        wd_factor, lr_factor = 1.2 * lr, self.lr_mul * self.per_matrix * lr
        mask = v * self.p >= 0
        self.p = self.p - self.p * mask * wd_factor * lr_factor - v * lr_factor


class Theirs:
    """Lines 657 to 670 and 717 to 816, on one processor: gradients add up until Adam's step."""

    def __init__(self, params: dict[str, np.ndarray]) -> None:
        self.adam = {n: TheirAdam(params[n], *row) for n, row in ADAM.items()}
        self.muon = {n: TheirNorMuon(params[n], *row) for n, row in BANKS.items()}
        self.grads = {n: np.zeros_like(p) for n, p in params.items()}
        self.split_embed = False

    def step(self, grads: dict[str, np.ndarray], schedule: float, momentum: float, *, do_adam: bool, split: bool) -> None:
        for n, g in grads.items():
            self.grads[n] = self.grads[n] + g
        if do_adam and not self.split_embed:
            self.grads["head"] = self.grads["head"] + self.grads["embed"].T
        if do_adam:
            for n, t in self.adam.items():
                if n != "embed" or self.split_embed:
                    t.update(self.grads[n], schedule)
        for n, t in self.muon.items():
            t.update(self.grads[n], schedule, momentum)
        if do_adam and not self.split_embed:
            self.adam["embed"].p = self.adam["head"].p.T.copy()
        self.grads = {n: g * (n in self.adam and not do_adam) for n, g in self.grads.items()}
        if split:
            embed, head = self.adam["embed"], self.adam["head"]
            embed.step, embed.exp_avg, embed.exp_avg_sq = head.step, head.exp_avg.T.copy(), head.exp_avg_sq.T.copy()
            self.split_embed = True

    def all(self) -> dict[str, np.ndarray]:
        return {n: t.p.reshape(SHAPES[n]) for n, t in {**self.adam, **self.muon}.items()}


def programs(compute: str = "fp32", **formats: str) -> dict[str, Program]:
    """The programs that end a step, of parameters SHAPES; `formats`: of the parameters whose names begin so."""
    store, made = Store(), {}
    ends: dict[str, Callable[[Program], None]] = {
        "muon": lambda p: speedrun_update(p, speedrun_rules(OPTIM), adam=False),
        "tied": lambda p: speedrun_update(p, speedrun_rules(OPTIM), adam=True, tied=True),
        "untied": lambda p: speedrun_update(p, speedrun_rules(OPTIM), adam=True),
        "untie": untie,
    }
    for name, append in ends.items():
        made[name] = p = Program(store, compute=compute)
        for param, shape in SHAPES.items():
            dtype = next((dtype for start, dtype in formats.items() if param.startswith(start)), None)
            p.parameter(param, shape, std=1.0, dtype=dtype)
        append(p)
    return made


def begin(session: Any) -> dict[str, np.ndarray]:
    """Random weights, embed the head's transpose; states and gradients zero."""
    params = {n: normal(*shape, seed=i).astype(np.float32).astype(np.float64) for i, (n, shape) in enumerate(SHAPES.items())}
    params["embed"] = params["head"].T.copy()
    for name, t in session.tensors.items():
        if t.role in ("state", "gradient"):
            session.write(name, np.zeros(t.shape))
    for name, values in params.items():
        session.write(name, values)
    return params


def drive(session: Any, steps: int = 9, split: int = 5):
    """Steps as the loop takes them, with random gradients of which the micro-batch's are added or begun; yields (gradients, what
    theirs is told) before each step's end."""
    for step in range(steps):
        adam, schedule, momentum = step % 2 == 1, 1.5 - 0.1 * step, 0.85 + 0.01 * step
        grads = {n: normal(*shape, seed=1000 + 50 * step + i) for i, (n, shape) in enumerate(SHAPES.items())}
        for n, g in grads.items():
            session.write(f"{n}.grad", g + session.read(f"{n}.grad") if adam else g)
        yield grads, {"schedule": schedule, "momentum": momentum, "do_adam": adam, "split": step == split}
        name = "muon" if not adam else "tied" if step <= split else "untied"
        session.run(name, lr=LR * schedule, muon_lr=MUON_LR * schedule, momentum=momentum, step=(step + 1) // 2, seed=0)
        if step == split:
            session.run("untie")


@pytest.mark.parametrize(
    "session, rtol", [(ReferenceSession, 1e-9), (lambda made: CpuSession(made, threads=2), 2e-3)], ids=["reference", "cpu"]
)
def test_nine_steps_are_theirs(session, rtol):
    """Of all kinds: with Adam and without, tied, the one that unties, and untied."""
    ours = session(programs())
    theirs = Theirs(begin(ours))
    for step, (grads, told) in enumerate(drive(ours)):
        if step:
            for name, want in theirs.all().items():
                np.testing.assert_allclose(ours.read(name), want, rtol=rtol, atol=rtol, err_msg=f"{name} after {step}")
        theirs.step(grads, **told)
    for name, want in theirs.all().items():
        np.testing.assert_allclose(ours.read(name), want, rtol=rtol, atol=rtol, err_msg=name)
    assert not np.allclose(ours.read("embed"), ours.read("head").T, atol=1e-4)


def test_every_parameter_has_the_rule_of_their_table():
    p = Program(Store())
    for name, shape in SHAPES.items():
        p.parameter(name, shape)
    for t, rule in assign_rules(speedrun_rules(OPTIM), p.store.of_role("parameter")):
        o: Any = rule.optimizer
        if t.name in ADAM:
            assert isinstance(o, Adam)
            assert (o.beta1, o.beta2, o.lr_scale, o.wd_mul) == ADAM[t.name], t.name
            assert (o.eps, o.weight_decay) == (1e-10, 0.005)
        else:
            assert isinstance(o, NorMuon)
            assert (o.matrices, o.lr_mul) == BANKS[t.name], t.name
            assert (o.rate, o.lr_scale, o.weight_decay, o.beta2) == ("muon_lr", 1.0, 1.2, 0.95)


def test_nothing_but_gradients_changes_where_a_norm_is_not_finite():
    session = ReferenceSession(programs())
    begin(session)
    for _ in drive(session, steps=2):
        pass
    for name, gone in (("muon", "h.0.mlp.up"), ("tied", "embed"), ("untied", "values.0")):
        kept = {n: session.read(n) for n, t in session.tensors.items() if t.role in ("parameter", "state")}
        session.write(f"{gone}.grad", np.full(SHAPES[gone], np.inf))
        session.run(name, lr=LR, muon_lr=MUON_LR, momentum=0.9, step=3, seed=0)
        assert np.isnan(session.read("clip")[1]) and session.read("skipped")[0] == kept.pop("skipped")[0] + 1
        for n, values in kept.items():
            assert np.array_equal(session.read(n), values), (name, n)
        if name == "muon":  # what it is about begins anew, the rest goes on growing
            assert not session.read(f"{gone}.grad").any() and session.read("values.0.grad").any()
        session.write(f"{gone}.grad", np.zeros(SHAPES[gone]))


# --- the bits of a truncated weight ---


def their_step(p: np.ndarray, mantissa: np.ndarray, grad: np.ndarray, wd: float, lr: float):
    """Lines 907 to 926, on uint16 halves in fp32."""
    wd_factor, lr_factor = np.float32(wd), np.float32(lr)
    raw = p.astype(np.uint32) << 16 | mantissa.astype(np.uint32)
    precise = raw.view(np.float32)
    mask = (grad * precise >= 0).astype(np.float32)
    raw = (precise - (precise * mask * wd_factor * lr_factor) - (grad * lr_factor)).view(np.uint32)
    return (raw >> 16).astype(np.uint16), raw.astype(np.uint16)


def test_a_truncated_weights_halves_are_theirs():
    """Powers of two as rates, so that both orders of the products round alike."""
    p, shape = Program(Store(), compute="bf16"), (33, 70)
    weight = p.parameter("w", shape, dtype="bf16_u16")
    given: dict[str, Any] = {"x": p.input("x", shape, "bf16"), "clip": p.input("clip", (2,), "fp32")}
    given |= {"lr_scale": 1.0, "scale": 2.0, "weight_decay": 0.5, "cautious": True, "squared": True}
    p.apply(ops.MuonUpdate, param=weight, **given)
    ours = CpuSession({"optimizer_step": p}, threads=1)
    start, grad = normal(*shape, seed=1).astype(np.float32), normal(*shape, seed=2).astype(np.float32)
    high, low = (half.view(np.uint16) for half in encode(start, "bf16_u16"))
    (grad_bf16,) = encode(grad, "bf16")
    ours.write("w", start)
    ours.write("x", grad_bf16.astype(np.float32))
    ours.write("clip", np.array([1.0, 1.0]))
    for _ in range(5):
        ours.run("optimizer_step", lr=0.03125)
        high, low = their_step(high, low, grad_bf16.astype(np.float32), 0.5 * 0.03125, 2 * 0.03125)
    assert np.array_equal(ours.read("w"), (high.astype(np.uint32) << 16 | low).view(np.float32))
    assert low.any() and np.abs(ours.read("w") - start).max() > 0.1
