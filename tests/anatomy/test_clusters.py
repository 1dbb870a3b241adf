"""The rung of clusters: two blocks that write into each other's shared memory, as compiled PTX in many orders, and with faults."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from anatomy import gpu
from anatomy.gpu.r14_clusters import paired
from anatomy.gpu_measure import DTYPES
from anatomy.gpu_rung import GPU_RUNGS, HOPPER
from barellm.cuda import compile as compiler
from barellm.cuda.kernel import Sizes, TensorMap
from barellm.runtime.lowering import Region
from barellm.tools.inspect import device_code
from tests.simulators.interpreter import Box, Pointer
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run
from tests.simulators.ptx.order import Fault

assert gpu
(RUNG,) = [r for r in GPU_RUNGS if r.name == "clusters"]


def run(size: tuple[int, int, int], sms: int, how: Run, change=lambda ptx: ptx) -> np.ndarray:
    """C of the rung on a card with so many multiprocessors, which must be right. `change`: of the mended PTX."""
    product, call = RUNG.product(*size, target=replace(HOPPER, sms=sms))
    r = np.random.default_rng(0)
    held = {t: r.standard_normal(t.shape, np.float32).astype(DTYPES["bf16"]) for t in (product.a, product.b)}
    held |= {product.c: np.full(product.c.shape, np.nan, DTYPES["bf16"])} | product.tables

    def pointer(region: Region) -> Pointer:
        start, nbytes = held[region.tensor].ctypes.data, held[region.tensor].nbytes
        assert start % 16 == 0
        return Pointer(start, start, start + nbytes, region in call.writes)

    def argument(value):
        if not isinstance(value, TensorMap):
            return pointer(value)
        assert isinstance(value.rows, int)
        return Box(pointer(value.region), value.rows, value.columns, value.stride, value.box)

    kernel = compiler.triton_compile(call.spec, 90)
    code = compiler.code_of(call.spec, kernel, 90)
    code = replace(code, cubin=change(paired(kernel.asm["ptx"])).encode())
    launch.execute(call.spec, [argument(a) for a in call.args], call.grid(Sizes()), arch=90, run=how, code=code)
    a, b, c = (held[t].astype(np.float64) for t in (product.a, product.b, product.c))
    np.testing.assert_allclose(c, a @ b, rtol=2.0**-7, atol=1e-3)
    return held[product.c]


# Rows of one block of a pair, of both, of a pair and a half; more pairs than clusters; more steps than the ring has buffers.
@pytest.mark.parametrize("size, sms", [((100, 256, 200), 2), ((256, 264, 328), 3), ((330, 520, 72), 4), ((257, 264, 8), 132)])
@pytest.mark.extended
def test_pairs_of_tiles_in_drawn_orders(size, sms):
    late = run(size, sms, Run(seed=1, poison=0xFF, late=True))
    early = run(size, sms, Run(seed=2, poison=0x7F, late=False))
    assert np.array_equal(late.view(np.uint16), early.view(np.uint16))


def replaced(pattern: str, by: str, count: int = 0):
    def change(ptx: str) -> str:
        changed, found = re.subn(pattern, by, ptx, count=count)
        assert found
        return changed

    return change


MEET = r"barrier\.cluster\.arrive\.release; barrier\.cluster\.wait\.acquire;"
FAULTS = {
    "blocks do not meet at the start": (replaced(MEET, "", 2), "no mbarrier was made|not fenced|no barrier behind"),
    "blocks do not meet at the end": (replaced(MEET + r"(?=\s+ret)", ""), "has ended"),
    "mbarriers are not fenced": (replaced(r"fence\.mbarrier_init\.release\.cluster;", ""), "not fenced for its cluster"),
    "a buffer is free when its own block has read it": (
        lambda ptx: replaced(r"(mbarrier\.init\S+ \[%r\d+\]), 4;", r"\1, 2;")(
            replaced(r"@%p\d+ mbarrier\.arrive\.shared::cluster[^;]*;", "")(ptx)), "overwritten"),
    "it is released at home only": (replaced(r"@%p\d+ mbarrier\.arrive\.shared::cluster[^;]*;", ""), "nobody can go on"),
    "copies come to one block": (replaced(r"mov\.b16 %both, 3;", "mov.b16 %both, 1;"), "nobody can go on"),
    "copies come to a block that is not there": (replaced(r"mov\.b16 %both, 3;", "mov.b16 %both, 7;"), "a copy to blocks 0b111"),
    "both blocks load all of B": (
        replaced(r"setp\.eq\.and\.u32 %mine, %rank, \d", "setp.ge.and.u32 %mine, %rank, 0"), "arriving|under way"),
    "it is released in a third block": (replaced(r"xor\.b32 %peer, %rank, 1;", "add.u32 %peer, %rank, 1;"), "rank 2 in"),
    "a quarter of B is loaded by nobody": (replaced(r"%mine, %rank, \d", "%mine, %rank, 2", 1), "nobody can go on"),
    "the first four warps keep their registers": (
        replaced(r"setmaxnreg\.dec\S+\s+\d+;(?=\s+barrier\.cluster)", ""), "nobody can go on"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.extended
def test_a_fault_shows(name):
    change, message = FAULTS[name]
    with pytest.raises((AssertionError, Fault), match=message):
        run((256, 256, 328), 2, Run(seed=3, poison=0xFF, late=True), change)


def test_a_kernel_that_is_not_the_one_is_refused():
    with pytest.raises(AssertionError, match="0 x"):
        paired(".reqntid 384\n.maxnreg 168\n{\n ret;\n}\n")


@pytest.mark.slow
@pytest.mark.extended
def test_what_ptxas_makes_of_it():
    """Four copies to both blocks; a fence of the whole GPU where all threads meet, and none where a buffer is released."""
    _, call = RUNG.product(512, 512, 1024)
    kernel = compiler.triton_compile(call.spec, 90)
    code = RUNG.mended(call.spec, compiler.code_of(call.spec, kernel, 90))
    sass = device_code.disassembled(code.cubin)
    found = device_code.read(code.cubin, shared=code.shared_bytes, sass=sass)
    assert not found.spills and not found.stack and found.registers == 168
    counts = [sass.count(word) for word in ("UTMALDG.2D.MULTICAST", "UCGABAR_WAIT", "MEMBAR.ALL.GPU", "TRANS64.RED")]
    assert counts == [4, 3, 3, 4]
