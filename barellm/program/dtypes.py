"""Storage formats: how numbers lie in memory, one row a format.

Most formats are an array of one kind of number. The weight of a GEMM in mixed precision has two planes, and is named by them: what
GEMMs read, then what makes the fp32 master weight of it, one after the other in memory.

    bf16_i16   32 bits, lossless: bits(master) = (hi << 16) + lo, hi being the nearest bf16 and lo a signed 16-bit rest
    bf16_u16   the upper 16 bits as they are and the lower ones unsigned, as modded-nanogpt does: hi is the next bf16 towards zero
    fp16_fp32  the nearest fp16 and the fp32 master weight: fp16 has too few exponent bits for a split

"e6m9" and "ue6m10" are the 16-bit floats of optimizer state (`program.moments`). "u4" are integers from 0 to 15, two a byte: of
each 128 in turn the first 64 lie in the lower nibbles of 64 bytes, and the others in the upper ones (`program.quantization`).
"e4m3" and "e5m2" are FP8 (Micikevicius et al. 2022): conversion saturates, and e4m3 has no infinity."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from barellm.program import moments


@dataclass(frozen=True)
class Format:
    """One way to keep a number in memory.

    `half_ulp` is the largest relative error of rounding to it, and `half_least` the largest absolute error near zero, in formats
    whose denormals begin soon. `planes` are the formats of its planes, one after the other in memory; it is () for an array of
    numbers, or of codes of `bits` each. `travels` is the format in which its values leave the arena, for files and NumPy."""

    name: str
    bits: int
    kind: Literal["float", "integer", "code", "planes"]
    half_ulp: float = 0.0
    half_least: float = 0.0
    planes: tuple[str, ...] = ()
    travels: str = ""

    @property
    def operand(self) -> str:
        """The format that a matmul reads: that of the first plane."""
        return self.planes[0] if self.planes else self.name

    @property
    def exchange(self) -> str:
        return self.travels or self.name

    def nbytes(self, size: int) -> int:
        if self.planes:
            return self.start_of(len(self.planes) - 1, size) + FORMATS[self.planes[-1]].nbytes(size)
        return -(-size * self.bits // 8)

    def start_of(self, plane: int, size: int) -> int:
        """The byte at which a plane begins in a tensor of `size` elements. It is a multiple of what one of its elements has."""
        at = 0
        for before, here in zip(self.planes[:plane], self.planes[1:], strict=False):
            at = -(-(at + FORMATS[before].nbytes(size)) // itemsize(here)) * itemsize(here)
        return at


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp64", 64, "float", 2.0**-53),
        Format("fp32", 32, "float", 2.0**-24),
        Format("fp16", 16, "float", 2.0**-11, 2.0**-25),
        Format("bf16", 16, "float", 2.0**-8),
        Format("e4m3", 8, "float", 2.0**-4, 2.0**-10),
        Format("e5m2", 8, "float", 2.0**-3, 2.0**-17),
        Format("i64", 64, "integer"),
        Format("i32", 32, "integer"),
        Format("i16", 16, "integer"),
        Format("i8", 8, "integer"),
        Format("u16", 16, "integer"),
        Format("e6m9", 16, "code", 2.0**-10, travels="fp32"),
        Format("ue6m10", 16, "code", 2.0**-11, travels="fp32"),
        Format("u4", 4, "code"),
        Format("bf16_i16", 32, "planes", 2.0**-24, planes=("bf16", "i16"), travels="fp32"),
        Format("fp16_fp32", 48, "planes", 2.0**-24, planes=("fp16", "fp32"), travels="fp32"),
        Format("bf16_u16", 32, "planes", 2.0**-24, planes=("bf16", "u16"), travels="fp32"),
    )
}

ALIASES = {"split": "bf16_i16", "half": "fp16_fp32", "truncated": "bf16_u16"}  # earlier names, which models may give

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}  # of the formats of 8 bits
EIGHTS = " ".join(LARGEST)

PLANES = " ".join(name for name, f in FORMATS.items() if f.planes)  # what kernels of weights take beside numbers


def format_of(dtype: str) -> Format:
    """The format of that name. A name that no format has is a ValueError."""
    if dtype not in FORMATS:
        raise ValueError(f"unknown dtype {dtype!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[dtype]


def itemsize(dtype: str) -> int:
    """Bytes of one element; of two that share one, that byte."""
    return max(FORMATS[dtype].bits // 8, 1)


@cache
def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype of a format's elements in memory; for codes an unsigned integer. Formats with planes have none."""
    theirs = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    if name in theirs:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, theirs[name]))
    f = FORMATS[name]
    assert not f.planes, name
    kind = {"float": "f", "integer": name[0], "code": "u"}[f.kind]
    return np.dtype(f"{kind}{itemsize(name)}")


