"""Attention in bf16 beside PyTorch's: both against float64, ours with at most twice PyTorch's error."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.isa import host
from barellm.program import ops
from tests.cases import packed_views
from tests.cpu.check import check_op, persistent, stored, tokens

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle


def rms(values: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(values, np.float64) - exact) ** 2)))


def of_torch(qkv: np.ndarray, dout: np.ndarray, heads: int, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    B, T, C = dout.shape
    x = torch.tensor(qkv).bfloat16().requires_grad_(True)
    q, k, v = (y.view(B, T, heads, -1).transpose(1, 2) for y in x.split(C, 2))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(B, T, C)
    out.backward(torch.tensor(dout).bfloat16())
    return out.detach().double().numpy(), x.grad.double().numpy()


@pytest.mark.parametrize("T, heads, D", [(257, 2, 64), (64, 3, 32), (100, 1, 80)])
@pytest.mark.parametrize("causal", [True, False])
def test_bf16_error_is_at_most_twice_that_of_pytorch(T, heads, D, causal):
    r = np.random.default_rng(3)
    qkv, dout = (stored(r.standard_normal((2, T, n * heads * D)), "bf16") for n in (3, 1))
    attrs = {"heads": heads, "kv_heads": heads, "rate": 0.0, "stream": 0, "causal": causal}
    three = np.split(qkv, 3, -1)
    exact = ops.Attention({}, attrs).reference(*three)
    exact |= ops.AttentionBackward({}, attrs).reference(*three, exact["out"], dout, exact["lse"])
    names = ("dq", "dk", "dv")
    loose = {"out": 1.0, "lse": 1.0, **dict.fromkeys(names, 1.0)}  # `check_op` runs the kernel; the limit is below
    how = {"bounds": loose, "threads": (1,), "views": packed_views(heads, heads, D), **attrs}
    got = check_op(ops.Attention, host(), {"qkv": tokens(qkv, "bf16")}, **how)
    saved = {"out": tokens(got["out"], "bf16"), "lse": persistent(got["lse"], "fp32", "state")}
    given = {"qkv": tokens(qkv, "bf16"), "dout": tokens(dout, "bf16"), **saved}
    how["views"] = how["views"] | packed_views(heads, heads, D, "dqkv", "d")
    got |= check_op(ops.AttentionBackward, host(), given, **how)
    out, dqkv = of_torch(qkv, dout, heads, causal=causal)
    assert rms(got["out"], exact["out"]) <= 2 * rms(out, exact["out"])
    for name, theirs in zip(names, np.split(dqkv, 3, -1), strict=True):
        assert rms(got[name], exact[name]) <= 2 * rms(theirs, exact[name]), name
