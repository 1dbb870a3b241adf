"""The tools on a GPU, rehearsed on the driver in Python: a step's launches are all there, in the table and on the timeline."""

import itertools
import json
import subprocess
import sys

import pytest

from barellm.cli import main
from barellm.tools.profile import profile
from barellm.tools.profile.step import opened
from tests.profiling.conftest import CEILING, SMALL, small
from tests.simulators.mock import LAUNCH_MS, Gpu

WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


@pytest.mark.extended
def test_a_profile_has_every_launch_once(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(profile, "measured_ceiling", lambda **compiled: CEILING)
    words = ["profile", "shakespeare-char", *WORDS, "--dtype", "bf16", "--steps", "1", "--device", "cuda", "--out", str(tmp_path)]
    assert main.main(words) == 0
    result = json.loads((tmp_path / "profile.json").read_text())
    with opened(small(train__dtype="bf16"), device="cuda") as (bench, _):
        calls = {name: len(bench.compiled.session.calls[name]) for name in ("forward_backward", "optimizer_step")}
        ops = sum(len(bench.compiled.session.lowered[name].ops) for name in ("forward_backward", "optimizer_step"))
    assert sum(row["count"] for row in result["ops"]) == ops
    assert result["work_s"] == pytest.approx(sum(calls.values()) * LAUNCH_MS / 1e3)
    assert sum(row["s"] for row in result["ops"]) == pytest.approx(result["work_s"])
    assert result["work_s"] + result["idle_s"] == pytest.approx(result["step_s"])
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert len(slices) == sum(calls.values())
    for before, after in itertools.pairwise(slices):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    programs = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert [(e["name"], e["args"]["launches"]) for e in programs] == list(calls.items())
    text = capsys.readouterr().out
    assert "sm_80, 3 multiprocessors" in text and "as usual" in text and "\nforward_backward  " in text and "\nattention " in text


@pytest.mark.extended
def test_a_plan_needs_no_gpu_and_is_the_session_s(gpu, monkeypatch, capsys):
    words = ["plan", "shakespeare-char", *WORDS, "--dtype", "bf16", "--device", "cuda", "--json"]
    assert main.main(words) == 0
    numbers = json.loads(capsys.readouterr().out)
    with opened(small(train__dtype="bf16"), device="cuda") as (bench, facts):
        session = bench.compiled.session
        assert numbers["arena_bytes"] == session.plan.arena_bytes
        assert numbers["programs"]["forward_backward"]["calls"] == len(session.calls["forward_backward"])
        assert {"load", "compile", "map"} <= set(facts["first_step_split"])
    assert (numbers["isa"], numbers["multiprocessors"], numbers["limit_bytes"]) == ("sm_80", 3, gpu.memory)
    monkeypatch.undo()
    assert main.main([*words, "--model.vocab_size", "65"]) == 0  # no driver here: Hopper is taken
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["isa"], numbers["fits"]) == ("sm_90", None) or numbers["limit_bytes"]


@pytest.mark.parametrize("argv, words", [
    (["bench", "step", "shakespeare-char", "--device", "cudda"], ["unknown device 'cudda'", "cuda"]),
    (["inspect", "cast", "--device", "cuda", "--isa", "avx2"], ["--isa is not for --device cuda"]),
    (["inspect", "cast", "--device", "cuda", "--stage", "asm"], ["--stage asm is not for cuda", "sass"]),
    (["inspect", "cast", "--device", "cuda", "--arch", "sm_70"], ["unknown architecture 'sm_70'", "sm_90"]),
    (["inspect", "cast", "--arch", "sm_90"], ["--arch is not for --device cpu"]),
])  # fmt: skip
def test_mistakes_are_one_line(gpu, argv, words, capsys):
    assert main.main(argv) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words)


@pytest.mark.extended
def test_inspect_shows_what_a_kernel_became():
    """In processes of their own: the interpreter of the other tests changes Triton for good."""
    command = "inspect linear_gelu --preset shakespeare-char --device cuda --arch sm_80 --dtype bf16"
    json_text, text = (
        subprocess.run(
            [sys.executable, "-m", "barellm", *command.split(), *more], capture_output=True, text=True, check=True
        ).stdout
        for more in (["--json"], [])
    )
    result = json.loads(json_text)
    assert result["isa"] == "sm_80"
    for kernel in result["kernels"]:
        assert kernel["ops"] == ["linear_gelu"] and kernel["options"]["num_warps"] in (4, 8)
        few = kernel["kernel"].startswith("skinny_gemm")  # a decoded token is no work for tensor cores
        assert kernel["code"]["spills"] == 0 and kernel["code"]["counts"]["FFMA" if few else "HMMA"] > 0
    assert "registers" in text and "HMMA" in text and "shared memory" in text
