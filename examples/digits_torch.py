"""The network and the training of digits.py in PyTorch, for the comparison."""

from __future__ import annotations

import numpy as np
import torch
from digits import CLIP, GROUPS, OPTIM, WIDTHS
from torch.nn import functional as F


class Twin:
    """PyTorch's network from the same weights."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.w = {name: torch.tensor(values, requires_grad=True) for name, values in weights.items()}
        matrices = [t for t in self.w.values() if t.ndim == 2]
        others = [t for t in self.w.values() if t.ndim != 2]
        groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, fused=True)

    def convolve(self, x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        w, gain, bias = (self.w[f"{name}.{part}"] for part in "wgb")
        return F.group_norm(F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2), GROUPS, gain, bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.convolve(x, "stem"))
        for stage in range(len(WIDTHS)):
            for block in range(2):
                name, stride = f"{stage}.{block}", 2 if stage and not block else 1
                inner = F.relu(self.convolve(h, f"{name}.first", stride))
                short = h if stride == 1 else self.convolve(h, f"{name}.short", stride)
                h = F.relu(short + self.convolve(inner, f"{name}.second"))
        return h.mean((2, 3)) @ self.w["head"].T

    def step(self, lr: float, pixels: np.ndarray, labels: np.ndarray) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = F.cross_entropy(self.logits(torch.from_numpy(pixels)), torch.from_numpy(labels).long())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.w.values(), CLIP))
        self.optimizer.step()
        return float(loss.detach())

    def accuracy(self, pixels: np.ndarray, labels: np.ndarray) -> float:
        with torch.no_grad():
            return float((self.logits(torch.from_numpy(pixels)).argmax(-1).numpy() == labels).mean())
