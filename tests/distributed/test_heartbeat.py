"""Which rank is at fault, from what was heard of the others and when."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from barellm.distributed import heartbeat
from barellm.distributed.heartbeat import Heartbeat, limit_seconds
from barellm.errors import UserError


class Lost(RuntimeError):
    """What MPI raises where the process at the other end is gone."""


class Request:
    """Of a message that arrives when `done` is set, or fails when `lost` is, after which nobody may ask for it."""

    def __init__(self, done: bool = False) -> None:
        self.done, self.cancelled, self.lost = done, False, False

    def Test(self) -> bool:
        assert self.lost is not None, "it has failed before"
        if self.lost:
            self.lost = None
            raise Lost
        return self.done

    def Cancel(self) -> None:
        assert self.lost is not None, "it has failed"
        self.cancelled = True

    def Wait(self) -> None:
        assert self.done or self.cancelled


class Mpi:
    """A communicator of three ranks, of which this is rank 1. `waits` and `with_us`: how many waits for all and for this rank the
    others have begun, as they say next; None: they are silent."""

    REQUEST_NULL, Exception, COMM_WORLD = Request(done=True), Lost, "the world"

    def __init__(self) -> None:
        self.waits: dict[int, int | None] = {0: 0, 2: 0}
        self.with_us = {0: 0, 2: 0}
        self.boxes: dict[int, tuple[np.ndarray, Request]] = {}
        self.sent: list[tuple[int, int, int]] = []

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 3

    def Irecv(self, box, rank) -> Request:
        self.boxes[rank] = box, Request()
        return self.boxes[rank][1]

    def Isend(self, box, rank) -> Request:
        self.sent.append((rank, int(box[0]), int(box[1])))
        self.arrive()
        return Request(done=True)

    def arrive(self) -> None:
        for rank, (box, request) in self.boxes.items():
            if self.waits[rank] is not None and not request.done:
                box[:] = self.waits[rank], self.with_us[rank]
                request.done = True


@pytest.fixture
def mpi(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "0.3")
    return Mpi()


@pytest.fixture
def watched(mpi):
    """A watch, and what it says when it ends the run."""
    said: list[str] = []

    def fail(words: str) -> None:
        said.append(words)
        found._over.set()  # stands for the end of the process

    found = Heartbeat(mpi, mpi, fail=fail)
    yield found, said
    found.close()


def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.alone
def test_nobody_is_at_fault_while_all_are_heard_of(mpi, watched):
    found, said = watched
    time.sleep(0.6)
    assert not said and len(mpi.sent) > 10
    with found.waiting(no_timeout=True):
        time.sleep(0.5)
    assert not said


@pytest.mark.alone
def test_a_silent_rank_is_named(mpi, watched):
    _, said = watched
    mpi.waits[2] = None
    until(lambda: said)
    assert said == ["rank 2 has not been heard of for 0 s: the run is ended"]


@pytest.mark.alone
def test_a_rank_that_mpi_misses_is_silent(mpi, watched):
    """It is named as one that says nothing, and the watch goes on with the others."""
    _, said = watched
    until(lambda: mpi.sent)
    mpi.boxes[2][1].lost = True
    until(lambda: said)
    assert said == ["rank 2 has not been heard of for 0 s: the run is ended"]


@pytest.mark.alone
def test_at_the_end_nothing_is_left_under_way_but_to_a_rank_that_mpi_misses(mpi):
    """MPI wants each receive to be over before its end. One that has failed is."""
    said: list[str] = []
    found = Heartbeat(mpi, mpi, fail=said.append)
    until(lambda: mpi.sent)
    lost = mpi.boxes[2][1]
    lost.lost = True
    until(lambda: lost.lost is None)
    found.close()
    assert mpi.boxes[0][1].cancelled and not lost.cancelled and mpi.boxes[2][1] is lost


@pytest.mark.alone
def test_a_rank_that_is_waited_for_in_vain_is_named(mpi, watched):
    found, said = watched
    mpi.waits[0] = 1
    with found.waiting():
        until(lambda: said)
    assert said == ["rank 2 is 0 s later than the others: the run is ended"]


@pytest.mark.alone
def test_a_rank_that_waits_for_one_while_all_others_meet_is_named(mpi, watched):
    """However many messages it waits for: it does not come to where the others are."""
    found, said = watched
    mpi.waits, mpi.with_us = {0: 0, 2: 1}, {0: 7, 2: 0}
    with found.waiting():
        until(lambda: said)
    assert said == ["rank 0 is 0 s later than the others: the run is ended"]


@pytest.mark.alone
@pytest.mark.parametrize("rank, ahead", [(0, 0), (2, 0), (2, 1)])
def test_a_rank_whose_message_does_not_come_is_named(mpi, watched, rank, ahead):
    """One that seems to wait for this rank has longer, for it has the word."""
    found, said = watched
    mpi.waits, mpi.with_us = {0: 1, 2: 1}, {0: 1, 2: 1}
    mpi.waits[rank] += ahead
    with found.waiting():
        pass
    for _ in range(2):
        with found.waiting(one=rank):
            time.sleep(0.2)
    mpi.with_us[2 - rank] = 0
    with found.waiting(one=rank):
        until(lambda: said)
    assert said == [f"rank {rank} is {ahead} s later than the others: the run is ended"]


@pytest.mark.alone
def test_a_rank_whose_message_does_not_come_may_wait_for_another(mpi, watched):
    found, said = watched
    mpi.waits = {0: 0, 2: 1}
    with found.waiting():
        pass
    with found.waiting(one=2):
        until(lambda: said)
    assert said == ["rank 0 is 0 s later than the others: the run is ended"]


@pytest.mark.alone
def test_a_message_that_both_wait_for_may_be_long(mpi, watched):
    found, said = watched
    mpi.with_us[2] = 1
    with found.waiting(one=2):
        time.sleep(0.6)
    assert not said


@pytest.mark.alone
def test_the_others_learn_of_each_wait(mpi, watched):
    found, _ = watched
    for _ in range(3):
        with found.waiting() as look:
            look()
    for _ in range(2):
        with found.waiting(one=2):
            pass
    until(lambda: {(0, 3, 0), (2, 3, 2)} <= set(mpi.sent))
    assert {rank for rank, *_ in mpi.sent} == {0, 2}


@pytest.mark.alone
def test_a_rank_that_is_seen_at_work_has_longer(mpi, watched, monkeypatch):
    found, said = watched
    monkeypatch.setattr(heartbeat, "AT_WORK", 4)
    found._near = {2: SimpleNamespace(works=lambda: True)}
    mpi.waits[0] = None
    mpi.waits[2] = None
    until(lambda: said)
    assert said[0].startswith("rank 0 has not been heard of")
    assert found._clock < 0.9


@pytest.mark.alone
def test_a_rank_at_work_that_is_too_late_is_named_too(mpi, watched, monkeypatch):
    found, said = watched
    monkeypatch.setattr(heartbeat, "AT_WORK", 2)
    found._near = {2: SimpleNamespace(works=lambda: True)}
    mpi.waits[0] = 1
    with found.waiting():
        until(lambda: said)
    assert said == ["rank 2 is 1 s later than the others: the run is ended"]
    assert found._clock > 0.6


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_work_is_seen_from_outside():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = heartbeat.Process(child.pid)
        assert process.works()
        child.send_signal(signal.SIGSTOP)
        until(lambda: not process.works())
        child.send_signal(signal.SIGCONT)
        until(process.works)
    finally:
        child.kill()
        child.wait()
    assert not process.works(), "it is gone"


def test_sleep_is_no_work_until_time_was_used(tmp_path):
    process = heartbeat.Process(0)
    process._stat = str(tmp_path / "stat")
    seen = []
    for state, user, system in (("S", 5, 5), ("S", 5, 5), ("S", 6, 5), ("S", 6, 7), ("T", 9, 9), ("R", 9, 9), ("Z", 9, 9)):
        Path(process._stat).write_text(f"7 (a) b) {state} 1 1 1 0 -1 4194304 100 0 0 0 {user} {system} 0 0 20 0 1 0")
        seen.append(process.works())
    assert seen == [False, False, True, True, False, True, False]


@pytest.mark.parametrize("silent, slept", [(0.14, [0.12]), (0.16, [])], ids=["the first is well", "the first is silent"])
def test_who_is_not_the_first_speaks_if_the_first_does_not(mpi, monkeypatch, capfd, silent, slept):
    """Where rank 1 alone misses rank 2, rank 0 does not know, and a run ended without a word. Whoever has been silent for half of
    the limit of 0.3 s is not waited for."""
    ended, naps = [], []
    monkeypatch.setattr(heartbeat, "end_all", lambda world, status: ended.append((world, status)))
    found = Heartbeat(mpi, mpi)
    found.close()
    monkeypatch.setattr(heartbeat.time, "sleep", naps.append)
    found._clock = 1.0
    found._heard = {0: 1.0 - silent, 2: 0.0}
    found._end("rank 2 is gone")
    assert (ended, naps) == ([(mpi.COMM_WORLD, 1)], pytest.approx(slept)), "of a copy MPICH ends this process only"
    assert capfd.readouterr().err == "barellm: error: rank 2 is gone\n"


@pytest.mark.parametrize("late, slept", [(0, []), (2, [0.12])])
def test_one_that_is_late_is_not_waited_for_to_say_so(mpi, monkeypatch, late, slept):
    """It may be heard of: two ranks waited for the words of rank 0, which was held, and then both spoke."""
    naps = []
    monkeypatch.setattr(heartbeat, "end_all", lambda world, status: None)
    found = Heartbeat(mpi, mpi)
    found.close()
    monkeypatch.setattr(heartbeat.time, "sleep", naps.append)
    found._clock, found._since, found._waits = 1.0, 0.5, 5
    found._heard, found._begun = {0: 1.0, 2: 1.0}, {0: 5, 2: 5} | {late: 4}
    found._end(found.fault())
    assert naps == pytest.approx(slept)


@pytest.mark.alone
def test_a_process_that_was_stopped_itself_blames_nobody(mpi, monkeypatch):
    """As after Ctrl-Z and fg: the clock has moved on, and nothing was heard meanwhile."""
    now = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    said: list[str] = []
    found = Heartbeat(mpi, mpi, fail=said.append)
    with found.waiting():
        now[0] = 1000.0
        time.sleep(0.2)
    found.close()
    assert said == [] and found._clock == pytest.approx(0.04)


def test_the_limit_is_a_number_of_seconds(monkeypatch):
    monkeypatch.delenv("BARELLM_RANK_LIMIT", raising=False)
    assert limit_seconds() == 20
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "45.5")
    assert limit_seconds() == 45.5
    for wrong in ("soon", "1", "-3", "inf", "nan"):
        monkeypatch.setenv("BARELLM_RANK_LIMIT", wrong)
        with pytest.raises(UserError, match=f"^BARELLM_RANK_LIMIT is '{wrong}', expected seconds, more than 1$"):
            limit_seconds()


def test_the_rank_that_holds_up_a_late_one_is_named(mpi):
    found = Heartbeat(mpi, mpi)
    found.close()
    found._clock, found._since, found._waits = 1.0, 0.5, 5
    found._heard = {0: 0.9, 2: 0.8}
    for begun, named in (({0: 4, 2: 3}, 2), ({0: 3, 2: 4}, 0), ({0: 4, 2: 4}, 2), ({0: 4, 2: 5}, 0)):
        found._begun = begun
        assert found.fault().startswith(f"rank {named} is ")
    found._heard = {0: 0.2, 2: 0.1}
    assert found.fault().startswith("rank 2 has not been heard of") and found.at_fault == 2
