"""Texts side by side: each with the bits and the numbers that it has alone, whatever else happens."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import barellm
from barellm.assembly.serving import serving_programs
from barellm.errors import UserError
from barellm.models import preset
from barellm.program.builder import Program
from barellm.serving import engine
from tests.models import plain
from tests.serving.models import GPT2, LLAMA, VOCAB, Text, alone, answers, model_of, request

MODELS = {"gpt2": GPT2, "llama": LLAMA}


def drawn_requests(count: int, seed: int = 0) -> list[engine.Request]:
    """Of all kinds: long and short, with a beginning that others have too, sampled and greedy, with penalties, ends and echo."""
    r = np.random.default_rng(seed)
    system = tuple(r.integers(0, VOCAB, 40).tolist())
    found = []
    for i in range(count):
        ids = tuple(r.integers(0, VOCAB, int(r.integers(1, 60))).tolist())
        kind = {"temperature": float(r.choice([0, 0.8, 1.2])), "top_p": 0.95, "seed": i, "frequency_penalty": 0.3 * (i % 2)}
        kind |= {"logit_bias": {3: 5.0}} if i % 4 == 0 else {}
        echo = {"echo": True} if i % 5 == 2 else {}
        logs = {"top_logprobs": i % 3 if echo else [None, 0, 3][i % 3]}
        found.append(request(system + ids[:20] if i % 3 == 0 else ids, int(r.integers(1, 40)), ends=(5,), **kind, **logs, **echo))
    return found


def loads() -> list:
    found = [("gpt2", "fp32", "", 24), ("llama", "bf16", "", 24)]
    rare = [("fp32", "", 80), ("bf16", "", 80), ("fp16", "", 24), ("bf16", "int8", 12), ("fp32", "int4", 12), ("bf16", "nf4", 12)]
    return found + [pytest.param(name, *one, marks=pytest.mark.extended) for name in MODELS for one in rare]


@pytest.mark.parametrize("name, dtype, weights, count", loads())
def test_under_random_load_every_text_is_as_alone(name, dtype, weights, count):
    """Token for token and number for number, with up to 64 rows in a step, some texts cancelled in between."""
    model, requests = model_of(MODELS[name], dtype), drawn_requests(count)
    sizes = {"positions": 100, "piece": 16, "weights": weights}
    r = np.random.default_rng(1)
    with closing(engine.Engine(model, slots=64 if count > 64 else 6, queue=count, **sizes)) as server:
        texts, tickets = [Text() for _ in requests], []
        for i, one in enumerate(requests):
            tickets.append(server.submit(one, texts[i]))
            if r.random() < 0.2:
                time.sleep(0.003 * r.random())
            if i % 11 == 10:
                tickets[i - 3].cancel()
        cancelled = {i - 3 for i in range(10, count, 11)}
        loaded = {i: text.events for i, text in enumerate(texts) if i not in cancelled and text.last}
        assert count < 64 or server.stats()["shared_tokens"] >= 16 * 10
    with closing(engine.Engine(model, slots=1, **sizes)) as server:
        for i, events in loaded.items():
            assert events == alone(server, requests[i]), requests[i]
        assert server.stats()["shared_tokens"] == 0
    for i in cancelled:  # what came is the beginning of what would have come
        assert not isinstance(texts[i].events[-1:] or None, engine.Failed)


def test_as_many_rows_as_are_wanted_take_a_step_together():
    with closing(engine.Engine(model_of(GPT2), slots=64, positions=64)) as server:
        texts = answers(server, [request(3, 40, seed=i, temperature=1.0) for i in range(64)])
        stats = server.stats()
    assert len(texts) == 64 and stats["tokens"] == 64 * 40
    assert stats["steps"] <= 39 + 64 and stats["running"] == stats["waiting"] == stats["failed"] == 0


def test_logprobs_are_those_of_the_raw_logits():
    """Whatever the penalties are; with echo those of the prompt; the chosen token's is the very number in `top`."""
    model, one = model_of(LLAMA), request(37, 6, top_logprobs=97, echo=True, presence_penalty=1.5, temperature=0.7)
    with closing(engine.Engine(model, slots=2, piece=16)) as server:
        prompt, *tokens, last = alone(server, one)
        assert last == engine.Ended("length") and isinstance(prompt, engine.Prompt)
        same = alone(server, replace(one, top_logprobs=None, echo=False))
        assert [t.id for t in tokens] == [t.id for t in same[:-1]] and same[0] == engine.Token(tokens[0].id)
        (only, end) = alone(server, replace(one, count=0))
        assert only == prompt and end == engine.Ended("length")
    text = [*one.prompt, *(t.id for t in tokens)]
    logits = model.logits([text])[0].astype(np.float64)
    expected = (
        logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    )
    every = [*prompt.tokens, *tokens]
    assert [t.id for t in every] == text and (every[0].logprob, every[0].top) == (None, ())
    for t, row in zip(every[1:], expected, strict=False):
        assert t.logprob == pytest.approx(row[t.id], abs=2e-5) and dict(t.top)[t.id] == t.logprob
        assert sorted((p for _, p in t.top), reverse=True) == [p for _, p in t.top] and len(t.top) == VOCAB


