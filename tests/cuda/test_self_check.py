"""Kernels that are wrong, hang or crash are found before a run uses them: in a child on the driver in Python, with the faults that
`self_check_child.py` injects, and in processes on a libcuda.so.1 in C (test_libcuda.py)."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from barellm import models
from barellm.assembly import build
from barellm.assembly.self_check import small
from barellm.cuda import self_check, tuning
from barellm.cuda.kernel import Target
from barellm.cuda.tuning import AttentionProblem, GemmProblem
from barellm.errors import UserError
from barellm.runtime.artefacts import cache_folder
from barellm.runtime.tuner.harness import Wrong
from barellm.tools.profile.self_check import Harness
from tests.cuda.self_check_child import installed

CHILD = "tests.cuda.self_check_child"
HOPPER, TRITON = "Hopper GEMM nt bf16", "Triton GEMM nt fp32"
HOPPER_ATTENTION, TRITON_ATTENTION = "Hopper attention forward", "Triton attention forward"
TINY = {"layers": 1, "heads": 2, "d_model": 16, "vocab_size": 37, "padded_vocab": 40, "max_seq": 9}


def tiny(name: str = "shakespeare-muon", dtype: str = "bf16"):
    """A step of next to nothing."""
    config = small(models.preset(name))
    assert config is not None
    train = replace(config.train, seq=6, dtype=dtype)
    return replace(config, model=replace(config.model, **TINY), train=train)


@pytest.fixture
def check(monkeypatch, tmp_path, capfd):
    """Runs the self-check of two GEMMs and one attention, with a fault; gives the backend, and the lines on stderr."""
    monkeypatch.delenv("BARELLM_SELF_CHECK")
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setattr(self_check, "CHILD", CHILD)
    monkeypatch.setattr(self_check.Worker, "OPENING_S", 0.0)
    works = {
        HOPPER: GemmProblem("nt", "bf16", 64, 64, 64, "hopper"),
        HOPPER_ATTENTION: AttentionProblem("forward", "bf16", 1, 9, 1, 64),
        TRITON: GemmProblem("nt", "fp32", 9, 7, 5),
        TRITON_ATTENTION: AttentionProblem("forward", "fp32", 1, 5, 1, 8),
    }

    def run(fault: str = "", *, arch: int = 90, limit: float = 20.0):
        installed(monkeypatch, "", arch=arch)
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setenv("FAULT_ARCH", str(arch))
        monkeypatch.setattr(self_check, "LIMIT_S", limit)
        chosen = {name: (work, work.default(arch)) for name, work in works.items() if arch == 90 or name.startswith("Triton")}
        monkeypatch.setattr(self_check, "_cases", lambda config, programs, target: (chosen, {}))
        self_check._tell.cache_clear()
        self_check._database.cache_clear()
        capfd.readouterr()
        try:
            found = self_check.proven.__wrapped__("barellm", tiny(), None)
        except UserError as error:
            found = str(error)
        return found, capfd.readouterr().err

    return run


def test_what_is_right_is_checked_once_and_then_believed(check, monkeypatch):
    found, lines = check()
    assert found == {"matmul": "barellm"} and lines.count("\n") == 1 and "Mock GPU: its first use with these kernels" in lines
    (kept,) = (cache_folder("checks")).glob("*.json")
    assert kept.read_text().count('"wrong": ""') == 4

    def never(*_, **__):
        raise AssertionError("a child was started")

    monkeypatch.setattr(self_check, "Worker", never)
    assert check() == ({"matmul": "barellm"}, "")


@pytest.mark.parametrize(
    "fault, case, why",
    [
        ("hopper_gemm:wrong", HOPPER, "wrong values"),
        pytest.param("hopper_gemm:hangs", HOPPER, "it hangs", marks=pytest.mark.extended),
        pytest.param("hopper_gemm:crashes", HOPPER, "ended by SIGSEGV", marks=pytest.mark.extended),
        pytest.param("hopper_attention:wrong", HOPPER_ATTENTION, "wrong values", marks=pytest.mark.extended),
        pytest.param("hopper_attention:hangs", HOPPER_ATTENTION, "it hangs", marks=pytest.mark.extended),
    ],
)
def test_tritons_kernel_takes_the_place_of_hoppers(check, monkeypatch, fault, case, why):
    """And the verdict stays, with its line, in the next process too."""
    found, lines = check(fault, limit=6.0)
    gemm = case == HOPPER
    assert found == ({"matmul": "triton"} if gemm else {"matmul": "barellm", "plain_attention": True})
    _, warning = lines.splitlines()
    assert f"warning: {case} fails on Mock GPU: " in warning and why in warning
    assert warning.endswith(f"Triton's {'GEMM' if gemm else 'attention'} takes its place; {self_check.REPORT}")
    monkeypatch.setattr(self_check, "Worker", None)
    assert check() == (found, warning + "\n")


@pytest.mark.extended
@pytest.mark.parametrize(
    "fault, case, why",
    [
        ("gemm:wrong", TRITON, "wrong values"), ("gemm:crashes", TRITON, "ended by SIGSEGV"),
        ("attention_forward:wrong", TRITON_ATTENTION, "wrong values"), ("attention_forward:hangs", TRITON_ATTENTION, "hangs"),
    ],
)  # fmt: skip
def test_what_nothing_can_replace_is_refused_with_one_line(check, fault, case, why):
    found, lines = check(fault, arch=80, limit=6.0)
    assert found.startswith(f"{case} fails on Mock GPU: ") and why in found
    assert found.endswith(f"use --device cpu; {self_check.REPORT}") and lines.count("\n") == 1
    assert check(arch=80)[0] == found


def test_what_is_no_kernels_fault_is_not_remembered(check, monkeypatch):
    monkeypatch.setattr(self_check, "CHILD", "no_such_module")
    monkeypatch.setattr(self_check, "FAULTS", ("wrong values",))
    found, _ = check()
    assert found.startswith("the self-check of Mock GPU cannot run: its process ended with 1: ModuleNotFoundError")
    assert not list(cache_folder("checks").glob("*.json"))


def in_small(config, fault: str = "") -> dict[str, float]:
    """Kernel -> its largest error over the bound, in this process."""
    patch = pytest.MonkeyPatch()
    with patch.context():
        installed(patch, fault)
        harness = object.__new__(Harness)
        harness.worst = {}
        if fault:
            with pytest.raises(Wrong, match="wrong values"):
                harness._run_programs(config)
        else:
            harness._run_programs(config)
        patch.undo()
        return harness.worst


@pytest.mark.extended
@pytest.mark.parametrize("name, dtype", [("shakespeare-muon", "bf16"), ("default", "fp16"), ("llama-15m", "fp32")])
def test_every_kernel_of_a_small_model_is_held_against_float64(name, dtype):
    """Right ones are far from the bound, and one wrong word of a kernel is far above it."""
    config = tiny(name, dtype)
    right, wrong = in_small(config), in_small(config, "all:wrong")
    assert len(right) > 15 and max(right.values()) < 0.5
    assert {kernel for kernel in right if not wrong.get(kernel, 0.0) > 1} == set()


def test_cases_are_all_gemms_and_attention_of_the_card(monkeypatch):
    monkeypatch.setattr(self_check, "specs_of", lambda *_: {})
    config = small(models.preset("gpt2-124m"))
    assert config is not None
    config = replace(config, train=replace(config.train, dtype="bf16"))
    target = Target(arch=90)
    hopper = {name for name in self_check._cases(config, {}, target)[0] if name.startswith("Hopper")}
    attention = {name.split(" bf16")[0] for name in hopper if "attention" in name}
    assert attention == {f"Hopper attention {role}" for role in ("forward", "keys", "queries")}
    assert {name for name in hopper if "GEMM" in name} == {
        f"Hopper GEMM {kind} bf16{epilogue}"
        for kind, epilogues in {"nt": ("", " gelu", " residual", " gelu_backward"), "nn": ("", " gelu_backward"),
                                "tn": ("", " add", " start")}.items()
        for epilogue in epilogues
    }  # fmt: skip
    names = [*self_check._cases(config, {}, replace(target, arch=89))[0]]
    assert len(names) == 6 and all(name.startswith("Triton") for name in names)
    assert not [n for n in self_check._cases(config, {}, replace(target, matmul="triton"))[0] if "Hopper GEMM" in n]


def test_plain_attention_is_tritons(monkeypatch):
    problem = AttentionProblem("forward", "bf16", 2, 300, 12, 64)
    found = [tuning.select_config(Target(arch=90, plain_attention=plain), problem).warp_specialized for plain in (False, True)]
    assert found == [True, False]


@pytest.mark.parametrize("name", [name for name in models.presets() if not name.startswith("speedrun")])
def test_each_preset_has_a_small_size(name):
    config = small(build.resolved(models.preset(name), "cpu"))
    assert config is not None
    programs = build.build_programs(config)
    assert programs.keys() >= {"init", "forward_backward", "eval", "decode"}
    assert sum(t.size for t in programs["init"].store.of_role("parameter")) < 6e6


WITHOUT = """
import ctypes, sys

