"""The peer of docs/reproduction.md: torch_gpt2.py without what one chapter of the video or another brings to it.

echo 5 | python torch_chapters.py --squares 1 --fused 0 --mode eager --dtype fp32 --batch 8 --seq 256
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_gpt2
from torch_step import clipped_adamw, serve

OWN = torch_gpt2.OWN | {"squares": 0, "fused": 1}


def squares(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Attention as the video first has it: all scores (B, H, T, T) in memory."""
    assert is_causal
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return F.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v


def build(a: argparse.Namespace) -> nn.Module:
    if a.squares:
        torch_gpt2.F.scaled_dot_product_attention = squares
    model = torch_gpt2.build(a)
    model.fused = bool(a.fused)
    return model


def ending(model: nn.Module):
    """The step's end, with one pass over all parameters or with an operation for each term and each parameter."""
    return clipped_adamw(model, fused=bool(model.fused))


if __name__ == "__main__":
    serve(build, OWN, ending=ending)
