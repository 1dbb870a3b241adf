"""GPT-2 (Radford et al. 2019): pre-norm blocks, learned positions, tied classifier; dropout where nanoGPT has it.

Weights are stored (out, in). Names are llm.c's and Hugging Face's: "wte", "h.0.attn.c_attn.weight", "ln_f.bias"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from barellm.config import ACTIVATIONS, DROPOUT_BITS, DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config import Config as Run
from barellm.config.fields import at_least, below_one, between, divides, entries, one_of, value
from barellm.models import unit
from barellm.models.hf_mapping import HuggingFace

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Documents, Tensor

    Affine = tuple[Tensor, Tensor | None]  # weight, bias
    DeclareMlp = Callable[[str, int], tuple[Affine, Affine]]


def _unit(key: str, found: bool, config: Config) -> str | None:
    if found and config.activation != "gelu":
        return f"{key} is true and model.activation {config.activation!r}, expected gelu"
    return f"{key} is true and model.bias too, expected model.bias false" if found and config.bias else None


@dataclass(frozen=True)
class Config(ModelConfig):
    layers: int = between(1, 1024, 12, "transformer blocks")  # planning compares lifetimes: 500 layers take 10 s, 2000 take 110
    heads: int = divides("d_model", 12, "attention heads in a block; must divide d_model")
    d_model: int = at_least(1, 768, "embedding dimension (n_embd); hidden size: width of the residual stream")
    vocab_size: int = at_least(1, 50257, "vocabulary size; a run takes it from its tokenizer")
    padded_vocab: int = at_least(0, 0, "padded vocabulary size: rows of the embedding; 0: vocab_size rounded up to multiples of 64")
    max_seq: int = at_least(1, 1024, "context length: the longest sequence in tokens")
    bias: bool = value(True, "biases in linear layers and norms")
    dropout: float = below_one(0.0, "dropout rate in training", of_run=True)
    dropout_bits: str = one_of(DROPOUT_BITS, "threefry",
        "generator of the residual stream's dropout: threefry, taus88 or lfsr113 (attention's is always "
        "threefry)", of_run=True)  # fmt: skip
    activation: str = one_of(ACTIVATIONS, "gelu", "activation of the MLP; gelu is the tanh form, as GPT-2 has it")
    unit_scaling: bool = value(
        False,
        "unit scaling: weights from N(0, 1), constants that keep activations and gradients at unit size; no biases and gains",
        check=_unit,
    )

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads


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


def declare(p: Program, cfg: Config, mlp: DeclareMlp | None = None) -> Weights:
    """Declare the parameters with GPT-2's initialization: std 0.02, residual projections times 1 / sqrt(2 L), biases 0, norms 1,
    padded ids 0. With unit scaling all weights have std 1 and norms no parameters. `mlp(name, layer)` declares both matrices of a
    layer's MLP; None: dense ones."""
    C = cfg.d_model
    std = 1.0 if cfg.unit_scaling else 0.02
    residual_std = 1.0 if cfg.unit_scaling else 0.02 / sqrt(2 * cfg.layers)

    def norm(name: str) -> Affine:
        if cfg.unit_scaling:
            return unit.gain(p, C, 1.0 / sqrt(C) if name == "ln_f" else 1.0), None
        weight = p.parameter(f"{name}.weight", (C,), value=1.0)
        return weight, p.parameter(f"{name}.bias", (C,)) if cfg.bias else None

    def linear(name: str, N: int, K: int, std: float = std) -> Affine:
        weight = p.parameter(f"{name}.weight", (N, K), std=std)
        return weight, p.parameter(f"{name}.bias", (N,)) if cfg.bias else None

    def products(name: str, layer: int) -> tuple[Affine, Affine]:
        return linear(f"{name}.c_fc", 4 * C, C), linear(f"{name}.c_proj", C, 4 * C, std=residual_std)

    wte = p.parameter("wte", (cfg.padded_vocab, C), std=std, valid_rows=cfg.vocab_size)
    wpe = p.parameter("wpe", (cfg.max_seq, C), std=std)
    blocks = [
        Block(
            h, norm(f"{h}.ln_1"), linear(f"{h}.attn.c_attn", 3 * C, C), linear(f"{h}.attn.c_proj", C, C, std=residual_std),
            norm(f"{h}.ln_2"), *(mlp or products)(f"{h}.mlp", i),
        )
        for i, h in enumerate(f"h.{i}" for i in range(cfg.layers))
    ]  # fmt: skip
    return Weights(wte, wpe, blocks, norm("ln_f"))


