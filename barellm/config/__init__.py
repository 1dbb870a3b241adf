"""Configurations: frozen values of which each field carries its help and its bounds. Nothing here imports more than the standard
library. What a model has is its architecture's own (`models/`); presets live beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from barellm.config.adapter import AdapterConfig
from barellm.config.fields import Section, at_least, below_one, between, inside_one, one_of, some_of, value
from barellm.config.number_formats import OPERANDS, number_formats
from barellm.errors import UserError

GEMM_BACKENDS = ("barellm", "triton", "cublaslt")
MOMENTS = ("fp32", "16bit", "16bit-stochastic")
DROPOUT_BITS = ("threefry", "taus88", "lfsr113")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
EVALUATED = ("spread", "first")  # which tokens of the validation text
ACTIVATIONS = ("silu", "gelu", "gelu_erf", "relu", "relu2")  # of an MLP
EXPONENT_RULES = ("static", "floating", "delayed", "learned")
TRACKERS = ("tensorboard", "wandb", "trackio")
MASKS = ("auto", "on", "off")  # of documents in a row
ORDERS = ("epoch", "random", "documents", "sequential", "llmc")
OPTIMIZERS = ("adamw", "muon", "speedrun")
ORTHOGONALIZATIONS = ("polar-express", "jordan")  # Muon's coefficients of the Newton-Schulz iteration
STEP_SCALES = ("jordan", "moonshot")  # Muon: scale of the update by the matrix's shape, or to the RMS of AdamW's
MOST_NS_STEPS = 5  # for which there are coefficients


def _formats(key: str, found: str, config: Any) -> str | None:
    if found:
        try:
            number_formats(found)
        except ValueError as error:
            return f"{key} is {found!r}, expected {error}"
    return None


class ModelConfig(Section, section="model"):
    """The part that the configurations of all architectures share. `vocab_size` ids are valid. `padded_vocab` rows of the
    embedding are stored and computed; 0 means the next multiple of 64. A `Config` in models/ is a frozen dataclass of this."""

    vocab_size: int
    padded_vocab: int
    max_seq: int
    d_model: int

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "channels" in cls.__annotations__:  # a user's model with the field's old name
            cls.d_model = property(lambda self: self.channels)  # pyright: ignore

    def __post_init__(self) -> None:
        if self.padded_vocab == 0:
            object.__setattr__(self, "padded_vocab", -(-self.vocab_size // 64) * 64)
        super().__post_init__()
        if self.padded_vocab < self.vocab_size:
            raise UserError(f"model.padded_vocab {self.padded_vocab} is below model.vocab_size {self.vocab_size}")


OF_ADAMW = {"beta1", "beta2", "eps", "clip", "moments"}  # read by adamw and muon
OF_MUON = {"orthogonalization", "step_scale"}
OF_MATRICES = {  # read by muon and speedrun
    "muon_lr", "muon_lr_ratio", "momentum", "momentum_start", "momentum_warmup", "momentum_cooldown", "ns_steps", "cautious",
    "normuon",
}  # fmt: skip
UNREAD = {"adamw": OF_MATRICES | OF_MUON, "muon": set(), "speedrun": OF_ADAMW | OF_MUON}


@dataclass(frozen=True)
class OptimConfig(Section, section="optim"):
    """The optimizer, and the way of its learning rate (training/schedule.py). With the name muon the matrices of blocks go by Muon
    (optim/muon.py) at the rate `muon_lr`, and all other parameters by AdamW at `lr`. Their ratio holds in every step, and where
    `overrides.changed` is given another `lr` alone."""

    name: str = one_of(OPTIMIZERS, "adamw",
        "adamw, muon or speedrun; muon: Muon for matrices of blocks, AdamW for the rest; speedrun: NorMuon and Adam as "
        "modded-nanogpt has them")  # fmt: skip
    lr: float = at_least(0, 6e-4, "highest learning rate; after the warmup; with muon that of AdamW, and muon_lr follows it")
    min_lr: float = at_least(0, 6e-5, "learning rate at the last step, to which all schedules but constant decay")
    warmup: int = at_least(0, 0, "steps of linear warmup")
    schedule: str = one_of(SCHEDULES, "cosine",
        "cosine, linear, constant or wsd; of the learning rate, after the warmup; wsd: warmup-stable-decay")  # fmt: skip
    decay_fraction: float = between(0, 1, 0.2, "of wsd: share of all steps, the last ones, over which the rate decays")
    beta1: float = below_one(0.9, "decay rate of AdamW's first moment")
    beta2: float = below_one(0.95, "decay rate of AdamW's second moment")
    eps: float = at_least(0, 1e-8, "AdamW's epsilon, added to the root of the second moment")
    weight_decay: float = at_least(0, 0.1, "weight decay of matrices; embeddings included")
    clip: float = at_least(0, 1.0, "gradient clipping: gradients of a larger norm are scaled down to it; 0: none")
    skip_loss_z: float = at_least(0, 0.0, "loss-spike skipping: above this z-score of the loss over the last 128 steps; 0: none")
    skip_norm_z: float = at_least(0, 0.0, "the same for the gradient norm")
    moments: str = one_of(MOMENTS, "fp32",
        "optimizer state dtype: AdamW's moments of matrices as fp32, 16bit (round to nearest) or "
        "16bit-stochastic (rounding)")  # fmt: skip
    muon_lr: float = at_least(0, 0.02, "of muon: peak learning rate of blocks' matrices (default: lr times PRESET's muon_lr_ratio)")
    muon_lr_ratio: float = at_least(0, 0.0, "of muon: muon_lr / lr, another way to give muon_lr", init=False)
    powersgd: int = at_least(
        0, 0, "PowerSGD: ranks exchange each matrix's gradient as two factors of this rank (docs/ranks.md); 0: the gradient itself"
    )
    overlap: bool = value(
        True, "with message passing: overlap communication with the backward pass; receive buffers are preallocated (docs/ranks.md)"
    )
    momentum: float = below_one(0.95, "of muon: decay rate of the mean gradient")
    momentum_start: float = below_one(0.85, "of muon: momentum of the first step, where momentum_warmup is not 0")
    momentum_warmup: int = at_least(0, 0, "of muon: steps in which the momentum rises")
    momentum_cooldown: int = at_least(0, 0, "of muon: last steps, in which the momentum falls back to momentum_start")
    orthogonalization: str = one_of(ORTHOGONALIZATIONS, "polar-express",
        "of muon: coefficients of the Newton-Schulz iteration that orthogonalizes the update: polar-express or jordan")  # fmt: skip
    ns_steps: int = between(1, MOST_NS_STEPS, MOST_NS_STEPS, "of muon: Newton-Schulz steps, at most 5; fewer are faster")
    step_scale: str = one_of(STEP_SCALES, "jordan",
        "of muon: jordan (shape-scaled learning rate: sqrt(rows / cols), at least 1) or moonshot (RMS "
        "matching AdamW's)")  # fmt: skip
    cautious: bool = value(False, "of muon: weight decay only where the step makes a weight smaller too")
    normuon: float = below_one(0.0, "of muon: decay rate of NorMuon's mean square of rows; 0: plain Muon")

    @property
    def skips(self) -> bool:
        return self.skip_loss_z > 0 or self.skip_norm_z > 0

    @property
    def has_muon(self) -> bool:
        """Whether matrices of blocks have a learning rate of their own."""
        return self.name != "adamw"

    def rates(self, at: Callable[[float, float], float]) -> dict[str, float]:
        """The learning rates of a step by the names of their scalars. `at` gives the schedule's value between a highest and a
        lowest rate. Muon's is in proportion to that of AdamW; where this is 0 throughout, it falls to 0 by itself."""
        lr = at(self.lr, self.min_lr)
        if not self.has_muon:
            return {"lr": lr}
        return {"lr": lr, "muon_lr": lr * self.muon_lr_ratio if self.lr else at(self.muon_lr, 0.0)}

    def __post_init__(self) -> None:
        object.__setattr__(self, "muon_lr_ratio", self.muon_lr / self.lr if self.lr > 0 else 0.0)
        super().__post_init__()
        if self.powersgd and self.name == "speedrun":
            raise UserError(f"optim.powersgd is {self.powersgd} and optim.name 'speedrun', expected adamw or muon")
        # Who lowered the preset's rate may not know of the other.
        if self.min_lr > self.lr and self.schedule != "constant":
            raise UserError(f"optim.min_lr {self.min_lr} is above optim.lr {self.lr}: lower it too")


