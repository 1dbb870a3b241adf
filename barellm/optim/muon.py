"""Muon over the matrices that it is given: momentum, all singular values made one, a step (program/ops/muon.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from barellm.config import OptimConfig
from barellm.optim import adamw
from barellm.optim.rules import Rule
from barellm.program import ops
from barellm.program.builder import Program
from barellm.program.ops.muon import ITERATIONS, STEP_SCALES, lines
from barellm.program.tensor import Tensor

TOGETHER = 1 << 20  # elements of matrices that take each turn together: of small ones one alone keeps few threads busy


@dataclass(frozen=True)
class Muon:
    """Rate: the schedule's `lr` times `lr_scale`. The momentum is the scalar `momentum` of a run. `turns` of the iteration, at most
    as many as it has; `scale`: the rule for the size of a step; `weight_decay`: `cautious` leaves alone what the step makes larger;
    `beta2`: NorMuon's mean of the squares of rows, 0 for no such."""

    lr_scale: float = 1.0
    nesterov: bool = True
    iteration: str = "polar-express"
    turns: int = 5
    scale: str = "jordan"
    weight_decay: float = 0.0
    cautious: bool = False
    beta2: float = 0.0

    def update(self, p: Program, params: Sequence[Tensor], clip: Tensor) -> None:
        """Append the ops that change matrices by their gradients times clip[1]; nothing changes where that is NaN."""
        for together in batches(params):
            self._update(p, together, clip)

    def _update(self, p: Program, params: list[Tensor], clip: Tensor) -> None:
        """Turn by turn for all of them: between two matrices no thread waits for another."""
        how = ITERATIONS[self.iteration]
        xs = [self._begin(p, param, clip) for param in params]
        xs = [p.apply(ops.MuonNormalize, u=x.u, partials=x.partials, margin=how.margin, eps=how.eps).x for x in xs]
        for scale, linear, square in how.turns[: self.turns]:
            grams = [p.apply(ops.Gram, x=x).a for x in xs]
            found = [p.apply(ops.GramPolynomial, a=a, linear=linear, square=square).b for a in grams]
            xs = [p.apply(ops.GramApply, x=x, b=b, scale=scale).y for x, b in zip(xs, found, strict=True)]
        scales: list[Tensor | None] = [None] * len(xs)
        if self.beta2:
            scales = [self._scales(p, param, x, clip) for param, x in zip(params, xs, strict=True)]
        for param, x, factors in zip(params, xs, scales, strict=True):
            self._step(p, param, x, clip, factors)

    def _begin(self, p: Program, param: Tensor, clip: Tensor):
        m = p.state(f"{param.name}.m", param.shape)
        grad = p.gradient_of(param)
        return p.apply(ops.MuonMomentum, grad=grad, m=m, clip=clip, nesterov=self.nesterov, dtype=p.compute)

    def _scales(self, p: Program, param: Tensor, x: Tensor, clip: Tensor) -> Tensor:
        second = p.state(f"{param.name}.v", (lines(param),))
        return p.apply(ops.NorMuonScales, x=x, second=second, clip=clip, beta2=self.beta2).scales

    def _step(self, p: Program, param: Tensor, x: Tensor, clip: Tensor, scales: Tensor | None) -> None:
        size = STEP_SCALES[self.scale](*(int(n) for n in param.shape))
        attrs: dict[str, Any] = {"lr_scale": self.lr_scale, "scale": size}
        attrs |= {"weight_decay": self.weight_decay, "cautious": self.cautious}
        given: dict[str, Any] = {"param": param, "x": x, "clip": clip, "scales": scales}
        p.apply(ops.MuonUpdate, **given, **attrs)


def rules(config: OptimConfig) -> list[Rule]:
    """Muon for matrices of blocks, whose names begin with "h."; the rest as AdamW's rules have it."""
    blocks = Muon(
        lr_scale=config.muon_lr / config.lr if config.lr else 0.0,
        iteration=config.iteration,
        turns=config.turns,
        scale=config.step_scale,
        weight_decay=config.weight_decay,
        cautious=config.cautious,
        beta2=config.normuon,
    )
    return [Rule("h.*", ndim=2, optimizer=blocks), *adamw.rules(config)]


def batches(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that take their turns together."""
    found: list[Tensor] = []
    for param in params:
        found.append(param)
        if sum(t.size for t in found) >= TOGETHER:
            yield found
            found = []
    if found:
        yield found
