"""Products with weights of few bits on the CPU: against float64, every word at every place, whole models, machine code."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.assembly.quantized import Quantizing, quantize_programs
from barellm.cpu import jit
from barellm.cpu.isa import ISA, cross
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.gemm import quantized_digits
from barellm.cpu.kernels.gemm.quantized import quantized_skinny_gemm
from barellm.cpu.step import CpuSession, Lowered
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.quantization import pack, packed_matrix, quantize, scheme
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from barellm.tools.inspect import machine_code
from barellm.tools.inspect.kernels import ARM_TRIPLE, X86_TRIPLE
from tests.cases import normal, operands
from tests.cpu.check import ISAS, changed, check_op, isa_named
from tests.quantized_cases import CASES, case

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@pytest.fixture
def all_digits(monkeypatch):
    """Products of bytes wherever there is the instruction, also where another kernel is faster."""
    changed(monkeypatch, quantized_digits, DEQUANTIZED={})


@each_isa
@pytest.mark.parametrize("weights, dtype, shape", CASES, ids=str)
@pytest.mark.extended
def test_product(isa, weights, dtype, shape):
    c = case(weights, dtype, shape)
    given = c.pop("given")
    check_op(ops.QuantizedMatmul, isa, given, threads=(1, 3), **c)


@each_isa
@pytest.mark.parametrize("weights, dtype, shape", CASES, ids=str)
def test_product_of_digits(all_digits, isa, weights, dtype, shape):
    """Every format by products of bytes, as the format's fastest kernel or not."""
    if not isa.byte_dot:
        pytest.skip("no digits on this ISA")
    c = case(weights, dtype, shape)
    check_op(ops.QuantizedMatmul, isa, c.pop("given"), threads=(1, 3), **c)


@each_isa
@pytest.mark.parametrize("weights, dtype, depth", [("int8", "fp32", 9), ("int4", "bf16", 15), ("nf4/32", "fp16", 150)])
def test_few_rows_keep_to_the_scratch_that_they_ask_for(isa, weights, dtype, depth):
    """No run has more rows, so there is no product of panels, whose larger scratch would hide what is written behind theirs."""
    c = case(weights, dtype, (1, 4, 19, depth)) | {"plan": (1, 4)}
    check_op(ops.QuantizedMatmul, isa, c.pop("given"), threads=(1, 2), **c)


@pytest.mark.parametrize("isa", [isa_named(ISAS[0])], ids=ISAS[:1])
@pytest.mark.parametrize("weights", ["int4", "nf4"])
@pytest.mark.parametrize("rows", [4, 8], ids=["in registers", "in panels"])
@pytest.mark.extended
def test_every_word_of_16_bits_at_every_place_is_exact(isa, weights, rows):
    """Unit vectors read single elements: of 65,536 blocks, each with another word in each of its 32 places."""
    how, tiles = scheme(weights), 1 << 16
    words = (np.arange(tiles)[:, None] + 2053 * np.arange(32)).astype(np.uint16)
    nibbles = words.view(np.uint8).reshape(tiles, 64)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], 1).reshape(tiles, 1, 128)
    scales = np.exp2(np.arange(16) - 8.0) * np.ones((tiles, 2, 1))
    scales[:, 1] = 9 * np.arange(16) - 70  # the exponents of columns
    p = Program(Store())
    x = p.input("x", (Dim("batch", 1), Dim("seq", 8), 8), "fp32")
    operands = {
        "codes": p.store.get("codes", codes.shape, "u4", "parameter"),
        "scales": p.store.get("scales", scales.shape, "fp16", "parameter"),
    }
    p.output("y", p.apply(ops.QuantizedMatmul, x=x, **operands, weights=weights, columns=16 * tiles).y)
    session = CpuSession({"op": p}, isa=isa)
    session.write("codes", codes)
    session.write("scales", scales)
    assert np.array_equal(session.read("codes"), codes)
    want = packed_matrix(codes, scales, how, 16 * tiles, 8)
    for first in range(0, 8, rows):
        session.write("x", np.eye(8, dtype=np.float32)[None, first : first + rows])
        session.run("op", batch=1, seq=rows)
        assert np.array_equal(session.read("y")[0], want.T[first : first + rows])
    session.close()


MODEL = ModelConfig(layers=2, heads=3, d_model=39, vocab_size=101, padded_vocab=103, max_seq=24)