@dataclass(frozen=True)
class DataConfig(Section, section="data"):
    """The source of the text, and its order. The order "epoch" visits every window once before any twice. "random" draws them
    independently, as nanoGPT does. "documents" fills each row with whole documents, in their order, as modded-nanogpt does.
    "sequential" goes through the text from its beginning, as build-nanogpt does; "llmc" shuffles as llm.c does."""

    source: str = value("stdlib", "text file, folder, shards or stdlib; also a pattern (docs/data.md); stdlib: Python's library")
    tokenizer: str = value("bpe", "bytes, chars, bpe, gpt2, or a folder; one with tokenizer.json")
    bpe_vocab: int = value(2048, "vocabulary size where a BPE is trained on the text")
    val_fraction: float = inside_one(0.1, "share of the text, at its end, for validation (shards named train and val have theirs)")
    order: str = one_of(ORDERS, "epoch",
        "epoch: shuffled windows, each once an epoch; random: windows drawn with replacement; documents: document-aligned packing; "
        "sequential: from the beginning to the end; llmc: llm.c's own shuffle")  # fmt: skip
    document_mask: str = one_of(MASKS, "auto",
        "attention inside documents alone, whose positions begin at 0 (intra-document masking); auto: of "
        "examples, not of texts")  # fmt: skip
    span_shards: bool = value(True,
        "of the order documents: a row continues in the next shard; false: the rest of a shard that fills no row is dropped, "
        "as modded-nanogpt does")  # fmt: skip


