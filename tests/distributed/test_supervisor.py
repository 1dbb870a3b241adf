"""The launcher's supervisor: which processes are ranks, and what becomes of a run with one that is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import pytest

from barellm.distributed import supervisor
from barellm.distributed.supervisor import PeerSupervisor, Supervisor, ranks_below

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

# A launcher with a proxy, and two processes below it.
TREE = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    sys.exit(subprocess.call([sys.executable, __file__, "proxy"]))
ranks = [subprocess.Popen(["sleep", "100"], env=os.environ | {"PMI_RANK": rank}) for rank in "10"]
subprocess.Popen(["sleep", "100"])
for rank in ranks:
    rank.wait()
time.sleep(100)
"""


@pytest.fixture
def tree(tmp_path):
    """A launcher, and {rank: process}."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    ranks: dict[int, int] = {}
    deadline = time.monotonic() + 20
    while len(ranks) < 2:
        assert time.monotonic() < deadline
        ranks = {rank: number for number, rank in ranks_below(process.pid)}
    yield process, ranks
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(process: int, states: str) -> None:
    deadline = time.monotonic() + 10
    while supervisor._state(process) not in states:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ranks_are_known_by_their_variables(tree):
    ranks = tree[1]
    assert sorted(ranks) == [0, 1]
    assert {supervisor.variables(number)["PMI_RANK"] for number in ranks.values()} == {"0", "1"}
    assert dict(ranks_below(ranks[0])) == {}


def test_a_variable_may_have_equals_signs_in_it():
    """As those of a launcher that hands on options, and of whoever starts the run."""
    own = {"PMI_RANK": "0", "OPTIONS": "a=1 b=2", "NONE": ""}
    with subprocess.Popen(["cat"], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"  # it runs: in the middle of its start the system shows no variables
        assert supervisor.variables(process.pid) == own


def test_a_rank_that_stays_stopped_ends_the_run(tree, monkeypatch):
    process, ranks = tree
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "8")
    found = Supervisor(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    wait_for(ranks[1], "T")
    assert [found.look(2.0) for _ in range(5)] == [False] * 5
    assert found.numbers == {number: rank for rank, number in ranks.items()}
    assert found.look(2.0)
    assert found.words == f"rank 1 (process {ranks[1]}) has been stopped for 12 s: the run is ended"
    for number in ranks.values():
        wait_for(number, "Z")


@pytest.mark.extended
def test_a_rank_that_has_ended_long_before_the_others_ends_the_run(tree, monkeypatch):
    process, ranks = tree
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "8")
    found = Supervisor(process.pid)
    assert not found.look(100.0)
    os.kill(ranks[0], signal.SIGKILL)
    wait_for(ranks[0], "Z")
    assert [found.look(2.0) for _ in range(6)] == [False] * 5 + [True]
    assert found.words == f"rank 0 (process {ranks[0]}) has been gone for 12 s: the run is ended"
    wait_for(ranks[1], "Z")


def test_when_all_have_ended_nobody_is_missed(tree, monkeypatch):
    process, ranks = tree
    found = Supervisor(process.pid)
    assert not found.look(1.0)
    for number in ranks.values():
        os.kill(number, signal.SIGKILL)
        wait_for(number, "Z")
    assert not found.look(100.0) and not found.look(100.0) and found.words == ""


PIDFD = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no files for processes here")


@PIDFD
def test_where_the_launcher_does_not_it_ends_the_others_as_soon_as_one_is_killed(tree, monkeypatch):
    process, ranks = tree
    found = Supervisor(process.pid, 2, alone=True, failed_s=60.0)
    found.start()
    while len(found.numbers) < 2:
        time.sleep(0.005)
    os.kill(ranks[1], signal.SIGABRT)
    wait_for(ranks[0], "Z")
    found.join()
    found.end()
    assert found.words == "" and found.first is not None
    assert found.first[0] == ranks[1] and found.first[1] in (signal.SIGABRT, None)


@PIDFD
@pytest.mark.parametrize("alone, status, looks", [(True, 1 << 8, 4), (True, None, 4), (True, 0, 11), (False, 1 << 8, 11)])
def test_the_others_may_go_on_for_a_while_after_one_that_ends_by_itself(tree, monkeypatch, alone, status, looks):
    """And longer after one that has ended well, or where it is the launcher who looks."""
    process, ranks = tree
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "8")
    found = Supervisor(process.pid, 2, alone)
    assert not found.look(100.0)
    os.kill(ranks[0], signal.SIGKILL)
    wait_for(ranks[0], "Z")
    found._exit_order.wait(10)
    monkeypatch.setattr(found._exit_order, "status", lambda process: status)
    assert [found.look(1.0) for _ in range(looks)] == [False] * (looks - 1) + [True]
    said = f"rank 0 (process {ranks[0]}) has been gone for 11 s: the run is ended"
    assert found.words == (said if looks == 11 else "")
    wait_for(ranks[1], "Z")


@PIDFD
@pytest.mark.parametrize("status, ends", [(1 << 8, True), (None, True), (0, False)])
def test_it_waits_for_nobody_after_a_failure_where_the_launcher_does_not_either(tree, monkeypatch, status, ends):
    process, ranks = tree
    found = Supervisor(process.pid, 2, alone=True, failed_s=0.0)
    assert not found.look(100.0)
    os.kill(ranks[0], signal.SIGKILL)
    wait_for(ranks[0], "Z")
    found._exit_order.wait(10)
    monkeypatch.setattr(found._exit_order, "status", lambda process: status)
    assert found.look(0.01) == ends
    if ends:
        wait_for(ranks[1], "Z")


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_has_ended_before_the_first_look_is_missed(tree, monkeypatch, alone):
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "8")
    found = Supervisor(tree[0].pid, 3, alone)
    assert [found.look(2.0) for _ in range(6)] == [False] * 5 + [alone]
    assert found.words == ("a rank has been gone for 12 s: the run is ended" if alone else "")


@pytest.mark.parametrize("first", [0, 1])
def test_it_knows_which_rank_has_ended_first(tree, monkeypatch, first):
    """Whatever the launcher says: MPICH's kills the others at once, and names any of them."""
    monkeypatch.setattr(supervisor, "LOOK_S", 60.0)
    process, ranks = tree
    looks: list[float] = []
    found = Supervisor(process.pid, 2)
    found.start()
    while len(found.numbers) < 2:
        time.sleep(0.005)
    monkeypatch.setattr(found, "look", lambda passed: looks.append(passed))
    time.sleep(3 * supervisor.SOON_S)
    assert len(looks) < 2, "it has seen all, and may take its time"
    for rank, sign in ((first, signal.SIGABRT), (1 - first, signal.SIGKILL)):
        os.kill(ranks[rank], sign)
        wait_for(ranks[rank], "Z")
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in ranks.values()):  # until it is known how they ended
        assert time.monotonic() < deadline
        time.sleep(0.005)
    found.end()
    assert found.first in ((ranks[first], signal.SIGABRT), (ranks[first], None)), "None before Linux 6.15"


