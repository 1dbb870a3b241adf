"""The model of modded-nanogpt's record 74 (its pull request 233, commit 20dd1582): what a GPT became when many people made it learn
as fast as they could. `forward` has the order of theirs; docs/speedrun.md tells what each part is and what it is worth.

Weights, in this order. Matrices are stored (out, in), but for `mlp.down` and `head`, which are stored (in, out) as theirs are:

    embed                   (Vp, C)      follows `head` until the stage that unties them
    bigrams                 (5 Vp, C)    an embedding of pairs of tokens, by a hash
    values.0, 1, ...        (Vp, C)      embeddings that are added to attention's values, one for each layer of `values`
    qkv.scale, proj.scale   (L)          factors of what goes into each layer's attention, and of what comes out
    resid.attn, resid.mlp   (L)          factors of the residual stream
    post.*, lanes.*         (L)          factors of what MLP and attention add to each lane
    x0.scale, bigrams.scale (L)          factors of the embeddings in each layer
    smear.scale, skip.scale, backout.scale   (1)
    smear.gate, skip.gate   (1, 12)      gates read the first 12 columns
    h.0.attn.qkv            (3 C, C)     Muon takes q, k and v for a matrix each
    h.0.attn.proj           (C, C)
    h.0.attn.gate           (H, 12)
    h.0.value.gate          (H, 12)      in the layers of `values`
    h.0.mlp.up, mlp.down    (F, C)
    ...                     for each layer h.1, h.2 and so on
    head                    (C, Vp)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt
from typing import TYPE_CHECKING, Any

from barellm.config import Config as Run
from barellm.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config.fields import at_least, between, divides, one_of, value
from barellm.errors import UserError
from barellm.models.speedrun_schedule import StageSettings, yarn
from barellm.models.speedrun_schedule import only_stage as only_stage
from barellm.models.speedrun_schedule import training_schedule as training_schedule
from barellm.models.stages import Stage, parse, table

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor

    Term = tuple[Tensor, float | Tensor]

WHOLE = True
CAP = (23.0, 5.0, 7.5)  # a logit x counts as 23 sigmoid((x + 5) / 7.5)
EPS = 2.0**-23  # of RMSNorm: what PyTorch adds where nothing is said
GATED = 12  # columns that a gate reads
BUCKETS = 5  # rows of `bigrams` for each of the vocabulary

RECORD = (
    Stage(16384, (1, 3), Fraction(1, 3), 896, lr=1.0, mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)),
    Stage(32768, (3, 7), Fraction(1, 3), 2048, lr=1.52, mtp=(1.0, 0.5), mtp_end=(1.0, 0.0)),
    Stage(49152, (5, 11), Fraction(1, 3), 2048, lr=1.73),
    Stage(49152, (6, 13), document=2048),
)


def _layers(text: str, key: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise UserError(f"{key} is {text!r}, expected numbers of layers: 1,2,8") from None


def some_layers(default: str, says: str) -> Any:
    """A field that names layers."""

    def check(key: str, found: str, config: Any) -> str | None:
        wrong = [i for i in _layers(found, key) if not 0 <= i < config.layers]
        return f"{key} names layer {wrong[0]}, expected 0 to {config.layers - 1}" if wrong else None

    return value(default, says, check=check)


def stage_table(default: str, says: str) -> Any:
    """A field that is a table of stages."""

    def check(key: str, found: str, config: Any) -> str | None:
        longest = max(parse(found, key=key), key=lambda stage: stage.seq)
        return f"{key} has seq={longest.seq}, above model.max_seq {config.max_seq}" if longest.seq > config.max_seq else None

    return value(default, says, check=check)


@dataclass(frozen=True)
class Config(ModelConfig):
    layers: int = between(1, 1024, 11, "layers, each of attention and an MLP")
    heads: int = divides("d_model", 6, "attention heads; an even number where heads are paired")
    d_model: int = at_least(GATED, 768, "embedding dimension (n_embd); hidden size: width of the residual stream")
    d_ff: int = at_least(1, 3072, "intermediate (FFN) size of an MLP")
    vocab_size: int = at_least(1, 50257, "vocabulary size; a run takes it from its tokenizer")
    padded_vocab: int = at_least(
        0, 0, "padded vocabulary size: columns of the LM head; 0: vocab_size rounded up to a multiple of 64"
    )
    max_seq: int = at_least(
        1, 49152, "context length: tokens of the longest micro-batch of packed documents, with attention inside a document only"
    )
    separator: int = at_least(-1, -1, "the beginning-of-document token; -1: all of a row is one document")
    block: int = at_least(1, 128, "tokens of a block, which is the unit of the windows of the stages")
    stages: str = stage_table(table(RECORD), "training stages: a row for each (models/stages.py)")
    extension: int = at_least(0, 40, "extension steps: those of the last stage, after the scheduled ones")
    decay_fraction: float = between(0, 1, 0.6, "share of the other steps, the last ones, over which the learning rate decays")
    untie: int = at_least(0, 2, "the stage from which the embedding is untied from the LM head; beyond the last: never")
    long: str = some_layers("3,10", "layers with the long attention window (and key offset); the others have the short one")
    paired: str = some_layers("0,2,5,9", "layers with paired heads: two heads interleaved in one sequence of double length")
    values: str = some_layers("1,2,8,9,10", "layers with a value embedding")
    skipped: str = some_layers("6", "layers without attention; they get the residual of `skip_from` (skip connection)")
    skip_from: int = at_least(0, 3, "the layer whose residual after attention goes to the layers without attention")
    lanes_from: int = at_least(0, 7, "the first layer with two lanes: attention reads one, the MLP the other, both write both")
    backout: int = at_least(0, 7, "the layer whose residual is subtracted again before the LM head (backout)")
    final_window: int = at_least(1, 20, "the long window of evaluation and samples after the last step, in blocks")
    smear: bool = value(True, "smear: each token's embedding gets a share of the previous one's")
    bigram: bool = value(True, "bigram hash embedding, added in each layer")
    bigram_first: str = one_of(
        ("token", "reserved"),
        "token",
        "what the hash of a row's first pair takes for its first token: the token, or the number of the last row, which is "
        "reserved for position 0 (the record's code does, as it hashes in place)",
    )
    adam_weights: str = one_of(
        ("fp32", "bf16"),
        "fp32",
        "what Adam's embeddings, gates and LM head keep of an update: fp32: all 32 bits; bf16: the nearest bf16, as in "
        "the record (docs/optimizers.md)",
    )
    post_attn: bool = value(False, "a learned factor of what attention adds before `lanes_from`, too (the record left it out)")
    post_mlp: str = one_of(
        ("output", "folded"),
        "output",
        "where the MLP's learned factor is: output: of what it adds, one for each lane; folded: of its second matrix, so that both "
        "lanes get the same",
    )
    inject: str = one_of(
        ("after", "before"),
        "after",
        "where x0 and bigrams are added in a layer: after its attention, or before, which then reads them",
    )
    inject_skipped: bool = value(False, "add x0 and bigrams in the layers without attention too")
    softcap: bool = value(True, "logit softcapping: 23 sigmoid((x + 5) / 7.5)")
    fp8: str = one_of(
        ("off", "static", "delayed", "floating"),
        "off",
        "FP8 matmuls of the LM head in training (docs/fp8.md): off, static (scales that never change), delayed (scales "
        "of the largest numbers before), or floating (1-4-3 bits with a floating bias)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names("paired") and self.heads % 2:
            raise UserError(f"model.heads is {self.heads}, expected an even number, as model.paired names layers")
        if self.head_size % 4:
            raise UserError(f"model.heads {self.heads} makes heads of {self.head_size} columns, expected a multiple of 4")

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @property
    def most_windows(self) -> tuple[int, int]:
        """The longest of the short and of the long windows, in tokens: those that a plan counts with."""
        stages = parse(self.stages, key="model.stages")
        short, long = (max(stage.windows[i] for stage in stages) for i in (0, 1))
        return short * self.block, max(long, self.final_window) * self.block

    def names(self, field: str) -> tuple[int, ...]:
        return _layers(getattr(self, field), f"model.{field}")


@dataclass(frozen=True)
class Layer:
    """One layer's weights; None where the layer has no such part. `ve`: an embedding of values."""

    name: str
    qkv: Tensor | None
    proj: Tensor | None
    gate: Tensor | None
    ve: Tensor | None
    ve_gate: Tensor | None
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    embed: Tensor
    bigrams: Tensor | None
    factors: dict[str, Tensor]  # vectors of single numbers, by name
    smear: Tensor | None
    skip: Tensor | None
    layers: list[Layer]
    head: Tensor


