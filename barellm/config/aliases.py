"""Aliases of configuration keys, options, values and presets: names of older versions, and of nanoGPT, llm.c, torchtitan and
transformers. A new name for a key of a run needs its old one in RENAMED, so that saved configurations load."""

import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# The key of an older version -> the key. Files that a run has saved load without a word, who types one is told once.
RENAMED = {
    "model.channels": "model.d_model", "model.hidden": "model.d_ff", "model.cooldown": "model.decay_fraction",
    "optim.cooldown": "optim.decay_fraction", "optim.iteration": "optim.orthogonalization", "optim.turns": "optim.ns_steps",
    "train.accumulate": "train.gradient_accumulation_steps", "train.batch": "train.micro_batch_size",
    "train.grace": "train.signal_grace_period", "train.keep": "train.save_total_limit", "train.matmul": "train.gemm_backend",
    "train.milestones": "train.keep_every", "train.ramp_from": "train.batch_rampup_from",
    "train.ramp_tokens": "train.batch_rampup_tokens", "train.ranges": "train.exponent_stats",
}  # fmt: skip
# Likewise for options of commands and arguments of functions.
RENAMED_OPTIONS = {
    "link": "interconnect", "matmul": "gemm_backend", "product": "gemm", "ranges": "exponent_stats",
    "repetition": "repetition_penalty", "tokens": "max_new_tokens", "utilisation": "mfu",
}  # fmt: skip
# Key -> other spellings of its values.
VALUES = {
    "optim.schedule": {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
    "optim.step_scale": {"original": "jordan", "match_rms_adamw": "moonshot"},
    "train.init_from": {"scratch": ""},
    "train.gemm_backend": {"own": "barellm"},
    "train.dtype": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
}
PRESETS = {
    "gpt2": "gpt2-124m", "gpt2-small": "gpt2-124m", "gpt2-medium": "gpt2-350m", "gpt2-large": "gpt2-774m", "gpt2-xl": "gpt2-1558m",
}  # fmt: skip
FORMATS = {"hf": "huggingface", "safetensors": "huggingface", "llama.cpp": "gguf", "llm.c": "llmc"}

# Keys as other trainers call them.
_KEYS = {
    "adapter.alpha": "lora_alpha", "adapter.dropout": "lora_dropout", "adapter.rslora": "use_rslora",
    "adapter.targets": "target_modules lora_target_modules",
    "model.d_ff": "d_ff intermediate_size ffn_hidden_size n_inner", "model.d_model": "n_embd hidden_size dim embed_dim n_embed",
    "model.dropout": "dropout", "model.head_dim": "head_dim", "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads n_kv_head num_key_value_heads",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.max_seq": "max_seq max_seq_len n_positions n_ctx context_length max_position_embeddings",
    "model.norm_eps": "rms_norm_eps layer_norm_eps", "model.padded_vocab": "padded_vocab_size", "model.rope_theta": "rope_theta",
    "model.tied": "tie_word_embeddings", "model.vocab_size": "vocab_size", "optim.beta1": "beta1 adam_beta1",
    "optim.beta2": "beta2 adam_beta2", "optim.clip": "grad_clip max_grad_norm gradient_clip_val",
    "optim.decay_fraction": "decay_fraction warmdown_ratio", "optim.eps": "adam_epsilon", "optim.lr": "learning_rate max_lr",
    "optim.min_lr": "min_lr", "optim.ns_steps": "ns_steps", "optim.orthogonalization": "orthogonalization",
    "optim.schedule": "lr_scheduler_type", "optim.step_scale": "adjust_lr_fn", "optim.warmup": "warmup_steps warmup_iters",
    "data.source": "dataset data_path data_dir dataset_name dataset_path train_file",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "train.checkpoint_every": "save_steps save_every save_interval checkpoint_interval",
    "train.eval_every": "eval_interval eval_steps val_loss_every", "train.eval_tokens": "eval_tokens",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs", "train.exponent_stats": "exponent_stats",
    "train.gradient_accumulation_steps": "grad_accum_steps accumulate_grad_batches", "train.init_from": "model_name_or_path",
    "train.early_stopping": "early_stopping_patience patience", "train.keep_best": "save_best load_best_model_at_end",
    "train.keep_every": "keep_every",
    "train.micro_batch_size": "micro_batch_size batch_size per_device_train_batch_size device_batch_size local_batch_size",
    "train.recompute": "activation_checkpointing gradient_checkpointing", "train.save_total_limit": "save_total_limit",
    "train.seq": "block_size model_max_length seq_len sequence_length max_seq_length max_length",
    "train.signal_grace_period": "signal_grace_period",
    "train.steps": "max_iters max_steps num_iterations train_iters training_steps", "train.tf32": "tf32",
    "train.track": "report_to",
}  # fmt: skip
KEYS = {name: key for key, names in _KEYS.items() for name in names.split()}

# Options of commands, by their names elsewhere; of several options the first that the command has.
OPTIONS = {
    "batch_size": "batch", "max_length": "max_new_tokens", "n_samples": "samples", "nproc_per_node": "ranks",
    "num_return_sequences": "samples", "num_samples": "samples", "out_dir": "out", "output_dir": "out",
    "per_device_eval_batch_size": "batch", "start": "prompt", "torch_dtype": "dtype",
    "ctx_size": "context", "max_model_len": "context", "max_num_seqs": "slots", "parallel": "slots",
}  # fmt: skip
# What no option takes as it is -> what does it here. A name with a tail, as fsdp_config, is found by what stands before it.
INSTEAD = {
    "bf16": "--dtype bf16", "fp16": "--dtype fp16", "fp32": "--dtype fp32",
    "api_key": "--api-key-env NAME or --api-key-file FILE, since others can read a command line",
    "served_model_name": "NAME=RUN",
    "always_save_checkpoint": "--checkpoint-every N", "lr_decay_iters": "--steps N, where the schedule ends",
    "assistant_only_loss": "no need for it: of messages the assistant's alone have a loss",
    "completion_only_loss": "no need for it: answers have a loss, prompts have none",
    "compile": "no need for it: every kernel is compiled", "torch_compile": "no need for it: every kernel is compiled",
    "use_dora": "no DoRA: --adapt lora:RANK is LoRA, --adapter.rslora its other scale", "r": "--adapt lora:RANK",
    "adapter.rank": "--adapt lora:RANK", "modules_to_save": "--train-only NAMES, without adapters",
    "config_file": "--config FILE", "dataset_text_field": "prepare --field NAME, which makes shards of the texts",
    "ddp": "--ranks N, data-parallel training with N processes",
    "deepspeed": "--ranks N, whose processes share the optimizer's state (ZeRO-1)",
    "do_sample": "--temperature T, where 0 always takes the most likely token",
    "eval_iters": "--train.eval_tokens N: eval_iters x batch size x sequence length", "eval_strategy": "--eval-every N",
    "evaluation_strategy": "--eval-every N", "flash_attention": "no need for it: attention never stores its scores",
    "fsdp": "--ranks N, whose processes share the optimizer's state (ZeRO-1)",
    "group_by_length": "no need for it: examples are packed into sequences", "load_in_4bit": "--weights int4 or nf4",
    "load_in_8bit": "--weights int8", "log_interval": "no need for it: metrics.jsonl has every step",
    "logging_steps": "no need for it: metrics.jsonl has every step", "lora": "--adapt lora:RANK",
    "model_name_or_path": "the model as CHECKPOINT, without an option",
    "n_gpu": "--device cuda, and --ranks N for several processes",
    "num_beams": "no beam search: --temperature, --top-k, --top-p and --min-p choose tokens",
    "overwrite_output_dir": "a new --out for each run", "packing": "no need for it: examples are packed into sequences",
    "resume_from_checkpoint": "--resume with --out RUN", "save_strategy": "--checkpoint-every N",
    "total_batch_size": "--batch N and --gradient-accumulation-steps N, whose product it is, in sequences",
    "global_batch_size": "--batch N and --gradient-accumulation-steps N, whose product it is, in sequences",
    "use_cpu": "--device cpu", "no_cuda": "--device cpu", "backend": "--ranks N", "eval_only": "barellm eval RUN",
    "use_peft": "--adapt lora:RANK", "decay_lr": "--schedule constant or cosine", "val_size": "--data.val_fraction F",
    "eval_size": "--data.val_fraction F", "wandb": "--train.track wandb", "warmup_ratio": "--warmup N, which counts steps",
}  # fmt: skip
FROZEN = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}  # in commands that train


