"""A model whose tokens a test writes, behind the real application."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from barellm import load
from barellm.serving.engine import Ended, Failed, Full, Prompt, Request, Token
from barellm.serving.protocol import Served
from tests.chat.test_models import source

Script = Callable[[Request], Sequence[Any]]


class Engine:
    """Gives each request the events that `script` has for it, all at once, in a thread of its own. An exception is raised where the
    request comes in. Of a script that ends without an `Ended` or a `Failed` nothing more ever comes."""

    def __init__(self, script: Script, *, positions: int = 128, vocabulary: int = 401, room: int = 1000) -> None:
        self.script, self.positions, self.vocabulary, self.room = script, positions, vocabulary, room
        self.slots, self.queue = 4, 200
        self.requests: list[Request] = []
        self.cancelled: list[int] = []

    def submit(self, request: Request, deliver: Callable[[Any], object]) -> Any:
        if len(self.requests) - len(self.cancelled) >= self.room:
            raise Full("the queue is full")
        number, engine = len(self.requests), self
        self.requests.append(request)
        events = self.script(request)
        thread = threading.Thread(target=lambda: [deliver(event) for event in events])
        thread.start()
        thread.join()

        class Ticket:
            def cancel(self) -> None:
                if number not in engine.cancelled:
                    engine.cancelled.append(number)

        return Ticket()

    def stats(self) -> dict[str, int]:
        return {"running": len(self.requests) - len(self.cancelled), "waiting": 0, "slots": 4}


def served(folder: Path, script: Script = lambda request: (), *, name: str = "tiny", **sizes: int) -> Served:
    """A model of Qwen's kind, of which only the tokenizer and the chat template matter."""
    model = load(source(folder), device="reference")
    return Served(name, model, Engine(script, **sizes), 1)  # pyright: ignore[reportArgumentType]


def tokens(ids: Sequence[int], request: Request, *, reason: str = "length") -> list[Any]:
    """Events of these tokens: with log-probabilities that say which token it is, where they are wanted."""
    events: list[Any] = [token(i, request) for i in ids]
    if request.echo:
        first, *rest = request.prompt
        events.insert(0, Prompt((Token(first, None, ()), *(token(i, request) for i in rest))))
    return [*events, Ended(reason)]  # pyright: ignore[reportArgumentType]


def token(i: int, request: Request) -> Token:
    k = request.top_logprobs
    others = [(j, -1.0 - j / 7) for j in range(k or 0)]
    return Token(i, None if k is None else dict(others).get(i, -0.5 - i / 3), tuple(others))


__all__ = ["Ended", "Engine", "Failed", "Served", "served", "token", "tokens"]
