"""`make gpu-check`, rehearsed: stages end, fail and hang each by itself; the table of bars says what was reached."""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from barellm.assembly.build import build_programs
from barellm.config import overrides
from barellm.cuda import driver
from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program, Store
from barellm.tools.bench.gemms import Gemm, append
from benchmarks.gpu_check import __main__ as runner
from benchmarks.gpu_check import bars, clocks, correct, fill, first, processes, small_step, speed
from benchmarks.gpu_check.stages import GROUPS, STAGES, Clock, Scale, Stage, rehearsed_on
from tests.cuda.test_fill import as_before
from tests.simulators.mock import Gpu

ROOT = Path(__file__).parents[2]
GROUP_SECONDS, FIRST_SECONDS, ALL_SECONDS = 480, 240, 2160
WITHOUT_MOCK = {"start": "a process of its own has no mock driver"}  # why a stage is skipped there


def test_groups_fit_into_ten_minutes_each():
    limits = {group: sum(s.limit_s for s in STAGES if s.group == group) for group in GROUPS}
    assert max(limits.values()) <= GROUP_SECONDS and sum(limits.values()) <= ALL_SECONDS
    assert limits["first"] <= FIRST_SECONDS and max(s.limit_s for s in STAGES if s.group == "first") <= 40
    assert [s.name for s in runner.chosen("speed,versions")] == ["versions", "step", "gemm", "sides", "start"]
    for i, stage in enumerate(STAGES):
        assert set(stage.after) <= {s.name for s in STAGES[:i]}, stage
    assert [s.group for s in STAGES] == sorted((s.group for s in STAGES), key=GROUPS.index)
    with pytest.raises(SystemExit, match="no stage or group is named 'speeed'"):
        runner.chosen("speeed")


def test_the_page_has_the_stages():
    text = (ROOT / "docs" / "cuda.md").read_text()
    rows = text.partition("<!-- stages -->")[2].partition("<!-- /stages -->")[0].strip().splitlines()[2:]
    assert rows == [f"| {s.group} | {s.name} | {s.limit_s} s | {s.what} |" for s in STAGES]


@pytest.mark.extended
def test_a_stage_that_fails_or_hangs_does_not_stop_the_others(tmp_path, capsys):
    broken = Stage("correct", "correct", "nonsense", 60, "no such stage")
    hanging = Stage("correct", "correct", "versions", 0, "no time for it")
    good = Stage("correct", "correct", "versions", 60, "what is installed")
    for stage in (broken, hanging):
        found, _ = runner.run_child(stage, small=True, mock=True)
        assert found["status"] == {"nonsense": "failed", "versions": "ran past its limit"}[stage.name]
    assert runner.run_all([broken, good], tmp_path, small=True, mock=True) == 1
    result = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    assert result["nonsense"]["status"] == "failed" and "Traceback" in result["nonsense"]["log"]
    assert result["versions"]["status"] == "done" and result["versions"]["device"]["gpu"] == "Mock GPU"
    text = capsys.readouterr().out
    assert "did not end well: nonsense" in text and "triton is 3.6.0" in text
    assert "Traceback" in (tmp_path / "log.txt").read_text() and result["versions"]["machine"]["gpu"] == "Mock GPU"


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Says what the stages' processes do before they begin: lines of Python, which have `stages` and `runner`."""
    run = processes.run

    def begin_with(lines: str) -> None:
        script = tmp_path / "run.py"
        script.write_text(
            "import sys\nimport benchmarks.gpu_check as package\n"
            f"from benchmarks.gpu_check import __main__ as runner, stages\n{lines}\nsys.exit(runner.main())\n"
        )

        def through(command, **options):
            at = command.index("benchmarks.gpu_check")
            command = [*command[: at - 1], str(script), *command[at + 1 :]]
            return run(command, environment={"PYTHONPATH": str(ROOT)}, **options)

        monkeypatch.setattr(processes, "run", through)

    return begin_with