def forward(
    p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool, documents: Documents | None = None
) -> Tensor:
    """The loss (1,): summed over valid targets, times the scalar inv_targets (1 / their number). Dropout only in training."""
    w = declare(p, cfg)
    rate = cfg.dropout if training else 0.0
    positions_BT, starts_BT = (documents.positions, documents.starts) if documents else (None, None)

    def attend(_: Block, qkv_BT3C: Tensor) -> Tensor:
        return p.attention(*p.split(qkv_BT3C, 3), heads=cfg.heads, dropout=rate, starts=starts_BT)

    def dropout(x_BTC: Tensor) -> Tensor:
        return p.dropout(x_BTC, rate, cfg.dropout_bits)

    add_trunk = _unit_trunk if cfg.unit_scaling else trunk
    h_BTC = add_trunk(p, cfg, w, tokens_BT, attend, dropout, positions_BT=positions_BT)
    return p.classifier(h_BTC, w.wte, targets_BT, valid_vocab=cfg.vocab_size)


def decode(p: Program, cfg: Config, tokens_BT: Tensor, caches: tuple[int, int] | None = None, **places: Any) -> Tensor:
    """fp32 logits (B, 1, Vp) of the last position, with KV caches. Tokens have positions pos .. pos + T; or, in continuous
    batching, the cache rows and positions that `places` gives, in caches of the shape `caches` (rows, length)
    (`assembly/serving.py`)."""
    w = declare(p, cfg)
    rows, length = caches or (int(n) for n in tokens_BT.shape)

    def attend(block: Block, qkv_BT3C: Tensor) -> Tensor:
        kv_caches = [p.cache(f"{block.name}.{kind}_cache", (rows, length, cfg.d_model), p.compute) for kind in "kv"]
        return p.attention_cached(*p.split(qkv_BT3C, 3), *kv_caches, heads=cfg.heads, **places)

    add_trunk = _unit_trunk if cfg.unit_scaling else trunk
    x_BTC = add_trunk(p, cfg, w, tokens_BT, attend, lambda x_BTC: x_BTC, positions_BT=places.get("positions"))
    return p.last_logits(x_BTC, w.wte)


Attend = Callable[[Block, "Tensor"], "Tensor"]
Dropout = Callable[["Tensor"], "Tensor"]
Mlp = Callable[["Program", Any, Block, "Tensor"], "Tensor"]


def dense_mlp(p: Program, cfg: Config, b: Block, h_BTC: Tensor) -> Tensor:
    h_BTF = p.activate(p.linear(h_BTC, *b.fc), cfg.activation)
    return p.linear(h_BTF, *b.fcproj)


def trunk(
    p: Program, cfg: Config, w: Weights, tokens_BT: Tensor, attend: Attend, dropout: Dropout, mlp: Mlp = dense_mlp,
    positions_BT: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The final hidden states (B, T, C), normalized. `attend(block, qkv)` computes attention (B, T, C) from (B, T, 3 C), `mlp` a
    block's MLP. `positions_BT`: positions of the tokens, None for 0, 1, ..."""
    x_BTC = dropout(p.embedding(tokens_BT, w.wte, w.wpe, positions=positions_BT))
    for b in w.blocks:
        with p.segment(b.name):
            with p.branch("attn"):
                h_BTC = p.layernorm(x_BTC, *b.ln_1)
                a_BTC = attend(b, p.linear(h_BTC, *b.attn))
                y_BTC = dropout(p.linear(a_BTC, *b.proj))
            x_BTC = p.add(x_BTC, y_BTC)
            with p.branch("mlp"):
                h_BTC = p.layernorm(x_BTC, *b.ln_2)
                y_BTC = dropout(mlp(p, cfg, b, h_BTC))
            x_BTC = p.add(x_BTC, y_BTC)
    return p.layernorm(x_BTC, *w.ln_f)


def _unit_trunk(
    p: Program, cfg: Config, w: Weights, tokens_BT: Tensor, attend: Attend, dropout: Dropout, positions_BT: Tensor | None = None
) -> Tensor:
    """`trunk` with unit scaling (Blake et al. 2023). The division of the logits by sqrt(C) is folded into the last norm's gain."""
    half, averaged = sqrt(0.5), 1.0 / unit.attention_rms(cfg.max_seq)
    x_BTC = p.rescale(p.embedding(tokens_BT, w.wte, w.wpe, positions=positions_BT), forward=half, backward=half)
    x_BTC = dropout(x_BTC)
    for i, b in enumerate(w.blocks):
        with p.segment(b.name):
            (attn, _), (proj, _), (fc, _), (fcproj, _) = b.attn, b.proj, b.fc, b.fcproj
            branch = unit.Branch(2 * i)
            h_BTC = p.layernorm(x_BTC, *b.ln_1)
            a_BTC = attend(b, branch.into(p, h_BTC, attn, proj))
            a_BTC = p.rescale(a_BTC, forward=averaged, backward=averaged)
            x_BTC = branch.add(p, x_BTC, dropout(branch.out_of(p, a_BTC, proj)))
            branch = unit.Branch(2 * i + 1, inside=unit.GELU_RMS)
            h_BTC = p.layernorm(x_BTC, *b.ln_2)
            h_BTF = p.gelu(branch.into(p, h_BTC, fc, fcproj))
            x_BTC = branch.add(p, x_BTC, dropout(branch.out_of(p, h_BTF, fcproj)))
    return p.layernorm(x_BTC, *w.ln_f)


def loss_gradient(cfg: Config) -> float | None:
    """With unit scaling the gradient of a target's loss is multiplied by sqrt(C): the last norm divides it by that."""
    return sqrt(cfg.d_model) if cfg.unit_scaling else None


def default() -> Run:
    """The run of `barellm train` without arguments: a small GPT on the source of Python's standard library, in two minutes.

    The model has the size that two minutes on two cores can train: of models with 1.1, 2.2 and 3.7 million parameters the smallest
    learnt most. Muon updates the matrices of the blocks: in the same time it reaches 3.40 nats where AdamW reached 4.02."""
    muon = {"muon_lr": 0.03, "momentum": 0.85, "ns_steps": 3, "normuon": 0.95}
    return Run(
        preset="default",
        model=Config(layers=4, heads=4, d_model=128, vocab_size=4096, max_seq=256),
        optim=OptimConfig(name="muon", lr=8e-3, min_lr=0.0, schedule="linear", beta2=0.99, **muon),
        data=DataConfig(source="stdlib", tokenizer="bpe", bpe_vocab=4096),
        train=TrainConfig(micro_batch_size=8, seq=256, steps=2000, minutes=1.75, eval_every=250, sample_every=500),
    )


def shakespeare_char() -> Run:
    """nanoGPT's CPU example: a character model of 0.8M parameters, trained for 2000 steps. An evaluation takes 40 batches:
    nanoGPT's 20 of each split, here all from the validation split, evenly spread."""
    return Run(
        preset="shakespeare-char",
        model=Config(layers=4, heads=4, d_model=128, vocab_size=65, padded_vocab=65, max_seq=64, bias=False),
        optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup=100, beta2=0.99),
        data=DataConfig(source="", tokenizer="chars", order="random"),
        train=TrainConfig(micro_batch_size=12, seq=64, steps=2000, eval_every=250, eval_tokens=40 * 12 * 64),
    )