def encode(values: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    """Round values to a format; returns its arrays in memory, one per plane."""
    if dtype in ("bf16_i16", "bf16_u16"):
        if np.asarray(values).dtype == numpy_dtype("bf16"):  # as files of 16 bits have it: a tenth of the time
            return values, np.zeros(values.shape, np.uint16)
        return (fp32_to_bf16_i16 if dtype == "bf16_i16" else fp32_to_bf16_u16)(np.asarray(values, np.float32))
    if planes := FORMATS[dtype].planes:
        return tuple(np.asarray(values).astype(numpy_dtype(plane)) for plane in planes)
    if dtype == "u4":
        low, high = np.asarray(values).astype(np.uint8).reshape(-1, 2, 64).swapaxes(0, 1)
        return ((low | high << 4).reshape(-1),)
    if FORMATS[dtype].kind == "code":
        return (moments.encode(values, dtype),)
    if dtype in LARGEST:
        return (round_to_eight(values, dtype),)
    return (np.asarray(values).astype(numpy_dtype(dtype)),)


def round_to_eight(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 numbers in a format of 8 bits, rounded to nearest even; beyond the largest number to that, NaN kept."""
    most = np.float32(LARGEST[dtype])
    return np.clip(np.asarray(values, np.float32), -most, most).astype(numpy_dtype(dtype))


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 numbers, ties to even, as an array of the dtype that it was."""
    return np.asarray(values, np.float32).astype(numpy_dtype("bf16")).astype(values.dtype)


def decode(planes: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """The values of a format's planes, as a copy in a NumPy dtype: fp32 for two-plane weights and 16-bit codes; packed 4-bit codes
    become one byte each, in a flat array."""
    if dtype == "bf16_i16":
        return bf16_i16_to_fp32(*planes)
    if dtype == "bf16_u16":
        return bf16_u16_to_fp32(*planes)
    if dtype == "u4":
        both = planes[0].reshape(-1, 64)
        return np.stack([both & 15, both >> 4], 1).reshape(-1)
    if FORMATS[dtype].planes:
        return planes[-1].copy()
    return moments.decode(planes[0], dtype) if FORMATS[dtype].kind == "code" else planes[0].copy()


def fp32_to_bf16_i16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take fp32 numbers apart into (bf16, signed 16-bit rest), with bits(x) = (bits(hi) << 16) + rest. hi is the nearest bf16. Ties
    go upwards in magnitude, so that the rest fits into 16 signed bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    hi = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.int16)
    return hi.view(numpy_dtype("bf16")), bits.astype(np.int16)  # the lower half, read as signed, is what rounding left


def bf16_i16_to_fp32(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """The fp32 weights that `fp32_to_bf16_i16` took apart."""
    return ((hi.view(np.int16).astype(np.int32) << 16) + lo.astype(np.int32)).view(np.float32)


def fp32_to_bf16_u16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take fp32 numbers apart into (upper 16 bits, which are a bf16, and lower 16 bits)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16).view(numpy_dtype("bf16")), bits.astype(np.uint16)


def bf16_u16_to_fp32(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """The fp32 weights that `fp32_to_bf16_u16` took apart."""
    return ((hi.view(np.uint16).astype(np.uint32) << 16) | lo).view(np.float32)


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a program computes. `operands` is that of the operands of matmuls and of the activations between them,
    `weights` that of matrices, and `stream` that of the residual stream and its gradient. Where `scaled` is set, the loss is
    multiplied by a scale that follows the gradients (`program.loss_scale`), because those of fp16 would vanish; with
    `branch_scales` each residual branch has a scale of its own. Statistics, sums and gradients of parameters are always fp32."""

    operands: str
    weights: str
    stream: str = "fp32"
    scaled: bool = False
    branch_scales: bool = False


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("fp32", "fp32"),
    "bf16": Precision("bf16", "bf16_i16"),
    "fp16": Precision("fp16", "fp16_fp32", scaled=True),
}