def quantized_model(compute: str) -> tuple[dict[str, Program], dict]:
    _, programs = build(MODEL, batch=2, seq=13, compute=compute, decode_batch=1)
    programs = {name: programs[name] for name in ("eval", "decode")}
    return programs, quantize_programs(programs, "int4")


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.extended
def test_a_model_decodes_and_evaluates_with_codes(compute, limit):
    programs, matrices = quantized_model(compute)
    cpu = CpuSession(programs, threads=2)
    ops_of = [op.name for op in cpu.lowered["decode"].ops if "matmul" in op.name or "linear" in op.name]
    assert ops_of == ["quantized_linear", "quantized_linear_residual", "quantized_linear_gelu", "quantized_linear_residual"] * 2 + [
        "quantized_matmul"
    ]
    assert "quantized_classifier_loss" in [op.name for op in cpu.lowered["eval"].ops]
    assert {name for name, m in matrices.items() if m.stays} == {"wte"} and matrices["wte"].how.name == "int8"
    assert "h.0.mlp.c_fc.weight" not in cpu.tensors and "wte" in cpu.tensors
    oracle = ReferenceSession(programs)
    sessions = [Quantizing(s, matrices) for s in (cpu, oracle)]
    for name, t in sessions[0].tensors.items():
        if t.role == "parameter":
            values = (0.3 * normal(*t.shape, seed=len(name)) + (len(t.shape) == 1)).astype(np.float32)
            for lo in range(0, len(values), 21):  # pieces that end inside a tile
                sessions[0].write_rows(name, lo, values[lo : lo + 21])
            sessions[1].write_rows(name, 0, values)
    assert np.array_equal(cpu.read("h.1.attn.c_attn.weight.codes"), oracle.read("h.1.attn.c_attn.weight.codes"))
    tokens = np.random.default_rng(0).integers(0, 101, (2, 13)).astype(np.int32)
    pos = 0
    for count in (7, 1, 3, 1):  # a prompt in panels, then rows in registers
        for s in (cpu, oracle):
            s.write("tokens", tokens[:1, pos : pos + count])
            s.run("decode", batch=1, seq=count, pos=pos)
        got, want = cpu.read("logits"), oracle.read("logits")
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want), pos
        pos += count
    for s in (cpu, oracle):
        s.write("tokens", tokens)
        s.write("targets", tokens[:, ::-1].copy())
        s.run("eval", batch=2, seq=13, inv_targets=1 / 26)
    assert np.isclose(cpu.read("loss"), oracle.read("loss"), rtol=limit)
    cpu.close()


def loops_of(weights: str, isa: ISA, x: str) -> machine_code.Loop:
    """The loop of one row with gpt2-774m's widths."""
    constants = {
        "cols": 1280,
        "depth": 1280,
        "weights": weights,
        "dims": ("batch", "seq"),
        "inner": 1,
        "epilogues": (),
        "mode": "store",
    }
    spec = Specialisation(
        quantized_skinny_gemm, ("fp32", None, x, scheme(weights).codes, "fp16", None, None), tuple(sorted(constants.items()))
    )
    code = machine_code.read(jit.assembly(spec.ir(isa), isa))
    found = [loop for loop in code.loops if loop.products and (not isa.byte_dot or "vpdpbusd" in loop.multiply_adds)]
    return min(found, key=lambda loop: loop.products)


@pytest.mark.parametrize(
    "weights, name, x, most",
    [
        ("int4", "avx2", "fp32", 0.56),
        ("nf4", "avx2", "fp32", 0.56),
        ("int8", "avx2", "fp32", 0.47),
        ("int4", "avx512", "fp32", 0.24),
        ("int8", "avx512", "fp32", 0.22),
    ],
)
def test_an_element_takes_few_instructions(weights, name, x, most):
    """Those of a turn of the loop, all counted, over the 512 weights that a turn multiplies."""
    loop = loops_of(weights, cross(name, X86_TRIPLE), x)
    assert loop.instructions / 512 <= most, loop
    assert loop.stack_references <= 12, loop


@pytest.mark.parametrize(
    "weights, x, most", [("int4", "bf16", 0.1), ("int4", "fp32", 0.13), ("nf4", "bf16", 0.185), ("int8", "bf16", 0.125)]
)
def test_an_element_takes_few_instructions_where_bytes_are_multiplied(weights, x, most):
    """Those of a group of x and its 16 columns: products of bytes, and what brings the group's sum to the total."""
    loop = loops_of(weights, cross("amx_bf16", X86_TRIPLE), x)
    times = quantized_digits.products_of_a_weight(weights, x)
    elements = quantized_digits.group_of(scheme(weights))
    assert loop.multiply_adds["vpdpbusd"] == elements * times * 16 // 64, loop
    assert loop.instructions / (16 * elements) <= most and not loop.vector_spills, loop


