"""Decoders of Llama's kind (Llama 3: Grattafiori et al. 2024): pre-norm blocks of RMSNorm, rotary positions, grouped queries and
SwiGLU, nowhere a bias; and by options what Mistral, Qwen, Gemma, Phi-3, SmolLM3, OLMo, GPT-NeoX, Granite, Arcee and StableLM do
otherwise (`families`).

Weights are stored (out, in), and what multiplies the same input is one matrix. In this order:

    wte                      (Vp, C)            the embedding, and the classifier where `tied`
    h.0.attn_norm.weight     (C)                RMSNorm, or LayerNorm with a bias; not with norms behind (`norm_position`)
    h.0.attn.qkv.weight      ((H + 2 G) D, C)   rows of H heads of q, then of G heads of k, then of G heads of v. Where q and k are
                                                normalised: h.0.attn.q, .k and .v, and h.0.attn.q_norm and .k_norm (D or H D)
    h.0.attn.proj.weight     (C, H D)
    h.0.attn_post_norm       (C)                with norms behind
    h.0.mlp_norm.weight      (C)
    h.0.mlp.gate_up.weight   (2 F, C)           rows of the gate, then of what it lets through; of a plain MLP h.0.mlp.up (F, C)
    h.0.mlp.down.weight      (C, F)
    h.0.mlp_post_norm        (C)                with norms behind
    ...                      for each block h.1, h.2 and so on
    norm.weight              (C)
    head                     (Vp, C)            the classifier, where it is not tied

Where only a part of a head turns (`rotary_fraction`), the two halves of that part are the first columns of the head's two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from barellm.config import ACTIVATIONS, DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config import Config as Run
from barellm.config.fields import above, at_least, between, divides, one_of, value
from barellm.models import families

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.ops.attention.rope import Scaling
    from barellm.program.tensor import Documents, Tensor

    Tables = tuple[Tensor, Tensor] | None  # of cosines and sines

    Affine = tuple[Tensor, Tensor | None]  # weight, bias


def numbers(text: str) -> tuple[float, ...]:
    """The numbers between the commas of a text."""
    return tuple(float(word) for word in text.split(",") if word.strip())


def _numbers(key: str, found: str, config: Any) -> str | None:
    try:
        wrong = [n for n in numbers(found) if not n >= 0]
    except ValueError:
        wrong = [found]
    return f"{key} is {found!r}, expected numbers from 0 on with commas between them" if wrong else None


def _layers(key: str, found: str, config: Any) -> str | None:
    wrong = _numbers(key, found, config) or any(n not in range(config.layers) for n in numbers(found))
    return f"{key} is {found!r}, expected numbers from 0 to {config.layers - 1} with commas between them" if wrong else None


def _even_head(key: str, found: int, config: Any) -> str | None:
    return f"{key} is {found}, expected an even number: RoPE rotates pairs" if found % 2 or found < 0 else None


def _part_of_head(key: str, found: float, config: Any) -> str | None:
    if not 0 < found <= 1:
        return f"{key} is {found}, expected above 0 and at most 1"
    rotated = int(config.head_size * found)
    return f"{key} {found} rotates {rotated} of {config.head_size} columns, expected an even number" if rotated % 2 else None


def _plane_factors(key: str, found: str, config: Any) -> str | None:
    wrong, planes = _numbers(key, found, config), config.rotated // 2
    if wrong or config.rope_type != "longrope" or len(numbers(found)) == planes:
        return wrong
    return f"{key} has {len(numbers(found))} numbers, expected {planes}, one for each pair of columns that RoPE rotates"


@dataclass(frozen=True)
class Config(ModelConfig):
    layers: int = between(1, 1024, 12, "transformer blocks")
    heads: int = divides("d_model", 12, "query heads; each of an even width, as RoPE rotates pairs", even=True, unless="head_dim")
    kv_heads: int = divides("heads", 4, "key and value heads (grouped-query attention), each of heads / kv_heads query heads")
    d_model: int = at_least(1, 768, "embedding dimension (n_embd); hidden size: width of the residual stream")
    d_ff: int = at_least(1, 2048, "intermediate (FFN) size of the MLP")
    vocab_size: int = at_least(1, 50257, "vocabulary size; a run takes it from its tokenizer")
    padded_vocab: int = at_least(0, 0, "padded vocabulary size: rows of the embedding; 0: vocab_size rounded up to multiples of 64")
    max_seq: int = at_least(1, 1024, "context length: the longest sequence in tokens")
    tied: bool = value(True, "tied embeddings: the embedding is the LM head too; false: the LM head is a matrix of its own")
    norm_eps: float = above(0, 1e-5, "the norms' epsilon")
    rope_theta: float = above(0, 500_000.0, "RoPE's base frequency theta")
    rope_factor: float = at_least(0, 0.0, "RoPE scaling factor of rope_type; 0: none")
    rope_low: float = above(0, 1.0, "low_freq_factor, or yarn's beta_slow: wavelengths above rope_old_seq / rope_low are scaled")
    rope_high: float = above("rope_low", 4.0, "high_freq_factor, or yarn's beta_fast: those below rope_old_seq / rope_high are not")
    rope_old_seq: int = at_least(1, 8192, "original_max_position_embeddings: the context length before scaling")
    rope_type: str = one_of(("linear", "dynamic", "llama3", "yarn", "longrope"), "llama3", "how rope_factor scales frequencies")
    rope_attention_factor: float = at_least(0, 0.0, "yarn, longrope: attention_factor, of cosines and sines; 0: by their formula")
    rope_truncate: bool = value(True, "yarn: the planes between which scaling begins and ends are whole numbers")
    rope_short: str = value("", "longrope: short_factor, a number for each pair of columns", check=_plane_factors)
    rope_long: str = value("", "longrope: long_factor, of contexts above rope_old_seq", check=_plane_factors)
    head_dim: int = value(0, "head size; 0: d_model / heads", check=_even_head)
    rotary_fraction: float = value(1.0, "partial_rotary_factor: the fraction of a head that RoPE rotates", check=_part_of_head)
    nope_layers: str = value("", "layers without RoPE, counted from 0, with commas between them", check=_layers)
    sliding_window: int = at_least(0, 0, "sliding-window attention: keys that a query sees, its own among them; 0: all before it")
    window_layers: str = value("", "layers with the window, counted from 0, with commas between them; empty: all", check=_layers)
    rope_local_theta: float = at_least(0, 0.0, "rope_theta of layers with the window, without scaling; 0: RoPE as in the others")
    qk_norm: str = one_of(("none", "head", "row"), "none", "RMSNorm of q and k: of each head, or of all heads as one row")
    norm: str = one_of(("rms", "layer"), "rms", "RMSNorm, or LayerNorm with biases")
    norm_position: str = one_of(("pre", "post", "both"), "pre", "norms before attention and MLP, behind them, or both")
    norm_unit_offset: bool = value(False, "norms multiply by 1 + weight")
    attention_bias: str = one_of(("none", "qkv", "all"), "none", "biases of q, k and v, or of attention's output too")
    mlp_bias: bool = value(False, "biases in the MLP")
    mlp: str = one_of(("gated", "plain"), "gated", "MLP: activation(gate) * up, or activation(up)")
    activation: str = one_of(ACTIVATIONS, "silu", "activation; gelu is the tanh form")
    parallel_residual: bool = value(False, "the MLP reads what attention reads, not its result")
    embedding_multiplier: float = above(0, 1.0, "multiplier of the embedding")
    residual_multiplier: float = above(0, 1.0, "multiplier of what attention and MLP add to the residual stream")
    attention_multiplier: float = at_least(0, 0.0, "multiplier of attention's scores; 0: 1 / sqrt(head size)")
    attention_softcap: float = at_least(0, 0.0, "softcap c of attention's scores, c tanh(score / c); 0: none")
    logits_scaling: float = above(0, 1.0, "divisor of the logits")
    logits_softcap: float = between(0, 35, 0.0, "softcap of the logits; 0: none")
    family: str = one_of(("", *families.NAMES), "", "model_type on export to Hugging Face; empty: the first that holds the options")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def rotated(self) -> int:
        return int(self.head_size * self.rotary_fraction)

    def window_of(self, layer: int) -> int:
        return self.sliding_window if not self.window_layers or layer in numbers(self.window_layers) else 0

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        D = self.head_size
        return self.heads * D, self.kv_heads * D, self.kv_heads * D

    @property
    def scaling(self) -> Scaling | None:
        from barellm.program.ops.attention.rope import Scaling

        if not self.rope_factor:
            return None
        return Scaling(
            self.rope_factor, self.rope_low, self.rope_high, self.rope_old_seq, self.rope_type, self.rope_attention_factor,
            self.rope_truncate, numbers(self.rope_short), numbers(self.rope_long),
        )  # fmt: skip


@dataclass(frozen=True)
class Block:
    name: str
    window: int  # 0: none
    attn_norm: Affine | None
    qkv: list[Affine]  # one matmul, or where q and k are normalised three
    qk_norms: list[Tensor]
    proj: Affine
    attn_post_norm: Affine | None
    mlp_norm: Affine | None
    up: Affine  # with the gate before it in a gated MLP
    down: Affine
    mlp_post_norm: Affine | None


@dataclass(frozen=True)
class Weights:
    wte: Tensor
    blocks: list[Block]
    norm: Affine
    head: Tensor


def declare(p: Program, cfg: Config) -> Weights:
    """Declare the parameters with GPT-2's initialization: std 0.02, residual projections times 1 / sqrt(2 L), norms 1, biases 0."""
    C, F = cfg.d_model, cfg.d_ff
    residual_std, gain = 0.02 / sqrt(2 * cfg.layers), 0.0 if cfg.norm_unit_offset else 1.0

    def norm(name: str, wanted: bool = True) -> Affine | None:
        if not wanted:
            return None
        weight = p.parameter(f"{name}.weight", (C,), value=gain)
        return weight, p.parameter(f"{name}.bias", (C,)) if cfg.norm == "layer" else None

    def linear(name: str, N: int, K: int, bias: bool, std: float = 0.02) -> Affine:
        weight = p.parameter(f"{name}.weight", (N, K), std=std)
        return weight, p.parameter(f"{name}.bias", (N,)) if bias else None

    def vocabulary(name: str) -> Tensor:
        return p.parameter(name, (cfg.padded_vocab, C), std=0.02, valid_rows=cfg.vocab_size)

    def qkv(name: str) -> tuple[list[Affine], list[Tensor]]:
        biased, widths = cfg.attention_bias != "none", cfg.qkv_widths
        if cfg.qk_norm == "none":
            return [linear(f"{name}.qkv", sum(widths), C, biased)], []
        sizes = (cfg.head_size, cfg.head_size) if cfg.qk_norm == "head" else widths
        matmuls = [linear(f"{name}.{kind}", width, C, biased) for kind, width in zip("qkv", widths, strict=True)]
        return matmuls, [p.parameter(f"{name}.{kind}_norm.weight", (n,), value=gain) for kind, n in zip("qk", sizes, strict=False)]

    def block(i: int) -> Block:
        before, behind = (cfg.norm_position in (one, "both") for one in ("pre", "post"))
        h, up = f"h.{i}", ("gate_up", 2 * F) if cfg.mlp == "gated" else ("up", F)
        return Block(
            h, cfg.window_of(i), norm(f"{h}.attn_norm", before), *qkv(f"{h}.attn"),
            linear(f"{h}.attn.proj", C, cfg.qkv_widths[0], cfg.attention_bias == "all", residual_std),
            norm(f"{h}.attn_post_norm", behind), norm(f"{h}.mlp_norm", before),
            linear(f"{h}.mlp.{up[0]}", up[1], C, cfg.mlp_bias), linear(f"{h}.mlp.down", C, F, cfg.mlp_bias, residual_std),
            norm(f"{h}.mlp_post_norm", behind),
        )  # fmt: skip

    wte = vocabulary("wte")
    blocks = [block(i) for i in range(cfg.layers)]
    last = norm("norm")
    assert last is not None
    return Weights(wte, blocks, last, wte if cfg.tied else vocabulary("head"))