def declare(p: Program, cfg: Config) -> Weights:
    """Declare the parameters, initialized as in the record: uniform q, k, v, O and first MLP matrix, zero second and gates."""
    C, Vp = cfg.d_model, cfg.padded_vocab
    skipped = cfg.names("skipped")
    values = [i for i in cfg.names("values") if i not in skipped]

    def adam_matrix(name: str, rows: int, columns: int, **begins: Any) -> Tensor:
        return p.parameter(name, (rows, columns), bf16=cfg.adam_weights == "bf16", **begins)

    def gate(name: str, rows: int) -> Tensor:
        return adam_matrix(f"{name}.gate", rows, GATED)

    def layer(i: int) -> Layer:
        """Layer i: an MLP, attention unless the layer skips it, and value embeddings where it is one of `values`."""
        name, bound = f"h.{i}", sqrt(3) * 0.5 / sqrt(C)
        qkv = proj = attention_gate = embedded = value_gate = None
        if i not in skipped:
            qkv = p.parameter(f"{name}.attn.qkv", (3 * C, C), bound=bound)
            proj = p.parameter(f"{name}.attn.proj", (C, C), bound=bound)
            attention_gate = gate(f"{name}.attn", cfg.heads)
        if i in values:
            embedded = adam_matrix(f"values.{values.index(i)}", Vp, C, std=0.01)
            value_gate = gate(f"{name}.value", cfg.heads)
        up = p.parameter(f"{name}.mlp.up", (cfg.d_ff, C), bound=bound)
        down = p.parameter(f"{name}.mlp.down", (cfg.d_ff, C))
        return Layer(name, qkv, proj, attention_gate, embedded, value_gate, up, down)

    embed = adam_matrix("embed", Vp, C, transposed="head")
    bigrams = adam_matrix("bigrams", BUCKETS * Vp, C) if cfg.bigram else None
    factors = {name: p.parameter(name, (n,), value=first) for name, (n, first) in _factors(cfg).items()}
    smear = gate("smear", 1) if cfg.smear else None
    skip = gate("skip", 1) if skipped else None
    layers = [layer(i) for i in range(cfg.layers)]
    return Weights(embed, bigrams, factors, smear, skip, layers, adam_matrix("head", C, Vp, std=0.005))


