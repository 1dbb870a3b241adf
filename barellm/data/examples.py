"""Examples of prompts and answers, for fine-tuning: the loss is of the answers alone, and several examples share a row.

An example is the end-of-text token, the prompt, the answer, and the end-of-text token again, where the tokenizer has one. The
answer and what ends it are targets; everything else has target -1, which the loss ignores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from barellm.data import chats, conversations, loader, reading, records, tokenizers
from barellm.errors import UserError

FORMAT = 1  # of the rendering: counts up when the same file would give other tokens
NEUTRAL = (None, True, 1, "", "1", "1.0", "true", "True", [], {})  # values of a key that ask for nothing
OTHERS = {  # keys that other programs obey and barellm does not: of a record, and of a message
    "record": ("weight", "train", "tools", "functions", "system", "history", "loss_mask"),
    "message": ("tool_calls", "function_call", "tool_call_id", "train_detail", "reasoning_content"),
}
Parts = list[tuple[str, bool | None]]  # of an example: text, and whether it is an answer; None: an answer without a loss


class Lines(list):
    """The parts of a conversation as lines, and the conversation."""

    conversation: conversations.Conversation


@dataclass(frozen=True)
class Examples:
    """The tokens of all examples, one after the other, (tokens,); `answer` says which are targets; example i is [begins[i],
    begins[i + 1]), and its answers' texts have text_bytes[i]."""

    tokens: np.ndarray
    answer: np.ndarray
    begins: np.ndarray
    text_bytes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.begins) - 1

    def slice(self, start: int, stop: int) -> Examples:
        lo, hi = self.begins[start], self.begins[stop]
        begins = self.begins[start : stop + 1] - lo
        return Examples(self.tokens[lo:hi], self.answer[lo:hi], begins, self.text_bytes[start:stop])

    def prompt(self) -> list[int]:
        """The first example up to its first answer."""
        return self.tokens[: int(np.flatnonzero(self.answer)[0])].tolist()


ANSWERS = ("answer", "completion", "messages")  # a record of examples has one of them


def has_examples(path: Path) -> bool:
    """Whether a file of JSON or CSV has answers: by its first record. One with the field that holds the text of a `Layout` is text,
    whatever else it has."""
    if not path.is_file() or reading.format_of(path, reading.Layout()) in ("text", "parquet"):
        return False
    _, first = next(reading.each_record(path), ("", None))
    return isinstance(first, dict) and reading.Layout().field not in first and not first.keys().isdisjoint(ANSWERS)


def read_examples(path: Path) -> tuple[list[Parts], str]:
    """The examples of a file and a hash of them."""
    digest, found = xxhash.xxh3_128(f"{FORMAT}".encode()), []
    for where, record in reading.each_record(path):
        found.append(parts(record, where))
        for text, _ in found[-1]:
            records.need_characters(text, where)
        digest.update(repr(found[-1]).encode())
    return found, digest.hexdigest()


def parts(record: Any, where: str) -> Parts:
    """An example's texts. UserError, which begins with `where`, for a record that is none."""
    if isinstance(record, dict):
        _check_obeyed(record, "record", where)
    if isinstance(record, dict) and "messages" in record:
        return _conversation(record["messages"], where)
    prompt, answer = (None, None)
    if isinstance(record, dict):
        prompt, answer = record.get("prompt"), record.get("answer", record.get("completion"))
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise UserError(f"{where} has an empty answer")
        return [(prompt, False), (answer, True)]
    has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise UserError(
        f"{where} has: {has}; expected texts named prompt and answer (or completion), or messages{records.instead(record)}"
    )


def _check_obeyed(found: dict, what: str, where: str) -> None:
    """Raise a UserError for a key that gives the record or message a meaning which barellm would not keep."""
    for key in OTHERS[what]:
        if (value := found.get(key)) not in NEUTRAL:
            raise UserError(f"{where} has a {what} with {key} {value!r:.40}, which barellm cannot obey: expected none")


