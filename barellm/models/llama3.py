"""Llama 3 (Grattafiori et al. 2024): pre-norm blocks of RMSNorm, rotary positions, grouped queries and SwiGLU, nowhere a bias.

Weights are stored (out, in), and what multiplies the same input is one matrix. In this order:

    wte                      (Vp, C)            the embedding, and the classifier where `tied`
    h.0.attn_norm.weight     (C)                RMSNorm
    h.0.attn.qkv.weight      ((H + 2 G) D, C)   rows of H heads of q, then of G heads of k, then of G heads of v
    h.0.attn.proj.weight     (C, H D)
    h.0.mlp_norm.weight      (C)
    h.0.mlp.gate_up.weight   (2 F, C)           rows of the gate, then of what it lets through
    h.0.mlp.down.weight      (C, F)
    ...                      for each block h.1, h.2 and so on
    norm.weight              (C)
    head                     (Vp, C)            the classifier, where it is not tied
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

from barellm.config import Config as Run
from barellm.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config.fields import above, at_least, between, divides, value
from barellm.models.hf_mapping import HuggingFace, UnknownConfig

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.ops.attention.rope import Scaling
    from barellm.program.tensor import Tensor


@dataclass(frozen=True)
class Config(ModelConfig):
    layers: int = between(1, 1024, 12, "transformer blocks")
    heads: int = divides("d_model", 12, "query heads; each must have an even width, as RoPE rotates pairs", even=True)
    kv_heads: int = divides(
        "heads", 4, "key and value heads (grouped-query attention), each shared by heads / kv_heads query heads"
    )
    d_model: int = at_least(1, 768, "embedding dimension (n_embd); hidden size: width of the residual stream")
    d_ff: int = at_least(1, 2048, "intermediate (FFN) size of SwiGLU")
    vocab_size: int = at_least(1, 50257, "vocabulary size; a run takes it from its tokenizer")
    padded_vocab: int = at_least(
        0, 0, "padded vocabulary size: rows of the embedding; 0: vocab_size rounded up to a multiple of 64"
    )
    max_seq: int = at_least(1, 1024, "context length: the longest sequence in tokens")
    tied: bool = value(
        True, "tied embeddings: the embedding is the LM head too; false: the LM head is a matrix of its own"
    )
    norm_eps: float = above(0, 1e-5, "RMSNorm's epsilon")
    rope_theta: float = above(0, 500_000.0, "RoPE's base frequency theta")
    rope_factor: float = at_least(0, 0.0, "RoPE scaling factor of Llama 3.1; 0: none")
    rope_low: float = above(
        0, 1.0, "low_freq_factor: wavelengths above rope_old_seq / rope_low are scaled by rope_factor"
    )
    rope_high: float = above(
        "rope_low", 4.0, "high_freq_factor: wavelengths below rope_old_seq / rope_high are not scaled"
    )
    rope_old_seq: int = at_least(1, 8192, "original_max_position_embeddings: the context length before scaling")

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        return self.d_model, self.kv_heads * self.head_size, self.kv_heads * self.head_size

    @property
    def scaling(self) -> Scaling | None:
        from barellm.program.ops.attention.rope import Scaling

        return Scaling(self.rope_factor, self.rope_low, self.rope_high, self.rope_old_seq) if self.rope_factor else None


@dataclass(frozen=True)
class Block:
    name: str
    attn_norm: Tensor
    qkv: Tensor
    proj: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    wte: Tensor
    blocks: list[Block]
    norm: Tensor
    head: Tensor


def declare(p: Program, cfg: Config) -> Weights:
    """Declare the parameters, initialised as GPT-2's: std 0.02, residual projections times 1 / sqrt(2 L), norms 1, padded ids 0."""
    C, F = cfg.d_model, cfg.d_ff
    residual_std = 0.02 / sqrt(2 * cfg.layers)

    def norm(name: str) -> Tensor:
        return p.parameter(f"{name}.weight", (C,), value=1.0)

    def matrix(name: str, N: int, K: int, std: float = 0.02) -> Tensor:
        return p.parameter(f"{name}.weight", (N, K), std=std)

    def vocabulary(name: str) -> Tensor:
        return p.parameter(name, (cfg.padded_vocab, C), std=0.02, valid_rows=cfg.vocab_size)

    wte = vocabulary("wte")
    blocks = [
        Block(
            name=f"h.{i}",
            attn_norm=norm(f"h.{i}.attn_norm"),
            qkv=matrix(f"h.{i}.attn.qkv", sum(cfg.qkv_widths), C),
            proj=matrix(f"h.{i}.attn.proj", C, C, std=residual_std),
            mlp_norm=norm(f"h.{i}.mlp_norm"),
            gate_up=matrix(f"h.{i}.mlp.gate_up", 2 * F, C),
            down=matrix(f"h.{i}.mlp.down", C, F, std=residual_std),
        )
        for i in range(cfg.layers)
    ]
    return Weights(wte, blocks, norm("norm"), wte if cfg.tied else vocabulary("head"))


