"""A model whose residual branches have gradients of very different sizes, for `train.branch_scales`.

Those inside of attention are 2^-22 times the true ones, those inside of the MLP 2^14 times. `rescale` changes gradients alone, and
AdamW divides a weight's constant factor out, so in fp32 the factors change nothing. Its text, `text.txt`, has 64 characters of
three letters, then of three others: what comes next is known by the letters before, which attention alone sees."""

from dataclasses import dataclass, replace

from barellm.config import ModelConfig
from barellm.config.fields import at_least, between, divides
from barellm.models import preset


@dataclass(frozen=True)
class Config(ModelConfig):
    vocab_size: int = at_least(1, 256, "token ids")
    padded_vocab: int = at_least(0, 0, "stored rows of the embedding; 0: the next multiple of 64")
    max_seq: int = at_least(1, 32, "positions")
    d_model: int = at_least(1, 32, "width of the residual stream")
    layers: int = at_least(1, 2, "blocks")
    heads: int = divides("d_model", 2, "attention heads in a block")
    attn: int = between(-40, 40, -22, "the power of two that gradients inside of attention's branch have too much")
    mlp: int = between(-40, 40, 14, "the same of the MLP's branch")


def declare(p, cfg):
    C = cfg.d_model
    w = {"wte": p.parameter("wte", (cfg.padded_vocab, C), std=0.02, valid_rows=cfg.vocab_size)}
    w |= {"wpe": p.parameter("wpe", (cfg.max_seq, C), std=0.02), "norm": p.parameter("norm", (C,), value=1.0)}
    for h in (f"h.{i}" for i in range(cfg.layers)):
        for name, shape in {"qkv": (3 * C, C), "proj": (C, C), "up": (4 * C, C), "down": (C, 4 * C)}.items():
            w[f"{h}.{name}"] = p.parameter(f"{h}.{name}", shape, std=0.1)
        w |= {f"{h}.{name}": p.parameter(f"{h}.{name}", (C,), value=1.0) for name in ("norm_1", "norm_2")}
    return w


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    w = declare(p, cfg)

    def times(x, power):  # nothing forward
        return p.rescale(x, forward=1, backward=2.0**power)

    x_BTC = p.embedding(tokens_BT, w["wte"], w["wpe"])
    for h in (f"h.{i}" for i in range(cfg.layers)):
        with p.segment(h):
            h_BTC = times(x_BTC, -cfg.attn)
            with p.branch("attn"):
                h_BTC = p.layernorm(h_BTC, w[f"{h}.norm_1"])
                a_BTC = p.attention(*p.split(p.linear(h_BTC, w[f"{h}.qkv"]), 3), heads=cfg.heads)
                a_BTC = p.linear(a_BTC, w[f"{h}.proj"])
            x_BTC = p.add(x_BTC, times(a_BTC, cfg.attn))
            h_BTC = times(x_BTC, -cfg.mlp)
            with p.branch("mlp"):
                h_BTC = p.layernorm(h_BTC, w[f"{h}.norm_2"])
                m_BTC = p.linear(p.gelu(p.linear(h_BTC, w[f"{h}.up"])), w[f"{h}.down"])
            x_BTC = p.add(x_BTC, times(m_BTC, cfg.mlp))
    return p.classifier(p.layernorm(x_BTC, w["norm"]), w["wte"], targets_BT, valid_vocab=cfg.vocab_size)


def uneven():
    base = preset("shakespeare-char")
    optim = replace(base.optim, warmup=0, lr=0.01, min_lr=0.001, eps=1e-15, clip=0.0)
    data = replace(base.data, source="text.txt", tokenizer="bytes")
    train = replace(base.train, micro_batch_size=4, seq=32, steps=1000, eval_every=1000, dtype="fp16", exponent_stats=1000)
    return replace(base, preset="uneven", model=Config(), optim=optim, data=data, train=train)


PRESETS = {"uneven": uneven}
