"""Hopper's products as they are compiled for sm_90a: wgmma, tensor maps, mbarriers, registers that warps hand over."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from barellm.cuda.gemm_config import hopper_config
from barellm.cuda.kernel import POINTER, Specialisation
from barellm.cuda.kernels.gemm.hopper import hopper_gemm
from barellm.cuda.lang import DeviceFunction
from tests.cuda import test_hopper
from tests.simulators.gluon_stub import Map
from tests.simulators.gluon_stub import Pointer as Vector
from tests.simulators.interpreter import Box, Parameter, Pointer
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run

pytestmark = pytest.mark.extended

DTYPES = {"bfloat16": "bf16", "float32": "fp32", "int64": "i64"}

# Rows and columns that are no multiples of a tile, more tiles than blocks, a depth that is no multiple of a turn.
FORMS: dict[str, dict[str, Any]] = {
    "nt": dict(role="nt", M=300, N=328, K=456, cols=128, bias=True),
    "nt, wide": dict(role="nt", M=136, N=520, K=392, cols=256),
    "nn": dict(role="nn", M=300, N=136, K=200, cols=128),
    "nn, wide": dict(role="nn", M=200, N=392, K=72, cols=256),
    "tn in parts": dict(role="tn", M=192, N=264, K=500, cols=256, chunk=192, wide=True),
    "tn with sums": dict(role="tn", M=192, N=264, K=250, cols=256, chunk=128, wide=True, sums=True),
    "gelu": dict(role="nt", M=200, N=392, K=72, cols=256, epilogue="gelu", bias=True),
    "gelu_backward": dict(role="nn", M=129, N=392, K=72, cols=256, epilogue="gelu_backward"),
    "relu2": dict(role="nt", M=136, N=264, K=72, cols=256, epilogue="relu2", bias=True),
    "relu2_backward": dict(role="nn", M=129, N=264, K=72, cols=256, epilogue="relu2_backward"),
    "residual": dict(role="nt", M=200, N=264, K=136, cols=256, epilogue="residual", bias=True, wide=True),
    "add": dict(role="nn", M=200, N=264, K=136, cols=128, epilogue="add"),
    "start": dict(role="tn", M=192, N=264, K=130, cols=256, epilogue="start", wide=True),
    "start, adding": dict(role="tn", M=192, N=264, K=130, cols=256, epilogue="start", wide=True, accumulate=1),
}


def argument(value: Any, *, written: bool, fixed: bool) -> tuple[str, Parameter] | None:
    """A parameter's type and value, as a launch has them; None for a constant of the code."""
    if isinstance(value, Map):
        rows, columns = value.array.shape
        box = (value.block_shape[0], value.block_shape[1])
        type_ = f"tensormap<{DTYPES[value.dtype.name]}[{box[0]},{box[1]}]>"
        return type_, Box(pointer(value.array, writable=written), rows, columns, columns, box)
    if isinstance(value, Vector):
        return POINTER[DTYPES[value.array.dtype.name]], pointer(value.array, writable=written)
    return None if fixed or value is None else ("i32", value)


def pointer(array: np.ndarray, *, writable: bool) -> Pointer:
    start = array.ctypes.data
    return Pointer(start, start, start + array.nbytes, writable)


def specialised(kernel: DeviceFunction, args: dict[str, Any], writes: str) -> tuple[Specialisation, list[Parameter]]:
    """A Gluon kernel as a launch has it, with the arguments that the model of the machine takes."""
    found = {
        name: argument(args[name], written=name in writes.split(), fixed=name in kernel.constants) for name in kernel.parameters
    }
    signature = {name: given for name, given in found.items() if given is not None}
    constants = tuple(sorted((name, args[name]) for name, given in found.items() if given is None))
    options = (("num_stages", 3), ("num_warps", 4))
    aligned = tuple(name for name, (type_, _) in signature.items() if type_.startswith("*"))
    spec = Specialisation(kernel, tuple((n, t) for n, (t, _) in signature.items()), constants, options, aligned)
    return spec, [value for _, value in signature.values()]


def execute(kernel: DeviceFunction, args: dict[str, Any], writes: str, blocks: int, how: Run, mutate: Any = None) -> None:
    """Run a Gluon kernel as it is compiled for sm_90a, its PTX changed by `mutate`; `writes`: the arguments that it writes."""
    spec, values = specialised(kernel, args, writes)
    code = launch.code_of(spec, 90)
    if mutate is not None:
        code = replace(code, cubin=mutate(code.cubin.decode()).encode())
    launch.execute(spec, values, (blocks,), arch=90, run=how, code=code)


def run(name: str, blocks: int, how: Run, mutate: Any = None) -> list[np.ndarray]:
    """Results of one launch, which must be right."""
    config = FORMS[name]
    f = hopper_config(config["cols"], loads_c=config.get("epilogue") in test_hopper.LOADS_C)
    args, wanted = test_hopper.launch(**config, stages=f.num_stages, slots=f.epilogue_stages)
    execute(hopper_gemm, args, "out_map pre_map sums", blocks, how, mutate)
    test_hopper.check(wanted)
    return [to.array.copy() for to, _ in wanted]