def renamed(names: Iterable[str]) -> str:
    """One line about names of older versions, or ""."""
    table = RENAMED | RENAMED_OPTIONS
    found = ", ".join(f"{name} is now {table[name]}" for name in dict.fromkeys(names) if name in table)
    return found and f"{found}: the old name still works, for now"


def aliases_of(options: Iterable[str]) -> dict[str, str]:
    """{accepted other spelling: option} for a command that has these options."""
    known = dict.fromkeys(options)
    spelled = {option.lstrip("-").replace("-", "_"): option for option in known if option.startswith("--")}
    names = {name: spelled[name] for name in spelled}
    for table in (RENAMED, KEYS, RENAMED_OPTIONS, OPTIONS):
        for name, target in table.items():
            if target in spelled:
                names.setdefault(name, spelled[target])
    spellings = {f"--{spelling}": option for name, option in names.items() for spelling in (name, name.replace("_", "-"))}
    return {alias: option for alias, option in spellings.items() if alias not in known}


def instead(option: str, known: Iterable[str] = ("--adapter.base",)) -> str:
    """What does, in a command with the options `known` (default: train), what an option of another program does there, or ""."""
    name = option.lstrip("-").replace("-", "_")
    if name in FROZEN and "--adapter.base" in known:
        return f"--adapter.base {FROZEN[name]}, with --adapt lora:RANK"
    return INSTEAD.get(name) or INSTEAD.get(name.partition("_")[0], "")


def accepts_old_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: accept keyword arguments by their old names, with a FutureWarning."""

    @wraps(function)
    def renaming(*args: P.args, **named: P.kwargs) -> R:
        if line := renamed(named):
            warnings.warn(line, FutureWarning, stacklevel=2)
            named = {RENAMED_OPTIONS.get(name, name): value for name, value in named.items()}  # pyright: ignore
        return function(*args, **named)

    return renaming
