"""fp32 weights as kernels see them: one array, or the two 16-bit planes of a split parameter, bits = (hi << 16) + lo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import KernelBuilder, plane
from barellm.cpu.lang import Pointer, Value
from barellm.program.tensor import Tensor


def weight_operands(name: str, t: Tensor) -> dict[str, Any]:
    """Operands `name` and `name_lo` of a call: the hi and lo planes, or the fp32 tensor and None."""
    if t.dtype == "split":
        return {name: (plane(t, "hi"), "bf16"), f"{name}_lo": (plane(t, "lo"), "i16")}
    return {name: t, f"{name}_lo": None}


@dataclass(frozen=True)
class Weight:
    """Vectors of fp32 values, whatever the storage."""

    k: KernelBuilder
    p: Pointer
    lo: Pointer | None

    def load(self, index: Any = 0, mask: Value | None = None) -> Value:
        if self.lo is None:
            return self.p.load(index, mask)
        k = self.k
        high = k.op(k.ivec, f"zext {self.p.load_raw(index, mask).typed} to {k.ivec}") << 16
        return k.bitcast(high + k.to(self.lo.load_raw(index, mask), k.ivec), k.vec)

    def store(self, value: Value, index: Any = 0, mask: Value | None = None) -> None:
        if self.lo is None:
            self.p.store(value, index, mask)
            return
        k = self.k
        bits = k.bitcast(k.to(value, k.vec), k.ivec)
        halves = f"<{k.lanes} x i16>"
        self.p.store_raw(k.to((bits + 0x8000) >> 16, halves), index, mask)
        self.lo.store_raw(k.to(bits, halves), index, mask)