def _factors(cfg: Config) -> dict[str, tuple[int, float]]:
    """Learned scalars: name -> (how many, initial value). (The record packs them into five tensors; Adam is elementwise.)"""
    L, lanes = cfg.layers, max(0, cfg.layers - cfg.lanes_from)
    found = {"qkv.scale": (L, 0.5), "proj.scale": (L, 1.0), "resid.attn": (L, sqrt(1.1)), "resid.mlp": (L, sqrt(1.1))}
    found |= {"post.mlp": (L, 1.0), "x0.scale": (L, 0.0)}
    if cfg.post_attn:
        found["post.attn"] = (L, 1.0)
    if lanes:
        found |= {"lanes.attn0": (L, 1.0), "lanes.attn1": (L, 1.5)}
        found |= {"lanes.mlp1": (L, 1.0)} if cfg.post_mlp == "output" else {}
    if cfg.bigram:
        found["bigrams.scale"] = (L, 0.05)
    if cfg.smear:
        found["smear.scale"] = (1, 0.0)
    if cfg.backout < L:
        found["backout.scale"] = (1, -0.5)  # theirs is 0.5 and subtracted
    if cfg.names("skipped"):
        found["skip.scale"] = (1, -1.5)
    return found


def forward(p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool) -> Tensor:
    """The loss (1,): in training the sum over the next, the second and the third target by the scalars mtp_0, mtp_1 and mtp_2, else
    of the next alone. Padded columns take part in the softmax, as theirs do."""
    w = declare(p, cfg)
    x_BTC = _trunk(p, cfg, w, tokens_BT)
    how = {"cap": CAP if cfg.softcap else None, "predict": 3 if training else 1}
    scaling = _scaling(cfg) if training else None
    return p.softcapped_classifier(x_BTC, w.head, targets_BT, valid_vocab=cfg.padded_vocab, scaling=scaling, **how)