def none(name, *_):
    raise OSError(f"{name}: cannot open shared object file")

ctypes.CDLL = none
from barellm import models
from barellm.assembly import build
assert build.chosen_device("auto", models.preset("gpt2-124m")) == "cpu"
assert not [name for name in sys.modules if name == "cuda" or name.startswith(("cuda.", "barellm.cuda", "triton"))]
"""


def test_without_a_driver_nothing_is_imported_and_nothing_printed():
    environment = {k: v for k, v in os.environ.items() if k != "BARELLM_SELF_CHECK"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_stays_where_it_was_unless_that_was_a_gpu(monkeypatch):
    config = models.preset("default")
    monkeypatch.setattr(build, "automatic", lambda prove: "cuda")
    assert build.chosen_device("auto", config) == "cuda"
    assert build.chosen_device("auto", config, before="cuda") == "cuda"
    assert build.chosen_device("auto", config, before="cpu") == "cpu"
    assert build.chosen_device("auto", config, before="reference") == "reference"
    assert build.chosen_device("auto", config, ranks=2) == "cpu"
    assert build.chosen_device("reference", config, before="cpu") == "reference"
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        build.chosen_device("gpu", config)


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-124m", "qwen3-0.6b", "speedrun-small"])
def test_the_tuner_lowers_every_case(name):
    """To the kernel that it is named by."""
    config = models.preset(name)
    config = replace(config, train=replace(config.train, dtype="bf16"))
    for arch in (80, 90):
        target = Target(arch=arch)
        for case, (problem, how) in self_check._cases(small(config) or config, {}, target)[0].items():
            specs = self_check.specs_of(problem, [self_check.Candidate(how)], target)
            assert any("hopper" in spec.name for spec in specs) == case.startswith("Hopper"), case
