"""Fine-tuning examples as token rows: the loss covers the answers only, and several examples are packed into a row.
An example is the end-of-text token, the prompt, the answer, and the end-of-text token again, where the tokenizer has one. The
answer and the token that ends it are targets; all other positions have target -1, which the loss ignores."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from barellm.data import conversations, forms, loader, tokenizers
from barellm.errors import UserError


@dataclass(frozen=True)
class Examples:
    """The tokens of all examples, concatenated (tokens,); `answer` marks the targets; example i is [begins[i], begins[i + 1]), and
    its answers have text_bytes[i] bytes of text. `talks`: some were messages."""

    tokens: np.ndarray
    answer: np.ndarray
    begins: np.ndarray
    text_bytes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    talks: bool = False

    def __len__(self) -> int:
        return len(self.begins) - 1

    def slice(self, start: int, stop: int) -> "Examples":
        lo, hi = self.begins[start], self.begins[stop]
        begins = self.begins[start : stop + 1] - lo
        return Examples(self.tokens[lo:hi], self.answer[lo:hi], begins, self.text_bytes[start:stop], self.talks)

    def prompt(self) -> list[int]:
        """The first example up to its first answer."""
        return self.tokens[: int(np.flatnonzero(self.answer)[0])].tolist()


def encode_examples(found: list[forms.Example], tokenizer: tokenizers.Tokenizer) -> Examples:
    """Tokenize examples. Prompt and answer are encoded apart, so no token spans both; conversations are rendered by the model's
    chat template if it has one. UserError, with the location, for an example without a token of prompt or of answer (possible where
    the tokenizer has no end-of-text token to add)."""
    # All texts are encoded in one call, and taken from its result example by example.
    talks = [one.conversation if tokenizer.conventions.templates else None for one in found]
    rendered = conversations.encode([talk for talk in talks if talk], tokenizer)
    texts = [text for one, talk in zip(found, talks, strict=True) if not talk for text, _ in one.parts]
    encoded = iter(tokenizer.encode_many(texts))
    tokens: list[np.ndarray] = []
    answer: list[np.ndarray] = []
    sizes = []
    for one, talk in zip(found, talks, strict=True):
        segments = next(rendered) if talk else _segments(one, encoded, tokenizer)
        targets = np.concatenate([np.full(len(ids), has_loss) for ids, has_loss in segments])
        if not targets.any() or targets[0]:  # nothing to learn, or nothing before the first answer token to predict it from
            lacking = "prompt" if targets.any() else "answer"
            why = f"the tokenizer {tokenizer.name} has no end-of-text token that could stand there"
            raise UserError(f"{one.where} has no token in its {lacking}, and {why}: expected at least one")
        tokens += [ids for ids, _ in segments]
        answer.append(targets)
        sizes.append(len(targets))
    text_bytes = [sum(len(text.encode()) for text, trained in one.parts if trained) for one in found]
    begins = np.cumsum([0, *sizes])
    talked = any(one.conversation for one in found)
    return Examples(np.concatenate(tokens), np.concatenate(answer), begins, np.array(text_bytes, np.int64), talked)


def _segments(one: forms.Example, encoded: Iterator[np.ndarray], tokenizer: tokenizers.Tokenizer) -> list[tuple[np.ndarray, bool]]:
    """(ids, has_loss) of the parts of an example without a chat template, whose ids are the next of `encoded`: behind the begin
    token, and with the end token behind each answer."""
    begin, end = (np.array([] if i is None else [i], np.int32) for i in (tokenizer.conventions.begin, tokenizer.conventions.end))
    segments = [(begin, False)]
    for _, trained in one.parts:
        segments.append((next(encoded), bool(trained)))
        if trained is not False:  # an answer, with a loss or, of None, without
            segments.append((end, bool(trained)))
    return segments


class Packed:
    """Rows of `seq` inputs with whole examples; one that is longer than a row is truncated, and dropped if no part of its answer is
    left. Free positions have target -1. By default (next-fit) examples keep their order, a row ends where the next one does not
    fit, and each example sees those before it in its row. With `masked` (each attends to itself only) the longest go first, each
    into the row with the least sufficient room (best-fit decreasing).
    `cut` and `dropped` count truncated and dropped examples."""

    def __init__(self, examples: Examples, order: list[int], *, seq: int, fill: int, masked: bool = False) -> None:
        """Truncate and pack the examples in this `order`; `fill` is the token at free positions. UserError if none fits."""
        self.examples, self.seq, self.fill, self.masked = examples, seq, fill, masked
        self.cut = self.dropped = 0
        spans: list[tuple[int, int]] = []  # the tokens [first, last) of each example
        for i in order:
            first, last = int(examples.begins[i]), int(examples.begins[i + 1])
            stop = min(last, first + seq + 1)
            if not examples.answer[first + 1 : stop].any():
                self.dropped += 1
                continue
            self.cut += stop < last
            spans.append((first, stop))
        if not spans:
            raise UserError(f"no example has a part of its answer in its first {seq + 1} tokens: a larger train.seq")
        self.rows = _best_fit(spans, seq + 1) if masked else _next_fit(spans, seq + 1)
        self._counted = [int(self._row(row)[1].sum()) for row in range(len(self.rows))]

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Gives the seq + 1 tokens of a row, and for each but the first whether it is a target."""
        tokens, answer = np.full(self.seq + 1, self.fill, np.int32), np.zeros(self.seq + 1, bool)
        at = 0
        for first, last in self.rows[row]:
            tokens[at : at + last - first] = self.examples.tokens[first:last]
            answer[at + 1 : at + last - first] = self.examples.answer[first + 1 : last]
            at += last - first
        return tokens, answer[1:]

    def read(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = np.empty((len(rows), self.seq), np.int32), np.empty((len(rows), self.seq), np.int32)
        for at, row in enumerate(rows):
            tokens, answer = self._row(row)
            inputs[at], targets[at] = tokens[:-1], np.where(answer, tokens[1:], -1)
        return inputs, targets

    def starts(self, rows: list[int]) -> np.ndarray | None:
        """Where the example of each input begins, (rows, seq) i32; the free rest of a row is one too. None without a mask."""
        if not self.masked:
            return None
        found = np.empty((len(rows), self.seq), np.int32)
        for at, row in enumerate(rows):
            ends = np.cumsum([0, *(last - first for first, last in self.rows[row])])
            found[at] = ends[np.searchsorted(ends, np.arange(self.seq), side="right") - 1]
        return found

    def counted(self, rows: list[int]) -> int:
        """The targets in some rows."""
        return sum(self._counted[row] for row in rows)


def _next_fit(spans: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    rows, room = [], 0
    for first, last in spans:
        if last - first > room:
            rows.append([])
            room = size
        rows[-1].append((first, last))
        room -= last - first
    return rows


def _best_fit(spans: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    """Best-fit decreasing bin packing of token ranges into rows of `size` tokens."""
    rows: list[list[tuple[int, int]]] = []
    rooms: list[tuple[int, int]] = []  # of the rows that have any, and which they are: ascending
    for first, last in sorted(spans, key=lambda span: span[0] - span[1]):
        index = bisect_left(rooms, (last - first, 0))
        room, row = rooms.pop(index) if index < len(rooms) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append((first, last))
        if rest := room - (last - first):
            insort(rooms, (rest, row))
    return rows


class ExampleRows(loader.Rows):
    """Training rows of examples, packed once in an order drawn from the seed. `order` "epoch": each row once per epoch, permuted
    anew in each epoch; "random": rows are drawn independently."""

    def __init__(self, examples: Examples, *, seq: int, seed: int, fill: int, order: str = "epoch", masked: bool = False) -> None:
        assert order in ("epoch", "random")
        self._key, self._drawn = loader.draw(seed & loader.MASK, 1 << 16), order == "random"
        places = [loader.permuted(i, len(examples), loader.draw(self._key, 0)) for i in range(len(examples))]
        self.packed = Packed(examples, places, seq=seq, fill=fill, masked=masked)

    def _rows(self, first_sample: int, count: int) -> list[int]:
        size, found = len(self.packed.rows), []
        for sample in range(first_sample, first_sample + count):
            if self._drawn:
                found.append(loader.draw(self._key, sample) % size)
                continue
            epoch, index = divmod(sample, size)
            found.append(loader.permuted(index, size, loader.draw(self._key, epoch + 1)))
        return found

    def batch(self, first_sample: int, count: int, *, seq: int, document: int) -> tuple[np.ndarray, np.ndarray]:
        """A `Rows`."""
        if seq != self.packed.seq:
            raise UserError(f"examples were packed into rows of {self.packed.seq} tokens, a stage of the run has {seq}")
        return self.packed.read(self._rows(first_sample, count))

    def starts(self, first_sample: int, count: int, tokens: np.ndarray) -> np.ndarray | None:
        """A `Rows`."""
        return self.packed.starts(self._rows(first_sample, count))

    def counted(self, first_sample: int, count: int, *, seq: int) -> int:
        """A `Rows`."""
        return self.packed.counted(self._rows(first_sample, count))


class ExampleValidation:
    """Rows of examples in their order, with the interface of `data.loader.Validation`."""

    def __init__(self, examples: Examples, *, seq: int, max_tokens: int = 0, fill: int, masked: bool = False) -> None:
        self._packed = Packed(examples, list(range(len(examples))), seq=seq, fill=fill, masked=masked)
        rows = len(self._packed.rows)
        self.windows = min(rows, max(max_tokens // seq, 1)) if max_tokens else rows
        self._chosen = [window * rows // self.windows for window in range(self.windows)]
        self.targets = self._packed.counted(self._chosen)

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, self.windows, count):
            yield self._packed.read(self._chosen[first : first + count])

    def starts(self, first: int, tokens: np.ndarray) -> np.ndarray | None:
        """Of windows from `first` on, as `Rows` have it."""
        return self._packed.starts(self._chosen[first : first + len(tokens)])

    def text_bytes(self, byte_lengths: np.ndarray) -> int:
        return round(sum(float(byte_lengths[targets[targets >= 0]].sum()) for _, targets in self.batches(256)))


def split(paths: list[Path], name: str, val_fraction: float,
          make: Callable[[Callable[[], Iterator[str]]], tokenizers.Tokenizer],
          ) -> tuple[Examples, Examples, tokenizers.Tokenizer, str]:  # fmt: skip
    """Read and tokenize examples: (training part, validation part, tokenizer, hash of the examples). The last `val_fraction` of
    them, at least one, is for validation; 1: all. `make(texts)` makes the tokenizer; `name`: the source in errors."""
    all_examples, digest = forms.read_examples(paths)
    val_count = max(1, round(len(all_examples) * val_fraction))
    if len(all_examples) < 2 and val_fraction < 1:
        raise UserError(f"{name} has 1 example, expected at least 2: one for validation")
    if val_count >= len(all_examples) and val_fraction < 1:
        taken = f"all {len(all_examples)} examples of {name} for validation"
        raise UserError(f"data.val_fraction is {val_fraction:g}, which takes {taken}")
    tokenizer = make(lambda: (text for one in all_examples for text, _ in one.parts))
    examples = encode_examples(all_examples, tokenizer)
    train_count = max(0, len(all_examples) - val_count)
    return examples.slice(0, train_count), examples.slice(train_count, len(all_examples)), tokenizer, digest
