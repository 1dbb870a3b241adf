"""Turns: one process runs at a time, the others are stopped; every sample is kept; nobody is left, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barellm.errors import UserError
from benchmarks import interleaved
from benchmarks.interleaved import Variant, interleave

pytestmark = pytest.mark.alone

# A stand-in that says where it is in its life: argv = seconds of a step, bytes that it has, a file for its pid
FAKE = """
import json, os, sys
seconds, nbytes, pids = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with open(pids, "a") as f:
    print(os.getpid(), file=f)
print(json.dumps({"first_step_s": 1.0, "version": "0", "caches": os.environ["BARELLM_CACHE"]}), flush=True)
for line in sys.stdin:
    steps = [9.0] + [seconds] * (int(line) - 1) if int(line) > 1 else [seconds]
    print(json.dumps({"step_s": steps, "cpu_s": 0, "minor_faults": 0, "peak_rss_bytes": nbytes}), flush=True)
"""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(interleaved, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def fake(tmp_path):
    def made(name, seconds=0.5, nbytes=10**6, code=FAKE, **more):
        return Variant(name, [sys.executable, "-c", code, str(seconds), str(nbytes), str(tmp_path / name)], {}, "", **more)

    made.pids = lambda name: [int(line) for line in (tmp_path / name).read_text().split()]
    return made


def state(pid):
    """The letter of /proc: "T" is stopped, "S" asleep; None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def soon(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rounds_visit_everybody_and_only_one_runs(fake):
    made, reports = [fake("a", 0.25), fake("b", 0.5)], []

    def report(line):
        reports.append(line)
        for name in "ab"[: len(reports)]:
            soon(lambda name=name: state(fake.pids(name)[0]) == "T")

    assert interleave(made, rounds=3, report=report) == 2
    assert len(reports) == 2 + 3
    for v, seconds in zip(made, (0.25, 0.5), strict=True):
        assert v.samples == [seconds] * 6 and [t["warm_up_s"] for t in v.turns] == [[9.0]] * 3
        assert len(fake.pids(v.name)) == 1 and state(fake.pids(v.name)[0]) is None
    assert made[0].facts["caches"] != made[1].facts["caches"]


GREEDY = (
    """
import os, pathlib, sys
pids = pathlib.Path(sys.argv[3]).with_name("ours").read_text().split()
if any(os.path.exists(f"/proc/{pid}") for pid in pids):
    sys.exit("out of memory")
"""
    + FAKE
)


def test_where_a_gpu_does_not_hold_both_nobody_holds_it_between_turns(fake):
    ours, greedy = fake("ours"), fake("greedy", code=GREEDY)
    assert interleave([ours, greedy], rounds=2, report=lambda line: None, device_bytes=1 << 40) == 2
    assert not ours.resident and not greedy.resident
    for v in (ours, greedy):
        assert len(v.samples) == 4 and state(fake.pids(v.name)[-1]) is None
    with pytest.raises(UserError, match="greedy ended with status 1"):  # of the host's memory all is known
        interleave([fake("ours"), fake("greedy", code=GREEDY)], rounds=1, report=lambda line: None)


def test_long_steps_need_no_step_before_them(fake):
    v = fake("long", 2 * interleaved.LONG)
    assert interleave([v], rounds=2, report=lambda line: None) == 1
    assert v.samples == [2 * interleaved.LONG] * 2 and [t["warm_up_s"] for t in v.turns] == [[], []]
    both = [fake("long too", 2 * interleaved.LONG), fake("short", 0.5)]
    assert interleave(both, rounds=1, report=lambda line: None) == 1
    assert [v.turns[0]["warm_up_s"] for v in both] == [[9.0]] * 2, "beside one that warms up, all do"


def test_what_does_not_fit_beside_the_others_is_started_for_each_turn(fake, monkeypatch):
    monkeypatch.setattr(interleaved, "free_bytes", lambda: 20 / interleaved.SHARE)
    made = [fake(name, nbytes=n) for name, n in (("ours", 3), ("eager", 6), ("compile", 4), ("tuned", 7), ("last", 4))]
    interleave(made, rounds=2, report=lambda line: None)
    assert {v.name: v.resident for v in made} == {"ours": True, "eager": False, "compile": True, "tuned": False, "last": True}
    assert [len(fake.pids(v.name)) for v in made] == [1, 3, 1, 3, 1]
    assert all(len(v.turns) == 2 for v in made)


def test_memory_is_that_of_the_limit_or_what_others_left(monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "1M")
    assert interleaved.free_bytes() == 1 << 20
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "1000T")
    assert 0 < interleaved.free_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_one_that_dies_is_named_and_nobody_is_left(fake):
    made = [fake("a"), fake("broken", code="raise SystemExit(3)"), fake("never started")]
    with pytest.raises(UserError, match="broken ended with status 3"):
        interleave(made, rounds=1, report=lambda line: None)
    assert state(fake.pids("a")[0]) is None