def shakespeare_muon() -> Run:
    """The model, the text and the batch of shakespeare-char. With Muon and a learning rate that falls linearly to zero, a fifth of
    the steps reaches a lower loss. Each evaluation is of the whole validation part."""
    base = shakespeare_char()
    muon = {"muon_lr": 0.045, "momentum": 0.85, "ns_steps": 3, "normuon": 0.95}
    optim = OptimConfig(name="muon", lr=0.015, min_lr=0.0, schedule="linear", beta2=0.99, **muon)
    train = replace(base.train, steps=400, eval_every=200, eval_tokens=0)
    return replace(base, preset="shakespeare-muon", optim=optim, train=train)


def shakespeare_unit() -> Run:
    """The model, the text and the batch of shakespeare-char in unit scaling. Weights are 50 times as large, so AdamW's rate is
    larger too, the best of six that were tried (docs/exponent_stats.md), and the weight decay a fiftieth."""
    base = shakespeare_char()
    optim = replace(base.optim, lr=0.025, min_lr=0.0025, weight_decay=0.002, clip=0.0)
    model = replace(base.model, unit_scaling=True)  # pyright: ignore[reportCallIssue]
    return replace(base, preset="shakespeare-unit", model=model, optim=optim)


def shakespeare_char_large() -> Run:
    """nanoGPT's character model for a GPU (config/train_shakespeare_char.py): 10.6M parameters, 5000 steps. It overfits long before
    the end, as there; each evaluation is of the whole validation part."""
    base = shakespeare_char()
    model = Config(layers=6, heads=6, d_model=384, vocab_size=65, padded_vocab=65, max_seq=256, bias=False, dropout=0.2)
    train = replace(base.train, micro_batch_size=64, seq=256, steps=5000, eval_tokens=0)
    return replace(base, preset="shakespeare-char-large", model=model, train=train)


SIZES = {"124m": (12, 12, 768), "350m": (24, 16, 1024), "774m": (36, 20, 1280), "1558m": (48, 25, 1600)}


