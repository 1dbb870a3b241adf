"""The loss of each document of a text by itself: nothing of another document stands before its tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import log
from typing import Any

import numpy as np

from barellm.data import shards, tokenizers
from barellm.data.corpus import Corpus
from barellm.errors import UserError
from barellm.evaluation.scoring import Scorer, Text


def of_stream(stream: shards.TokenStream, eot: int | None) -> list[np.ndarray]:
    """The documents of a stream of tokens: each begins with the separator, where the tokenizer has one, else there is one document.
    What stands before the first separator is the end of a document that began earlier."""
    ids = stream.array(0, len(stream))
    starts = [] if eot is None else np.flatnonzero(ids == eot).tolist()
    cuts = sorted({0, *starts, len(ids)})
    return [ids[a:b] for a, b in pairwise(cuts)]


def of_records(corpus: Corpus, tokenizer: tokenizers.Tokenizer) -> tuple[list[np.ndarray], np.ndarray | None]:
    """(token ids of each validation document, led by the separator if any; bytes per id or None if unknown) of record files."""
    before = np.array([] if tokenizer.eot is None else [tokenizer.eot], np.int32)
    texts = list(corpus.documents(corpus.val))
    found = [np.concatenate([before, ids]) for ids in tokenizer.encode_many(texts)]
    try:
        lengths = tokenizer.byte_lengths
    except UserError:  # GPT-2's vocabulary is not on this machine
        return found, None
    if not tokenizer.exact:
        decoded_bytes = sum(int(lengths[ids].sum()) for ids in found)
        lengths = lengths * (sum(len(text.encode()) for text in texts) / max(1, decoded_bytes))
    return found, lengths


def windows(ids: Sequence[int] | np.ndarray, seq: int) -> list[Text]:
    """Windows side by side in which every id but the first is a target once."""
    found = [np.asarray(ids[at : at + seq + 1]).tolist() for at in range(0, len(ids) - 1, seq)]
    return [Text(window, len(window) - 1) for window in found]


class Documents:
    """An evaluation of these documents. One of a single token has no target, so it has a row without a loss."""

    def __init__(self, documents: Sequence[np.ndarray], *, seq: int, byte_lengths: np.ndarray | None) -> None:
        self.windows = [windows(ids, seq) for ids in documents]
        self.bytes = [0 if byte_lengths is None else round(float(byte_lengths[ids[1:]].sum())) for ids in documents]

    @property
    def texts(self) -> list[Text]:
        return [text for document in self.windows for text in document]

    def rows(self, scorer: Scorer, *, report: Callable[[int], None] = lambda done: None) -> Iterator[dict[str, Any]]:
        """One object per document: its place, target tokens and bytes, loss in nats (total, per token) and bits per byte."""
        found = scorer.run(self.texts, report=report)
        assert found is not None, "nobody stops it"
        scores = iter(found)
        for i, (parts, nbytes) in enumerate(zip(self.windows, self.bytes, strict=True)):
            nats, tokens = sum(next(scores).total for _ in parts), sum(part.scored for part in parts)
            yield {"document": i, **summary(nats, tokens, nbytes)}


def summary(nats: float, tokens: int, nbytes: int) -> dict[str, Any]:
    return {
        "tokens": tokens, "bytes": nbytes, "nats": nats, "nats_per_token": nats / tokens if tokens else None,
        "bits_per_byte": nats / log(2) / nbytes if nbytes else None,
    }  # fmt: skip


def total(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    nats, tokens, nbytes = (sum(row[key] for row in rows) for key in ("nats", "tokens", "bytes"))
    return {"documents": len(rows), **summary(nats, tokens, nbytes)}
