"""Products of a few rows, as decoding has them: against float64, which runs get them, what the compiler makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cuda import gemm_config
from barellm.cuda.compile import triton_compile
from barellm.cuda.kernel import Launch, Sizes, Target
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from barellm.tools.inspect import device_code
from tests.cases import as_operand, chain_bound, normal, operands
from tests.cpu.test_models import batch_of, open_session
from tests.cuda.check import InterpretedSession, check_op, stored
from tests.cuda.test_matmul import FORWARD, each_dtype, linear
from tests.cuda.test_models import same_weights
from tests.simulators.mock import Gpu

MODEL = ModelConfig(layers=1, heads=3, d_model=21, vocab_size=37, padded_vocab=41, max_seq=19)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 65, 33), (8, 1, 7, 129), (2, 4, 19, 4097), (1, 3, 5, 9000)], ids=str)
def test_matmul(dtype, shape):
    x, _, weight = operands(shape, dtype)
    bounds = {"y": chain_bound(x.values, as_operand(weight, dtype).T)}
    check_op(ops.Matmul, {"x": x, "weight": weight}, bounds=bounds, plan=(shape[0], shape[1]))


@pytest.mark.parametrize("build_", FORWARD, ids=lambda f: f.__name__)
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 4e-3)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_is_fused_means_its_sequence(build_, compute, limit, bias):
    C, F = 35, 77
    p = Program(Store(), compute=compute)
    build_(p, p.input("x", (Dim("batch", 8), Dim("seq", 1), C), compute), bias, C, F)
    session, oracle = InterpretedSession({"op": p}), ReferenceSession({"op": p})
    assert [call.spec.name for call in session.lowered["op"].launches] == ["skinny_gemm"]
    for batch in (1, 5, 8):
        for name, t in {**p.named, **p.store.tensors}.items():
            if t.role in ("input", "parameter"):
                shape = tuple({"batch": batch, "seq": 1}[n.name] if isinstance(n, Dim) else n for n in t.shape)
                for s in (session, oracle):
                    s.write(name, stored(normal(*shape, seed=batch), compute))
        for s in (session, oracle):
            s.run("op", batch=batch, seq=1)
        for name, t in p.named.items():
            if t.role == "output":
                got, want = session.read(name).astype(np.float64), oracle.read(name)
                assert np.abs(got - want).max() <= limit * np.abs(want).max(), name


def test_no_row_depends_on_how_many_there_are():
    p = Program(Store(), compute="bf16")
    linear(p, p.input("x", (Dim("batch", 8), Dim("seq", 1), 100), "bf16"), True, 100, 31)
    session = InterpretedSession({"op": p})
    for name, t in p.store.tensors.items():
        session.write(name, normal(*t.shape, seed=2))
    x = normal(8, 1, 100, seed=3)
    found = []
    for batch in (8, 3, 1):
        session.write("x", stored(x[:batch], "bf16"))
        session.run("op", batch=batch, seq=1)
        found.append(session.read("y"))
    assert np.array_equal(found[0][:3], found[1]) and np.array_equal(found[1][:1], found[2])


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-4), ("bf16", 0.1)])
def test_decoding_takes_them_token_by_token_and_a_long_prompt_does_not(gpu, compute, limit):
    """Both ways stand in the program, and a run launches one."""
    oracle = open_session(ReferenceSession, MODEL, (1, 19), compute)
    session = open_session(CudaSession, MODEL, (1, 19), compute)
    session.run("init", seed=3)
    same_weights(session, oracle)
    tokens, _ = batch_of(MODEL, 1, 19, seed=1)
    pos = 0
    for count, few in ((9, 1), (8, 5), (1, 5), (1, 5)):  # behind the last token's row the head has one row always
        gpu.launched.clear()
        for s in (session, oracle):
            s.write("tokens", tokens[:1, pos : pos + count])
            s.run("decode", batch=1, seq=count, pos=pos)
        got, want = session.read("logits").reshape(-1), oracle.read("logits").reshape(-1)
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)
        names = [name for name, _ in gpu.launched]
        assert (names.count("skinny_gemm"), names.count("gemm")) == (few, 5 - few), names
        pos += count


def test_training_has_one_way_only():
    config = preset("gpt2-124m").model
    _, programs = build(config, batch=2, seq=64, compute="bf16", decode_batch=1)
    calls = lower_and_plan(programs, Target(90)).calls
    names = {name: [call.spec.name for call in found] for name, found in calls.items()}
    assert "skinny_gemm" not in names["eval"] and names["decode"].count("skinny_gemm") == 4 * config.layers + 1


@pytest.mark.extended
def test_every_weight_is_read_once_16_bytes_at_a_time():
    """Of GPT-2's widths: the loads of a thread are those of its share of the weight and nothing spills."""
    _, programs = build(preset("gpt2-124m").model, compute="bf16", decode_batch=1)
    found = [c for c in lower_and_plan(programs, Target(90)).calls["decode"] if c.spec.name == "skinny_gemm"]
    for call in {c.spec: c for c in found}.values():
        assert isinstance(call, Launch)
        constants = dict(call.spec.constants)
        asm = triton_compile(call.spec, 90).asm
        code = device_code.read(asm["cubin"], shared=0)
        threads = 32 * dict(call.spec.options)["num_warps"]
        wide = asm["ptx"].count("ld.global.v4.b32")
        assert code.spills == 0 and code.registers <= 64
        assert wide >= constants["BN"] * constants["BK"] // (8 * threads), (wide, constants)
        blocks = call.grid(Sizes(1, 1))[0]
        assert blocks * constants["BN"] >= constants["N"] > (blocks - 1) * constants["BN"]
        assert call.grid(Sizes(1, gemm_config.SKINNY_M + 1)) == (0,) or constants["N"] == 50304
