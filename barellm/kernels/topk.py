"""top_k on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec
from barellm.kernels.options import integer

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array


_TOP_K = FunctionSpec("top_k", {"x": "... C"}, ("... K", "... K"), lambda p, x, *, K: p.top_k(x, K))


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest elements of each row, the largest first, and their columns. Of equal elements the lowest column comes first.

    Shapes: x (..., C), 1 <= k <= C -> values (..., k), indices (..., k) int32.
    Formula: values[i] = x[indices[i]]. NaN counts as infinity.
    Dtypes: float32 or bfloat16; the values have that of x. The gradient of the values goes to their columns.
    Source: `barellm/cpu/kernels/pointwise/top_k.py`.

        values, indices = kernels.top_k(logits, 50)"""
    values, indices = call(_TOP_K, {"x": x}, K=integer("top_k", "k", k))
    return values, indices
