"""Cards whose compute capability has no tiles of its own: what they take fits them, and compiles."""

from __future__ import annotations

import pytest

from barellm.assembly.build import build_programs
from barellm.config.overrides import changed
from barellm.cuda.compile import triton_compile
from barellm.cuda.gemm_config import gemm_configs
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.step import lower_and_plan
from barellm.models import preset
from barellm.tools.inspect import device_code

# Shared memory for a block, as CUDA's programming guide has it: of an RTX 3090, Orin, B300, Thor, RTX 5090, GB10.
SHARED = {86: 99 << 10, 87: 163 << 10, 103: 227 << 10, 110: 227 << 10, 120: 99 << 10, 121: 99 << 10}
KERNELS = ("gemm", "attention_forward", "attention_dkv", "attention_dq")


def specs(arch: int) -> dict[str, Specialisation]:
    """By the kernel's name, of gpt2-124m's widths the first."""
    config = changed(preset("gpt2-124m"), {"train.dtype": "bf16", "model.layers": 1, "train.seq": 256})
    found: dict[str, Specialisation] = {}
    for spec in lower_and_plan(build_programs(config), Target(arch)).specs:
        found.setdefault(spec.name, spec)
    return found


@pytest.mark.parametrize("arch", SHARED)
def test_programs_are_lowered_and_tiles_fit_into_shared_memory(arch):
    assert set(KERNELS) <= set(specs(arch))
    for dtype, itemsize in (("bf16", 2), ("fp32", 4), ("tf32", 4)):
        for t in gemm_configs(dtype, arch):
            assert t.num_stages * (t.tile_m + t.tile_n) * t.tile_k * itemsize <= SHARED[arch], t


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [86, 120])
@pytest.mark.extended
def test_kernels_with_tiles_compile_without_spills(arch, kernel):
    spec = specs(arch)[kernel]
    made = triton_compile(spec, arch)
    code = device_code.read(made.asm["cubin"], shared=made.metadata.shared)
    assert code.spills == 0 and code.shared <= SHARED[arch], (spec, code)
    assert code.counts.get("HMMA"), "no tensor cores"
