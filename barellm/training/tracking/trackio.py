"""trackio, which has W&B's interface and a local database (TRACKIO_DIR)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import trackio

if TYPE_CHECKING:
    from barellm.training.trackers import Subject


class Tracker:
    """All sessions of a run have one name, in which its id tells runs of the same folder name apart."""

    def __init__(self, subject: "Subject") -> None:
        name = f"{subject.name}-{subject.id}"
        how = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        self._run = trackio.init(subject.project, name=name, resume="allow", config=dict(subject.config), **how)

    def log(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self._run.log({**numbers, **texts}, step=step)

    def close(self) -> None:
        self._run.finish()
