"""Chat messages as token ids, rendered by the model's chat template or, without one, as lines."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from barellm.chat import templates
from barellm.errors import UserError, shown

# Roles in a conversation without a chat template.
LINES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class Chats:
    """The part of a tokenizer that knows conversations."""

    added: Any  # properties of a tokenizer
    conventions: Any
    ends: Any
    special: Any

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Of a tokenizer."""
        raise NotImplementedError

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> np.ndarray:
        """Ids, int32, of a conversation: messages, each with a role and a content, by the model's chat template; of several the one
        that `chat_template` names. Other `variables` are the template's. A special token's name in a message is text.

        Without a template a message is a line, `User: Hi`, as fine-tuning has it. UserError for messages that are none, for a
        template that fails or is not done in time, and where jinja2 is missing."""
        given = {"add_generation_prompt": add_generation_prompt, **variables}
        return np.concatenate([ids for ids, _ in self.chats([messages], given)[0]])

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of which `chat` gives the ids. UserError as there."""
        given = {"add_generation_prompt": add_generation_prompt, **variables}
        template, (found,) = self._checked_for(given, [messages])
        if not template:
            return "".join(text for text, _ in self._lines(found, add_generation_prompt))
        return templates.render(template, [found], {**self.conventions.named, **given})[0]

    def _checked_for(self, variables: Mapping[str, Any], conversations: Sequence[Any]) -> tuple[str, list[Any]]:
        """The template, and conversations as it takes them: some write parts of a content, to others they are one text."""
        template, found = self._template(variables), [templates.checked(one) for one in conversations]
        parts = any(isinstance(message.get("content"), list) for one in found for message in one)
        if parts and not (template and templates.takes_parts(template, tuple(sorted(self.conventions.named.items())))):
            found = [templates.joined(one) for one in found]
        return template, found

    def _template(self, variables: Mapping[str, Any]) -> str:
        known = self.conventions.templates
        name = variables.get("chat_template", "tool_use" if variables.get("tools") and "tool_use" in known else "default")
        if name not in known and "chat_template" in variables:
            raise UserError(f"chat_template is {shown(name)}, expected one that the model has: {', '.join(known) or 'it has none'}")
        return known.get(name, "")

    @property
    def turn_stops(self) -> list[str]:
        """What ends an answer of a model without a chat template, whose messages are lines."""
        return [] if self.conventions.templates else [f"\n{LINES['user']}:"]

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """The ids that end an assistant message: the tokenizer's `ends`, and the first special token that the chat template writes
        behind one (a base model's files may not name the one that chat tuning added). Found by rendering a probe message."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": templates.SAID}]
        if not self.conventions.templates:
            return self.ends
        (text,) = self.chat_pieces([probe], {"add_generation_prompt": False})
        rendered = "".join(part for part, _ in text)
        places = sorted((rendered.find(name, rendered.rfind(templates.SAID)), -len(name), name) for name in self.special)
        return self.ends | {self.special[name] for at, _, name in [p for p in places if p[0] >= 0][:1]}

    def chat_pieces(self, conversations: Sequence[Any], variables: Mapping[str, Any]) -> list[list[templates.Piece]]:
        """The text of each conversation in pieces, and of each whether it is letters alone."""
        template, found = self._checked_for(variables, conversations)
        if not template:
            return [self._lines(one, bool(variables.get("add_generation_prompt"))) for one in found]
        special = frozenset(self.special)
        control = templates.control_tokens(template, special, frozenset(self.added))
        return templates.pieces(template, found, {**self.conventions.named, **variables}, control, special)

    def _lines(self, messages: Sequence[Mapping[str, Any]], answers: bool) -> list[templates.Piece]:
        """Render messages as lines `Role: content` for a model without a chat template (`forms`); `answers`: end with an answer's
        prompt. A piece is (text, whether it is letters only: False for begin and end tokens). UserError for other messages."""
        found: list[templates.Piece] = []
        name_of = {i: name for name, i in self.special.items()}
        begin, end = (name_of.get(-1 if i is None else i, "") for i in (self.conventions.begin, self.conventions.end))
        for message in messages:
            said = LINES.get(message["role"])
            if said is None or not isinstance(message.get("content"), str):
                raise UserError(f"the model has no chat template: expected texts of {', '.join(LINES)}")
            answer = message["role"] == "assistant"
            found += [(begin, False)] if not found else []
            found += [(f"{said}:", True), (f" {message['content']}", True), (end, False)] if answer else []
            found += [] if answer else [(f"{said}: {message['content']}\n", True)]
        found += [(f"{LINES['assistant']}:", True)] if answers else []
        return [piece for piece in found if piece[0]]

    def chats(self, conversations: Sequence[Any], variables: Mapping[str, Any]) -> list[list[tuple[np.ndarray, str]]]:
        """Ids and text of each piece of each conversation."""
        found = []
        for parts in self.chat_pieces(conversations, variables):
            found.append([(self.encode_piece(part, first=i == 0), part[0]) for i, part in enumerate(parts)])
        return found

    def encode_piece(self, piece: templates.Piece, *, first: bool, before: str = "") -> np.ndarray:
        """Ids of a piece of a conversation; `before`: the piece before it, as far as it was cut there."""
        text, letters = piece
        return self.encode(text, special=not letters)
