"""Every kernel of the 124M programs compiles for aarch64, to the instructions that it is written for."""

import numpy as np
import pytest

from barellm.config import MOMENTS
from barellm.config.overrides import changed
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cpu.lang import sync
from barellm.cpu.step import lower_and_plan
from barellm.models import preset
from barellm.program import layouts
from barellm.program.block_layouts import block_layout
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.tools.inspect import kernels
from tests.layout_cases import layout_both

pytestmark = pytest.mark.slow
TRIPLES = ("aarch64-unknown-linux-gnu", "aarch64-apple-darwin")


def config(dtype):
    return changed(preset("gpt2-124m"), {"train.micro_batch_size": 4, "train.seq": 64, "train.dtype": dtype, "model.dropout": 0.1})


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype, instruction", [
    ("neon", "fp32", "fmla"),
    ("neon", "bf16", "fmla"),
    ("neon_bf16", "bf16", "bfdot"),
])  # fmt: skip
@pytest.mark.extended
def test_every_kernel_compiles_for_aarch64(name, dtype, instruction):
    isa = isas.cross(name, TRIPLES[0])
    products = 0
    for u in kernels.used_by(config(dtype), isa):
        module = jit.module(u.spec.ir(isa), isa)
        missing = jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED
        assert not missing, (u, missing)
        if u.spec.name in ("gemm", "weight_gradient"):
            assert f"\t{instruction}\t" in jit.target_machine(isa).emit_assembly(module), u
            products += 1
    assert products >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype, instruction", [("neon", "fp32", "fmla"), ("neon_bf16", "bf16", "bfdot")])
@pytest.mark.extended
def test_muon_compiles_for_aarch64(name, dtype, instruction):
    isa = isas.cross(name, TRIPLES[0])
    more = {"optim.name": "muon", "optim.normuon": 0.9, "optim.cautious": True, "model.layers": 1}
    found = [(op, u) for u in kernels.used_by(changed(config(dtype), more), isa) for op in u.ops]
    used = [(op, u) for op, u in found if op.startswith(("muon_", "normuon_", "gram"))]
    for op, u in used:
        module = jit.module(u.spec.ir(isa), isa)
        assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED, u
        if op.startswith("gram"):
            assert f"\t{instruction}\t" in jit.target_machine(isa).emit_assembly(module), u
    assert len({op for op, _ in used}) == 7


def test_softmax_and_top_k_compile_for_aarch64():
    isa, p = isas.cross("neon_bf16", TRIPLES[0]), Program(Store(), compute="bf16")
    for C in (29, 50_000):
        x = p.input("x", (Dim("batch", 4), C), "bf16")
        p.output("y", p.softmax(x, scale=0.5)), p.output("values", p.top_k(x, 7)[0])
    for spec in lower_and_plan({"p": p}, threads=2, isa=isa).specs:
        code = jit.target_machine(isa).emit_object(jit.module(spec.ir(isa), isa))
        assert not jit.undefined_symbols(code) - jit.ALLOWED, spec


@pytest.mark.parametrize("isa, block, instruction", [
    (isas.cross("neon_bf16", TRIPLES[0]), 32, "bfdot"),
    (isas.X86["avx512_bf16"], 8, "vdpbf16ps"),
], ids=["neon_bf16", "avx512_bf16"])  # fmt: skip
def test_products_of_blocks_compile_for_other_machines(isa, block, instruction):
    """Forward and both gradients, of blocks wider than a register tile and narrower than a vector."""
    p, shape = Program(Store(), compute="bf16"), (Dim("batch", 1), Dim("seq", 9))
    layout = block_layout(np.array([[1, 0], [1, 1]]), block)
    x = p.linear(p.input("x", (*shape, 2 * block), "fp32"), p.parameter("w", (2 * block, 2 * block)))
    h = p.block_linear(x, p.parameter("blocks", (3 * block, block)), layout=layout)
    head = p.parameter("head", (64, 2 * block))
    p.backward(p.output("loss", p.classifier(h, head, p.input("targets", shape), valid_vocab=9)))
    multiply = 0
    for spec in lower_and_plan({"p": p}, threads=2, isa=isa).specs:
        if spec.name in ("pack_blocks", "block_sparse_gemm", "pack_strips", "block_sparse_wgrad"):
            module = jit.module(spec.ir(isa), isa)
            assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED, spec
            multiply += instruction in jit.target_machine(isa).emit_assembly(module)
    assert multiply == 2, "the product, whose code the input gradient shares, and the weight gradient"


@pytest.mark.parametrize("isa, instruction", [
    (isas.cross("neon_bf16", TRIPLES[0]), "bfdot"),
    (isas.X86["avx512_bf16"], "vdpbf16ps"),
], ids=["neon_bf16", "avx512_bf16"])  # fmt: skip
@pytest.mark.extended
def test_relative_terms_compile_for_other_machines(isa, instruction):
    p = Program(Store(), compute="bf16")
    layout = layouts.parse("local:9", length=40, block=16, heads=1)
    layout_both(p, (Dim("batch", 1), Dim("seq", 40)), layout, D=4, dtype="bf16", distances=5)
    made = [spec for spec in lower_and_plan({"p": p}, threads=2, isa=isa).specs if spec.name.startswith("block_sparse_attention")]
    for spec in made:
        module = jit.module(spec.ir(isa), isa)
        assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED, spec
        assert instruction in jit.target_machine(isa).emit_assembly(module)
    assert len(made) == 3, "forward, rows, columns"


@pytest.mark.parametrize("futex, triple", [(True, TRIPLES[0]), (False, TRIPLES[0]), (False, TRIPLES[1])])
def test_the_native_side_of_threads_compiles_for_aarch64(futex, triple):
    isa = isas.cross("neon", triple)
    module = jit.module(sync.ir(arm=True, futex=futex), isa)
    assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED
    assert "CNTVCT_EL0" in jit.target_machine(isa).emit_assembly(module)


@pytest.mark.parametrize("op, instruction", [("linear", "bfdot"), ("attention", "bfdot"), ("layernorm", "fmla")])
def test_kernels_compile_for_a_mac(op, instruction):
    isa = isas.cross("neon_bf16", TRIPLES[1])
    for u in kernels.select(kernels.used_by(config("bf16"), isa), op):
        assert instruction in jit.assembly(u.spec.ir(isa), isa), u


@pytest.mark.parametrize("moments", MOMENTS[1:])
@pytest.mark.parametrize("name", ["neon", "neon_bf16"])
@pytest.mark.extended
def test_moments_of_16_bits_compile_for_aarch64(name, moments):
    """Two vectors of codes are packed by one uzp, and no lane is handled alone."""
    isa = isas.cross(name, TRIPLES[0])
    used = kernels.used_by(changed(config("bf16"), {"optim.moments": moments}), isa)
    packed = [u for u in used if u.spec.name == "adamw" and "i16" in u.spec.operands[2:4]]
    assert packed
    for u in packed:
        module = jit.module(u.spec.ir(isa), isa)
        assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED
        assembly = jit.target_machine(isa).emit_assembly(module)
        assert assembly.count("\tuzp1\t") >= 1 and assembly.count("\tuzp2\t") >= 3, u