def test_a_shared_beginning_is_copied_in_whole_pieces():
    with closing(engine.Engine(model_of(LLAMA), slots=3, piece=8)) as server:
        first, server_of = request(30, 12, top_logprobs=2), server.stats
        alone(server, first)
        before = server_of()["prompt_tokens"]
        other = request((*first.prompt[:27], 1, 2), 9, top_logprobs=2)
        shared = answers(server, [other])[0]
        assert server_of()["shared_tokens"] == 24 and server_of()["prompt_tokens"] == before + 5
        assert shared == alone(server, other)
        # The last token is always computed; drawn tokens and the prompt's incomplete piece are not there to be shared.
        whole = request(first.prompt[:24], 2)
        answers(server, [first])
        counts = server_of()["shared_tokens"]
        answers(server, [whole])
        assert server_of()["shared_tokens"] == counts + 16
        drawn = tuple(t.id for t in answers(server, [request(16, 12)])[0][:-1] if isinstance(t, engine.Token))
        counts = server_of()["shared_tokens"]
        answers(server, [request((*request(16).prompt, *drawn, 1), 1)])
        assert server_of()["shared_tokens"] == counts + 16


def test_a_long_prompt_lets_the_others_go_on():
    """Ten pieces of another's prompt come between the 10th token and the 20th."""
    with closing(engine.Engine(model_of(GPT2), slots=2, piece=8, positions=128)) as server:
        going, long, seen = Text(), Text(), []

        def count(event: engine.Event) -> None:
            going(event)
            if len(going.tokens) == 10 and not seen:
                seen.append(server.submit(request(80, 1), lambda event: (seen.append(len(going.tokens)), long(event))))

        server.submit(request(3, 60), count)
        assert long.last == going.last == engine.Ended("length")
    assert seen[1] == 19


@pytest.mark.parametrize("wrong, says", [
    (request((), 1), "the prompt has no tokens"),
    (request((1, VOCAB), 1), r"the prompt has \[97\], expected ids from 0 to 96"),
    (request((-1,), 1), r"the prompt has \[-1\]"),
    (request(3, 0), "count is 0, expected at least 1"),
    (request(3, 5, echo=True), "echo is for log-probabilities, expected top_logprobs with it"),
    (request(3, 5, top_logprobs=-1), "top_logprobs is -1"),
    (request(30, 35), "30 tokens of the prompt and 35 that follow are 65, expected at most 64 positions"),
    (request(3, 5, logit_bias={VOCAB: 1.0}), r"logit_bias has \[97\]"),
])  # fmt: skip
def test_requests_that_cannot_be_are_refused(server, wrong, says):
    with pytest.raises(UserError, match=says):
        server.submit(wrong, Text())


@pytest.fixture(scope="module")
def server():
    with closing(engine.Engine(model_of(GPT2), slots=2, positions=64, queue=2)) as opened:
        yield opened


def test_a_full_queue_a_cancelled_text_and_one_that_ends(server):
    """Two run, two wait, the next is refused; a cancelled one makes room within a token and says nothing more."""
    assert (server.positions, server.vocabulary) == (64, VOCAB)
    hold, texts = threading.Event(), [Text() for _ in range(5)]

    def slow(event: engine.Event) -> None:
        texts[0](event)
        hold.wait(10)

    tickets = [server.submit(request(3, 40), slow)]
    assert texts[0].began.wait(10)
    for text in texts[1:4]:
        tickets.append(server.submit(request(4, 30), text))
    with pytest.raises(engine.Full, match=r"^[23] texts are waiting"):
        server.submit(request(3), texts[4])
    threading.Timer(0.05, hold.set).start()
    tickets[0].cancel()  # waits for the deliver that runs
    seen = len(texts[0].events)
    tickets[2].cancel()
    assert texts[1].last == texts[3].last == engine.Ended("length")
    assert len(texts[0].events) == seen and not texts[2].events
    first = texts[1].tokens[0].id
    assert answers(server, [request(4, 9, ends=(first,))])[0] == [engine.Token(first), engine.Ended("stop")]
    tickets[0].cancel()  # again changes nothing
    assert server.stats()["running"] == server.stats()["waiting"] == 0