@pytest.mark.parametrize(
    "name, triple, few, many",
    [
        ("amx_bf16", X86_TRIPLE, ("vpshufb", "vpdpbusd"), "tdpbf16ps"),
        ("avx512", X86_TRIPLE, ("vpshufb", "vfmadd"), "vfmadd"),
        ("neon_bf16", ARM_TRIPLE, ("tbl", "bfdot"), "bfdot"),
    ],
)
def test_other_processors_look_up_in_registers_too(name, triple, few, many):
    """Compiled for them and not run."""
    isa = cross(name, triple)
    c = case("nf4", "bf16", (1, 9, 33, 72))
    p = Program(Store())
    x = p.input("x", (Dim("batch", 1), Dim("seq", 9), 72), "bf16")
    operands = {n: p.store.get(n, g.values.shape, g.dtype, "parameter") for n, g in c["given"].items() if n != "x"}
    p.apply(ops.QuantizedMatmul, x=x, **operands, weights="nf4", columns=33)
    first, second = (jit.assembly(call.spec.ir(isa), isa) for call in Lowered(p, isa, 2).calls)
    assert all(word in first for word in few) and many in second


def session_of(isa: ISA, weights: str, dtype: str, codes, scales, rows: int, columns: int, depth: int) -> CpuSession:
    """A session whose only op multiplies up to `rows` rows with these codes."""
    p = Program(Store())
    x = p.input("x", (Dim("batch", 1), Dim("seq", rows), depth), dtype)
    held = p.store.get("codes", codes.shape, scheme(weights).codes, "parameter")
    factors = p.store.get("scales", scales.shape, "fp16", "parameter")
    op = p.apply(ops.QuantizedMatmul, x=x, codes=held, scales=factors, weights=weights, columns=columns)
    p.output("y", op.outputs["y"])
    session = CpuSession({"op": p}, isa=isa, threads=2)
    session.write("codes", codes)
    session.write("scales", scales)
    return session


def multiplied(session: CpuSession, x: np.ndarray) -> np.ndarray:
    session.write("x", x[None])
    session.run("op", batch=1, seq=len(x))
    return session.read("y")[0].copy()


@each_isa
@pytest.mark.parametrize("weights", ["int4", "nf4", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_row_of_digits_has_the_same_bits_in_any_company(all_digits, isa, weights, dtype):
    """Sums of whole numbers do not depend on the order; the powers of two of a row are its own."""
    if not isa.byte_dot:
        pytest.skip("no digits on this ISA")
    given = case(weights, dtype, (1, 4, 35, 150))["given"]
    session = session_of(isa, weights, dtype, given["codes"].values, given["scales"].values, 4, 35, 150)
    x = normal(4, 150) * np.float32(10.0) ** np.arange(-3, 1)[:, None].astype(np.float32)
    found = [multiplied(session, x[:rows]) for rows in (4, 3, 2, 1)]
    session.close()
    assert np.isfinite(found[0]).all() and found[0].any(1).all()
    for some in found:
        assert np.array_equal(some, found[0][: len(some)])


@each_isa
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 1e-38, 1e36])
def test_groups_of_extreme_numbers(isa, value):
    """What is not finite makes its row so and no other; zeros give zeros, the smallest nearly, and large ones do not overflow."""
    given = case("int4", "fp32", (1, 2, 17, 64), magnitudes=(1,))["given"]
    codes, scales = given["codes"].values, given["scales"].values
    session = session_of(isa, "int4", "fp32", codes, scales, 2, 17, 64)
    x = np.zeros((2, 64), np.float32)
    x[0, 35], x[1] = value, 1.0
    got = multiplied(session, x)
    session.close()
    assert np.isfinite(got[1]).all()
    if np.isfinite(value):
        w = packed_matrix(codes, scales.astype(np.float64), scheme("int4"), 17, 64)
        assert np.allclose(got[0], x[0].astype(np.float64) @ w.T, rtol=1e-6, atol=1e-32)
    else:
        assert not np.isfinite(got[0]).any()


@each_isa
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_digits_are_near_the_largest_of_their_group(isa, dtype):
    """A matrix of ones on the diagonal reads each number by itself: off by half a unit of the last digit at most."""
    if not isa.byte_dot:
        pytest.skip("no digits on this ISA")
    how = scheme("int4")
    session = session_of(isa, "int4", dtype, *pack(*quantize(np.eye(64, dtype=np.float32), how), how), 1, 64, 64)
    bits = quantized_digits.BITS[quantized_digits.digits_of(dtype)]
    x = operands((1, 1, 1, 64), dtype)[0].values.reshape(1, 64).astype(np.float32)
    got = multiplied(session, x)[0]
    session.close()
    largest = np.abs(x.reshape(2, 32)).max(1)
    unit = np.repeat(2.0 ** (np.floor(np.log2(largest)) + 1 - bits), 32)
    error = np.abs(got - x[0].astype(np.float64))
    assert (error <= unit / 2 + {"bf16": 2.0**-9, "fp32": 2.0**-24}[dtype] * np.abs(x[0])).all()
