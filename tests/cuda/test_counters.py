"""The stage `counters`: a profiler is shown every kernel of a step, and a program that is called as ncu is gives its table."""

import json
import os
import sys
from math import inf

import pytest

from benchmarks.gpu_check import counters, one_step
from benchmarks.gpu_check.bars import passed
from benchmarks.gpu_check.stages import Scale
from tests.simulators.mock import Gpu

# It has the list of metrics, words in between, and the table, of three kernels or fewer; what it was asked for is kept.
NCU = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
told = json.loads((folder / "told.json").read_text())
if "--query-metrics" in sys.argv:
    print("Device Mock GPU", *(f"{{name:<40}} words" for name in told["known"]), sep="\\n")
    sys.exit(told.get("query_status", 0))
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
with open(folder / "asked.txt", "a") as asked:
    print(*sys.argv[1:], file=asked)
if len(metrics) > told.get("most", 100):
    sys.exit("==ERROR== Failed to find metric")
print("==PROF== Connected to process 7")
print(json.dumps({{"launched": told["launched"]}}))
print('"ID","Process ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"')
for i, name in enumerate(told["counted"]):
    for metric in metrics:
        print(f'"{{i}}","7","{{name}}(int)","(128, 1, 1)","({{i + 1}}, 1, 1)","{{metric}}","%","1,{{i}}00.5"')
print("==PROF== Disconnected")
"""
STEP = ["hopper_gemm", "attention_dq", "adamw"]
KNOWN = sorted({name.partition(".")[0] for name in counters.METRICS if not name.startswith("launch__")})


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts such a program on the PATH; what it tells, and the stage's result."""
    (tmp_path / "ncu").write_text(NCU.format(python=sys.executable, folder=str(tmp_path)))
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def result(**told):
        told = {"known": KNOWN, "launched": STEP, "counted": STEP} | told
        (tmp_path / "told.json").write_text(json.dumps(told))
        (tmp_path / "asked.txt").write_text("")
        found = counters.counters(Scale(small=True, mock=False, limit_s=60))
        return found, [line.split() for line in (tmp_path / "asked.txt").read_text().splitlines()]

    return result


def good(found):
    return passed({"counters": {"status": "done", **found}})


@pytest.mark.extended
def test_every_kernel_of_a_step_is_shown_to_the_profiler_once(monkeypatch):
    """Each name, in a step of its own, and then each other specialisation: none twice."""
    gpu = Gpu()
    gpu.install(monkeypatch)
    launched = one_step.main(small=True, seconds=inf)
    gpu.launched.clear()
    names = [spec.name for spec in gpu.profiled]
    first = names[: len(launched)]
    assert sorted(first) == sorted(launched) and len(set(first)) == len(first)
    assert len(set(gpu.profiled)) == len(gpu.profiled) > len(launched)
    # These are what a step spends its time in; on sm_90 products have another name.
    step = {"gemm", "attention_forward", "attention_dkv", "attention_dq", "row_losses", "layernorm_backward", "adamw"}
    assert step <= set(launched)


@pytest.mark.extended
def test_steps_go_on_when_the_time_for_counting_is_over(monkeypatch):
    gpu = Gpu()
    gpu.install(monkeypatch)
    assert "adamw" in one_step.main(small=True, seconds=-1.0) and not gpu.profiled


def test_the_table_has_a_row_for_each_launch(ncu):
    found, ((*options, seconds),) = ncu()
    assert good(found) and found["missing"] == found["metrics_left_out"] == [] and found["kernels"] == 3
    rows = found["files"]["counters.json"]["rows"]
    assert [row["kernel"] for row in rows] == STEP and [row["grid"] for row in rows][1] == "(2, 1, 1)"
    assert set(rows[2]) == {"kernel", "grid", *counters.METRICS}
    assert rows[2]["launch__registers_per_thread"] == "1,200.5 %"
    assert options[:3] == ["--csv", "--profile-from-start", "off"] and options[-1] == "benchmarks.gpu_check.one_step"
    assert 30 < float(seconds) < 50  # it ends before the stage does


def test_a_kernel_of_the_step_that_is_not_counted_is_a_bar_missed(ncu):
    found, _ = ncu(counted=STEP[:2])
    assert not good(found) and found["missing"] == ["adamw"]


def test_a_metric_that_is_not_known_is_left_out(ncu):
    gmma = "sm__inst_executed_pipe_tensor_op_gmma"
    found, ((*_, metrics, _, _, _, _),) = ncu(known=[name for name in KNOWN if name != gmma])
    assert found["metrics_left_out"] == [f"{gmma}.sum"] and good(found)
    assert metrics.split(",") == [name for name in counters.METRICS if not name.startswith(gmma)]
    for told in ({"known": []}, {"query_status": 1}):  # no list: it is asked for all
        found, _ = ncu(**told)
        assert found["metrics_left_out"] == [] and good(found)


def test_without_counters_it_still_has_times(ncu):
    """As where a metric is unknown all the same, or where only the administrator may count."""
    found, asked = ncu(most=1)
    assert len(asked) == 2 and good(found) and found["metrics_left_out"] == list(counters.METRICS[1:])
    assert set(found["files"]["counters.json"]["rows"][0]) == {"kernel", "grid", counters.METRICS[0]}
    with pytest.raises(RuntimeError, match="Failed to find metric"):
        ncu(most=0)
    found, asked = ncu(counted=[])
    assert len(asked) == 2 and not good(found) and found["missing"] == sorted(STEP)
