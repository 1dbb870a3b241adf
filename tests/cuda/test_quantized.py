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
from barellm.cuda.step import lower_and_plan
from barellm.inspect import device_code
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.quantization import packed_matrix, scheme
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.cases import normal
from tests.cuda.check import InterpretedSession, check_op
from tests.quantized_cases import CASES, case


@pytest.mark.parametrize("weights, dtype, shape", CASES, ids=str)
def test_product(weights, dtype, shape):
    c = case(weights, dtype, shape)
    given = c.pop("given")
    check_op(ops.QuantizedMatmul, given, **{**c, "plan": (shape[0], shape[1] + 8)})


@pytest.mark.parametrize("weights", ["int4", "nf4"])
def test_every_word_of_16_bits_is_exact_in_both_halves_of_a_register(weights):
    """A value depends on the word and the half alone; that each word's place is the right column and element, `test_product`
    says."""
    how, tiles, blocks = scheme(weights), 64, 64
    low = np.arange(1 << 16)
    halves = np.stack([low, (low * 40503 + 77) % (1 << 16)], 1).astype(np.uint16)
    nibbles = halves.view(np.uint8).reshape(tiles, blocks, 64)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], 2)
    scales = np.exp2(np.arange(16) - 8.0) * np.ones((tiles, how.groups(8 * blocks), 1))
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


MODEL = ModelConfig(layers=1, heads=2, channels=24, vocab_size=37, padded_vocab=41, max_seq=24)


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


@pytest.mark.parametrize("weights, most", [("int4", 6.5), ("nf4", 16.0), ("int8", 7.0)])
def test_an_element_takes_few_instructions_and_nothing_spills(weights, most):
    """All instructions of a turn of the loop, loads and addresses too, over the elements that a thread multiplies in it."""
    _, programs = build(preset("gpt2-124m").model, compute="bf16", decode_batch=1)
    programs = {"decode": programs["decode"]}
    quantize_programs(programs, weights)
    found = [c for c in lower_and_plan(programs, Target(90)).calls["decode"] if c.spec.name == "quantized_few_rows"]
    call = next(c for c in found if dict(c.spec.constants)["K"] == 3072)
    code = device_code.read(cubin := triton_compile(call.spec, 90).asm["cubin"], shared=0)
    loop = longest_loop(device_code.disassembled(cubin))
    each = dict(call.spec.constants)["BB"] * 128 / (32 * dict(call.spec.options)["num_warps"])
    assert loop.count("FFMA") >= each / 2 and code.spills == 0 and code.registers <= 200
    assert len(loop) / each <= most
