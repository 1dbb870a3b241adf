"""Operands of the ops on signs: what the tests of both backends share."""

from __future__ import annotations

from typing import Any

import numpy as np

from barellm.program import ops
from barellm.program.ops.base import Op
from barellm.program.ops.pointwise.binary import pack
from tests.check import Given, persistent, tokens

ENDS = [-0.0, 0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40, 1.0]
# Columns within a word, of whole words and beyond; of the second operand within a tile, one, and beyond.
SIZES = [(1, 1), (31, 3), (32, 96), (33, 100), (257, 131)]


def signs(*shape: int, seed: int = 1) -> np.ndarray:
    """Numbers, of which the first are those whose sign is special."""
    x = np.random.default_rng(seed).standard_normal(shape)
    x.reshape(-1)[: len(ENDS)] = ENDS[: x.size]
    return x


def cases(K: int, N: int, dtype: str) -> dict[str, tuple[type[Op], dict[str, Given], dict[str, Any]]]:
    """An op, its operands, and what else `check_op` wants."""
    x, weight = signs(2, 3, K), signs(N, K, seed=2)
    far, dy = 2 * signs(2, 3, K, seed=3), np.random.default_rng(4).standard_normal((2, 3, K))
    words, plan = tokens(pack(x), "i32"), {"plan": (3, 5)}
    split = {"bf16": "split", "fp16": "half"}.get(dtype, dtype)
    return {
        "pack": (ops.PackSigns, {"x": tokens(x, dtype)}, plan),
        "pack a weight": (ops.PackSigns, {"x": persistent(np.nan_to_num(weight, posinf=3, neginf=-3), split)}, {}),
        "unpack": (ops.UnpackSigns, {"words": words}, plan | {"columns": K, "dtype": dtype}),
        "straight": (ops.StraightThrough, {"dy": tokens(dy, dtype), "x": tokens(far, dtype)}, plan),
        "product": (
            ops.BinaryMatmul,
            {"a": words, "b": persistent(pack(weight), "i32", "state")},
            plan | {"columns": K, "dtype": dtype},
        ),
    }


NAMES = tuple(cases(1, 1, "fp32"))
