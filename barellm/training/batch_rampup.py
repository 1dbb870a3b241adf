"""Batch-size warmup (batch rampup): micro-batches of each step, constant or rising as in GPT-3 (Brown et al. 2020, appendix B)."""

from barellm.config import TrainConfig


class BatchRampup:
    """A function of the step alone: the number of micro-batches rises linearly from `batch_rampup_from` to
    `gradient_accumulation_steps` over the first `batch_rampup_tokens` tokens, rounded down, in integers."""

    def __init__(self, train: TrainConfig) -> None:
        """Precompute nothing but the constants: the steps of the rampup are summed lazily in `_before`."""
        self._first, self._full = train.batch_rampup_from, train.gradient_accumulation_steps
        self._rampup_tokens = train.batch_rampup_tokens
        self._tokens = train.micro_batch_size * train.seq  # of a micro-batch
        # Micro-batches before each step of the ramp, and before the first full one, as far as they were needed.
        self._before = [0]
        self._rises = train.batch_rampup_from > 0

    def _rising(self, before: int) -> int:
        return self._first + (self._full - self._first) * before * self._tokens // self._rampup_tokens

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
        return self.before(step + 1) - self.before(step)

    def tokens(self, step: int) -> int:
        """Tokens of all steps before this one, of a run whose sequences are all as long."""
        return self.before(step) * self._tokens
