"""Chat conversations as training examples, rendered by the model's own chat template, so that training and `chat` see the same
text. The loss covers what the template marks with {% generation %}. In a template without marks it covers each assistant message:
from the end of the prompt before it to the special token that ends it. No token spans parts with and without loss."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from barellm.chat import templates
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError

TOGETHER = 64  # conversations that are rendered in one request
Segment = tuple[list[templates.Piece], int | None]  # a part of a conversation, and the message that is an answer there


@dataclass(frozen=True)
class Conversation:
    """Messages, and for each whether it is an assistant message that is trained on. `where`: location for error messages."""

    messages: Sequence[dict[str, Any]]
    losses: Sequence[bool]
    where: str

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def said(self, number: int) -> str:
        """What the rendered text must contain of an assistant message; the template may drop its <think> block."""
        return templates.text_of(self.messages[number]["content"], self.where).rpartition("</think>")[2].strip()


def encode(found: Sequence[Conversation], tokenizer: Tokenizer) -> Iterator[list[tuple[np.ndarray, bool]]]:
    """For each conversation its token ids as a list of (ids, has_loss) segments. UserError where the template fails, drops an
    assistant message, or does not keep the text before it unchanged."""
    split = _by_marks if templates.has_marks(tokenizer.conventions.templates["default"]) else _by_prefixes
    for at in range(0, len(found), TOGETHER):
        group = found[at : at + TOGETHER]
        try:
            segmented = split(group, tokenizer)
        except UserError:
            segmented = []
        for i, one in enumerate(group):  # one by one if the group failed: the error names the first culprit
            try:
                yield _encoded(one, segmented[i] if segmented else split([one], tokenizer)[0], tokenizer)
            except UserError as error:
                raise UserError(f"{one.where}: {error}") from None


def _by_marks(group: Sequence[Conversation], tokenizer: Tokenizer) -> list[list[Segment]]:
    """Split rendered conversations at the template's {% generation %} marks. A marked span belongs to the next assistant message
    whose text it contains, else to the one before (owner None: no loss). The marks are rendered as a string of no message."""
    messages = [one.messages for one in group]
    mark, _ = templates.unused(json.dumps(messages, ensure_ascii=False))
    rendered = tokenizer.chat_pieces(messages, {"add_generation_prompt": False, templates.MARK: mark})
    found = []
    for one, pieces in zip(group, rendered, strict=True):
        spans: list[list[templates.Piece]] = [[]]  # those of odd number are marked
        for text, letters in pieces:
            for i, part in enumerate(text.split(mark)):
                if i:
                    spans.append([])
                if part:
                    spans[-1].append((part, letters))
        remaining, owner = one.answers, None
        segments: list[Segment] = []
        for i, span in enumerate(spans):
            if i % 2 == 0:
                segments.append((span, None))
                continue
            text = _text(span)
            started = next((n for n in remaining if one.said(n) in text), None)
            if started is not None:
                remaining, owner = [n for n in remaining if n > started], started
            segments.append((span, owner))
        found.append(segments)
    return found


def _by_prefixes(group: Sequence[Conversation], tokenizer: Tokenizer) -> list[list[Segment]]:
    """Split rendered conversations without marks: the template is also rendered on the messages before each assistant message (with
    generation prompt) and on those up to it. The whole rendering must begin with the first, but for the end of its generation
    prompt (`_shared_header`); with the second an answer ends at the latest."""
    prompt, no_prompt = {"add_generation_prompt": True}, {"add_generation_prompt": False}
    texts = tokenizer.chat_pieces([one.messages for one in group], no_prompt)
    before = iter(tokenizer.chat_pieces([one.messages[:i] for one in group for i in one.answers if i], prompt))
    upto = iter(tokenizer.chat_pieces([one.messages[: i + 1] for one in group for i in one.answers], no_prompt))
    found = []
    for one, pieces in zip(group, texts, strict=True):
        whole = _text(pieces)
        cuts = [0]  # characters where a segment begins, an answer every second time
        owners: list[int | None] = [None]
        for i in one.answers:
            prompt_text = _text(next(before)) if i else ""
            answered_text = _text(next(upto))
            start = len(prompt_text)
            if not whole.startswith(prompt_text):
                [before_answer] = tokenizer.chat_pieces([one.messages[:i]], no_prompt)
                start = _shared_header(whole, prompt_text, _text(before_answer), tokenizer)
            if start < cuts[-1]:
                raise UserError(f"the chat template does not write message {i + 1} behind those before it")
            stop = _end(pieces, start, tokenizer)
            if whole.startswith(answered_text):
                stop = min(stop, len(answered_text))
            cuts += [start, stop]
            owners += [i, None]
        parts = [list(_cut(pieces, first, stop)) for first, stop in pairwise([*cuts, len(whole)])]
        found.append(list(zip(parts, owners, strict=True)))
    return found


def _shared_header(whole: str, prompt: str, before_answer: str, tokenizer: Tokenizer) -> int:
    """Where an answer begins in `whole` if it does not repeat all of the generation prompt: templates of reasoning models end
    `prompt` with <think>, which the rendered answer has not. It is behind the last special token or line that both share after the
    messages `before_answer`; -1 if there is none."""
    shared = next(i for i, letter in enumerate(prompt) if not whole.startswith(letter, i))
    ends = ("\n", *tokenizer.special)
    return next((at for at in range(shared, len(before_answer), -1) if prompt.endswith(ends, 0, at)), -1)


def _text(pieces: Sequence[templates.Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _encoded(one: Conversation, segments: list[Segment], tokenizer: Tokenizer) -> list[tuple[np.ndarray, bool]]:
    """Encode a conversation's segments to (ids, has_loss); UserError if a trained message's text is not in its segments."""
    for number in one.answers:
        trained = "".join(_text(pieces) for pieces, owner in segments if owner == number)
        if one.losses[number] and (not trained or one.said(number) not in trained):
            raise UserError(f"the chat template does not write the answer in message {number + 1}, or not where it is trained")
    encoded, previous = [], ""
    for pieces, owner in segments:
        for piece in pieces:
            ids = tokenizer.encode_piece(piece, first=not encoded, before=previous)
            encoded.append((ids, owner is not None and one.losses[owner]))
            previous = "" if piece[1] else piece[0]
    return encoded


def _end(pieces: list[templates.Piece], start: int, tokenizer: Tokenizer) -> int:
    """Character position where the assistant message that begins at `start` ends: behind the first special token after it (the
    longest of those at one place), else the end of the text."""
    offset = 0
    for text, letters in pieces:
        places = [] if letters else [(text.find(name, max(0, start - offset)), len(name)) for name in tokenizer.special]
        if matches := [(place, size) for place, size in places if place >= 0]:
            return offset + sum(min(matches, key=lambda one: (one[0], -one[1])))
        offset += len(text)
    return offset


def _cut(pieces: list[templates.Piece], first: int, stop: int) -> Iterator[templates.Piece]:
    at = 0
    for text, letters in pieces:
        if part := text[max(0, first - at) : max(0, stop - at)]:
            yield part, letters
        at += len(text)
