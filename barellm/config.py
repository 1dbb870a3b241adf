"""Frozen configuration values and the presets that return them. Nothing here imports more than the standard library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from barellm.errors import UserError


def one_of(key: str, value: str, known: Sequence[str]) -> None:
    """UserError for a value that is not among the known ones."""
    if value not in known:
        raise UserError(f"{key} is {value!r}, expected {', '.join(known[:-1])} or {known[-1]}")


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 shaped transformer. `vocab_size` ids are valid; `padded_vocab` rows are stored and computed (0: the next
    multiple of 64)."""

    layers: int = 12
    heads: int = 12
    channels: int = 768
    vocab_size: int = 50257
    padded_vocab: int = 0
    max_seq: int = 1024
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.padded_vocab == 0:
            object.__setattr__(self, "padded_vocab", -(-self.vocab_size // 64) * 64)
        for name in ("layers", "heads", "channels", "vocab_size", "max_seq"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}, expected at least 1")
        if self.channels % self.heads:
            raise UserError(f"model.heads {self.heads} does not divide model.channels {self.channels}")
        if self.padded_vocab < self.vocab_size:
            raise UserError(f"model.padded_vocab {self.padded_vocab} is below model.vocab_size {self.vocab_size}")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"model.dropout is {self.dropout}, expected 0 <= dropout < 1")

    @property
    def head_size(self) -> int:
        return self.channels // self.heads

    @property
    def parameters(self) -> int:
        """Stored parameters, the padded vocabulary rows counted."""
        C = self.channels
        norm, linear = (2, 1) if self.bias else (1, 0)
        block = 12 * C * C + linear * 9 * C + 2 * norm * C
        return (self.padded_vocab + self.max_seq) * C + self.layers * block + norm * C


MATMULS = ("own", "cublaslt")
MOMENTS = ("fp32", "16bit", "16bit-stochastic")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
OPTIMIZERS = ("adamw", "muon")
ITERATIONS = ("polar-express", "jordan")  # of Muon: how singular values become one, and
STEP_SCALES = ("jordan", "moonshot")  # how large a matrix's step is
TURNS = 5  # that an iteration has


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, and the way of its learning rate (training/schedule.py). `weight_decay` acts on matrices only; `clip` 0
    switches clipping off; `moments` are how AdamW's of matrices are kept: fp32, 16bit (rounded to nearest) or 16bit-stochastic.

    With the name muon the matrices of blocks go by Muon (optim/muon.py) at the rate `muon_lr`, which falls as `lr` does, and all
    other parameters by AdamW. `momentum` is reached from `momentum_start` in `momentum_warmup` steps; `normuon` is the decay rate
    of NorMuon's mean square, 0 for plain Muon."""

    name: str = "adamw"
    lr: float = 6e-4
    min_lr: float = 6e-5
    warmup: int = 0
    schedule: str = "cosine"
    cooldown: float = 0.2  # of wsd: the share of all steps over which the rate falls
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    moments: str = "fp32"
    muon_lr: float = 0.02
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_warmup: int = 0
    iteration: str = "polar-express"
    turns: int = 5
    step_scale: str = "jordan"
    cautious: bool = False
    normuon: float = 0.0

    def __post_init__(self) -> None:
        one_of("optim.name", self.name, OPTIMIZERS)
        one_of("optim.schedule", self.schedule, SCHEDULES)
        one_of("optim.iteration", self.iteration, ITERATIONS)
        one_of("optim.step_scale", self.step_scale, STEP_SCALES)
        if not 1 <= self.turns <= TURNS:
            raise UserError(f"optim.turns is {self.turns}, expected 1 to {TURNS}")
        for name in ("momentum", "momentum_start", "normuon"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name} is {getattr(self, name)}, expected 0 <= {name} < 1")
        for name in ("muon_lr", "momentum_warmup"):
            if getattr(self, name) < 0:
                raise UserError(f"optim.{name} is {getattr(self, name)}, expected at least 0")
        if self.name == "muon" and self.muon_lr and not self.lr:
            raise UserError("optim.lr is 0, expected more: muon_lr falls in proportion to it")
        if not 0 <= self.cooldown <= 1:
            raise UserError(f"optim.cooldown is {self.cooldown}, expected a share of the steps, 0 <= cooldown <= 1")


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from. `source`: "stdlib", or .txt files, .bin shards or folders of them; `tokenizer`: bytes, chars, bpe,
    gpt2; `order`: "epoch" visits every window once before any twice, "random" draws them independently, as nanoGPT does."""

    source: str = "stdlib"
    tokenizer: str = "bpe"
    bpe_vocab: int = 2048
    val_fraction: float = 0.1
    order: str = "epoch"


@dataclass(frozen=True)
class TrainConfig:
    """The loop. A step is `batch` x `accumulate` sequences of `seq` tokens."""

    batch: int = 8
    seq: int = 256
    accumulate: int = 1
    steps: int = 1000  # 0: as many as fit into `minutes`
    minutes: float = 0.0  # > 0: the schedule ends at this wall time, at the latest after `steps`
    eval_every: int = 100
    eval_tokens: int = 65536  # 0: the whole validation part
    sample_every: int = 0
    checkpoint_every: int = 0  # 0: only at the end and when stopped
    keep: int = 2
    seed: int = 1337
    init_from: str = ""  # weights to begin with: a checkpoint, a Hugging Face folder, an llm.c file
    dtype: str = "auto"
    recompute: bool = False
    matmul: str = "own"  # who does products on a GPU: barellm's own kernels, or "cublaslt"
    tf32: bool = False  # on a GPU: fp32 products by tensor cores, which see 10 bits of each fraction


@dataclass(frozen=True)
class Config:
    """Everything that a run is, saved with each checkpoint."""

    preset: str = "default"
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def default() -> Config:
    """What `barellm train` runs with no arguments: a small GPT on the source of Python's standard library, in two minutes.

    The size is what two minutes on two cores feed: of 1.1, 2.2 and 3.7 million parameters the smallest learnt most.
    """
    return Config(
        preset="default",
        model=ModelConfig(layers=4, heads=4, channels=128, vocab_size=4096, max_seq=256),
        optim=OptimConfig(lr=4e-3, min_lr=1e-4, warmup=50, beta2=0.99),
        data=DataConfig(source="stdlib", tokenizer="bpe", bpe_vocab=4096),
        train=TrainConfig(batch=8, seq=256, steps=2000, minutes=1.75, eval_every=250, sample_every=500),
    )


def shakespeare_char() -> Config:
    """nanoGPT's CPU example: a character model of 0.8M parameters, 2000 iterations. An evaluation looks at 40 batches, as its
    does (20 of each part); ours are all of the validation part, spread evenly."""
    return Config(
        preset="shakespeare-char",
        model=ModelConfig(layers=4, heads=4, channels=128, vocab_size=65, padded_vocab=65, max_seq=64, bias=False),
        optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup=100, beta2=0.99),
        data=DataConfig(source="", tokenizer="chars", order="random"),
        train=TrainConfig(batch=12, seq=64, steps=2000, eval_every=250, eval_tokens=40 * 12 * 64),
    )


def _gpt2(preset: str, layers: int, heads: int, channels: int, lr: float) -> Config:
    return Config(
        preset=preset,
        model=ModelConfig(layers=layers, heads=heads, channels=channels, vocab_size=50257, padded_vocab=50304),
        optim=OptimConfig(lr=lr, min_lr=lr / 10, warmup=700),
        data=DataConfig(source="", tokenizer="gpt2"),
        train=TrainConfig(batch=4, seq=1024, accumulate=128, steps=19560, eval_every=250, checkpoint_every=1000),
    )


def gpt2_124m() -> Config:
    return _gpt2("gpt2-124m", 12, 12, 768, 6e-4)


def gpt2_350m() -> Config:
    return _gpt2("gpt2-350m", 24, 16, 1024, 3e-4)


def gpt2_774m() -> Config:
    return _gpt2("gpt2-774m", 36, 20, 1280, 2.5e-4)


def gpt2_1558m() -> Config:
    return _gpt2("gpt2-1558m", 48, 25, 1600, 2e-4)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": default,
    "shakespeare-char": shakespeare_char,
    "gpt2-124m": gpt2_124m,
    "gpt2-350m": gpt2_350m,
    "gpt2-774m": gpt2_774m,
    "gpt2-1558m": gpt2_1558m,
}


def preset(name: str) -> Config:
    """The preset of that name; an unknown one is refused with the nearest known name."""
    if name not in PRESETS:
        from barellm.overrides import nearest  # which imports this module

        raise UserError(f"unknown preset {name!r}{nearest(name, PRESETS)} (known: {', '.join(PRESETS)})")
    return PRESETS[name]()
