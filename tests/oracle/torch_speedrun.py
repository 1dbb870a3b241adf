"""The mathematics of modded-nanogpt's pull request 233 in PyTorch: its model, its optimizer, its schedule, without its kernels.

Written from train_gpt.py at commit 20dd1582; comments give its lines. Sizes are free, the layers are its own: eleven, two of them
with long windows, four with paired heads, one without attention, two lanes from the seventh on. All arithmetic has the dtype of the
parameters, where theirs is bf16; that of the classifier may be fp8 as theirs is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, PAIRED, LONG = 11, (0, 2, 5, 9), (3, 10)  # 1222, 1267
VALUED = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}  # layer -> its embedding of values: 1306
EPS = torch.finfo(torch.float32).eps  # of F.rms_norm where none is given, for bf16 too: 945


@dataclass
class Sizes:
    vocab: int  # padded; all columns take part in the softmax
    d_model: int
    heads: int
    d_ff: int

    @property
    def head(self) -> int:
        return self.d_model // self.heads


@dataclass
class Stage:
    """What a forward pass is given besides weights and text: windows in tokens, the angles of positions, the softmax scale."""

    short: int
    long: int
    frequencies: Tensor  # (D / 4,)
    scale: float
    mtp: tuple[float, ...]


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


def first_frequencies(head: int) -> Tensor:  # 999
    return (1 / 1024) ** torch.linspace(0, 1, head // 4)


def yarn(frequencies: Tensor, scale: float, old: int, new: int) -> tuple[Tensor, float]:  # 1030
    rotations = old * frequencies / (2 * torch.pi)
    weight = ((rotations - 1) / 31).clamp(0, 1)
    return frequencies * (old / new + weight * (1 - old / new)), scale * (0.2 * math.log(new / old) + 1)


def turned(x: Tensor, position: Tensor, frequencies: Tensor) -> Tensor:
    """x (T, H, D) with its first half of columns turned, in neighbouring pairs, by position (T, H) or (T, 1): 989, 1016."""
    angle = position.float()[..., None] * frequencies  # (T, H, D / 4)
    cos, sin = (v.to(torch.bfloat16).to(x.dtype) for v in (angle.cos(), angle.sin()))  # 1007: tables are bf16
    half = x.shape[-1] // 2
    a, b = x[..., :half:2], x[..., 1:half:2]
    pairs = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2)
    return torch.cat([pairs, x[..., half:]], -1)


def seen(documents: Tensor, window: int) -> Tensor:
    """(T, T): whether a query sees a key: of its own document, not later, at most `window` before."""
    t = torch.arange(len(documents))
    back = t[:, None] - t[None, :]
    return (back >= 0) & (back <= window) & (documents[:, None] == documents[None, :])


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int, scale: float) -> Tensor:
    """(T, H, D) each."""
    s = torch.einsum("thd,shd->hts", q, k) * scale
    p = s.masked_fill(~seen(documents, window), -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, v)


def attention(w: dict[str, Tensor], i: int, x: Tensor, ve: Tensor | None, documents: Tensor, sizes: Sizes, stage: Stage) -> Tensor:
    T, H, D, C = len(x), sizes.heads, sizes.head, sizes.d_model
    bank, sa = w["attn_bank"][i - (i > 6)], w["scalars"][2 * i : 2 * i + 2]  # 1349: layer 6 has none
    gate = w["attn_gate_bank"][i - (i > 6)]
    q, k, v = F.linear(x, sa[0] * bank[: 3 * C]).view(T, 3 * H, D).chunk(3, dim=1)  # 1087
    q, k = norm(q), norm(k)
    t = torch.arange(T)
    window = stage.long if i in LONG else stage.short
    g = None if ve is None else w["ve_gate_bank"][VALUED[i]]
    if i in PAIRED:
        # 1112 to 1127: the angle goes by the parity of a head, the place in the doubled sequence by its half.
        position = 2 * t[:, None] + torch.arange(H)[None, :] % 2
        q, k = (turned(z, position, stage.frequencies).reshape(2 * T, H // 2, D) for z in (q, k))
        if ve is not None:
            v = v + 2 * torch.sigmoid(F.linear(x[:, :12], g))[:, :, None] * ve.view(T, H, D)
        v, documents = v.reshape(2 * T, H // 2, D), documents.repeat_interleave(2)  # 1129: the window is not doubled
    else:
        q, k = (turned(z, t[:, None], stage.frequencies) for z in (q, k))
        if i in LONG:  # 1101: both layers with a long window, and no other
            k = torch.cat([k[..., : D // 2], torch.cat([k[:1, :, D // 2 :], k[:-1, :, D // 2 :]])], -1)
        if ve is not None:
            both = torch.cat([x[:, :6], ve[:, :6]], -1)  # 1105
            v = v + 2 * torch.sigmoid(F.linear(both, g))[:, :, None] * ve.view(T, H, D)
    y = softmax_attention(q, k, v, documents, window, stage.scale).reshape(T, H, D)
    y = y * torch.sigmoid(F.linear(x[:, :12], gate))[:, :, None]  # 1135
    return F.linear(y.reshape(T, C), sa[1] * bank[3 * C :])


def bigram_hash(x: Tensor, bigram_vocab_size: int) -> Tensor:
    """The lines 1492 to 1500 as they stand: int32, in place, so that position 1 is hashed with what position 0 has become."""
    mod = bigram_vocab_size - 1
    x = x.to(torch.int32)
    out = torch.empty_like(x)
    out.copy_(x)
    out[0] = mod
    out[1:] = torch.bitwise_xor(36313 * out[1:], 27191 * out[:-1]) % mod
    return out


def hidden(w: dict[str, Tensor], tokens: Tensor, documents: Tensor, sizes: Sizes, stage: Stage) -> Tensor:
    """(T, C), what the classifier sees, of tokens (T,) whose documents have the numbers `documents` (T,): 1257 to 1387."""
    x = w["embed"][tokens]
    bigram = w["bigram_embed"][bigram_hash(tokens, len(w["bigram_embed"]))]
    tables = w["value_embeds"].view(5, sizes.vocab, sizes.d_model)
    smear, backout, skip = w["scalars"][2 * LAYERS : 2 * LAYERS + 3]
    share = smear * torch.sigmoid(F.linear(x[1:, :12], w["smear_gate"]))
    x0 = norm(torch.cat([x[:1], x[1:] + share * x[:-1]]))
    lane0, lane1 = x0 + bigram * w["bigram_lambdas"][0], None
    saved = out = None
    for i in range(LAYERS):
        r_attn, r_mlp = w["resid_lambdas"][i]
        (p_a0, p_a1), (p_m0, p_m1) = w["post_lambdas"][i]
        up, down = w["mlp_bank"][i]
        inject = x0 * w["x0_lambdas"][i] + (bigram * w["bigram_lambdas"][i] if i else 0)  # 1319
        if i == 7:
            lane1 = lane0
        if i == 6:
            lane0 = lane0 + torch.sigmoid(skip) * 2 * torch.sigmoid(F.linear(x0[:, :12], w["skip_gate"])) * saved
        else:
            ve = tables[VALUED[i]][tokens] if i in VALUED else None
            a = attention(w, i, norm(lane0), ve, documents, sizes, stage)
            lane0 = r_attn * lane0 + (a if i < 7 else p_a0 * a) + inject  # 1366: before layer 7 without a factor of its own
            lane1 = None if lane1 is None else r_attn * lane1 + p_a1 * a
        if i == 3:
            saved = lane0
        h = norm(lane0 if lane1 is None else lane1)
        m = F.linear(h, up).relu().square() @ down
        lane0 = r_mlp * lane0 + p_m0 * m
        lane1 = None if lane1 is None else r_mlp * lane1 + p_m1 * m
        if i == 7:
            out = lane0
    return norm((lane0 + lane1) * 0.5 - backout * out)


def eight(x: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """The codes of x, as numbers; conversions saturate where theirs run: 764, 631."""
    most = torch.finfo(kind).max
    return (x.float() / scale).clamp(-most, most).to(kind).to(x.dtype)


class InEightBits(torch.autograd.Function):
    """x @ weight by codes and their scales, forward and backward: 760 to 845 of triton_kernels.py."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, x_s: float, w_s: float, grad_s: float) -> Tensor:
        x8, w8 = eight(x, x_s, torch.float8_e4m3fn), eight(weight, w_s, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        ctx.scales = x_s, w_s, grad_s
        return x8 @ w8 * (x_s * w_s)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x8, w8), (x_s, w_s, grad_s) = ctx.saved_tensors, ctx.scales
        dy8 = eight(dy, grad_s, torch.float8_e5m2)
        return dy8 @ w8.T * (grad_s * w_s), x8.T @ dy8 * (x_s * grad_s), None, None, None


