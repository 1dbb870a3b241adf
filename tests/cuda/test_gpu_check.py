"""`make gpu-check`, rehearsed: stages end, fail and hang each by itself; the table of bars says what was reached."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from barellm.bench.gemms import Product, append
from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program, Store
from benchmarks.gpu_check import __main__ as runner
from benchmarks.gpu_check import bars, processes, small_step, speed
from benchmarks.gpu_check.stages import GROUPS, STAGES, Stage
from tests.simulators.mock import Gpu

ROOT = Path(__file__).parents[2]
GROUP_SECONDS, ALL_SECONDS = 480, 1440
WITHOUT_MOCK = {"start": "a process of its own has no mock driver"}  # why a stage is skipped there


def test_groups_fit_into_ten_minutes_each():
    limits = {group: sum(s.limit_s for s in STAGES if s.group == group) for group in GROUPS}
    assert max(limits.values()) <= GROUP_SECONDS and sum(limits.values()) <= ALL_SECONDS
    assert [s.name for s in runner.chosen("speed,versions")] == ["versions", "step", "gemm", "start"]
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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [s.name for s in STAGES if s.name != "versions"])
def test_every_stage_runs_on_the_mock(stage, tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--small",
        "--mock",
        "--stages",
        stage,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads((tmp_path / "gpu-check.json").read_text())["stages"][stage]
    assert found["status"] == "done"
    assert found.get("skipped") == WITHOUT_MOCK.get(stage) or "compute-sanitizer" in found["skipped"]
    assert all(row["met"] is not False for row in found.get("bars", []))
