"""AMX kernels where no AMX is: the emulator against the manual's arithmetic in NumPy, and what LLVM makes for the real thing.

The products themselves run on the emulator in test_gemm.py, against the float64 references like every other ISA.
"""

from __future__ import annotations

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest

from barellm.config.overrides import changed
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.models import preset
from barellm.tools.inspect import kernels, machine_code
from tests.simulators import amx_emulator

pytestmark = pytest.mark.skipif(not amx_emulator.EMULATED, reason="the emulator wants AVX512-BF16 for everything else")
ATTENTION = ("attention", "attention_cached", "attention_backward_dkdv", "attention_backward_dq")
PRODUCT = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
define void @product(ptr %config, ptr %a, ptr %b, ptr %c) {
entry:
  call void @llvm.x86.ldtilecfg(ptr %config)
  call void @llvm.x86.tileloadd64(i8 0, ptr %c, i64 72)
  call void @llvm.x86.tileloadd64(i8 3, ptr %a, i64 68)
  call void @llvm.x86.tileloadd64(i8 7, ptr %b, i64 80)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 3, i8 7)
  call void @llvm.x86.tilestored64(i8 0, ptr %c, i64 72)
  ret void
}
"""


def configuration(**shapes):
    """64 bytes of palette 1; a shape is (rows, colsb) of a tile."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (rows, colsb) in shapes.items():
        config[48 + int(tile[1:])], config[16 + 2 * int(tile[1:])] = rows, colsb
    return config


def run(config, a, b, c):
    """c += a b by the emulated instructions; the arrays hold rows of 68, 80 and 72 bytes."""
    isa = amx_emulator.ISA_EMULATED
    library = jit.Library([jit.compile_object(amx_emulator.emulate(PRODUCT), isa)], isa)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(library.address("product"))
    function(*(x.ctypes.data for x in (config, a, b, c)))


def flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def manual(a, b, c, m, pairs, n):
    """The manual's arithmetic. Products of bf16 and their sums with these exponents are exact in float64."""
    a, b = (flushed(x.astype(np.float32)) for x in (a, b))
    out = c.copy()
    for i in range(m):
        sums = np.zeros((2, n), np.float32)
        for p in range(pairs):
            for h in range(2):
                exact = sums[h].astype(np.float64) + np.float64(a[i, 2 * p + h]) * b[p, h : 2 * n : 2].astype(np.float64)
                sums[h] = flushed(exact.astype(np.float32))
        out[i, :n] = flushed(flushed(c[i, :n]) + flushed(sums[0] + sums[1]))
    return out


@pytest.mark.parametrize("m, pairs, n", [(16, 16, 16), (1, 1, 1), (5, 3, 7), (16, 2, 9)])
def test_the_emulator_does_what_the_manual_says(m, pairs, n):
    r = np.random.default_rng(m)
    a, b = (r.standard_normal((17, width)).astype(ml_dtypes.bfloat16) for width in (34, 40))
    c = r.standard_normal((17, 18)).astype(np.float32)
    a[0, 0], b[0, 1], c[0, 0] = 1e-39, 2e-39, 3e-39  # denormals
    want = manual(a, b, c, m, pairs, n)
    run(configuration(t0=(m, 4 * n), t3=(m, 4 * pairs), t7=(pairs, 4 * n)), a, b, c)
    assert np.array_equal(c.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("shapes", [
    {"t0": (4, 16), "t3": (4, 16)},  # t7 is not configured
    {"t0": (4, 16), "t3": (4, 16), "t7": (5, 16)},
    {"t0": (4, 16), "t3": (3, 16), "t7": (4, 16)},
    {"t0": (4, 16), "t3": (4, 16), "t7": (4, 12)},
])  # fmt: skip
def test_what_would_fault_gives_nan(shapes):
    a, b = (np.ones((17, width), ml_dtypes.bfloat16) for width in (34, 40))
    c = np.ones((17, 18), np.float32)
    run(configuration(**shapes), a, b, c)
    assert np.isnan(c[:4, :4]).all() and (c[4:] == 1).all()


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
def test_products_become_tile_instructions(cpu):
    from dataclasses import replace

    isa = replace(isas.cross("amx_bf16", kernels.X86_TRIPLE), cpu=cpu)
    config = changed(preset("gpt2-124m"), {"train.micro_batch_size": 4, "train.seq": 64, "train.dtype": "bf16"})
    products = 0
    for u in kernels.used_by(config, isa):
        module = jit.module(u.spec.ir(isa), isa)
        machine = jit.target_machine(isa)
        assert not jit.undefined_symbols(machine.emit_object(module)) - jit.ALLOWED, u
        text = machine.emit_assembly(module)
        tiled = u.spec.name in ("gemm", "weight_gradient", "skinny_gemm", *ATTENTION)
        assert ("tmm" in text) == tiled, u
        if not tiled:
            continue
        assert all(f"\t{name}" in text for name in ("ldtilecfg", "tilerelease", "tilestored")), u
        assert not re.search(r"\tcall|vdpbf16ps", text), u
        if u.spec.name in ATTENTION:
            continue
        products += 1
        inner = machine_code.read(text).inner
        assert inner.multiply_adds == {"tdpbf16ps": 4} and inner.accumulators == 4, u
        assert (inner.stores, inner.vector_spills) == (0, 0), u
        if u.spec.name == "gemm":  # it has a loop that packs nothing beside
            assert (inner.loads, inner.stack_references) == (4, 0), u
    assert products >= 10


def test_permission_that_is_refused_leaves_avx512(monkeypatch):
    features = dict.fromkeys(
        ["amx-tile", "amx-bf16", "avx512bf16", "avx512vnni", "avx512bw", "avx512vl", "avx512dq", "avx512f", "fma"], True
    )
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    for permitted, best in ((True, "amx_bf16"), (False, "avx512_bf16")):
        monkeypatch.setattr(isas, "tiles_permitted", lambda permitted=permitted: permitted)
        assert isas.available()[0] == best


def test_asking_for_permission_here_tells_what_the_kernel_says():
    """On a processor without tiles the request is refused; with them, granted by default."""
    import llvmlite.binding as llvm

    assert isas.tiles_permitted() <= llvm.get_host_cpu_features().get("amx-tile", False)
