"""Small random Llamas of transformers', saved as folders, and what they say: logits, loss, gradients by our names, greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from barellm.config import ModelConfig
from barellm.interop import huggingface
from barellm.models import decoders
from barellm.models.families import FAMILIES

LLAMA = decoders.of_family(FAMILIES[0])
LLAMA_3_1 = {  # as a Llama-3.1's, but with an old length that these short texts exceed
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPES: dict[str, dict[str, Any]] = {  # what differs from SIZES, all in their words
    "grouped": {},
    "untied and stretched": {"tie_word_embeddings": False, "rope_parameters": LLAMA_3_1, "max_position_embeddings": 64},
    "odd heads": {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 30, "intermediate_size": 21},
    "plain attention": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24, "rms_norm_eps": 1e-3},
    "one of each": {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 2,
        "intermediate_size": 1,
        "vocab_size": 5,
    },
}
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def made(*, dtype=torch.float32, seed: int = 0, **sizes: Any):
    """A LlamaForCausalLM whose every tensor is random, norms too."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES | sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype=dtype)  # pyright: ignore[reportArgumentType]


def saved(folder: Path, *, shards: bool = False, **more: Any):
    """The model, whose folder transformers wrote."""
    model = made(**more)
    model.save_pretrained(folder, max_shard_size="10KB" if shards else "1GB")
    return model


def outcome(model, cfg: ModelConfig, tokens, targets, *, autocast: bool = False) -> dict[str, np.ndarray]:
    """Logits, the mean loss over valid targets, and each gradient by our names."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(torch.as_tensor(tokens, dtype=torch.long)).logits
    logits = logits.float() if autocast else logits
    flat = torch.as_tensor(targets, dtype=torch.long).reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-1)
    loss.backward()
    theirs = {name.removeprefix(LLAMA.prefix): p.grad.numpy() for name, p in model.named_parameters()}
    found: dict[str, list[np.ndarray]] = {}
    for part in huggingface.parts(LLAMA, cfg, huggingface.parameters(cfg)):
        found.setdefault(f"{part.ours}.grad", []).append(theirs[part.name])
    gradients = {name: np.concatenate(parts) for name, parts in found.items()}
    return {"logits": logits.detach().numpy(), "loss": np.array([loss.item()])} | gradients


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The text that its own generate, with its own cache, goes on with."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()
