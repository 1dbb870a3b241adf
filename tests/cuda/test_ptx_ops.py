"""A sample of the kernels as Triton compiles them for sm_80, run by the PTX machine beside the float64 references. With
`--device ptx` all kernel tests run so."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from barellm.program import ops
from tests.cases import adamw_case, backward_case, bounded, forward_case, normal, viewed_case
from tests.cuda import check
from tests.cuda.check import EPS, check_op, persistent, tokens
from tests.gates_cases import by_mode, gated_backward_case, logits_case, mix_backward_case
from tests.muon_cases import gram_case, update_case
from tests.simulators.ptx import launch


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.setattr(check, "DEVICE", "ptx")


def test_layernorm():
    x = normal(1, 37, 65)
    bounds = {"y": 1e-5, "mean": 16 * EPS, "rstd": 1e-5}
    given = {"x": tokens(x), "weight": persistent(normal(65, seed=2)), "bias": persistent(normal(65, seed=3))}
    check_op(ops.LayerNorm, given, eps=1e-5, dtype="bf16", bounds=bounds, plan=(2, 39))


def layernorm_dx(T: int = 13, C: int = 384) -> None:
    x, dy, weight = tokens(normal(3, T, C)), tokens(normal(3, T, C, seed=2), "bf16"), persistent(normal(C, seed=3))
    mean, rstd = tokens(x.values.mean(-1)), tokens(1 / np.sqrt(x.values.var(-1) + 1e-5))
    given = {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd}
    check_op(ops.LayerNormDx, given, modes={"dx": "add"}, bounds={"dx": 1e-5}, plan=(4, T + 2))


def test_layernorm_dx():
    layernorm_dx()


def test_adamw():
    given, bounds, attrs = adamw_case((17, 257), "bf16_i16", step=3, weight_decay=0.1)
    check_op(ops.AdamW, given, scalars={"step": 3, "lr": 3e-3, "seed": 9}, bounds=bounds, **attrs)


@pytest.mark.extended
def test_symmetric_product():
    check_op(ops.Gram, **gram_case((65, 130), "bf16"))
    check_op(ops.Gram, **gram_case((131, 65), "fp32"))


def test_muon_update():
    check_op(ops.MuonUpdate, **update_case((33, 131), "bf16", 0.3, True, True))


@pytest.mark.extended
def test_embedding_gradient():
    which = np.random.default_rng(4).integers(0, 23, (3, 43), dtype=np.int32)
    given = {"tokens": tokens(which, "i32"), "dy": tokens(normal(3, 43, 64))}
    check_op(ops.EmbeddingDwte, given, modes={"dweight": "add"}, rows=23, bounds={"dweight": 80 * EPS}, plan=(4, 45))


@pytest.mark.extended
def test_attention():
    check_op(ops.Attention, **forward_case((1, 131, 2, 32), "bf16"), plan=(2, 171))


def test_attention_backward():
    check_op(ops.AttentionBackward, **backward_case((1, 67, 1, 16), "bf16"))


def test_attention_over_all_keys():
    check_op(ops.Attention, **forward_case((1, 71, 2, 16), "bf16", causal=False), plan=(2, 90))
    check_op(ops.AttentionBackward, **backward_case((1, 71, 1, 16), "bf16", causal=False))


def test_gradients_of_shared_keys():
    check_op(ops.AttentionBackward, **backward_case((1, 67, 2, 16), "bf16", groups=1))


@pytest.mark.extended
def test_attention_in_windows_of_documents():
    more = bounded(33, scale=0.2, starts=[40], paired=True)
    check_op(ops.Attention, **forward_case((1, 70, 2, 32), "bf16", **more), plan=(2, 90))
    check_op(ops.AttentionBackward, **backward_case((1, 50, 2, 16), "bf16", **more))
    check_op(ops.AttentionBackward, **backward_case((1, 50, 2, 16), "bf16", groups=1, **bounded(7)))


def test_rope():
    angle = np.random.default_rng(3).uniform(0, 6, (17, 16))
    given = {"x": tokens(normal(2, 13, 160), "bf16"), "cos": persistent(np.cos(angle)), "sin": persistent(np.sin(angle))}
    bounds = {"y": 4 * EPS * (1 + np.abs(given["x"].values).max())}
    check_op(ops.Rope, given, bounds=bounds, scalars={"pos": 2}, heads=3, inverse=True, modes={"y": "add"}, plan=(3, 15))


def test_rmsnorm_of_few_columns():
    """As LayerNorm below."""
    given = {"x": tokens(normal(2, 9, 21)), "weight": persistent(normal(21, seed=2))}
    check_op(ops.RMSNorm, given, eps=1e-5, dtype="fp32", bounds={"y": 1e-5, "rstd": 1e-5})


@pytest.mark.extended
def test_gates_and_mixes():
    check_op(ops.GatedBackward, **by_mode(gated_backward_case((2, 19, 65, 5, 1, "factor"), "bf16", "add")))
    check_op(ops.MixBackward, **by_mode(mix_backward_case(((2, 19, 65), (None, 1.0, None)), "bf16", "add")))
    check_op(ops.GateLogits, **by_mode(logits_case((2, 9, 3, 6, 6), "bf16")))


def test_weight_gradient():
    x, dy = tokens(normal(2, 35, 40), "bf16"), tokens(normal(2, 35, 72, seed=2), "bf16")
    check_op(ops.MatmulDw, {"dy": dy, "x": x}, modes={"dweight": "add"}, bounds={"dweight": 1e-4})


@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
def test_product_of_columns(op_type):
    check_op(op_type, **viewed_case(op_type, ((2, 13), False, 37, 24), "bf16", "add"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_few_rows(dtype):
    """In fp32 lanes of a warp disagreed about the last bit of a sum, and all of them stored it."""
    x, weight = (tokens(normal(1, 3, 7), dtype), persistent(normal(5, 7, seed=2), dtype if dtype == "fp32" else "bf16_i16"))
    check_op(ops.Matmul, {"x": x, "weight": weight}, bounds={"y": 1e-5}, plan=(1, 5))


def test_layernorm_of_few_columns():
    """As above: of the sum of squares."""
    x = normal(2, 9, 21)
    given = {"x": tokens(x), "weight": persistent(normal(21, seed=2)), "bias": persistent(normal(21, seed=3))}
    check_op(ops.LayerNorm, given, eps=1e-5, dtype="fp32", bounds={"y": 1e-5, "mean": 16 * EPS, "rstd": 1e-5})


FAULTS = {  # what is put in the place of what; of the first five such places, how many do not show
    "a barrier is missing": (r"bar\.sync \t0;", "", 3),
    "a mask is missing": (r"@%p\d+ ((ld|st)\.global)", r"\1", 2),
    "a swizzle is another": (r"xor\.b32 (\s*%r\d+, %r\d+), \d+;", r"xor.b32 \1, 0;", 0),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.extended
def test_fault_in_compiled_code_shows(monkeypatch, name):
    """One place after the other, in attention. Some are not gone by in a sequence so short, or guard what it does not do."""
    pattern, by, hidden = FAULTS[name]
    compiled = launch.code_of
    seen: list[bool] = []
    places = 1
    while len(seen) < min(places, 5):

        def changed(spec, arch):
            nonlocal places
            code = compiled(spec, arch)
            text = code.cubin.decode()
            found = list(re.finditer(pattern, text))
            places, place = len(found), found[len(seen)]
            return replace(code, cubin=(text[: place.start()] + place.expand(by) + text[place.end() :]).encode())

        monkeypatch.setattr(launch, "code_of", changed)
        try:
            test_attention()
            seen.append(False)
        except AssertionError:
            seen.append(True)
    assert len(seen) - sum(seen) <= hidden, seen