# Two ranks and their launcher, which is not ours. The second is stopped before it looks at the other.
FELLOWS = """
import os, signal, subprocess, sys, time
from barellm.distributed import supervisor
if len(sys.argv) == 1:
    ranks = [subprocess.Popen([sys.executable, __file__, "rank"], env=os.environ | {"PMI_RANK": n}) for n in "012"]
    print(*(rank.wait() for rank in ranks))
    sys.exit()
supervisor.LOOK_S = 0.05
with supervisor.peer_supervisor():
    if os.environ["PMI_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
"""


def test_ranks_that_another_launcher_has_started_look_at_each_other(tmp_path):
    (tmp_path / "fellows.py").write_text(FELLOWS)
    own = {"PYTHONPATH": ":".join(sys.path), "BARELLM_RANK_LIMIT": "1.1"}
    command = [sys.executable, str(tmp_path / "fellows.py")]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=30)
    assert re.fullmatch(r"barellm: error: rank 1 \(process \d+\) has been stopped for \d+ s: the run is ended\n", done.stderr)
    # The first of those that are well, of which each waits for those before it: how long is tested below, without a clock.
    assert done.stdout in ("1 -9 -9\n", "-9 -9 1\n"), "one of those that are well ends the others"


@pytest.mark.parametrize("own, stopped, seconds", [(0, 2, 10), (1, 2, 12), (3, 2, 14), (1, 0, 10), (2, 2, 10)])
def test_ranks_have_the_word_one_after_the_other(monkeypatch, own, stopped, seconds):
    """The first of those that are well has it at the limit of 10 s, each other one three looks later than the one before it. One
    that is not well itself may not wait for others."""
    monkeypatch.setattr(supervisor, "LOOK_S", 2 / 3)
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "8")
    monkeypatch.setenv("PMI_RANK", str(own))
    first = 1 << 23  # more than any process has
    monkeypatch.setattr(supervisor, "ranks_below", lambda launcher: [(first + rank, rank) for rank in range(4)])
    monkeypatch.setattr(supervisor, "_state", lambda process: "T" if process == first + stopped else "S")
    ended: list[list[int]] = []
    monkeypatch.setattr(PeerSupervisor, "kill", lambda self, processes: ended.append(list(processes)))
    found = PeerSupervisor()
    assert [found.look(1.0) for _ in range(seconds + 1)] == [False] * seconds + [True]
    who = f"rank {stopped} (process {first + stopped})"
    assert found.words == f"{who} has been stopped for {seconds + 1} s: the run is ended"
    assert ended == [[first + rank for rank in range(4)]]


def test_under_our_launcher_ranks_need_not_look(monkeypatch):
    monkeypatch.setenv("BARELLM_RANKS", "1")
    with supervisor.peer_supervisor():
        assert all(t.name != "supervisor" for t in threading.enumerate())
    monkeypatch.delenv("BARELLM_RANKS")
    with supervisor.peer_supervisor():
        assert any(t.name == "supervisor" for t in threading.enumerate())
    assert all(t.name != "supervisor" for t in threading.enumerate())


def test_a_rank_that_goes_on_is_let_be(tree, monkeypatch):
    process, ranks = tree
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "8")
    found = Supervisor(process.pid)
    for _ in range(3):
        os.kill(ranks[0], signal.SIGSTOP)
        wait_for(ranks[0], "T")
        assert not found.look(8.0)
        os.kill(ranks[0], signal.SIGCONT)
        wait_for(ranks[0], "RS")
        assert not found.look(8.0)
    assert found.words == ""


def test_it_ends_when_asked(monkeypatch):
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    clock = chain([5.0, 5.004, 5.01], count(100.0, 0.01))
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen: list[float] = []
    found = Supervisor(0)
    monkeypatch.setattr(found, "look", lambda passed: bool(seen.append(passed)))
    found.start()
    while len(seen) < 3:
        time.sleep(0.005)
    found.end()
    assert not found.is_alive()
    assert seen[:3] == pytest.approx([0.004, 0.006, 0.02]), "a leap of the clock counts as two looks"


def test_a_process_that_is_gone_has_no_state():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert supervisor._state(gone.pid) == "Z"
    assert not Path(f"/proc/{gone.pid}").exists() and list(ranks_below(gone.pid)) == []
