"""GPT-2 with attention over blocks of keys that a layout lists (Child et al. 2019): each head has a pattern of its own, and the
time and memory of a long sequence go with the blocks that are listed. Attention has no dropout.

Weights are those of gpt2.py, but both matrices of each MLP may be block-sparse too (Gray, Radford and Kingma 2017): a graph links
blocks of channels with blocks of hidden columns, and what is not linked is neither stored nor computed. With `relative` each
layer's heads have vectors of their own for the nearest distances, beside the learned positions.

A token that is sampled costs a whole forward pass: a layout's kernels want all positions, so there is no KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

from barellm.config import Config as Run
from barellm.config import DataConfig, OptimConfig, TrainConfig
from barellm.config.fields import at_least, value
from barellm.models import gpt2
from barellm.program import patterns

if TYPE_CHECKING:
    from barellm.program.block_layouts import BlockLayout
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor

WHOLE = True
HIDDEN = "h.*.weight"  # stacked blocks are no matrix that Muon could make orthogonal: AdamW updates them


def _pattern(key: str, found: str, config: Config) -> str | None:
    try:
        patterns.parse(found) if found else None
    except ValueError as error:
        return f"{key}: {error}"
    return None


def _block(key: str, found: int, config: Config) -> str | None:
    fits = 16 <= found <= 128 and found % 16 == 0
    return None if fits else f"{key} is {found}, expected a multiple of 16 up to 128"


def _relative(key: str, found: int, config: Config) -> str | None:
    if found < 0 or found > config.max_seq:
        return f"{key} is {found}, expected from 0 to model.max_seq, {config.max_seq}"
    return f"{key} is {found} and model.layout is empty, expected a layout" if found and not config.layout else None


def _graph(key: str, found: str, config: Config) -> str | None:
    graphs = ("watts-strogatz", "barabasi-albert", "spread")
    wrong = _pattern(key, found, config)
    one = not found or (found.split(":")[0] in graphs and not {"+", ","} & set(found))
    return wrong or (None if one else f"{key} is {found!r}, expected one of {', '.join(graphs)} with its numbers")


def _mlp_block(key: str, found: int, config: Config) -> str | None:
    if found not in (8, 16, 32, 64):
        return f"{key} is {found}, expected 8, 16, 32 or 64"
    fits = not config.mlp_layout or config.d_model % found == 0
    return None if fits else f"{key} is {found}, expected a divisor of model.d_model, {config.d_model}"


@dataclass(frozen=True)
class Config(gpt2.Config):
    layout: str = value("local:256", "patterns of the heads (docs/sparsity.md); empty: every earlier key", check=_pattern)
    block: int = value(64, "positions of a block of keys or queries", check=_block)
    relative: int = value(0, "distances to keys that have a learned relative term (docs/sparsity.md); 0: none", check=_relative)
    mlp_layout: str = value("", "graph of the blocks of each MLP's matrices (docs/sparsity.md); empty: all", check=_graph)
    mlp_block: int = value(32, "rows and columns of a block of an MLP by a graph: 8, 16, 32 or 64", check=_mlp_block)
    mlp_width: int = at_least(1, 4, "FFN expansion of an MLP by a graph: d_ff / d_model")


def declare(p: Program, cfg: Config) -> gpt2.Weights:
    """Declare GPT-2's parameters; of MLPs by a graph only the blocks that are there. Each is initialised so that activations begin
    as large as those of the dense model, and relative terms begin at 0."""
    w = gpt2.declare(p, cfg, partial(_blocks, p, cfg) if cfg.mlp_layout else None)
    for b in w.blocks:
        _distances(p, cfg, b)
    return w


def _distances(p: Program, cfg: Config, b: gpt2.Block) -> Tensor | None:
    """The vectors of a layer's relative terms."""
    return p.parameter(f"{b.name}.attn.relative", (cfg.relative, cfg.d_model)) if cfg.relative else None


def _blocks(p: Program, cfg: Config, name: str, layer: int) -> tuple[gpt2.Affine, gpt2.Affine]:
    """Declare the block-sparse matrices of an MLP: the linked blocks stacked (blocks * bs, bs), and biases. std grows as each
    output sums over fewer inputs than a dense matrix's."""

    def affine(part: str, layout: BlockLayout, dense: int, std: float) -> gpt2.Affine:
        width = layout.shape[1] * layout.block
        fan_in = len(layout) * layout.block / layout.shape[1]  # in the mean over the columns of blocks
        shape = (len(layout) * layout.block, layout.block)
        weight = p.parameter(f"{name}.{part}.blocks", shape, std=std * sqrt(dense / fan_in))
        return weight, p.parameter(f"{name}.{part}.bias", (width,)) if cfg.bias else None

    fc, proj = _graphs(cfg, layer)
    C, residual_std = cfg.d_model, 0.02 / sqrt(2 * cfg.layers)
    return affine("c_fc", fc, C, 0.02), affine("c_proj", proj, 4 * C, residual_std)


