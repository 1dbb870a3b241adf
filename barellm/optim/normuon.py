"""The optimizers of modded-nanogpt's record 74 (its pull request 233, commit 20dd1582): NorMuon for the matrices of layers,
in every step, and an Adam of its own for all else, in every second one.

The classifier's weight `head` (C, V) and the embedding (V, C) are one matrix for the first part of a run, kept twice: Adam updates
`head` by the gradients of both, and the embedding gets a copy. When they part, the embedding takes a copy of Adam's state along.
So the end of a step is one of three programs, and one more runs where they part:

    update          the matrices of layers; their gradients become zero, and the others go on growing in the next step
    optimizer_step_tied     all but the embedding, which becomes the transpose of the new head
    optimizer_step_untied   all
    untie           the embedding's state becomes the transpose of the head's"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from barellm.config import OptimConfig
from barellm.optim.muon import Muon
from barellm.optim.rules import Rule, assign_rules, update
from barellm.program import ops
from barellm.program.builder import Program
from barellm.program.tensor import Tensor


@dataclass(frozen=True)
class NorMuon(Muon):
    """Muon with rows of equal size, and a decay that acts with the step only and falls with the square of the rate."""

    weight_decay: float = 1.2
    cautious: bool = True
    squared: bool = True
    beta2: float = 0.95


@dataclass(frozen=True)
class Adam:
    """Adam whose weight decay acts with the step only and falls with the square of the rate (`program.ops.optimizer`). The rate is
    the run's times `lr_scale`, and the decay `weight_decay` times `wd_mul`. The scalar `step` counts its updates, from 1."""

    beta1: float = 0.9
    beta2: float = 0.95
    lr_scale: float = 1.0
    wd_mul: float = 1.0
    weight_decay: float = 0.005
    eps: float = 1e-10
    whole: ClassVar[bool] = False

    def update(self, p: Program, params: Sequence[Tensor], clip: Tensor) -> None:
        """An op for each parameter (`Optimizer.update`)."""
        for param in params:
            m, v = moments(p, param)
            p.apply(
                ops.CautiousAdam, param=param, grad=p.gradient_of(param), clip=clip, m=m, v=v, beta1=self.beta1,
                beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay * self.wd_mul, stream=None,
                bf16=param.base.bf16 or None, lr_scale=self.lr_scale,
            )  # fmt: skip


def moments(p: Program, param: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's state of a parameter."""
    return p.state(f"{param.name}.m", param.shape), p.state(f"{param.name}.v", param.shape)


def speedrun_rules(config: OptimConfig) -> list[Rule]:
    """The table for `optim.name speedrun`: an optimizer for each parameter of models/speedrun.py, at `lr` (Adam) or `muon_lr`."""
    muon = {"rate": "muon_lr", "ns_steps": config.ns_steps}
    muon |= {"beta2": config.normuon, "cautious": config.cautious, "weight_decay": config.weight_decay}
    return [
        Rule("h.*.attn.qkv", optimizer=NorMuon(matrices=3, **muon)), Rule("h.*.attn.proj|h.*.mlp.up", optimizer=NorMuon(**muon)),
        Rule("h.*.mlp.down", optimizer=NorMuon(lr_mul=2.0, **muon)), Rule("embed|head", optimizer=Adam(0.5, 0.95, wd_mul=150.0)),
        Rule("values.*|bigrams", optimizer=Adam(0.75, 0.95, lr_scale=75.0, wd_mul=5.0)),
        Rule("h.*.gate", optimizer=Adam(0.9, 0.99)), Rule("smear.gate", optimizer=Adam(0.9, 0.99, lr_scale=0.01, wd_mul=0.0)),
        Rule("skip.gate", optimizer=Adam(0.9, 0.99, lr_scale=0.05, wd_mul=0.0)),
        Rule("resid.*", optimizer=Adam(0.9, 0.95, lr_scale=5.0, wd_mul=0.0)),
        Rule("post.*|lanes.*|x0.*|bigrams.scale", optimizer=Adam(0.9, 0.95, wd_mul=0.0)),
        Rule("*.scale", optimizer=Adam(0.9, 0.99, lr_scale=5.0, wd_mul=0.0)),
    ]  # fmt: skip


def updates(config: OptimConfig) -> dict[str, Callable[[Program], None]]:
    """The four programs by name: what appends each."""
    table = speedrun_rules(config)
    return {
        "optimizer_step": partial(speedrun_update, rules=table, adam=False),
        "optimizer_step_tied": partial(speedrun_update, rules=table, adam=True, tied=True),
        "optimizer_step_untied": partial(speedrun_update, rules=table, adam=True),
        "untie": untie,
    }


def speedrun_update(
    p: Program, rules: Sequence[Rule], *, adam: bool, tied: bool = False, embed: str = "embed", head: str = "head"
) -> None:
    """Append the end of a step. `adam`: update all parameters, else only NorMuon's. `tied`: `embed` (V, C) and `head` (C, V) are
    one parameter, so `head` gets the sum of both gradients and `embed` is set to its transpose. A step without Adam keeps Adam's
    gradients, to which the next step adds, and zeroes NorMuon's. A non-finite norm skips all."""
    params = p.store.trainable
    pair = [next(t for t in params if t.name == name) for name in (embed, head)] if adam and tied else []
    updated = [t for t, rule in assign_rules(rules, params) if adam or isinstance(rule.optimizer, Muon)]
    if pair:
        p.transpose_add(p.gradient_of(pair[0]), p.gradient_of(pair[1]))
        updated.remove(pair[0])
    update(p, rules, clip=0.0, params=updated)
    if pair:
        p.transpose_copy(pair[1], pair[0])
    if not adam:
        for t in updated:
            p.fill(p.gradient_of(t), 0.0)


def untie(p: Program, *, embed: str = "embed", head: str = "head") -> None:
    """Append the copies of the head's state for the embedding, which is on its own from now on."""
    params = {t.name: t for t in p.store.trainable}
    for ours, theirs in zip(moments(p, params[embed]), moments(p, params[head]), strict=True):
        p.transpose_copy(theirs, ours)
