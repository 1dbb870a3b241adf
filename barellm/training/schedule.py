"""Learning rate and number of steps."""

from __future__ import annotations

from math import cos, pi

from barellm.config import OptimConfig


def learning_rate(step: int, *, total: int | None, optim: OptimConfig) -> float:
    """Rate of the step with this index (from 0): a linear warmup to `lr`, then `optim.schedule` until the last step:

    cosine    half a wave from `lr` to `min_lr` (Loshchilov and Hutter 2017)
    linear    a line from `lr` to `min_lr`
    constant  `lr`
    wsd       warmup, stable, decay (Hu et al. 2024): `lr`, then a line to `min_lr` over the last `cooldown` of all steps

    `total` None: the number of steps is not chosen yet (`minutes`), the rate stays at `lr` after the warmup.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / (optim.warmup + 1)
    if total is None or optim.schedule == "constant":
        return optim.lr
    falling = total - 1 - optim.warmup  # steps from `lr` to `min_lr`
    if optim.schedule == "wsd":
        falling = min(falling, round(optim.cooldown * total))
    progress = min(1.0, max(0, step - (total - 1 - falling)) / max(1, falling))
    if optim.schedule == "cosine":
        return optim.min_lr + 0.5 * (1.0 + cos(pi * progress)) * (optim.lr - optim.min_lr)
    return optim.lr - progress * (optim.lr - optim.min_lr)


def steps_in_time(*, done: int, step_s: float, pause_s: float, left_s: float, limit: int) -> int:
    """The total number of steps that end within `left_s` seconds from now. A step takes `step_s`, and evaluations and samples add
    `pause_s` to it on average. It is at least one more than `done`, and at most `limit`."""
    more = int(left_s / max(1e-9, step_s + pause_s))
    return min(limit, done + max(1, more))