def _gpt2(preset: str, size: str, *, lr: float, floor: float = 0.1, max_seq: int = 1024, **how: Any) -> Run:
    """GPT-2 of one of SIZES, batches of 2^19 tokens; `how`: other keys of [train] and [optim]. `floor`: final rate by the peak."""
    layers, heads, channels = SIZES[size]
    optim: dict[str, Any] = {"warmup": 700} | {key: how.pop(key) for key in list(how) if key in entries(OptimConfig)}
    train: dict[str, Any] = {"steps": 19560, "eval_every": 250, "checkpoint_every": 1000}
    train |= {"gradient_accumulation_steps": (1 << 17) // max_seq} | how
    return Run(
        preset=preset,
        model=Config(layers=layers, heads=heads, d_model=channels, vocab_size=50257, padded_vocab=50304, max_seq=max_seq),
        optim=OptimConfig(lr=lr, min_lr=float(f"{lr * floor:.6g}"), **optim),
        data=DataConfig(source="", tokenizer="gpt2"),
        train=TrainConfig(micro_batch_size=4, seq=max_seq, **train),
    )


# Published runs (docs/recipes.md): what their scripts say that is not said above.
SPIKES = {"skip_loss_z": 7.0, "skip_norm_z": 7.0}
ROWS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"size": "124m", "lr": 6e-4},
    "gpt2-350m": {"size": "350m", "lr": 3e-4},
    "gpt2-774m": {"size": "774m", "lr": 2.5e-4},
    "gpt2-1558m": {"size": "1558m", "lr": 2e-4},
    "build-nanogpt": {
        "size": "124m", "lr": 6e-4, "warmup": 715, "steps": 19073, "keep_every": 5000, "eval_tokens": 10 << 20
    },
    "llmc-124m": {
        "size": "124m", "lr": 6e-4, "floor": 0.0, "steps": 18865, "keep_every": 5000, "eval_tokens": 10 << 20
    },
    "llmc-350m": {"size": "350m", "lr": 3e-4, "floor": 0.0, "steps": 60000, "eval_tokens": 10 << 20},
    "llmc-774m": {"size": "774m", "lr": 2.5e-4, "floor": 0.0, "steps": 286102, "eval_tokens": 5 << 20},
    "llmc-1558m": {"size": "1558m", "lr": 6e-4, "gradient_accumulation_steps": 256, "steps": 32000, "eval_tokens": 5 << 19},
    "gpt3-125m": {
        "size": "124m", "lr": 6e-4, "max_seq": 2048, "steps": 572204, "eval_tokens": 10 << 20,
        "checkpoint_every": 10000, "save_total_limit": 5, "keep_every": 50000, **SPIKES,
    },
}  # fmt: skip

PRESETS: dict[str, Callable[[], Run]] = {
    "default": default, "shakespeare-char": shakespeare_char, "shakespeare-char-large": shakespeare_char_large,
    "shakespeare-muon": shakespeare_muon, "shakespeare-unit": shakespeare_unit,
    **{name: partial(_gpt2, name, **row) for name, row in ROWS.items()},
}  # fmt: skip


TORCH_TWIN = ("torch_gpt2.py", ("layers", "heads", "d_model", "bias"), ("activation", "unit_scaling"))


def _refused(cfg: Config) -> str | None:
    """Why GPT-2's config.json cannot say what a configuration is; None if it can."""
    if cfg.unit_scaling:
        return "model.unit_scaling is true, expected false: GPT-2 has no constants in its place"
    if cfg.activation != "gelu":
        return f"model.activation is {cfg.activation!r}, expected gelu, as GPT-2 has it"
    return None if cfg.bias else "model.bias is false, GPT-2 has biases there, expected true"


GPT2 = HuggingFace(
    preset="gpt2-124m", model_type="gpt2", class_name="GPT2LMHeadModel",
    sizes={
        "n_layer": ("layers", 12), "n_head": ("heads", 12), "n_embd": ("d_model", 768), "vocab_size": ("vocab_size", 50257),
        "n_positions": ("max_seq", 1024),
    },
    kinds={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the same formula
        "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,), "tie_word_embeddings": (True, False),  # which it is, the tensors say
    },
    derived={"n_inner": lambda cfg: 4 * cfg.d_model}, rates=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    prefix="transformer.", head="lm_head.weight", tied=lambda cfg: "wte",
    parts=lambda cfg, ours: {f"{ours}.weight" if ours in ("wte", "wpe") else ours: 0},
    transposed=lambda ours: re.search(r"(c_attn|c_proj|c_fc)\.weight$", ours) is not None,  # transformers' class Conv1D
    ignored=lambda theirs: re.match(r"h\.\d+\.attn\.(bias|masked_bias)$", theirs) is not None,  # buffers of older versions
    refused=_refused,
)  # fmt: skip
HUGGING_FACE = (GPT2,)


def llmc_order(cfg: Config) -> Iterator[str]:
    """The parameters in the order of llm.c's files: each kind of all layers together."""
    yield from ("wte", "wpe")
    for kind in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
        for part in ("weight", "bias"):
            yield from (f"h.{layer}.{kind}.{part}" for layer in range(cfg.layers))
    yield from ("ln_f.weight", "ln_f.bias")
