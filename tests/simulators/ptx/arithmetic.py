"""Instructions between registers: moves, integers, floats, comparisons, conversions.

Floats round as IEEE says; `fma` once. What the ISA calls approximate is computed as exactly as the type allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.simulators.ptx.machine import BF16, TYPES, Array, Fault, Machine, op
from tests.simulators.ptx.parse import Instruction, Number, Pair, Vector

TINY = np.float32(2.0**-126)  # the smallest float that is not subnormal
HALF = np.uint64((1 << 28) - 1)  # bits of a double that are all zero where it lies between two floats or at one


def values_of(m: Machine, i: Instruction, threads: Array, type_: Any, *, first: int = 1) -> list[Array]:
    """The operands from the `first` on, flushed where the opcode has .ftz."""
    found = [m.read(o, threads, type_) for o in i.operands[first:]]
    return [_flushed(v) for v in found] if "ftz" in i.modifiers else found


def give(m: Machine, i: Instruction, threads: Array, values: Array) -> None:
    """The result, flushed and clipped as the opcode asks."""
    if values.dtype.kind == "f" and "ftz" in i.modifiers:
        values = _flushed(values)
    if values.dtype.kind == "f" and "sat" in i.modifiers:
        values = np.where(np.isnan(values), values.dtype.type(0), np.clip(values, 0, 1))
    m.write(i.operands[0], threads, values)


def _flushed(values: Array) -> Array:
    if values.dtype != np.float32:
        return values
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


# --- moves ---


@op("mov", "cvta")
def mov(m: Machine, i: Instruction, threads: Array) -> None:
    """Also between a register and the parts that it is made of."""
    to, source = i.operands
    type_ = i.modifiers[-1]
    if isinstance(source, Vector):
        size = TYPES[type_].itemsize // len(source.items)
        parts = [np.broadcast_to(m.read(o, threads, f"b{8 * size}"), threads.shape) for o in source.items]
        m.write(to, threads, np.stack(parts, -1).view(f"u{TYPES[type_].itemsize}").reshape(-1))
    elif isinstance(to, Vector):
        size = TYPES[type_].itemsize // len(to.items)
        whole = np.broadcast_to(m.read(source, threads, type_), threads.shape)
        parts = np.ascontiguousarray(whole).view(f"u{size}").reshape(len(threads), len(to.items))
        for k, o in enumerate(to.items):
            m.write(o, threads, np.ascontiguousarray(parts[:, k]))
    else:
        m.write(to, threads, m.read(source, threads, type_))


@op("selp")
def selp(m: Machine, i: Instruction, threads: Array) -> None:
    a, b = (m.read(o, threads, i.modifiers[-1]) for o in i.operands[1:3])
    m.write(i.operands[0], threads, np.where(m.read(i.operands[3], threads, "pred"), a, b))


# --- integers and floats ---


def _simple(*opcodes: str, floats: Callable[..., Array] | None, integers: Callable[..., Array] | None) -> None:
    """An instruction whose operands and result have the type that ends its opcode."""

    @op(*opcodes)
    def run(m: Machine, i: Instruction, threads: Array) -> None:
        type_ = i.modifiers[-1]
        if type_ in ("f16x2", "bf16x2") and floats is not None:
            half = np.dtype(np.float16) if type_ == "f16x2" else BF16
            words = [np.broadcast_to(m.read(o, threads, "b32"), threads.shape) for o in i.operands[1:]]
            halves = floats(*(np.ascontiguousarray(word).view(half).astype(np.float32) for word in words))
            m.write(i.operands[0], threads, halves.astype(half).view(np.uint32))
            return
        function = floats if TYPES[type_].kind in "fV" else integers
        if function is None:
            raise Fault(f"no machine knows {i.opcode}")
        give(m, i, threads, np.asarray(function(*values_of(m, i, threads, type_)), TYPES[type_]))


def _shift(function: Any) -> Callable[[Array, Array], Array]:
    """Shifts by 32 and more leave nothing, or the sign."""

    def shifted(a: Array, n: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        n = n.view(f"u{n.dtype.itemsize}")
        low = function(a, np.minimum(n, bits - 1).astype(a.dtype))
        beyond = np.where(a < 0, a.dtype.type(-1), a.dtype.type(0)) if a.dtype.kind == "i" else a.dtype.type(0)
        return np.where(n >= bits, beyond, low)

    return shifted


def _divided(a: Array, b: Array) -> Array:
    """Towards zero; a division by zero gives what the machine likes."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, 1, b))
    safe = np.where(b == 0, 1, b).astype(np.int64)
    quotient = np.abs(a.astype(np.int64)) // np.abs(safe) * np.sign(a.astype(np.int64)) * np.sign(safe)
    return np.where(b == 0, -1, quotient).astype(a.dtype)


