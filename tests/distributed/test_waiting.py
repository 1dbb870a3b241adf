"""Ranks that are threads wait for one that works as long as it takes, and for one that does not, or has failed, no longer."""

from __future__ import annotations

import queue
import threading
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from tests.distributed import waiting
from tests.distributed.threads import each_rank


class Clock:
    """Time that passes where somebody waits; of each second this process works so long."""

    def __init__(self, monkeypatch, works) -> None:
        self.now, self.used, self.works = 0.0, 0.0, iter(works)
        times = SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.used)
        monkeypatch.setattr(waiting, "time", times)

    def nothing_comes(self, seconds: float) -> bool:
        self.now += 1.0
        self.used += next(self.works)
        return False


def test_a_rank_that_works_is_waited_for_however_long_it_takes(monkeypatch):
    clock = Clock(monkeypatch, repeat(0.1))  # of a machine with ten processes for each core
    assert waiting.wait(lambda seconds: clock.nothing_comes(seconds) or clock.now >= 5000)
    assert clock.now == 5000


def test_where_nobody_works_the_wait_ends(monkeypatch):
    clock = Clock(monkeypatch, chain(repeat(0.0, 15), [0.1], repeat(0.01)))
    assert not waiting.wait(clock.nothing_comes)
    assert clock.now == 15 + 1 + waiting.IDLE_S


def test_a_rank_whose_box_stays_empty_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_S", 0.001)
    with pytest.raises(queue.Empty):
        waiting.receive(queue.Queue(), idle_s=0.01)


@pytest.mark.parametrize("fails", [0, 2])
def test_the_others_end_with_the_rank_that_fails_and_its_error_is_told(fails):
    def work(ranks):
        if ranks.rank == fails:
            raise LookupError(f"of rank {fails}")
        ranks.gather(None)

    before = set(threading.enumerate())
    with pytest.raises(LookupError, match=f"of rank {fails}"):
        each_rank(3, work)
    assert set(threading.enumerate()) == before
