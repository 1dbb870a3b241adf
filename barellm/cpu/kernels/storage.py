"""Storage formats of weights and moments, which kernels load and store as fp32.

A weight is one array, or a hi/lo pair of planes (`program.dtypes`): the bits (hi << 16) + lo of "bf16_i16" and "bf16_u16", whose lo
has no sign, or the nearest fp16 and the fp32 master weight of "fp16_fp32". A moment is one array, or codes (`program.moments`):
fp32 with fewer bits of exponent and mantissa. p[index...] are elements from `index` on."""

from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Pointer, Tensor, Value, part, plane
from barellm.program import dtypes, moments


def weight_operands(name: str, t: Tensor) -> dict[str, Any]:
    """Operands `name` and `name_lo` of a call: the hi and lo planes, or the fp32 tensor and None."""
    if dtypes.format_of(t.dtype).planes:
        return {name: plane(t, 0), f"{name}_lo": plane(t, 1)}
    return {name: t, f"{name}_lo": None}


def store_halves(k, p, lanes, index, mask, *, high: bool) -> None:
    """Store 16 bits, the upper ones with `high`, of each i32 lane of one or two adjacent vectors to p[index...]; a mask only with
    one. Two vectors' halves are interleaved by one shuffle and stored at once: AVX-512 truncates a vector in two operations."""
    if len(lanes) == 2:
        halves = f"<{2 * k.lanes} x i16>"
        a, b = (k.bitcast(v, halves) for v in lanes)
        both = k.shuffle(a, b, [2 * j + high for j in range(2 * k.lanes)])  # little-endian: an i32's upper half is its odd i16
        k.line(f"store {both.typed}, ptr {p.at(index).ref}, align 2")
        return
    for j, v in enumerate(lanes):
        p.store_raw(k.to(v >> 16 if high else v, f"<{k.lanes} x i16>"), k.lanes * j + index, mask)


@dataclass(frozen=True)
class Weight:
    """A weight as vectors of fp32 values, whatever its storage: `p` alone, or planes `p` (hi) and `lo`. `bf16`: values are rounded
    to the nearest bf16 before they are stored."""

    k: KernelBuilder
    p: Pointer
    lo: Pointer | None
    bf16: bool = False

    def load(self, index=0, mask=None) -> Value:
        """Load the vector at `index` as fp32 lanes: the fp32 array or plane, or both 16-bit planes joined. `index`: element,
        `mask`: None or i1 lanes. hi is zero-extended, a signed lo sign-extended, so a carry or borrow restores the bits."""
        if self.lo is None:
            return self.p.load(index, mask)
        if self.lo.dtype == "fp32":
            return self.lo.load(index, mask)
        k = self.k
        high = k.op(k.ivec, f"zext {self.p.load_raw(index, mask).typed} to {k.ivec}") << 16
        low = self.lo.load_raw(index, mask)
        low = k.op(k.ivec, f"zext {low.typed} to {k.ivec}") if self.lo.dtype == "u16" else k.to(low, k.ivec)
        return k.bitcast(high + low, k.vec)

    def store(self, value, index=0, mask=None) -> None:
        self.store_all([value], index, mask)

    def store_all(self, values, index, mask) -> None:
        """Store `values`, one vector or two adjacent ones of fp32 lanes, from element `index` on, in all planes; `mask` (None or i1
        lanes) only with one vector. An fp32 or fp16 plane takes the value, rounded; i16 and u16 planes halves of its bits."""
        k = self.k
        if self.bf16:
            values = [k.widen16(k.round_bf16(value), "bf16") for value in values]  # rounded, and fp32 again
        if self.lo is None or self.lo.dtype == "fp32":
            for plane in (self.p, self.lo):
                for j, value in enumerate(values):
                    if plane is not None:
                        plane.store(value, k.lanes * j + index, mask)
            return
        bits = [k.bitcast(value, k.ivec) for value in values]
        # A signed lo is the rest to the nearest hi: half of the last bit of hi (bit 16), 0x8000, is added before the cut.
        rounded = bits if self.lo.dtype == "u16" else [b + 0x8000 for b in bits]
        store_halves(k, self.p, rounded, index, mask, high=True)
        store_halves(k, self.lo, bits, index, mask, high=False)


def moment_operand(t: Tensor) -> Any:
    """Operand of a call: the fp32 tensor, or its codes."""
    return (part(t), "i16") if t.dtype in moments.FORMATS else t


@dataclass(frozen=True)
class Moment:
    """Vectors of fp32 values of a moment whose codes, if it has any, are of the format `dtype`."""

    k: KernelBuilder
    p: Pointer
    dtype: str

    def load(self, index=0, mask=None) -> Value:
        """Load the vector at `index` as fp32 lanes: as it is, or its codes with fp32's bias and mantissa."""
        if self.p.dtype == "fp32":
            return self.p.load(index, mask)
        k, f = self.k, moments.FORMATS[self.dtype]
        codes = k.op(k.ivec, f"{'sext' if f.signed else 'zext'} {self.p.load_raw(index, mask).typed} to {k.ivec}")
        # A code's sign was extended, so the shift leaves three copies: the lower two go, so that the sum below cannot carry into
        # the sign.
        bits, magnitude = codes << f.shift, codes
        if f.signed:
            bits, magnitude = bits & ~(3 << 29), codes & 0x7FFF
        return k.bitcast(k.select(magnitude.equals(0), 0, bits + moments.REBIAS), k.vec)

    def store_all(self, values, index, mask, *, dither) -> None:
        """Store one or two adjacent vectors of fp32 lanes from element `index` on; a mask only with one. `dither`: random i32 lanes
        below 2^shift for each, for stochastic rounding; None: to nearest, or fp32."""
        if self.p.dtype == "fp32":
            for j, value in enumerate(values):
                self.p.store(value, self.k.lanes * j + index, mask)
            return
        codes = [self._code(value, dither[j] if dither else None) for j, value in enumerate(values)]
        store_halves(self.k, self.p, codes, index, mask, high=True)

    def _code(self, value, dither) -> Value:
        """The code of each lane as `moments.encode` defines it, in the lane's high half, where fp32's sign bit is. Magnitudes below
        the smallest code's (f.least) become 0, or with `dither` the smallest, by chance in proportion to their size. A code is
        fp32's bits, less REBIAS (the difference of the exponents' biases), without the last f.shift bits of the mantissa."""
        k, f = self.k, moments.FORMATS[self.dtype]
        magnitude = k.min_magnitude(value, f.most)  # i32 bits of |value|, at most the largest code's
        inside = magnitude >= f.least
        code = magnitude - moments.REBIAS
        if dither is None:
            code = k.select(inside, code + (1 << (f.shift - 1)), 0)  # half of a code's last bit: to nearest
        else:
            undithered = k.var(code)
            with k.otherwise(k.all(inside)):  # rarely: below 1e-18
                undithered.value = k.select(inside, code, k.to(k.bitcast(magnitude, k.vec) * f.per_least, k.ivec))
            code = undithered.value + dither
            inside = code >= 1 << f.shift  # the code is not 0: its sign counts
        code = code << (16 - f.shift)  # to the high half
        if not f.signed:
            return code
        return k.select(inside, k.bitcast(k.copysign(k.bitcast(code, k.vec), value), k.ivec), 0)
