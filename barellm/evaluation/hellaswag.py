"""HellaSwag (Zellers et al. 2019) by completion, as llm.c and build-nanogpt define it: the ending is chosen whose tokens have the
least loss after the context, in sum (acc) or in the mean over its tokens (acc_norm). An ending is encoded with a space before it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from barellm.data import cache, reading, records, tokenizers
from barellm.errors import UserError
from barellm.evaluation.scoring import Score, Scorer, Text

MAGIC, VERSION, HEADER = 20240522, 1, 256  # of llm.c's file: a header of 256 int32, then examples of uint16
BEGINS = 65535
GPT2 = "gpt2"  # the tokenizer of llm.c's file


@dataclass(frozen=True)
class Example:
    """Ids of a context and of its endings, of which `label` is the right one. `index` is that of the file."""

    index: int
    label: int
    context: Sequence[int]
    endings: Sequence[Sequence[int]]

    def texts(self) -> list[Text]:
        return [Text([*self.context, *ending], len(ending)) for ending in self.endings]


@dataclass(frozen=True)
class Result:
    """`losses`: of each example the sum over each ending; `lengths`: the tokens of each."""

    examples: Sequence[Example]
    losses: Sequence[Sequence[float]]
    lengths: Sequence[Sequence[int]]

    @property
    def total(self) -> int:
        return len(self.examples)

    @property
    def acc(self) -> float:
        return self._share(self.losses)

    @property
    def acc_norm(self) -> float:
        return self._share(self._means())

    def _means(self) -> list[list[float]]:
        return [[a / n for a, n in zip(*both, strict=True)] for both in zip(self.losses, self.lengths, strict=True)]

    def _share(self, losses: Sequence[Sequence[float]]) -> float:
        right = sum(least(row) == example.label for row, example in zip(losses, self.examples, strict=True))
        return right / self.total

    def summary(self) -> dict[str, Any]:
        """What `eval --json` and metrics.jsonl say: the shares, their standard errors, the number of examples."""
        found: dict[str, Any] = {}
        for name, share in (("acc", self.acc), ("acc_norm", self.acc_norm)):
            found |= {name: share, f"{name}_stderr": standard_error(share, self.total)}
        return found | {"total": self.total}

    def rows(self) -> Iterator[dict[str, Any]]:
        for example, losses, means, lengths in zip(self.examples, self.losses, self._means(), self.lengths, strict=True):
            row = {"index": example.index, "label": example.label, "acc": least(losses), "acc_norm": least(means)}
            yield row | {"losses": list(losses), "tokens": list(lengths)}


def least(values: Sequence[float]) -> int:
    """The place of the smallest; of equal ones the first."""
    return min(range(len(values)), key=values.__getitem__)


def standard_error(share: float, total: int) -> float | None:
    """Of the mean of so many zeros and ones; None of a single one."""
    return sqrt(share * (1 - share) / (total - 1)) if total > 1 else None


def read(path: Path, tokenizer: tokenizers.Tokenizer, *, limit: int = 0) -> list[Example]:
    """Examples from the public jsonl, or from llm.c's .bin (GPT-2 ids only); the first `limit`, 0 for all. UserError, with the line
    or example, for malformed files."""
    with cache.reading(path):
        found = _of_bin(path, tokenizer, limit) if path.suffix == ".bin" else _of_records(path, tokenizer, limit)
    if not found:
        raise UserError(f"{path} has no example of HellaSwag")
    return found


def _of_records(path: Path, tokenizer: tokenizers.Tokenizer, limit: int) -> list[Example]:
    """Parse and tokenize the jsonl, at most `limit` lines (0: all); endings are encoded with a space before them. UserError for
    other records. An empty context becomes the tokenizer's start token, so that the first token of an ending has one before it."""
    rows = []
    for number, (where, row) in enumerate(islice(reading.each_record(path, format="jsonl"), limit or None)):
        try:
            context, endings = row["ctx"], row["endings"]
            label, index = _integer(row["label"]), _integer(row.get("ind", number))
            if not (isinstance(context, str) and isinstance(endings, list) and all(isinstance(x, str) for x in endings)):
                raise TypeError
        except (ValueError, TypeError, LookupError, AttributeError):
            expected = "a text ctx, a list of texts endings, and integers label and, if it is there, ind"
            raise UserError(f"{where} is no example of HellaSwag: expected {expected}") from None
        for text in (context, *endings):
            records.need_characters(text, where)
        if not 0 <= label < len(endings):
            raise UserError(f"{where}: label is {label}, expected one of its {len(endings)} endings")
        rows.append((index, label, context, [f" {ending}" for ending in endings]))
    ids = iter(tokenizer.encode_many([text for row in rows for text in (row[2], *row[3])]))
    examples = []
    for index, label, _, endings in rows:
        context = next(ids).tolist() or [tokenizer.start]
        examples.append(Example(index, label, context, [next(ids).tolist() for _ in endings]))
    return examples


