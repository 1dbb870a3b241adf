"""Machine code of the kernels: inner loops without spills on every ISA, no registers wider than the ISA's; spills are seen."""

import json

import pytest

from barellm.cli import main
from barellm.config.overrides import changed
from barellm.cpu import gemm_config, jit
from barellm.cpu import isa as isas
from barellm.cpu.kernels.attention import attention_microkernels
from barellm.cpu.step import Lowered
from barellm.models import preset
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.tools.inspect import kernels, machine_code
from tests.cases import attention_both

TARGETS = [*isas.X86, "neon_bf16", "neon"]
WIDEST = {"amx_bf16": "zmm", "avx512_bf16": "zmm", "avx512": "zmm", "avx2": "ymm", "generic": "xmm", "neon_bf16": "v", "neon": "v"}
PRODUCT = {"amx_bf16": "tdpbf16ps", "avx512_bf16": "vdpbf16ps", "neon_bf16": "bfdot"}
ANY_PRODUCT = {**PRODUCT, "generic": "mulps", "neon": "fmla"}
FP32_PRODUCT = {"generic": "mulps", "neon_bf16": "fmla", "neon": "fmla"}
GEMMS = ("gemm", "weight_gradient")


def target(name):
    """The ISA as x86-64 or aarch64 Linux has it, whatever this machine is."""
    return isas.cross(name, kernels.ARM_TRIPLE if name in isas.ARM and name != "generic" else kernels.X86_TRIPLE)


def gpt2(dtype):
    return changed(preset("gpt2-124m"), {"train.micro_batch_size": 4, "train.seq": 64, "train.dtype": dtype})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.extended
def test_gemm_inner_loops_have_no_spills_and_no_wider_registers(name, dtype):
    isa = target(name)
    product = PRODUCT.get(name, FP32_PRODUCT.get(name, "vfmadd231ps"))
    if dtype == "fp32":
        product = FP32_PRODUCT.get(name, "vfmadd231ps")
    used = [u for u in kernels.used_by(gpt2(dtype), isa) if u.spec.name in GEMMS]
    assert len(used) >= 10
    for u in used:
        code = kernels.summary(u.spec, isa)
        tile = dict(u.spec.constants)["config"].tile
        assert code.widest == WIDEST[name], u
        accumulators = 4 if product == "tdpbf16ps" else tile.mr * tile.vectors
        assert code.inner.multiply_adds == {product: accumulators}, u
        assert code.inner.accumulators == accumulators, u
        assert code.inner.stores == 0, u
        # A step of AMX takes 64 cycles: addresses of what is packed beside it may lie on the stack, but no vector.
        spills = [
            x.vector_spills if product == "tdpbf16ps" else x.stack_references for x in [code.inner, *code.loops] if x.accumulators
        ]
        # On aarch64 the tile that hangs over the last row may keep a vector of GELU's on the stack.
        assert spills[0] == 0 and (name.startswith("neon") or max(spills) == 0), u
        assert code.inner.loads <= tile.mr + tile.vectors, u