def test_what_a_stage_kept_outlives_it(tmp_path, monkeypatch, children):
    """One that fails in the middle, and one that hangs, in a child with a child of its own."""
    (tmp_path / "dying.py").write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "def fails(scale):\n    scale.keep({'rows': [1]})\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def hangs(scale):\n    scale.keep({'rows': [2]})\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0)\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(child.pid))\n    time.sleep(600)\n"
    )
    every = [Stage("correct", "dying", name, limit, "") for name, limit in (("fails", 60), ("hangs", 4))]
    children(
        f"from benchmarks.gpu_check.stages import Stage\npackage.__path__.append({str(tmp_path)!r})\n"
        f"runner.EVERY = (*{every}, stages.PROBE)"
    )
    assert runner.run_all(every, tmp_path, small=True, mock=False) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    assert found["fails"]["status"] == "failed" and found["fails"]["rows"] == [1] and found["fails"]["exit_status"] == -11
    assert found["hangs"]["status"] == "ran past its limit" and found["hangs"]["rows"] == [2]
    assert found["fails"]["gpu_answers"] is None  # there is none here
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


NONSENSE = Stage("correct", "correct", "nonsense", 60, "no such stage")
AFTER_IT = Stage("correct", "correct", "versions", 60, "what is installed")


@pytest.mark.extended
def test_an_error_of_the_probe_is_no_lost_gpu(tmp_path, children):
    """It calls what is not there: the other stages run."""
    children("from benchmarks.gpu_check import first\nfirst.driver.Context = None")
    assert runner.run_all([NONSENSE, AFTER_IT], tmp_path, small=True, mock=True) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    assert found["nonsense"]["gpu_answers"] is None and found["versions"]["status"] == "done"


def test_a_context_that_is_lost_is_a_lost_gpu(tmp_path, children, capsys):
    children("from tests.simulators.mock import Gpu\nbefore = Gpu.install\n"
             "def install(self, patch):\n    before(self, patch)\n    self.errors['cuStreamQuery'] = 719\n"
             "Gpu.install = install")  # fmt: skip
    assert runner.run_all([NONSENSE, AFTER_IT], tmp_path, small=True, mock=True) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    assert found["nonsense"]["gpu_answers"] is False and found["versions"]["status"] == "left out"
    assert "since nonsense the GPU does not answer" in capsys.readouterr().out


@pytest.mark.parametrize("status, answers", [(719, False), (2, "CUDA_ERROR_OUT_OF_MEMORY"), (0, True)])
def test_the_probe_believes_in_a_lost_context_alone(monkeypatch, status, answers):
    gpu = Gpu()
    gpu.install(monkeypatch)
    gpu.errors |= {"cuMemAlloc": status} if status else {}
    if isinstance(answers, str):
        with pytest.raises(driver.DriverError, match=answers):
            first.probe(Scale(small=True, mock=True))
    else:
        assert first.probe(Scale(small=True, mock=True))["answers"] is answers


def test_other_bytes_than_were_written_are_no_lost_gpu(monkeypatch):
    Gpu().install(monkeypatch)
    monkeypatch.setattr(driver.DeviceMemory, "fill", lambda *_: None)
    with pytest.raises(AssertionError, match=r"512 bytes of 7 are read as \[255\]"):
        first.probe(Scale(small=True, mock=True))


def test_a_probe_past_its_limit_is_a_lost_gpu_once_it_has_asked():
    late = "ran past its limit"
    assert runner.answers({"status": late, "begun": True}) is False
    assert runner.answers({"status": late, "begun": False}) is None
    assert runner.answers({"status": "failed", "begun": True}) is None
    assert runner.answers({"status": "done", "begun": True, "answers": True}) is True


