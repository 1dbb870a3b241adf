"""What of a model a GPU's self-check runs: the same ops in small sizes."""

from dataclasses import fields, replace

from barellm.config import Config
from barellm.errors import UserError

TOKENS = 48  # of a sequence
SIZES = {"layers": 2, "vocab_size": 500, "padded_vocab": 512, "max_seq": 2 * TOKENS}
ONE = {"gradient_accumulation_steps": 1, "batch_rampup_from": 0, "batch_rampup_tokens": 0, "eval_seq": 0, "exponent_stats": 0}


def small(config: Config) -> Config | None:
    """The configuration with a small model of the same ops and head size; None for architectures without these fields, and for user
    models (whose file another process lacks)."""
    model = config.model
    known = {field.name for field in fields(model)}
    if not type(model).__module__.startswith("barellm.") or not {"heads", "d_model"} <= known:
        return None
    heads_before = getattr(model, "heads", 1)
    head, shared = (
        getattr(model, "head_dim", 0) or model.d_model // heads_before,
        getattr(model, "kv_heads", heads_before) < heads_before,
    )
    heads = 4 if shared and head <= 128 else 2
    sizes = SIZES | {"heads": heads, "kv_heads": heads // 2 if shared else heads, "d_model": heads * head, "d_ff": 2 * heads * head}
    for key in {"window_layers", "nope_layers"} & known:
        sizes[key] = ",".join(i for i in getattr(model, key).split(",") if i in ("0", "1"))
    sizes |= {"sliding_window": TOKENS // 2} if getattr(model, "sliding_window", 0) else {}
    train = replace(config.train, micro_batch_size=2, seq=TOKENS, **ONE)
    try:
        return replace(config, model=replace(model, **{k: n for k, n in sizes.items() if k in known}), train=train)
    except UserError:
        return None