def test_what_fails_ends_its_texts_alone(server, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    whole = server._run

    def failing(program, *rest):
        if program == "serve":
            raise RuntimeError("the step broke")
        return whole(program, *rest)

    monkeypatch.setattr(server, "_run", failing)
    (first, last) = answers(server, [request(3)])[0]
    assert isinstance(first, engine.Token) and last == engine.Failed(
        "a step failed: RuntimeError"
    )  # what it says may name a path of the server
    monkeypatch.setattr(server, "_run", lambda *rest: np.full_like(whole(*rest), np.nan))
    assert answers(server, [request(3)])[0] == [engine.Failed("the model's logits are not finite: its weights diverged")]
    monkeypatch.setattr(server, "_run", whole)

    def broken(event: engine.Event) -> None:
        raise ValueError("nobody is there")

    server.submit(request(3), broken)
    assert answers(server, [request(3)])[0][-1] == engine.Ended("length")
    assert server.stats()["failed"] == 2


def test_closing_finishes_what_fits_into_the_grace():
    for grace, last in ((30.0, engine.Ended("length")), (0.0, engine.Failed("the server is closing"))):
        server, texts = engine.Engine(model_of(GPT2), slots=1, positions=128), [Text(), Text()]
        for text in texts:
            server.submit(request(3, 120), text)
        assert texts[0].began.wait(10)
        server.close(grace)
        assert [text.last for text in texts] == [last, last]
        with pytest.raises(engine.Full, match="closing"):
            server.submit(request(3), Text())
        server.close()


def test_caches_that_do_not_fit_are_refused_with_the_arithmetic(monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "4M")
    with pytest.raises(UserError) as refused:
        engine.Engine(model_of(GPT2), slots=64)
    assert "(KV caches: 64 texts x 128 positions x 512 bytes): choose fewer slots or positions" in str(refused.value)


@pytest.mark.parametrize("sizes, says", [
    ({"slots": 65}, "slots is 65, expected a number from 1 to 64"), ({"positions": 129}, "positions is 129"),
    ({"queue": 0}, "queue is 0"), ({"piece": 0}, "piece is 0"), ({"weights": "int3"}, "unknown weights 'int3'"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(sizes, says):
    with pytest.raises(UserError, match=says):
        engine.Engine(model_of(GPT2), **sizes)


@pytest.mark.parametrize("model, says", [
    (preset("sparse-char").model, "sparse has no KV cache: its texts cannot be generated side by side"),
    (plain.Config(), "plain has no parameter caches in its decode"),
])  # fmt: skip
def test_models_that_have_no_cache_to_share_are_refused(model, says):
    with pytest.raises(UserError, match=says):
        serving_programs(model, slots=2, positions=8, piece=4, compute="fp32")


def test_an_adapter_is_served_as_its_merged_weights(monkeypatch):
    """The one that the model uses when the engine is made."""
    model, other = model_of(LLAMA), model_of(LLAMA, scale=0.3)
    model._variants["other"] = other._weights
    model.use("other")
    with closing(engine.Engine(model, slots=1)) as ours, closing(engine.Engine(other, slots=1)) as theirs:
        model.use(None)
        assert alone(ours, request(9, 20)) == alone(theirs, request(9, 20))


def test_a_program_for_a_gpu_is_refused_in_one_line():
    from barellm.cuda.kernel import Target
    from barellm.cuda.step import Lowered

    p: Program = serving_programs(LLAMA, slots=2, positions=8, piece=4, compute="fp32")["serve"]
    with pytest.raises(ValueError, match=r"^the cuda backend's kernel for \w+ takes no i32 for positions"):
        Lowered(p, Target())


INTERRUPTED = """
import time
from tests.serving.models import GPT2, Text, model_of, request
from barellm.serving import engine
server, text = engine.Engine(model_of(GPT2), slots=1), Text()
server.submit(request(3, 120), lambda event: (text(event), time.sleep(0.2)))
text.began.wait()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    server.close()
    print(type(text.last).__name__, len(text.tokens) < 60)
"""


def test_ctrl_c_ends_within_a_token():
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=20)[0] == "Failed True\n" and child.returncode == 0


def test_a_model_from_disk_is_served(tmp_path, own_cache):
    """Trained, loaded, and asked by several at once."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    sizes = {"model": {"layers": 1, "heads": 2, "d_model": 32, "max_seq": 64}, "optim": {"warmup": 2}}
    more = {"data": {"source": str(text), "tokenizer": "bytes"}, "train": {"eval_every": 0, "eval_tokens": 64, "sample_every": 0}}
    barellm.train("default", out=tmp_path / "run", steps=12, batch=4, seq=32, quiet=True, **sizes, **more)
    with barellm.load(tmp_path / "run") as model, closing(engine.Engine(model, slots=4)) as server:
        prompt = tuple(model.tokenizer.encode("12 squared").tolist())
        said = answers(server, [request(prompt, 20, seed=i, temperature=0.8) for i in range(20)])
        assert len({tuple(t.id for t in events if isinstance(t, engine.Token)) for events in said}) > 10
        assert all(len(events) == 21 for events in said)