def _graphs(cfg: Config, layer: int) -> tuple[BlockLayout, BlockLayout]:
    """The layouts of a layer's two products. Each is a graph of its own, of which the second is read from right to left."""
    from barellm.program.block_layouts import block_layout, parse  # with NumPy

    rows, columns = cfg.d_model // cfg.mlp_block, cfg.mlp_width * cfg.d_model // cfg.mlp_block
    up, down = (parse(cfg.mlp_layout, rows=rows, columns=columns, more=2 * layer + i) for i in range(2))
    return block_layout(up, cfg.mlp_block), block_layout(down.T, cfg.mlp_block)


def _mlp(p: Program, cfg: Config, b: gpt2.Block, h_BTC: Tensor) -> Tensor:
    """A block's MLP: dense, or block-sparse with `mlp_layout`."""
    if not cfg.mlp_layout:
        return gpt2.dense_mlp(p, cfg, b, h_BTC)
    fc, proj = _graphs(cfg, int(b.name.removeprefix("h.")))
    h_BTF = p.activate(p.block_linear(h_BTC, *b.fc, layout=fc), cfg.activation)
    return p.block_linear(h_BTF, *b.fcproj, layout=proj)


def forward(p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool) -> Tensor:
    """The loss (1,): summed over valid targets, times the scalar inv_targets."""
    w = declare(p, cfg)
    rate = cfg.dropout if training else 0.0

    def dropout(x_BTC: Tensor) -> Tensor:
        return p.dropout(x_BTC, rate, cfg.dropout_bits)

    x_BTC = gpt2.trunk(p, cfg, w, tokens_BT, _attention(p, cfg, tokens_BT), dropout, _mlp)
    return p.classifier(x_BTC, w.wte, targets_BT, valid_vocab=cfg.vocab_size)


def decode(p: Program, cfg: Config, tokens_BT: Tensor) -> Tensor:
    """The fp32 logits (B, 1, Vp) of the last position, of a text from its beginning."""
    w, attend = declare(p, cfg), _attention(p, cfg, tokens_BT)
    return p.last_logits(gpt2.trunk(p, cfg, w, tokens_BT, attend, lambda x_BTC: x_BTC, _mlp), w.wte)


def _attention(p: Program, cfg: Config, tokens_BT: Tensor) -> Callable[[gpt2.Block, Tensor], Tensor]:
    """A function that appends a block's attention: dense, or block-sparse by `layout`, cut to the length of the tokens."""
    if not cfg.layout:
        return lambda _, qkv_BT3C: p.attention(*p.split(qkv_BT3C, 3), heads=cfg.heads)
    from barellm.program import layouts  # with NumPy, which choosing a preset does not need

    layout = layouts.parse(cfg.layout, length=cfg.max_seq, block=cfg.block, heads=cfg.heads).first(int(tokens_BT.shape[1]))

    def attend(b: gpt2.Block, qkv_BT3C: Tensor) -> Tensor:
        return p.block_sparse_attention(*p.split(qkv_BT3C, 3), relative=_distances(p, cfg, b), layout=layout, heads=cfg.heads)

    return attend


def sparse_char() -> Run:
    """A byte-level model with 8192 positions, trained on two cores: half of its heads have local attention, the others a local and
    fixed pattern (the last 64 of each 512 bytes)."""
    muon = {"muon_lr": 0.03, "momentum": 0.85, "ns_steps": 3, "normuon": 0.95}
    return Run(
        preset="sparse-char",
        model=Config(layers=3, heads=4, d_model=128, vocab_size=256, max_seq=8192, layout="local:256, local:64+fixed:512:64"),
        optim=OptimConfig(name="muon", lr=8e-3, min_lr=0.0, schedule="linear", beta2=0.99, **muon),
        data=DataConfig(source="stdlib", tokenizer="bytes"),
        train=TrainConfig(micro_batch_size=1, seq=8192, steps=150, eval_every=50, eval_tokens=16 * 8192),
    )


PRESETS: dict[str, Callable[[], Run]] = {"sparse-char": sparse_char}
