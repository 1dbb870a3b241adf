"""An architecture that barellm does not have: one block of attention and one of products after another, each on its own norm, a
classifier of its own, no positions but the embedding's. tests/models/test_plug_in.py copies it beside the package's models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from barellm.config import Config as Run
from barellm.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config.fields import at_least, divides, one_of

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


@dataclass(frozen=True)
class Config(ModelConfig):
    depth: int = at_least(1, 2, "how many pairs of blocks")
    heads: int = divides("d_model", 2, "heads of each attention")
    d_model: int = at_least(1, 16, "width of the stream")
    factor: int = at_least(1, 3, "the products' inner width over that of the stream")
    vocab_size: int = at_least(1, 64, "token ids")
    padded_vocab: int = at_least(0, 0, "stored rows of the embedding")
    max_seq: int = at_least(1, 32, "positions")
    gate: str = one_of(("gelu", "none"), "gelu", "between the two products")


def declare(p: Program, cfg: Config) -> dict[str, Tensor]:
    C, F = cfg.d_model, cfg.factor * cfg.d_model
    valid = {"valid_rows": cfg.vocab_size}
    shapes: dict[str, tuple[int, int]] = {"embed": (cfg.padded_vocab, C), "positions": (cfg.max_seq, C)}
    for i in range(cfg.depth):
        shapes |= {f"{i}.qkv": (3 * C, C), f"{i}.out": (C, C), f"{i}.up": (F, C), f"{i}.down": (C, F)}
    shapes["head"] = (cfg.padded_vocab, C)
    w = {n: p.parameter(n, s, std=0.05, **(valid if n in ("embed", "head") else {})) for n, s in shapes.items()}
    norms = [f"{i}.{kind}_norm" for i in range(cfg.depth) for kind in ("first", "second")]
    return w | {name: p.parameter(name, (C,), value=1.0) for name in [*norms, "norm"]}


def forward(p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool) -> Tensor:
    w = declare(p, cfg)
    x_BTC = trunk(p, cfg, w, tokens_BT, lambda i, qkv: p.attention(*p.split(qkv, 3), heads=cfg.heads))
    return p.classifier(x_BTC, w["head"], targets_BT, valid_vocab=cfg.vocab_size)


def decode(p: Program, cfg: Config, tokens_BT: Tensor) -> Tensor:
    w = declare(p, cfg)
    shape = (int(tokens_BT.shape[0]), int(tokens_BT.shape[1]), cfg.d_model)

    def attend(i: int, qkv: Tensor) -> Tensor:
        caches = [p.cache(f"{i}.{kind}_cache", shape, p.compute) for kind in "kv"]
        return p.attention_cached(*p.split(qkv, 3), *caches, heads=cfg.heads)

    return p.last_logits(trunk(p, cfg, w, tokens_BT, attend), w["head"])


def trunk(p: Program, cfg: Config, w: dict[str, Tensor], tokens_BT: Tensor, attend: Any) -> Tensor:
    x = p.embedding(tokens_BT, w["embed"], w["positions"])
    for i in range(cfg.depth):
        with p.segment(f"block {i}"):
            h = attend(i, p.linear(p.layernorm(x, w[f"{i}.first_norm"]), w[f"{i}.qkv"]))
            x = p.add(x, p.linear(h, w[f"{i}.out"]))
            h = p.linear(p.layernorm(x, w[f"{i}.second_norm"]), w[f"{i}.up"])
            x = p.add(x, p.linear(p.gelu(h) if cfg.gate == "gelu" else h, w[f"{i}.down"]))
    return p.layernorm(x, w["norm"])


def small() -> Run:
    return Run(
        preset="plain-small",
        model=Config(),
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup=2),
        data=DataConfig(source="", tokenizer="bytes"),
        train=TrainConfig(micro_batch_size=4, seq=16, steps=30, eval_every=0, eval_tokens=256),
    )


PRESETS = {"plain-small": small}
