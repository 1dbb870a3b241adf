"""Decoders of Llama's kind (`models/families.py`) in Hugging Face's format: config.json with its variants of RoPE keys, tensor
names, and q and k rows permuted for rotate-half RoPE."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from math import log
from types import ModuleType
from typing import Any

from barellm import models
from barellm.config import ModelConfig
from barellm.config.fields import converted
from barellm.models.hf_mapping import Family, HuggingFace, UnknownConfig

SIZES = {  # key -> our field, and what transformers takes where the key is missing
    "num_hidden_layers": ("layers", 32), "num_attention_heads": ("heads", 32), "hidden_size": ("d_model", 4096),
    "intermediate_size": ("d_ff", 11008), "vocab_size": ("vocab_size", 32000), "max_position_embeddings": ("max_seq", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6), "tie_word_embeddings": ("tied", False),
}  # fmt: skip
ACTIVATIONS = {  # theirs -> ours; of two names of one formula the first is written
    "silu": "silu", "swish": "silu", "gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip
BLOCK = {  # our name in a block -> theirs, from the first row to the last
    "attn_norm": ("input_layernorm",), "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q": ("self_attn.q_proj",), "attn.k": ("self_attn.k_proj",), "attn.v": ("self_attn.v_proj",),
    "attn.q_norm": ("self_attn.q_norm",), "attn.k_norm": ("self_attn.k_norm",), "attn.proj": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",), "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.up": ("mlp.up_proj",),
    "mlp.down": ("mlp.down_proj",),
}  # fmt: skip
OTHERS = {"wte": "embed_tokens.weight", "norm": "norm", "head": "lm_head.weight"}
BUFFERS = r"(layers\.\d+\.(self_attn|attention)\.)?(rotary_emb\.inv_freq|bias|masked_bias)$"  # of older versions
# Our fields that config.json says in `rope_scaling` and its like, and the width of a head.
ROPE = (
    "kv_heads", "rope_theta", "rope_factor", "rope_low", "rope_high", "rope_old_seq", "rope_type", "rope_attention_factor",
    "rope_truncate", "rope_short", "rope_long", "head_dim",
)  # fmt: skip
KINDS = ("full_attention", "sliding_attention")  # of layers
KEYS = ("rope_theta", "partial_rotary_factor")  # which lie beside it in earlier versions
# Key beside a rope_type -> our field.
NEEDED = {key: {"factor": "rope_factor"} for key in ("linear", "dynamic", "llama3", "yarn", "longrope")}
NEEDED["llama3"] = {"factor": "rope_factor", "low_freq_factor": "rope_low", "high_freq_factor": "rope_high"}


def _rope(config: Mapping[str, Any], f: Family) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Read the RoPE keys: (the key they are under, for messages; keys of global layers; keys of sliding-window layers). Both dicts
    contain `rope_theta`. Newer transformers keep everything in `rope_parameters`, by layer type where the types differ; older ones
    have `rope_scaling`, and theta at the top level. Where somebody has added that to a new file, it counts, as in transformers."""
    first = ("rope_scaling", "rope_parameters") if f.local_theta is None else ("rope_parameters", "rope_scaling")
    where = next((key for key in first if config.get(key) not in (None, {})), "rope_scaling")
    rope, local, added = config.get(where) or {}, {}, {}
    if not isinstance(rope, dict):
        raise UnknownConfig(f"{where} is {rope!r}, expected keys with values, or null")
    if f.local_theta is not None and where == "rope_parameters":
        rope, local = (rope.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
        added = config.get("rope_scaling") or {}
        if not all(isinstance(found, dict) for found in (rope, local, added)):
            raise UnknownConfig(f"{where} is {str(config[where])[:60]}, expected keys with values for each kind of layers")
    top_level = {key: config[name] for key in KEYS for name in (key, f.old_rope.get(key, key)) if name in config}
    key, theta = f.local_theta or ("", 0.0)
    return where, {"rope_theta": f.theta, **top_level, **rope, **added}, {"rope_theta": config.get(key, theta), **local}


def _scaling(where: str, rope: Mapping[str, Any], config: Mapping[str, Any], most: int) -> dict[str, tuple[str, Any]]:
    """Our fields for scaled RoPE as {field: (key for messages, value)}; {} for unscaled. `where`: the key that holds `rope`;
    `most`: max_position_embeddings."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" or (kind == "yarn" and "short_factor" in rope) else kind  # Phi-3's names of it
    if kind == "default":
        return {}
    if not isinstance(kind, str) or kind not in NEEDED:
        raise UnknownConfig(f"{where}.rope_type is {kind!r}, expected 'default' or {' or '.join(map(repr, NEEDED))}")
    # The old length may stand beside `rope` or in it, else it is `most`; the methods linear and dynamic have no other.
    old_seq = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", most))
    old_seq = most if kind in ("linear", "dynamic") else old_seq
    factor, old_key = rope.get("factor"), f"{where}.original_max_position_embeddings"
    number = partial(converted, kind=float)
    positions = number("max_position_embeddings", most)
    if factor is None and kind in ("yarn", "longrope") and isinstance(old_seq, int) and old_seq > 0:
        rope = {**rope, "factor": positions / number(old_key, old_seq)}
    found: dict[str, Any] = {"rope_type": (f"{where}.rope_type", kind), "rope_old_seq": (old_key, old_seq)}
    found |= {ours: (f"{where}.{key}", rope.get(key)) for key, ours in NEEDED[kind].items()}
    if kind == "dynamic":  # its frequencies change beyond the file's positions alone
        found["max_seq"] = ("max_position_embeddings", int(min(positions * number(f"{where}.factor", factor), 2.0**62)))
    if kind == "yarn":
        found["rope_low"] = (f"{where}.beta_slow", rope.get("beta_slow") or 1.0)
        found["rope_high"] = (f"{where}.beta_fast", rope.get("beta_fast") or 32.0)
        found["rope_truncate"] = (f"{where}.truncate", rope.get("truncate", True))
    if kind in ("yarn", "longrope"):
        multiplier = rope.get("attention_factor")
        scales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
        # The file's attention_factor comes first; then DeepSeek's mscale and mscale_all_dim, as a quotient; else 0: by the formula.
        if multiplier is None and kind == "yarn" and all(scales):
            numerator, denominator = (0.1 * number(where, m) * log(max(1.0, number(where, rope["factor"]))) + 1 for m in scales)
            multiplier = numerator / (denominator or 1.0)
        found["rope_attention_factor"] = (f"{where}.attention_factor", 0.0 if multiplier is None else multiplier)
    if kind == "longrope":
        for key, ours in (("short_factor", "rope_short"), ("long_factor", "rope_long")):
            factors = rope.get(key)
            if not isinstance(factors, list):
                raise UnknownConfig(f"{where}.{key} is {str(factors)[:40]}, expected a list of numbers")
            found[ours] = (f"{where}.{key}", ",".join(str(number(f"{where}.{key}", n)) for n in factors))
    return found


def _written_rope(cfg: Any) -> dict[str, Any]:
    """RoPE keys for config.json: `rope_theta` and `rope_scaling`, which every version of transformers reads."""
    keys: dict[str, Any] = {"rope_theta": cfg.rope_theta, "rope_scaling": None}
    if not cfg.rope_factor:
        return keys
    scaling = {"rope_type": cfg.rope_type, **{key: getattr(cfg, ours) for key, ours in NEEDED[cfg.rope_type].items()}}
    if cfg.rope_type == "dynamic":
        keys["max_position_embeddings"] = cfg.rope_old_seq
    elif cfg.rope_type != "linear":
        scaling["original_max_position_embeddings"] = cfg.rope_old_seq
    if cfg.rope_type == "yarn":
        scaling |= {"beta_slow": cfg.rope_low, "beta_fast": cfg.rope_high, "truncate": cfg.rope_truncate}
    if cfg.rope_type == "longrope":
        scaling |= {
            key: [float(n) for n in text.split(",")]
            for key, text in (("short_factor", cfg.rope_short), ("long_factor", cfg.rope_long))
        }
    if cfg.rope_type in ("yarn", "longrope") and cfg.rope_attention_factor:
        scaling["attention_factor"] = cfg.rope_attention_factor
    return {**keys, "rope_scaling": scaling}


def _windows(f: Family, config: Mapping[str, Any], layers: int) -> dict[str, tuple[str, Any]]:
    """Our fields for sliding-window attention as {field: (key for messages, value)}; {} if no layer has a window. `layers`: the
    family's default number of layers."""
    rule = f.windows
    if rule is None or (rule.switch and not config.get("use_sliding_window", False)):
        return {}
    window = config.get("sliding_window", rule.usual)
    if window is None and f.local_theta is None:
        return {}
    found = {"sliding_window": ("sliding_window", window)}
    # Which layers: `layer_types` where the file has it, else the family's rule (`rule.has`), else all.
    count = config.get("num_hidden_layers", layers)
    if rule.has is None or not isinstance(count, int) or count > 1024:  # which Config refuses: a list of that length is not made
        return found
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [KINDS[rule.has(config, i)] for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in KINDS for kind in kinds):
        raise UnknownConfig(f"layer_types is {str(kinds)[:60]}, expected {' or '.join(KINDS)} for each of {count} layers")
    windowed = [str(i) for i, kind in enumerate(kinds) if kind == KINDS[1]]
    if not windowed:
        return {}
    found["window_layers"] = ("layer_types", "" if len(windowed) == count else ",".join(windowed))  # "": all
    return found


def _written_windows(f: Family, cfg: Any) -> dict[str, Any]:
    if f.windows is None:
        return {}
    has = [bool(cfg.window_of(i)) for i in range(cfg.layers)]
    found: dict[str, Any] = {"sliding_window": cfg.sliding_window or (f.local_theta and f.windows.usual)}
    found |= {"layer_types": [KINDS[one] for one in has]} if f.windows.has else {}
    switch = {"use_sliding_window": any(has), "max_window_layers": has.index(True) if any(has) else cfg.layers}
    return {**found, **(switch if f.windows.switch else {})}


def _halves(cfg: Any) -> list[int]:
    """Where our columns of a head lie in theirs, which begins with the part that turns: both of its halves, then the rest."""
    R, D = cfg.rotated, cfg.head_size
    middle = (R + D) // 2
    return [*range(R // 2), *range(R, middle), *range(R // 2, R), *range(middle, D)]


def _order(cfg: Any, ours: str, theirs: str) -> list[int] | None:
    """Row permutation of a q, k or v tensor: row i of ours is row order[i] of Hugging Face's; None if the order is the same."""
    kind, D = theirs.rsplit(".", 2)[-2], cfg.head_size
    if kind == "qkv_proj" and cfg.rotated < D:
        first = cfg.heads + cfg.kv_heads
        return [head * D + row for head in range(first) for row in _halves(cfg)] + list(range(first * D, sum(cfg.qkv_widths)))
    if kind == "query_key_value":  # of each head its q, its k and its v
        halves = _halves(cfg)
        return [
            (3 * head + part) * D + row
            for part, rows in enumerate((halves, halves, range(D))) for head in range(cfg.heads) for row in rows
        ]  # fmt: skip
    heads = {"q_proj": cfg.heads, "k_proj": cfg.kv_heads, "q_norm": cfg.heads, "k_norm": cfg.kv_heads}.get(kind, 0)
    if not heads or cfg.rotated == D:
        return None
    norms = 1 if kind.endswith("norm") and cfg.qk_norm == "head" else heads
    return [head * D + row for head in range(norms) for row in _halves(cfg)]


def of_family(f: Family) -> HuggingFace:
    """The `HuggingFace` description of a family: its config.json keys, how they are read and written, and its tensor names."""
    sizes = {key: (name, f.defaults.get(key, usual)) for key, (name, usual) in SIZES.items()} | dict(f.sizes)
    if "layer_norm_eps" in sizes:
        del sizes["rms_norm_eps"]
    words = {f.act_key: ("activation", f.act, ACTIVATIONS), **f.words}
    others = {**OTHERS, **f.others}
    return HuggingFace(
        preset=f.preset, model_type=f.model_type, class_name=f.class_name, sizes=sizes, words=words, fixed=f.fixed, kinds=f.kinds,
        derived={}, rates=f.rates, prefix=f.prefix, head=others["head"], tied=lambda cfg: "wte" if cfg.tied else None,
        parts=partial(_parts, {**BLOCK, **f.block}, others), transposed=lambda ours: False,
        ignored=lambda theirs: re.match(BUFFERS, theirs) is not None, refused=partial(_refused, f, sizes, words),
        order=_order, read=partial(_read, f, sizes), written=partial(_written, f),
    )  # fmt: skip


def _parts(block: Mapping[str, Sequence[str]], others: Mapping[str, str], cfg: Any, ours: str) -> dict[str, int]:
    """{tensor name there: its number of rows, 0 for all} of our parameter `ours`. `block`, `others`: as BLOCK and OTHERS."""
    if ours in ("wte", "head"):
        return {others[ours]: 0}
    name, _, suffix = ours.rpartition(".")
    if name == "norm":
        return {f"{others['norm']}.{suffix}": 0}
    _, layer, name = name.split(".", 2)
    rows = {"attn.qkv": cfg.qkv_widths, "mlp.gate_up": (cfg.d_ff, cfg.d_ff)}.get(name, (0,))
    names = block[name]
    return {f"layers.{layer}.{part}.{suffix}": n for part, n in zip(names, rows if names[1:] else (0,), strict=True)}


def _read(f: Family, sizes: Mapping[str, tuple[str, Any]], config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Our fields as {field: (key for messages, value)} of the keys that need more than a row of `sizes` (as SIZES)."""

    def size(key: str) -> Any:
        return config.get(key, sizes[key][1])

    where, rope, local = _rope(config, f)
    old_key = "original_max_position_embeddings"
    if old_key in f.defaults:
        config = {old_key: f.defaults[old_key], **config}
    # Heads.
    heads, width = size("num_attention_heads"), size("hidden_size")
    head_dim, kv_heads = config.get("head_dim", f.head_dim), config.get("num_key_value_heads", f.kv_heads)
    found = {"kv_heads": ("num_key_value_heads", heads if kv_heads is None else kv_heads)}
    known_sizes = all(isinstance(n, int) for n in (head_dim, heads, width))
    if head_dim is not None and f.own_head and not (known_sizes and heads > 0 and head_dim * heads == width):
        found["head_dim"] = ("head_dim", head_dim)
    # RoPE: of all layers, of those with a window, and of a part of a head.
    inside = "rope_theta" in (config.get(where) or {})
    found["rope_theta"] = (f"{where}.rope_theta" if inside else "rope_theta", rope["rope_theta"])
    found |= _scaling(where, rope, config, size("max_position_embeddings"))
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if f.local_theta and (scaled or local["rope_theta"] != rope["rope_theta"]) and local != rope:
        if local.get("rope_type", "default") != "default":
            raise UnknownConfig(f"{where}.sliding_attention.rope_type is {local['rope_type']!r}, expected 'default'")
        found["rope_local_theta"] = (f.local_theta[0] or f"{where}.sliding_attention.rope_theta", local["rope_theta"])
    fraction = rope.get("partial_rotary_factor", 1.0 if f.partial is None else f.partial)
    if f.partial is not None:
        found["rotary_fraction"] = ("partial_rotary_factor", fraction)
    elif fraction != 1.0:
        raise UnknownConfig(f"partial_rotary_factor is {fraction!r}, expected 1.0 in {f.model_type}")
    # What the family has of its own.
    found |= {name: (key, config.get(key, usual) or 0.0) for key, (name, usual) in f.optional.items()}
    return {**found, **f.read(config), **_windows(f, config, sizes["num_hidden_layers"][1])}


def _written(f: Family, cfg: Any) -> dict[str, Any]:
    """The keys of config.json that need more than a table row: the inverse of `_read`. The family's own `written` wins."""
    found = {"num_key_value_heads": cfg.kv_heads, **_written_rope(cfg)}
    if f.local_theta:
        key, full = f.local_theta[0], {"rope_theta": cfg.rope_theta, **(found["rope_scaling"] or {"rope_type": "default"})}
        local = {"rope_theta": cfg.rope_local_theta, "rope_type": "default"} if cfg.rope_local_theta else full
        found["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        if key:
            found[key] = local["rope_theta"]
    if f.own_head:
        found["head_dim"] = cfg.head_size
    if f.partial is not None:
        found["partial_rotary_factor"] = cfg.rotary_fraction
    found |= {key: getattr(cfg, name) or None for key, (name, _) in f.optional.items()}
    return {**found, **f.written(cfg), **_written_windows(f, cfg)}


def _refused(f: Family, sizes: Mapping[str, tuple[str, Any]], words: Mapping[str, tuple[str, Any, Any]], cfg: Any) -> str | None:
    """Why a configuration cannot be exported as this family; None if it can. Fields that the family's config.json cannot express
    must have their defaults; those of `words` one of their table's values."""
    expressible = {*ROPE, *f.also, *f.fixed, "family", "padded_vocab"}
    expressible |= {name for name, *_ in (*sizes.values(), *words.values(), *f.optional.values())}
    if f.partial is not None:
        expressible.add("rotary_fraction")
    if f.local_theta:
        expressible.add("rope_local_theta")
    if f.windows:
        expressible |= {"sliding_window", "window_layers"} if f.windows.has else {"sliding_window"}
    wanted = {field.name: field.default for field in fields(cfg) if field.name not in expressible} | dict(f.fixed)
    if not f.own_head:
        wanted |= {"head_dim": 0, "kv_heads": cfg.kv_heads if f.kv_heads else cfg.heads}
    for name, required in wanted.items():
        if getattr(cfg, name) != required:
            return f"model.{name} is {getattr(cfg, name)!r}, {f.model_type} has {required!r}"
    for key, (name, _, table) in words.items():
        if getattr(cfg, name) not in table.values():
            return f"model.{name} is {getattr(cfg, name)!r}, expected {' or '.join(map(repr, table.values()))} by {key}"
    return f.refused(cfg)


@cache
def architectures(module: ModuleType) -> tuple[HuggingFace, ...]:
    """What the models of a module can be in Hugging Face's words."""
    return tuple(of_family(one) if isinstance(one, Family) else one for one in getattr(module, "HUGGING_FACE", ()))


def hugging_face(model: ModelConfig) -> HuggingFace:
    """What a model is in Hugging Face's words: of those that its `family` names, or of all, the first that can hold it; where none
    can, the first, which says why (`refused`)."""
    known, family = architectures(models.of(model)), getattr(model, "family", "")
    named = [one for one in known if one.model_type == family] or known
    return next((one for one in named if one.refused(model) is None), named[0])
