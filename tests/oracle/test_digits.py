"""examples/digits.py beside PyTorch from the same weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def digits(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    yield digits
    for name in ("digits", "digits_torch"):
        sys.modules.pop(name, None)


def begun(digits, seed: int):
    from barellm.cpu.backend import open_session

    train, test = digits.digits()
    store, programs = digits.programs(len(test.labels))
    session = open_session(programs)
    session.run("init", seed=seed)
    return store, session, train, test


@pytest.mark.extended
def test_a_hundred_steps_recognise_most_digits(digits):
    _, session, train, test = begun(digits, seed=1)
    losses = [digits.step(session, i, lr, batch) for i, (lr, batch) in enumerate(digits.batches(train, 100, seed=1))]
    assert losses[0] == pytest.approx(np.log(10), abs=0.7)
    assert digits.accuracy(session, test) >= 0.85  # 0.91 and 0.94 were found; a tenth by chance
    session.close()


@pytest.mark.oracle
def test_the_first_steps_are_pytorchs(digits):
    pytest.importorskip("torch")
    from digits_torch import Twin

    # AdamW divides a gradient by its size: with some seeds one that is nearly zero has the other sign, and losses part by 7e-5.
    store, session, train, test = begun(digits, seed=5)
    twin = Twin({t.name: session.read(t.name) for t in store.of_role("parameter")})
    for number, (lr, batch) in enumerate(digits.batches(train, 6, seed=5)):
        loss = digits.step(session, number, lr, batch)
        assert loss == pytest.approx(twin.step(lr, batch.pixels, batch.labels), rel=2e-5), number
    gradient = session.read("stem.w.grad").reshape(-1)
    found = twin.w["stem.w"].grad.numpy().reshape(-1)
    norm = twin.norm
    np.testing.assert_allclose(gradient * min(1.0, digits.CLIP / norm), found, atol=2e-3 * np.abs(found).max())
    assert digits.accuracy(session, test) == twin.accuracy(test.pixels, test.labels)
    session.close()
