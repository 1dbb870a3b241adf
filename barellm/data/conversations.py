"""Conversations as training examples, as the model's chat template writes them: what it learns is what `chat` asks for.

An answer is what an assistant says, and the special token behind it. It is encoded behind the ids that `chat` gives for the
messages before it, so no token is of both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from barellm.chat.templates import Piece
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError

TOGETHER = 64  # conversations that are rendered in one request


@dataclass(frozen=True)
class Conversation:
    """Messages, and of each whether it is an answer with a loss. `where` it stands, for messages."""

    messages: Sequence[dict[str, Any]]
    losses: Sequence[bool]
    where: str


def encode(found: Sequence[Conversation], tokenizer: Tokenizer) -> Iterator[list[tuple[np.ndarray, bool]]]:
    """Of each conversation its ids in parts, each with a loss or without one. UserError where the template refuses it, or does not
    write an answer behind the messages before it."""
    for at in range(0, len(found), TOGETHER):
        group = found[at : at + TOGETHER]
        answers = [[i for i, m in enumerate(one.messages) if m["role"] == "assistant"] for one in group]
        before = [one.messages[:i] for one, places in zip(group, answers, strict=True) for i in places]
        try:
            texts = tokenizer.chat_pieces([one.messages for one in group], {"add_generation_prompt": False})
            prompts = iter(tokenizer.chat_pieces(before, {"add_generation_prompt": True}))
        except UserError as error:
            raise UserError(f"{group[0].where} and the {len(group) - 1} examples behind it: {error}") from None
        for one, places, pieces in zip(group, answers, texts, strict=True):
            yield _parts(one, pieces, [(i, next(prompts)) for i in places], tokenizer)


def _parts(
    one: Conversation, pieces: list[Piece], prompts: list[tuple[int, list[Piece]]], tokenizer: Tokenizer
) -> list[tuple[np.ndarray, bool]]:
    whole = "".join(text for text, _ in pieces)
    cuts, losses = [0], []
    for number, prompt in prompts:
        begins = "".join(text for text, _ in prompt)
        if not whole.startswith(begins) or len(begins) < cuts[-1]:
            raise UserError(f"{one.where}: the chat template does not write message {number + 1} behind those before it")
        cuts += [len(begins), _end(pieces, len(begins), tokenizer)]
        losses += [False, one.losses[number]]
    cuts.append(len(whole))
    found = []
    for i, ((first, stop), loss) in enumerate(zip(pairwise(cuts), [*losses, False], strict=True)):
        for j, part in enumerate(_cut(pieces, first, stop)):
            found.append((tokenizer.encode_piece(part, first=i == j == 0), loss))
    return found


def _end(pieces: list[Piece], start: int, tokenizer: Tokenizer) -> int:
    """Where an answer ends that begins at `start`: behind the template's first special token from there on, or with the text."""
    at = 0
    for text, letters in pieces:
        places = [] if letters else [(text.find(name, max(0, start - at)), len(name)) for name in tokenizer.special]
        if found := [(place, size) for place, size in places if place >= 0]:
            return at + sum(min(found, key=lambda one: (one[0], -one[1])))
        at += len(text)
    return at


def _cut(pieces: list[Piece], first: int, stop: int) -> Iterator[Piece]:
    at = 0
    for text, letters in pieces:
        if part := text[max(0, first - at) : max(0, stop - at)]:
            yield part, letters
        at += len(text)