def test_one_that_dies_between_its_turns_is_named(fake):
    v = fake("a")

    def report(line):
        os.kill(fake.pids("a")[0], signal.SIGKILL)

    with pytest.raises(UserError, match="a ended with status -9"):
        interleave([v], rounds=1, report=report)


def test_a_program_that_is_not_there(fake):
    v = Variant("missing", ["/nowhere/program"], {}, "")
    with pytest.raises(FileNotFoundError):
        interleave([fake("a"), v], rounds=1, report=lambda line: None)
    assert state(fake.pids("a")[0]) is None


# A run of its own, which is ended from outside while both of its children are stopped; each has a child of its own.
RUN = """
import signal, sys, time
from benchmarks import interleaved
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a script's background or nohup leaves ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
folder = sys.argv[1]
def report(line):
    if line.startswith("round"):
        print("stopped", flush=True)
        time.sleep(60)
made = [interleaved.Variant(n, [sys.executable, f"{folder}/parent.py", "0.5", "1", f"{folder}/{n}"], {}, "") for n in "ab"]
interleaved.interleave(made, rounds=1, report=report)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(sys.argv[3], "a") as f:
    print(child.pid, file=f)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_stopped_or_alive(number, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT + FAKE)
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    assert run.stdout and run.stdout.readline() == "stopped\n"
    pids = [int(line) for name in "ab" for line in (tmp_path / name).read_text().split()]
    assert len(pids) == 4
    soon(lambda: {state(pid) for pid in pids} == {"T"})
    run.send_signal(number)
    status = run.wait(timeout=20)
    assert status == {signal.SIGINT: -2, signal.SIGTERM: 128 + 15, signal.SIGKILL: -9}[number]
    soon(lambda: all(state(pid) in (None, "Z") for pid in pids))


def test_a_rival_takes_its_share_of_one_core_and_ends(fake, monkeypatch):
    cpu = min(os.sched_getaffinity(0))
    slow = FAKE.replace("    steps =", "    import time; time.sleep(0.5)\n    steps =")
    v = fake("a", code=slow, contention=cpu)
    started, begin = [], subprocess.Popen

    def watched(command, **more):
        started.append(begin(command, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", watched)
    interleave([v], rounds=1, report=lambda line: None)
    assert 0.05 < v.turns[0]["rival_share"] < 1.1
    rivals = [p for p in started if interleaved.BUSY in p.args]
    assert len(rivals) == 2 and all(p.poll() == -signal.SIGKILL for p in rivals)


def test_processors_are_those_that_were_asked_for(fake):
    before = os.sched_getaffinity(0)
    code = FAKE.replace('"version": "0"', '"cpus": sorted(os.sched_getaffinity(0))')
    v = fake("a", code=code, cpus=(max(before),))
    interleave([v], rounds=1, report=lambda line: None)
    assert v.facts["cpus"] == [max(before)] and os.sched_getaffinity(0) == before


def test_no_folder_of_this_machine_goes_into_a_result(tmp_path, fake):
    v = Variant("a", [sys.executable, str(tmp_path / "peers" / "x.py"), "--program", "/home/me/llm.c/train_gpt2"], {}, "")
    v.turns = [{"step_s": [1.0]}]
    assert v.to_json(tmp_path)["command"] == [Path(sys.executable).name, "peers/x.py", "--program", "train_gpt2"]
