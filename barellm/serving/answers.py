"""Answers of OpenAI's protocol: from the engine's events to text, log-probabilities and JSON, in one piece or in chunks."""

import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from barellm import __version__
from barellm.data.tokenizers import StreamDecoder
from barellm.generation.writing import Written
from barellm.serving.engine import CLOSED, Ended, Event, Failed, Prompt, Token
from barellm.serving.protocol import Call, Refused, Served


@dataclass
class Part:
    """What a text has more of after an event: characters, and tokens, each with the place of the character at which it begins."""

    text: str = ""
    tokens: list[tuple[int, Token]] = field(default_factory=list)


class Choice:
    """One text of an answer. `reason` says why it has ended, once it has; `drawn` counts its tokens."""

    def __init__(self, call: Call, index: int, served: Served) -> None:
        self.index, self.drawn, self.reason = index, 0, ""
        self._call, self._request, self._tokenizer = call, call.requests[index], served.model.tokenizer
        self._pieces: list[str] = []
        how: dict[str, Any] = {"begins": call.begins, "ends": self._request.ends, "emit": self._pieces.append}
        self._written = Written(self._tokenizer, stops=call.stops, **how)
        self._decoder = StreamDecoder(self._tokenizer, begins=call.begins)
        self._shown = self._read = 0  # characters that were given out, and that the tokens stand for
        self._held: deque[tuple[int, Token]] = deque()  # tokens whose text is held back

    def feed(self, event: Event) -> Part:
        """What an engine event adds to the text. Raises Refused (503 or 500) if generation failed."""
        if isinstance(event, Failed):
            closed = event.message == CLOSED
            raise Refused(event.message, code="generation_failed", status=503 if closed else 500, wait=2 * closed)
        if isinstance(event, Prompt):
            return self._echo(event.tokens)
        if isinstance(event, Ended):
            return self._end(event.reason, cut=False)
        self.drawn += 1
        ends = event.id in self._request.ends
        if not (ends and self._call.chat):  # a chat's tokens make up its text
            self._held.append((self._read, event))
            self._read += len(self._decoder.feed(event.id))
        self._written.feed(event.id)
        return self._end("stop", cut=not ends) if self._written.ended else self._part(everything=False)

    def _echo(self, tokens: Sequence[Token]) -> Part:
        part, decoder, at = Part(self._call.echoes[self.index // self._call.n]), StreamDecoder(self._tokenizer), 0
        for token in tokens:
            part.tokens.append((min(at, len(part.text)), token))
            at += len(decoder.feed(token.id))
        self._shown = self._read = len(part.text)
        return part

    def _end(self, reason: str, *, cut: bool) -> Part:
        """`cut`: by a stop text, which takes the tokens away that begin in it or behind it."""
        ended = self._written.ended
        self._written.finish()
        cut = cut or self._written.ended > ended  # by half a character, which is one now
        self.reason = "stop" if cut else reason
        return self._part(everything=not cut)

    def _part(self, *, everything: bool) -> Part:
        part = Part("".join(self._pieces))
        self._pieces.clear()
        self._shown += len(part.text)
        while self._held and (everything or self._held[0][0] < self._shown):
            part.tokens.append(self._held.popleft())
        return part


class Answer:
    """The JSON of one answer, whole or in chunks. `parts` are the parts of its choices as they come."""

    def __init__(self, call: Call, served: Served) -> None:
        self.call, self.tokenizer = call, served.model.tokenizer
        self.choices = [Choice(call, i, served) for i in range(len(call.requests))]
        self._special = {i: name for name, i in served.model.tokenizer.special.items()}
        kind = f"chat.completion{'.chunk' * call.stream}" if call.chat else "text_completion"
        self._head: dict[str, Any] = {"id": f"{'chatcmpl' if call.chat else 'cmpl'}-{secrets.token_hex(12)}", "object": kind}
        self._head |= {"created": int(time.time()), "model": served.name, "system_fingerprint": f"barellm-{__version__}"}

    async def whole(self, parts: AsyncIterator[tuple[Choice, Part]]) -> dict[str, Any]:
        """The complete response (OpenAI's JSON), after all choices have ended. `parts`: what each gains, in any order."""
        collected = [Part() for _ in self.choices]
        async for choice, part in parts:
            collected[choice.index].text += part.text
            collected[choice.index].tokens += part.tokens
        found = []
        for choice, part in zip(self.choices, collected, strict=True):
            message = {"role": "assistant", "content": part.text, "refusal": None}
            content = {"message": message} if self.call.chat else {"text": part.text}
            found.append({"index": choice.index, **content, "logprobs": self._logprobs(part), "finish_reason": choice.reason})
        return {**self._head, "choices": found, "usage": self._usage()}

    async def chunks(self, parts: AsyncIterator[tuple[Choice, Part]]) -> AsyncIterator[dict[str, Any]]:
        """Streaming chunks: the role, then text, a last chunk per choice with its finish reason, and the usage if requested."""
        for choice in self.choices if self.call.chat else ():
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async for choice, part in parts:
            if part.text or (part.tokens and self.call.top is not None):
                yield self._chunk(choice, {"content": part.text}, self._logprobs(part))
            if choice.reason:
                yield self._chunk(choice, {}, reason=choice.reason)
        if self.call.usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _chunk(self, choice: Choice, delta: dict[str, str], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        said = {"delta": delta} if self.call.chat else {"text": delta.get("content", "")}
        found = {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [found], **({"usage": None} if self.call.usage else {})}

    def _usage(self) -> dict[str, int]:
        prompts = sum(len(request.prompt) for request in self.call.requests[:: self.call.n])
        drawn = sum(choice.drawn for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": drawn, "total_tokens": prompts + drawn}

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        """The log-probabilities of a part in OpenAI's chat or completion format; None if not requested."""
        if self.call.top is None:
            return None
        if self.call.chat:
            content = [{**self._one(t.id, t.logprob), "top_logprobs": [self._one(*top) for top in t.top]} for _, t in part.tokens]
            return {"content": content, "refusal": None}
        tokens = [token for _, token in part.tokens]
        found = {"tokens": [self._name(token.id) for token in tokens], "token_logprobs": [token.logprob for token in tokens]}
        tops = [None if token.logprob is None else self._top(token) for token in tokens]
        return {**found, "top_logprobs": tops, "text_offset": [at for at, _ in part.tokens]}

    def _one(self, i: int, logprob: float | None) -> dict[str, Any]:
        """A token of a chat: of half a character the text is a replacement, and `bytes` has the truth."""
        text, name = self.tokenizer.token_bytes(i), self._special.get(i)
        return {"token": name or text.decode("utf-8", "replace"), "logprob": logprob, "bytes": None if name else [*text]}

    def _name(self, i: int) -> str:
        """A token's text; of one that is half a character its bytes, so that no two look alike."""
        text = self.tokenizer.token_bytes(i)
        try:
            return self._special.get(i) or text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def _top(self, token: Token) -> dict[str, float | None]:
        """By their texts, the drawn one among them. Another one that has the text of one before it is named by its id."""
        found, owners = {}, {self._name(token.id): token.id}
        for i, logprob in dict([*token.top, (token.id, token.logprob)]).items():
            name = self._name(i)
            found[name if owners.setdefault(name, i) == i else f"token_id:{i}"] = logprob
        return found
