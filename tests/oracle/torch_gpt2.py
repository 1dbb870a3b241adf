"""GPT-2 in PyTorch, functional, with weights by our names: the oracle for whole models on any backend."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from barellm.config import OptimConfig
from barellm.models.gpt2 import Config as ModelConfig


class TorchGPT2:
    """Leaves by our names, at `dtype`. `autocast`: bf16 as PyTorch's CPU autocast has it. No dropout; padded ids masked."""

    def __init__(self, cfg: ModelConfig, weights: Mapping[str, np.ndarray], *, dtype=torch.float32, autocast: bool = False) -> None:
        self.cfg = cfg
        self.autocast = autocast
        self.weights = {k: torch.tensor(w, dtype=dtype).requires_grad_() for k, w in weights.items()}

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """(B, T) -> (B, T, Vp), padded columns -inf, fp32 (or the weights' dtype)."""
        cfg, w = self.cfg, self.weights
        ids = torch.as_tensor(tokens, dtype=torch.long)
        B, T = ids.shape

        def norm(x, name):
            return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

        def linear(x, name):
            return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            x = F.embedding(ids, w["wte"]) + w["wpe"][:T]
            for i in range(cfg.layers):
                qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
                q, k, v = (y.view(B, T, cfg.heads, cfg.head_size).transpose(1, 2) for y in qkv.split(cfg.d_model, -1))
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + linear(a.transpose(1, 2).reshape(B, T, cfg.d_model), f"h.{i}.attn.c_proj")
                h = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
                x = x + linear(h, f"h.{i}.mlp.c_proj")
            logits = F.linear(norm(x, "ln_f"), w["wte"])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        padded = torch.arange(cfg.padded_vocab) >= cfg.vocab_size
        return logits.masked_fill(padded, float("-inf"))

    def loss(self, tokens: np.ndarray, targets: np.ndarray, inv_targets: float) -> torch.Tensor:
        """Sum over valid targets (not -1) times inv_targets."""
        flat = torch.as_tensor(targets, dtype=torch.long).reshape(-1)
        logits = self.logits(tokens).reshape(flat.numel(), -1)
        return F.cross_entropy(logits, flat, ignore_index=-1, reduction="sum") * inv_targets

    def gradients(self, tokens: np.ndarray, targets: np.ndarray, inv_targets: float) -> tuple[float, dict]:
        """The loss, and every tensor's gradient by our names."""
        for leaf in self.weights.values():
            leaf.grad = None
        loss = self.loss(tokens, targets, inv_targets)
        loss.backward()
        return loss.item(), {name: leaf.grad.numpy() for name, leaf in self.weights.items()}

    def adamw(self, config: OptimConfig) -> torch.optim.AdamW:
        """torch's optimizer with our groups: decay on matrices only."""
        leaves = self.weights.values()
        groups = [
            {"params": [p for p in leaves if p.dim() == 2], "weight_decay": config.weight_decay},
            {"params": [p for p in leaves if p.dim() != 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)

    def step(self, optimizer: torch.optim.AdamW, tokens, targets, inv_targets: float, *, lr: float, clip: float) -> float:
        """One training step; returns its loss."""
        loss, _ = self.gradients(tokens, targets, inv_targets)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        return loss


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm, in float64."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
