"""What reading and writing llama.cpp's files (GGUF) share: architectures, keys, kinds of tokens, names and rows of tensors. The
package `gguf` (extra "gguf") knows the layout and llama.cpp's names."""

from importlib import import_module
from typing import Any

import numpy as np

from barellm.errors import UserError
from barellm.interop.huggingface import Part

MODEL_TYPES = {  # general.architecture -> Hugging Face's model_type
    "gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3", "olmo2": "olmo2", "arcee": "arcee",
    "granite": "granite", "stablelm": "stablelm", "gptneox": "gpt_neox", "phi3": "phi3", "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}  # fmt: skip
ARCHITECTURES = {model_type: name for name, model_type in MODEL_TYPES.items()} | {"mistral": "llama"}
# Whose rows of a head lie there in the pairs that RoPE rotates.
PAIRED = ("llama", "mistral", "granite", "smollm3", "arcee")
SIZES = {  # Hugging Face's key -> the file's, behind the architecture
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count", "hidden_size": "embedding_length",
    "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "head_dim": "attention.key_length", "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa", "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "n_layer": "block_count", "n_head": "attention.head_count", "n_embd": "embedding_length", "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}  # fmt: skip
LLAMA_3_WORDS = (  # its rule for words, as Meta published it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_WORDS = LLAMA_3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
PLAIN, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens


def package(needs: str = "--format gguf needs") -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError:
        raise UserError(f"{needs} the package gguf: pip install gguf") from None


def name_of(names: Any, known: Any, part: Part) -> str:
    """llama.cpp's name of a tensor, by the package's table `names`."""
    theirs = part.name if part.name == known.head else known.prefix + part.name
    found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    assert found is not None, theirs
    return found


def row_order(known: Any, model: Any, name: str) -> np.ndarray | None:
    """Where the rows of Hugging Face's tensor lie in the file's; None: in the same order."""
    kind = name.rsplit(".", 2)[-2]
    if kind == "query_key_value":  # there q, k and v of each head, here all q, all k, all v
        return np.arange(3 * model.heads * model.head_size).reshape(3, model.heads, -1).swapaxes(0, 1).ravel()
    heads = {"q_proj": getattr(model, "heads", 0), "k_proj": getattr(model, "kv_heads", 0)}.get(kind, 0)
    if not heads or known.model_type not in PAIRED:
        return None
    return np.arange(heads * model.head_size).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
