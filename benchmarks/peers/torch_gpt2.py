"""The peer: a GPT-2 training step in PyTorch, which waits for its turns (torch_step.py).

echo 5 | python torch_gpt2.py --mode compile --dtype bf16 --batch 4 --seq 64
echo 20 | python torch_gpt2.py --mode compile --device cuda --batch 32 --seq 1024
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_step import initialise, serve

OWN = {"bias": 1}


def build(a: argparse.Namespace) -> nn.Module:
    """nanoGPT's model in few lines: pre-norm blocks, fused qkv, flash attention, tied classifier. Its parameters
    come in the order of ours."""
    C, H, bias = a.d_model, a.heads, bool(a.bias)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1 = nn.LayerNorm(C, bias=bias)
            self.qkv, self.proj = nn.Linear(C, 3 * C, bias=bias), nn.Linear(C, C, bias=bias)
            self.ln_2 = nn.LayerNorm(C, bias=bias)
            self.fc, self.fcproj = nn.Linear(C, 4 * C, bias=bias), nn.Linear(4 * C, C, bias=bias)

        def forward(self, x):
            B, T, _ = x.shape
            q, k, v = (y.view(B, T, H, C // H).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(C, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
            return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(a.vocab, C), nn.Embedding(a.seq, C)
            self.blocks = nn.ModuleList([Block() for _ in range(a.layers)])
            self.ln_f = nn.LayerNorm(C, bias=bias)
            initialise(self, layers=a.layers, residual=("proj",))

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.ln_f(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, a.vocab).float(), targets.view(-1))

    return GPT()


if __name__ == "__main__":
    serve(build, OWN)
