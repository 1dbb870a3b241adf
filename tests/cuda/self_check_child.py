"""The self-check's child on the driver in Python. FAULT=KERNEL:KIND says which kernel is "wrong", "hangs" or "crashes"; "all:wrong"
means every one."""

import os
import signal
import time

import numpy as np
import pytest

from barellm.cuda import gemm_config
from barellm.tools.profile.self_check import Harness as Harness
from tests.simulators import interpreter
from tests.simulators.mock import Gpu


def installed(patch: pytest.MonkeyPatch, fault: str, **card) -> Gpu:
    """A GPU with a faulty kernel. Of a wrong one, some words of what it has written are others until the next launch, so that each
    op finds right operands."""
    kernel, _, kind = fault.partition(":")
    gpu, spoilt = Gpu(**card), []

    def execute(spec, values, grid):
        for word, right in spoilt:
            word[:] = right
        if kernel not in (spec.name, "all"):
            return interpreter.execute(spec, values, grid)
        if kind == "hangs":
            time.sleep(600)
        if kind == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        before = {at: bytes(memory) for at, memory in gpu.allocated.items()}
        interpreter.execute(spec, values, grid)
        for at, memory in gpu.allocated.items():
            now = np.ctypeslib.as_array(memory).view(np.uint8)
            changed = np.flatnonzero(now != np.frombuffer(before[at], np.uint8))
            if changed.size:  # else the words of the launch before
                words = [now[at : at + 4] for at in changed[:: max(1, changed.size // 16)] // 4 * 4]
                spoilt[:] = [(word, word.copy()) for word in words]
        for word, _ in spoilt:
            word[:] = 0x40  # 3.0 in fp32 and in bf16

    gpu.execute = execute
    gpu.install(patch)
    patch.setattr(gemm_config, "WAVE", 1)  # Hopper's GEMM takes small ones too
    return gpu


if "FAULT" in os.environ:
    installed(pytest.MonkeyPatch(), os.environ["FAULT"], arch=int(os.environ["FAULT_ARCH"]))
