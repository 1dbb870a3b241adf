# Made by docs/options_page.py from the configuration.
# fmt: off
# ruff: noqa: UP013
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from barellm import kernels as kernels
from barellm.api import Model as Model
from barellm.api import load as load
from barellm.config import Config
from barellm.runs import Run as Run
from barellm.runs import Step as Step

__version__: str

OptimKeys = TypedDict("OptimKeys", {
    "name": str, "lr": float, "min_lr": float, "warmup": int, "schedule": str, "decay_fraction": float, "beta1": float,
    "beta2": float, "eps": float, "weight_decay": float, "clip": float, "skip_loss_z": float, "skip_norm_z": float,
    "moments": str, "muon_lr": float, "muon_lr_ratio": float, "powersgd": int, "overlap": bool, "momentum": float,
    "momentum_start": float, "momentum_warmup": int, "momentum_cooldown": int, "orthogonalization": str, "ns_steps": int,
    "step_scale": str, "cautious": bool, "normuon": float,
}, total=False)

DataKeys = TypedDict("DataKeys", {
    "source": str, "tokenizer": str, "bpe_vocab": int, "val_fraction": float, "order": str, "document_mask": str,
    "span_shards": bool,
}, total=False)

TrainKeys = TypedDict("TrainKeys", {
    "micro_batch_size": int, "seq": int, "gradient_accumulation_steps": int, "batch_rampup_from": int, "batch_rampup_tokens": int,
    "steps": int, "epochs": float, "minutes": float, "overfit": int, "eval_every": int, "eval_tokens": int, "eval_from": str,
    "eval_seq": int, "sample_every": int, "exponent_stats": int, "early_stopping": int, "keep_best": bool, "hellaswag": str,
    "hellaswag_every": int, "checkpoint_every": int, "save_total_limit": int, "keep_every": int, "signal_grace_period": float,
    "seed": int, "track": str, "init_from": str, "dtype": str, "branch_scales": bool, "matmul_formats": str, "exponent_bias": str,
    "stochastic_rounding": str, "recompute": bool, "gemm_backend": str, "tf32": bool,
}, total=False)

AdapterKeys = TypedDict("AdapterKeys", {
    "method": str, "alpha": float, "rslora": bool, "dropout": float, "targets": str, "base": str, "train_only": str,
}, total=False)

def train(
    config: str | Config | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    callbacks: Iterable[Callable[[Step], object]] = (),
    quiet: bool = False,
    model: Mapping[str, object] = ...,
    optim: OptimKeys = ...,
    train: TrainKeys = ...,
    adapter: AdapterKeys = ...,
    layers: int = ..., heads: int = ..., d_model: int = ..., data: str | Path | DataKeys = ..., tokenizer: str | Path = ...,
    steps: int = ..., epochs: float = ..., batch: int = ..., gradient_accumulation_steps: int = ..., seq: int = ...,
    seed: int = ..., minutes: float = ..., overfit: int = ..., init_from: str | Path = ..., dtype: str = ...,
    recompute: bool = ..., gemm_backend: str = ..., eval_every: int = ..., sample_every: int = ..., checkpoint_every: int = ...,
    optimizer: str = ..., lr: float = ..., schedule: str = ..., warmup: int = ..., weight_decay: float = ..., adapt: str = ...,
    train_only: str = ...,
) -> Run: ...
