"""Which parameter gets which optimizer: a table of rules, of which the first that matches a parameter decides.

    RULES = [
        Rule("wte|wpe", optimizer=AdamW(weight_decay=0.0)),
        Rule("*", ndim=2, optimizer=Muon(lr_scale=20.0)),
        Rule("*", optimizer=AdamW(weight_decay=0.0)),
    ]

An optimizer is a frozen dataclass with the method `update(p, params, clip)`, which appends the ops that change its parameters: of
all of them at once, for small ones keep more threads busy together than one after the other. The scalar `lr` of a run is the value
of the schedule; an optimizer's own rate is that times its constant `lr_scale`, so that no change of `lr` compiles anything. Muon
may take another scalar, by its `rate`: a run's `muon_lr`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from barellm.errors import UserError
from barellm.optim.powersgd import Compression
from barellm.optim.sharding import OptimizerSharding, shard
from barellm.program import loss_scale, ops

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.ranks import Ranks
    from barellm.program.tensor import Tensor


class Optimizer(Protocol):
    @property
    def lr_scale(self) -> float: ...

    def update(self, p: Program, params: Sequence[Tensor], clip: Tensor) -> None:
        """Append the ops that change each of `params` by its gradient (`p.gradient_of`) times `clip[1]`; nothing may change where
        that is NaN. What they keep between steps is `p.state(f"{param.base.name}.NAME", ...)`. With several ranks `params` are this
        rank's; they may be spans of parameters where the optimizer's class says `whole = False`."""
        ...


@dataclass(frozen=True)
class Rule:
    """One row of the table. `names` are shell patterns for names of parameters, with "|" between them. With `ndim`, only
    parameters with so many axes match."""

    names: str = "*"
    ndim: int | None = field(default=None, kw_only=True)
    optimizer: Optimizer = field(kw_only=True)

    def matches(self, param: Tensor) -> bool:
        named = any(fnmatchcase(param.name, pattern) for pattern in self.names.split("|"))
        return named and self.ndim in (None, len(param.shape))


def assign_rules(rules: Sequence[Rule], params: Sequence[Tensor]) -> Iterator[tuple[Tensor, Rule]]:
    """Each parameter with its rule. ValueError for one that no rule matches."""
    for param in params:
        rule = next((rule for rule in rules if rule.matches(param)), None)
        if rule is None:
            raise ValueError(f"no rule gives {param.name} {tuple(param.shape)} an optimizer, expected a last rule for '*'")
        yield param, rule


def update(
    p: Program, rules: Sequence[Rule], *, clip: float, params: Sequence[Tensor] | None = None, ranks: Ranks | None = None,
    powersgd: int = 0, overlap: bool = False,
) -> None:  # fmt: skip
    """Append the update of `params` (None: all trained): global gradient norm, one clipping scale (`clip` 0: none), then each
    parameter's optimizer. With several `ranks` each updates its shard (`optim.sharding`), or all of them with `powersgd`
    compression (columns of a factor; 0: none). `overlap`: the reduce-scatter overlaps the backward pass.
    The output "clip" is [norm, scale]; the state "skipped" counts updates skipped for a non-finite norm."""
    params = p.store.trainable if params is None else params
    sharding = select_sharding(rules, params, ranks, powersgd, overlap)
    scale = p.output("clip", append_clip_scale(p, params, clip=clip, sharding=sharding))
    append_updates(p, rules, scale, params=params, sharding=sharding)


def select_sharding(
    rules: Sequence[Rule], params: Sequence[Tensor], ranks: Ranks | None, powersgd: int = 0, overlap: bool = False
) -> OptimizerSharding | Compression | None:
    """How the ranks divide the update: PowerSGD compression, shards of the optimizer's state (of parameters, or of their elements
    where the optimizer's class says `whole = False`), or None for one process that compresses nothing."""
    if powersgd:
        return Compression(powersgd, ranks)
    if ranks is None or ranks.count == 1:
        return None
    whole, cut = [], []
    for optimizer, given in _groups(rules, params).items():
        (whole if getattr(optimizer, "whole", True) else cut).extend(given)
    return shard(ranks, whole=whole, cut=cut, overlap=overlap)


def append_clip_scale(
    p: Program, params: Sequence[Tensor], *, clip: float, into: Tensor | None = None,
    sharding: OptimizerSharding | Compression | None = None,
) -> Tensor:  # fmt: skip
    """Append the norm of the gradients of `params` and the scale that takes it down to `clip`. Returns the tensor (2) [norm,
    scale], which is `into` if given. With `sharding` the gradients are summed over the ranks first."""
    of_loss = loss_scale.loss_scale_of(p)
    scaled = {t: name for t in params if (name := p.store.branches.get(t))}
    if scaled and isinstance(sharding, OptimizerSharding) and sharding.overlap:
        raise UserError("train.branch_scales is true, and optim.overlap too: expected optim.overlap false")
    for t, name in scaled.items():
        grad, given = p.gradient_of(t), loss_scale.branch_scale(p, name)
        p.apply(ops.GradientScale, into={"y": (grad, "store")}, x=grad, given=given, wanted=of_loss, filtered=False)
    if sharding is None:
        partials = [p.apply(ops.SumSquares, x=p.gradient_of(t)).partials for t in params]
    else:
        partials = sharding.partials(p, params)
    squares = {f"p{i}": t for i, t in enumerate(partials)}
    operands = {"skipped": p.state("skipped", (1,), "i32"), "loss_scale": of_loss, **squares}
    scale = p.apply(ops.ClipScale, **operands, clip=clip, into=None if into is None else {"clip": (into, "store")})
    if of_loss is not None:
        names = [scaled.get(t) for t in params]
        for name in dict.fromkeys(names):
            own: dict[str, Any] = {f"p{i}": t for i, t in enumerate(partials) if names[i] == name}
            p.apply(ops.UpdateScale, scale=loss_scale.branch_scale(p, name), **own)
    return scale.clip


def append_updates(
    p: Program, rules: Sequence[Rule], scale: Tensor, *, params: Sequence[Tensor],
    sharding: OptimizerSharding | Compression | None = None,
) -> None:  # fmt: skip
    """Append the update of each of `params` by the optimizer that the rules give it; `scale` is from `append_clip_scale`, and
    nothing changes where scale[1] is NaN. With `sharding` this rank updates its shard, and gets the rest from the others."""
    if sharding is not None:
        sharding.restore(p, params, scale)
    first = len(p.ops)
    for optimizer, given in _groups(rules, params).items():
        shards = given if sharding is None else [own for t in given if (own := sharding.own(t)) is not None]
        optimizer.update(p, shards, scale)
    for op in p.ops[first:]:
        op.counted, op.update = False, True
    if sharding is not None:
        sharding.all_gather(p, params)


def _groups(rules: Sequence[Rule], params: Sequence[Tensor]) -> dict[Optimizer, list[Tensor]]:
    """The parameters of each optimizer, in the order of the rules."""
    groups: dict[Optimizer, list[Tensor]] = {rule.optimizer: [] for rule in rules}
    for param, rule in assign_rules(rules, params):
        groups[rule.optimizer].append(param)
    return groups
