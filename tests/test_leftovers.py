"""A test that leaves a thread or a process running fails; one whose thread is about to end does not."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from barellm.kernels import executor
from tests import leftovers


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(leftovers, "END_S", 0.05)


def test_a_thread_that_goes_on_is_named(soon):
    before, over = leftovers.running(), threading.Event()
    thread = threading.Thread(target=over.wait, name="the one", daemon=True)
    thread.start()
    assert leftovers.left(before) == ["thread the one, threading.Event.wait"]
    assert leftovers.left(leftovers.running()) == []
    over.set()
    thread.join()
    assert leftovers.left(before) == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_process_that_goes_on_is_named(soon):
    before = leftovers.running()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (line,) = leftovers.left(before)
        assert line.startswith(f"process {process.pid}, ") and line.endswith("-c input()")
        process.kill()
    assert leftovers.left(before) == []


@pytest.mark.extended
def test_what_ends_soon_is_waited_for():
    before = leftovers.running()
    timer = threading.Timer(0.05, lambda: None)
    timer.start()
    assert leftovers.left(before) == [] and not timer.is_alive()


def test_the_threads_of_the_array_functions_may_stay(soon, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "2")
    before = leftovers.running()
    monkeypatch.setattr(executor, "_executor", None)
    made = executor.executor()
    assert leftovers.left(before) == []
    monkeypatch.setattr(executor, "_executor", None)
    left = leftovers.left(before)
    assert len(left) == 3 and all("barellm.cpu.threads.Pool" in line for line in left)
    for pool in (made.pool, made.here):
        pool.close()
    assert leftovers.left(before) == []
