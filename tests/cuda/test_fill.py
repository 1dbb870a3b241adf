"""`--fill`: what the stages of gpu-check launch is among what is compiled beforehand. Each stage is rehearsed as on Hopper, on a
driver that does no work, and what it asks the compiler for is compared."""

from importlib import import_module
from math import inf

import pytest

from barellm.cuda import bench, driver
from barellm.cuda import compile as cuda_compile
from barellm.cuda.kernel import Target
from barellm.cuda.tuner import harness, tuner
from barellm.runtime.tuner import decision
from barellm.tools.bench import attentions, gemms
from barellm.tools.plan import roofline
from benchmarks.gpu_check import fill, one_step, small_step
from benchmarks.gpu_check.stages import STAGES, Scale, Stage, rehearsed_on
from tests.simulators.mock import Gpu

SMALL = Scale(small=True, mock=True, limit_s=inf)  # of a stage that would have no time left for some kernels
NOTHING = {"versions", "kernels", "loop", "start"}  # of ours, or on purpose


def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stages set for a rehearsal is as it was when the test ends."""
    for module, name in ((gemms, "MOST_COPIES"), (gemms, "TABLE_SECONDS"), (tuner, "HARNESS")):
        monkeypatch.setattr(module, name, getattr(module, name))
    for name in ("TOKENS", "WIDTH", "PAUSE", "TURN"):
        monkeypatch.setattr(attentions, name, getattr(attentions, name))


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper card whose launches do nothing."""
    made = Gpu(arch=90, sms=132, execute=lambda spec, values, grid: None)
    rehearsed_on(made, monkeypatch)
    as_before(monkeypatch)
    monkeypatch.setattr(harness.Harness, "verify", lambda *_: None)  # nothing is written, so nothing is right
    monkeypatch.setattr(bench.MemoryComparison, "_first", lambda *_: None)
    monkeypatch.setattr(decision.Tuner, "tune", lambda self, problems, **rest: [self.candidates(p) for p in problems])
    roofline.measured_ceiling.cache_clear()  # what is measured once a process
    yield made
    roofline.measured_ceiling.cache_clear()


def rehearse(stage: Stage) -> None:
    """What it launches here, also where the program that would look at it is not installed. The tuner's child is not started."""
    if stage.name == "sanitizer":
        small_step.steps()
        small_step.products(**small_step.SIZES)
    elif stage.name == "counters":
        one_step.main(small=True, seconds=inf)
    else:
        getattr(import_module(f"benchmarks.gpu_check.{stage.module}"), stage.name)(SMALL)


def test_every_stage_that_launches_kernels_says_which():
    assert set(fill.KERNELS) | NOTHING == {s.name for s in STAGES} and not set(fill.KERNELS) & NOTHING


@pytest.mark.parametrize("stage", [s for s in STAGES if s.name in fill.KERNELS], ids=lambda s: s.name)
@pytest.mark.extended
def test_a_stage_finds_its_kernels_among_those_taken_along(stage, gpu):
    rehearse(stage)
    asked = {spec for spec, _ in gpu.known.values()}
    target = Target.of(driver.device())
    taken = set(fill.KERNELS[stage.name](SMALL, target))
    assert asked and not [spec.key for spec in asked - taken]
    if stage.name != "tune":  # whose child would ask for the orders of tiles
        assert len(taken) < 4 * len(asked)


def test_a_kernel_that_is_taken_along_is_not_compiled_again(tmp_path, monkeypatch):
    one = next(iter(fill.rung("plain", fill.FULL, Target())))
    monkeypatch.setattr(fill, "needed", lambda target: {one: None})
    count, nbytes = fill.fill(tmp_path / "cubins", 90)
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cubins"))
    monkeypatch.setattr(cuda_compile, "check_compiler", lambda: pytest.fail("it is compiled again"))
    assert count == 1 and nbytes > 1000 and cuda_compile.compiled([one], 90, processes=1)[one].name == one.name


@pytest.mark.extended
def test_the_full_stages_have_other_kernels_than_a_rehearsal():
    """Those that were left behind once: `plain`'s two, the residual rung, ways with roles, and products in TF32."""
    target = Target()
    assert [s.name for s in fill.rung("plain", fill.FULL, target)].count("gemm") == 2
    kinds = [dict(s.constants).get("EPILOGUE") for s in fill.rung("epilogues", fill.FULL, target)]
    assert {"gelu", "residual", "gelu_backward", "", "add", "start"} <= set(kinds)
    names = [s.name for s in dict.fromkeys(fill.sides(fill.FULL, target))]
    counts = {name: names.count(name) for name in names if "attention" in name and name != "attention_stats"}
    both = {"attention_forward": 2, "attention_dkv": 2, "attention_dq": 2}
    assert counts == both | {"hopper_attention": 1, "hopper_attention_backward": 2}
    tuned = list(fill.tune(fill.FULL, target))
    assert any(dict(s.constants).get("TF32") for s in tuned)
    assert len({dict(s.constants).get("GROUP") for s in tuned if s.name == "gemm"}) > 2  # orders of tiles
    kernels = {s.name for s in fill.needed(target)}
    assert {"block_sparse_attention_dkv", "quantized_mma", "tausworthe_dropout"} <= kernels
