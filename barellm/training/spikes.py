"""Steps that are skipped because their loss or their gradient's norm is far above those of the steps before, as llm.c does it."""

from collections.abc import Mapping
from math import fsum, isfinite, sqrt
from typing import Any

WINDOW = 128


class Detector:
    """The z-score of a number among the last WINDOW ones, itself included: its distance from their mean in standard deviations. It
    is found anew from these numbers each time, with sums that are rounded once, so that no error grows from step to step."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {"values": [], "next": 0}
        self._values: list[float] = [float(one) for one in state["values"]][:WINDOW]
        self._next = int(state["next"]) % WINDOW

    def state(self) -> dict[str, Any]:
        return {"values": list(self._values), "next": self._next}

    def score(self, value: float) -> float | None:
        """Add a value and return its z-score; None for the first WINDOW values, and for non-finite ones, which are not added."""
        if not isfinite(value):
            return None
        if len(self._values) < WINDOW:
            self._values.append(value)
            return None
        self._values[self._next] = value
        self._next = (self._next + 1) % WINDOW
        mean = fsum(self._values) / WINDOW
        deviation = sqrt(fsum((one - mean) ** 2 for one in self._values) / WINDOW)
        return (value - mean) / deviation if deviation > 0 else 0.0


class Spikes:
    """Both detectors of a run, and how many steps were skipped. A limit of 0 skips nothing."""

    def __init__(self, *, loss_limit: float, norm_limit: float, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._limits = {"loss": loss_limit, "norm": norm_limit}
        self._detectors = {name: Detector(state.get(name)) for name in self._limits}
        self.skipped = int(state.get("skipped", 0))
        self.scores: dict[str, float | None] = {}  # of the step that was looked at last

    @property
    def active(self) -> bool:
        return any(self._limits.values())

    def state(self) -> dict[str, Any]:
        return {"skipped": self.skipped} | {name: found.state() for name, found in self._detectors.items()}

    def look(self, *, loss: float, norm: float) -> str:
        """Score a step's loss and norm; returns why its update is skipped (and counts that), or ""."""
        values = {"loss": loss, "norm": norm}
        self.scores = {name: found.score(values[name]) for name, found in self._detectors.items()}
        for name, score in self.scores.items():  # the loss first
            limit = self._limits[name]
            if limit and score is not None and score > limit:
                self.skipped += 1
                return f"its {name} {values[name]:.4g} is {score:.1f} deviations above the mean of {WINDOW} steps"
        return ""
