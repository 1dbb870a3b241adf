"""Validation loss in nats per token and in bits per byte, over the validation part or evenly spread windows of it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from math import log

import numpy as np

from barellm.data.examples import ExampleValidation
from barellm.data.loader import Validation
from barellm.data.tokenizers import Tokenizer
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE
from barellm.runtime.session import Session


@dataclass(frozen=True)
class Result:
    """`nats` per target token. `bytes`: text that the targets stand for; 0 where the vocabulary is not known."""

    nats: float
    targets: int
    bytes: int

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats * self.targets / log(2) / self.bytes if self.bytes else None


def write_batch(session: Session, inputs: np.ndarray, targets: np.ndarray, starts: np.ndarray | None) -> None:
    """Write the inputs of a loss program, all (rows, seq); `starts`: where each token's document begins, if masked."""
    session.write("tokens", inputs)
    session.write("targets", targets)
    if starts is not None:
        session.write("starts", starts)
        with suppress(KeyError):  # a model without positions has no such input
            session.write("positions", np.arange(inputs.shape[1], dtype=np.int32) - starts)


class Evaluator:
    """Runs the program "eval" over the windows of a validation stream, `batch` at a time. With several `ranks` each does some of
    these batches, and their losses are added in the order of the batches."""

    def __init__(
        self, windows: Validation | ExampleValidation, *, batch: int, byte_lengths: np.ndarray | None, ranks: Ranks = ALONE
    ) -> None:
        self.windows, self.batch, self.ranks = windows, batch, ranks
        self.bytes = 0 if byte_lengths is None else windows.text_bytes(byte_lengths)

    def text(self, tokenizer: Tokenizer) -> bytes:
        """Exactly the bytes that the targets stand for."""
        return b"".join(tokenizer.decode_bytes(targets[targets >= 0]) for _, targets in self.windows.batches(256))

    def run(
        self, session: Session, *, stop: Callable[[], bool] = bool, report: Callable[[int], None] = lambda windows: None
    ) -> Result | None:
        """Evaluate all windows, each rank every count-th batch; None if `stop()` became true. `report` gets the number of windows
        done. Losses are added in batch order, so the result does not depend on the number of ranks."""
        sums: list[float] = []  # of this rank's batches
        done = 0
        for number, (inputs, targets) in enumerate(self.windows.batches(self.batch)):
            done += len(inputs)
            if number % self.ranks.count != self.ranks.rank:
                continue
            valid = int(np.count_nonzero(targets >= 0))
            write_batch(session, inputs, targets, self.windows.starts(done - len(inputs), inputs))
            session.run("eval", batch=len(inputs), seq=inputs.shape[1], inv_targets=1.0 / valid)
            sums.append(float(session.read("loss")[0]) * valid)
            if stop():
                return None
            report(done)
        total = 0.0
        for batch_sums in zip_longest(*self.ranks.gather(sums), fillvalue=0.0):  # in the order of the batches
            for batch_sum in batch_sums:
                total += batch_sum
        return Result(total / self.windows.targets, self.windows.targets, self.bytes)
