"""Weight quantization of arrays, to study what a format does to weights. It is done in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.errors import WrongType

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.quantization import Scheme


def _scheme(name: str, format: str) -> Scheme:
    from barellm.program.quantization import scheme

    if not isinstance(format, str):
        raise WrongType(f"{name} expects format as a text such as 'int4', it is of type {type(format).__name__}")
    return scheme(format)


def quantize(w: Array, format: str = "int4") -> tuple[Array, Array]:
    """The codes and scales of a matrix, as `barellm sample --weights` has them.

    Shapes: w (N, K) -> codes (N, K), int8 or, of 4 bits, uint8 from 0 to 15; scales (N, groups). Groups are of neighbours in a row.
    Formula: the code of w[n, k] is that whose value times the scale of its group is nearest.
    Formats: int8 (a scale for each row), int4 (groups of 32), nf4 (groups of 64), or with another group of 32, 64, 128: "int4/128".
    Dtypes: w float32 or bfloat16; scales float16 where that has all of them as normal numbers, else float32.
    Source: `barellm/program/quantization.py`.

        codes, scales = kernels.quantize(w, "nf4")"""
    from barellm.kernels.arrays import check_array, format_name
    from barellm.program import quantization

    if check_array("quantize", "w", w).ndim != 2 or not w.size:
        raise ValueError(f"quantize expects w (N, K) with at least one element, it has shape {w.shape}")
    format_name("quantize", "w", w, ("fp32", "bf16"))
    return quantization.quantize(w, _scheme("quantize", format))


def dequantize(codes: Array, scales: Array, format: str = "int4") -> Array:
    """The matrix that codes and scales stand for.

    Shapes: codes (N, K), scales (N, groups) -> (N, K) float32.
    Formula: the value of the code times the scale of its group.
    Formats: those of `quantize`, and nf4-v1, the table that nf4 had until 2026-11-25.
    Source: `barellm/program/quantization.py`.

        error = w - kernels.dequantize(*kernels.quantize(w, "nf4"), "nf4")"""
    from barellm.kernels.arrays import check_array
    from barellm.program import quantization

    how = _scheme("dequantize", format)
    wanted = "int8" if how.codes == "i8" else "uint8"
    if check_array("dequantize", "codes", codes).dtype != wanted or codes.ndim != 2:
        raise ValueError(f"dequantize expects codes (N, K) {wanted} of {format}, found {codes.shape} {codes.dtype}")
    groups = how.groups(codes.shape[1])
    if check_array("dequantize", "scales", scales).shape != (len(codes), groups):
        raise ValueError(f"dequantize expects scales {(len(codes), groups)} for codes {codes.shape}, found {scales.shape}")
    if how.table and codes.size and codes.max() > 15:
        raise ValueError(f"dequantize expects codes from 0 to 15, the largest is {codes.max()}")
    return quantization.dequantize(codes, scales, how)
