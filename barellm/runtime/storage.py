"""How dtypes lie in memory, for the host: NumPy dtypes, 16-bit moments, and the split form of an fp32 weight."""

from __future__ import annotations

import numpy as np

from barellm.program.ops import moments


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of a tensor's elements; of a 16-bit moment that of its codes."""
    if name == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(
        {"fp32": np.float32, "fp64": np.float64, "i32": np.int32, **dict.fromkeys(moments.FORMATS, np.uint16)}[name]
    )


def to_memory(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to how `dtype` lies in memory. Not for "split", which is two planes."""
    return moments.encode(values, dtype) if dtype in moments.FORMATS else np.asarray(values).astype(dtype_of(dtype))


def from_memory(stored: np.ndarray, dtype: str) -> np.ndarray:
    """What memory holds as numbers of a NumPy dtype (a copy): 16-bit moments as fp32."""
    return moments.decode(stored, dtype) if dtype in moments.FORMATS else stored.copy()


def split_fp32(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp32 -> (bf16 bits as int16, signed 16-bit rest) with bits(x) = (hi << 16) + rest. hi is the nearest bf16, ties upwards
    in magnitude, so that the rest fits 16 signed bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    hi = (bits + 0x8000) >> 16
    return hi.astype(np.int16), (bits - (hi << 16)).astype(np.int16)


def join_split(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """The fp32 weights that `split_fp32` took apart."""
    return ((hi.astype(np.int32) << 16) + lo.astype(np.int32)).view(np.float32)
