"""Machine code of CUDA kernels, read without a GPU: registers, spills and instructions are those of the cubin; spills are seen."""

import pytest

from barellm.cuda.compile import triton_compile
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.kernels import microbenchmarks
from barellm.tools.inspect import device_code, kernels

SASS = """
	code for sm_90a
		Function : gemm
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
                                                                             /* 0x000e620000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;          /* 0x0000000000057919 */
        /*0020*/             @!UP0 UTMALDG.2D [UR8], [UR4] ;                 /* 0x0000000000057919 */
        /*1a30*/                   STL.64 [R1], R4 ;                         /* 0x0000000000057919 */
        /*1a40*/                   LDL R9, [R1] ;                            /* 0x0000000000057919 */
        /*1a50*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*1a60*/                   NOP ;                                     /* 0x0000000000007918 */
"""


def peak(**options: int) -> Specialisation:
    signature = (("out", "*fp32"), ("a", "*bf16"), ("b", "*bf16"), ("iterations", "i32"))
    constants = (("COLS", 128), ("DEPTH", 64), ("ROWS", 128))
    usual = {"num_stages": 1, "num_warps": 4}
    return Specialisation(microbenchmarks.peak, signature, constants, tuple(sorted((usual | options).items())), ("out", "a", "b"))


def test_instructions_are_counted_by_what_they_are():
    instructions, counts, widths = device_code.count(SASS)
    assert instructions == 6
    assert counts == {"HGMMA": 1, "UTMALDG": 1, "LDG": 1, "LDL": 1, "STL": 1}
    assert widths == {"LDG.128": 1}
    assert device_code.DeviceCode(40, 16, 0, instructions, counts, widths).spills == 2


@pytest.mark.parametrize("arch, product", [(80, "HMMA"), (90, "HGMMA")])
def test_a_product_takes_the_tensor_cores_and_spills_nothing(arch, product):
    code = kernels.summary(peak(), Target(arch=arch))
    assert code.counts[product] > 0 and code.spills == 0 and code.stack == 0
    assert 64 < code.registers <= 255 and code.instructions > sum(code.counts.values()) / 2
    assert code.shared >= 2 * 64 * 128


def test_too_few_registers_are_seen():
    assert kernels.summary(peak(maxnreg=96), Target(arch=80)).spills > 0


@pytest.mark.extended
def test_every_stage_can_be_read():
    target = Target()
    assert "ttg." in kernels.text(peak(), target, "ir")
    assert ".entry peak(" in kernels.text(peak(), target, "ptx")
    assert "HGMMA" in kernels.text(peak(), target, "sass")
    code = triton_compile(peak(), 90)
    read = device_code.read(code.asm["cubin"], shared=code.metadata.shared)
    assert read == kernels.summary(peak(), target)  # the same again: nothing of it depends on when it is compiled
