"""How many micro-batches each step has: always as many, or more and more, as GPT-3's batch grew (Brown et al. 2020, appendix B)."""

from __future__ import annotations

from barellm.config import TrainConfig


class BatchRampup:
    """A function of the step alone: the number of micro-batches rises from `ramp_from` to `accumulate` in a line over the first
    `ramp_tokens` tokens, rounded down. It is found in whole numbers, so that it is the same on every machine."""

    def __init__(self, train: TrainConfig) -> None:
        self._first, self._full, self._ramp_tokens = (
            train.batch_rampup_from,
            train.gradient_accumulation_steps,
            train.batch_rampup_tokens,
        )
        self._tokens = train.micro_batch_size * train.seq  # of a micro-batch
        # Micro-batches before each step of the ramp, and before the first full one, as far as somebody has asked for them.
        self._before = [0]
        self._rises = train.batch_rampup_from > 0

    def _rising(self, before: int) -> int:
        return self._first + (self._full - self._first) * before * self._tokens // self._ramp_tokens

    def before(self, step: int) -> int:
        """Micro-batches of all steps before this one, from 0."""
        while self._rises and len(self._before) <= step:
            if (rising := self._rising(self._before[-1])) < self._full:
                self._before.append(self._before[-1] + rising)
            else:
                self._rises = False
        last = len(self._before) - 1
        return self._before[step] if step <= last else self._before[last] + (step - last) * self._full

    def count(self, step: int) -> int:
        """Micro-batches of the step."""
        return self.before(step + 1) - self.before(step)

    def tokens(self, step: int) -> int:
        """Tokens of all steps before this one, of a run whose sequences are all as long."""
        return self.before(step) * self._tokens
