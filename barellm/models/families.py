"""Families of decoders of Llama's kind: what each calls the options of `llama3.Config` in Hugging Face's folders, and which of
them it always has. A family is a row of FAMILIES (`hf_mapping.Family`); the first that holds a model is what it is exported as."""

from collections.abc import Mapping
from math import isclose, sqrt
from typing import Any

from barellm.config.fields import converted
from barellm.models.hf_mapping import Family, UnknownConfig, Windows

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3", "gemma2", "gemma3_text", "phi3", "granite", "arcee",
    "stablelm", "gpt_neox",
)  # fmt: skip

BIAS, QKV_BIAS = {False: "none", True: "all"}, {False: "none", True: "qkv"}
EVERYWHERE, SOMETIMES = Windows(4096, None), Windows(None, None)
OF_QWEN = Windows(4096, lambda c, i: i >= converted("max_window_layers", c.get("max_window_layers", 28), int), switch=True)
OF_SMOLLM3 = Windows(None, lambda c, i: str(i) in _nope_layers(c)["nope_layers"][1].split(","), switch=True)


def _positive(config: Mapping[str, Any], key: str, usual: float) -> Any:
    found = config.get(key, usual)
    if not converted(key, found, type(usual)) > 0:
        raise UnknownConfig(f"{key} is {found}, expected above 0")
    return found


def _gemma(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    scalar, width = _positive(config, "query_pre_attn_scalar", 256.0), _positive(config, "hidden_size", 2304)
    by = 0.0 if scalar == config.get("head_dim", 256) else scalar**-0.5
    return {"attention_multiplier": ("query_pre_attn_scalar", by), "embedding_multiplier": ("hidden_size", sqrt(width))}


def _sees_a_window(config: Mapping[str, Any], layer: int) -> bool:
    key = "sliding_window_pattern"
    return (layer + 1) % _positive(config, key if key in config else f"_{key}", 6) != 0


def _written_gemma(cfg: Any) -> dict[str, Any]:
    scalar = round(cfg.attention_multiplier**-2, 6) if cfg.attention_multiplier else cfg.head_size
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _no_gemma(cfg: Any) -> str | None:
    wanted = sqrt(cfg.d_model)
    if isclose(cfg.embedding_multiplier, wanted, rel_tol=1e-6):
        return None
    return f"model.embedding_multiplier is {cfg.embedding_multiplier}, a Gemma has the root of model.d_model, {wanted}"


def _nope_layers(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Our field for layers without RoPE (NoPE): SmolLM3's list has 1 for a layer with RoPE, 0 for one without."""
    key, layers, interval = "no_rope_layers", config.get("num_hidden_layers", 36), config.get("no_rope_layer_interval", 4)
    has_rope = config.get(key)
    if isinstance(layers, int) and layers > 1024:  # which Config refuses: a list of that length is not made
        return {}
    if has_rope is None and isinstance(layers, int) and isinstance(interval, int) and interval > 0:
        has_rope = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(has_rope, list) or len(has_rope) != layers or not all(n in (0, 1) for n in has_rope):
        raise UnknownConfig(f"{key} is {str(has_rope)[:60]}, expected 0 or 1 for each of {layers} layers")
    return {"nope_layers": (key, ",".join(str(i) for i, n in enumerate(has_rope) if not n))}


def _written_nope(cfg: Any) -> dict[str, Any]:
    without = {int(n) for n in cfg.nope_layers.split(",") if n.strip()}
    return {"no_rope_layers": [int(i not in without) for i in range(cfg.layers)]}


BIASES = {"attention_bias": ("attention_bias", False, BIAS)}
MLP_BIAS = {"mlp_bias": ("mlp_bias", False)}
POST_NORMS = {"attn_post_norm": ("post_attention_layernorm",), "mlp_post_norm": ("post_feedforward_layernorm",)}
GEMMA: dict[str, Any] = {
    "act": "gelu_pytorch_tanh", "act_key": "hidden_activation", "kv_heads": 4, "head_dim": 256, "words": BIASES, "read": _gemma,
    "block": {**POST_NORMS, "mlp_norm": ("pre_feedforward_layernorm",)}, "written": _written_gemma, "refused": _no_gemma,
    "also": ("attention_multiplier", "embedding_multiplier"), "kinds": {"use_bidirectional_attention": (False, None)},
}  # fmt: skip
GEMMA_SIZES = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
OF_GEMMA = {"norm_unit_offset": True, "norm_position": "both"}
CAPS = {"final_logit_softcapping": ("logits_softcap", 30.0), "attn_logit_softcapping": ("attention_softcap", 50.0)}
OLMO: dict[str, Any] = {
    "defaults": {"vocab_size": 50304, "rms_norm_eps": 1e-5}, "words": BIASES, "block": POST_NORMS,
    "fixed": {"qk_norm": "row", "norm_position": "post"},
}  # fmt: skip
QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}

FAMILIES = (
    Family(model_type="llama", class_name="LlamaForCausalLM", words=BIASES, sizes=MLP_BIAS),
    Family(
        model_type="mistral", class_name="MistralForCausalLM", kv_heads=8, windows=EVERYWHERE,
        defaults={"intermediate_size": 14336, "max_position_embeddings": 131072},
    ),
    Family(
        model_type="qwen2", class_name="Qwen2ForCausalLM", defaults=QWEN, fixed={"attention_bias": "qkv"}, kv_heads=32,
        windows=OF_QWEN,
    ),
    Family(
        model_type="qwen3", class_name="Qwen3ForCausalLM", defaults=QWEN, words=BIASES, fixed={"qk_norm": "head"},
        kv_heads=32, head_dim=128, windows=OF_QWEN,
    ),
    Family(
        model_type="smollm3", class_name="SmolLM3ForCausalLM", words=BIASES, sizes=MLP_BIAS, theta=2e6, kv_heads=4,
        defaults={
            "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
            "max_position_embeddings": 32768, "tie_word_embeddings": True,
        },
        read=_nope_layers, written=_written_nope, also=("nope_layers",), windows=OF_SMOLLM3,
    ),
    Family(model_type="olmo2", class_name="Olmo2ForCausalLM", **OLMO),
    Family(
        model_type="olmo3", class_name="Olmo3ForCausalLM", **OLMO, theta=5e5, local_theta=("", 5e5),
        windows=Windows(4096, lambda config, i: (i + 1) % 4 != 0),
    ),
    Family(
        model_type="gemma2", class_name="Gemma2ForCausalLM", fixed=OF_GEMMA, **GEMMA, optional=CAPS,
        defaults={**GEMMA_SIZES, "vocab_size": 256000, "max_position_embeddings": 8192},
        windows=Windows(4096, lambda config, i: i % 2 == 0),
    ),
    Family(
        model_type="gemma3_text", class_name="Gemma3ForCausalLM", fixed={**OF_GEMMA, "qk_norm": "head"}, **GEMMA, theta=1e6,
        defaults={**GEMMA_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072},
        optional={"final_logit_softcapping": ("logits_softcap", 0.0)}, local_theta=("rope_local_base_freq", 1e4),
        windows=Windows(4096, _sees_a_window),
    ),
    Family(
        model_type="phi3", class_name="Phi3ForCausalLM", partial=1.0, windows=SOMETIMES,
        defaults={
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        },
        rates=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        written=lambda cfg: {"original_max_position_embeddings": cfg.rope_old_seq} if cfg.rope_factor else {},
        block={"attn.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)},
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
