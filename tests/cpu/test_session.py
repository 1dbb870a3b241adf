"""What a session promises to those who run programs by name."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.cpu import gemm_config
from barellm.cpu.kernels.loss import classifier
from barellm.cpu.step import CpuSession
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession
from tests.cpu.check import changed

MODEL = ModelConfig(layers=1, heads=2, d_model=16, vocab_size=31, max_seq=8)


@pytest.mark.parametrize("open_session", [CpuSession, ReferenceSession])
def test_scalars_of_one_run_do_not_reach_into_the_next(open_session):
    """Sampling between two training steps moves `pos`; an evaluation at position 0 must not see it."""
    _, programs = build(MODEL, batch=2, seq=8, decode_batch=1)
    session = open_session(programs)
    session.run("init", seed=3)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 8)).astype(np.int32)

    def loss() -> float:
        session.write("tokens", tokens)
        session.write("targets", tokens)
        session.run("eval", batch=2, seq=8, inv_targets=1 / 16)
        return float(session.read("loss")[0])

    before = loss()
    session.write("tokens", tokens[:1, :1])
    session.run("decode", batch=1, seq=1, pos=5)
    assert loss() == before


@pytest.mark.parametrize("open_session", [CpuSession, ReferenceSession])
def test_sizes_that_were_not_planned_are_refused(open_session):
    """The kernels would write over other tensors."""
    session = open_session(build(MODEL, batch=2, seq=8)[1])
    session.run("init", seed=3)
    tokens = np.zeros((3, 8), np.int32)
    for name in ("tokens", "targets"):
        session.write(name, tokens[:2])
    for batch, seq in ((3, 8), (2, 9), (0, 8)):
        with pytest.raises(ValueError, match="planned for 1 to"):
            session.run("eval", batch=batch, seq=seq, inv_targets=1.0)
    with pytest.raises(ValueError):  # inputs of another size than the run's: a part of them would be an earlier run's
        session.run("eval", batch=1, seq=8, inv_targets=1.0)


@pytest.mark.parametrize("open_session", [CpuSession, ReferenceSession])
def test_names_that_nobody_has_are_refused(open_session):
    session = open_session(build(MODEL, batch=2, seq=8)[1])
    with pytest.raises(ValueError, match="no program is named 'evla', there are init, eval"):
        session.run("evla", batch=2, seq=8)
    with pytest.raises(ValueError, match=r"unknown scalars \['batsh'\], expected some of \['batch', 'seq'"):
        session.run("eval", batsh=2, seq=8)
    with pytest.raises(ValueError, match="eval reads the input 'tokens', which was never written"):
        session.run("eval", batch=2, seq=8, inv_targets=1.0)


@pytest.mark.parametrize("open_session", [CpuSession, ReferenceSession])
def test_an_input_is_what_it_was_when_it_was_written(open_session):
    session = open_session(build(MODEL, batch=2, seq=8)[1])
    session.run("init", seed=3)
    losses = []
    for change in (0, 1):
        tokens = np.ones((2, 8), np.int32)
        session.write("tokens", tokens)
        session.write("targets", np.ones((2, 8), np.int32))
        tokens += change
        session.run("eval", batch=2, seq=8, inv_targets=1.0)
        losses.append(float(session.read("loss")[0]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_of_other_sizes_add_up(monkeypatch, recompute):
    """18 tokens start the gradients, in several chunks of classifier and weight gradient; 3, then 17, are added."""
    monkeypatch.setattr(classifier, "CHUNK", 8)
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={16: 4, 32: 4})
    model = replace(MODEL, max_seq=17)
    sessions = []
    for open_session in (CpuSession, ReferenceSession):
        made = build(model, batch=2, seq=17, optimizer=lambda p: adamw(p, OptimConfig()), recompute=recompute)
        sessions.append(open_session(made[1]))
    cpu, reference = sessions
    cpu.run("init", seed=3)
    for name, t in cpu.tensors.items():
        if t.role == "parameter":
            reference.write(name, cpu.read(name))
    r = np.random.default_rng(0)
    for turn in range(2):  # the second starts again
        for micro, (batch, seq) in enumerate(((2, 9), (1, 3), (1, 17))):
            tokens, targets = r.integers(0, model.vocab_size, (2, batch, seq), dtype=np.int32)
            for session in sessions:
                session.write("tokens", tokens)
                session.write("targets", targets)
                session.run("forward_backward", batch=batch, seq=seq, accumulate=int(micro > 0), inv_targets=1 / 38, step=turn)
    for name, t in cpu.tensors.items():
        if t.role == "gradient":
            np.testing.assert_allclose(cpu.read(name), reference.read(name), atol=2e-6, err_msg=name)


def test_a_session_that_is_dropped_without_close_leaves_no_threads():
    before = set(threading.enumerate())
    _, programs = build(MODEL, batch=2, seq=8)
    session = CpuSession(programs, threads=2)
    session.run("init", seed=3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del session
    gc.collect()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


INTERRUPTED = """
import os, signal, threading, time
from barellm.models.gpt2 import Config as ModelConfig
from barellm.cpu.step import CpuSession
from barellm.assembly.programs import build
import numpy as np

def interrupted():
    model = ModelConfig(layers=2, heads=4, d_model=512, vocab_size=512, max_seq=512)
    session = CpuSession(build(model, batch=8, seq=512)[1], threads=2)
    session.write("tokens", np.zeros((8, 512), np.int32))
    session.write("targets", np.zeros((8, 512), np.int32))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            session.run("eval", batch=8, seq=512, inv_targets=1.0)
    except KeyboardInterrupt:
        {then}

interrupted()
time.sleep(0.3)
print("alive", flush=True)
"""


@pytest.mark.parametrize("then, status", [("print('dropped')", 0), ("raise", -signal.SIGINT)])
@pytest.mark.extended
def test_ctrl_c_in_a_step_whose_session_is_given_up_does_not_crash(then, status):
    """The threads still run over the arena and the code when the last reference to the session is gone, or Python ends."""
    code = INTERRUPTED.format(then=then)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == status, found
    assert ("alive" in found.stdout) == (status == 0)
