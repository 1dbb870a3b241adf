"""Conversations as training examples, as the model's chat template writes them: what it learns is what `chat` asks for.

What is trained is what the template marks by {% generation %}. Of one without marks it is what stands behind the messages before an
answer, up to the special token that ends it. Either is encoded by itself, so no token is of both."""

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
    """Messages, and of each whether it is an answer with a loss. `where` it stands, for messages."""

    messages: Sequence[dict[str, Any]]
    losses: Sequence[bool]
    where: str

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def said(self, number: int) -> str:
        """What a template must write of an answer. Thinking it may leave out."""
        return templates.text_of(self.messages[number]["content"], self.where).rpartition("</think>")[2].strip()


def encode(found: Sequence[Conversation], tokenizer: Tokenizer) -> Iterator[list[tuple[np.ndarray, bool]]]:
    """Of each conversation its ids in parts, each with a loss or without one. UserError where the template refuses it, or does not
    write an answer, or not behind the messages before it."""
    cut = _by_marks if templates.has_marks(tokenizer.conventions.templates["default"]) else _by_prefixes
    for at in range(0, len(found), TOGETHER):
        group = found[at : at + TOGETHER]
        try:
            known = cut(group, tokenizer)
        except UserError:
            known = []
        for i, one in enumerate(group):  # the first one that fails is named
            try:
                yield _encoded(one, known[i] if known else cut([one], tokenizer)[0], tokenizer)
            except UserError as error:
                raise UserError(f"{one.where}: {error}") from None


def _by_marks(group: Sequence[Conversation], tokenizer: Tokenizer) -> list[list[Segment]]:
    """By the marks of the template: a marked part is of the next answer whose text is in it, or else of the one before."""
    mark, _ = templates.unused(json.dumps([one.messages for one in group], ensure_ascii=False))
    variables = {"add_generation_prompt": False, templates.MARK: mark}
    found = []
    for one, pieces in zip(group, tokenizer.chat_pieces([one.messages for one in group], variables), strict=True):
        spans: list[list[templates.Piece]] = [[]]
        for text, letters in pieces:
            for i, part in enumerate(text.split(mark)):
                spans += [[]] if i else []
                spans[-1] += [(part, letters)] if part else []
        left, now = one.answers, None
        segments: list[Segment] = []
        for i, span in enumerate(spans):
            if i % 2 and (new := next((n for n in left if one.said(n) in _text(span)), None)) is not None:
                left, now = [n for n in left if n > new], new
            segments.append((span, now if i % 2 else None))
        found.append(segments)
    return found


def _by_prefixes(group: Sequence[Conversation], tokenizer: Tokenizer) -> list[list[Segment]]:
    """By what the template writes of the messages before an answer, and of those up to it."""
    prompt, whole_text = {"add_generation_prompt": True}, {"add_generation_prompt": False}
    texts = tokenizer.chat_pieces([one.messages for one in group], whole_text)
    before = iter(tokenizer.chat_pieces([one.messages[:i] for one in group for i in one.answers if i], prompt))
    upto = iter(tokenizer.chat_pieces([one.messages[: i + 1] for one in group for i in one.answers], whole_text))
    found = []
    for one, pieces in zip(group, texts, strict=True):
        whole, cuts = _text(pieces), [0]
        for i in one.answers:
            begins, ends = _text(next(before)) if i else "", _text(next(upto))
            if not whole.startswith(begins) or len(begins) < cuts[-1]:
                raise UserError(f"the chat template does not write message {i + 1} behind those before it")
            stop = _end(pieces, len(begins), tokenizer)
            cuts += [len(begins), min(stop, len(ends)) if whole.startswith(ends) else stop]
        owners = [None, *(n for i in one.answers for n in (i, None))]
        parts = [list(_cut(pieces, first, stop)) for first, stop in pairwise([*cuts, len(whole)])]
        found.append(list(zip(parts, owners, strict=True)))
    return found


def _text(pieces: Sequence[templates.Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _encoded(one: Conversation, segments: list[Segment], tokenizer: Tokenizer) -> list[tuple[np.ndarray, bool]]:
    for number in one.answers:
        trained = "".join(_text(pieces) for pieces, owner in segments if owner == number)
        if one.losses[number] and (not trained or one.said(number) not in trained):
            raise UserError(f"the chat template does not write the answer in message {number + 1}, or not where it is trained")
    found, before = [], ""
    for pieces, owner in segments:
        for piece in pieces:
            ids = tokenizer.encode_piece(piece, first=not found, before=before)
            found.append((ids, owner is not None and one.losses[owner]))
            before = "" if piece[1] else piece[0]
    return found


def _end(pieces: list[templates.Piece], start: int, tokenizer: Tokenizer) -> int:
    """Where an answer ends that begins at `start`: behind the template's first special token from there on, or with the text."""
    at = 0
    for text, letters in pieces:
        places = [] if letters else [(text.find(name, max(0, start - at)), len(name)) for name in tokenizer.special]
        if found := [(place, size) for place, size in places if place >= 0]:
            return at + sum(min(found, key=lambda one: (one[0], -one[1])))
        at += len(text)
    return at


def _cut(pieces: list[templates.Piece], first: int, stop: int) -> Iterator[templates.Piece]:
    at = 0
    for text, letters in pieces:
        if part := text[max(0, first - at) : max(0, stop - at)]:
            yield part, letters
        at += len(text)