@dataclass(frozen=True)
class TrainConfig(Section, section="train"):
    """The training loop. A step is `micro_batch_size` x `gradient_accumulation_steps` sequences of `seq` tokens."""

    micro_batch_size: int = at_least(1, 8, "sequences in a micro-batch; of all ranks together")
    seq: int = at_least(1, 256, "sequence length; tokens in a sequence")
    gradient_accumulation_steps: int = at_least(1, 1, "micro-batches in an optimizer step")
    batch_rampup_from: int = at_least(0, 0,
        "batch-size warmup: micro-batches in the first step, which rise to train.gradient_accumulation_steps; 0: none")  # fmt: skip
    batch_rampup_tokens: int = at_least(0, 0, "batch-size warmup: tokens over which the number of micro-batches rises linearly")
    steps: int = at_least(0, 1000, "optimizer steps; 0: as many as fit into train.minutes. For bench, profile: how many are timed")
    epochs: float = at_least(0, 0.0, "passes over the training tokens; in the place of train.steps; 0: train.steps")
    minutes: float = at_least(0, 0.0,
        "time limit; steps that fit, at most train.steps; 0: none. For tune: nothing new is tried after it")  # fmt: skip
    overfit: int = at_least(0, 0, "train on the first N micro-batches again and again, to see the loss go to 0; 0: on all the text")
    eval_every: int = at_least(0, 100, "steps between evaluations; 0: only one at the end")
    eval_tokens: int = at_least(0, 65536, "tokens in an evaluation, of the validation text as train.eval_from says; 0: all of it")
    eval_from: str = one_of(EVALUATED, "spread",
        "spread: an evaluation's windows are spread evenly over the validation text, and the last one has more of them; first: "
        "each evaluation, the last one too, is of the first train.eval_tokens")  # fmt: skip
    eval_seq: int = at_least(0, 0, "tokens in a row of an evaluation; 0: train.seq")
    sample_every: int = at_least(0, 0, "steps between samples; 0: only at the end")
    exponent_stats: int = at_least(0, 0,
        "steps between exponent histograms (dynamic range) of activations, gradients and weights "
        "(exponent_stats.jsonl); 0: none")  # fmt: skip
    early_stopping: int = at_least(0, 0, "early stopping; ends after so many evaluations without a lower validation loss; 0: none")
    keep_best: bool = value(False, "keep the best checkpoint; that of the lowest validation loss, in the run's folder best")
    hellaswag: str = value("", "a file of HellaSwag (the public jsonl, or llm.c's .bin) on which the model is tried; empty: none")
    hellaswag_every: int = at_least(0, 250, "steps between evaluations on train.hellaswag; 0: only one at the end")
    checkpoint_every: int = at_least(0, 0, "steps between checkpoints; 0: only at the end, or when stopped")
    save_total_limit: int = at_least(1, 2, "how many of the newest checkpoints are kept, besides train.keep_every's")
    keep_every: int = at_least(0, 0, "steps between permanent checkpoints, which are never deleted; 0: none")
    signal_grace_period: float = at_least(0, 0.0,
        "preemption: seconds after SIGTERM in which the run saves and ends, even inside a step; 0: it ends "
        "its micro-batch first")  # fmt: skip
    seed: int = between(0, (1 << 32) - 1, 1337, "random seed; of weights, order of the data, dropout and samples")  # 32-bit words
    track: str = some_of(TRACKERS, "loggers: tensorboard, wandb, trackio, with commas between them")
    init_from: str = value("",
        "weights to start from; with their sizes: a run, a checkpoint, a Hugging Face folder, "
        "hf:OWNER/NAME, a GGUF or llm.c file")  # fmt: skip
    dtype: str = one_of(("auto", "fp32", "bf16", "fp16"), "auto",
        "auto, fp32, bf16 or fp16; auto: bf16 where the machine has instructions for it; fp16: with a "
        "dynamic loss scale")  # fmt: skip
    branch_scales: bool = value(False,
        "of fp16: a gradient scale of each residual branch, besides the loss scale (per-resblock gradient scaling)")  # fmt: skip
    matmul_formats: str = value("",
        "simulated number formats of matmul operands in training (docs/fp8.md): eXmY, as e4m3, or three with commas between them "
        "for activations, weights and gradients; empty: those of train.dtype", check=_formats)  # fmt: skip
    exponent_bias: str = one_of(EXPONENT_RULES, "static",
        "exponent bias of train.matmul_formats: static (the format's, or Z of eXmYbZ), or for each tensor floating (by its amax), "
        "delayed (by its amax in the last 16 micro-batches) or learned (by its amax and two exponents more, at steps that "
        "double)")  # fmt: skip
    stochastic_rounding: str = some_of(OPERANDS,
        "operands that are rounded stochastically to train.matmul_formats, with commas between them; others: to "
        "nearest")  # fmt: skip
    recompute: bool = value(False, "activation (gradient) checkpointing; recomputed in the backward pass: less memory, more work")
    gemm_backend: str = one_of(GEMM_BACKENDS, "barellm", "matmuls on a GPU: barellm's own, those in triton alone, or cublaslt")
    tf32: bool = value(False, "on a GPU: fp32 matmuls in TF32 on tensor cores, with 10 bits of mantissa")

    def eval_shape(self, batch: int) -> tuple[int, int]:
        """The rows of an evaluation's batch and their tokens: no more tokens than a micro-batch of `batch` rows has, or one row."""
        return (max(1, batch * self.seq // self.eval_seq), self.eval_seq) if self.eval_seq else (batch, self.seq)

    def __post_init__(self) -> None:
        """Check bounds of single fields (in the base class), then conditions between fields."""
        super().__post_init__()
        if self.steps < 1 and self.minutes == 0 and self.epochs == 0:
            raise UserError(f"train.steps is {self.steps}, expected at least 1, or train.minutes above 0")
        for key, default in (("exponent_bias", "static"), ("stochastic_rounding", "")):
            if not self.matmul_formats and getattr(self, key) != default:
                raise UserError(f"train.{key} is {getattr(self, key)!r} and train.matmul_formats empty, expected formats, as e4m3")
        if "b" in self.matmul_formats and self.exponent_bias != "static":
            found = f"train.matmul_formats is {self.matmul_formats!r} and train.exponent_bias {self.exponent_bias}"
            raise UserError(f"{found}, expected static, or formats without a bias")
        if bool(self.batch_rampup_from) != bool(self.batch_rampup_tokens):
            first, tokens = self.batch_rampup_from, self.batch_rampup_tokens
            found = f"train.batch_rampup_from is {first} and train.batch_rampup_tokens {tokens}"
            raise UserError(f"{found}, expected both above 0, or neither")
        if self.batch_rampup_from > self.gradient_accumulation_steps:
            most = f"train.gradient_accumulation_steps {self.gradient_accumulation_steps}"
            raise UserError(f"train.batch_rampup_from {self.batch_rampup_from} is above {most}")
        if self.batch_rampup_from and self.minutes:
            why = "steps get longer on the way"
            raise UserError(f"train.minutes is set and train.batch_rampup_from too, expected train.minutes 0: {why}")


@dataclass(frozen=True)
class Config:
    """Everything that a run is, saved with each checkpoint. The class of `model` says which architecture it is."""

    preset: str
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    def check(self) -> None:
        """Raise a UserError for values that do not go together, before anything slow begins."""
        if self.train.seq > self.model.max_seq:
            raise UserError(f"train.seq {self.train.seq} is above model.max_seq {self.model.max_seq}")
        if self.train.eval_seq > self.model.max_seq:
            raise UserError(f"train.eval_seq {self.train.eval_seq} is above model.max_seq {self.model.max_seq}")
        if self.optim.powersgd and self.train.dtype == "fp16":
            found = f"optim.powersgd is {self.optim.powersgd} and train.dtype fp16"
            raise UserError(f"{found}, whose loss scale would change what was left out: expected fp32 or bf16")
