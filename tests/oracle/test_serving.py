"""Texts of the engine against transformers' generate with the same weights, and log-probabilities against PyTorch's log_softmax."""

from __future__ import annotations

from contextlib import closing

import pytest

import barellm
from barellm.serving import engine
from tests.serving.models import answers, request

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.oracle.llama import SHAPES, greedy, saved  # noqa: E402

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", ["grouped", "untied and stretched", "odd heads"])
def test_texts_side_by_side_are_those_of_their_generate(tmp_path, name):
    theirs = saved(tmp_path / "hf", **SHAPES[name])
    prompts = [tuple((i * i + k) % 61 for i in range(k)) for k in (1, 3, 9, 12)]
    with barellm.load(tmp_path / "hf", dtype="fp32") as model, closing(engine.Engine(model, slots=4, piece=4)) as server:
        for prompt, events in zip(
            prompts, answers(server, [request(p, 12, top_logprobs=2, echo=True) for p in prompts]), strict=True
        ):
            first, *drawn, last = events
            assert isinstance(first, engine.Prompt) and last == engine.Ended("length")
            ids = [t.id for t in drawn]
            assert ids == greedy(theirs, list(prompt), 12)
            with torch.no_grad():
                logits = theirs(torch.tensor([[*prompt, *ids]])).logits[0].double()
            expected = torch.log_softmax(logits, -1)
            for t, row in zip([*first.tokens[1:], *drawn], expected, strict=False):
                assert t.logprob == pytest.approx(float(row[t.id]), abs=2e-5)
                assert [p for _, p in t.top] == pytest.approx(row.topk(2).values.tolist(), abs=2e-5)
