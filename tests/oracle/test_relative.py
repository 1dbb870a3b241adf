"""Block-sparse attention with relative terms beside a dense reading of it in PyTorch, which gathers the vector of every pair.
Gradients are left to autograd."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from barellm import kernels
from barellm.program import layouts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle


def dense(q, k, v, relative, seen, first):
    """Attention (B, T, H, D) over the pairs `seen` (H, T, T); `first` is the distance of the first of the vectors (M, H, D)."""
    T, M, D = q.shape[1], len(relative), q.shape[3]
    row = torch.arange(T)[:, None] - torch.arange(T)[None] - first
    of_pairs = relative[row.clamp(0, M - 1)] * ((row >= 0) & (row < M))[..., None, None]  # (T, T, H, D)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) + torch.einsum("bihd,ijhd->bhij", q, of_pairs)
    p = torch.softmax((scores / sqrt(D)).masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


@pytest.mark.parametrize("text, causal, M", [("local:40, strided:9+local:3", True, 25), ("spread:1:2+local:30", False, 51)])
def test_forward_and_all_gradients_are_those_of_pytorch(text, causal, M):
    B, T, H, D = 2, 100, 2, 12
    layout = layouts.parse(text, length=T, block=16, heads=H, causal=causal)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in ((B, T, H, D),) * 3 + ((M, H, D), (B, T, H, D))]
    out, vjp_fn = kernels.vjp(kernels.attention, *arrays[:4], layout=layout, causal=causal)
    *given, dout = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays)
    seen = torch.tensor(np.stack([layout.dense(h) for h in range(H)]))
    theirs = dense(*given, seen, 0 if causal else -(M // 2))
    theirs.backward(dout)
    np.testing.assert_allclose(out, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
    for ours, t, name in zip(vjp_fn(arrays[4]), given, ("q", "k", "v", "relative"), strict=True):
        np.testing.assert_allclose(ours, t.grad.numpy(), rtol=1e-4, atol=2e-5, err_msg=name)
