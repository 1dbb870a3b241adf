"""A model of Llama's kind on the CPU backend, against the references of its primitive ops."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.cpu import jit
from barellm.cpu.isa import cross
from barellm.cpu.step import CpuSession, Lowered
from barellm.program.builder import Program, Store
from tests.cases import check_model
from tests.cpu.check import ISAS, isa_named
from tests.llama import llama

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_compute = pytest.mark.parametrize("compute, limit", [("fp32", 1e-5), ("bf16", 5e-2)])
# Odd widths and heads that share keys; one head of keys for all; whole vectors, and a head of keys for each.
MODELS = [{}, {"C": 7, "F": 5, "V": 131, "heads": 3, "kv_heads": 1, "D": 2}]
MODELS += [{"C": 64, "F": 64, "heads": 2, "kv_heads": 2, "D": 32, "layers": 1}]


@each_isa
@each_compute
@pytest.mark.parametrize("sizes", MODELS, ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.extended
def test_losses_and_gradients(isa, compute, limit, sizes, recompute):
    found = check_model(
        lambda programs: CpuSession(programs, isa=isa, threads=2), partial(llama, **sizes), compute=compute, limit=limit,
        ids=sizes.get("V", 53) - 2, recompute=recompute,
    )  # fmt: skip
    assert {"rope", "swiglu", "swiglu_backward", "rmsnorm_backward"} <= found
    assert not {"rmsnorm_dweight", "layernorm"} & found


@pytest.mark.parametrize("name, compute", [("neon", "fp32"), ("neon_bf16", "bf16")])
@pytest.mark.extended
def test_every_kernel_compiles_for_aarch64(name, compute):
    isa = cross(name, "aarch64-unknown-linux-gnu")
    p = Program(Store(), compute=compute)
    llama(p)
    p.backward(p.named["loss"])
    lowered = Lowered(p, isa, 2)
    for spec in {call.spec for call in lowered.calls}:
        module = jit.module(spec.ir(isa), isa)
        assert not jit.undefined_symbols(jit.target_machine(isa).emit_object(module)) - jit.ALLOWED, spec.name
    assert {"rope", "swiglu", "swiglu_backward", "norm", "norm_backward"} <= {call.spec.name for call in lowered.calls}


@each_isa
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_bits_do_not_depend_on_threads_and_recompute(isa, compute):
    found = []
    for threads, recompute in ((1, False), (2, False), (5, False), (2, True)):
        p = Program(Store(), compute=compute)
        llama(p)
        p.backward(p.named["loss"], recompute=recompute)
        session = CpuSession({"train": p}, isa=isa, threads=threads)
        r = np.random.default_rng(3)
        for name, t in p.store.tensors.items():
            if t.role == "parameter":
                session.write(name, 0.3 * r.normal(size=t.shape))
        for name in ("tokens", "targets"):
            session.write(name, r.integers(0, 51, (3, 11), dtype=np.int32))
        session.run("train", batch=3, seq=11, accumulate=0, inv_targets=1 / 33, pos=0)
        gradients = [name for name, t in p.store.tensors.items() if t.role == "gradient"]
        found.append([session.read(name).tobytes() for name in ("loss", *gradients)])
        session.close()
    assert len(gradients) == 14 and all(run == found[0] for run in found)
