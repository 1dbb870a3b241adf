"""GPT-2 (Radford et al. 2019): pre-norm blocks, learned positions, tied classifier; dropout where nanoGPT has it.

Weights are stored (out, in). Names are llm.c's and Hugging Face's: "wte", "h.0.attn.c_attn.weight", "ln_f.bias".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from barellm.config import ModelConfig
from barellm.program.builder import Program
from barellm.program.tensor import Tensor

Affine = tuple[Tensor, Tensor | None]  # weight, bias


@dataclass(frozen=True)
class Block:
    name: str
    ln_1: Affine
    attn: Affine
    proj: Affine
    ln_2: Affine
    fc: Affine
    fcproj: Affine


@dataclass(frozen=True)
class Weights:
    wte: Tensor
    wpe: Tensor
    blocks: list[Block]
    ln_f: Affine


def declare_parameters(p: Program, cfg: ModelConfig) -> Weights:
    """Initialisation of GPT-2: std 0.02, residual projections times 1 / sqrt(2 L), biases 0, norms 1, padded ids 0."""
    C = cfg.channels
    residual_std = 0.02 / sqrt(2 * cfg.layers)

    def norm(name: str) -> Affine:
        weight = p.parameter(f"{name}.weight", (C,), value=1.0)
        return weight, p.parameter(f"{name}.bias", (C,)) if cfg.bias else None

    def linear(name: str, N: int, K: int, std: float = 0.02) -> Affine:
        weight = p.parameter(f"{name}.weight", (N, K), std=std)
        return weight, p.parameter(f"{name}.bias", (N,)) if cfg.bias else None

    wte = p.parameter("wte", (cfg.padded_vocab, C), std=0.02, valid_rows=cfg.vocab_size)
    wpe = p.parameter("wpe", (cfg.max_seq, C), std=0.02)
    blocks = [
        Block(
            name=f"h.{i}",
            ln_1=norm(f"h.{i}.ln_1"),
            attn=linear(f"h.{i}.attn.c_attn", 3 * C, C),
            proj=linear(f"h.{i}.attn.c_proj", C, C, std=residual_std),
            ln_2=norm(f"h.{i}.ln_2"),
            fc=linear(f"h.{i}.mlp.c_fc", 4 * C, C),
            fcproj=linear(f"h.{i}.mlp.c_proj", C, 4 * C, std=residual_std),
        )
        for i in range(cfg.layers)
    ]
    return Weights(wte, wpe, blocks, norm("ln_f"))


def gpt2(p: Program, cfg: ModelConfig, tokens_BT: Tensor, targets_BT: Tensor, *, dropout: float = 0.0) -> Tensor:
    """The loss (1,): the sum over valid targets times the scalar inv_targets."""
    w = declare_parameters(p, cfg)

    def attend(_: Block, qkv_BT3C: Tensor) -> Tensor:
        return p.attention(*p.split(qkv_BT3C, 3), heads=cfg.heads, dropout=dropout)

    h_BTC = _trunk(p, w, tokens_BT, attend, dropout)
    return p.classifier(h_BTC, w.wte, targets_BT, valid_vocab=cfg.vocab_size)


def gpt2_decode(p: Program, cfg: ModelConfig, tokens_BT: Tensor, *, dtype: str) -> Tensor:
    """fp32 logits (B, 1, Vp) of the last position. Tokens stand at positions pos .. pos + T, the caches hold those before."""
    w = declare_parameters(p, cfg)
    shape = (int(tokens_BT.shape[0]), int(tokens_BT.shape[1]), cfg.channels)

    def attend(block: Block, qkv_BT3C: Tensor) -> Tensor:
        caches = [p.cache(f"{block.name}.{kind}_cache", shape, dtype) for kind in "kv"]
        return p.attention_cached(*p.split(qkv_BT3C, 3), *caches, heads=cfg.heads)

    return p.last_logits(_trunk(p, w, tokens_BT, attend, 0.0), w.wte)


def _trunk(
    p: Program, w: Weights, tokens_BT: Tensor, attend: Callable[[Block, Tensor], Tensor], dropout: float
) -> Tensor:
    x_BTC = p.dropout(p.embedding(tokens_BT, w.wte, w.wpe), dropout)
    for b in w.blocks:
        with p.segment(b.name):
            h_BTC = p.layernorm(x_BTC, *b.ln_1)
            a_BTC = attend(b, p.linear(h_BTC, *b.attn))
            x_BTC = p.add(x_BTC, p.dropout(p.linear(a_BTC, *b.proj), dropout))
            h_BTC = p.layernorm(x_BTC, *b.ln_2)
            h_BTF = p.gelu(p.linear(h_BTC, *b.fc))
            x_BTC = p.add(x_BTC, p.dropout(p.linear(h_BTF, *b.fcproj), dropout))
    return p.layernorm(x_BTC, *w.ln_f)