_simple("add", floats=np.add, integers=np.add)
_simple("sub", floats=np.subtract, integers=np.subtract)
_simple("max", floats=np.fmax, integers=np.maximum)
_simple("min", floats=np.fmin, integers=np.minimum)
_simple("max.NaN", "max.ftz.NaN", floats=np.maximum, integers=None)
_simple("min.NaN", "min.ftz.NaN", floats=np.minimum, integers=None)
_simple("neg", floats=np.negative, integers=np.negative)
_simple("abs", floats=np.abs, integers=np.abs)
_simple("not", floats=None, integers=np.invert)
_simple("and", floats=None, integers=np.bitwise_and)
_simple("or", floats=None, integers=np.bitwise_or)
_simple("xor", floats=None, integers=np.bitwise_xor)
_simple("div", floats=np.divide, integers=_divided)
_simple("rem", floats=None, integers=lambda a, b: a - _divided(a, b) * b)
_simple("rcp", floats=lambda x: np.divide(x.dtype.type(1), x), integers=None)
_simple("sqrt", floats=np.sqrt, integers=None)
_simple("rsqrt", floats=lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype), integers=None)
_simple("ex2", floats=lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype), integers=None)
_simple("lg2", floats=lambda x: np.log2(x.astype(np.float64)).astype(x.dtype), integers=None)
_simple("sin", floats=lambda x: np.sin(x.astype(np.float64)).astype(x.dtype), integers=None)
_simple("cos", floats=lambda x: np.cos(x.astype(np.float64)).astype(x.dtype), integers=None)
_simple("tanh", floats=lambda x: np.tanh(x.astype(np.float64)).astype(x.dtype), integers=None)
_simple("copysign", floats=lambda a, b: np.copysign(b, a), integers=None)


@op("shl", "shr")
def shift(m: Machine, i: Instruction, threads: Array) -> None:
    a, n = m.read(i.operands[1], threads, i.modifiers[-1]), m.read(i.operands[2], threads, "u32")
    a, n = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(n))
    function = _shift(np.left_shift if i.opcode.startswith("shl") else np.right_shift)
    m.write(i.operands[0], threads, np.broadcast_to(function(a, n), threads.shape).astype(a.dtype))


@op("shf")
def funnel_shift(m: Machine, i: Instruction, threads: Array) -> None:
    """The upper half of {b, a} shifted left, or the lower half shifted right."""
    a, b, n = values_of(m, i, threads, "u32")
    n = n & np.uint32(31) if "wrap" in i.modifiers else np.minimum(n, 32)
    both = b.astype(np.uint64) << np.uint64(32) | a
    found = both << n >> np.uint64(32) if "l" in i.modifiers else both >> n
    m.write(i.operands[0], threads, (found & np.uint64(0xFFFFFFFF)).astype(np.uint32))


@op("bfe")
def bit_field(m: Machine, i: Instruction, threads: Array) -> None:
    a = m.read(i.operands[1], threads, i.modifiers[-1])
    at, count = (m.read(o, threads, "u32").astype(np.int64) & 255 for o in i.operands[2:4])
    bits = 8 * a.dtype.itemsize
    count = np.minimum(count, bits - np.minimum(at, bits))
    unsigned = a.view(f"u{a.dtype.itemsize}").astype(np.uint64)
    found = unsigned >> np.minimum(at, 63).astype(np.uint64) & (np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)
    if a.dtype.kind == "i":
        top = np.uint64(64) - count.astype(np.uint64)
        found = np.where(count == 0, 0, (found << top).view(np.int64) >> top.astype(np.int64))
    m.write(i.operands[0], threads, found.astype(a.dtype))


@op("bfi")
def bit_field_insert(m: Machine, i: Instruction, threads: Array) -> None:
    a, b = (m.read(o, threads, "u32").astype(np.uint64) for o in i.operands[1:3])
    at, count = (m.read(o, threads, "u32").astype(np.uint64) & np.uint64(255) for o in i.operands[3:5])
    mask = ((np.uint64(1) << np.minimum(count, 32)) - np.uint64(1)) << np.minimum(at, 32)
    found = (b & ~mask) | (a << np.minimum(at, 32) & mask)
    m.write(i.operands[0], threads, (found & np.uint64(0xFFFFFFFF)).astype(np.uint32))


@op("popc", "clz", "brev", "bfind")
def bits_of(m: Machine, i: Instruction, threads: Array) -> None:
    a = np.atleast_1d(m.read(i.operands[1], threads, i.modifiers[-1]))
    if not i.opcode.startswith(("popc.b32", "clz.b32", "brev.b32")):
        raise Fault(f"no machine knows {i.opcode}")
    bits = np.unpackbits(a.view(np.uint8).reshape(-1, 4)[:, ::-1], axis=1)  # the highest first
    if i.opcode.startswith("popc"):
        found = bits.sum(1)
    elif i.opcode.startswith("clz"):
        found = np.where(bits.any(1), bits.argmax(1), 32)
    else:
        found = np.packbits(bits[:, ::-1], axis=1)[:, ::-1].copy().view(np.uint32).reshape(-1)
    m.write(i.operands[0], threads, found.astype(np.uint32))


