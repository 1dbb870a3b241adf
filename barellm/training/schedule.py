"""Learning rate and number of steps."""

from __future__ import annotations

from math import cos, pi

from barellm.config import OptimConfig


def learning_rate(step: int, *, total: int | None, optim: OptimConfig) -> float:
    """Rate of the step with this index (from 0): linear warmup, then a cosine from `lr` to `min_lr` at the last step.

    `total` None: the number of steps is not chosen yet (`minutes`), the rate stays at `lr` after the warmup.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / (optim.warmup + 1)
    if total is None:
        return optim.lr
    progress = min(1.0, (step - optim.warmup) / max(1, total - 1 - optim.warmup))
    return optim.min_lr + 0.5 * (1.0 + cos(pi * progress)) * (optim.lr - optim.min_lr)


def steps_in_time(*, done: int, step_s: float, pause_s: float, left_s: float, limit: int) -> int:
    """Total steps that end within `left_s` seconds from now, at `step_s` a step and `pause_s` a step on average for
    evaluations and samples; at least one more than `done`, at most `limit`."""
    more = int(left_s / max(1e-9, step_s + pause_s))
    return min(limit, done + max(1, more))
