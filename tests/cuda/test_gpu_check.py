"""`make gpu-check`, rehearsed: stages end, fail and hang each by itself; the table of bars says what was reached."""

import json
import os
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from barellm import overrides
from barellm.assembly.machine import build_programs
from barellm.bench.gemms import Product, append
from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program, Store
from benchmarks.gpu_check import __main__ as runner
from benchmarks.gpu_check import bars, clocks, correct, processes, signs, small_step, speed
from benchmarks.gpu_check.stages import GROUPS, STAGES, Scale, Stage, rehearsed_on
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


def test_what_a_stage_kept_outlives_it(tmp_path, monkeypatch):
    """One that fails in the middle, and one that hangs, in a child with a child of its own."""
    (tmp_path / "dying.py").write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "def fails(scale):\n    scale.keep({'rows': [1]})\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def hangs(scale):\n    scale.keep({'rows': [2]})\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0)\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(child.pid))\n    time.sleep(600)\n"
    )
    stages = [Stage("correct", "dying", name, limit, "") for name, limit in (("fails", 60), ("hangs", 4))]
    package = tmp_path / "run.py"
    package.write_text(
        "import sys\nimport benchmarks.gpu_check as package\nfrom benchmarks.gpu_check import __main__ as runner, stages\n"
        f"from benchmarks.gpu_check.stages import Stage\npackage.__path__.append({str(tmp_path)!r})\n"
        f"stages.STAGES = runner.STAGES = {stages}\nsys.exit(runner.main())\n"
    )
    run = processes.run

    def through(command, **options):
        at = command.index("benchmarks.gpu_check")
        return run(
            [*command[: at - 1], str(package), *command[at + 1 :]], environment={"PYTHONPATH": str(ROOT)}, **options
        )

    monkeypatch.setattr(processes, "run", through)
    monkeypatch.setattr(runner, "left_out", lambda stage, done: "")  # no GPU answers here
    assert runner.run_all(stages, tmp_path, small=True, mock=False) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    assert (
        found["fails"]["status"] == "failed" and found["fails"]["rows"] == [1] and found["fails"]["exit_status"] == -11
    )
    assert found["hangs"]["status"] == "ran past its limit" and found["hangs"]["rows"] == [2]
    pid = int((tmp_path / "pid").read_text())
    assert (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_what_stands_on_a_rung_that_broke_is_left_out(tmp_path, capsys):
    """A branch ends with what broke it, and all of them where the GPU does not answer any more; what did not run is no reason."""
    by_name = {s.name: s for s in STAGES}
    good = {"status": "done", "bars": [bars.holds("right", True)]}
    missed, hung = (
        {"status": "done", "bars": [bars.bar("wrong cases", 1, 0, at_most=True)]},
        {"status": "ran past its limit"},
    )
    assert not runner.left_out(by_name["ring"], {"tile": good}) and not runner.left_out(by_name["ring"], {})
    for bad in (missed, hung):
        assert runner.left_out(by_name["ring"], {"tile": bad}) == "tile did not go well"
        assert not runner.left_out(by_name["heads"], {"plain": good, "tile": bad})
    gone = hung | {"gpu_answers": False}
    assert runner.left_out(by_name["heads"], {"plain": good, "tile": gone}) == "since tile the GPU does not answer"
    assert not runner.left_out(by_name["heads"], {"plain": good, "tile": hung | {"gpu_answers": True}})
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
        made = lower_and_plan({"micro": programs["micro"]}, Target())
        calls = made.calls["micro"]
        session = SimpleNamespace(calls={"micro": calls}, target=made.target)
        plays[seq] = [row["met"] for row in correct.played(session, config)]
        assert correct.roles(calls) >= {"tn"}
        if seq == correct.LONG:
            calls[:] = [c for c in calls if not dict(c.spec.constants).get("A_TRANSPOSED")]
            assert [row["met"] for row in correct.played(session, config)] == [False]
    assert plays == {64: [], 1024: [True]}


def test_the_table_says_what_was_reached():
    stages = {
        "step": {
            "status": "done",
            "bars": [bars.bar("faster", 1.2, 1.15, "x"), bars.bar("memory", 9000, 8000, at_most=True)],
        },
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


def test_the_sanitizer_sees_steps_and_every_kind_of_product(monkeypatch, capsys):
    Gpu().install(monkeypatch)
    small_step.steps()
    assert "two steps done" in capsys.readouterr().out
    names = small_step.products(N=48, K=32, tokens=20)
    assert len(names) == len(small_step.PRODUCTS) and set(names) == {"gemm"}  # on sm_80


def test_its_products_are_large_enough_for_hopper_s_kernels():
    for op, mode in small_step.PRODUCTS:
        program = Program(Store(), compute="bf16")
        append(program, Product("", op, 640, 640, 2048, mode), 0)
        names = [call.spec.name for call in lower_and_plan({"p": program}, Target()).calls["p"]]
        assert names[0] == "hopper_gemm", op


@pytest.fixture
def here(monkeypatch):
    """Stages run in this process, on the mock driver. What they set for a rehearsal is as before when the test ends."""
    rehearsed_on(Gpu(), monkeypatch)
    as_before(monkeypatch)

    def run(stage: Stage, *, small: bool, mock: bool) -> tuple[dict, str]:
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


def test_products_of_signs_are_compared_with_popc(monkeypatch):
    """Three rounds in turns; the medians' ratio is the bar of a size that has one."""
    Gpu().install(monkeypatch)
    seconds = {"binary_mma": iter([2.0, 9.0, 3.0]), "binary_matmul": iter([12.0, 11.0, 90.0])}

    def replayed(session, program, calls, **sizes):
        (launch,) = session.lowered[program].launches
        return [next(seconds[launch.spec.name])] * calls

    monkeypatch.setattr(signs.devices, "replay_seconds", replayed)
    monkeypatch.setattr(signs, "SIZES", ((9, 10, 40),))
    monkeypatch.setattr(signs, "ROUNDS", 3)
    found = signs.signs(Scale(small=False, mock=False))
    assert [row["value"] for row in found["bars"]] == [True, True, 4.0] and all(row["met"] for row in found["bars"])
    (row,) = found["products"]
    assert row["tensor cores"] == {"kernel": ["binary_mma"], "s": [2.0, 9.0, 3.0]}
    assert row["popc"] == {"kernel": ["binary_matmul"], "s": [12.0, 11.0, 90.0]}
