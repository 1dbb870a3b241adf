"""What of a model is trained that begins with weights: adapters, or some of its parameters."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

from barellm.config.fields import Section, above, below_one, value
from barellm.errors import UserError

BASES = ("auto", "fp32", "bf16", "int8", "int4", "nf4")
RANK, MOST_RANK = 8, 1024  # the rank where none is given, as PEFT has it
# A tenth of these is usual where all weights are trained (Schulman et al. 2025), and QLoRA took 2e-4 (Dettmers et al. 2023).
DEFAULTS: dict[str, object] = {
    "optim.name": "adamw", "optim.lr": 2e-4, "optim.min_lr": 0.0, "optim.warmup": 0, "optim.weight_decay": 0.0
}  # fmt: skip


def _method(key: str, found: str, config: Any) -> str | None:
    kind, colon, rank = found.partition(":")
    if not found or (kind == "lora" and (not colon or (rank.isdecimal() and len(rank) < 5 and 1 <= int(rank) <= MOST_RANK))):
        return None
    return f"{key} (--adapt) is {found!r}, expected lora:RANK with a rank from 1 to {MOST_RANK}, as lora:16"


def _base(key: str, found: str, config: Any) -> str | None:
    kind, slash, group = found.partition("/")
    if kind in BASES and (not slash or (kind in BASES[3:] and group in ("32", "64", "128"))):
        return None
    return f"{key} is {found!r}, expected {', '.join(BASES)}; int4/128 sets the group size"


@dataclass(frozen=True)
class AdapterConfig(Section, section="adapter"):
    """Low-rank adapters (LoRA, Hu et al. 2021), or parameters that are trained in full. All other weights are frozen: they have no
    gradient and no optimizer state."""

    method: str = value("", "lora:16: train low-rank adapters (LoRA) of rank 16; all else is frozen; empty: none", check=_method)
    alpha: float = above(0, 8.0, "of LoRA: what it adds is times alpha / rank")
    rslora: bool = value(False, "rank-stabilized LoRA: times alpha / sqrt(rank) instead")
    dropout: float = below_one(0.0, "of LoRA: dropout rate of what adapters read, in training")
    targets: str = value("", "modules with adapters, by Hugging Face's names, as q_proj,v_proj, or all-linear (default: PEFT's)")
    base: str = value("auto", "format of frozen matrices: auto (bf16 in bf16), fp32, bf16, int8, int4 or nf4 (QLoRA)", check=_base)
    train_only: str = value("", "train only parameters with these names, in full; patterns as h.1.*, with | between them")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method and self.train_only:
            raise UserError(f"--adapt is {self.method!r} and --train-only {self.train_only!r}, expected one of them")
        if self.base != "auto" and not self.active:
            raise UserError(f"adapter.base is {self.base!r}, and nothing is frozen: add --adapt lora:16 or --train-only NAMES")
        for name in ("alpha", "rslora", "dropout", "targets"):  # without a rank they would be ignored, and all weights trained
            if not self.method and (found := getattr(self, name)) != getattr(AdapterConfig, name):
                raise UserError(f"adapter.{name} is {found!r}, and no adapter is asked for: add --adapt lora:16")

    @property
    def active(self) -> bool:
        return bool(self.method or self.train_only)

    @property
    def rank(self) -> int:
        """Of the adapters; 0: there are none."""
        return int(self.method.partition(":")[2] or RANK) if self.method else 0

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    @property
    def codes(self) -> str:
        """The scheme of frozen matrices that are codes; "" where they are numbers."""
        return "" if self.base in ("auto", "fp32", "bf16") else self.base
