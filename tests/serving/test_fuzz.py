"""Requests that a fuzzer draws: the answer is the protocol's, whatever they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.serving.scripted import served, tokens
from tests.serving.test_app import CHAT, COMPLETIONS, ask

pytestmark = pytest.mark.extended

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "<|im_end|>", "\ud800"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "<|im_start|>"])
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.text(max_size=9)}), max_size=3)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLE, "content": st.text(max_size=20) | PARTS | JSON}) | JSON, max_size=4)
ID = st.integers(-2, 450)
FIELDS: dict[str, Any] = {
    "model": st.sampled_from(["tiny", "other"]) | JSON, "messages": MESSAGES | JSON, "n": st.integers(-1, 5) | JSON,
    "prompt": st.text(max_size=20) | st.lists(ID, max_size=9) | st.lists(st.lists(ID, max_size=4), max_size=4) | JSON,
    "max_tokens": st.integers(-1, 200) | JSON, "max_completion_tokens": st.integers(0, 40) | JSON, "stream": st.booleans() | JSON,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JSON, "seed": st.integers() | JSON, "stop": JSON,
    "temperature": st.floats(-1, 3) | JSON, "top_p": st.floats(-1, 2) | JSON, "top_k": st.integers(-3, 500) | JSON,
    "min_p": st.floats(-1, 2) | JSON, "repetition_penalty": st.floats(0, 3) | JSON, "frequency_penalty": st.floats(-3, 3) | JSON,
    "presence_penalty": st.floats(-3, 3) | JSON, "logprobs": st.booleans() | st.integers(-1, 6) | JSON,
    "top_logprobs": st.integers(-1, 21),
    "logit_bias": st.dictionaries(st.integers(-1, 402).map(str) | st.text(max_size=3), st.floats(-101, 101) | JSON, max_size=3),
    "echo": st.booleans() | JSON, "user": JSON, "tools": JSON, "response_format": JSON, "made_up": JSON,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["x", "bos_token", "tools", "chat_template"]), JSON, max_size=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return served(tmp_path_factory.mktemp("served") / "hf", lambda request: tokens([40, 395, 66, 187][: request.count], request))


def checked(answer) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        for line in answer.text.split("\n\n")[:-2]:
            assert json.loads(line.removeprefix("data: "))["object"]
        return
    found = answer.json()
    if answer.status_code == 200:
        assert found["choices"] and all(choice["finish_reason"] in ("stop", "length") for choice in found["choices"])
    else:
        assert found.keys() == {"error"} and found["error"].keys() == {"message", "type", "param", "code"}
        assert isinstance(found["error"]["message"], str) and found["error"]["type"].endswith("_error")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(chat=st.booleans(), fields=st.fixed_dictionaries({}, optional=FIELDS), likely=st.booleans())
@example(
    chat=True, fields={"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"chat_template": []}}, likely=False
)
def test_every_request_is_answered_in_the_protocol_s_shape(tiny, capsys, chat, fields, likely):
    if likely:  # else few would come further than their messages
        fields = fields | ({"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}) | {"model": "tiny"}
    body = json.dumps(fields).encode()
    checked(ask(tiny, CHAT if chat else COMPLETIONS, body, headers={"content-type": "application/json"}))
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "error" not in said.err


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u01eE+-.ntf ', max_size=40).map(str.encode))
def test_every_body_is_answered_in_the_protocol_s_shape(tiny, body):
    checked(ask(tiny, CHAT, body, headers={"content-type": "application/json"}))
