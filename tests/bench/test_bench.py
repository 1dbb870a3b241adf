"""The numbers of barellm bench: from a real process, from the system's own counters, and free of the tool's own cost."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from barellm import models
from barellm.tools.bench import ops
from barellm.tools.profile import process, step
from tests.profiling.conftest import CEILING, small

pytestmark = pytest.mark.alone


def bench(*argv, **environment):
    import os

    done = subprocess.run(
        [sys.executable, "-m", "barellm", "bench", "step", "shakespeare-char", *argv, "--json"],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_in_a_process_of_its_own():
    begun = time.monotonic()
    r = bench("--batch", "4", "--seq", "32", "--steps", "4", "--digest")
    wall = time.monotonic() - begun
    assert (r["batch"], r["seq"], len(r["step_s"]), len(r["losses"])) == (4, 32, 4, 4)
    assert r["tokens_per_s"] == pytest.approx(4 * 32 / r["median_s"])
    assert r["percent_of_peak"] == pytest.approx(100 * r["flops"] / r["median_s"] / r["peak_flops"])
    assert 0 < r["percent_of_peak"] < 200  # the peak is measured at another moment, on machines that others use too
    split = r["first_step_split"]
    assert set(split) == {"import", "plan", "compile", "map", "init", "step", "rest"}
    assert sum(split.values()) == pytest.approx(r["first_step_s"])
    assert all(seconds >= 0 for seconds in split.values())
    assert r["first_step_s"] < wall
    # Python's own heap may grow by a page once; a step that allocates would fault every time.
    assert sorted(r["minor_faults_by_step"])[:3] == [0, 0, 0] and r["minor_faults"] <= 1
    # The course of the step with its ramp and its spikes, two inputs, the loss and two programs: none for an op.
    assert 0 < r["python_calls"] <= 45
    assert r["rss_added_bytes"] >= 0.9 * r["arena_bytes"] and r["peak_rss_bytes"] > r["rss_added_bytes"]


def test_equal_digests_for_any_number_of_threads():
    digests = {n: bench("--batch", "3", "--seq", "17", "--steps", "2", "--digest", BARELLM_THREADS=n) for n in "125"}
    assert [r["threads"] for r in digests.values()] == [1, 2, 5]
    assert len({r["digest"] for r in digests.values()}) == 1
    assert len({tuple(r["losses"]) for r in digests.values()}) == 1


def test_model_operations_are_those_of_the_plan():
    from barellm.tools.plan import plan

    r = step.measure(small(), steps=1)
    numbers, _ = plan.report(small())
    assert (r["flops"], r["arena_bytes"]) == (numbers["model_flops"], numbers["arena_bytes"])


def test_ops_add_up_to_the_step_and_have_a_bound(monkeypatch):
    monkeypatch.setattr(ops, "measured_ceiling", lambda **machine: CEILING)
    r = ops.measure(small(), steps=3)
    session_ops = sum(row["count"] for row in r["ops"] if row["program"] == "forward_backward")
    from barellm.tools.plan import plan

    numbers, built = plan.report(small())
    assert session_ops == len(built.lowered["forward_backward"].ops)
    assert sum(row["flops"] for row in r["ops"]) == sum(row["flops"] for row in numbers["ops"])
    assert all(row["s"] > row["wait_s"] >= 0 and row["alone_s"] > 0 and row["bound_s"] > 0 for row in r["ops"])
    assert r["ops_s"] == pytest.approx(sum(row["s"] for row in r["ops"]))
    assert 0.1 < r["ops_s"] / r["step_s"] < 3  # the same work; a busy machine disturbs one or the other


@pytest.mark.parametrize("preset", ["default", "sparse-char"])
def test_an_op_alone_reads_ids(monkeypatch, preset):
    """In few tokens other tensors come to lie where they were, whose bits are ids of rows far outside of the embedding."""
    looked, seconds, run = {}, ops.Alone.seconds, ops.Alone._run

    def checked(self, program, op):
        def look(calls, repeats):
            for name, t in op.inputs.items():
                if t.dtype == "i32" and name != "masks":  # which are bits
                    ids = self.session.stored(t)
                    looked[type(op).__name__, name] = ids.min() >= -1 and ids.max() < 1 << 16
            return run(self, calls, repeats)

        self._run = look
        return seconds(self, program, op)

    monkeypatch.setattr(ops.Alone, "seconds", checked)
    monkeypatch.setattr(ops, "measured_ceiling", lambda **machine: CEILING)
    config = models.preset(preset)
    ops.measure(replace(config, train=replace(config.train, micro_batch_size=2, seq=32, dtype="fp32")), steps=2)
    assert len(looked) > 2 and all(looked.values()), looked


def test_calls_are_counted_on_the_threads_that_do_the_work():
    counter = process.CallCounter()
    go, done = threading.Event(), threading.Event()

    def work():
        go.wait()
        for _ in range(50):
            abs_of(-1)
        done.set()

    with counter.watching_new_threads():
        thread = threading.Thread(target=work)
        thread.start()
    with counter.counting():
        go.set()
        done.wait()
    thread.join()
    assert 50 <= counter.calls < 100


def abs_of(x):
    return x if x > 0 else -x


def test_page_faults_are_seen():
    before = process.Usage.now()
    block = bytearray(64 << 20)
    assert process.Usage.now().since(before).minor_faults > 0 and len(block)


def test_the_process_knows_when_it_began():
    seconds = process.seconds_since_start()
    assert seconds is not None and 0 < seconds < time.monotonic()
    code = "import time; time.sleep(0.3); from barellm.tools.profile import process; print(process.seconds_since_start())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.28 < float(done.stdout) < 20
