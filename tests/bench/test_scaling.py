"""benchmarks/scaling.py: which setups there are, what stands beside each, and one run of all with real threads."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from barellm.assembly.build import resolved
from barellm.config.overrides import changed
from barellm.errors import UserError
from barellm.models import preset
from benchmarks import interleaved, scaling
from benchmarks.interleaved import Variant
from tests.profiling.conftest import made_up

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SMALL = {"model.layers": 2, "model.heads": 2, "model.d_model": 32, "train.micro_batch_size": 2, "train.seq": 16}
FAKE = """
import json, sys
print(json.dumps({"first_step_s": 1.0}), flush=True)
for line in sys.stdin:
    answer = {"step_s": [float(sys.argv[1])] * int(line), "cpu_s": 0, "minor_faults": 0, "peak_rss_bytes": 1}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(scaling, "measured_ceiling", lambda threads: made_up())
    monkeypatch.setattr(interleaved, "SETTLE_SECONDS", 0.0)


def config():
    return resolved(changed(preset("shakespeare-char"), SMALL), "cpu")


def test_setups():
    assert [c.name for c in scaling.setups(1)] == ["1 thread"]
    names = ["1 thread", "2 threads", "4 threads", "6 threads", "6 threads, contention on one core", "2 threads on one core"]
    assert [c.name for c in scaling.setups(6)] == names
    assert [(c.threads, c.cores, c.contention) for c in scaling.setups(2)] == [
        (1, 1, False),
        (2, 2, False),
        (2, 2, True),
        (2, 1, False),
    ]


def test_each_case_stands_beside_the_right_one(monkeypatch):
    seconds = {"1 thread": 0.4, "2 threads": 0.21, "2 threads, contention on one core": 0.3, "2 threads on one core": 0.5}
    seen = {}

    def fake(config, *, name, environment, cpus, contention):
        seen[name] = (environment["BARELLM_THREADS"], len(cpus), contention is not None)
        return Variant(name, [sys.executable, "-c", FAKE, str(seconds[name])], {}, "", contention=contention)

    monkeypatch.setattr(scaling, "ours", fake)
    monkeypatch.setattr(scaling, "thread_count", lambda: 2)
    monkeypatch.setattr(scaling, "allowed_cpus", lambda: [min(os.sched_getaffinity(0))] * 2)
    r = scaling.measure(config(), rounds=2, report=lambda line: None)
    one, two, contention, shared = r["cases"]
    assert [one["times_one_thread"], two["times_one_thread"]] == [1.0, pytest.approx(0.4 / 0.21)]
    assert two["percent_of_bound"] == pytest.approx(100 * two["bound_s"] / 0.21)
    assert contention["slower"] == pytest.approx(0.3 / 0.21)
    assert contention["slower_by_what_was_taken"] == pytest.approx(2 / (2 - contention["rival_share"]), rel=0.3)
    assert shared["slower_than_one_thread"] == pytest.approx(0.5 / 0.4)
    assert list(seen.values()) == [("1", 1, False), ("2", 2, False), ("2", 2, True), ("2", 1, False)]
    text = "\n".join(scaling.lines_of(r))
    assert "1.90x as fast" in text and "1.43x as long as without" in text and "1.25x as long as 1 thread" in text
    assert max(map(len, text.splitlines())) <= 80
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    (line,) = importlib.import_module("table").facts({"x.json": r})
    assert line.startswith("shakespeare-char 2 x 16 ") and line.endswith(". x.json")
    assert "2 threads 210.0 ms, 1.90x" in line
    assert "1.43 times as long as without" in line and "1.25 times as long as one thread" in line


def test_more_threads_than_cores_are_refused(monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "16")
    monkeypatch.setattr(scaling, "allowed_cpus", lambda: [0, 1])
    with pytest.raises(UserError, match="BARELLM_THREADS is 16"):
        scaling.measure(config(), rounds=1, report=lambda line: None)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_real_threads(monkeypatch):
    monkeypatch.setattr(scaling, "thread_count", lambda: 2)
    r = scaling.measure(config(), rounds=1, report=lambda line: None)
    assert [case["threads"] for case in r["cases"]] == [1, 2, 2, 2]
    assert 0 < r["cases"][2]["rival_share"] < 1.1 and all(case["median_s"] > 0 for case in r["cases"])
    assert "environment" in r["cases"][0] and "processor" in r["machine"]
