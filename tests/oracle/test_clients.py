"""Clients as people have them, against a server process: the openai package, LangChain's ChatOpenAI, the lm-evaluation-harness."""

from __future__ import annotations

import json
from contextlib import ExitStack

import numpy as np
import pytest

from tests.chat.test_models import source
from tests.oracle.test_lm_eval import ROWS, TASKS
from tests.serving.processes import Process, process

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.oracle
HI = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello there"}]
SAMPLED = {"temperature": 0.9, "seed": 3, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        source(folder / "tiny")
        with process(folder, folder / "tiny", "--port", 0, "--dtype", "fp32") as one:
            yield one


@pytest.fixture(scope="module")
def client(server: Process):
    with openai.OpenAI(base_url=f"{server.url}/v1/", api_key="none", max_retries=0) as client:
        yield client


def test_openai_answers_streams_and_counts(client):
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "barellm"
    whole = client.chat.completions.create(model="tiny", messages=HI, **SAMPLED)
    usage = {"include_usage": True}
    with client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=usage, **SAMPLED) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == next(c.choices[0].finish_reason for c in reversed(chunks[:-1]))
    assert (
        whole.usage.completion_tokens <= 24
        and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    )


def test_openai_gets_several_texts_and_their_log_probabilities(client):
    found = client.chat.completions.create(model="tiny", messages=HI, n=3, logprobs=True, top_logprobs=20, **SAMPLED)
    assert [choice.index for choice in found.choices] == [0, 1, 2] and len(
        {choice.message.content for choice in found.choices}
    ) == 3
    alone = client.chat.completions.create(model="tiny", messages=HI, **{**SAMPLED, "seed": 5})
    assert alone.choices[0].message.content == found.choices[2].message.content  # text i has the seed + i
    for choice in found.choices:
        for one in choice.logprobs.content:
            values = {tuple(top.bytes or top.token): top.logprob for top in one.top_logprobs}
            assert len(one.top_logprobs) == 20 and values.get(tuple(one.bytes or one.token), one.logprob) == one.logprob
            assert [*values.values()] == sorted(values.values(), reverse=True)
    text = client.completions.create(model="tiny", prompt=[[5, 6, 7]], logprobs=2, echo=True, max_tokens=3, temperature=0)
    lists = text.choices[0].logprobs
    assert len(lists.tokens) == 6 and lists.token_logprobs[0] is None
    assert all(drawn == max(top.values()) for drawn, top in zip(lists.token_logprobs[3:], lists.top_logprobs[3:], strict=True))


def test_openai_gets_its_exceptions(server, client):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="tiny", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}])
    assert found.value.param == "tools" and found.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", prompt=[1] * 100, max_tokens=100)
    assert found.value.code == "context_length_exceeded" and "128" in str(found.value) and "200" in str(found.value)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=HI)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


def test_openai_hears_of_a_full_queue_and_when_to_try_again(tmp_path):
    source(tmp_path / "long", positions=4096)
    endless = {"temperature": 1, "max_tokens": 4000, "logit_bias": {"394": -100, "396": -100}, "stream": True}
    with (
        process(tmp_path, tmp_path / "long", "--port", 0, "--slots", 1, "--queue", 1) as one,
        openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(client.chat.completions.create(model="long", messages=HI, **endless))
            with pytest.raises(openai.RateLimitError) as found:
                client.chat.completions.create(model="long", messages=HI, **SAMPLED)
            assert int(found.value.response.headers["retry-after"]) > 0 and found.value.code == "queue_full"
        said = client.with_options(max_retries=5).chat.completions.create(model="long", messages=HI, **SAMPLED)
        assert said.choices[0].finish_reason  # those before it have gone away
        assert one.ask("/health").json()["waiting"] == 0


@pytest.mark.parametrize("number", [1, 8])
def test_openai_asks_from_many_threads_and_each_gets_its_own_answer(server, number):
    from concurrent.futures import ThreadPoolExecutor

    def ask(seed: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            said = client.chat.completions.create(model="tiny", messages=HI, **{**SAMPLED, "seed": seed})
            return said.choices[0].message.content

    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(ask, range(16)))
    assert found == [ask(seed) for seed in range(16)] and len(set(found)) > 10


def test_langchain_invokes_and_streams(server):
    langchain = pytest.importorskip("langchain_openai")
    how = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "seed": 3, "temperature": 0.9, "max_tokens": 24}
    llm = langchain.ChatOpenAI(**how)
    messages = [("system", "Be kind."), ("human", "Hello there")]
    whole = llm.invoke(messages)
    assert whole.content == "".join(chunk.content for chunk in llm.stream(messages)) != ""
    assert 0 < whole.usage_metadata["output_tokens"] <= 24  # it sends max_completion_tokens
    stopped = langchain.ChatOpenAI(**how, stop_sequences=[whole.content[5]]).invoke(messages)
    assert stopped.content == whole.content[: whole.content.index(whole.content[5])]
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_the_harness_finds_by_http_what_it_finds_in_its_own_process(tmp_path, monkeypatch):
    """local-completions with the tokenizer of the exported folder, beside the harness's model of transformers."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("torch")
    from lm_eval.tasks import TaskManager

    from barellm.cli.main import main

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    for name, body in TASKS.items():
        head = f"task: barellm_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.jsonl\n"
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"{head}test_split: test\n{body}")
    assert main(["import", str(source(tmp_path / "hf", positions=256)), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "out")]) == 0
    known = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    names = [f"barellm_{name}" for name in TASKS]
    with process(tmp_path, tmp_path / "run", "--port", 0, "--dtype", "fp32") as one:
        over = (
            f"base_url={one.url}/v1/completions,model=run,tokenizer={tmp_path / 'out'},tokenizer_backend=huggingface,max_length=256"
        )
        how = {"tasks": names, "task_manager": known, "bootstrap_iters": 0}
        ours = lm_eval.simple_evaluate(model="local-completions", model_args=over, batch_size=4, **how)
        theirs = lm_eval.simple_evaluate(
            model="hf", model_args=f"pretrained={tmp_path / 'out'},dtype=float32", batch_size=4, device="cpu", **how
        )
    for name in names:
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            for a, b in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                if name == "barellm_choose":
                    assert a[1] == b[1]
                    np.testing.assert_allclose(a[0], b[0], rtol=1e-4)
                elif name == "barellm_roll":
                    np.testing.assert_allclose(a, b, rtol=1e-4)
                else:
                    assert a == b
