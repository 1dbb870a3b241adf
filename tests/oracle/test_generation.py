"""What changes logits before a token is drawn, against transformers' own classes."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.generation.samplers import Sampling, penalized, probabilities

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle
R = np.random.default_rng(2)


@pytest.mark.parametrize("penalty", [1.3, 0.7, 1.0])
def test_the_repetition_penalty_is_theirs(penalty):
    logits, text = R.normal(size=97).astype(np.float32) * 4, R.integers(0, 97, 60)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = theirs(torch.from_numpy(text)[None], torch.from_numpy(logits)[None].clone())[0].numpy()
    np.testing.assert_allclose(penalized(logits, text.tolist(), penalty), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "how", [{"min_p": 0.1}, {"top_k": 9, "min_p": 0.3}, {"top_k": 30, "top_p": 0.8}, {"top_p": 0.5, "min_p": 0.05}]
)
def test_the_cuts_keep_what_theirs_keep(how):
    logits = R.normal(size=97).astype(np.float32) * 2
    scores = torch.from_numpy(logits)[None] / 0.7
    warpers = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    for name, kind in warpers.items():
        if name in how:
            scores = kind(how[name])(None, scores)
    found = probabilities(logits, Sampling(temperature=0.7, **how))
    np.testing.assert_allclose(found, torch.softmax(scores.double(), -1)[0].numpy(), rtol=1e-5)
