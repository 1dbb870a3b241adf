"""The peer: a Llama 3 training step in PyTorch, which waits for its turns (torch_step.py).

echo 5 | python torch_llama.py --mode compile --dtype bf16 --batch 4 --seq 256
"""

from __future__ import annotations

import argparse
from math import pi

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_step import initialise, serve

OWN = {"kv_heads": 4, "d_ff": 2048, "tied": 1, "norm_eps": 1e-5, "rope_theta": 500_000.0}
OWN |= {"rope_factor": 0.0, "rope_low": 1.0, "rope_high": 4.0, "rope_old_seq": 8192}


def angles(a: argparse.Namespace) -> torch.Tensor:
    """(T, D / 2) float64: by how much each plane of a head is turned at each position."""
    D = a.d_model // a.heads
    turn = a.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if a.rope_factor:  # long waves are stretched, short ones are not, those between are in part
        kept = ((a.rope_old_seq * turn / (2 * pi) - a.rope_low) / (a.rope_high - a.rope_low)).clamp(0, 1)
        turn = torch.lerp(turn / a.rope_factor, turn, kept)
    return torch.outer(torch.arange(a.seq, dtype=torch.float64), turn)


def build(a: argparse.Namespace) -> nn.Module:
    """Pre-norm blocks, one product for q, k and v and one for gate and up, flash attention over grouped heads. Its parameters come
    in the order of ours."""
    C, H, G, hidden = a.d_model, a.heads, a.kv_heads, a.d_ff
    D = C // H

    def linear(K: int, N: int) -> nn.Linear:
        return nn.Linear(K, N, bias=False)

    def norm() -> nn.RMSNorm:
        return nn.RMSNorm(C, eps=a.norm_eps)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_norm, self.qkv, self.proj = norm(), linear(C, (H + 2 * G) * D), linear(C, C)
            self.mlp_norm, self.gate_up, self.down = norm(), linear(C, 2 * hidden), linear(hidden, C)

        def forward(self, x, cos, sin):
            B, T, _ = x.shape
            qk, v = self.qkv(self.attn_norm(x)).view(B, T, H + 2 * G, D).split((H + G, G), dim=2)
            left, right = qk.chunk(2, dim=-1)
            cos, sin = cos.to(qk.dtype), sin.to(qk.dtype)  # else fp32 tables would make q and k fp32
            qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
            q, k, v = (y.transpose(1, 2) for y in (*qk.split((H, G), dim=2), v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
            gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(a.vocab, C)
            self.blocks = nn.ModuleList([Block() for _ in range(a.layers)])
            self.norm, self.head = norm(), linear(C, a.vocab)
            if a.tied:
                self.head.weight = self.wte.weight
            turns = angles(a)[:, None, :]  # (T, 1, D / 2)
            self.register_buffer("cos", turns.cos().float(), persistent=False)
            self.register_buffer("sin", turns.sin().float(), persistent=False)
            initialise(self, layers=a.layers, residual=("proj", "down"))

        def forward(self, tokens, targets):
            x = self.wte(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, a.vocab).float(), targets.view(-1))

    return Llama()


if __name__ == "__main__":
    serve(build, OWN)
