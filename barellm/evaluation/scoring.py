"""Losses of single tokens: of the end of a text after its beginning, in batches of texts of about one length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from barellm.runtime.session import Session


@dataclass(frozen=True)
class Text:
    """Ids, of which the last `scored` are targets: each is predicted from all before it that the model can see."""

    ids: Sequence[int]
    scored: int

    def __post_init__(self) -> None:
        assert 0 < self.scored < len(self.ids), "a target has something before it"


@dataclass(frozen=True)
class Score:
    """(scored,) `losses` in nats; `greedy`: whether each target is the most likely id at its place."""

    losses: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        return float(self.losses.sum(dtype=np.float64))


def fitting(text: Text, seq: int) -> Text:
    """The end of a text that a model with `seq` positions sees. Targets that do not fit are no targets then."""
    return text if len(text.ids) <= seq + 1 else Text(text.ids[-(seq + 1) :], min(text.scored, seq))


def shape_for(texts: Sequence[Text], *, tokens: int, most_seq: int) -> tuple[int, int]:
    """(sequences, length) to plan the program "score" for: about `tokens` in all, none longer than `most_seq`."""
    longest = min(most_seq, max(len(text.ids) - 1 for text in texts))
    return max(1, min(len(texts), tokens // longest)), longest


class Scorer:
    """Runs the program "score", planned for `batch` sequences of `seq` tokens."""

    def __init__(self, session: Session, *, batch: int, seq: int) -> None:
        self.session, self.batch, self.seq = session, batch, seq

    def run(
        self, texts: Sequence[Text], *, stop: Callable[[], bool] = bool, report: Callable[[int], None] = lambda done: None
    ) -> list[Score] | None:
        """The scores of the texts, in their order. Batches go from the longest text to the shortest, to minimize padding. None if
        `stop()` became true; `report` gets the number of texts done."""
        found: list[Score | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i].ids), i))
        for first in range(0, len(order), self.batch):
            batch = order[first : first + self.batch]
            for i, score in zip(batch, self._batch([fitting(texts[i], self.seq) for i in batch]), strict=True):
                found[i] = score
            if stop():
                return None
            report(first + len(batch))
        return [score for score in found if score is not None]

    def _batch(self, texts: Sequence[Text]) -> list[Score]:
        """Scores of texts in one batch, padded to the longest; only each one's last `scored` ids are targets."""
        seq = max(len(text.ids) for text in texts) - 1
        inputs, targets = np.zeros((len(texts), seq), np.int32), np.full((len(texts), seq), -1, np.int32)
        for row, text in enumerate(texts):
            end = len(text.ids) - 1
            inputs[row, :end] = text.ids[:-1]
            targets[row, end - text.scored : end] = text.ids[-text.scored :]
        self.session.write("tokens", inputs)
        self.session.write("targets", targets)
        self.session.run("score", batch=len(texts), seq=seq)
        losses, margins = self.session.read("losses"), self.session.read("margins")
        is_target = targets >= 0
        return [Score(loss[a], margin[a] <= 0) for loss, margin, a in zip(losses, margins, is_target, strict=True)]
