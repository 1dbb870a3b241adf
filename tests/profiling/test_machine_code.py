"""Machine code of the kernels: inner loops without spills on every ISA, no registers wider than the ISA's; spills are seen."""

import json

import pytest

from barellm.cli import main
from barellm.config import preset
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cpu.kernels import choices
from barellm.overrides import changed
from barellm.profiling import kernels, machine_code

TARGETS = [*isas.X86, "neon_bf16", "neon"]
WIDEST = {"avx512_bf16": "zmm", "avx512": "zmm", "avx2": "ymm", "generic": "xmm", "neon_bf16": "v", "neon": "v"}
PRODUCT = {"avx512_bf16": "vdpbf16ps", "neon_bf16": "bfdot"}
FP32_PRODUCT = {"generic": "mulps", "neon_bf16": "fmla", "neon": "fmla"}
GEMMS = ("product", "weight_gradient")


def target(name):
    """The ISA as x86-64 or aarch64 Linux has it, whatever this machine is."""
    return isas.cross(name, kernels.ARM_TRIPLE if name in isas.ARM and name != "generic" else kernels.X86_TRIPLE)


def gpt2(dtype):
    return changed(preset("gpt2-124m"), {"train.batch": 4, "train.seq": 64, "train.dtype": dtype})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TARGETS)
def test_gemm_inner_loops_have_no_spills_and_no_wider_registers(name, dtype):
    isa = target(name)
    product = PRODUCT.get(name, FP32_PRODUCT.get(name, "vfmadd231ps"))
    if dtype == "fp32":
        product = FP32_PRODUCT.get(name, "vfmadd231ps")
    used = [u for u in kernels.used_by(gpt2(dtype), isa) if u.spec.name in GEMMS]
    assert len(used) >= 10
    for u in used:
        code = kernels.summary(u.spec, isa)
        tile = dict(u.spec.constants)["choice"].tile
        assert code.widest == WIDEST[name], u
        assert code.inner.multiply_adds == {product: tile.rows * tile.vectors}, u
        assert code.inner.accumulators == tile.rows * tile.vectors, u
        assert (code.inner.stack_references, code.inner.stores) == (0, 0), u
        assert code.inner.loads <= tile.rows + tile.vectors, u


@pytest.mark.parametrize("name", TARGETS)
def test_a_tile_with_too_many_accumulators_is_seen_to_spill(name, monkeypatch):
    isa = target(name)
    monkeypatch.setattr(choices, "default_tile", lambda isa, cols: choices.Tile(isa.registers // 2, 3))
    spec = next(u.spec for u in kernels.used_by(gpt2("fp32"), isa) if u.spec.name == "product")
    assert kernels.summary(spec, isa).inner.stack_references > 0


@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_no_kernel_uses_wider_registers_than_its_isa(name):
    isa = target(name)
    for u in kernels.used_by(gpt2("bf16"), isa):
        widest = kernels.summary(u.spec, isa).widest
        assert machine_code.WIDTHS.get(widest, 0) <= isa.vector_bytes, u


X86_LOOP = """
kernel:
\tmovq\t%rsp, %rbp
\tvmovups\t(%rdi), %zmm3
.LBB0_1:
\tvmovups\t(%rsi,%rax), %zmm0
\tvfmadd231ps\t(%rdx,%rax){1to16}, %zmm0, %zmm1
\tvaddps\t%zmm2, %zmm0, %zmm2
\tvaddps\t%zmm1, %zmm0, %zmm4
\tvmovups\t%zmm0, -64(%rbp)
\tvmovups\t%zmm3, 8(%rdi)
\taddq\t$4, %rax
\tcmpq\t%rax, 16(%rsp)
\tjne\t.LBB0_1
\tretq
"""
ARM_LOOP = """
kernel:
.LBB0_1:
\tldr\tq1, [x29], #16
\tldp\tq2, q3, [sp, #32]
\tfmla\tv0.4s, v1.4s, v2.s[0]
\tbfdot\tv4.4s, v1.8h, v3.2h[0]
\tstr\tq1, [x2]
\tsubs\tx8, x8, #1
\tb.ne\t.LBB0_1
\tret
"""


def test_counts_of_an_x86_loop():
    code = machine_code.read(X86_LOOP)
    assert (code.instructions, code.widest, len(code.loops)) == (12, "zmm", 1)
    loop = code.inner
    assert loop.multiply_adds == {"vfmadd231ps": 1}
    assert (loop.instructions, loop.loads, loop.stores, loop.stack_references) == (9, 3, 2, 2)
    assert loop.accumulators == 2  # zmm1 and zmm2; zmm4 is written anew, zmm0 loaded


def test_counts_of_an_arm_loop_with_a_general_x29():
    loop = machine_code.read(ARM_LOOP).inner
    assert loop.multiply_adds == {"fmla": 1, "bfdot": 1}
    assert (loop.instructions, loop.loads, loop.stores, loop.stack_references) == (7, 2, 1, 1)
    assert (loop.accumulators, loop.widest) == (2, "v")


def test_only_loops_without_loops_in_them_count():
    nested = ".LBB0_1:\n\tnop\n.LBB0_2:\n\tvaddps\t%ymm1, %ymm0, %ymm1\n\tjne\t.LBB0_2\n\tjmp\t.LBB0_1\n"
    assert [loop.label for loop in machine_code.read(nested).loops] == [".LBB0_2"]


def test_command_lists_and_shows(capsys):
    assert main.main(["inspect", "--preset", "shakespeare-char"]) == 0
    assert "weight_gradient_" in capsys.readouterr().out
    assert main.main(["inspect", "linear_gelu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["kernels"]
    assert row["code"]["inner"]["stack_references"] == 0 and row["ops"] == ["linear_gelu"]
    assert main.main(["inspect", row["symbol"], "--stage", "ir"]) == 0
    assert f"define void @{row['symbol']}" in capsys.readouterr().out
    assert main.main(["inspect", "linear_gelu", "--stage", "asm", "--isa", "neon_bf16", "--dtype", "bf16"]) == 0
    assert "bfdot" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["layernrm"], ["'layernrm'", "did you mean 'layernorm'?"]),
    (["--isa", "avx3"], ["'avx3'", "avx2"]),
    (["--target", "riscv64-linux"], ["riscv64-linux", "aarch64"]),
    (["--isa", "neon", "--target", "x86_64-linux"], ["no ISA 'neon'"]),
])  # fmt: skip
def test_mistakes_are_one_line(argv, words, capsys):
    assert main.main(["inspect", *argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words)


def test_another_machines_isa_is_cross_compiled():
    isa = kernels.isa_named("neon")
    assert isa.triple == kernels.ARM_TRIPLE or "neon" in isas.available()
    assert "fmla" in jit.assembly(kernels.used_by(gpt2("fp32"), isa)[6].spec.ir(isa), isa)
