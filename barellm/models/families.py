"""Families of decoders of Llama's kind: what each calls the options of `llama3.Config` in Hugging Face's folders, and which of
them it always has. A family is a row of FAMILIES (`hf_mapping.Family`); the first that holds a model is what it is exported as."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from barellm.models.hf_mapping import Family, UnknownConfig

NAMES = ("llama", "qwen2", "qwen3", "smollm3", "olmo2", "granite", "arcee", "stablelm", "gpt_neox")

BIAS, QKV_BIAS = {False: "none", True: "all"}, {False: "none", True: "qkv"}
WINDOWS = {"use_sliding_window": (False,)}  # values that our model can be


def _nope_layers(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """SmolLM3's list has 1 for a layer that has RoPE and 0 for one that has none."""
    key, layers, every = "no_rope_layers", config.get("num_hidden_layers", 36), config.get("no_rope_layer_interval", 4)
    each = config.get(key)
    if isinstance(layers, int) and layers > 1024:  # which Config refuses: a list of that length is not made
        return {}
    if each is None and isinstance(layers, int) and isinstance(every, int) and every > 0:
        each = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(each, list) or len(each) != layers or not all(n in (0, 1) for n in each):
        raise UnknownConfig(f"{key} is {str(each)[:60]}, expected 0 or 1 for each of {layers} layers")
    return {"nope_layers": (key, ",".join(str(i) for i, n in enumerate(each) if not n))}


def _written_nope(cfg: Any) -> dict[str, Any]:
    without = {int(n) for n in cfg.nope_layers.split(",") if n.strip()}
    return {"no_rope_layers": [int(i not in without) for i in range(cfg.layers)]}


BIASES = {"attention_bias": ("attention_bias", False, BIAS)}
MLP_BIAS = {"mlp_bias": ("mlp_bias", False)}
QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}

FAMILIES = (
    Family(model_type="llama", class_name="LlamaForCausalLM", words=BIASES, sizes=MLP_BIAS),
    Family(
        model_type="qwen2", class_name="Qwen2ForCausalLM", defaults=QWEN, fixed={"attention_bias": "qkv"}, kinds=WINDOWS,
        kv_heads=32,
    ),
    Family(
        model_type="qwen3", class_name="Qwen3ForCausalLM", defaults=QWEN, words=BIASES, fixed={"qk_norm": "head"},
        kinds=WINDOWS, kv_heads=32, head_dim=128,
    ),
    Family(
        model_type="smollm3", class_name="SmolLM3ForCausalLM", words=BIASES, sizes=MLP_BIAS, kinds=WINDOWS, theta=2e6, kv_heads=4,
        defaults={
            "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
            "max_position_embeddings": 32768, "tie_word_embeddings": True,
        },
        read=_nope_layers, written=_written_nope, also=("nope_layers",),
    ),
    Family(
        model_type="olmo2", class_name="Olmo2ForCausalLM", defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5}, words=BIASES,
        fixed={"qk_norm": "row", "norm_position": "post"},
        block={"attn_post_norm": ("post_attention_layernorm",), "mlp_post_norm": ("post_feedforward_layernorm",)},
    ),
    Family(
        model_type="granite", class_name="GraniteForCausalLM", words=BIASES,
        sizes={
            **MLP_BIAS,
            **{f"{name}_multiplier": (f"{name}_multiplier", 1.0) for name in ("embedding", "residual", "attention")},
            "logits_scaling": ("logits_scaling", 1.0),
        },
        written=lambda cfg: {"attention_multiplier": cfg.attention_multiplier or 1 / sqrt(cfg.head_size)},
    ),
    Family(
        model_type="arcee", class_name="ArceeForCausalLM", words=BIASES, sizes=MLP_BIAS, act="relu2", fixed={"mlp": "plain"},
        defaults={"hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    Family(
        model_type="stablelm", class_name="StableLmForCausalLM", fixed={"norm": "layer"}, kv_heads=32, own_head=False, partial=0.25,
        defaults={"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "max_position_embeddings": 4096},
        sizes={"layer_norm_eps": ("norm_eps", 1e-5)}, words={"use_qkv_bias": ("attention_bias", False, QKV_BIAS)},
        kinds={"use_parallel_residual": (False,), "qk_layernorm": (False,)}, rates=("attention_dropout", "hidden_dropout"),
    ),
    Family(
        model_type="gpt_neox", class_name="GPTNeoXForCausalLM", prefix="gpt_neox.", act="gelu", own_head=False, partial=0.25,
        defaults={
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
            "intermediate_size": 24576,
        },
        sizes={"layer_norm_eps": ("norm_eps", 1e-5), "use_parallel_residual": ("parallel_residual", True)},
        words={"attention_bias": ("attention_bias", True, BIAS)}, rates=("attention_dropout", "hidden_dropout"),
        fixed={"norm": "layer", "mlp": "plain", "mlp_bias": True},
        block={
            "attn.qkv": ("attention.query_key_value",), "attn.proj": ("attention.dense",),
            "mlp.up": ("mlp.dense_h_to_4h",), "mlp.down": ("mlp.dense_4h_to_h",),
        },
        others={"wte": "embed_in.weight", "norm": "final_layer_norm", "head": "embed_out.weight"},
        old_rope={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        written=lambda cfg: {"rotary_emb_base": cfg.rope_theta, "rotary_pct": cfg.rotary_fraction},
    ),
)  # fmt: skip
