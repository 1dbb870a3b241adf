"""Ops of the speedrun against PyTorch written from train_gpt.py of modded-nanogpt's PR #233 (commit 20dd1582, lines named)."""

from __future__ import annotations

from dataclasses import replace
from math import log, pi
from typing import Any

import numpy as np
import pytest

from barellm.cpu.step import CpuSession
from barellm.models.speedrun import declare, speedrun_small
from barellm.optim.normuon import Adam
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.attention.qk_rotary import Yarn
from tests.cases import normal

torch = pytest.importorskip("torch")

from tests.oracle import torch_speedrun  # noqa: E402

pytestmark = pytest.mark.oracle

BLOCK = 128  # positions of a block of the window


def torch_frequencies(head_size: int) -> Any:
    """Line 999."""
    return (1 / 1024) ** torch.linspace(0, 1, steps=head_size // 4, dtype=torch.float32)


def torch_factors(frequencies: Any, positions: Any) -> tuple[Any, Any]:
    """Lines 1000 to 1025: bf16 factors of x and of x with its neighbours exchanged; half of the columns turn by nothing."""
    each = torch.cat([frequencies.repeat_interleave(2), torch.zeros(2 * len(frequencies))])
    theta = torch.outer(positions.float(), each)
    same, other = theta.cos().bfloat16(), theta.sin().bfloat16()
    other[:, 1::2] *= -1
    return same, other


def torch_widened(frequencies: Any, old: int, new: int) -> Any:
    """Lines 1031 to 1034."""
    left = torch.clamp((old * frequencies / (2 * pi) - 1) / (32 - 1), 0, 1)
    return frequencies * (old / new + left * (1 - old / new))


def torch_rotary(x: Any, factors: tuple[Any, Any]) -> Any:
    """Lines 989 to 996, of x (B, T, H, D)."""
    same, other = (f[None, :, None, :].to(x.dtype) for f in factors)
    return same * x + other * x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@pytest.mark.parametrize("paired, shift", [(False, False), (False, True), (True, False)])
def test_queries_and_keys_turn_as_in_torch(paired, shift):
    """Lines 1091 to 1117, as if `k` at line 1098 were read before it is written."""
    B, T, H, D = 2, 11, 4, 24
    yarn, frequencies = Yarn.of_head(D).widened(3, 7), torch_widened(torch_frequencies(D), 3, 7)
    x = normal(B, T, 2 * H * D)
    q, k = (torch.nn.functional.rms_norm(torch.tensor(part), (D,), eps=1e-6).view(B, T, H, D)
            for part in np.split(x.reshape(B, T, 2, H, D), 2, 2))  # fmt: skip
    t = torch.arange(T)
    if paired:
        factors = [torch_factors(frequencies, at) for at in (2 * t, 2 * t + 1)]
        same, other = (torch.cat(pair, -1) for pair in zip(*factors, strict=True))
        q, k = (torch_rotary(z.reshape(B, T, H // 2, 2 * D), (same, other)).reshape(B, T, H, D) for z in (q, k))
    else:
        q, k = (torch_rotary(z, torch_factors(frequencies, t)) for z in (q, k))
    if shift:
        k = torch.cat([k[..., : D // 2], torch.cat([k[:, :1, :, D // 2 :], k[:, :-1, :, D // 2 :]], 1)], -1)
    attrs = {"heads": H, "kv_heads": H, "paired": paired, "shift": shift, "eps": 1e-6}
    y = ops.QKRotary({}, attrs).reference(x, *yarn.tables(2 * T))["y"]
    expected = torch.cat([q, k], 2).reshape(B, T, -1).numpy()
    np.testing.assert_allclose(y, expected, rtol=2e-2, atol=2e-2)  # a table's number may round to the next bf16
    assert (np.abs(y - expected) < 1e-6).mean() > 0.99


def test_tables_are_those_of_torch_through_all_stages():
    D, length = 128, 2 * 4096
    yarn, frequencies, scale = Yarn.of_head(D), torch_frequencies(D), 0.1
    for old, new in ((3, 3), (3, 7), (7, 11), (11, 13)):
        yarn, frequencies = yarn.widened(old * BLOCK, new * BLOCK), torch_widened(frequencies, old * BLOCK, new * BLOCK)
        scale *= 0.2 * log(new / old) + 1  # line 1048
        cos, sin = yarn.tables(length)
        same, other = (f[:, : D // 2 : 2].float().numpy() for f in torch_factors(frequencies, torch.arange(length)))
        for ours, theirs in ((cos, same), (sin, other)):
            assert (ours == theirs).mean() > 0.98 and np.abs(ours - theirs).max() < 2.0**-7
        assert yarn.scale == pytest.approx(scale, rel=1e-12)
    assert yarn.scale == pytest.approx(0.1318, abs=5e-5)


def test_bigrams_are_those_of_torch():
    """Lines 1485 to 1500, beyond its vocabulary too, where 32 bits overflow: 27191 * 251519 does with its own. A row's first token
    decides nothing there; with `reserved` False it decides the second position, and no other."""
    for most, buckets in ((50304, 5 * 50304), (2**31 - 1, 97), (7, 2)):
        x = torch.randint(0, most, (501,), generator=torch.Generator().manual_seed(most), dtype=torch.int32)
        found = {
            reserved: ops.BigramIds({}, {"buckets": buckets, "reserved": reserved}).reference(x.numpy()[None])["ids"][0]
            for reserved in (False, True)
        }
        assert (found[True] == torch_speedrun.bigram_hash(x, buckets).numpy()).all() and found[True].min() >= 0
        wanted = torch.bitwise_xor(36313 * x[1], 27191 * x[0]) % (buckets - 1)
        assert found[False][1] == wanted and (np.delete(found[False], 1) == np.delete(found[True], 1)).all()


def test_the_bigram_of_a_row_s_second_token():
    """Two ids worked out by hand: 27191 * 251519 - 2 * 2^32 = -1750881463, and 36313 * 11 = 399443; xor, then mod 251519."""
    second = (-1750881463 ^ 399443) % 251519
    for first in (5, 50256):
        ids = ops.BigramIds({}, {"buckets": 251520, "reserved": True}).reference(np.array([[first, 11]]))["ids"]
        assert ids.tolist() == [[251519, second]]


def test_documents_start_where_they_do():
    cu_seqlens = np.array([[0, 3, 3, 4, 9, 9, 9], [0, 9, 9, 9, 9, 9, 9], [0, 0, 1, 2, 8, 9, 9]], np.int32)
    starts = ops.DocumentStarts({}, {}).reference(cu_seqlens, np.zeros((3, 9), np.int32))["starts"]
    expected = [[0, 0, 0, 3, 4, 4, 4, 4, 4], [0] * 9, [0, 1, 2, 2, 2, 2, 2, 2, 8]]
    assert starts.dtype == np.int32 and (starts == expected).all()


class TheirAdam:
    """Lines 824 to 848: fp32 moments, and a parameter that is bf16 and nothing more. `add_` computes in fp32 and rounds once."""

    def __init__(self, p: Any, beta1: float, beta2: float) -> None:
        self.p_slice, self.beta1, self.beta2, self.step = p, beta1, beta2, 0
        self.exp_avg, self.exp_avg_sq = torch.zeros(p.shape), torch.zeros(p.shape)

    def update(self, g_slice: Any, lr: float) -> None:
        self.step += 1
        bias1, bias2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        self.exp_avg.mul_(self.beta1).add_(g_slice, alpha=1 - self.beta1)
        self.exp_avg_sq.mul_(self.beta2).addcmul_(g_slice, g_slice, value=1 - self.beta2)
        update = self.exp_avg.div(self.exp_avg_sq.sqrt().add_(1e-10)).mul_(lr * (bias2**0.5 / bias1))
        self.p_slice.add_(other=update, alpha=-1.0)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_weights_of_adam_are_bf16_as_theirs(compute):
    """300 updates of two gates by equal gradients. An attention gate's rate is 8e-3; smear.gate's is 8e-5, less than half of the
    distance between two bf16 beyond 1/32, so that there theirs do not move at all, and weights of 32 bits do."""
    for name, lr in (("smear.gate", 8e-5), ("h.0.attn.gate", 8e-3)):
        first, found, wanted = updated(name, lr, compute, "bf16")
        assert (found == wanted).mean() > 0.95 and np.abs(found - wanted).max() < 2.0**-8 * np.abs(wanted).max()
        held = np.abs(first) > 1 / 32
        assert (found == first)[held].all() == (name == "smear.gate")
        _, kept, _ = updated(name, lr, compute, "fp32")
        assert np.abs(kept - first)[held].min() > 1e-3


def updated(name: str, lr: float, compute: str, kept: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Equal bf16, and what 300 updates make of our parameter, whose weights are `kept` so, and of theirs."""
    p = Program(Store(), compute=compute)
    declare(p, replace(speedrun_small().model, adam_weights=kept))
    t = p.store.tensors[name]
    clip = p.store.get("clip", (2,), "fp32", "state")
    Adam(0.9, 0.99, lr_scale=lr / 8e-3, wd_mul=0.0).update(p, [t], clip)
    session = CpuSession({"optimizer_step": p})
    try:
        session.write("clip", np.ones(2, np.float32))
        first = torch.linspace(-0.11, 0.11, t.size).reshape(t.shape).bfloat16()
        begun = first.float().numpy()
        session.write(name, begun)
        them = TheirAdam(first, 0.9, 0.99)
        for step in range(1, 301):
            grad = (normal(*t.shape, seed=step) + np.linspace(-2, 2, t.size).reshape(t.shape)).astype(np.float32)
            session.write(f"{name}.grad", grad)
            session.run("optimizer_step", lr=8e-3, step=step)
            them.update(torch.tensor(grad), lr)
        return begun, session.read(name), them.p_slice.float().numpy()
    finally:
        session.close()