def _integer(value: Any) -> int:
    """One of JSON, or one in a text, as the sets of Hugging Face have it. Python would take true and 1.5 too."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _of_bin(path: Path, tokenizer: tokenizers.Tokenizer, limit: int) -> list[Example]:
    """Parse llm.c's file of tokenized examples (int32 header, then uint16 words); at most `limit`, 0: all."""
    if tokenizer.name != GPT2:
        raise UserError(f"{path} has GPT-2's ids, the model has tokenizer {tokenizer.name}: pass the jsonl")
    content = path.read_bytes()
    head = np.frombuffer(content[: 4 * HEADER].ljust(4 * HEADER, b"\0"), "<i4").tolist()
    if head[:2] != [MAGIC, VERSION]:
        raise UserError(f"{path} begins with {head[:2]}, expected {[MAGIC, VERSION]}, HellaSwag as llm.c writes it")
    body = content[4 * HEADER :]
    words = np.frombuffer(body[: len(body) // 2 * 2], "<u2").astype(np.int32).tolist()
    examples, position = [], 0
    for number in range(head[2]):
        if limit and number == limit:
            break
        example, position = _of_words(path, number, words, position)
        if (largest := max(map(max, (example.context, *example.endings)))) >= tokenizer.vocab_size:
            known = f"the tokenizer ({tokenizer.vocab_size} ids)"
            raise UserError(f"{path}: example {number} has token id {largest}, beyond the vocabulary of {known}")
        examples.append(example)
    return examples


def _of_words(path: Path, number: int, words: list[int], at: int) -> tuple[Example, int]:
    """(the example that begins at word `at`, the position behind it): five words (BEGINS, bytes in all, index, label, endings),
    then the context and each ending as its length and its ids. UserError if lengths do not add up; `number` is for it."""
    damaged = UserError(f"{path}: example {number} is damaged, or the file ends in it")
    begins, nbytes, index, label, count, *_ = [*words[at : at + 5], *[-1] * 5]
    end = at + nbytes // 2
    if begins != BEGINS or nbytes % 2 or end > len(words) or not 0 <= label < count:
        raise damaged
    at += 5
    parts = []
    for _ in range(1 + count):
        size = words[at] if at < end else 0
        parts.append(words[at + 1 : at + 1 + size])
        at += 1 + size
        if not size or at > end:
            raise damaged
    if at != end:
        raise damaged
    return Example(index, label, parts[0], parts[1:]), end


class HellaSwag:
    """An evaluation of these examples."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.texts = [text for example in examples for text in example.texts()]

    def run(
        self, scorer: Scorer, *, stop: Callable[[], bool] = bool, report: Callable[[int], None] = lambda done: None
    ) -> Result | None:
        """Score all endings; None if `stop()` became true. `report` gets the number of endings done."""
        scores = scorer.run(self.texts, stop=stop, report=report)
        if scores is None:
            return None
        remaining: Iterator[Score] = iter(scores)
        grouped = [[next(remaining) for _ in example.endings] for example in self.examples]
        return Result(
            self.examples,
            [[score.total for score in group] for group in grouped],
            [[len(score.losses) for score in group] for group in grouped],
        )
