"""Weights & Biases. Its own environment variables say where to: WANDB_MODE=offline writes to RUN/wandb and sends nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import wandb

if TYPE_CHECKING:
    from barellm.training.trackers import Subject


class Tracker:
    """All sessions of a run have one id. The axis of all charts is "step": W&B's counter cannot go back, as a killed run does."""

    def __init__(self, subject: "Subject") -> None:
        self._run = wandb.init(
            project=subject.project, name=subject.name, id=subject.id, resume="allow", dir=str(subject.folder),
            config=dict(subject.config), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self._run.log({"step": step, **numbers, **texts})

    def close(self) -> None:
        self._run.finish()
