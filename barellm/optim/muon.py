"""Muon over the matrices that it is given: momentum, all singular values made one, a step (program/ops/optim/muon.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from barellm.config import OptimConfig
from barellm.optim import adamw, rules
from barellm.program import ops
from barellm.program.builder import Program
from barellm.program.ops.optim.muon import ITERATIONS, STEP_SCALES, lines
from barellm.program.tensor import Tensor

# Elements of matrices whose Newton-Schulz steps are interleaved: a small one alone keeps few threads busy.
TOGETHER = 1 << 20


@dataclass(frozen=True)
class Muon:
    """Muon with these constants. The learning rate is the run's scalar `rate` times `lr_scale`, and the momentum its scalar
    `momentum`. `ns_steps` Newton-Schulz steps are done, with the coefficients of `orthogonalization`. `scale` names
    the rule that scales the learning rate by the matrix's shape, times `lr_mul`. With `cautious`, `weight_decay` leaves alone
    what the update makes larger; with `squared`, it is multiplied by the scale. `beta2` is the decay rate of NorMuon's mean of the
    squares of rows; 0 means none. In each parameter lie so many `matrices` of equal size, one below the other."""

    rate: str = "lr"
    lr_scale: float = 1.0
    nesterov: bool = True
    orthogonalization: str = "polar-express"
    ns_steps: int = 5
    scale: str = "jordan"
    weight_decay: float = 0.0
    cautious: bool = False
    beta2: float = 0.0
    lr_mul: float = 1.0
    squared: bool = False
    matrices: int = 1
    whole: ClassVar[bool] = True

    def update(self, p: Program, params: Sequence[Tensor], clip: Tensor) -> None:
        """Append the ops that change matrices by their gradients times clip[1]; nothing changes where that is NaN."""
        for together in batches(params):
            self._update(p, together, clip)

    def _update(self, p: Program, params: list[Tensor], clip: Tensor) -> None:
        """Append the Newton-Schulz steps, interleaved over all matrices, so that threads need not wait between two matrices."""
        iteration = ITERATIONS[self.orthogonalization]
        bank: dict[str, Any] = {"matrices": self.matrices}
        # Momentum, and a norm of at most one.
        begun = [self._begin(p, param, clip) for param in params]
        bounds = {"margin": iteration.margin, "eps": iteration.eps}
        xs = [p.apply(ops.MuonNormalize, u=x.u, partials=x.partials, **bounds, **bank).x for x in begun]
        # A step: x = scale x + (linear A + square A^2) x with A = x x^T (of tall matrices x^T x).
        for scale, linear, square in iteration.turns[: self.ns_steps]:
            grams = [p.apply(ops.Gram, x=x, **bank).a for x in xs]
            polynomials = [p.apply(ops.GramPolynomial, a=a, linear=linear, square=square, **bank).b for a in grams]
            xs = [p.apply(ops.GramApply, x=x, b=b, scale=scale, **bank).y for x, b in zip(xs, polynomials, strict=True)]
        # NorMuon's scales of rows, and the step of the weights.
        scales: list[Tensor | None] = [None] * len(xs)
        if self.beta2:
            scales = [self._scales(p, param, x, clip) for param, x in zip(params, xs, strict=True)]
        for param, x, factors in zip(params, xs, scales, strict=True):
            self._step(p, param, x, clip, factors)

    def _begin(self, p: Program, param: Tensor, clip: Tensor):
        m = p.state(f"{param.name}.m", param.shape)
        grad = p.gradient_of(param)
        attrs: dict[str, Any] = {"nesterov": self.nesterov, "dtype": p.compute, "matrices": self.matrices}
        return p.apply(ops.MuonMomentum, grad=grad, m=m, clip=clip, **attrs)

    def _scales(self, p: Program, param: Tensor, x: Tensor, clip: Tensor) -> Tensor:
        second = p.state(f"{param.name}.v", (lines(param, self.matrices),))
        attrs: dict[str, Any] = {"beta2": self.beta2, "matrices": self.matrices}
        return p.apply(ops.NorMuonScales, x=x, second=second, clip=clip, **attrs).scales

    def _step(self, p: Program, param: Tensor, x: Tensor, clip: Tensor, scales: Tensor | None) -> None:
        rows, cols = (int(n) for n in param.shape)
        size = self.lr_mul * STEP_SCALES[self.scale](rows // self.matrices, cols)
        attrs: dict[str, Any] = {"rate": self.rate, "lr_scale": self.lr_scale, "scale": size, "matrices": self.matrices}
        attrs |= {"weight_decay": self.weight_decay, "cautious": self.cautious, "squared": self.squared}
        given: dict[str, Any] = {"param": param, "x": x, "clip": clip, "scales": scales}
        p.apply(ops.MuonUpdate, **given, **attrs)


def muon_rules(config: OptimConfig, hidden: str) -> list[rules.Rule]:
    """The table for `optim.name muon`: Muon for the matrices whose names match the shell pattern `hidden`, AdamW's rules for the
    rest (the first rule that matches a parameter decides). `config.normuon`: beta2 of NorMuon's second moment; 0: plain Muon."""
    blocks = Muon(
        rate="muon_lr", orthogonalization=config.orthogonalization, ns_steps=config.ns_steps, scale=config.step_scale,
        weight_decay=config.weight_decay, cautious=config.cautious, beta2=config.normuon,
    )  # fmt: skip
    return [rules.Rule(hidden, ndim=2, optimizer=blocks), *adamw.adamw_rules(config)]


def batches(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of neighbouring matrices whose Newton-Schulz steps are interleaved."""
    batch: list[Tensor] = []
    for param in params:
        batch.append(param)
        if sum(t.size for t in batch) >= TOGETHER:
            yield batch
            batch = []
    if batch:
        yield batch
