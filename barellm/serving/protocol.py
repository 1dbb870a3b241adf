"""Requests of OpenAI's protocol: a body is checked field by field, and becomes requests of the engine."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from barellm.api import Model
from barellm.config.fields import converted
from barellm.errors import UserError, nearest, shown
from barellm.generation.samplers import Sampling
from barellm.jsontext import TOO_DEEP
from barellm.serving.engine import Engine, Request

MOST_TEXTS, MOST_MESSAGES, MOST_STOPS, LONGEST_STOP = 128, 4096, 4, 1000
MOST_CHARACTERS, MOST_STRINGS = 1 << 20, 16 * MOST_MESSAGES  # of a prompt: each costs time before it is known to be too long
USUAL = 16  # tokens of a completion
ROLES = ("system", "developer", "user", "assistant")
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Name -> kind, least and greatest value. -1 of top_k is off.
SAMPLING = {
    "temperature": (float, 0, 2), "top_p": (float, 0, 1), "min_p": (float, 0, 1), "top_k": (int, -1, 1 << 31),
    "repetition_penalty": (float, 0.01, 100), "frequency_penalty": (float, -2, 2), "presence_penalty": (float, -2, 2),
}  # fmt: skip
BOTH = SAMPLING | {
    "model": (str,), "n": (int, 1, MOST_TEXTS), "seed": (int, -(1 << 63), (1 << 64) - 1), "max_tokens": (int, 0, 1 << 31),
    "stop": (object,), "logit_bias": (dict,), "stream": (bool,), "stream_options": (dict,),
}  # fmt: skip
CHAT = BOTH | {
    "messages": (list,), "chat_template_kwargs": (dict,), "max_completion_tokens": (int, 1, 1 << 31), "logprobs": (bool,),
    "top_logprobs": (int, 0, 20),
}  # fmt: skip
COMPLETION = BOTH | {"prompt": (object,), "echo": (bool,), "logprobs": (int, 0, 5)}
STREAM_OPTIONS = {"include_usage": (bool,), "include_obfuscation": (bool,)}
# What changes no answer here, so that it may be anything; and values that ask for nothing of what is not supported.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "suffix": ("",),
    "modalities": (["text"],), "response_format": ({"type": "text"},), "best_of": (1,),
}  # fmt: skip


class Refused(UserError):
    """What is answered with an error of OpenAI's shape, `body`. `wait`: seconds after which to try again, 0 for never."""

    def __init__(self, message: object, param: str | None = None, code: str = "invalid_value", status: int = 400, wait: int = 0):
        super().__init__(message)
        self.status, self.wait = status, wait
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": str(self), "type": kind, "param": param, "code": code}}


@contextmanager
def checking(param: str) -> Iterator[None]:
    """A mistake in here is one of this parameter."""
    try:
        yield
    except RecursionError:
        raise Refused(f"{param} cannot be read: {TOO_DEEP}", param) from None
    except UserError as error:
        raise error if isinstance(error, Refused) else Refused(error, param) from None


def checked(fields: Any, known: Mapping[str, tuple[Any, ...]], where: str = "") -> dict[str, Any]:
    """The non-null fields of a JSON object, converted to their types. `known`: name -> (type, least, most), bounds may be left out;
    `where`: the field that holds the object, "": the body. Unknown fields that change nothing (IGNORED, values in NEUTRAL) pass.
    Refused for the first unknown, wrongly typed or out-of-range one."""
    if not isinstance(fields, dict):
        raise Refused(f"{where or 'the body'} is {shown(fields)}, expected a JSON object", where or None)
    found = {name: value for name, value in fields.items() if value is not None}
    for name, value in found.items():
        key = f"{where}{'.' * bool(where)}{name}"[:100]
        with checking(key):
            if name not in known:
                if name not in IGNORED and not any(value == one and type(value) is type(one) for one in NEUTRAL.get(name, ())):
                    hint = "" if name in NEUTRAL else nearest(name, known)
                    raise Refused(f"{key} is {shown(value)}, and not supported{hint}", key, "unsupported_parameter")
                continue
            kind, *bounds = known[name]
            if kind not in (dict, list, object):
                found[name] = converted(key, value, kind)
            elif not isinstance(value, kind):
                raise UserError(f"{key} is {shown(value)}, expected {'a list' if kind is list else 'an object'}")
            if bounds and not bounds[0] <= value <= bounds[1]:
                raise UserError(f"{key} is {value}, expected {bounds[0]} to {bounds[1]}")
    return found


@dataclass(frozen=True)
class Served:
    """A model that is served, by the name that requests have for it; `created` is in seconds since 1970."""

    name: str
    model: Model
    engine: Engine
    created: int


