"""What a session refuses in one line instead of a crash, a hang, or a number left over from an earlier run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from barellm import environment
from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.cpu.threads import thread_count
from barellm.errors import UserError
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession

MODEL = ModelConfig(layers=1, heads=2, d_model=8, vocab_size=11, padded_vocab=13, max_seq=6)
SESSIONS = {"cpu": partial(CpuSession, threads=1), "reference": ReferenceSession}


@pytest.fixture(params=SESSIONS)
def session(request):
    _, programs = build(MODEL, batch=2, seq=6, optimizer=partial(adamw, config=OptimConfig()))
    opened = SESSIONS[request.param](programs)
    yield opened
    if isinstance(opened, CpuSession):
        opened.close()


def refused(session, name: str, values) -> str:
    with pytest.raises(ValueError) as error:
        session.write(name, values)
    return str(error.value)


@pytest.mark.extended
def test_ids_beyond_the_table_are_refused_where_they_are_written(session):
    tokens = np.zeros((2, 6), np.int64)
    for wrong in (10**8, 2**32, 13, -1):  # 2^32 would be 0 as an i32
        tokens[1, 4] = wrong
        assert refused(session, "tokens", tokens) == f"tokens[1, 4] is {wrong}, expected an id from 0 to 12"
    for right in (0, 12):
        tokens[1, 4] = right
        session.write("tokens", tokens)
    targets = np.full((2, 6), -1)
    session.write("targets", targets)
    for wrong in (-2, 11):  # rows of the padding are no target
        targets[0, 5] = wrong
        assert refused(session, "targets", targets) == f"targets[0, 5] is {wrong}, expected an id from -1 to 10"


def test_an_update_without_a_learning_rate_does_not_take_the_last_one(session):
    session.run("init", seed=1)
    session.run("optimizer_step", step=1, lr=0.1)
    with pytest.raises(ValueError, match=r"run of 'optimizer_step' lacks the scalars .*lr"):
        session.run("optimizer_step", step=2)


def test_a_run_takes_the_sizes_of_the_run_before(session):
    if isinstance(session, ReferenceSession):
        pytest.skip("its default is the planned size")
    for name in ("tokens", "targets"):
        session.write(name, np.zeros((1, 3), np.int32))
    scalars = {"pos": 0, "accumulate": 0, "inv_targets": 1.0, "step": 1}
    session.run("forward_backward", batch=1, seq=3, **scalars)
    session.run("forward_backward", **scalars)


def test_more_threads_than_can_work_are_refused(monkeypatch):
    monkeypatch.setattr("barellm.cpu.threads.allowed_cpus", lambda: (0, 1))
    for asked, expected in (("16", 16), ("1", 1)):
        monkeypatch.setenv("BARELLM_THREADS", asked)
        assert thread_count() == expected
    for asked in ("17", "1000", "0", "many"):
        monkeypatch.setenv("BARELLM_THREADS", asked)
        with pytest.raises(UserError, match=f"BARELLM_THREADS is '{asked}', expected a number from 1 to 16"):
            thread_count()
    monkeypatch.setattr("barellm.cpu.threads.allowed_cpus", lambda: tuple(range(64)))
    monkeypatch.setenv("BARELLM_THREADS", "256")
    assert thread_count() == 256


def test_a_misspelt_variable_is_named_once(monkeypatch, capsys):
    monkeypatch.setenv("BARELLM_THREAD", "2")
    monkeypatch.setenv("BARELLM_ISA", "")
    environment.check.cache_clear()
    environment.check()
    environment.check()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "BARELLM_THREAD" in line] == [
        "barellm: warning: nothing reads BARELLM_THREAD, did you mean 'BARELLM_THREADS'?"
    ]
    assert not any("BARELLM_ISA" in line for line in lines)


@pytest.mark.parametrize("name, found", [("BARELLM_POISON", "yes"), ("BARELLM_PIN", "2"), ("BARELLM_WAIT", "sleep")])
def test_a_switch_that_is_neither_on_nor_off(monkeypatch, name, found):
    monkeypatch.setenv(name, found)
    environment.check.cache_clear()
    with pytest.raises(UserError, match=f"{name} is '{found}', expected (0 or 1|futex or condition), or unset"):
        environment.check()
    monkeypatch.setenv(name, "")
    environment.check()


def test_every_variable_is_known():
    """Those that the package reads, and no others; docs/architecture.md has a row for each."""
    package = Path(environment.__file__).parent
    read = set()
    for path in package.rglob("*.py"):
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(BARELLM_\w+)"', path.read_text()))
    assert read == set(environment.NAMES)
    page = (package.parent / "docs" / "architecture.md").read_text()
    assert {name for name in environment.NAMES if f"| `{name}" not in page} == set()
