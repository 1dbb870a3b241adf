"""10. The optimizer's recipe of GPT-2 and GPT-3: AdamW with decay groups, gradient clipping, warmup and a cosine schedule.

Weight decay shrinks matrices, and leaves biases and norms alone: two groups of parameters. A gradient of norm above 1 is scaled
down to it. The learning rate rises linearly for some steps, while Adam's moments are still poor estimates, and then falls with half
a cosine, so a higher peak does no harm."""

from __future__ import annotations

from common import report, steps_asked, train
from step_08_positions import GPT, Config
from step_09_mixed_precision import MIXED

from barellm.checkpoint.weights import parameters
from barellm.config import OptimConfig
from barellm.optim.adamw import adamw_rules
from barellm.optim.rules import assign_rules
from barellm.training.schedule import learning_rate


def recipe(steps: int) -> dict[str, object]:
    peak = {"lr": 6e-3, "min_lr": 6e-4, "warmup": steps // 10, "schedule": "cosine"}
    return peak | {"weight_decay": 0.1, "clip": 1.0, "beta1": 0.9, "beta2": 0.95}


def main(steps: int) -> float:
    optim = recipe(steps)
    config = OptimConfig(**optim)
    rates = [learning_rate(step, total=steps, optim=config) for step in range(steps)]
    print(f"learning rate: {rates[0]:.1e} at first, {max(rates):.1e} at most, {rates[-1]:.1e} at last")
    run = train(Config(**GPT), steps, "optimizer", optim=optim, **MIXED)
    norms = [row["grad_norm"] for row in run.rows if row["kind"] == "train"]
    print(f"{sum(norm > config.clip for norm in norms)} of {steps} gradients were clipped")
    groups: dict[float, list[str]] = {}
    for param, rule in assign_rules(adamw_rules(config), list(parameters(Config(**GPT)).values())):
        groups.setdefault(rule.optimizer.weight_decay, []).append(param.name)
    for decay, names in groups.items():
        print(f"weight decay {decay}: {len(names)} parameters, such as {', '.join(names[:3])}")
    return report(run.val_nats)


if __name__ == "__main__":
    main(steps_asked())