@dataclass(frozen=True)
class Call:
    """A request whose body was checked: `n` texts for each prompt, which `echoes` has as text where it is to be shown."""

    chat: bool
    n: int
    requests: tuple[Request, ...]
    echoes: tuple[str, ...]
    stops: tuple[str, ...]
    begins: bool  # an answer is a text of its own, and goes on from none
    stream: bool
    usage: bool  # a last chunk of a stream says how many tokens there were
    top: int | None  # of how many most likely tokens the log-probability is wanted beside the drawn one's; None: of none


def parse(fields: Any, served: Served, *, chat: bool) -> Call:
    """Validate a request's body (`fields`, parsed JSON) and convert it to engine requests: for each prompt n texts that follow each
    other, with seeds that count up. `chat`: one prompt of messages. Refused with the name of the first invalid field."""
    given = checked(fields, CHAT if chat else COMPLETION)
    tokenizer = served.model.tokenizer
    # What is the same for all texts.
    n, stream, echo = given.get("n", 1), given.get("stream", False), given.get("echo", False)
    count = _count(given, echo)
    sampling = _sampling(given, served)
    stops = _stops(given.get("stop", []))
    top = _top_logprobs(given, chat)
    usage = checked(given.get("stream_options", {}), STREAM_OPTIONS, "stream_options")
    field = "messages" if chat else "prompt"
    prompts = [given.get("messages", [])] if chat else _prompts(given.get("prompt", ""))
    texts, most_texts = n * len(prompts), min(MOST_TEXTS, served.engine.slots + served.engine.queue)
    if texts > most_texts:
        found = f"{len(prompts)} prompts of n {n} are {texts} texts"
        raise Refused(f"{found}, expected {most_texts} at most, which have room here", field)
    # The requests of each prompt.
    seeded = [replace(sampling, seed=(sampling.seed + copy) % (1 << 64)) for copy in range(n)]
    ends = tokenizer.turn_ends if chat else tokenizer.ends
    scored = 0 if echo and top is None else top  # the engine has echo with log-probabilities only; the answer leaves them out
    requests, echoes = [], []
    with checking(field):
        for prompt in prompts:
            ids = _conversation(prompt, given.get("chat_template_kwargs", {}), served) if chat else _ids(prompt, served)
            most = _room(len(ids), count, served.engine.positions, field)
            requests += [Request(tuple(ids), most, one, ends, scored, echo) for one in seeded]
            if echo:
                echoes.append(prompt if isinstance(prompt, str) else tokenizer.decode(ids))
    if chat:
        stops = (*stops, *tokenizer.turn_stops)
    begins = chat or not isinstance(prompts[0], str) or not prompts[0]
    wants_usage = usage.get("include_usage", False) and stream
    return Call(chat, n, tuple(requests), tuple(echoes), stops, begins, stream, wants_usage, top)


def _count(given: Mapping[str, Any], echo: bool) -> int | None:
    """How many tokens are wanted at most; None: as many as is usual."""
    count, other = given.get("max_tokens"), given.get("max_completion_tokens")
    if count is not None and other not in (None, count):
        raise Refused(f"max_tokens is {count} and max_completion_tokens {other}, expected one of them", "max_tokens")
    if count == 0 and not echo:
        raise Refused("max_tokens is 0, expected at least 1", "max_tokens")
    return count if other is None else other


def _sampling(given: Mapping[str, Any], served: Served) -> Sampling:
    """Sampling parameters: the request's, else generation_config.json's, else OpenAI's defaults."""
    chosen = {"temperature": 1.0, **served.model.tokenizer.conventions.sampling}
    chosen |= {name: given[name] for name in SAMPLING if name in given}
    chosen["top_p"] = max(chosen.get("top_p", 1), 1e-9)  # of 0: the most likely token
    chosen["top_k"] = max(chosen.get("top_k", 0), 0)
    seed = given.get("seed", secrets.randbits(63)) % (1 << 64)
    return Sampling(**chosen, logit_bias=_logit_bias(given.get("logit_bias", {}), served.engine.vocabulary), seed=seed)


def _logit_bias(biases: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    """{token id: what is added to its logit}, of a JSON object whose keys are ids in decimal digits."""
    ids = {str(i): i for i in range(vocabulary)} if biases else {}
    for name in biases:
        if name not in ids:
            raise Refused(f"logit_bias has the id {shown(name)}, expected ids from 0 to {vocabulary - 1}", "logit_bias")
    checked(biases, dict.fromkeys(biases, (float, -100, 100)), "logit_bias")
    return {ids[name]: float(bias) for name, bias in biases.items() if bias}


def _stops(found: Any) -> tuple[str, ...]:
    stops = [found] if isinstance(found, str) else found if isinstance(found, list) else [found]
    if len(stops) > MOST_STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops):
        expected = f"a text or a list of at most {MOST_STOPS}, each of 1 to {LONGEST_STOP} characters"
        raise Refused(f"stop is {shown(found)}, expected {expected}", "stop")
    return tuple(stops)