@op("prmt")
def permute_bytes(m: Machine, i: Instruction, threads: Array) -> None:
    """A byte of {b, a} for each nibble of c; its sign where the nibble's bit 3 is set."""
    if i.opcode != "prmt.b32":
        raise Fault(f"no machine knows {i.opcode}")
    a, b, c = (np.broadcast_to(v, threads.shape) for v in values_of(m, i, threads, "u32"))
    both = b.astype(np.uint64) << np.uint64(32) | a
    found = np.zeros(threads.shape, np.uint64)
    for k in range(4):
        nibble = (c >> np.uint32(4 * k)).astype(np.uint64) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        found |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * k)
    m.write(i.operands[0], threads, found.astype(np.uint32))


# --- products ---


def _wide(type_: str) -> str:
    return f"{type_[0]}{2 * int(type_[1:])}"


def _high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    if a.dtype.itemsize == 8:
        exact = [(int(x) * int(y)) >> 64 for x, y in np.broadcast(np.atleast_1d(a), np.atleast_1d(b))]
        return np.array([v & (1 << 64) - 1 for v in exact], np.uint64).view(a.dtype)
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return (a.astype(wide) * b.astype(wide) >> wide.type(8 * a.dtype.itemsize)).astype(a.dtype)


@op("mul", "mad")
def multiply(m: Machine, i: Instruction, threads: Array) -> None:
    type_ = i.modifiers[-1]
    if TYPES[type_].kind == "f":
        if i.opcode.startswith("mad"):
            return fma(m, i, threads)
        a, b = values_of(m, i, threads, type_)
        return give(m, i, threads, a * b)
    a, b = (m.read(o, threads, type_) for o in i.operands[1:3])
    if "wide" in i.modifiers:
        result = TYPES[_wide(type_)]
        found = a.astype(result) * b.astype(result)
    else:
        result = TYPES[type_]
        found = _high(a, b) if "hi" in i.modifiers else a * b
    if i.opcode.startswith("mad"):
        found = found + m.read(i.operands[3], threads, result)
    m.write(i.operands[0], threads, found.astype(result))


@op("fma")
def fma(m: Machine, i: Instruction, threads: Array) -> None:
    type_ = i.modifiers[-1]
    if type_ in ("bf16x2", "f16x2"):
        words = (np.broadcast_to(m.read(o, threads, "b32"), threads.shape) for o in i.operands[1:])
        half = BF16 if type_ == "bf16x2" else np.dtype(np.float16)
        found = fused(*(np.ascontiguousarray(v).view(half) for v in words))
        narrow = _narrow(found) if type_ == "bf16x2" else found.astype(np.float16)
        return m.write(i.operands[0], threads, narrow.view(np.uint32))
    a, b, c = values_of(m, i, threads, type_)
    if type_ == "bf16":
        return give(m, i, threads, _narrow(fused(a, b, c)))
    if type_ == "f64":
        return give(m, i, threads, fused_doubles(a, b, c))
    if type_ != "f32":
        raise Fault(f"no machine knows {i.opcode}")
    give(m, i, threads, fused(a, b, c).astype(np.float32))


