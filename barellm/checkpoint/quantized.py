"""Quantized weights in a checkpoint: a run's numbers become codes once, and `sample` and `eval` read those.

In weights.safetensors a quantized matrix NAME (N, K) has two tensors: NAME.codes, signed bytes (N, K) of codes of 8 bits or
(N, ceil(K / 2)) of those of 4 bits, of which the lower half of a byte is the first; and NAME.scales (N, groups), fp16, or fp32
where that cannot have them. The other parameters are fp32 there as in any checkpoint. meta.json names the format as "weights", and
the numbers that 4-bit codes stand for as "table". The first folders of nf4 have no table: theirs is that of "nf4-v1"."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from barellm.checkpoint import checkpoint, tensorfile
from barellm.data import mapping
from barellm.errors import UserError
from barellm.program.integers import ceil_div
from barellm.program.quantization import EARLIER, TILE, Scheme, scheme
from barellm.program.tensor import Tensor

if TYPE_CHECKING:
    from barellm.checkpoint.weights import Weights

AT_ONCE = 256 * TILE  # rows of codes that are handed on at a time


def stored(codes_NK: np.ndarray, how: Scheme) -> np.ndarray:
    if how.codes == "i8":
        return codes_NK
    even = np.concatenate([codes_NK, np.zeros((len(codes_NK), codes_NK.shape[1] % 2), np.uint8)], 1)
    return (even[:, ::2] | even[:, 1::2] << 4).view(np.int8)


def restored(bytes_: np.ndarray, how: Scheme, K: int) -> np.ndarray:
    """The codes (N, K) of a file's bytes."""
    if how.codes == "i8":
        return bytes_
    both = bytes_.view(np.uint8)
    return np.stack([both & 15, both >> 4], -1).reshape(len(both), -1)[:, :K]


def meta_of(how: Scheme) -> dict[str, Any]:
    return {"weights": how.name, "table": list(how.table)}


def stored_scheme(path: Path, meta: Mapping[str, Any]) -> str:
    """The quantization scheme of a step folder's weights, "" if not quantized; the earlier scheme if it has no table."""
    name = meta.get("weights", "")
    if not name:
        return ""
    kind, _, group = name.partition("/")
    names = [name, *(f"{earlier}/{group}".rstrip("/") for earlier in EARLIER if earlier.partition("-")[0] == kind)]
    if "table" not in meta:
        return names[-1]
    for known in names:
        if list(scheme(known).table) == meta["table"]:
            return known
    raise UserError(f"{path / checkpoint.META} has a table for {name} that is not known, expected {scheme(name).table}")


def tensors_of(parameter: Tensor, how: Scheme, scales: str = "fp16") -> dict[str, Tensor]:
    """The two tensors of the file that stand for a matrix; `scales` is the dtype of the second."""
    N, K = (int(n) for n in parameter.shape)
    shapes = {"codes": ((N, ceil_div(K, 2) if how.codes == "u4" else K), "i8"), "scales": ((N, how.groups(K)), scales)}
    return {
        f"{parameter.name}.{part}": Tensor(f"{parameter.name}.{part}", shape, dtype, "parameter")
        for part, (shape, dtype) in shapes.items()
    }


@dataclass(frozen=True)
class Quantized:
    """A row source for `checkpoint.save`: fp32 parameters, but for the matrices in `schemes`, which are `codes` and scales."""

    numbers: "Weights"
    schemes: Mapping[str, Scheme]
    codes: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        wide = {name for name, (_, scales) in self.codes.items() if scales.dtype == "float32"}
        return expected(self.numbers.tensors, self.schemes, wide)

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        matrix, _, part = name.rpartition(".")
        if matrix not in self.schemes:
            return self.numbers.read_rows(name, lo, hi)
        codes, scales = self.codes[matrix]
        return stored(codes[lo:hi], self.schemes[matrix]) if part == "codes" else scales[lo:hi]


def expected(parameters: Mapping[str, Tensor], schemes: Mapping[str, Scheme], wide: Collection[str]) -> dict[str, Tensor]:
    """The tensors of such a checkpoint's file, for a model with these parameters. The matrices `wide` have scales of fp32."""
    found: dict[str, Tensor] = {}
    for name, t in parameters.items():
        scales = "fp32" if name in wide else "fp16"
        found |= tensors_of(t, schemes[name], scales) if name in schemes else {name: t}
    return found


class Loading(Protocol):
    """What a quantized checkpoint is loaded into."""

    def write_rows(self, name: str, lo: int, array: np.ndarray, /) -> None: ...
    def write_codes(self, name: str, lo: int, codes: np.ndarray, scales: np.ndarray, /) -> None: ...


def load(path: Path, loading: Loading, parameters: Mapping[str, Tensor], schemes: Mapping[str, Scheme]) -> None:
    """Load a verified step folder of quantized weights. UserError, before any write, if it is not of this model and schemes."""
    file = path / checkpoint.WEIGHTS
    arrays = tensorfile.mapped(file)
    fp32_scales = {name for name in schemes if getattr(arrays.get(f"{name}.scales"), "dtype", None) == "float32"}
    tensorfile.checked_header(file, expected(parameters, schemes, fp32_scales))
    for name, t in parameters.items():
        if name not in schemes:
            for lo, hi in tensorfile.pieces(t.shape, itemsize=4):
                loading.write_rows(name, lo, arrays[name][lo:hi])
            continue
        codes, scales = arrays[f"{name}.codes"], arrays[f"{name}.scales"]
        for lo in range(0, len(codes), AT_ONCE):
            rows = slice(lo, lo + AT_ONCE)
            loading.write_codes(name, lo, restored(codes[rows], schemes[name], int(t.shape[1])), scales[rows])
    mapping.check()