def _scaling(cfg: Config):
    """How the numbers of the classifier become codes of 8 bits; None where they do not."""
    from barellm.program.ops.gemm.fp8 import Static
    from barellm.program.ops.optim.scales import Delayed, Floating

    # A normalised x beyond 100 and a weight beyond 1.6 become those; a logit's gradient beyond 96 / targets does too.
    scales = 100 / 448, 1.6 / 448, 0.75 / 448
    ways = {"static": Static("head", *scales), "delayed": Delayed("head", scales), "floating": Floating("head")}
    return ways.get(cfg.fp8)


def decode(p: Program, cfg: Config, tokens_BT: Tensor) -> Tensor:
    """fp32 logits (B, 1, Vp) of the last position, of a text from its beginning."""
    w = declare(p, cfg)
    x_BTC = _trunk(p, cfg, w, tokens_BT)
    return p.softcapped_logits(x_BTC, w.head, cap=CAP if cfg.softcap else None)


def _trunk(p: Program, cfg: Config, w: Weights, tokens_BT: Tensor) -> Tensor:
    """The final hidden states (B, T, C), normalized, of the tokens (B, T) i32. `lane1_BTC` is None before `lanes_from`."""
    f = w.factors

    def number(name: str, i: int = 0) -> Tensor:
        return p.element(f[name], i)

    def norm(x_BTC: Tensor) -> Tensor:
        return p.rmsnorm(x_BTC, eps=EPS)

    # --- embeddings ---
    e_BTC = p.embedding(tokens_BT, w.embed)
    if w.smear is not None:  # each token gets a share of the one before
        e_BTC = p.gated(e_BTC, p.gate_logits(e_BTC, w.smear), base=e_BTC, factor=number("smear.scale"), shift=1)
    x0_BTC = norm(e_BTC)
    lane0_BTC, bigram_BTC = x0_BTC, None
    if w.bigrams is not None:
        buckets, reserved = int(w.bigrams.shape[0]), cfg.bigram_first == "reserved"
        ids_BT = p.bigram_ids(tokens_BT, buckets=buckets, reserved=reserved)
        bigram_BTC = p.embedding(ids_BT, w.bigrams, dtype=p.compute)
        lane0_BTC = p.mix((x0_BTC, 1.0), (bigram_BTC, number("bigrams.scale", 0)))
    seen = _Seen(p.yarn_tables(yarn(StageSettings.of(cfg), 0), 2 * cfg.max_seq), _starts(p, cfg, tokens_BT))
    lane1_BTC = saved_BTC = backout_BTC = None

    def injected(i: int) -> list[Term]:
        terms: list[Term] = [(x0_BTC, number("x0.scale", i))]
        if bigram_BTC is not None and i > 0:  # before layer 0 it has been added already
            terms.append((bigram_BTC, number("bigrams.scale", i)))
        return terms

    # --- layers ---
    for i, layer in enumerate(w.layers):
        if i == cfg.lanes_from:
            lane1_BTC = lane0_BTC
        with p.segment(layer.name):
            if layer.qkv is None:
                if saved_BTC is not None and w.skip is not None:
                    z_BT1 = p.gate_logits(x0_BTC, w.skip)
                    how = {"scale": 2.0, "factor": number("skip.scale"), "squash": True}
                    lane0_BTC = p.gated(saved_BTC, z_BT1, base=lane0_BTC, **how)
                    if lane1_BTC is not None:
                        lane1_BTC = p.gated(saved_BTC, z_BT1, base=lane1_BTC, **how)
                if cfg.inject_skipped:
                    lane0_BTC = p.mix((lane0_BTC, 1.0), *injected(i))
            else:
                scales = number("qkv.scale", i), number("proj.scale", i)
                ve_BTC = None if layer.ve is None else p.embedding(tokens_BT, layer.ve, dtype=p.compute)
                before, after = (injected(i), ()) if cfg.inject == "before" else ((), injected(i))
                resid: Term = (lane0_BTC, number("resid.attn", i))
                if before:
                    resid = p.mix(resid, *before), 1.0
                a_BTC = _attention(p, cfg, layer, norm(resid[0]), ve_BTC, scales, seen, i)
                post = "lanes.attn0" if lane1_BTC is not None else "post.attn"
                lane0_BTC = p.mix(resid, (a_BTC, number(post, i) if post in f else 1.0), *after)
                if lane1_BTC is not None:
                    lane1_BTC = p.mix((lane1_BTC, number("resid.attn", i)), (a_BTC, number("lanes.attn1", i)))
            if i == cfg.skip_from:
                saved_BTC = lane0_BTC
            h_BTC = norm(lane0_BTC if lane1_BTC is None else lane1_BTC)
            h_BTF, folded = p.activate(p.linear(h_BTC, layer.up), "relu2"), cfg.post_mlp == "folded"
            if folded:
                h_BTF = p.mix((h_BTF, number("post.mlp", i)), dtype=p.compute)
            m_BTC = p.linear(h_BTF, layer.down, transposed_weight=True)
            lane0_BTC = p.mix((lane0_BTC, number("resid.mlp", i)), (m_BTC, 1.0 if folded else number("post.mlp", i)))
            if lane1_BTC is not None:
                lane1_BTC = p.mix((lane1_BTC, number("resid.mlp", i)), (m_BTC, 1.0 if folded else number("lanes.mlp1", i)))
        if i == cfg.backout:
            backout_BTC = lane0_BTC

    # --- what the classifier sees ---
    final_terms: list[Term] = [(lane0_BTC, 1.0)] if lane1_BTC is None else [(lane0_BTC, 0.5), (lane1_BTC, 0.5)]
    if backout_BTC is not None:  # what served later layers only is taken out again
        final_terms.append((backout_BTC, number("backout.scale")))
    return norm(p.mix(*final_terms) if len(final_terms) > 1 else lane0_BTC)


