"""The peer: the training step of models/speedrun.py in PyTorch, which waits for its turns (torch_step.py).

echo 5 | python torch_speedrun.py --mode compile --batch 1 --seq 2048 --vocab 4096 --heads 4 --d_model 128 --d_ff 512

A step is timed as the mean of two: Adam and the matrices' NorMuon take turns as in the model's course, NorMuon in each step and
Adam in every second one. Windows and weights of the losses are those of the first stage of the table.

scaled_dot_product_attention is given chunks where the window is short: a chunk of queries sees its own keys and those of the chunk
before, so that the work grows with the window and not with the length.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch_step import serve

FIRST = "share=1 seq=2048 windows=3,7 mtp=1,0.5; seq=2048 windows=6,13"
OWN = {"d_ff": 3072, "separator": -1, "block": 128, "stages": FIRST, "long": "3,10", "paired": "0,2,5,9"}
OWN |= {"values": "1,2,8,9,10", "skipped": "6", "skip_from": 3, "lanes_from": 7, "backout": 7}
OWN |= {"smear": 1, "bigram": 1, "bigram_first": "token", "softcap": 1}
EPS = 2.0**-23
BUCKETS = 5


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


class Speedrun(nn.Module):
    """`w`: weights by our names, in our order. Activations have the dtype `kind`."""

    def __init__(self, a: argparse.Namespace):
        super().__init__()
        self.a, self.kind = a, torch.bfloat16 if a.dtype == "bf16" else torch.float32
        self.long, self.paired, self.valued, self.skipped = (
            [int(i) for i in getattr(a, name).split(",") if i] for name in ("long", "paired", "values", "skipped")
        )
        first = a.stages.split(";")[0]
        windows = re.search(r"windows=(\d+),(\d+)", first)
        assert windows, first
        self.windows = tuple(a.block * int(blocks) for blocks in windows.groups())  # short, long
        mtp = re.search(r"mtp=([\d.,]+)", first)
        self.mtp = [float(x) for x in mtp[1].split(",")] if mtp else [1.0]
        self.names: list[str] = []
        self._declare()
        self._turn(a.seq, a.d_model // a.heads)

    def _declare(self) -> None:
        a, L, C, V = self.a, self.a.layers, self.a.d_model, self.a.vocab
        bound = 3**0.5 * 0.5 / C**0.5

        def add(name: str, *shape: int, value: float = 0.0, std: float = 0.0, bound: float = 0.0) -> None:
            w = torch.full(shape, value) if not bound else torch.empty(shape).uniform_(-bound, bound)
            self.register_parameter(name.replace(".", "__"), nn.Parameter(w + std * torch.randn(shape) if std else w))
            self.names.append(name)

        add("embed", V, C)
        if a.bigram:
            add("bigrams", BUCKETS * V, C)
        for name, value in (("qkv.scale", 0.5), ("proj.scale", 1.0), ("resid.attn", 1.1**0.5), ("resid.mlp", 1.1**0.5)):
            add(name, L, value=value)
        add("post.mlp", L, value=1.0)
        add("x0.scale", L)
        if a.lanes_from < L:
            for name, value in (("lanes.attn0", 1.0), ("lanes.attn1", 1.5), ("lanes.mlp1", 1.0)):
                add(name, L, value=value)
        more = [("bigrams.scale", L, 0.05)] * a.bigram + [("smear.scale", 1, 0.0)] * a.smear
        more += [("backout.scale", 1, -0.5)] * (a.backout < L) + [("skip.scale", 1, -1.5)] * bool(self.skipped)
        for name, n, value in more:
            add(name, n, value=value)
        for name in ["smear.gate"] * a.smear + ["skip.gate"] * bool(self.skipped):
            add(name, 1, 12)
        self.tables = [i for i in self.valued if i not in self.skipped]
        for i in range(L):
            if i not in self.skipped:
                add(f"h.{i}.attn.qkv", 3 * C, C, bound=bound)
                add(f"h.{i}.attn.proj", C, C, bound=bound)
                add(f"h.{i}.attn.gate", a.heads, 12)
            if i in self.tables:
                add(f"values.{self.tables.index(i)}", V, C, std=0.01)
                add(f"h.{i}.value.gate", a.heads, 12)
            add(f"h.{i}.mlp.up", a.d_ff, C, bound=bound)
            add(f"h.{i}.mlp.down", a.d_ff, C)
        add("head", C, V, std=0.005)
        self["embed"].data.copy_(self["head"].data.T)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name.replace(".", "__"))

    def _turn(self, T: int, D: int) -> None:
        """cos and sin of the planes that are turned, which are a quarter of a head's columns, for positions up to 2 T."""
        turn = (1 / 1024) ** torch.linspace(0, 1, D // 4)
        angle = torch.arange(2 * T).float()[:, None] * turn
        for name, values in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, values.bfloat16().to(self.kind), persistent=False)

    def turned(self, x: Tensor, paired: bool) -> Tensor:
        """x (B, T, H, D). Paired, head h at position t stands at 2 t + h % 2."""
        _, T, H, D = x.shape
        if paired:
            cos, sin = (y[: 2 * T].view(T, 2, D // 4).repeat(1, H // 2, 1) for y in (self.cos, self.sin))
        else:
            cos, sin = self.cos[:T, None], self.sin[:T, None]
        planes, rest = x.split(D // 2, -1)
        left, right = planes.unflatten(-1, (-1, 2)).unbind(-1)
        planes = torch.stack((left * cos + right * sin, right * cos - left * sin), -1).flatten(-2)
        return torch.cat((planes, rest), -1)

    def attention(self, i: int, x: Tensor, ve: Tensor | None, masks: dict[tuple[bool, int], Tensor]) -> Tensor:
        B, T, C = x.shape
        H = self.a.heads
        paired, long = i in self.paired, i in self.long
        qkv = F.linear(x * self["qkv.scale"][i].to(x.dtype), self[f"h.{i}.attn.qkv"])
        q, k, v = (y.reshape(B, T, H, C // H) for y in qkv.chunk(3, -1))
        q, k = self.turned(norm(q), paired), self.turned(norm(k), paired)
        if long and not paired:
            still, moved = k.chunk(2, -1)
            k = torch.cat((still, torch.cat((moved[:, :1], moved[:, :-1]), 1)), -1)
        if ve is not None:
            seen = x[..., :12] if paired else torch.cat((x[..., :6], ve[..., :6]), -1)
            share = 2 * torch.sigmoid(F.linear(seen, self[f"h.{i}.value.gate"]))
            v = v + (share[..., None] * ve.view(B, T, H, C // H)).to(v.dtype)
        if paired:
            q, k, v = (y.reshape(B, 2 * T, H // 2, C // H) for y in (q, k, v))
        y = attend(q, k, v, masks[paired, self.windows[long]]).reshape(B, T, H, C // H)
        gate = torch.sigmoid(F.linear(x[..., :12], self[f"h.{i}.attn.gate"])) * self["proj.scale"][i]
        return F.linear((y * gate[..., None].to(y.dtype)).view(B, T, C), self[f"h.{i}.attn.proj"])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        a, L = self.a, self.a.layers
        separators = tokens == a.separator if a.separator >= 0 else torch.zeros_like(tokens)
        documents = separators.cumsum(1)
        masks = {
            (paired, window): mask(documents.repeat_interleave(2, 1) if paired else documents, window)
            for paired in (False, True)
            for window in self.windows
        }

        def number(name: str, i: int = 0) -> Tensor:
            return self[name][i].to(self.kind)

        def look(name: str, ids: Tensor) -> Tensor:
            return F.embedding(ids, self[name]).to(self.kind)

        def gate(x: Tensor, name: str) -> Tensor:
            return torch.sigmoid(F.linear(x[..., :12], self[name])).to(self.kind)

        x = look("embed", tokens)
        if a.smear:
            x = torch.cat((x[:, :1], x[:, 1:] + number("smear.scale") * gate(x[:, 1:], "smear.gate") * x[:, :-1]), 1)
        x0 = norm(x)
        lane0, lane1, bigram, saved, out = x0, None, None, None, None
        if a.bigram:
            bigram = look("bigrams", pairs(tokens, BUCKETS * a.vocab, a.bigram_first))
            lane0 = x0 + number("bigrams.scale") * bigram
        for i in range(L):
            if i == a.lanes_from:
                lane1 = lane0
            if i in self.skipped:
                if saved is not None:
                    share = 2 * torch.sigmoid(number("skip.scale")) * gate(x0, "skip.gate") * saved
                    lane0, lane1 = lane0 + share, None if lane1 is None else lane1 + share
            else:
                ve = look(f"values.{self.tables.index(i)}", tokens) if i in self.tables else None
                y = self.attention(i, norm(lane0), ve, masks)
                lane0 = number("resid.attn", i) * lane0 + (y if lane1 is None else number("lanes.attn0", i) * y)
                lane0 = lane0 + number("x0.scale", i) * x0
                if bigram is not None and i:
                    lane0 = lane0 + number("bigrams.scale", i) * bigram
                if lane1 is not None:
                    lane1 = number("resid.attn", i) * lane1 + number("lanes.attn1", i) * y
            if i == a.skip_from:
                saved = lane0
            h = norm(lane0 if lane1 is None else lane1)
            y = F.linear(F.relu(F.linear(h, self[f"h.{i}.mlp.up"])).square(), self[f"h.{i}.mlp.down"].T)
            lane0 = number("resid.mlp", i) * lane0 + number("post.mlp", i) * y
            if lane1 is not None:
                lane1 = number("resid.mlp", i) * lane1 + number("lanes.mlp1", i) * y
            if i == a.backout:
                out = lane0
        x = lane0 if lane1 is None else (lane0 + lane1) * 0.5
        if out is not None:
            x = x + number("backout.scale") * out
        return self.loss(norm(x), targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum over the next targets with their weights, by one pass over the logits."""
        z = F.linear(x, self["head"].T).float()
        if self.a.softcap:
            z = 23 * torch.sigmoid((z + 5) / 7.5)
        whole, total, T = z.logsumexp(-1), z.new_zeros(()), targets.shape[1]
        for k, weight in enumerate(self.mtp):
            found = z[:, : T - k].gather(-1, targets[:, k:, None]).squeeze(-1)
            total = total + weight * (whole[:, : T - k] - found).sum()
        return total


def pairs(tokens: Tensor, rows: int, first: str) -> Tensor:
    """The row of each token and the one before it in the table of pairs; the last row for a first token. `first`: whether the pair
    of a second token has the first "token", or the number of that row (train_gpt.py, 1499). int32, as there: it wraps around."""
    own = tokens.int()
    before, ids = own.clone(), torch.full_like(tokens, rows - 1)
    if first == "reserved":
        before[:, 0] = rows - 1
    ids[:, 1:] = ((36313 * own[:, 1:]) ^ (27191 * before[:, :-1])) % (rows - 1)
    return ids


def chunk(T: int, window: int) -> int:
    """Queries of a chunk: the fewest that divide T and reach over the window; T where halves would save nothing."""
    return next((n for n in range(max(window, 1), T // 2) if T % n == 0), T)


def before(x: Tensor) -> Tensor:
    """x (B, n, chunk, ...) behind the chunk before it: (B, n, 2 chunk, ...); before the first are zeros."""
    return torch.cat((torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1), x), 2)


def mask(documents: Tensor, window: int) -> Tensor:
    """(B n, 1, chunk, keys) of documents' numbers (B, T): which key a query sees, of its chunk and the one before."""
    B, T = documents.shape
    c = chunk(T, window)
    t = torch.arange(T, device=documents.device).view(1, -1, c).expand(B, -1, c)
    d = documents.view(B, -1, c)
    keys, of = (t, d) if c == T else (before(t + 1) - 1, before(d))  # -1: no token
    back = t[..., :, None] - keys[..., None, :]
    seen = (back >= 0) & (back <= window) & (keys[..., None, :] >= 0) & (d[..., :, None] == of[..., None, :])
    return seen.flatten(0, 1)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """(B, T, H, D) each."""
    B, T, H, D = q.shape
    c = seen.shape[-2]
    q, k, v = (y.view(B, T // c, c, H, D) for y in (q, k, v))
    if c < T:
        k, v = before(k), before(v)
    q, k, v = (y.flatten(0, 1).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.1)
    return y.transpose(1, 2).reshape(B, T, H, D)


# --- the optimizer ---

POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
RULES = (  # of a name: betas, factor of the rate, of the decay
    (r"embed|head", (0.5, 0.95, 1.0, 150.0)),
    (r"values\..*|bigrams", (0.75, 0.95, 75.0, 5.0)),
    (r"h\..*\.gate", (0.9, 0.99, 1.0, 1.0)),
    (r"smear.gate", (0.9, 0.99, 0.01, 0.0)),
    (r"skip.gate", (0.9, 0.99, 0.05, 0.0)),
    (r"resid\..*", (0.9, 0.95, 5.0, 0.0)),
    (r"post\..*|lanes\..*|x0\..*|bigrams.scale", (0.9, 0.95, 1.0, 0.0)),
    (r".*\.scale", (0.9, 0.99, 5.0, 0.0)),
)
MATRICES = re.compile(r"h\.\d+\.(attn\.(qkv|proj)|mlp\.(up|down))")
RATE, MUON_RATE, MOMENTUM = 0.008, 0.023, 0.95
LARGE = 10_000  # elements of a parameter for which a compiled function is worth its compilation


def normuon(p: Tensor, g: Tensor, m: Tensor, second: Tensor, rate: float, products: torch.dtype) -> None:
    """One matrix (N, K)."""
    m.lerp_(g, 1 - MOMENTUM)
    x = g.lerp(m, MOMENTUM)
    x = (x / (x.norm() * 1.02 + 1e-6)).to(products)
    for a, b, c in POLAR:
        gram = x.mT @ x if x.shape[0] >= x.shape[1] else x @ x.mT
        terms = b * gram + c * (gram @ gram)
        x = a * x + (x @ terms if x.shape[0] >= x.shape[1] else terms @ x)
    x = x.float()
    v = x.square().mean(-1, keepdim=True)
    second.lerp_(v, 0.05)
    factors = second.clamp_min(1e-10).rsqrt()
    x = x * factors * (v.sum().sqrt() / (v * factors.square()).sum().sqrt().clamp_min(1e-10))
    rate = rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
    p.sub_(p * (x * p >= 0) * (1.2 * MUON_RATE * rate) + x * rate)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, beta1: float, beta2: float, lr: float, wd: float) -> None:
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    update = lr * ((1 - beta2**step).sqrt() / (1 - beta1**step)) * m / (v.sqrt() + 1e-10)
    p.sub_(update + p * (update * p > 0) * (lr * lr * 0.005 * wd))


def ending(model: Speedrun) -> Callable[[], None]:
    """What ends a step: NorMuon of the layers' matrices, and in every second step Adam of all else but the embedding, which gets
    the transpose of the classifier's weight."""
    wrap = torch.compile(dynamic=False) if model.a.mode == "compile" else (lambda f: f)
    matrix, large = wrap(normuon), wrap(adam)
    muons: list[Any] = []
    adams: list[Any] = []
    for name in model.names:
        p = model[name]
        if MATRICES.fullmatch(name):
            rows = p.shape[0] // (3 if name.endswith("qkv") else 1)
            rate = MUON_RATE * (2 if name.endswith("down") else 1)
            for at in range(0, p.shape[0], rows):
                here = slice(at, at + rows)
                muons.append((p, torch.zeros_like(p[here]), torch.zeros_like(p[here, :1]), rate, here))
        elif name != "embed":
            beta1, beta2, lr, wd = next(how for pattern, how in RULES if re.fullmatch(pattern, name))
            adams.append((p, torch.zeros_like(p), torch.zeros_like(p), beta1, beta2, RATE * lr, wd))
    count = 0

    @torch.no_grad()
    def end() -> None:
        nonlocal count
        count += 1
        for p, m, second, rate, here in muons:
            matrix(p[here], p.grad[here], m, second, rate, model.kind)
        for p, *_ in muons:
            p.grad = None
        if count % 2:
            return
        step = torch.tensor(count // 2, dtype=torch.float32)
        embed, head = model["embed"], model["head"]
        head.grad += embed.grad.T
        for p, m, v, *how in adams:
            (large if p.numel() > LARGE else adam)(p, p.grad, m, v, step, *how)
            p.grad = None
        embed.copy_(head.T)
        embed.grad = None

    return end


if __name__ == "__main__":
    serve(Speedrun, OWN, ending=ending, cycle=2)