QUICK = ("nt", "tn in parts", "tn with sums", "gelu", "gelu_backward", "residual")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FORMS])
@pytest.mark.extended
def test_a_form(name):
    """In drawn orders of the warps, one block or two, copies arriving at once or as late as they may: the same bits."""
    first = run(name, 1, Run(seed=1, poison=0xFF, late=True))
    second = run(name, 2, Run(seed=2, poison=0x7F, late=False))
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(first, second, strict=True))


def nth(pattern: str, replacement: str, at: int = 0):
    """The code with its at-th occurrence replaced."""

    def mutate(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx, re.S))[at]
        changed = ptx[: found.start()] + found.expand(replacement) + ptx[found.end() :]
        assert changed != ptx
        return changed

    return mutate


SWIZZLE_128, SWIZZLE_64 = 0x4000004000000000, 0x8000004000000000  # of a descriptor, with a stride of 1024 bytes
WAIT = r"(mbarrier\.try_wait\.parity\.shared\.b64 \S+ \[%r\d+\]), %r\d+;"
MUTANTS: dict[str, tuple[str, Any, str]] = {
    "mbarriers are not fenced": ("nt", nth(r"fence\.proxy\.async\.shared::cta;", ""), "made without a fence"),
    "no fence before a copy out": ("nt", nth(r"fence\.proxy\.async\.shared::cta;", "", 1), "without a fence"),
    "a copy out waits for no other warp": (
        "nt", nth(r"(fence\.proxy\.async\.shared::cta;.*?)bar\.sync[^;]*;", r"\1", 1), "no barrier behind"
    ),
    "one copy out more under way": ("nt", nth(r"bulk\.wait_group\.read \t?1;", "bulk.wait_group.read 2;"), "under way"),
    "copies out are in no group": ("nt", nth(r"cp\.async\.bulk\.commit_group;", ""), "under way"),
    "the end waits for no copy out": ("nt", nth(r"cp\.async\.bulk\.wait_group\.read \t?0;", ""), "under way"),
    "registers of sums are not fenced": ("nt", nth(r"wgmma\.fence[^;]*;", ""), "no wgmma.fence"),
    "a stage is released too early": ("nt", nth(r"wgmma\.wait_group\.sync\.aligned \t?1;", ""), "overwritten"),
    "sums are read too early": ("nt", nth(r"(wgmma\.wait_group\.sync\.aligned) \t?0;", r"\1 1;"), "under way"),
    "products are in no group": ("nt", nth(r"wgmma\.commit_group[^;]*;", ""), "overwritten"),
    "a descriptor's swizzle": ("nt", nth(str(SWIZZLE_128), str(SWIZZLE_64)), "Not equal"),
    "a descriptor's stride": ("nt", nth(str(SWIZZLE_128), str(SWIZZLE_128 + (1 << 32))), "no barrier behind its mbarrier"),
    "a descriptor's step in depth": ("nt", nth(str(SWIZZLE_128 + 2), str(SWIZZLE_128 + 4)), "Not equal"),
    "a transposed operand": ("gelu_backward", nth(r"(wgmma\.mma_async[^;]*), 1;", r"\1, 0;"), "Not equal"),
    "swizzle of what goes out": ("nt", nth(r"(xor\.b32[^;]*), 64;", r"\1, 16;"), "Not equal"),
    "operands' phase": ("nt", nth(WAIT, r"\1, 1;", 1), "nobody can go on"),
    "the loader's phase": ("nt", nth(WAIT, r"\1, 0;", 2), "nobody can go on"),
    "bytes expected": ("nt", nth(r"(expect_tx[^;]*), 32768;", r"\1, 32640;"), "nobody can go on"),
    "arrivals expected": ("nt", nth(r"(mbarrier\.init[^;]*), 2;", r"\1, 1;"), "still arriving"),
    "a stage is not released": ("nt", nth(r"@%p\d+ mbarrier\.arrive\.shared[^;]*;", ""), "nobody can go on"),
    "all lanes copy": ("nt", nth(r"@%p\d+ (cp\.async\.bulk\.tensor\.2d\.shared)", r"\1"), "under way"),
    "two warpgroups at one barrier": ("nt", nth(r"bar\.sync \t?2, 128;", "bar.sync 0, 128;", 3), "more threads at barrier 0"),
    "roles begin before the barriers are made": ("nt", nth(r"barrier\.sync \t?1;", ""), "nobody can go on"),
    "registers that nobody has": ("nt", nth(r"(setmaxnreg\.inc\S*) \t?232;", r"\1 248;"), "nobody can go on"),
    "the fetched is not awaited": ("residual", nth(r"(mbarrier\.try_wait[^;]*), %r\d+;", r"\1, 1;", 2), "nobody can go on"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.extended
def test_a_mutant_fails(name):
    config, mutate, message = MUTANTS[name]
    with pytest.raises(AssertionError, match=message):
        run(config, 1, Run(seed=3), mutate)