@dataclass(frozen=True)
class _Seen:
    """What all layers' attention has in common: the angles of positions, and where each token's document begins, if anywhere."""

    tables: tuple[Tensor, Tensor]
    starts: Tensor | None


def _attention(p: Program, cfg: Config, layer: Layer, x_BTC: Tensor, ve_BTC: Tensor | None, scales, seen: _Seen, i: int) -> Tensor:
    """Attention of layer i; x (B, T, C) is normalized, its first columns drive the gates. `scales`: of input and output."""
    assert layer.qkv is not None and layer.gate is not None and layer.proj is not None
    paired, long = i in cfg.names("paired"), i in cfg.names("long")
    gate_BTH = p.gate_logits(x_BTC, layer.gate)
    value_BTH = None
    if ve_BTC is not None and layer.ve_gate is not None:
        # It reads half of each, x[:6] and ve[:6]; with paired heads x[:12].
        value_BTH = p.gate_logits(x_BTC, layer.ve_gate, None if paired else ve_BTC)
    qkv_BT3C = p.linear(p.mix((x_BTC, scales[0]), dtype=p.compute), layer.qkv)
    qk_BT2C, v_BTC = p.split(qkv_BT3C, (2 * cfg.d_model, cfg.d_model))
    qk_BT2C = p.qk_rotary(qk_BT2C, seen.tables, heads=cfg.heads, paired=paired, shift=long and not paired, eps=EPS)
    q_BTC, k_BTC = p.split(qk_BT2C, 2)
    if ve_BTC is not None and value_BTH is not None:
        v_BTC = p.gated(ve_BTC, value_BTH, base=v_BTC, scale=2.0)
    window, widest = ("window_long", cfg.most_windows[1]) if long else ("window_short", cfg.most_windows[0])
    y_BTC = p.attention(
        q_BTC, k_BTC, v_BTC, heads=cfg.heads, window=window, most_window=widest, scale="attention_scale", starts=seen.starts,
        paired=paired,
    )  # fmt: skip
    return p.linear(p.gated(y_BTC, gate_BTH, factor=scales[1]), layer.proj)


