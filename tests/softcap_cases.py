"""Operands and error bounds of softcapped losses, and a network with stored-transposed weights: for the tests of every backend."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.builder import Program
from barellm.program.ops.softcap import MTP, ahead, capped, slope
from barellm.program.tensor import Dim
from tests.cases import loss_operands, normal, stored
from tests.check import EPS, tokens

SPEEDRUN = (23.0, 5.0, 7.5)
WEIGHTS: dict[str, float] = dict(zip(MTP, (1.0, 0.5, 0.3), strict=True))
SCALARS = {"inv_targets": 1 / 7, **WEIGHTS}
# ((batch, length, columns, valid columns), cap, predict): sequences shorter than what is predicted, targets that repeat.
CASES = [
    ((1, 1, 1, 1), SPEEDRUN, 3),
    ((2, 2, 7, 7), SPEEDRUN, 3),
    ((3, 5, 65, 60), SPEEDRUN, 2),
    ((3, 5, 65, 65), None, 3),
    ((1, 37, 128, 97), (70.0, -1.0, 0.5), 3),
    ((2, 3, 1031, 1000), SPEEDRUN, 1),
]
LARGE = ((1, 2, 50304, 50257), SPEEDRUN, 3)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


TANH = (6.0, 0.0, 1.5)  # 3 tanh(x / 3)


def softcap_case(case, dtype) -> dict:
    """What `check_op` wants for a loss."""
    (B, T, V, valid), cap, predict = case
    size = 24 if cap is None else cap[0] + 20
    bounds = {"lse": 16 * EPS * size, "next_loss": 32 * EPS * size * B * T}
    bounds["loss"] = bounds["next_loss"] * sum(WEIGHTS.values())
    attrs = {"valid_vocab": valid, "cap": cap, "predict": predict, "scalars": SCALARS, "plan": (B + 1, T + 2)}
    return {"given": loss_operands((B, T, V, valid), dtype), "bounds": bounds, **attrs}


def softcap_gradient_case(case, dtype, mode) -> dict:
    (B, T, V, valid), cap, predict = case
    given = loss_operands((B, T, V, valid), dtype)
    x, targets = given["logits"].values[..., :valid], given["targets"].values
    attrs = {"valid_vocab": valid, "cap": cap, "predict": predict}
    given["lse"] = tokens(ops.SoftcapCrossEntropy({}, attrs).reference(given["logits"].values, targets, **SCALARS)["lse"])
    # Roundings of the sigmoid's argument, of z - lse, and of what is subtracted at the targets.
    z, steep = capped(x, cap), slope(x, cap) * np.ones_like(x)
    u = 0.0 if cap is None else np.abs((x + cap[1]) / cap[2])
    p = np.exp(z - given["lse"].values[..., None])
    distance = np.abs(z - given["lse"].values[..., None]) + np.abs(z)
    size = np.sum([WEIGHTS[MTP[k]] * (ahead(targets, k) >= 0) for k in range(predict)], 0)[..., None]
    onehot = np.sum([np.arange(valid) == ahead(targets, k)[..., None] for k in range(predict)], 0)
    bound = EPS / 7 * steep * size * (p * (24 + 4 * distance + 8 * u) + onehot * (16 + 8 * u)) + 1e-15
    bounds = np.zeros((B, T, V)) + (2 * EPS if mode == "add" else 0)
    bounds[..., :valid] += bound
    more = {"scalars": SCALARS, "plan": (B + 1, T + 2), "modes": {"dlogits": mode}}
    return {"given": given, "bounds": {"dlogits": bounds}, **attrs, **more}


def transposed_network(
    p: Program, *, C: int, F: int, V: int, activation: str, cap=SPEEDRUN, predict: int = 3, sizes=(3, 11), scaling=None,
    transposed: bool = True,
) -> None:  # fmt: skip
    """A model whose second weight of the block and head are stored (in, out), the head not unless `transposed`, with the rows that
    go with them. `sizes`: batch and length, at most."""
    shape = (Dim("batch", sizes[0]), Dim("seq", sizes[1]))
    token, target = p.input("tokens", shape), p.input("targets", shape)
    x = p.embedding(token, p.parameter("wte", (V, C), std=0.5))
    h = p.activate(p.linear(p.rmsnorm(x), p.parameter("fc", (F, C), std=0.3)), activation)
    x = p.add(x, p.linear(h, p.parameter("proj", (F, C), std=0.3), transposed_weight=True))
    given = {"valid_vocab": V - 2, "cap": cap, "predict": predict, "scaling": scaling}
    head = p.parameter("head", (C, V) if transposed else (V, C), std=0.5)
    loss = p.softcapped_classifier(p.rmsnorm(x), head, target, **given, transposed=transposed)
    p.output("loss", loss)


def transposed_rows(activation: str) -> set[str]:
    """The rows of tables that such a network uses beside those of any network."""
    return {f"matmul_{activation}_backward", "softcapped_classifier", "softcapped_classifier_loss"}


def capped_logits_case(dtype, cap=SPEEDRUN) -> dict:
    x = stored(normal(2, 3, 37) * 20, dtype)
    return {"given": {"x": tokens(x, dtype)}, "bounds": {"y": 16 * EPS * cap[0]}, "cap": cap}
