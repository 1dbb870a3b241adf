"""The application over a scripted engine: answers whole and in chunks, log-probabilities, errors, keys, hosts and origins."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barellm.serving import app as application_module
from barellm.serving.app import State, application
from barellm.serving.engine import Token
from tests.serving.scripted import Ended, Failed, Served, served, token, tokens

HI = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return served(tmp_path_factory.mktemp("served") / "hf")


@pytest.fixture(autouse=True)
def fresh(tiny):
    """The engine as it was, and a script that draws what stands behind the prompt's letters."""
    tiny.engine.requests, tiny.engine.cancelled, tiny.engine.room = [], [], 1000
    tiny.engine.script = lambda request: tokens(spelled(tiny, "Hello there, how are you?")[: request.count], request)


def spelled(tiny: Served, text: str) -> list[int]:
    return tiny.model.tokenizer.encode(text).tolist()


def ask(one: Served | None, path: str, body: Any = None, *, method: str = "POST", headers: Any = None, **access: Any):
    """The answer of an application with this model; `body` is JSON, or bytes."""
    state = access.pop("state", State(models={} if one is None else {one.name: one}))

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(application(state, **access), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            given = {"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}
            return await client.request(method, path, headers=headers, **given)

    return asyncio.run(request())


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    return error


def events_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_a_chat_is_answered_in_one_piece(tiny):
    found = ask(tiny, CHAT, {**HI, "max_tokens": 4}).json()
    text = tiny.model.tokenizer.decode(spelled(tiny, "Hello there, how are you?")[:4])
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    prompt = len(tiny.engine.requests[0].prompt)
    assert found["usage"] == {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-") and found["model"] == "tiny"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage(tiny):
    events = events_of(ask(tiny, CHAT, {**HI, "stream": True, "stream_options": {"include_usage": True}}))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 3
    assert all(
        event["usage"] is None and event["object"] == "chat.completion.chunk" and event["id"] == last["id"] for event in events
    )
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "".join(c["delta"].get("content", "") for c in choices) == "Hello there, how are you?"
    assert "usage" not in events_of(ask(tiny, CHAT, {**HI, "stream": True}))[0]


def test_an_end_of_the_model_s_is_no_text_and_a_stop(tiny):
    end = tiny.model.tokenizer.special["<|im_end|>"]
    tiny.engine.script = lambda request: tokens([*spelled(tiny, "Hello"), end], request, reason="stop")
    choice = ask(tiny, CHAT, {**HI, "logprobs": True}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
    assert "".join(one["token"] for one in choice["logprobs"]["content"]) == "Hello"
    found = ask(tiny, COMPLETIONS, {"prompt": "a", "logprobs": 2}).json()
    assert found["choices"][0]["text"] == "Hello" and found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["logprobs"]["tokens"][-1] == "<|im_end|>"  # a harness counts tokens
    assert found["usage"]["completion_tokens"] == len(found["choices"][0]["logprobs"]["tokens"])


def test_a_stop_text_ends_a_text_wherever_its_tokens_are_cut_and_the_engine_is_told(tiny):
    for stop, text in (
        ("here, h", "Hello t"),
        ("Hello", ""),
        (["you", "are"], "Hello there, how "),
        ("?", "Hello there, how are you"),
    ):
        answer = ask(tiny, CHAT, {**HI, "stop": stop, "logprobs": True}).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
        said = "".join(one["token"] for one in answer["logprobs"]["content"])
        assert said.startswith(text) and len(said) < len(text) + 8  # no token that begins behind the end
        streamed = events_of(ask(tiny, CHAT, {**HI, "stop": stop, "stream": True, "logprobs": True}))[:-1]
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed) == text
        pieces = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
        assert [one for piece in pieces for one in piece["content"]] == answer["logprobs"]["content"]
    assert len(tiny.engine.cancelled) == len(tiny.engine.requests)


def test_a_character_is_sent_when_it_is_whole_and_its_tokens_with_it(tiny):
    ids = [i for byte in "é🙂".encode() for i in spelled_bytes(tiny, bytes([byte]))]
    tiny.engine.script = lambda request: tokens([*spelled(tiny, "a"), *ids], request)
    events = events_of(ask(tiny, CHAT, {**HI, "stream": True, "logprobs": True}))
    chunks = [e["choices"][0] for e in events[1:-2]]
    assert [c["delta"]["content"] for c in chunks] == ["a", "é", "🙂"]
    assert [[one["bytes"] for one in c["logprobs"]["content"]] for c in chunks[1:]] == [
        [[byte] for byte in text.encode()] for text in ("é", "🙂")
    ]
    tiny.engine.script = lambda request: tokens(ids[:1], request)
    assert ask(tiny, CHAT, HI).json()["choices"][0]["message"]["content"] == "\ufffd"
    tokens_ = ask(tiny, COMPLETIONS, {"prompt": "a", "logprobs": 0}).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens_ == [r"bytes:\xc3"]


def spelled_bytes(tiny: Served, text: bytes) -> list[int]:
    known = [tiny.model.tokenizer.token_bytes(i) for i in range(tiny.model.tokenizer.vocab_size)]
    return [known.index(text)]


def test_log_probabilities_of_a_completion_are_those_of_the_engine(tiny):
    found = ask(tiny, COMPLETIONS, {"prompt": [[5, 9, 7]], "max_tokens": 2, "logprobs": 3, "echo": True}).json()["choices"][0]
    drawn = spelled(tiny, "Hello there, how are you?")[:2]
    lists = found["logprobs"]
    assert [len(one) for one in lists.values()] == [5] * 4 and lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    request = tiny.engine.requests[0]
    for place, i in enumerate([9, 7, *drawn], 1):
        chosen = token(i, request).logprob
        assert lists["token_logprobs"][place] == chosen and chosen in lists["top_logprobs"][place].values()
        assert lists["top_logprobs"][place][lists["tokens"][place]] == chosen
        assert {token(0, request).logprob, *(-1.0 - j / 7 for j in range(3))} <= {*lists["top_logprobs"][place].values()}
    text = tiny.model.tokenizer.decode([5, 9, 7, *drawn])
    assert found["text"] == text
    assert [text[at : at + 1] for at in lists["text_offset"]] == [name[:1] for name in lists["tokens"]]


def test_two_tokens_of_one_text_are_two(tiny):
    tiny.engine.script = lambda request: [Token(65, -1.0, ((65, -1.0), (66, -2.0))), Ended("length")]
    names = [*ask(tiny, COMPLETIONS, {"prompt": "a", "logprobs": 2}).json()["choices"][0]["logprobs"]["top_logprobs"][0]]
    assert len(names) == 2
    special = tiny.model.tokenizer.special
    a, b = special["<|im_start|>"], special["<|im_end|>"]
    tiny.engine.script = lambda request: [Token(65, -9.0, ((a, -1.0), (b, -2.0))), Ended("length")]
    top = ask(tiny, COMPLETIONS, {"prompt": "a", "logprobs": 2}).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert [*top][:2] == ["<|im_start|>", "<|im_end|>"]  # neither stands for a text


def test_an_echo_comes_with_and_without_log_probabilities_and_alone(tiny):
    for more in ({}, {"logprobs": 1}):
        for stream in (False, True):
            answer = ask(tiny, COMPLETIONS, {"prompt": "Hi", "max_tokens": 0, "echo": True, "stream": stream, **more})
            texts = [e["choices"][0]["text"] for e in (events_of(answer)[:-1] if stream else [answer.json()])]
            assert "".join(texts) == "Hi"
    answer = ask(tiny, COMPLETIONS, {"prompt": ["Hi", "You"], "n": 2, "max_tokens": 1, "echo": True}).json()
    first = tiny.model.tokenizer.decode(spelled(tiny, "Hello there, how are you?")[:1])
    assert [c["text"] for c in answer["choices"]] == [f"{p}{first}" for p in ("Hi", "Hi", "You", "You")]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(len(r.prompt) for r in tiny.engine.requests[-4::2])


def test_half_a_character_at_the_end_may_complete_a_stop_text(tiny):
    tiny.engine.script = lambda request: tokens([*spelled(tiny, "Hi"), *spelled_bytes(tiny, b"\xc3")], request)
    choice = ask(tiny, CHAT, {**HI, "stop": "i\ufffd", "logprobs": True}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("H", "stop")
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["H"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 447), max_size=12), st.lists(st.text("Helo ,\ufffd", min_size=1, max_size=3), max_size=3), st.booleans()
)
def test_the_chunks_of_a_stream_are_the_answer(tiny, ids, stops, echo):
    """Whatever tokens come, and whatever ends them."""
    known = [i for i in ids if i < 401]
    tiny.engine.script = lambda request: tokens(known, request)
    body = {"prompt": "Hello", "stop": stops, "logprobs": 2, "echo": echo, "max_tokens": 12}
    whole = ask(tiny, COMPLETIONS, body).json()["choices"][0]
    chunks = [event["choices"][0] for event in events_of(ask(tiny, COMPLETIONS, {**body, "stream": True}))[:-1]]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [whole["finish_reason"]]
    for name, values in whole["logprobs"].items():
        assert [one for c in chunks if c["logprobs"] for one in c["logprobs"][name]] == values
    assert all(0 <= at <= len(whole["text"]) for at in whole["logprobs"]["text_offset"])


# --- errors ---


def test_a_failure_has_openai_s_shape_before_a_stream_and_in_it(tiny):
    tiny.engine.script = lambda request: [token(65, request), Failed("the model's logits are not finite")]
    error = error_of(ask(tiny, CHAT, HI), 500)
    assert error["message"] == "the model's logits are not finite" and error["type"] == "server_error"
    *events, last = events_of(ask(tiny, CHAT, {**HI, "stream": True}))
    assert last["error"] == error and len(events) == 2


def test_a_mistake_of_ours_tells_nothing_of_what_was_said(tiny, monkeypatch, capsys):
    def script(request):
        raise KeyError("SECRET prompt")

    tiny.engine.script = script
    assert "SECRET" not in ask(tiny, CHAT, HI).text and error_of(ask(tiny, CHAT, HI), 500)["code"] == "internal_error"
    tiny.engine.script = lambda request: ["SECRET"]
    assert events_of(ask(tiny, CHAT, {**HI, "stream": True}))[-1]["error"]["code"] == "internal_error"
    said = capsys.readouterr()
    assert "SECRET" not in said.err + said.out
    assert "barellm: error: KeyError in " in said.err and "AttributeError in Choice.feed, line " in said.err


def test_a_full_queue_says_when_to_try_again_and_keeps_nothing(tiny):
    tiny.engine.room = 3
    answer = ask(tiny, COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
    assert error_of(answer, 429)["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) > 0
    assert tiny.engine.cancelled == [0, 1, 2]


def test_an_answer_that_takes_too_long_ends(tiny):
    tiny.engine.script = lambda request: [token(65, request)]
    state = State(seconds=0.2, models={"tiny": tiny})
    assert error_of(ask(None, CHAT, HI, state=state), 504)["code"] == "timeout"
    assert events_of(ask(None, CHAT, {**HI, "stream": True}, state=state))[-1]["error"]["code"] == "timeout"
    assert ask(None, CHAT, HI, state=state).headers["x-should-retry"] == "false"
    assert len(tiny.engine.cancelled) == 3


def test_a_stream_that_waits_says_that_it_lives(tiny, monkeypatch):
    monkeypatch.setattr(application_module, "ALIVE_SECONDS", 0.05)
    tiny.engine.script = lambda request: [token(65, request)]
    text = ask(None, CHAT, {**HI, "stream": True}, state=State(seconds=0.3, models={"tiny": tiny})).text
    assert text.count(": waiting\n\n") >= 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'"a"', b"1", b"null", b'{"n": NaN}', b'{"temperature": 1e999}', b"{}" * 2]
)
def test_a_body_that_is_no_request_is_refused(tiny, path, body):
    error_of(ask(tiny, path, body, headers={"content-type": "application/json"}), 400)


def test_other_types_sizes_paths_and_methods_are_refused(tiny, monkeypatch):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error_of(ask(tiny, CHAT, json.dumps(HI).encode(), headers={"content-type": kind}), 415)
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask(tiny, CHAT, json.dumps(HI).encode(), headers=kind).status_code == 200
    monkeypatch.setattr(application_module, "MOST_BODY", 100)
    assert error_of(ask(tiny, CHAT, HI | {"user": "x" * 100}), 413)["code"] == "request_too_large"
    error = error_of(ask(tiny, "/v1/embeddings", {}), 404)
    assert "POST '/v1/embeddings' is not there, expected POST of /v1/chat/completions" in error["message"]
    error_of(ask(tiny, CHAT, method="GET"), 405)
    error_of(ask(tiny, "/v1/models", {}, method="DELETE"), 405)


def test_models_are_listed_and_found_by_their_names(tiny):
    two = {"tiny": tiny, "owner/other": Served("owner/other", tiny.model, tiny.engine, 2)}
    state = State(models=two)
    found = ask(None, "/v1/models", method="GET", state=state).json()
    assert found["object"] == "list" and [one["id"] for one in found["data"]] == [*two]
    assert ask(None, "/v1/models/owner/other", method="GET", state=state).json() == found["data"][1]
    assert ask(None, "/v1//models/", method="GET", state=state).json() == found
    assert ask(None, CHAT, HI, state=state).json()["model"] == "tiny"
    assert ask(None, CHAT, {**HI, "model": "owner/other"}, state=state).json()["model"] == "owner/other"
    error = error_of(ask(None, CHAT, {**HI, "model": "gpt-4o"}, state=state), 404)
    assert error["code"] == "model_not_found" and "expected one of tiny, owner/other" in error["message"]
    assert error_of(ask(None, CHAT, {**HI, "model": ["tiny"]}, state=state), 404)["param"] == "model"


def test_health_is_503_until_there_is_a_model_and_when_it_stops(tiny):
    loading = State()
    answer = ask(None, "/health", method="GET", state=loading)
    assert answer.status_code == 503 and answer.json() == {"status": "loading"}
    for path, method in ((CHAT, "POST"), ("/v1/models", "GET")):
        answer = ask(None, path, HI if method == "POST" else None, method=method, state=loading)
        assert error_of(answer, 503)["code"] == "not_ready" and answer.headers["retry-after"]
    assert ask(tiny, "/health", method="GET").json() == {"status": "ok", "running": 0, "waiting": 0, "slots": 4}
    assert ask(None, "/health", method="GET", state=State(models={"tiny": tiny}, closing=True)).status_code == 503


# --- who may ask ---

KEY = "a-key-of-some-length"


def test_the_key_is_asked_for_on_every_path_but_health(tiny):
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    page = [Route("/", lambda request: PlainTextResponse("page"))]
    for path in (CHAT, COMPLETIONS, "/v1/models", "/", "/nowhere", "/v1//models", "/healthy", "/health/x"):
        for headers in (None, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": f"Bearer {KEY}x"}):
            answer = ask(tiny, path, HI if "completions" in path else None, method="GET", headers=headers, key=KEY, routes=page)
            assert error_of(answer, 401)["type"] == "authentication_error"
            assert "Bearer" in answer.headers["www-authenticate"] and KEY not in answer.text
    assert ask(tiny, "/health", method="GET", key=KEY).status_code == 200
    named = base64.b64encode(f"me:{KEY}".encode()).decode()
    for word in (f"Bearer {KEY}", f"bearer {KEY}", f"Basic {named}"):
        assert ask(tiny, CHAT, HI, headers={"authorization": word}, key=KEY).status_code == 200
        assert ask(tiny, "/", method="GET", headers={"authorization": word}, key=KEY, routes=page).text == "page"


def test_only_its_own_names_reach_the_server(tiny):
    hosts = ["localhost", "127.0.0.1", "[::1]"]
    for name, status in (
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("localhost.evil", 400),
    ):
        assert ask(tiny, "/health", method="GET", headers={"host": name}, hosts=hosts).status_code == status, name


def test_pages_of_others_may_ask_only_where_it_is_allowed(tiny):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    answer = ask(tiny, CHAT, HI, headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert ask(tiny, CHAT, method="OPTIONS", headers=preflight).status_code == 405
    allowed: dict[str, Any] = {"origins": ["https://a.example"], "key": KEY}
    assert ask(tiny, CHAT, method="OPTIONS", headers=preflight, **allowed).status_code == 200
    answer = ask(tiny, CHAT, HI, headers={"origin": "https://a.example"}, **allowed)
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "https://a.example"
    other = ask(tiny, CHAT, method="OPTIONS", headers=preflight | {"origin": "https://b.example"}, **allowed)
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
