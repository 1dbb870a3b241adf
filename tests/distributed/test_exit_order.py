"""The order in which processes end, and how each did."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from barellm.distributed.exit_order import ExitOrder

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no files for processes here")
TELLS = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)


@pytest.fixture
def ends():
    found = ExitOrder()
    yield found
    found.close()


@pytest.fixture
def sleepers():
    """Three processes."""
    found = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def until(ends: ExitOrder, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(ends.order) < count:
        assert time.monotonic() < deadline
        ends.wait(1.0)


def test_processes_are_known_in_the_order_in_which_they_end(ends, sleepers):
    for process in (*sleepers, *sleepers):
        ends.follow(process.pid)
    for number, sign in ((1, signal.SIGABRT), (2, signal.SIGKILL), (0, signal.SIGTERM)):
        os.kill(sleepers[number].pid, sign)
        os.waitid(os.P_PID, sleepers[number].pid, os.WEXITED | os.WNOWAIT)
    until(ends, 3)
    ends.wait(0)
    assert ends.order == [sleepers[number].pid for number in (1, 2, 0)]
    for process in sleepers:
        process.wait()
    signs = [signal.SIGTERM, signal.SIGABRT, signal.SIGKILL]
    found = [ends.status(process.pid) for process in sleepers]
    assert found == (signs if TELLS else [None] * 3)


def test_a_status_is_that_of_waitpid(ends):
    process = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(7)"], stdin=subprocess.PIPE)
    ends.follow(process.pid)
    assert ends.status(process.pid) is None, "it goes on"
    process.communicate(b"\n")
    until(ends, 1)
    assert ends.status(process.pid) == (7 << 8 if TELLS else None)


def test_a_status_that_nobody_has_asked_for_is_known_on_every_system(ends, sleepers, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError

    monkeypatch.setattr("barellm.distributed.exit_order.fcntl", SimpleNamespace(ioctl=refuse))
    ends.follow(sleepers[0].pid)
    assert ends.status(sleepers[0].pid) is None, "it goes on"
    sleepers[0].terminate()
    until(ends, 1)
    assert ends.status(sleepers[0].pid) == signal.SIGTERM
    sleepers[0].wait()
    assert ends.status(sleepers[0].pid) is None


def test_one_that_is_gone_already_has_ended_before_those_that_go_on(ends, sleepers):
    process = subprocess.Popen(["true"])
    process.wait()
    for number in (process.pid, sleepers[0].pid, process.pid):
        ends.follow(number)
    sleepers[0].kill()
    until(ends, 2)
    assert ends.order == [process.pid, sleepers[0].pid]
    assert ends.status(process.pid) is None, "nobody knows how"


def test_who_waits_can_be_woken(ends, sleepers):
    ends.follow(sleepers[0].pid)
    timer = threading.Timer(0.05, ends.wake)
    timer.start()
    begin = time.monotonic()
    ends.wait(60)
    assert 0.04 < time.monotonic() - begin < 30 and ends.order == []


def test_a_system_without_such_files_tells_nothing(ends, sleepers, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    ends.follow(sleepers[0].pid)
    sleepers[0].kill()
    ends.wait(0.05)
    assert ends.order == []