def forward(p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool) -> Tensor:
    """The loss (1,): the sum over valid targets times the scalar inv_targets. It has no dropout, so training changes nothing."""
    w = declare(p, cfg)

    def attend(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return p.attention(q, k, v, heads=cfg.heads, kv_heads=cfg.kv_heads)

    return p.classifier(_trunk(p, cfg, w, tokens_BT, attend), w.head, targets_BT, valid_vocab=cfg.vocab_size)


def decode(p: Program, cfg: Config, tokens_BT: Tensor) -> Tensor:
    """The fp32 logits (B, 1, Vp) of the last position. Tokens stand at positions pos .. pos + T. The caches hold the positions
    before: the heads of keys, which are turned, and of values, but not those of queries."""
    w = declare(p, cfg)
    shape = (int(tokens_BT.shape[0]), int(tokens_BT.shape[1]), cfg.kv_heads * cfg.head_size)

    def attend(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches = [p.cache(f"{block.name}.{kind}_cache", shape, p.compute) for kind in "kv"]
        return p.attention_cached(q, k, v, *caches, heads=cfg.heads, kv_heads=cfg.kv_heads)

    return p.last_logits(_trunk(p, cfg, w, tokens_BT, attend), w.head)


def _trunk(p: Program, cfg: Config, w: Weights, tokens_BT: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    tables = p.rope_tables(cfg.max_seq, cfg.head_size, theta=cfg.rope_theta, scaling=cfg.scaling)
    x_BTC = p.embedding(tokens_BT, w.wte)
    for b in w.blocks:
        with p.segment(b.name):
            h_BTC = p.rmsnorm(x_BTC, b.attn_norm, eps=cfg.norm_eps)
            qkv_BTD = p.rope(p.linear(h_BTC, b.qkv), tables, heads=cfg.heads + cfg.kv_heads)  # v passes
            a_BTC = attend(b, *p.split(qkv_BTD, cfg.qkv_widths))
            x_BTC = p.add(x_BTC, p.linear(a_BTC, b.proj))
            h_BTC = p.rmsnorm(x_BTC, b.mlp_norm, eps=cfg.norm_eps)
            gate_BTF, up_BTF = p.split(p.linear(h_BTC, b.gate_up), 2)
            x_BTC = p.add(x_BTC, p.linear(p.swiglu(gate_BTF, up_BTF), b.down))
    return p.rmsnorm(x_BTC, w.norm, eps=cfg.norm_eps)


# --- presets ---


def llama_15m() -> Run:
    """A small Llama on the source of Python's standard library, which every machine has."""
    return Run(
        preset="llama-15m",
        model=Config(layers=8, heads=8, kv_heads=4, d_model=384, d_ff=1024, vocab_size=4096, max_seq=256),
        optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup=50, beta2=0.99),
        data=DataConfig(source="stdlib", tokenizer="bpe", bpe_vocab=4096),
        train=TrainConfig(micro_batch_size=8, seq=256, steps=2000, minutes=10.0, eval_every=250, sample_every=500),
    )


def llama_124m() -> Run:
    """A Llama as large as GPT-2 124M, with its tokenizer. It shows what the parts of Llama are worth beside it."""
    return Run(
        preset="llama-124m",
        model=Config(),
        optim=OptimConfig(lr=6e-4, min_lr=6e-5, warmup=700),
        data=DataConfig(source="", tokenizer="gpt2"),
        train=TrainConfig(
            micro_batch_size=4,
            seq=1024,
            gradient_accumulation_steps=128,
            steps=19560,
            eval_every=250,
            checkpoint_every=1000,
        ),
    )


def _released(preset: str, lr: float, **sizes: Any) -> Run:
    """A model that Meta released. It has 131,072 positions. The preset has 8192, for which KV caches fit into memory, and an
    import has as many as its folder says. Its tokenizer is no part of barellm: name the folder of its tokenizer.json."""
    return Run(
        preset=preset,
        model=Config(heads=32, kv_heads=8, vocab_size=128_256, max_seq=8192, **sizes),
        optim=OptimConfig(lr=lr, min_lr=lr / 10, warmup=2000),
        data=DataConfig(source="", tokenizer=""),
        train=TrainConfig(
            micro_batch_size=1,
            seq=2048,
            gradient_accumulation_steps=256,
            steps=20000,
            eval_every=250,
            checkpoint_every=1000,
        ),
    )


PRESETS: dict[str, Callable[[], Run]] = {
    "llama-15m": llama_15m,
    "llama-124m": llama_124m,
    "llama3-1b": lambda: _released("llama3-1b", 3e-4, layers=16, d_model=2048, d_ff=8192, rope_factor=32.0),
    "llama3-8b": lambda: _released("llama3-8b", 3e-4, layers=32, d_model=4096, d_ff=14336, rope_factor=8.0, tied=False),
}


# --- other programs ---

ROPE = ("rope_theta", "rope_factor", "rope_low", "rope_high", "rope_old_seq")
TORCH_TWIN = ("torch_llama.py", ("layers", "heads", "kv_heads", "d_model", "d_ff", "tied", "norm_eps", *ROPE))

BLOCK = {  # our name in a block -> theirs, from the first row to the last
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
OTHERS = {"wte": "embed_tokens.weight", "norm.weight": "norm.weight", "head": "lm_head.weight"}
SCALING = {  # key beside rope_type "llama3" -> our field
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_old_seq",
}


def _parts(cfg: Config, ours: str) -> dict[str, int]:
    if ours in OTHERS:
        return {OTHERS[ours]: 0}
    _, layer, name = ours.removesuffix(".weight").split(".", 2)
    rows = {"attn.qkv": cfg.qkv_widths, "mlp.gate_up": (cfg.d_ff, cfg.d_ff)}.get(name, (0,))
    return {f"layers.{layer}.{part}.weight": n for part, n in zip(BLOCK[name], rows, strict=True)}


def _read(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The fields that config.json keeps elsewhere. Later versions of transformers have in `rope_parameters` what was in
    `rope_theta` and `rope_scaling` before."""
    place = next((key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None), "rope_scaling")
    rope = config.get(place) or {}
    if not isinstance(rope, dict):
        raise UnknownConfig(f"{place} is {rope!r}, expected keys with values, or null")
    kv_heads = config.get("num_key_value_heads")
    theta = ("rope_theta", config.get("rope_theta", 10_000.0))
    found = {
        "kv_heads": ("num_key_value_heads", config.get("num_attention_heads", 32) if kv_heads is None else kv_heads),
        "rope_theta": (f"{place}.rope_theta", rope["rope_theta"]) if "rope_theta" in rope else theta,
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnknownConfig(f"{place}.rope_type is {kind!r}, expected 'default' or 'llama3'")
    if kind == "llama3":
        found |= {ours: (f"{place}.{key}", rope.get(key)) for key, ours in SCALING.items()}
    return found


def _written(cfg: Config) -> dict[str, Any]:
    stretch = {"rope_type": "llama3", **{key: getattr(cfg, ours) for key, ours in SCALING.items()}}
    more = {"num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_size, "rope_theta": cfg.rope_theta}
    return {**more, "rope_scaling": stretch if cfg.rope_factor else None}


HUGGING_FACE = HuggingFace(
    preset="llama-124m",
    model_type="llama",
    class_name="LlamaForCausalLM",
    sizes={
        "num_hidden_layers": ("layers", 32),
        "num_attention_heads": ("heads", 32),
        "hidden_size": ("d_model", 4096),
        "intermediate_size": ("d_ff", 11008),
        "vocab_size": ("vocab_size", 32000),
        "max_position_embeddings": ("max_seq", 2048),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "tie_word_embeddings": ("tied", False),
    },
    kinds={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    derived={"head_dim": lambda cfg: cfg.head_size},
    rates=("attention_dropout",),
    prefix="model.",
    head="lm_head.weight",
    tied=lambda cfg: "wte" if cfg.tied else None,
    parts=_parts,
    transposed=lambda ours: False,
    # A buffer of older versions: RoPE's frequencies.
    ignored=lambda theirs: re.match(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$", theirs) is not None,
    refused=lambda cfg: None,
    read=_read,
    written=_written,
)