def fused(a: Array, b: Array, c: Array) -> Array:
    """a b + c as doubles that round to what the exact number rounds to, in any type of at most half as many bits. A double holds
    the product; where the sum seems to lie halfway between two numbers of such a type, what it lost moves it off."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.atleast_1d(product + c)
    near = (total.view(np.uint64) & HALF) == 0
    if near.any():
        x, y, s = (np.broadcast_to(v, total.shape)[near] for v in (product, c, total))
        back = s - x
        lost = (x - (s - back)) + (y - back)
        nudged = np.nextafter(s, np.where(lost > 0, np.inf, -np.inf))
        total[near] = np.where((lost != 0) & np.isfinite(lost), nudged, s)
    return total


def fused_doubles(a: Array, b: Array, c: Array) -> Array:
    """a b + c of doubles: product and sum with what each loses, which is added last. Where the exact result lies within 2^-106 of
    the middle between two doubles the other one may come out."""

    def halves(v: Array) -> tuple[Array, Array]:
        high = v * 134217729.0 - (v * 134217729.0 - v)
        return high, v - high

    product = a * b
    (x, p), (y, q) = halves(a), halves(b)
    lost = ((x * y - product) + x * q + p * y) + p * q
    total = product + c
    back = total - product
    lost = lost + ((product - (total - back)) + (c - back))
    return np.where(np.isfinite(lost), total + lost, total)


def _narrow(values: Array) -> Array:
    """Doubles as bf16, rounded once: the float between has its last bit set where it is not exact."""
    near = values.astype(np.float32)
    below = np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    bits = below.view(np.uint32) | (below != values).astype(np.uint32)
    return np.where(np.isfinite(near), bits.view(np.float32), near).astype(BF16)


# --- comparisons ---

ORDER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compared(name: str, a: Array, b: Array) -> Array:
    """With a NaN all comparisons of floats are false, those that end in u true."""
    name = ORDER.get(name, name)
    if a.dtype.kind != "f":
        return COMPARE[name](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    if name in COMPARE:
        return COMPARE[name](a, b) & ~unordered
    return COMPARE[name.removesuffix("u")](a, b) | unordered


@op("lop3.b32")
def lop3(m: Machine, i: Instruction, threads: Array) -> None:
    """A function of three bits at each place: bit 4 a + 2 b + c of the table."""
    table = i.operands[4]
    assert isinstance(table, Number)
    a, b, c = (m.read(o, threads, "u32") for o in i.operands[1:4])
    found = np.zeros(threads.shape, np.uint32)
    for k in range(8):  # by the ISA: of 0xF0, 0xCC and 0xAA the function's value is the table
        if table.bits >> k & 1:
            found |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    m.write(i.operands[0], threads, found)


@op("setp")
def setp(m: Machine, i: Instruction, threads: Array) -> None:
    type_ = i.modifiers[-1]
    packed = type_ in ("bf16x2", "f16x2")  # one predicate for each half
    a, b = (np.asarray(m.read(o, threads, "b32" if packed else type_)) for o in i.operands[1:3])
    if packed:
        half = BF16 if type_ == "bf16x2" else np.dtype(np.float16)
        a, b = (np.broadcast_to(v, threads.shape).astype(np.uint32).view(half).astype(np.float32).reshape(-1, 2).T for v in (a, b))
    if "ftz" in i.modifiers:
        a, b = _flushed(a), _flushed(b)
    if type_ == "bf16":
        a, b = a.astype(np.float32), b.astype(np.float32)
    found = compared(i.modifiers[0], a, b)
    with_other: Callable[[Array], Array] = lambda v: v  # noqa: E731
    if len(i.operands) > 3:
        other = m.read(i.operands[3], threads, "pred")
        joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[i.modifiers[1]]
        with_other = lambda v: joined(v, other)  # noqa: E731
    to = i.operands[0]
    if isinstance(to, Pair):
        low, high = found if packed else (found, ~found)
        m.write(to.first, threads, with_other(low))
        m.write(to.second, threads, with_other(high))
    else:
        m.write(to, threads, with_other(found))


# --- conversions ---


@op("cvt")
def cvt(m: Machine, i: Instruction, threads: Array) -> None:
    to, source = i.modifiers[-2:]
    found = [m.read(o, threads, source) for o in i.operands[1:]]
    if "ftz" in i.modifiers:
        found = [_flushed(v) for v in found]
    if "relu" in i.modifiers or "rz" in i.modifiers or "rp" in i.modifiers or "rm" in i.modifiers:
        raise Fault(f"no machine knows {i.opcode}")
    if to in ("bf16x2", "f16x2"):  # the first operand is the upper half
        half = BF16 if to == "bf16x2" else np.dtype(np.float16)
        with np.errstate(over="ignore"):
            high, low = (np.broadcast_to(v, threads.shape).astype(half).view(np.uint16) for v in found)
        m.write(i.operands[0], threads, high.astype(np.uint32) << np.uint32(16) | low)
        return
    m.write(i.operands[0], threads, converted(np.asarray(found[0]), to, i.modifiers))


ROUND: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def converted(values: Array, to: str, modifiers: tuple[str, ...] = ()) -> Array:
    """One type's numbers as another's: floats to integers are clipped, NaN is 0; integers are cut."""
    real = values.dtype.kind in "fV"
    if real:
        for name, function in ROUND.items():
            if name in modifiers:
                values = function(values.astype(np.float64))
    if to == "tf32":  # to nearest, ties away from zero
        bits = values.astype(np.float32).view(np.uint32)
        return np.where(np.isfinite(values), bits + np.uint32(0x1000) & np.uint32(0xFFFFE000), bits)
    target = TYPES[to]
    if target.kind in "fV":
        return values.astype(target)
    if not real:
        return values.astype(target)
    info = np.iinfo(target)
    numbers = np.where(np.isnan(values), 0, values).astype(np.float64)
    return np.where(numbers >= float(info.max), info.max, np.where(numbers <= info.min, info.min, numbers).astype(target))