def _has_loss(message: dict, where: str) -> bool:
    """What OpenAI's `weight`, 0 or 1, and `train` of other programs say of a message; by default the assistant's have a loss."""
    requested = [message[key] for key in ("weight", "train") if message.get(key) is not None]
    if wrong := [value for value in requested if value not in (0, 1)]:
        raise UserError(f"{where} has a message with weight or train {wrong[0]!r:.40}, expected 0, 1, false or true")
    if message["role"] != "assistant" and any(requested):
        raise UserError(f"{where} asks for a loss of a message of the {message['role']}: only the assistant's have one")
    return message["role"] == "assistant" and all(requested)


def _conversation(messages: Any, where: str) -> Parts:
    """Each message as a line `User: ...`; what the assistant says is an answer."""
    found = Lines()
    losses = []
    for message in messages if isinstance(messages, list) else [None]:
        if not (
            isinstance(message, dict)
            and message.get("role") in tuple(chats.LINES)  # a list of a role has no hash
            and isinstance(message.get("content"), str)
        ):
            known = ", ".join(chats.LINES)
            raise UserError(f"{where} has a message {message!r:.60}, expected a role ({known}) and a text named content")
        role, text = message["role"], message["content"]
        _check_obeyed(message, "message", where)
        loss = _has_loss(message, where)
        losses.append(loss)
        if role == "assistant":
            found += [(f"{chats.LINES[role]}:", False), (f" {text}", loss or None)]
        else:
            found.append((f"{chats.LINES[role]}: {text}\n", False))
    if not any(answer for _, answer in found):
        raise UserError(f"{where} has no message of the assistant with a loss, whose messages are the answers")
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    found.conversation = conversations.Conversation(plain, losses, where)
    return found


def encode_examples(found: list[Parts], tokenizer: tokenizers.Tokenizer, *, name: str) -> Examples:
    """Prompts and answers are encoded by themselves, so no token is of both; conversations as the model's chat template writes
    them, where it has one. UserError, which begins with `name`, for an example
    that has nothing to predict an answer from, or no answer: a tokenizer without an end-of-text token adds nothing to its texts."""
    talks = [one.conversation for one in found if isinstance(one, Lines)] if tokenizer.conventions.templates else []
    written = conversations.encode(talks, tokenizer)
    ids = iter(tokenizer.encode_many([text for one in found if not (talks and isinstance(one, Lines)) for text, _ in one]))
    known = tokenizer.conventions
    begin, end = (np.array([] if i is None else [i], np.int32) for i in (known.begin, known.end))
    tokens, answer, sizes = [], [], []
    for one in found:
        pieces = [(begin, False)]
        if talks and isinstance(one, Lines):
            pieces = next(written)
        for _, answers in [] if talks and isinstance(one, Lines) else one:
            pieces += [(next(ids), False)] if answers is False else [(next(ids), bool(answers)), (end, bool(answers))]
        tokens += [piece for piece, _ in pieces]
        answer += (own := [np.full(len(piece), answers) for piece, answers in pieces])
        counted = np.concatenate(own)
        if not counted.any() or counted[0]:
            what = "prompt" if counted.any() else "answer"
            raise UserError(
                f"{name}: example {len(sizes) + 1} has no token in its {what}, and the tokenizer {tokenizer.name} has no "
                "end-of-text token that could stand there: expected at least one"
            )
        sizes.append(len(counted))
    text_bytes = [sum(len(text.encode()) for text, answers in one if answers) for one in found]
    return Examples(np.concatenate(tokens), np.concatenate(answer), np.cumsum([0, *sizes]), np.array(text_bytes, np.int64))