def _top_logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return given.get("logprobs")
    top, wanted = given.get("top_logprobs", 0), given.get("logprobs", False)
    if top and not wanted:
        raise Refused(f"top_logprobs is {top} without logprobs, expected logprobs true", "top_logprobs")
    return top if wanted else None


def _prompts(found: Any) -> list[str | list[int]]:
    def ids(prompt: Any) -> bool:
        return isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)

    prompts = found if isinstance(found, list) and not ids(found) else [found]
    if not prompts or not all(isinstance(prompt, str) or ids(prompt) for prompt in prompts):
        expected = "a text, a list of texts, a list of ids, or a list of such lists"
        raise Refused(f"prompt is {shown(found)}, expected {expected}", "prompt")
    return prompts


def _ids(prompt: str | list[int], served: Served) -> list[int]:
    """Token ids of a prompt, given as text or ids."""
    if isinstance(prompt, str):
        if len(prompt) > MOST_CHARACTERS:
            raise UserError(f"prompt has {len(prompt)} characters, expected {MOST_CHARACTERS} at most")
        return served.model.tokenizer.prompt(prompt)
    most = served.model.config.model.vocab_size
    for i in (min(prompt), max(prompt)):
        if not 0 <= i < most:
            raise UserError(f"prompt has the id {shown(i)}, expected ids from 0 to {most - 1}")
    return prompt


def _conversation(messages: Any, template: Mapping[str, Any], served: Served) -> list[int]:
    """Token ids of a chat. Nothing in the request's messages or template variables can produce a special token. `template`: the
    request's variables for the chat template. Refused for what the protocol has and barellm has not; UserError above the limits."""
    tokenizer = served.model.tokenizer
    own, text = tokenizer.conventions.templates, json.dumps([messages, template], ensure_ascii=False)
    if not 0 < len(messages) <= MOST_MESSAGES or len(text) > MOST_CHARACTERS or text.count('"') - text.count('\\"') > MOST_STRINGS:
        size = f"{len(messages)} messages" + f" with {len(text)} characters" * bool(messages)
        most = f"1 to {MOST_MESSAGES} messages with {MOST_CHARACTERS} characters"
        raise UserError(f"messages has {size}, expected {most} in {MOST_STRINGS // 2} strings at most")
    for name in template:  # such as eos_token, whose text a template takes as its own
        own_name = name == "chat_template" and template[name] in [*own]
        if (name.endswith("_token") or name in ("messages", "tools", "documents", "chat_template")) and not own_name:
            raise Refused(f"chat_template_kwargs has {name}, which is not a request's to say", "chat_template_kwargs")
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        said = checked(message, {key: (object,) for key in message} if isinstance(message, dict) else {}, where)
        if said.get("role") not in ROLES:
            raise Refused(f"{where}.role is {shown(said.get('role'))}, expected {', '.join(ROLES)}", f"{where}.role")
        if "content" not in said and said["role"] != "assistant":
            raise Refused(f"{where}.content is missing, expected a text", f"{where}.content")
        for key in (key for key in ("tool_calls", "function_call", "audio") if said.get(key)):
            raise Refused(f"{where}.{key} is not supported", f"{where}.{key}", "unsupported_parameter")
        # Most templates know no developer, and some write any role as it is.
        unknown = said["role"] == "developer" and own and not any("developer" in text for text in own.values())
        found.append({**said, "role": "system"} if unknown else said)
    (pieces,) = tokenizer.chat_pieces([found], {"add_generation_prompt": True, **template})
    _room(len(pieces), 1, served.engine.positions, "messages")  # a piece has a token at least
    return [i for at, piece in enumerate(pieces) for i in tokenizer.encode_piece(piece, first=at == 0).tolist()]


def _room(length: int, count: int | None, positions: int, where: str) -> int:
    """How many tokens are drawn at most. Refused where prompt and answer do not fit."""
    left = positions - length
    most = count if count is not None else max(1, left if where == "messages" else min(USUAL, left))
    if most > left:
        said = f"{length} tokens of the prompt and {most} to generate"
        said = f"the model has {positions} positions, the request needs {length + most}: {said}"
        raise Refused(said, where, "context_length_exceeded")
    return most
