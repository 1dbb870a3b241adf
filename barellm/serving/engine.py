"""Continuous batching: texts join and leave between two tokens, each with the bits that it has alone.

One thread owns the session. It feeds a prompt in pieces, and after each piece all running texts take a step of one token together,
each at its own position and in its own slot of the KV caches. Prompts wait in the order in which they came. Three things make a
text independent of the load: a prompt is cut at multiples of `piece`, whatever else runs; a step's GEMMs and attention are
batch-invariant for up to 64 rows (docs/generation.md); and a token is drawn by seed and index."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from barellm.api import Model
from barellm.assembly import quantized
from barellm.assembly.build import cache_arithmetic
from barellm.assembly.serving import serving_programs
from barellm.errors import UserError, shown
from barellm.generation import samplers
from barellm.generation.decode import MOST_TOGETHER, UNLIKELY
from barellm.runtime.memory import TooLarge
from barellm.serving.slots import Slots

USUAL_POSITIONS = 4096
CLOSED = "the server is closing"


@dataclass(frozen=True)
class Request:
    """`count` tokens that follow the ids `prompt`, or fewer where one of `ends` is drawn. Log-probabilities, if `top_logprobs` is
    not None, of each token and of the most likely ones, so many; with `echo` of the prompt's tokens too, and count may be 0."""

    prompt: tuple[int, ...]
    count: int
    sampling: samplers.Sampling
    ends: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    echo: bool = False


@dataclass(frozen=True)
class Token:
    """A token, the natural logarithm of its probability by the raw logits, and the most likely (id, logarithm), the first first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """The prompt's tokens; the first has no logprob."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Ended:
    reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Failed:
    message: str


Event = Prompt | Token | Ended | Failed


class Full(Exception):
    """No more texts are taken now: as many wait as may, or the engine is closing."""


class Ticket:
    """A text from `Engine.submit` to its last event."""

    def __init__(self, engine: Engine, request: Request, deliver: Callable[[Event], object]) -> None:
        self.request, self.ids, self.drawn = request, list(request.prompt), 0
        self.slot = self.fed = 0  # its slot, and how many of the prompt's tokens the caches hold
        self.scored = [Token(request.prompt[0])]  # of the prompt, with echo
        self.ended = False
        self._engine, self._deliver, self._telling = engine, deliver, threading.RLock()

    def cancel(self) -> None:
        """End it here. Its slot is free within a token, and no event comes after this call. It waits for a `deliver` that runs,
        which must not wait for the thread that cancels."""
        with self._telling:
            self.ended = True
        self._engine._forget(self)

    def tell(self, event: Event) -> None:
        with self._telling:
            if self.ended:
                return
            self.ended = isinstance(event, Ended | Failed)
            try:
                self._deliver(event)
            except Exception:
                self.ended = True
                logging.getLogger(__name__).exception("a text is ended: its deliver failed")