class Packed:
    """Rows of seq inputs, each filled with whole examples in a given order until the next does not fit; an example that is longer
    than a row is cut at the row's end, and left out where nothing of its answer is left. What stays free has target -1.

    `cut` and `dropped`: how many examples that befell. A later example in a row sees those before it: GPT-2 and Llama have no
    mask between documents."""

    def __init__(self, examples: Examples, order: list[int], *, seq: int, fill: int) -> None:
        self.examples, self.seq, self.fill = examples, seq, fill
        self.cut = self.dropped = 0
        self.rows: list[list[tuple[int, int]]] = []  # the tokens [first, last) of each example
        room = 0
        for i in order:
            first, last = int(examples.begins[i]), int(examples.begins[i + 1])
            stop = min(last, first + seq + 1)
            if not examples.answer[first + 1 : stop].any():
                self.dropped += 1
                continue
            self.cut += stop < last
            if stop - first > room:
                self.rows.append([])
                room = seq + 1
            self.rows[-1].append((first, stop))
            room -= stop - first
        if not self.rows:
            raise UserError(f"no example has a part of its answer in its first {seq + 1} tokens: a larger train.seq")
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
        """Inputs and targets (rows, seq), int32."""
        inputs, targets = np.empty((len(rows), self.seq), np.int32), np.empty((len(rows), self.seq), np.int32)
        for at, row in enumerate(rows):
            tokens, answer = self._row(row)
            inputs[at], targets[at] = tokens[:-1], np.where(answer, tokens[1:], -1)
        return inputs, targets

    def counted(self, rows: list[int]) -> int:
        """The targets in some rows."""
        return sum(self._counted[row] for row in rows)


class ExampleRows(loader.Rows):
    """Examples are packed once, in an order that the seed gives. With the `order` "epoch" every row then comes once an epoch, in
    an order that changes with the epoch; with "random" each is drawn by itself."""

    def __init__(self, examples: Examples, *, seq: int, seed: int, fill: int, order: str = "epoch") -> None:
        assert order in ("epoch", "random")
        self._key, self._drawn = loader.draw(seed & loader.MASK, 1 << 16), order == "random"
        places = [loader.permuted(i, len(examples), loader.draw(self._key, 0)) for i in range(len(examples))]
        self.packed = Packed(examples, places, seq=seq, fill=fill)

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

    def counted(self, first_sample: int, count: int, *, seq: int) -> int:
        """A `Rows`."""
        return self.packed.counted(self._rows(first_sample, count))


class ExampleValidation:
    """Rows of examples in their order, with the interface of `data.loader.Validation`."""

    def __init__(self, examples: Examples, *, seq: int, max_tokens: int = 0, fill: int) -> None:
        self._packed = Packed(examples, list(range(len(examples))), seq=seq, fill=fill)
        rows = len(self._packed.rows)
        self.windows = min(rows, max(max_tokens // seq, 1)) if max_tokens else rows
        self._chosen = [window * rows // self.windows for window in range(self.windows)]
        self.targets = self._packed.counted(self._chosen)

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, self.windows, count):
            yield self._packed.read(self._chosen[first : first + count])

    def text_bytes(self, byte_lengths: np.ndarray) -> int:
        return round(sum(float(byte_lengths[targets[targets >= 0]].sum()) for _, targets in self.batches(256)))


def split(path: Path, val_fraction: float, make: Callable[[Callable[[], Iterator[str]]], tokenizers.Tokenizer]
          ) -> tuple[Examples, Examples, tokenizers.Tokenizer, str]:  # fmt: skip
    """Gives the training examples, those for validation, the tokenizer, and a hash of the file's examples. The last `val_fraction`
    of the examples, at least one, are for validation; 1: all. `make` gets all texts."""
    found, digest = read_examples(path)
    held = max(1, round(len(found) * val_fraction))
    if len(found) < 2 and val_fraction < 1:
        raise UserError(f"{path} has 1 example, expected at least 2: one for validation")
    if held >= len(found) and val_fraction < 1:
        raise UserError(f"data.val_fraction is {val_fraction:g}, which takes all {len(found)} examples of {path} for validation")
    tokenizer = make(lambda: (text for one in found for text, _ in one))
    examples = encode_examples(found, tokenizer, name=str(path))
    cut = max(0, len(found) - held)
    return examples.slice(0, cut), examples.slice(cut, len(found)), tokenizer, digest
