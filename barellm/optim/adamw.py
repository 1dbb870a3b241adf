"""AdamW over every parameter of a store: global norm, clip, one pass per parameter."""

from __future__ import annotations

from typing import Any

from barellm.config import OptimConfig
from barellm.program import ops
from barellm.program.builder import Program
from barellm.program.ops.random import STATE_STREAMS


def adamw(p: Program, config: OptimConfig) -> None:
    """Append the update. Weight decay acts on matrices only, embeddings included; biases and norms have none. Matrices only
    have 16-bit moments, too: the rest is a thousandth of the parameters.

    The output "clip" is [norm, scale]; the state "skipped" counts updates left out because the norm was not finite.
    """
    pairs = [(t, p.gradient_of(t)) for t in p.store.of_role("parameter")]
    partials = {f"p{i}": p.apply(ops.SumSquares, x=grad).partials for i, (_, grad) in enumerate(pairs)}
    skipped = p.state("skipped", (1,), "i32")
    clip = p.output("clip", p.apply(ops.ClipScale, skipped=skipped, **partials, clip=config.clip).clip)
    for i, (param, grad) in enumerate(pairs):
        matrix = len(param.shape) == 2
        packed = matrix and config.moments != "fp32"
        dtypes = {"m": "e6m9", "v": "ue6m10"} if packed else {"m": "fp32", "v": "fp32"}
        state: dict[str, Any] = {k: p.state(f"{param.name}.{k}", param.shape, dtype) for k, dtype in dtypes.items()}
        attrs: dict[str, Any] = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "weight_decay": config.weight_decay if matrix else 0.0,
            "stream": STATE_STREAMS + i if packed and config.moments == "16bit-stochastic" else None,
        }
        p.apply(ops.AdamW, param=param, grad=grad, clip=clip, **state, **attrs)