class Engine:
    """Texts of one model, with the adapter that it uses now, up to `slots` (64 at most) side by side, of up to `positions` tokens
    each, prompt included (0: as many as the model has, at most 4096); `queue` more may wait. `weights` names a quantization
    scheme, if matmuls shall read codes. UserError for a model without a KV cache, and for caches that do not fit into memory.
    Close it: its thread keeps it."""

    def __init__(
        self, model: Model, *, slots: int = 16, positions: int = 0, queue: int = 64, piece: int = 128, weights: str = ""
    ) -> None:
        config = model.config.model
        self.positions = positions or min(config.max_seq, USUAL_POSITIONS)
        limits = {"slots": (slots, MOST_TOGETHER), "positions": (self.positions, config.max_seq), "piece": (piece, 4096)}
        for name, (found, most) in (limits | {"queue": (queue, 1 << 20)}).items():
            if not 1 <= found <= most:
                raise UserError(f"{name} is {found}, expected a number from 1 to {most}")
        self.slots, self.queue, self.piece, self._rows = slots, queue, min(piece, self.positions), config.vocab_size
        self.vocabulary = min(config.vocab_size, model.tokenizer.vocab_size)
        self._unused = [i for i in model.tokenizer.unused if i < self.vocabulary]
        self._closing: float | None = None  # when it ends whatever runs
        self._waiting: deque[Ticket] = deque()
        self._feeding: Ticket | None = None
        self._running: list[Ticket] = []
        self._counts = dict.fromkeys(("prompt_tokens", "shared_tokens", "tokens", "steps", "failed"), 0)
        self._changed = threading.Condition()
        self._open = ExitStack()
        sizes = {"slots": slots, "positions": self.positions, "piece": self.piece}
        programs = serving_programs(config, compute=model.config.train.dtype, **sizes)
        matrices = quantized.quantize_programs(programs, weights) if weights else None
        try:
            self._session = self._open.enter_context(model._session_of(programs, matrices))
        except TooLarge as error:
            caches = cache_arithmetic(programs["serve"])
            raise UserError(f"{error}{caches}: choose fewer slots or positions, or a smaller model") from None
        self._slots = Slots(self._session, slots, self.piece)
        self._thread = threading.Thread(target=self._loop, name="barellm engine", daemon=True)
        self._thread.start()

    # --- from any thread ---

    def submit(self, request: Request, deliver: Callable[[Event], object]) -> Ticket:
        """Begin a text as soon as there is a slot. `deliver` gets its events, in order, from the engine's thread, which waits for
        it: it should only hand them on. Full where no more may wait; UserError for a request that cannot be."""
        self._check(request)
        ticket = Ticket(self, request, deliver)
        with self._changed:
            if self._closing is not None or not self._thread.is_alive():
                raise Full(CLOSED)
            if len(self._waiting) >= self.queue + len(self._slots.free):
                raise Full(f"{len(self._waiting)} texts are waiting, which is as many as may")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def _check(self, r: Request) -> None:
        if not r.prompt:
            raise UserError("the prompt has no tokens, expected at least one")
        ids = [("prompt", self._rows, r.prompt), ("logit_bias", self.vocabulary, dict(r.sampling.logit_bias))]
        for name, limit, token in ((name, limit, token) for name, limit, tokens in ids for token in tokens):
            if not 0 <= token < limit:
                raise UserError(f"{name} has the id {shown(token)}, expected ids from 0 to {limit - 1}")
        if r.count < (least := 0 if r.echo else 1):
            raise UserError(f"count is {r.count}, expected at least {least}")
        if (r.top_logprobs is None and r.echo) or (r.top_logprobs or 0) < 0:
            raise UserError(f"top_logprobs is {r.top_logprobs}, expected a number from 0 on{' with echo' if r.echo else ''}")
        if (total := len(r.prompt) + r.count) > self.positions:
            sizes = f"{len(r.prompt)} tokens of the prompt and {r.count} that follow"
            raise UserError(f"{sizes} are {total}, expected at most {self.positions} positions")

    def stats(self) -> dict[str, int]:
        """Texts running and waiting, slots, positions, bytes of the KV caches, and since the beginning: tokens of prompts that
        were computed and that were shared, tokens drawn, steps, texts that failed."""
        with self._changed:
            texts = {"running": len(self._running) + (self._feeding is not None), "waiting": len(self._waiting)}
            sizes = {"slots": self.slots, "positions": self.positions, "kv_bytes": self._slots.nbytes}
            return texts | sizes | self._counts

    def close(self, grace: float = 0.0) -> None:
        """Take no more texts, finish those that were taken for up to `grace` seconds, and tell the others that they failed."""
        with self._changed:
            end = time.monotonic() + grace
            self._closing = end if self._closing is None else min(end, self._closing)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _forget(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    # --- the engine's thread ---

    def _loop(self) -> None:
        try:
            while self._busy():
                self._leave()
                self._admit()
                if self._feeding is not None:
                    self._guarded([self._feeding], partial(self._feed, self._feeding))
                if texts := [text for text in self._running if not text.ended]:
                    self._guarded(texts, partial(self._step, texts))
        finally:
            for ticket in [*self._running, *filter(None, [self._feeding]), *self._waiting]:
                ticket.tell(Failed(CLOSED))
            self._open.close()

    def _busy(self) -> bool:
        """Wait for something to do; False: it is to end."""
        with self._changed:
            while not (texts := bool(self._waiting or self._running or self._feeding)) and self._closing is None:
                self._changed.wait()
            return texts and (self._closing is None or time.monotonic() < self._closing)

    def _leave(self) -> None:
        """Free the slots of texts that have ended."""
        with self._changed:
            feeding = [] if self._feeding is None else [self._feeding]
            self._slots.free += [text.slot for text in (*self._running, *feeding) if text.ended]
            self._running = [text for text in self._running if not text.ended]
            self._feeding = next((text for text in feeding if not text.ended), None)

    def _admit(self) -> None:
        """Give the text that has waited longest a slot, if no prompt is being fed."""
        with self._changed:
            if self._feeding is None and self._waiting and self._slots.free:
                ticket = self._feeding = self._waiting.popleft()
                ticket.slot, ticket.fed = self._slots.take(ticket.request.prompt, share=not ticket.request.echo)
                self._counts["shared_tokens"] += ticket.fed

    def _guarded(self, texts: Sequence[Ticket], work: Callable[[], None]) -> None:
        """What goes wrong ends these texts, and nothing else."""
        try:
            work()
        except Exception as error:
            self._counts["failed"] += len(texts)
            for ticket in texts:
                ticket.tell(Failed(str(error) or type(error).__name__))
            if not isinstance(error, UserError):
                logging.getLogger(__name__).exception("a step failed")

    def _feed(self, ticket: Ticket) -> None:
        """Compute the next piece of a prompt, and behind the last draw the first token."""
        request, begin = ticket.request, ticket.fed
        prompt, end = request.prompt, min(begin + self.piece, len(request.prompt))
        program = "serve_echo" if request.echo else "serve_prompt"
        logits = self._run(program, [prompt[begin:end]], [range(begin, end)], [ticket.slot])
        self._counts["prompt_tokens"] += end - begin
        ticket.fed = end
        self._slots.held[ticket.slot] = prompt[: end - end % self.piece]
        if request.echo:
            every = self._session.read("every")[0]
            ticket.scored += map(partial(self._token, request), prompt[begin + 1 : end + 1], every)
        if end < len(prompt):
            return
        with self._changed:
            self._feeding = None
            self._running.append(ticket)
        if request.echo:
            ticket.tell(Prompt(tuple(ticket.scored)))
        if request.count:
            self._draw(ticket, logits[0])
        else:
            ticket.tell(Ended("length"))

    def _step(self, texts: Sequence[Ticket]) -> None:
        """One token of each text."""
        last, positions = [text.ids[-1:] for text in texts], [[len(text.ids) - 1] for text in texts]
        logits = self._run("serve", last, positions, [text.slot for text in texts])
        self._counts["steps"] += 1
        for text, row in zip(texts, logits, strict=True):
            self._guarded([text], partial(self._draw, text, row))

    def _run(self, program: str, tokens: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], slots: Any) -> np.ndarray:
        """The logits (B, Vp) of each text's last token."""
        for name, ids in (("tokens", tokens), ("positions", positions), ("slots", slots)):
            self._session.write(name, np.array(ids, np.int32))
        self._session.run(program, batch=len(slots), seq=len(tokens[0]))
        return self._session.read("logits")[:, 0]

    def _draw(self, ticket: Ticket, logits: np.ndarray) -> None:
        request, allowed = ticket.request, logits[: self.vocabulary].astype(np.float32)
        allowed[self._unused] = UNLIKELY
        token = samplers.draw(allowed, request.sampling, index=ticket.drawn, text=ticket.ids)
        ticket.ids.append(token)
        ticket.drawn += 1
        self._counts["tokens"] += 1
        ticket.tell(self._token(request, token, logits))
        if token in request.ends or ticket.drawn == request.count:
            ticket.tell(Ended("stop" if token in request.ends else "length"))

    def _token(self, request: Request, token: int, logits: np.ndarray) -> Token:
        if request.top_logprobs is None:
            return Token(token)
        scores = samplers.log_probabilities(logits[: self._rows])
        shown = scores[: self.vocabulary].copy()
        shown[self._unused] = -np.inf
        top = samplers.most_likely(shown, request.top_logprobs)
        return Token(token, float(scores[token]), tuple((int(i), float(scores[i])) for i in top))