def loss(
    w: dict[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    documents: Tensor,
    sizes: Sizes,
    stage: Stage,
    *,
    training: bool,
    fp8: bool = False,
) -> Tensor:
    """In training the sum over tokens and over the next ones with their weights, else the mean of the next one's: 1390. With `fp8`
    the classifier multiplies in 8 bits, with the scales of 1213 for one micro-batch a step."""
    x = hidden(w, tokens, documents, sizes, stage)
    logits = InEightBits.apply(x, w["lm_head"], 100 / 448, 1.6 / 448, 0.75 / 448) if fp8 else x @ w["lm_head"]
    z = 23 * torch.sigmoid((logits + 5) / 7.5)
    if not training:
        return F.cross_entropy(z, targets)
    total = z.new_zeros(())
    for k, weight in enumerate(stage.mtp):
        kept = len(targets) - k  # a row's last tokens have fewer to come
        total = total + weight * F.cross_entropy(z[:kept], targets[k:], reduction="sum")
    return total


# --- the optimizer: 170 to 943, 1714 to 1830 ---

POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)  # 162
ADAM = {  # betas, factor of the rate, factor of the decay: 1733
    "scalars": (0.9, 0.99, 5.0, 0.0),
    "smear_gate": (0.9, 0.99, 0.01, 0.0),
    "skip_gate": (0.9, 0.99, 0.05, 0.0),
    "attn_gate_bank": (0.9, 0.99, 1.0, 1.0),
    "ve_gate_bank": (0.9, 0.99, 1.0, 1.0),
    "lm_head": (0.5, 0.95, 1.0, 150.0),
    "bigram_embed": (0.75, 0.95, 75.0, 5.0),
    "post_lambdas": (0.9, 0.95, 1.0, 0.0),
    "x0_lambdas": (0.9, 0.95, 1.0, 0.0),
    "bigram_lambdas": (0.9, 0.95, 1.0, 0.0),
    "resid_lambdas": (0.9, 0.95, 5.0, 0.0),
    "value_embeds": (0.75, 0.95, 75.0, 5.0),
    "embed": (0.5, 0.95, 1.0, 150.0),
}


