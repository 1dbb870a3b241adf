"""An NVIDIA GPU as a backend: open a session, say what the machine is."""

from contextlib import closing
from functools import cache
from typing import Any

from barellm.cuda import driver, self_check
from barellm.cuda.bench import Bench
from barellm.cuda.kernel import Target
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.program.builder import Program
from barellm.program.planner import Plan
from barellm.runtime import rates


def open_session(programs: dict[str, Program], **options: Any) -> CudaSession:
    """Plan and compile `programs`, and take the GPU's memory for their arena. `options`: the GEMM backend `matmul`, whether fp32
    GEMMs use TF32, `tf32` (config.TrainConfig), and `plain_attention` (kernel.Target)."""
    return CudaSession(programs, **options)


def planned(programs: dict[str, Program], **options: Any) -> Plan:
    """The plan of such a session."""
    return lower_and_plan(programs, Target.of(driver.device(), **options)).plan


def self_checked(small: Any, kept: dict[str, Any], build: Any) -> dict[str, Any]:
    """`self_check.verdicts` of a small model but for those in `kept`, found now."""
    return self_check.verdicts(on := driver.device(), small, build(small), Target.of(on), kept)


proven = self_check.proven


def default_dtype() -> str:
    """bf16: every GPU that barellm runs on multiplies it in tensor cores."""
    return "bf16"


def describe() -> dict[str, object]:
    """The facts about the machine that a checkpoint or a benchmark records."""
    device = driver.device()
    return {"device": "cuda", "isa": f"sm_{device.arch}", "processor": device.name, "multiprocessors": device.sms}


@cache
def measured_peak(dtype: str) -> rates.Rate:
    """FLOP/s that this GPU reaches on `dtype` matmuls, measured once a machine."""
    with closing(Bench()) as bench:
        return rates.rate(bench.machine, dtype, lambda: bench.peak(dtype))
