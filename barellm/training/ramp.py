"""How many micro-batches each step has: always as many, or more and more, as GPT-3's batch grew (Brown et al. 2020, appendix B)."""

from __future__ import annotations

from barellm.config import TrainConfig


class Ramp:
    """A function of the step alone: the number of micro-batches rises from `ramp_from` to `accumulate` in a line over the first
    `ramp_tokens` tokens, rounded down. It is found in whole numbers, so that it is the same on every machine."""

    def __init__(self, train: TrainConfig) -> None:
        self._full = train.accumulate
        self._tokens = train.batch * train.seq  # of a micro-batch
        self._before = [0]  # micro-batches before each step of the ramp, and before the first full one
        while train.ramp_from and (rising := self._rising(train, self._before[-1])) < self._full:
            self._before.append(self._before[-1] + rising)

    def _rising(self, train: TrainConfig, before: int) -> int:
        return train.ramp_from + (self._full - train.ramp_from) * before * self._tokens // train.ramp_tokens

    def before(self, step: int) -> int:
        """Micro-batches of all steps before this one (from 0)."""
        last = len(self._before) - 1
        return self._before[step] if step <= last else self._before[last] + (step - last) * self._full

    def count(self, step: int) -> int:
        """Micro-batches of the step."""
        return self.before(step + 1) - self.before(step)

    def tokens(self, step: int) -> int:
        """Tokens of all steps before this one, of a run whose sequences are all as long."""
        return self.before(step) * self._tokens
