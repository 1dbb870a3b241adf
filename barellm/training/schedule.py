"""Learning rates and number of steps."""

from math import cos, pi

from barellm.config import OptimConfig


def rates(step: int, *, total: int | None, optim: OptimConfig) -> dict[str, float]:
    """The learning rates of the step with this index (from 0): `lr`, and `muon_lr` where Muon has one of its own."""
    return optim.rates(lambda high, low: _scheduled(step, high, low, total=total, optim=optim))


def learning_rate(step: int, *, total: int | None, optim: OptimConfig) -> float:
    """Rate of the step with this index (from 0): a linear warmup to `lr`, then `optim.schedule` until the last step:

    cosine    half a wave from `lr` to `min_lr` (Loshchilov and Hutter 2017)
    linear    a line from `lr` to `min_lr`
    constant  `lr`
    wsd       warmup, stable, decay (Hu et al. 2024): `lr`, then a line to `min_lr` over the last `decay_fraction` of all steps

    `total` None: the number of steps is not chosen yet (`minutes`), the rate stays at `lr` after the warmup."""
    return _scheduled(step, optim.lr, optim.min_lr, total=total, optim=optim)


def _scheduled(step: int, high: float, low: float, *, total: int | None, optim: OptimConfig) -> float:
    """The schedule between the peak rate `high` and the final rate `low`; see `learning_rate`."""
    if step < optim.warmup:
        return high * (step + 1) / (optim.warmup + 1)
    if total is None or optim.schedule == "constant":
        return high
    falling = total - 1 - optim.warmup  # steps from `lr` to `min_lr`
    if optim.schedule == "wsd":
        falling = min(falling, round(optim.decay_fraction * total))
    progress = min(1.0, max(0, step - (total - 1 - falling)) / max(1, falling))
    if optim.schedule == "cosine":
        return low + 0.5 * (1.0 + cos(pi * progress)) * (high - low)
    return high - progress * (high - low)


def steps_in_time(*, done: int, step_s: float, pause_s: float, left_s: float, limit: int) -> int:
    """The total number of steps that end within `left_s` seconds from now. A step takes `step_s`, and evaluations and samples add
    `pause_s` to it on average. It is at least one more than `done`, and at most `limit`."""
    return min(limit, done + max(1, int(left_s / max(1e-9, step_s + pause_s))))