@pytest.mark.parametrize("begins", [True, False])
def test_a_limit_counts_from_where_the_work_begins(tmp_path, monkeypatch, begins):
    """Of a process that compiles for longer than its limit, and of one that never begins, which may wait for `start_s`. No time is
    measured: the process goes on when it was looked at three times."""
    go, begun, wait, limit_s, looks = tmp_path / "go", tmp_path / "begun", processes._wait, 12.5, []
    lines = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
    lines += f"pathlib.Path({str(begun)!r}).touch()" if begins else ""

    def watched(process, seconds):
        looks.append((seconds, begun.exists()))
        if len(looks) == 3 and begins:
            go.touch()
        if seconds == limit_s and not begins:
            return None  # as if it had passed
        return wait(process, seconds if seconds == processes.LOOK_S else 60.0)

    monkeypatch.setattr(processes, "_wait", watched)
    if not begins:
        now = iter(range(100))
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(now)))
    command = [sys.executable, "-c", lines]
    done = processes.run(command, limit_s=limit_s, begun=begun, start_s=600.0 if begins else 6.0)
    (limited,) = (i for i, (seconds, _) in enumerate(looks) if seconds == limit_s)
    assert done.status == (0 if begins else None)
    assert all(look == (processes.LOOK_S, False) for look in looks[: limited - 1]) and looks[limited][1] is begins
    assert begins or limited == 5


