"""Products with weights of few bits on the GPU: against float64, every word at every place, a model, what the compiler makes
of them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.assembly.quantized import Quantizing, quantize_programs
from barellm.cuda.compile import triton_compile
from barellm.cuda.kernel import Target
from barellm.cuda.kernels.gemm.quantized_mma import INT4_BF16, INT4_FP16, NF4_BF16, NF4_FP16, WARP_BLOCKS
from barellm.cuda.step import lower_and_plan
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.quantization import INTEGERS, NORMAL_QUANTILES, packed_matrix, scheme
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from barellm.tools.inspect import device_code
from tests.cases import normal
from tests.cuda import check
from tests.cuda.check import InterpretedSession, check_op
from tests.quantized_cases import CASES, case
from tests.simulators.ptx.snippet import run_on


@pytest.mark.parametrize("weights, dtype, shape", CASES, ids=str)
def test_product(weights, dtype, shape):
    c = case(weights, dtype, shape)
    given = c.pop("given")
    check_op(ops.QuantizedMatmul, given, **{**c, "plan": (shape[0], shape[1] + 8)})


@pytest.mark.parametrize("target", [90, 80])
@pytest.mark.parametrize("weights, dtype, shape", [("int4", "bf16", (1, 7, 37, 1096)), ("nf4", "fp16", (1, 8, 16, 72))], ids=str)
@pytest.mark.extended
def test_a_product_on_tensor_cores_as_it_is_compiled(weights, dtype, shape, target, monkeypatch):
    monkeypatch.setattr(check, "DEVICE", "ptx")
    c = case(weights, dtype, shape)
    check_op(ops.QuantizedMatmul, c.pop("given"), **c, target=Target(target))


@pytest.mark.parametrize("rows", [1, 8])
def test_a_residual_is_added_on_the_way_out(rows):
    c = case("int4", "bf16", (1, rows, 37, 72))
    given, bound = c["given"], c["bounds"]["y"]
    p = Program(Store(), compute="bf16")
    shape = (Dim("batch", 1), Dim("seq", 8))
    x, residual = p.input("x", (*shape, 72), "bf16"), p.input("residual", (*shape, 37), "fp32")
    names = {"codes": "u4", "scales": "fp16"}
    operands = {k: p.store.get(k, given[k].values.shape, dtype, "parameter") for k, dtype in names.items()}
    y = p.apply(ops.QuantizedMatmul, x=x, **operands, weights="int4", columns=37).y
    p.output("y", p.add(residual, y))
    session = InterpretedSession({"op": p})
    assert [op.name for op in session.lowered["op"].ops] == ["quantized_linear_residual"]
    added = normal(1, rows, 37, seed=5).astype(np.float32)
    for name, values in {**{k: g.values for k, g in given.items()}, "residual": added}.items():
        session.write(name, values)
    session.run("op", batch=1, seq=rows)
    w = packed_matrix(given["codes"].values.astype(np.uint8), given["scales"].values, scheme("int4"), 37, 72)
    wanted = given["x"].values @ w.T + added
    assert (abs(session.read("y") - wanted) <= bound + 2.0**-20 * abs(wanted)).all()


def test_the_kernel_is_chosen_by_format_and_shape():
    """Of tensor cores only for 4-bit codes, 16 bits and whole blocks."""
    wanted = {("int4", "bf16", 64), ("int4/128", "fp16", 72), ("nf4", "bf16", 64)}
    for weights, dtype, K in [
        *wanted,
        ("int4", "fp32", 64),
        ("int4", "bf16", 63),
        ("nf4", "bf16", 64),
        ("int8", "bf16", 64),
        ("nf4-v1", "bf16", 64),
    ]:
        p = Program(Store(), compute=dtype)
        how = scheme(weights)
        codes, scales = how.shapes(32, K)
        operands = {
            "codes": p.store.get("codes", codes, how.codes, "parameter"),
            "scales": p.store.get("scales", scales, "fp16", "parameter"),
        }
        x = p.input("x", (Dim("batch", 1), Dim("seq", 4), K), dtype)
        p.output("y", p.apply(ops.QuantizedMatmul, x=x, **operands, weights=weights, columns=32).y)
        names = {s.name for s in lower_and_plan({"op": p}, Target(90)).specs}
        assert ("quantized_mma" in names) == ((weights, dtype, K) in wanted) == ("quantized_skinny_gemm" not in names)


@pytest.mark.parametrize("weights", ["int4", "nf4"])
@pytest.mark.extended
def test_every_word_of_16_bits_is_exact_in_both_halves_of_a_register(weights):
    """A value depends on the word and the half alone; that each word's place is the right column and element, `test_product`
    says."""
    how, tiles, blocks = scheme(weights), 64, 64
    low = np.arange(1 << 16)
    halves = np.stack([low, (low * 40503 + 77) % (1 << 16)], 1).astype(np.uint16)
    nibbles = halves.view(np.uint8).reshape(tiles, blocks, 64)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], 2)
    scales = np.exp2(np.arange(16) - 8.0) * np.ones((tiles, how.groups(8 * blocks) + 1, 1))
    scales[:, -1] = 9 * np.arange(16) - 70  # the exponents of columns
    p = Program(Store())
    x = p.input("x", (Dim("batch", 1), Dim("seq", 16), 8 * blocks), "fp32")
    operands = {
        "codes": p.store.get("codes", codes.shape, "u4", "parameter"),
        "scales": p.store.get("scales", scales.shape, "fp16", "parameter"),
    }
    p.output("y", p.apply(ops.QuantizedMatmul, x=x, **operands, weights=weights, columns=16 * tiles).y)
    session = InterpretedSession({"op": p})
    for name, values in (("codes", codes), ("scales", scales), ("x", np.zeros((1, 9, 8 * blocks), np.float32))):
        session.write(name, values)
    session.run("op", batch=1, seq=9)
    assert {int(h) for h in halves[:, 1]} == set(range(1 << 16))
    (matrix,) = (t for t in session.plan.offsets if t.name.endswith(".weight"))
    assert np.array_equal(session.stored(matrix), packed_matrix(codes, scales, how, 16 * tiles, 8 * blocks))


MODEL = ModelConfig(layers=1, heads=2, d_model=24, vocab_size=37, padded_vocab=41, max_seq=24)


def test_a_model_decodes_and_evaluates_with_codes():
    _, programs = build(MODEL, batch=1, seq=13, compute="bf16", decode_batch=1)
    programs = {name: programs[name] for name in ("eval", "decode")}
    matrices = quantize_programs(programs, "int4")
    gpu, oracle = InterpretedSession(programs), ReferenceSession(programs)
    for s in (gpu, oracle):
        loading = Quantizing(s, matrices)
        for name, t in loading.tensors.items():
            if t.role == "parameter":
                loading.write_rows(name, 0, (0.3 * normal(*t.shape, seed=len(name))).astype(np.float32))
    tokens = np.random.default_rng(0).integers(0, 37, (1, 13)).astype(np.int32)
    pos = 0
    for count in (11, 1, 1):  # a prompt of more than a few rows, then single ones
        for s in (gpu, oracle):
            s.write("tokens", tokens[:, pos : pos + count])
            s.run("decode", batch=1, seq=count, pos=pos)
        got, want = gpu.read("logits"), oracle.read("logits")
        assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want), pos
        pos += count
    for s in (gpu, oracle):
        s.write("tokens", tokens)
        s.write("targets", tokens[:, ::-1].copy())
        s.run("eval", batch=1, seq=13, inv_targets=1 / 13)
    assert np.isclose(gpu.read("loss"), oracle.read("loss"), rtol=2e-2)


def longest_loop(sass: str) -> list[str]:
    """The mnemonics of the longest loop that holds no other."""
    places, code, loops = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            places[label[1]] = len(code)
        elif found := device_code.INSTRUCTION.match(line):
            code.append(found[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if back and back[1] in places:
                loops.append((places[back[1]], len(code)))
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    return max((code[a:b] for a, b in inner), key=len)


@pytest.mark.parametrize(
    "weights, compute, most",
    [
        ("int4", "bf16", 2.8),
        ("int4", "fp16", 2.6),
        ("int4", "fp32", 6.5),
        ("nf4", "bf16", 4.9),
        ("nf4", "fp32", 16.0),
        ("int8", "bf16", 7.0),
    ],
)
@pytest.mark.extended
def test_an_element_takes_few_instructions_and_nothing_spills(weights, compute, most):
    """All instructions of a turn of the loop, loads and addresses too, over the elements that a thread multiplies in it: by one
    row, and on tensor cores by eight."""
    _, programs = build(preset("gpt2-124m").model, compute=compute, decode_batch=1)
    programs = {"decode": programs["decode"]}
    quantize_programs(programs, weights)
    wide = weights != "int8" and compute != "fp32"
    name = "quantized_mma" if wide else "quantized_skinny_gemm"
    found = [c for c in lower_and_plan(programs, Target(90)).calls["decode"] if c.spec.name == name]
    call = next(c for c in found if dict(c.spec.constants)["K"] == 3072)
    code = device_code.read(cubin := triton_compile(call.spec, 90).asm["cubin"], shared=0)
    loop = longest_loop(device_code.disassembled(cubin))
    if wide:
        each = WARP_BLOCKS.value * 128 / 32
        assert sum(word.startswith("HMMA.16816.F32") for word in loop) == each / 8 and code.registers <= 64
    else:
        each = dict(call.spec.constants)["BB"] * 128 / (32 * dict(call.spec.options)["num_warps"])
        assert loop.count("FFMA") >= each / 2 and code.registers <= 200
    assert code.spills == 0
    assert len(loop) / each <= most


@pytest.mark.parametrize(
    "dtype, asm, table",
    [
        ("bf16", INT4_BF16, INTEGERS),
        ("fp16", INT4_FP16, INTEGERS),
        ("bf16", NF4_BF16, NORMAL_QUANTILES),
        ("fp16", NF4_FP16, NORMAL_QUANTILES),
    ],
)
@pytest.mark.extended
def test_an_instruction_makes_each_code_of_every_word_exact(dtype, asm, table):
    """All words of 16 bits in both halves, as the PTX machine runs them: a product with the columns of the identity gives the
    operand itself, in the places that the ISA's figures have."""
    low = np.arange(1 << 16)
    high = (low * 40503 + 77) % (1 << 16)
    words = (low | high << 16).astype(np.uint32).reshape(-1, 8, 4)  # (warps, g, t)
    names = {f"${k}": f"%r{k + 1}" for k in range(16)}
    text = re.sub(r"\$\d+", lambda found: names[found[0]], asm.value)
    for k, row in np.ndindex(2, 8):  # four elements on or not; the row of x that is one at this element of this lane
        t, e = divmod(row, 2)
        one = {"bf16": 0x3F80, "fp16": 0x3C00}[dtype] << 16 * e
        body = f"""
        ld.global.b32 %r5, [%rd3];
        mov.u32 %r30, %laneid;
        setp.eq.u32 %p1, %r30, {4 * row + t};
        selp.b32 %r{9 + k}, {one}, 0, %p1;
        mov.b32 %r{10 - k}, 0;
        {" ".join(f"mov.b32 %r{n}, 0;" for n in range(13, 17))}
        {text}
        """
        found = {}
        for h in range(2):  # sums of columns 2 t and 2 t + 1, in row g and in row g + 8
            stored = body + f"st.global.b32 [%rd4], %r{1 + 2 * h}; st.global.b32 [%rd4+4], %r{2 + 2 * h};"
            result = np.zeros(len(low), "u8")
            run_on(stored, words.reshape(-1).astype("u8"), result, threads=len(low))
            found[h] = result.view(np.float32).reshape(-1, 8, 8)
        for h in range(2):
            nibble = np.array(table, np.float32)[words[:, :, t] >> (16 * h + 8 * e + 4 * k) & 15]
            wanted = np.zeros_like(found[h])
            wanted[:, :, row] = nibble
            assert (found[h] == wanted).all(), (k, row, h)