@pytest.mark.parametrize("name", TARGETS)
def test_a_tile_with_too_many_accumulators_is_seen_to_spill(name, monkeypatch):
    isa = target(name)
    monkeypatch.setattr(gemm_config, "default_tile", lambda isa, *_: gemm_config.Tile(isa.registers // 2, 3))
    spec = next(u.spec for u in kernels.used_by(gpt2("fp32"), isa) if u.spec.name == "gemm")
    assert kernels.summary(spec, isa).inner.stack_references > 0


def attention(isa, dtype, D, seq=256, kv_heads=2):
    """Code of the kernels of attention forward and backward, two heads of D; by the kernel's name."""
    p = Program(Store())
    attention_both(p, (Dim("batch", 2), Dim("seq", seq)), heads=2, kv_heads=kv_heads, D=D, dtype=dtype)
    lowered = Lowered(p, isa, 2)
    return {call.spec.name: kernels.summary(call.spec, isa) for call in lowered.calls}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.extended
def test_attention_inner_loops_have_no_spills(name, dtype, D):
    """Every innermost loop that adds up: the products, the sums of probabilities. Loops that copy may compare with a bound on the
    stack, once a row, as may the softmax beside AMX tiles; on x86 none of them has a vector there."""
    isa = target(name)
    product = FP32_PRODUCT.get(name, "vfmadd231ps") if dtype == "fp32" else ANY_PRODUCT.get(name, "vfmadd231ps")
    g = attention_microkernels.Geometry.of(isa, dtype, D)
    products = {"attention": 2, "attention_backward_dkdv": 5, "attention_backward_dq": 3}
    for kernel, code in attention(isa, dtype, D).items():
        adding = [loop for loop in code.loops if loop.accumulators]
        assert name.startswith("neon") or not any(loop.vector_spills for loop in code.loops), kernel
        if product == "tdpbf16ps":  # a product is a loop of its own for each corner of the result
            tiles = [x for x in adding if product in x.multiply_adds]
            assert tiles or kernel not in products, kernel
            assert all(x.multiply_adds == {product: 4} and not x.stack_references + x.stores for x in tiles), kernel
            continue
        assert all(loop.stack_references == 0 for loop in adding), kernel
        if kernel in products:
            tiles = [x for x in adding if x.multiply_adds == {product: g.rows * g.vectors} == {product: x.accumulators}]
            assert len(tiles) == products[kernel], (kernel, [x.multiply_adds for x in adding])
            assert all(loop.stores == 0 for loop in tiles), kernel


def test_heads_that_share_keys_have_the_same_inner_loops():
    """Of each kernel: multiply-adds and accumulators of every loop that adds up."""
    isa = target("avx512_bf16")

    def loops(kv_heads):
        found = attention(isa, "bf16", 64, kv_heads=kv_heads)
        return {name: [(x.multiply_adds, x.accumulators) for x in code.loops if x.accumulators] for name, code in found.items()}

    assert loops(1) == loops(2)
    shared = attention(isa, "bf16", 64, kv_heads=1).values()
    assert not any(loop.vector_spills or (loop.accumulators and loop.stack_references) for x in shared for loop in x.loops)


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.extended
def test_inner_loops_of_short_attention_have_no_spills(D, kv_heads):
    isa = target("avx512_bf16")
    products = {"attention_single_block": 4, "attention_backward_single_block": 9}
    found = attention(isa, "bf16", D, seq=64, kv_heads=kv_heads)
    assert set(found) == {*products, "attention_delta"}
    for kernel, code in found.items():
        assert not any(loop.stack_references for loop in code.loops if loop.accumulators), kernel
        assert not any(loop.vector_spills for loop in code.loops), kernel
        tiles = [loop for loop in code.loops if loop.multiply_adds == {"vdpbf16ps": 16}]
        assert len(tiles) == products.get(kernel, 0), kernel
        assert all(loop.accumulators == 16 and loop.stores == 0 for loop in tiles), kernel


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.extended
def test_an_attention_tile_with_too_many_rows_is_seen_to_spill(name, monkeypatch):
    isa = target(name)
    monkeypatch.setattr(
        attention_microkernels.Geometry,
        "of",
        lambda isa, dtype, D: attention_microkernels.Geometry(D, 1, isa.lanes, isa.registers // 2),
    )
    for kernel, code in attention(isa, "fp32", 64).items():
        assert (kernel == "attention_delta") != (code.inner.vector_spills > 0), kernel


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_every_kernel_of_gpt2_has_an_inner_loop_with_its_counts(dtype):
    """Products and attention multiply there, and what sums up or moves bytes reads there: classifier, optimizer and all."""
    isa = target("avx512_bf16")
    seen = set()
    for u in kernels.used_by(gpt2(dtype), isa):
        inner = kernels.summary(u.spec, isa).inner
        assert inner is not None, u
        if u.spec.name in (*GEMMS, "adamw", "sum_squares") or u.spec.name.startswith(("attention", "row_losses")):
            assert inner.products > 0, u
        if u.spec.name != "constant_init":
            assert inner.loads > 0, u
        seen |= set(u.ops)
    assert {"linear_gelu", "attention_backward", "classifier", "layernorm_backward", "bias_grad", "embedding_dwte", "adamw"} <= seen


@pytest.mark.parametrize("name", ["avx2", "generic"])
@pytest.mark.extended
def test_no_kernel_uses_wider_registers_than_its_isa(name):
    isa = target(name)
    for u in kernels.used_by(gpt2("bf16"), isa):
        widest = kernels.summary(u.spec, isa).widest
        assert machine_code.WIDTHS.get(widest, 0) <= 4 * isa.lanes, u


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


def test_a_loop_is_its_blocks_wherever_they_stand():
    """The inner loop stands behind the jump back of the outer one, whose own blocks hold a stack reference."""
    text = """
.LBB0_1:
\tmovaps\t-112(%rsp), %xmm0
\txorl\t%r9d, %r9d
\ttestq\t%r8, %r8
\tjne\t.LBB0_3
.LBB0_2:
\tdecq\t%rcx
\tjne\t.LBB0_1
\tretq
.LBB0_3:
\taddps\t(%rdi), %xmm1
\tdecq\t%r8
\tjne\t.LBB0_3
\tjmp\t.LBB0_2
"""
    code = machine_code.read(text)
    assert [(x.label, x.instructions, x.stack_references) for x in code.loops] == [(".LBB0_3", 3, 0)]
    assert code.stack_references == 1


def test_only_loops_without_loops_in_them_count():
    nested = ".LBB0_1:\n\tnop\n.LBB0_2:\n\tvaddps\t%ymm1, %ymm0, %ymm1\n\tjne\t.LBB0_2\n\tjmp\t.LBB0_1\n"
    assert [loop.label for loop in machine_code.read(nested).loops] == [".LBB0_2"]


def test_command_lists_and_shows(capsys):
    assert main.main(["inspect", "--preset", "shakespeare-char"]) == 0
    assert "weight_gradient_" in capsys.readouterr().out
    assert main.main(["inspect", "linear_gelu", "--json"]) == 0
    *_, row, few = sorted(json.loads(capsys.readouterr().out)["kernels"], key=lambda row: row["symbol"])
    assert few["symbol"].startswith("skinny_gemm_") and row["symbol"].startswith("gemm_")
    assert few["code"]["inner"]["stack_references"] == 0
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