def _starts(p: Program, cfg: Config, tokens_BT: Tensor) -> Tensor | None:
    if cfg.separator < 0:
        return None
    return p.document_starts(p.cu_seqlens(tokens_BT, separator=cfg.separator), tokens_BT)


OWN = (
    "d_ff", "separator", "block", "stages", "long", "paired", "values", "skipped", "skip_from", "lanes_from", "backout",
    "bigram_first",
)  # fmt: skip
TORCH_TWIN = ("torch_speedrun.py", ("layers", "heads", "d_model", *OWN, "smear", "bigram", "softcap"))


VALIDATED = 262_144  # tokens in a row of the evaluation that decides a record; it has 40 of them
# The fields whose defaults are what runs did before they were there, so that those go on as they began.
AS_THE_RECORD: dict[str, Any] = {"bigram_first": "reserved", "adam_weights": "bf16"}


def speedrun() -> Run:
    """The record itself, on FineWeb shards: 1490 steps of 8 micro-batches."""
    return Run(
        preset="speedrun",
        model=Config(padded_vocab=50304, separator=50256, max_seq=VALIDATED, **AS_THE_RECORD),
        optim=_optim(),
        data=DataConfig(source="", tokenizer="gpt2", order="documents", span_shards=False),
        train=TrainConfig(
            micro_batch_size=1, seq=49152, gradient_accumulation_steps=8, steps=1490,
            eval_every=250, eval_tokens=40 * VALIDATED, eval_from="first", eval_seq=VALIDATED,
        ),
    )  # fmt: skip


def speedrun_small() -> Run:
    """The same code at a size that two CPU cores train in two minutes, on the source of Python's standard library. Token counts are
    1/16 of the record's or less; a document is a file, and a row may begin in the middle of one."""
    # Stage(tokens of a micro-batch, (short, long) attention windows in blocks, share of the scheduled steps): the record's
    # windows, factors of the learning rate and loss weights. The last stage has no share: it is the 10 extension steps.
    stages = (
        Stage(1024, (1, 3), Fraction(1, 3), lr=1.0, mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)),
        Stage(2048, (3, 7), Fraction(1, 3), lr=1.52, mtp=(1.0, 0.5), mtp_end=(1.0, 0.0)),
        Stage(3072, (5, 11), Fraction(1, 3), lr=1.73),
        Stage(3072, (6, 13)),
    )
    sizes: dict[str, Any] = {"heads": 4, "d_model": 128, "d_ff": 512, "max_seq": 3072, "block": 32, "vocab_size": 4096}
    return Run(
        preset="speedrun-small",
        model=Config(**sizes, stages=table(stages), extension=10, **AS_THE_RECORD),
        optim=replace(_optim(), momentum_warmup=80, momentum_cooldown=15),
        data=DataConfig(source="stdlib", tokenizer="bpe", bpe_vocab=4096),
        train=TrainConfig(micro_batch_size=1, seq=3072, steps=400, eval_every=100),
    )


def _optim() -> OptimConfig:
    momentum = {"momentum": 0.95, "momentum_start": 0.85, "momentum_warmup": 300, "momentum_cooldown": 50}
    return OptimConfig(
        name="speedrun", lr=0.008, min_lr=0.0, schedule="constant", muon_lr=0.023, weight_decay=1.2, cautious=True, clip=0.0,
        normuon=0.95, **momentum,
    )  # fmt: skip


PRESETS: dict[str, Callable[[], Run]] = {"speedrun": speedrun, "speedrun-small": speedrun_small}