def test_a_rung_s_time_begins_with_its_first_launch(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(driver, "call", lambda name, *_: seen.append((name, (tmp_path / "begun").exists())))
    clock = Clock(tmp_path / "begun")
    clock.began -= 1000
    scale = Scale(small=True, mock=True, limit_s=40.0, clock=clock)
    assert scale.left_s == 1.0
    with clock.at_first_launch():
        driver.call("cuMemAlloc", 1)
        assert scale.left_s == 1.0
        driver.call("cuLaunchKernelEx", 1, 2, 3, 4)
        began = clock.began
        driver.call("cuGraphLaunch", 1, 2)
    driver.call("cuGraphLaunch", 1, 2)
    assert seen == [("cuMemAlloc", False), *[("cuLaunchKernelEx", True), ("cuGraphLaunch", True), ("cuGraphLaunch", True)]]
    assert clock.began == began and scale.left_s > 1.0


def test_a_rung_tells_that_it_has_launched(tmp_path):
    """The stage itself, in its process; one that launches nothing does not."""
    by_name = {s.name: s for s in STAGES}
    found, _ = runner.run_child(by_name["plain"], small=True, mock=True)
    assert found["status"] == "done" and found["begun"]
    assert by_name["plain"].start_s and not by_name["kernels"].start_s


def test_a_short_stage_has_time_for_its_work():
    """Ten seconds less a margin of twelve were none: a rung proved nothing, and missed no bar."""
    for stage in STAGES:
        assert Scale(small=False, mock=False, limit_s=stage.limit_s).left_s > stage.limit_s / 2, stage.name


def test_a_rung_without_time_has_not_gone_well(monkeypatch):
    Gpu().install(monkeypatch)
    found = first.RUNGS["plain"].prove(Scale(small=True, mock=True, limit_s=0.0))
    assert [row["left out"] for row in found["cases"]] == ["no time"] * 2
    assert not bars.passed({"plain": {"status": "done", **found}})


# --- compiling ---


def test_kernels_are_compiled_before_any_stage_that_launches():
    names = lambda asked: [s.name for s in runner.compiled_first(runner.chosen(asked))]  # noqa: E731
    assert names("versions,plain") == ["versions", "compile", "plain"] and names("gemm") == ["compile", "gemm"]
    assert names("versions") == ["versions"]


def test_the_stages_kernels_are_compiled_stage_by_stage(monkeypatch):
    """What one of them cannot compile is told, and no reason to leave out the others."""
    gpu = Gpu()
    gpu.install(monkeypatch)
    kept: list[dict] = []
    scale = Scale(small=True, mock=True, keep=kept.append, stages=("versions", "plain", "tile"))
    found = fill.compile(scale)
    assert [(row["stage"], row["kernels"] > 0) for row in found["stages"]] == [("plain", True), ("tile", True)]
    assert {spec for spec, _ in gpu.known.values()} == {
        spec for name in ("plain", "tile") for spec in fill.KERNELS[name](scale, Target.of(driver.device()))
    }
    assert bars.passed({"compile": {"status": "done", **found}}) and len(kept) == 2

    def broken(scale, target):
        raise ValueError("ptxas says no")

    monkeypatch.setitem(fill.KERNELS, "plain", broken)
    found = fill.compile(scale)
    assert found["stages"][0]["wrong"] == "ValueError: ptxas says no" and found["stages"][1]["kernels"]
    assert not bars.passed({"compile": {"status": "done", **found}})
    assert not runner.left_out(runner.chosen("plain")[0], {"compile": {"status": "failed"}})
    found = fill.compile(Scale(small=True, mock=True, limit_s=0.0, stages=("plain",)))
    assert found["stages"] == [{"stage": "plain", "left out": "no time"}]


# --- rungs ---


def test_what_stands_on_a_rung_that_broke_is_left_out(tmp_path, capsys):
    """A branch ends with what broke it, and all of them where the GPU does not answer any more; what did not run is no reason."""
    by_name = {s.name: s for s in STAGES}
    good = {"status": "done", "bars": [bars.holds("right", True)]}
    missed, hung = ({"status": "done", "bars": [bars.bar("wrong cases", 1, 0, at_most=True)]}, {"status": "ran past its limit"})
    assert not runner.left_out(by_name["ring"], {"tile": good}) and not runner.left_out(by_name["ring"], {})
    for bad in (missed, hung):
        assert runner.left_out(by_name["ring"], {"tile": bad}) == "tile did not go well"
        assert not runner.left_out(by_name["heads"], {"plain": good, "tile": bad})
        for name in ("tile", "heads"):  # other kernels: what `plain` found says nothing about them
            assert not runner.left_out(by_name[name], {"plain": bad})
        assert runner.left_out(by_name["works"], {"plain": bad}) == "plain did not go well"
    gone = hung | {"gpu_answers": False}
    assert runner.left_out(by_name["heads"], {"plain": good, "tile": gone}) == "since tile the GPU does not answer"
    for answers in (True, None):
        assert not runner.left_out(by_name["heads"], {"plain": good, "tile": hung | {"gpu_answers": answers}})
    broken = Stage("first", "first", "nonsense", 60, "no such rung")
    next_one = Stage("first", "correct", "versions", 60, "stands on it", ("nonsense",))
    assert runner.run_all([broken, next_one], tmp_path, small=True, mock=True) == 1
    result = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    assert result["nonsense"]["gpu_answers"] is True and result["versions"]["status"] == "left out"
    assert "left out: nonsense did not go well" in capsys.readouterr().out


def test_clocks_are_summed_up():
    text = "1755, 2619, 688.10, 61, 100\n1980, 2619, [N/A], 60, 100\n1980, 2619, 300, 59, 40\n1605, 26"
    found = clocks.summary(text)
    assert found["samples"] == 2 and found["sm_mhz"] == [1755, 1867.5, 1980] and found["watts"] == [300, 494.05, 688.1]
    assert clocks.summary("") == {}


def test_clocks_are_watched_while_a_stage_runs(tmp_path, monkeypatch):
    """By a program that is called as nvidia-smi is, five times a second, and ended with the stage."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho $$ > {tmp_path}/pid\n'
        "echo 1755, 2619, 688.10, 61, 100\necho 1980, 2619, 300, 60, 40\necho noise >&2\n"
        f"touch {tmp_path}/ready\nexec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with clocks.watched() as found:
        assert found == {}
        end = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.01)
    assert found["samples"] == 2 and found["sm_mhz"] == [1755, 1867.5, 1980] and found["busy_percent"] == [40, 70, 100]
    assert (tmp_path / "arguments").read_text().split() == [
        "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu", "--format=csv,noheader,nounits",
        "--loop-ms=200",
    ]  # fmt: skip
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with clocks.watched() as found:
        pass
    assert found == {}


def test_four_long_sequences_are_all_hopper_s():
    """As the stages `graph`, `equal` and `determinism` run them; of four short ones Triton does some."""
    plays = {}
    for seq in correct.CASES:
        config = correct.model(Scale(small=False, mock=False), seq=seq)
        programs = build_programs(overrides.changed(config, {"model.layers": 1}))
        made = lower_and_plan({"forward_backward": programs["forward_backward"]}, Target())
        calls = made.calls["forward_backward"]
        session = SimpleNamespace(calls={"forward_backward": calls}, target=made.target)
        plays[seq] = [row["met"] for row in correct.played(session, config)]
        assert correct.roles(calls) >= {"tn"}
        if seq == correct.LONG:
            calls[:] = [c for c in calls if not dict(c.spec.constants).get("A_TRANSPOSED")]
            assert [row["met"] for row in correct.played(session, config)] == [False]
    assert plays == {64: [], 1024: [True]}


def test_the_table_says_what_was_reached():
    stages = {
        "step": {"status": "done", "bars": [bars.bar("faster", 1.2, 1.15, "x"), bars.bar("memory", 9000, 8000, at_most=True)]},
        "gemm": {"status": "done", "bars": [bars.bar("of cuBLAS", None, 0.95), bars.holds("equal", True)]},
        "start": {"status": "done", "skipped": "no peer"},
    }
    lines = bars.table(stages)
    verdicts = {line.split()[0]: line for line in lines}
    assert verdicts["faster"].endswith("met") and "1.2x" in verdicts["faster"] and ">= 1.15x" in verdicts["faster"]
    assert verdicts["memory"].endswith("MISSED") and "<= 8,000" in verdicts["memory"]
    assert verdicts["of"].endswith("not measured") and verdicts["start"].endswith("no peer")
    assert lines[-1] == "2 bars met, 1 missed, 1 not measured"
    assert not bars.passed(stages)
    assert bars.passed({"gemm": stages["gemm"]})
    assert not bars.passed({"gemm": {"status": "failed"}})


def test_llmc_needs_what_its_allocations_add_up_to():
    """MiB at B 64: 25,440 of activations without recompute and 18,912 with the most of it, beside 16 bytes a parameter."""
    found = speed.llmc_mib(64)
    assert found["-r 0"] - found["-r 2"] == 25440 - 18912
    assert found["-r 0"] == pytest.approx(25440 + 124_475_904 * 16 / 2**20 + 32)


@pytest.mark.extended
def test_the_sanitizer_sees_steps_and_every_kind_of_product(monkeypatch, capsys):
    Gpu().install(monkeypatch)
    small_step.steps()
    assert "two steps done" in capsys.readouterr().out
    names = small_step.products(N=48, K=32, tokens=20)
    assert len(names) == len(small_step.PRODUCTS) and set(names) == {"gemm"}  # on sm_80


def test_its_products_are_large_enough_for_hopper_s_kernels():
    for op, mode in small_step.PRODUCTS:
        program = Program(Store(), compute="bf16")
        append(program, Gemm("", op, 640, 640, 2048, mode), 0)
        names = [call.spec.name for call in lower_and_plan({"p": program}, Target()).calls["p"]]
        assert names[0] == "hopper_gemm", op


@pytest.fixture
def here(monkeypatch):
    """Stages run in this process, on the mock driver. What they set for a rehearsal is as before when the test ends."""
    rehearsed_on(Gpu(), monkeypatch)
    as_before(monkeypatch)

    def run(stage: Stage, *, small: bool, mock: bool, stages: object) -> tuple[dict, str]:
        found = getattr(import_module(f"benchmarks.gpu_check.{stage.module}"), stage.name)(Scale(small, mock))
        return {"status": "done", "seconds": 0.0, **json.loads(json.dumps(found))}, ""

    monkeypatch.setattr(runner, "run_child", run)


@pytest.mark.extended
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("stage", [s.name for s in STAGES if s.name != "versions"])
def test_every_stage_runs_on_the_mock(stage, tmp_path, capfd):
    assert runner.run_all(runner.chosen(stage), tmp_path, small=True, mock=True) == 0, capfd.readouterr().out[-4000:]
    found = json.loads((tmp_path / "gpu-check.json").read_text())["stages"][stage]
    assert found["status"] == "done"
    assert found.get("skipped") == WITHOUT_MOCK.get(stage) or "is not on the PATH" in found["skipped"]
    assert all(row["met"] is not False for row in found.get("bars", []))