def forward(
    p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool, documents: Documents | None = None
) -> Tensor:
    """The loss (1,): summed over valid targets, times the scalar inv_targets. There is no dropout: `training` is ignored."""
    w = declare(p, cfg)
    positions, starts = (documents.positions, documents.starts) if documents else (None, None)

    def attend(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return p.attention(q, k, v, starts=starts, **_scores(cfg, block))

    x_BTC = _trunk(p, cfg, w, tokens_BT, attend, positions)
    if cfg.logits_softcap:
        how = {"cap": tanh_cap(cfg.logits_softcap), "predict": 1, "transposed": False}
        return p.softcapped_classifier(x_BTC, w.head, targets_BT, valid_vocab=cfg.vocab_size, **how)
    return p.classifier(x_BTC, w.head, targets_BT, valid_vocab=cfg.vocab_size)


def decode(p: Program, cfg: Config, tokens_BT: Tensor, caches: tuple[int, int] | None = None, **places: Any) -> Tensor:
    """fp32 logits (B, 1, Vp) of the last position, with KV caches (keys rotated). Parameters: see gpt2.decode."""
    w = declare(p, cfg)
    shape = tuple(int(n) for n in (*(caches or tokens_BT.shape), cfg.kv_heads * cfg.head_size))

    def attend(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv_caches = [p.cache(f"{block.name}.{kind}_cache", shape, p.compute) for kind in "kv"]
        return p.attention_cached(q, k, v, *kv_caches, **_scores(cfg, block), **places)

    logits = p.last_logits(_trunk(p, cfg, w, tokens_BT, attend, places.get("positions")), w.head)
    return p.softcap(logits, tanh_cap(cfg.logits_softcap)) if cfg.logits_softcap else logits


def tanh_cap(c: float) -> tuple[float, float, float]:
    """The softcap c tanh(x / c) as the ops of softcapped logits have it."""
    return 2 * c, 0.0, c / 2


def _scores(cfg: Config, block: Block) -> dict[str, Any]:
    """What attention does with the heads of a block."""
    how = {"heads": cfg.heads, "kv_heads": cfg.kv_heads, "sliding_window": block.window, "softcap": cfg.attention_softcap}
    return how | {"scale": cfg.attention_multiplier or None}


Attend = Callable[[Block, "Tensor", "Tensor", "Tensor"], "Tensor"]


def _trunk(p: Program, cfg: Config, w: Weights, tokens_BT: Tensor, attend: Attend, positions_BT: Tensor | None = None) -> Tensor:
    """The final hidden states (B, T, C), normalized and divided by `logits_scaling`. `attend(block, q, k, v)` gives (B, T, H D).
    `positions_BT` None: consecutive ones from the scalar pos on; norms that an architecture lacks (None) pass their input on."""

    def normed(x_BTC: Tensor, norm: Affine | None) -> Tensor:
        if norm is None:
            return x_BTC
        weight, bias = _gain(p, cfg, norm[0]), norm[1]
        if cfg.norm == "rms":
            return p.rmsnorm(x_BTC, weight, eps=cfg.norm_eps)
        return p.layernorm(x_BTC, weight, bias, eps=cfg.norm_eps)

    layers = _rope(p, cfg)
    x_BTC = _times(p, p.embedding(tokens_BT, w.wte), cfg.embedding_multiplier)
    for b, tables in zip(w.blocks, layers, strict=True):
        with p.segment(b.name):
            with p.branch("attn"):
                h_BTC = normed(x_BTC, b.attn_norm)
                a_BTC = attend(b, *_qkv(p, cfg, b, h_BTC, tables, positions_BT))
                a_BTC = _times(p, normed(p.linear(a_BTC, *b.proj), b.attn_post_norm), cfg.residual_multiplier)
            y_BTC = p.add(x_BTC, a_BTC)
            with p.branch("mlp"):
                h_BTC = normed(x_BTC if cfg.parallel_residual else y_BTC, b.mlp_norm)
                m_BTC = normed(p.linear(_mlp(p, cfg, b, h_BTC), *b.down), b.mlp_post_norm)
                m_BTC = _times(p, m_BTC, cfg.residual_multiplier)
            x_BTC = p.add(y_BTC, m_BTC)
    return _times(p, normed(x_BTC, w.norm), 1 / cfg.logits_scaling)


def _times(p: Program, x: Tensor, by: float) -> Tensor:
    return x if by == 1.0 else p.rescale(x, forward=by, backward=by)


def _gain(p: Program, cfg: Config, weight: Tensor) -> Tensor:
    return p.unit_offset(weight) if cfg.norm_unit_offset else weight


def _rope(p: Program, cfg: Config) -> list[Tables]:
    """The tables of each layer; None: its heads pass as they are."""
    of: dict[str, Any] = {"length": p.store.positions or cfg.max_seq, "head_size": cfg.head_size, "rotated": cfg.rotated}
    turning = local = p.rope_tables(theta=cfg.rope_theta, scaling=cfg.scaling, **of)
    if cfg.rope_local_theta:
        local = p.rope_tables(theta=cfg.rope_local_theta, name="rope_local", **of)
    without = numbers(cfg.nope_layers)
    return [None if i in without else local if cfg.window_of(i) else turning for i in range(cfg.layers)]


def _qkv(p: Program, cfg: Config, b: Block, h_BTC: Tensor, tables: Tables, positions_BT: Tensor | None) -> Sequence[Tensor]:
    """q, k (normalized if the model has QK norm, and rotated unless the layer has no RoPE) and v of a block's input."""
    heads = cfg.heads, cfg.kv_heads

    def turned(x_BTD: Tensor, count: int) -> Tensor:
        return p.rope(x_BTD, tables, heads=count, positions=positions_BT) if tables else x_BTD

    if not b.qk_norms:
        return p.split(turned(p.linear(h_BTC, *b.qkv[0]), sum(heads)), cfg.qkv_widths)  # v passes
    qkv = [p.linear(h_BTC, *affine) for affine in b.qkv]
    norm = p.head_rmsnorm if cfg.qk_norm == "head" else p.rmsnorm
    for i, weight in enumerate(b.qk_norms):
        qkv[i] = turned(norm(qkv[i], _gain(p, cfg, weight), eps=cfg.norm_eps), heads[i])
    return qkv


def _mlp(p: Program, cfg: Config, b: Block, h_BTC: Tensor) -> Tensor:
    if cfg.mlp == "plain":
        return p.activate(p.linear(h_BTC, *b.up), cfg.activation)
    gate_BTF, up_BTF = p.split(p.linear(h_BTC, *b.up), 2)
    return p.gated_linear_unit(gate_BTF, up_BTF, cfg.activation)


def llama_15m() -> Run:
    """A small Llama on the source of Python's standard library, which every machine has."""
    return Run(
        preset="llama-15m",
        model=Config(layers=8, heads=8, kv_heads=4, d_model=384, d_ff=1024, vocab_size=4096, max_seq=256),
        optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup=50, beta2=0.99),
        data=DataConfig(source="stdlib", tokenizer="bpe", bpe_vocab=4096),
        train=TrainConfig(micro_batch_size=8, seq=256, steps=2000, minutes=10.0, eval_every=250, sample_every=500),
    )


SELDOM: dict[str, Any] = {"eval_every": 250, "checkpoint_every": 1000}


def llama_124m() -> Run:
    """A Llama as large as GPT-2 124M, with its tokenizer. It shows what the parts of Llama are worth beside it."""
    return Run(
        preset="llama-124m",
        model=Config(),
        optim=OptimConfig(lr=6e-4, min_lr=6e-5, warmup=700),
        data=DataConfig(source="", tokenizer="gpt2"),
        train=TrainConfig(micro_batch_size=4, seq=1024, gradient_accumulation_steps=128, steps=19560, **SELDOM),
    )


def _released(preset: str, lr: float, **sizes: Any) -> Run:
    """The preset of a released model, Meta's unless `sizes` say otherwise. Presets have 8192 positions (Meta's have 131,072); an
    import takes the folder's number. The tokenizer is not part of barellm: name the folder of its tokenizer.json."""
    usual: dict[str, Any] = {"heads": 32, "kv_heads": 8, "vocab_size": 128_256, "max_seq": 8192}
    return Run(
        preset=preset,
        model=Config(**usual | sizes),
        optim=OptimConfig(lr=lr, min_lr=float(f"{lr / 10:.6g}"), warmup=2000),
        data=DataConfig(source="", tokenizer=""),
        train=TrainConfig(micro_batch_size=1, seq=2048, gradient_accumulation_steps=256, steps=20000, **SELDOM),
    )


SMOL = {"vocab_size": 49152, "max_seq": 8192, "rope_theta": 1e5}
RELEASED: dict[str, dict[str, Any]] = {  # small models that others released, in their published sizes
    "smollm2-135m": {"layers": 30, "d_model": 576, "heads": 9, "kv_heads": 3, "d_ff": 1536, **SMOL},
    "smollm2-360m": {"layers": 32, "d_model": 960, "heads": 15, "kv_heads": 5, "d_ff": 2560, **SMOL},
    "qwen3-0.6b": {
        "layers": 28, "d_model": 1024, "heads": 16, "kv_heads": 8, "d_ff": 3072, "head_dim": 128, "qk_norm": "head",
        "vocab_size": 151_936, "max_seq": 40960, "rope_theta": 1e6, "norm_eps": 1e-6,
    },
    "gemma3-270m": {
        "layers": 18, "d_model": 640, "heads": 4, "kv_heads": 1, "d_ff": 2048, "head_dim": 256, "qk_norm": "head",
        "vocab_size": 262_144, "max_seq": 32768, "rope_theta": 1e6, "rope_local_theta": 1e4, "norm_eps": 1e-6,
        "norm_position": "both", "norm_unit_offset": True, "activation": "gelu", "embedding_multiplier": sqrt(640),
        "sliding_window": 512, "window_layers": "0,1,2,3,4,6,7,8,9,10,12,13,14,15,16",
    },
    "llama3.2-1b": {"layers": 16, "d_model": 2048, "d_ff": 8192, "rope_factor": 32.0, "max_seq": 131_072},
}  # fmt: skip

PRESETS: dict[str, Callable[[], Run]] = {
    "llama-15m": llama_15m,
    "llama-124m": llama_124m,
    "llama3-1b": lambda: _released("llama3-1b", 3e-4, layers=16, d_model=2048, d_ff=8192, rope_factor=32.0),
    "llama3-8b": lambda: _released("llama3-8b", 3e-4, layers=32, d_model=4096, d_ff=14336, rope_factor=8.0, tied=False),
    **{name: partial(_released, name, 3e-4, **sizes) for name, sizes in RELEASED.items()},
}


ROPE = ("rope_theta", "rope_factor", "rope_low", "rope_high", "rope_old_seq")
TWIN = ("layers", "heads", "kv_heads", "d_model", "d_ff", "tied", "norm_eps", *ROPE)
RUN = ("vocab_size", "padded_vocab", "max_seq", "family")
TORCH_TWIN = ("torch_llama.py", TWIN, [f.name for f in fields(Config) if f.name not in TWIN + RUN])
HUGGING_FACE = families.FAMILIES