class Optimizer:
    """Both halves. Gradients are summed in `.grad` and dropped by whom they served; `rate` is the schedule's factor."""

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w, self.split, self.updates = w, False, 0
        self.state = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in w.items()}
        for name, rows in (("attn_bank", 4), ("mlp_bank", 2)):
            banks = w[name].view(-1, w[name].shape[-2] // (rows if name == "attn_bank" else 1), w[name].shape[-1])
            self.state[name] = [torch.zeros_like(banks), torch.zeros_like(banks.mean(-1, keepdim=True))]

    @torch.no_grad()
    def step(self, rate: float, momentum: float, *, adam: bool, untie: bool) -> None:
        if adam:
            self.updates += 1
            if not self.split:  # 755
                self.w["lm_head"].grad += self.w["embed"].grad.T
            for name, how in ADAM.items():
                if name != "embed" or self.split:
                    self._adam(name, *how, rate=rate)
                self.w[name].grad = None
            if not self.split:
                self.w["embed"].copy_(self.w["lm_head"].T)
        for name in ("attn_bank", "mlp_bank"):
            self._normuon(name, rate, momentum)
            self.w[name].grad = None
        if untie:  # 650
            for ours, head in zip(self.state["embed"], self.state["lm_head"], strict=True):
                ours.copy_(head.T)
            self.split = True

    def _adam(self, name: str, beta1: float, beta2: float, lr_mul: float, wd_mul: float, *, rate: float) -> None:
        p, (m, v), t = self.w[name], self.state[name], self.updates  # 821
        lr = 0.008 * rate * lr_mul
        m.lerp_(p.grad, 1 - beta1)
        v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        update = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t) * m / (v.sqrt() + 1e-10)
        update += p * (update * p > 0) * (lr * lr * 0.005 * wd_mul)
        p -= update

    def _normuon(self, name: str, rate: float, momentum: float) -> None:
        m, second = self.state[name]  # 862
        p, g = self.w[name].view(m.shape), self.w[name].grad.reshape(m.shape)
        m.lerp_(g, 1 - momentum)
        x = g.lerp(m, momentum)
        x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
        for a, b, c in POLAR:
            gram = x.mT @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
        v = x.square().mean(-1, keepdim=True)  # 929: no matrix here is wide
        second.lerp_(v, 0.05)
        factors = second.clamp_min(1e-10).rsqrt()
        columns = x.shape[-1]
        before, after = ((n * columns).sum((-2, -1), keepdim=True).sqrt() for n in (v, v * factors.square()))
        x = x * factors * (before / after.clamp_min(1e-10))
        shape = max(1.0, m.shape[-2] / m.shape[-1]) ** 0.5  # 500
        lr = torch.full((len(m), 1, 1), 0.023 * rate * shape, dtype=p.dtype)
        if name == "mlp_bank":
            lr[1::2] *= 2.0  # 510: every second matrix is the MLP's second
        p -= p * (x * p >= 0) * (1.2 * 0.023 * rate) * lr + x * lr
