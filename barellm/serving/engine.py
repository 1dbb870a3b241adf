"""Continuous batching: texts join and leave between two tokens, each with the bits that it has alone.

One thread owns the session. It feeds prompts, first come, first served, in pieces; after each piece all running texts take a step
of one token together, each at its own position and in its own slot of the KV caches. Three things make a text independent of the
load: prompts are cut at multiples of `piece` (for quantized weights); steps are batch-invariant; tokens drawn by seed and index."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from barellm.api import Model
from barellm.assembly import quantized, serving
from barellm.assembly.build import cache_arithmetic
from barellm.errors import UserError, shown
from barellm.generation import samplers
from barellm.generation.decode import MOST_TOGETHER, UNLIKELY
from barellm.runtime.memory import TooLarge
from barellm.serving.slots import Slots

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
    tokens: tuple[Token, ...]  # of the prompt; the first has no logprob


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

    def __init__(self, engine: "Engine", request: Request, deliver: Callable[[Event], object]) -> None:
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
        with self._engine._changed, contextlib.suppress(ValueError):
            self._engine._waiting.remove(self)

    @property
    def feeding(self) -> bool:
        return self.fed < len(self.request.prompt)

    def tell(self, event: Event) -> None:
        """Deliver an event, unless the text has ended; a failing callback ends it."""
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
    each, prompt included (0: as many as the model has, at most 4096); `queue` more may wait. `weights` names a quantization scheme,
    if matmuls shall read codes. UserError without a KV cache, or memory for it. Close it: its thread keeps it."""

    def __init__(
        self, model: Model, *, slots: int = 16, positions: int = 0, queue: int = 64, piece: int = MOST_TOGETHER, weights: str = ""
    ) -> None:
        """Check the limits, plan and allocate the programs with KV caches, and start the thread. Parameters: see the class."""
        config = model.config.model
        self.positions = positions or min(config.max_seq, 4096)
        limits = {"slots": (slots, MOST_TOGETHER), "positions": (self.positions, config.max_seq), "piece": (piece, MOST_TOGETHER)}
        for name, (found, most) in (limits | {"queue": (queue, 1 << 20)}).items():
            if not 1 <= found <= most:
                raise UserError(f"{name} is {found}, expected a number from 1 to {most}")
        self.slots, self.queue, self.piece, self._rows = slots, queue, min(piece, self.positions), config.vocab_size
        self.vocabulary = min(config.vocab_size, model.tokenizer.vocab_size)
        self._unused = [i for i in model.tokenizer.unused if i < self.vocabulary]
        self._closing: float | None = None  # when it ends whatever runs
        self._waiting, self._texts = deque[Ticket](), list[Ticket]()  # without and with a slot
        self._counts = dict.fromkeys(("prompt_tokens", "shared_tokens", "tokens", "steps", "failed"), 0)
        self._changed, self._open = threading.Condition(), contextlib.ExitStack()
        self._least = serving.QUANTIZED_ROWS if weights else 1
        sizes = {"slots": slots, "positions": self.positions, "piece": self.piece, "compute": model.config.train.dtype}
        programs = serving.serving_programs(config, **sizes)
        matrices = quantized.quantize_programs(programs, weights) if weights else None
        try:
            self._session = self._open.enter_context(model._session_of(programs, matrices))
        except TooLarge as error:
            raise UserError(f"{error}{cache_arithmetic(programs['serve'])}: choose fewer slots or positions") from None
        self._slots = Slots(self._session, slots, self.piece if weights else 1)
        self._thread = threading.Thread(target=self._loop, name="barellm engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Callable[[Event], object]) -> Ticket:
        """Queue a text; it begins when a slot is free. `deliver` gets its events in order on the engine's thread and must not
        block. Full if the queue is; UserError for an invalid request."""
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
        """UserError for a request outside the model's vocabulary or the engine's limits."""
        # With echo a request may be for the prompt's log-probabilities alone: no token needs to follow.
        ids, least, k = f"expected ids from 0 to {self._rows - 1}", 0 if r.echo else 1, r.top_logprobs
        bad, biases = ([i for i in one if not 0 <= i < self._rows][:3] for one in (r.prompt, dict(r.sampling.logit_bias)))
        sizes = f"{len(r.prompt)} tokens of the prompt and {r.count} that follow are {len(r.prompt) + r.count}"
        for wrong, says in (
            (not r.prompt, "the prompt has no tokens, expected at least one"),
            (bad, f"the prompt has {shown(bad)}, {ids}"),
            (biases, f"logit_bias has {shown(biases)}, {ids}"),
            (r.count < least, f"count is {r.count}, expected at least {least}"),
            (k is None and r.echo, "echo is for log-probabilities, expected top_logprobs with it"),
            (k is not None and k < 0, f"top_logprobs is {k}, expected a number from 0 on"),
            (len(r.prompt) + r.count > self.positions, f"{sizes}, expected at most {self.positions} positions"),
        ):
            if wrong:
                raise UserError(says)

    def stats(self) -> dict[str, int]:
        """Texts that run and that wait, sizes, and counts since the beginning: tokens of prompts computed and shared, ..."""
        with self._changed:
            texts = {"running": len(self._texts), "waiting": len(self._waiting)}
            return texts | {"slots": self.slots, "positions": self.positions, "kv_bytes": self._slots.nbytes} | self._counts

    def close(self, grace: float = 0.0) -> None:
        """Take no more texts, finish those that were taken for up to `grace` seconds, and tell the others that they failed."""
        with self._changed:
            self._closing = min(time.monotonic() + grace, self._closing or float("inf"))
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        """The engine's thread: prefill one piece, then one decode step for all running texts, until closed."""
        try:
            while self._take_turns():
                for text in [text for text in self._texts if text.feeding]:
                    self._guarded([text], self._feed, text)
                if texts := [text for text in self._texts if not (text.feeding or text.ended)]:
                    self._guarded(texts, self._step, texts)
        finally:
            for text in [*self._texts, *self._waiting]:
                text.tell(Failed(CLOSED))
            self._open.close()

    def _take_turns(self) -> bool:
        """Free the slots of ended texts and admit the longest waiting (one prompt prefills at a time). False: the engine ends."""
        with self._changed:
            self._slots.free += [text.slot for text in self._texts if text.ended]
            self._texts = [text for text in self._texts if not text.ended]
            while not (self._texts or self._waiting) and self._closing is None:
                self._changed.wait()
            feeding = any(text.feeding for text in self._texts)  # one prompt at a time
            admitted = [] if feeding or not (self._waiting and self._slots.free) else [self._waiting.popleft()]
            self._texts += admitted
        for text in admitted:
            text.slot, text.fed = self._slots.take(text.request.prompt, share=not text.request.echo)
            self._counts["shared_tokens"] += text.fed
        return bool(self._texts) and (self._closing is None or time.monotonic() < self._closing)

    def _guarded(self, texts: Sequence[Ticket], work: Callable[..., None], *args: Any) -> None:
        """Run `work`; an exception ends only these texts."""
        try:
            work(*args)
        except Exception as error:
            self._counts["failed"] += len(texts)
            for ticket in texts:
                ticket.tell(Failed(str(error) if isinstance(error, UserError) else f"a step failed: {type(error).__name__}"))
            if not isinstance(error, UserError):
                logging.getLogger(__name__).exception("a step failed")

    def _feed(self, ticket: Ticket) -> None:
        """Prefill the next piece of a prompt; after the last one draw the first token."""
        request, prompt, begin = ticket.request, ticket.request.prompt, ticket.fed
        ticket.fed = end = min(begin + self.piece, len(prompt))
        program = "serve_echo" if request.echo else "serve_prompt" if end == len(prompt) else "serve_piece"
        logits = self._run(program, [prompt[begin:end]], [range(begin, end)], [ticket.slot])
        self._counts["prompt_tokens"] += end - begin
        self._slots.held[ticket.slot] = [*prompt[: end - end % self._slots.grain]]
        if request.echo:
            rows = zip(prompt[begin + 1 : end + 1], self._session.read("every")[0], strict=False)
            ticket.scored += [self._token(request, token, row) for token, row in rows]
        if end < len(prompt):
            return
        if request.echo:
            ticket.tell(Prompt(tuple(ticket.scored)))
        if request.count:
            self._draw(ticket, logits[0])
        else:
            ticket.tell(Ended("length"))

    def _step(self, texts: Sequence[Ticket]) -> None:
        """One decode step: a token per text. The batch is padded to `_least` rows with its first, again."""
        rows = [*texts, *[texts[0]] * (self._least - len(texts))]
        last, positions = [text.ids[-1:] for text in rows], [[len(text.ids) - 1] for text in rows]
        logits = self._run("serve", last, positions, [text.slot for text in rows])
        self._counts["steps"] += 1
        for text, row in zip(texts, logits, strict=False):
            if self._slots.grain == 1:
                self._slots.held[text.slot].append(text.ids[-1])
            self._guarded([text], self._draw, text, row)

    def _run(self, program: str, tokens: Sequence[Sequence[int]], positions: Any, slots: Sequence[int]) -> np.ndarray:
        """The logits (B, Vp) of each text's last token."""
        for name, ids in {"tokens": tokens, "positions": positions, "slots": slots}.items():
            self._session.write(name, np.array(ids, np.int32))
        self._session.run(program, batch=len(slots), seq=len(tokens[0]))
        return np.empty(0) if program == "serve_piece" else self._session.read("logits")[:, 0]

    def _draw(self, ticket: Ticket, logits: np.ndarray) -> None:
        """Sample the next token of a text from its logits and deliver it."""
        request, masked = ticket.request, logits[: self.vocabulary].astype(np.float32)
        masked[self._unused] = UNLIKELY
        token = samplers.draw(masked, request.sampling, index=ticket.drawn, text=ticket.ids)
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
        drawable = scores[: self.vocabulary].copy()
        drawable[self._unused] = -np.inf
        top = samplers.most_likely(drawable, request.top_logprobs)
        return Token(token, float(scores[token]), tuple((int(i), float(scores[i])) for i in top))
