"""Requests: each field is checked, what is not supported is named, and what a client says makes no special token."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from barellm.serving.protocol import MOST_TEXTS, Call, Refused, parse
from tests.serving.scripted import served

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return served(tmp_path_factory.mktemp("served") / "hf")


def chat(tiny, **fields: Any) -> Call:
    return parse({"messages": HI, **fields}, tiny, chat=True)


def completion(tiny, **fields: Any) -> Call:
    return parse(fields, tiny, chat=False)


def test_what_is_not_said_is_as_openai_has_it_or_the_model(tiny):
    call = chat(tiny)
    (request,) = call.requests
    assert (call.n, call.stream, call.usage, request.top_logprobs, call.stops) == (1, False, False, None, ())
    assert request.count == 128 - len(request.prompt)
    assert request.sampling.temperature == 0.0  # the model's generation_config.json says so
    (request,) = completion(tiny, prompt="Hello there").requests
    assert request.count == 16 and list(request.prompt) == tiny.model.tokenizer.prompt("Hello there")
    tiny.model.tokenizer.conventions.sampling.pop("temperature")
    try:
        assert chat(tiny).requests[0].sampling.temperature == 1.0
    finally:
        tiny.model.tokenizer.conventions.sampling["temperature"] = 0.0


def test_every_option_of_sampling_arrives(tiny):
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 7}
    said |= {"frequency_penalty": 0.5, "presence_penalty": -0.5}
    how = chat(tiny, **said, logit_bias={"5": -100, "7": 2.5}).requests[0].sampling
    assert {name: getattr(how, name) for name in said} == said
    assert dict(how.logit_bias) == {5: -100.0, 7: 2.5}
    assert chat(tiny, top_k=-1).requests[0].sampling.top_k == 0
    assert 0 < chat(tiny, top_p=0).requests[0].sampling.top_p < 1e-6
    assert chat(tiny, seed=-1).requests[0].sampling.seed == 2**64 - 1
    seeds = {chat(tiny).requests[0].sampling.seed for _ in range(3)}
    assert len(seeds) == 3  # without one, each answer is another


def test_texts_are_drawn_with_seeds_one_after_the_other(tiny):
    call = completion(tiny, prompt=["a", "b"], n=3, seed=5)
    assert [r.sampling.seed for r in call.requests] == [5, 6, 7] * 2
    assert [r.prompt for r in call.requests[::3]] == [tuple(tiny.model.tokenizer.prompt(text)) for text in "ab"]


def test_prompts_are_texts_or_ids(tiny):
    for prompt, ids in ((["a", "bc"], None), ([1, 2, 3], [(1, 2, 3)]), ([[1, 2], [3]], [(1, 2), (3,)]), (["a", [5]], None)):
        found = [r.prompt for r in completion(tiny, prompt=prompt).requests]
        assert found == ids if ids else len(found) == 2
    assert completion(tiny, prompt=[0, 447]).requests[0].prompt == (0, 447)  # a row that is no id of the tokenizer
    assert len(completion(tiny).requests[0].prompt) == 1  # what stands before a text


def test_an_answer_has_at_most_so_many_tokens(tiny):
    for said in ({"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 9}):
        assert chat(tiny, **said).requests[0].count == 9
    with pytest.raises(Refused, match="max_tokens is 9 and max_completion_tokens 8, expected one of them"):
        chat(tiny, max_tokens=9, max_completion_tokens=8)
    call = completion(tiny, prompt="Hi", max_tokens=0, echo=True, logprobs=1)
    assert call.requests[0].count == 0 and call.requests[0].echo


def test_what_does_not_fit_names_both_numbers(tiny):
    with pytest.raises(Refused, match=r"the model has 128 positions, the request needs 130: 30 tokens .* and 100 to") as found:
        completion(tiny, prompt=[1] * 30, max_tokens=100)
    assert found.value.body["error"]["code"] == "context_length_exceeded" and found.value.body["error"]["param"] == "prompt"
    with pytest.raises(Refused, match="needs 129: 128 tokens of the prompt and 1 to generate"):
        completion(tiny, prompt=[1] * 128)
    assert completion(tiny, prompt=[1] * 120).requests[0].count == 8  # what is usual does not fit, and nobody named it
    with pytest.raises(Refused) as found:
        chat(tiny, messages=[{"role": "user", "content": "Hello " * 300}])
    assert found.value.body["error"]["code"] == "context_length_exceeded" and found.value.body["error"]["param"] == "messages"


def test_stop_texts_and_log_probabilities(tiny):
    assert chat(tiny, stop="x").stops == ("x",) and chat(tiny, stop=["a", "b", "c", "d"]).stops == ("a", "b", "c", "d")
    assert chat(tiny, logprobs=True).requests[0].top_logprobs == 0
    assert chat(tiny, logprobs=True, top_logprobs=20).requests[0].top_logprobs == 20
    assert completion(tiny, prompt="a", logprobs=0).requests[0].top_logprobs == 0
    assert completion(tiny, prompt="a", echo=True).top is None  # the engine echoes with them alone
    assert chat(tiny, stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).usage


WRONG = [
    ("temperature", "hot"), ("temperature", -1), ("temperature", 2.5), ("temperature", True), ("top_p", 1.1), ("top_k", 1.5),
    ("top_k", -2), ("n", 0), ("n", MOST_TEXTS + 1), ("n", "1"), ("seed", 1.5), ("seed", 1 << 70), ("stream", 1), ("model", 1),
    ("stop", 5), ("stop", ["a"] * 5), ("stop", [""]), ("stop", ["x" * 1001]), ("stop", [["a"]]), ("max_tokens", 0),
    ("max_tokens", -5), ("max_completion_tokens", 0), ("logprobs", 3), ("top_logprobs", 3), ("frequency_penalty", 3),
    ("logit_bias", [1]), ("logit_bias", {"x": 1}), ("logit_bias", {"401": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"٣": 1}),
    ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
    ("functions", [{}]), ("best_of", 2), ("modalities", ["audio"]), ("audio", {}), ("made_up", 1), ("reasoning_effort", "low"),
    ("messages", []), ("messages", "Hi"), ("messages", {}), ("chat_template_kwargs", [1]), ("stream_options", True),
]  # fmt: skip


@pytest.mark.parametrize("name, value", WRONG)
def test_what_cannot_be_is_refused_by_its_name(tiny, name, value):
    with pytest.raises(Refused) as found:
        chat(tiny, **{name: value})
    error = found.value.body["error"]
    assert error["param"] == name and name in error["message"] and error["type"] == "invalid_request_error"
    assert found.value.status == 400


@pytest.mark.parametrize("prompt", [[], {}, 5, [[]], [["a"]], [1.5], [True], [None], [-1], [448], [10**30], [[1], 2], "\ud800"])
def test_prompts_that_cannot_be_are_refused(tiny, prompt):
    with pytest.raises(Refused) as found:
        completion(tiny, prompt=prompt)
    assert found.value.body["error"]["param"] == "prompt"
    json.dumps(found.value.body).encode()


def test_parts_of_options_are_named(tiny):
    for fields, param in (
        ({"logit_bias": {"5": 101}}, "logit_bias.5"), ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"made_up": 1}}, "stream_options.made_up"),
        ({"messages": [1]}, "messages[0]"), ({"messages": [*HI, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ):  # fmt: skip
        with pytest.raises(Refused) as found:
            chat(tiny, **fields)
        assert found.value.body["error"]["param"] == param


def test_what_asks_for_nothing_is_taken(tiny):
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": True, "best_of": 1}
    assert chat(tiny, **nothing, temperature=None, stop=None, logit_bias={}, seed=3) == chat(tiny, seed=3)
    with pytest.raises(Refused, match="temprature is 1, and not supported, did you mean 'temperature'"):
        chat(tiny, temprature=1)


def ids(tiny, *messages: dict[str, Any], **fields: Any) -> list[int]:
    return list(chat(tiny, messages=[*messages], **fields).requests[0].prompt)


def test_messages_become_what_the_template_makes_of_them(tiny):
    tokenizer = tiny.model.tokenizer
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    said.append({"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]})  # pyright: ignore
    assert ids(tiny, *said) == tokenizer.chat(said).tolist()
    developer = [{"role": "developer", "content": "Be kind."}, *said[1:]]
    assert ids(tiny, *developer) == ids(tiny, *said)  # the template knows no developer
    with pytest.raises(Refused, match="expected a text, or a list of parts"):
        ids(tiny, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]})


def test_nothing_that_a_client_says_is_a_special_token(tiny):
    special = set(tiny.model.tokenizer.special.values())
    plain = [i for i in ids(tiny, *HI) if i in special]
    for name in tiny.model.tokenizer.special:
        for content in (f"Hi{name}\n", [{"type": "text", "text": name[:4]}, {"type": "text", "text": name[4:]}]):
            assert [i for i in ids(tiny, {"role": "user", "content": content}) if i in special] == plain
        assert not special & {*completion(tiny, prompt=f"a{name}b").requests[0].prompt[1:]}
    for name in ("bos_token", "eos_token", "messages", "tools", "chat_template"):
        with pytest.raises(Refused, match="chat_template_kwargs has "):
            ids(tiny, *HI, chat_template_kwargs={name: "<|im_start|>"})


def test_what_is_nested_without_end_is_refused(tiny):
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    for fields in ({"chat_template_kwargs": {"a": deep}}, {"messages": [{"role": "user", "content": "Hi", "more": deep}]}):
        with pytest.raises(Refused, match=r"messages cannot be read|failed"):
            chat(tiny, **fields)


def test_no_two_mistakes_make_a_request(tiny):
    for (a, x), (b, y) in itertools.combinations(WRONG[:12], 2):
        with pytest.raises(Refused):
            chat(tiny, **{a: x, b: y})


@pytest.mark.extended
def test_what_would_take_long_before_it_is_refused_is_refused_at_once(tiny):
    many = [{"type": "text", "text": "<|im_end|>"}] * 100_000
    for fields in (
        {"messages": [{"role": "user", "content": "<|im_end|>" * 100_000}]}, {"messages": [{"role": "user", "content": many}]},
        {"messages": HI, "chat_template_kwargs": {"x": ["<|im_end|>"] * 100_000}}, {"messages": HI * 5000},
        {"messages": [{"role": "user", "content": "x" * (1 << 20)}]},
    ):  # fmt: skip
        began = time.process_time()
        with pytest.raises(Refused):
            chat(tiny, **fields)
        assert time.process_time() - began < 5
    assert chat(tiny, messages=[{"role": "user", "content": '"' * 60}])  # what is said may have quotes
    with pytest.raises(Refused, match="prompt has 2000000 characters, expected 1048576 at most"):
        completion(tiny, prompt=["a", "a" * 2_000_000])


def test_more_texts_than_ever_have_room_are_refused_instead_of_waiting(tiny, monkeypatch):
    monkeypatch.setattr(tiny.engine, "queue", 6)
    assert len(completion(tiny, prompt=["a"] * 5, n=2).requests) == 10
    with pytest.raises(Refused, match="6 prompts of n 2 are 12 texts, expected 10 at most"):
        completion(tiny, prompt=["a"] * 6, n=2)
