"""A profile adds up on every thread or says that it does not, and opens as a timeline; tracing changes no bit and costs little."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from barellm.cli import main
from barellm.cpu import jit
from barellm.cpu.isa import host
from barellm.cpu.kernel import Specialisation
from barellm.cpu.lang.sync import BARRIER, STAMPS
from barellm.cpu.threads import Pool, record_table
from barellm.errors import UserError
from barellm.tools.plan import rows
from barellm.tools.profile import chart, profile, timeline, trace
from barellm.tools.profile.step import opened
from tests.profiling.conftest import CEILING, SMALL, small

pytestmark = pytest.mark.alone

TICK = 1e-9
STEPS = 9
TOKENS = {"train.micro_batch_size": 16, "train.seq": 64}  # of fewer, a short call's stamps are 1.5 to 4 % of a step
WORDS = [word for key, value in (SMALL | TOKENS).items() for word in (f"--{key}", str(value))]


@pytest.fixture(params=[(1, "futex"), (2, "futex"), (5, "futex"), (2, "condition"), (5, "condition")], ids=str)
def traced(request, monkeypatch):
    """(session, traces) of a small model."""
    threads, wait = request.param
    monkeypatch.setenv("BARELLM_THREADS", str(threads))
    monkeypatch.setenv("BARELLM_WAIT", wait)
    with opened(small(**TOKENS)) as (bench, _):
        yield bench.compiled.session, trace.record(bench, STEPS)


def by_hand(gap=0):
    """Two threads, two calls of micro and one of update; times in ticks. A step of 1000, of which nobody noted the last 10, and
    thread 1 not `gap` between its first calls."""
    micro = [[[100, 300, 350], [350, 480, 500]], [[120, 250, 350], [350 + gap, 500, 500]]]
    update = [[[600, 700, 900]], [[600, 900, 900]]]
    runs = [("forward_backward", np.array(micro)), ("optimizer_step", np.array(update))]
    return trace.TracedStep(seconds=1000 * TICK, begin=0, end=990, runs=runs, tick_s=TICK)


def test_parts_of_a_step_are_told_apart():
    first, second = trace.account(by_hand())
    assert first == {"thread": 0, "work_s": pytest.approx(430e-9), "barrier_s": pytest.approx(270e-9),
                     "idle_s": pytest.approx(290e-9), "residual_percent": pytest.approx(1)}  # fmt: skip
    assert [second[k] for k in ("work_s", "barrier_s", "idle_s")] == pytest.approx([580e-9, 100e-9, 310e-9])
    assert profile.adds_up([first, second])


def test_a_gap_that_nobody_noted_is_reported():
    first, second = trace.account(by_hand(gap=40))
    assert (first["residual_percent"], second["residual_percent"]) == pytest.approx((1, 5))
    assert not profile.adds_up([first, second]) and profile.adds_up([first])


def test_parts_that_are_more_than_the_step_are_reported():
    short = replace(by_hand(), seconds=900 * TICK)
    assert not profile.adds_up(trace.account(short))


@pytest.mark.parametrize(
    "program, thread, call, which", [("forward_backward", 1, 1, 0), ("optimizer_step", 0, 0, 2), ("forward_backward", 0, 0, 0)]
)
def test_a_counter_that_runs_backwards_is_refused(program, thread, call, which):
    step = by_hand()
    trace.check_order(step)
    dict(step.runs)[program][thread, call, which] = -1  # as if it had not been written
    with pytest.raises(UserError, match=f"thread {thread} runs backwards"):
        trace.check_order(step)


def test_every_thread_of_a_real_step_adds_up(traced):
    session, traces = traced
    missed = []
    for step in traces.traced:
        threads = trace.account(step)
        assert [t["thread"] for t in threads] == list(range(session.threads))
        assert all(t[part] > 0 for t in threads for part in ("work_s", "barrier_s", "idle_s"))
        missed.append(max(abs(t["residual_percent"]) for t in threads))
        seconds = np.concatenate(list(rows.op_seconds(session, trace.call_seconds(step)).values()))
        assert (seconds[:, 0] > 0).all() and (seconds[:, 1] >= 0).all()
        mean = sum(t["work_s"] + t["barrier_s"] for t in threads) / len(threads)
        assert seconds.sum() == pytest.approx(mean)
    # The system may take a thread away between two stamps, but hardly in every step.
    assert min(missed) < trace.LIMIT, missed


def test_nobody_works_on_bytes_that_another_thread_still_writes(traced):
    """Stamps of different threads agree: where there is a barrier, the next call of every thread begins after it."""
    session, traces = traced
    for step in traces.traced:
        for program, stamps in step.runs:
            behind = session.records[program][:-1, BARRIER // 8] != 0
            done, begun = stamps[:, :-1, trace.DONE].max(axis=0), stamps[:, 1:, trace.BEGIN].min(axis=0)
            assert behind.any() and (begun >= done)[behind].all()


def test_the_timeline_has_every_call_on_every_thread(traced):
    session, traces = traced
    step = traces.median_step()
    file = json.loads(json.dumps(timeline.events(session, step, title="small")))
    events = file["traceEvents"]
    assert all({"ph", "name", "pid", "tid"} <= e.keys() and e["ph"] in "XM" for e in events)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "python"} | {i + 1: f"thread {i}" for i in range(session.threads)}
    calls = [call for program in ("forward_backward", "optimizer_step") for call in session.calls[program]]
    barriers = sum(int((session.records[p][:, BARRIER // 8] != 0).sum()) for p in ("forward_backward", "optimizer_step"))
    for track in range(session.threads + 1):
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == track]
        assert all(isinstance(e[k], float) and e[k] >= 0 for e in slices for k in ("ts", "dur"))
        ends = [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in slices]
        if track == 0:
            (begin, end), *inside = ends
            assert [e["name"] for e in slices] == ["step", "forward_backward", "optimizer_step"]
            assert begin == 0 and begin <= inside[0][0] and inside[0][1] <= inside[1][0] and inside[1][1] <= end
            continue
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "slices of a thread overlap"
        work = [e for e in slices if e["cat"] != "barrier"]
        assert [e["cat"] for e in work] == [call.op.name for call in calls]
        assert [e["args"]["kernel"] for e in work] == [call.spec.symbol() for call in calls]
        assert len(slices) - len(work) == barriers
        row = trace.account(step)[track - 1]
        assert sum(e["dur"] for e in work) * 1e-6 == pytest.approx(row["work_s"], rel=0.01)
    labels = {e["name"] for e in events}
    assert {"linear_gelu h.0.mlp.c_fc.weight 128x32", "attention h.1 16x64x32", "adamw wte 65x32", "barrier"} <= labels
    assert any(name.startswith("classifier wte 65x32 gemm") for name in labels)


def test_tracing_changes_no_bit():
    digests = []
    for on in (False, True):
        with opened(small()) as (bench, _):
            session = bench.compiled.session
            session.trace(session.new_stamps() if on else None)
            for _ in range(3):
                bench.step()
            digests.append(session.digest())
    assert digests[0] == digests[1]


def nothing(k) -> None:
    """A call that takes no time."""


def test_tracing_costs_less_than_two_percent():
    """The cost of a traced record, from tables of empty calls, against the step that it is part of."""
    spec, calls = Specialisation(nothing, (), ()), 4000
    library = jit.Library([jit.compile_object(spec.ir(host()), host())], host())
    records = record_table(calls)
    records[:, 0], records[-1, BARRIER // 8] = library.address(spec.symbol()), 1
    stamps = np.zeros((1, calls, STAMPS), np.int64)
    pool = Pool(1, host())
    ticks = {0: [], stamps.ctypes.data: []}
    for into in [*ticks] * 20:
        begin = pool.now()
        pool.run(records.ctypes.data, calls, into)
        ticks[into].append(pool.now() - begin)
    pool.close()
    plain, traced = (min(samples) for samples in ticks.values())
    with opened(small(model__d_model=128, model__layers=4, train__micro_batch_size=12, train__seq=64)) as (bench, _):
        traces = trace.record(bench, 5)
        step = min(traces.traced, key=lambda s: s.seconds)
    entries = sum(s.shape[1] for _, s in step.runs)
    assert 0 < (traced - plain) / calls * entries * step.tick_s < 0.02 * step.seconds


def test_pairs_of_steps_take_turns_and_are_compared():
    made = trace.Traces([replace(by_hand(), seconds=s) for s in (1.03, 2.0, 4.04)], [1.0, 2.0, 4.0])
    assert made.overheads == pytest.approx([3, 0, 1])
    assert made.median_step().seconds == 2.0
    numbers = profile.tracing_overhead(made)
    assert numbers["tracing_percent"] == pytest.approx(1) and len(numbers["traced_s"]) == 3


@pytest.fixture
def result(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measured_ceiling", lambda **compiled: CEILING)
    return profile.measure(small(), steps=3, folder=tmp_path)


def test_the_numbers_of_a_profile_belong_together(result, tmp_path):
    assert json.loads((tmp_path / "profile.json").read_text()) == result
    assert result["ops"] and sum(row["s"] for row in result["ops"]) == pytest.approx(result["work_s"] + result["barrier_s"])
    assert sum(row["percent_of_step"] for row in result["ops"]) < 100.1
    for row in result["ops"]:
        assert row["percent_of_bound"] == pytest.approx(100 * row["bound_s"] / row["s"])
        if row["kernels"]:
            assert sum(part["s"] for part in row["kernels"].values()) == pytest.approx(row["s"])
            assert sum(part["wait_s"] for part in row["kernels"].values()) == pytest.approx(row["wait_s"])
    (classifier,) = [row for row in result["ops"] if row["op"] == "classifier"]
    assert classifier["family"] == "matmul" and len(classifier["kernels"]) >= 4
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"][0]["args"]["name"].startswith("shakespeare")


def test_the_bars_of_the_picture_are_the_step(result, tmp_path):
    rows = chart.bars(result)
    missed = sum(t["residual_percent"] for t in result["by_thread"]) / result["threads"]
    drawn = 100 * sum(row["s"] for row in rows) / result["step_s"]
    assert drawn + missed == pytest.approx(100)
    assert rows[-1]["family"] == "idle" and sum("small ops" in row["label"] for row in rows) <= 1
    picture = tmp_path / "profile.svg"
    assert ET.parse(picture).getroot().tag.endswith("svg")
    drawn = picture.read_bytes()
    chart.draw(result, picture)
    assert picture.read_bytes() == drawn, "the same numbers give the same bytes"


def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measured_ceiling", lambda **compiled: CEILING)
    monkeypatch.setattr(profile, "adds_up", lambda threads: True)  # a busy machine may disturb one of two steps
    monkeypatch.chdir(tmp_path)
    assert main.main(["profile", "shakespeare-char", *WORDS, "--dtype", "fp32", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "% roof",
        "wait ms",
        "missed %",
        "tracing costs",
        "\noptimizer_step ",
        "\nadamw ",
        "classifier",
        "gemm_",
        " idle",
    ):
        assert words in text, words
    folder = tmp_path / "runs" / "profile-shakespeare-char-16x64-fp32"
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "profile.svg", "timeline.json"]
    assert main.main(["profile", "shakespeare-char", *WORDS, "--steps", "1", "--json", "--out", "here"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "here" / "profile.json").read_text())


def test_a_profile_that_does_not_add_up_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measured_ceiling", lambda **compiled: CEILING)
    real = trace.TracedStep
    monkeypatch.setattr(trace, "TracedStep", lambda seconds, *rest: real(1.5 * seconds, *rest))
    assert main.main(["profile", "shakespeare-char", *WORDS, "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "does NOT add up" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["--steps", "0"], ["--steps is '0'", "at least 1"]),
    (["--out", "file"], ["--out file is a file", "expected a folder"]),
    (["--seq", "1000000"], ["seq"]),
    (["--stepps", "3"], ["--stepps", "did you mean '--steps'"]),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main.main(["profile", "shakespeare-char", *argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words), text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
