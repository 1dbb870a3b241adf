"""The values of the kernel language: values with Python's operators, variables, and typed pointers.

Scalars are i64, float or double; vectors have `isa.lanes` lanes of float or i32. A variable that changes in a loop is a `Var` (a
stack slot that one cheap pass turns into registers). Memory is read and written through typed Pointers, which convert shorter
floats to fp32 lanes on the way and always state an alignment: a vector access without one crashes on unaligned data."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from barellm.program.dtypes import FORMATS, LARGEST

if TYPE_CHECKING:
    from barellm.cpu.lang.emit import Builder

LLVM = {"fp64": "double", "fp32": "float"}  # shorter floats are integers to LLVM, for most processors know no others
ITEM = {name: (LLVM.get(name, f"i{f.bits}"), f.bits // 8) for name, f in FORMATS.items() if not f.planes}
SHORT = ("bf16", "fp16", *LARGEST)  # floats that are computed with as fp32
INT_COMPARE = {"<": "slt", "<=": "sle", ">": "sgt", ">=": "sge", "==": "eq", "!=": "ne"}
FLOAT_COMPARE = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}


def element(type_: str) -> str:
    """The element type of a vector type; a scalar type itself."""
    return type_.split(" x ")[1][:-1] if type_.startswith("<") else type_


def width(type_: str) -> int:
    """Lanes of a vector type, 0 for a scalar."""
    return int(type_[1:].split(" x ")[0]) if type_.startswith("<") else 0


def is_float(type_: str) -> bool:
    return element(type_) in ("float", "double")


def constant(value: float, type_: str) -> str:
    """LLVM's literal of a Python number in a type, a vector's with equal lanes: floats in hexadecimal, so that no digit is lost."""
    one = element(type_)
    if one == "double":
        text = f"0x{struct.unpack('>Q', struct.pack('>d', float(value)))[0]:016X}"
    elif one == "float":
        single = struct.unpack("f", struct.pack("f", float(value)))[0]
        text = f"0x{struct.unpack('>Q', struct.pack('>d', single))[0]:016X}"
    else:
        text = str(int(value))
    lanes = width(type_)
    return text if not lanes else "<" + ", ".join([f"{one} {text}"] * lanes) + ">"


def arithmetic(integer: str, floating: str = "", *, swap: bool = False) -> Callable[[Value, Any], Value]:
    """An operator: the instruction `integer` or `floating`, by the operands' type; `swap`: the other operand is the left one."""

    def operator(self: Value, other: Any) -> Value:
        a, b = self.k.match(self, other)
        a, b = (b, a) if swap else (a, b)
        return self.k.op(a.type, f"{floating or integer if is_float(a.type) else integer} {a.typed}, {b.ref}")

    return operator


def comparison(operator_: str) -> Callable[[Value, Any], Value]:
    """A comparison of INT_COMPARE (signed) or FLOAT_COMPARE (false for NaN, but "!="): i1, or i1 lanes of a vector."""

    def operator(self: Value, other: Any) -> Value:
        a, b = self.k.match(self, other)
        name = f"fcmp {FLOAT_COMPARE[operator_]}" if is_float(a.type) else f"icmp {INT_COMPARE[operator_]}"
        lanes = width(a.type)
        return self.k.op(f"<{lanes} x i1>" if lanes else "i1", f"{name} {a.typed}, {b.ref}")

    return operator


class Value:
    """One SSA value, or a constant."""

    __slots__ = ("k", "ref", "type")

    def __init__(self, k: Builder, type_: str, ref: str) -> None:
        self.k, self.type, self.ref = k, type_, ref

    @property
    def typed(self) -> str:
        return f"{self.type} {self.ref}"

    __add__ = __radd__ = arithmetic("add", "fadd")
    __sub__, __rsub__ = arithmetic("sub", "fsub"), arithmetic("sub", "fsub", swap=True)
    __mul__ = __rmul__ = arithmetic("mul", "fmul")
    __truediv__ = __floordiv__ = arithmetic("sdiv", "fdiv")
    __rtruediv__ = arithmetic("sdiv", "fdiv", swap=True)
    __mod__ = arithmetic("srem", "frem")
    __and__, __or__, __xor__ = arithmetic("and"), arithmetic("or"), arithmetic("xor")
    __lshift__, __rshift__ = arithmetic("shl"), arithmetic("lshr")  # logical: zeros come in

    def __neg__(self) -> Value:
        return self.k.op(self.type, f"fneg {self.typed}") if is_float(self.type) else 0 - self

    __lt__, __le__, __gt__, __ge__, equals, differs = map(comparison, ("<", "<=", ">", ">=", "==", "!="))


class Var:
    """A variable: `v.value` reads it, `v.value = x` writes it."""

    def __init__(self, k: Builder, initial: Value) -> None:
        self.k, self.type = k, initial.type
        self.slot = k.alloca(initial.type)
        self.value = initial

    @property
    def value(self) -> Value:
        return self.k.op(self.type, f"load {self.type}, ptr {self.slot}, align {self.k.alignment(self.type)}")

    @value.setter
    def value(self, new: Any) -> None:
        new = self.k.to(new, self.type)
        self.k.line(f"store {new.typed}, ptr {self.slot}, align {self.k.alignment(self.type)}")


class Pointer:
    """An address of elements of `dtype`. Loads give fp32 (or i32) values whatever the storage."""

    def __init__(self, k: Builder, ref: str, dtype: str) -> None:
        self.k, self.ref, self.dtype = k, ref, dtype

    @property
    def itemsize(self) -> int:
        return ITEM[self.dtype][1]

    def at(self, index: Any) -> Pointer:
        """The address `index` elements further."""
        return self.bytes(self.k.int(index) * self.itemsize) if isinstance(index, Value) else self.bytes(index * self.itemsize)

    def bytes(self, offset: Any) -> Pointer:
        if isinstance(offset, int) and offset == 0:
            return self
        offset = self.k.int(offset)
        return Pointer(self.k, self.k.op("ptr", f"getelementptr i8, ptr {self.ref}, {offset.typed}").ref, self.dtype)

    def as_dtype(self, dtype: str) -> Pointer:
        return Pointer(self.k, self.ref, dtype)

    # --- scalars ---

    def get(self, index: Any = 0) -> Value:
        """Load one element: fp32 for shorter floats, i64 for i32, else as stored."""
        k, p = self.k, self.at(index)
        type_, size = ITEM[self.dtype]
        v = k.op(type_, f"load {type_}, ptr {p.ref}, align {size}")
        if self.dtype == "bf16":
            wide = k.op("i32", f"zext i16 {v.ref} to i32") << 16
            return k.op("float", f"bitcast i32 {wide.ref} to float")
        if self.dtype in SHORT:
            one = k.op(f"<1 x {type_}>", f"insertelement <1 x {type_}> undef, {type_} {v.ref}, i64 0")
            return k.lane(k.widen(k.shuffle(one, None, [0] * k.lanes), self.dtype), 0)
        return k.op("i64", f"sext i32 {v.ref} to i64") if self.dtype == "i32" else v

    def put(self, value: Any, index: Any = 0) -> None:
        """Store one element, rounded to the dtype; an i64 to an i32 is truncated."""
        k, p = self.k, self.at(index)
        type_, size = ITEM[self.dtype]
        if self.dtype in SHORT:
            value = k.lane(k.round_to(k.splat(value), self.dtype), 0)
        elif self.dtype == "i32" and isinstance(value, Value) and value.type == "i64":
            value = k.op("i32", f"trunc {value.typed} to i32")
        k.line(f"store {k.to(value, type_).typed}, ptr {p.ref}, align {size}")

    # --- vectors ---

    def load(self, index: Any = 0, mask: Value | None = None) -> Value:
        """Load `isa.lanes` elements as fp32 (or i32) lanes; masked lanes are zero and their memory is not touched."""
        k = self.k
        raw = self.load_raw(index, mask)
        return k.widen(raw, self.dtype) if self.dtype in SHORT else raw

    def load_raw(self, index: Any = 0, mask: Value | None = None) -> Value:
        """Load a vector in the storage type, unconverted; masked lanes are zero and their memory is not touched."""
        k, p = self.k, self.at(index)
        item, size = ITEM[self.dtype]
        type_ = f"<{k.lanes} x {item}>"
        if mask is None:
            return k.op(type_, f"load {type_}, ptr {p.ref}, align {size}")
        name = f"llvm.masked.load.v{k.lanes}{ {'float': 'f32', 'double': 'f64'}.get(item, item) }.p0"
        k.declare(f"{type_} @{name}(ptr, <{k.lanes} x i1>, {type_})")
        return k.op(type_, f"call {type_} @{name}(ptr align {size} {p.ref}, {mask.typed}, {type_} zeroinitializer)")

    def store(self, value: Any, index: Any = 0, mask: Value | None = None, *, nontemporal: bool = False) -> None:
        """Lanes to memory, rounded to the dtype. `nontemporal` needs an address aligned to the vector."""
        k = self.k
        if self.dtype in SHORT:
            value = k.round_to(k.to(value, k.vec), self.dtype)
        self.store_raw(value, index, mask, nontemporal=nontemporal)

    def store_raw(self, value: Any, index: Any = 0, mask: Value | None = None, *, nontemporal: bool = False) -> None:
        """Store a vector of the storage type; masked lanes are not written. `nontemporal` as in `store`, without a mask."""
        k, p = self.k, self.at(index)
        item, size = ITEM[self.dtype]
        value = k.to(value, f"<{k.lanes} x {item}>")
        if mask is not None and mask.ref == k.mask_first(1).ref:
            # LLVM 22 makes a 32-bit store of a masked, truncating 16-bit one whose mask is one constant lane.
            k.line(f"store {k.lane(value, 0).typed}, ptr {p.ref}, align {size}")
        elif mask is not None:
            name = f"llvm.masked.store.v{k.lanes}{ {'float': 'f32', 'double': 'f64'}.get(item, item) }.p0"
            k.declare(f"void @{name}({value.type}, ptr, <{k.lanes} x i1>)")
            k.line(f"call void @{name}({value.typed}, ptr align {size} {p.ref}, {mask.typed})")
        elif nontemporal:
            k.line(f"store {value.typed}, ptr {p.ref}, align {size * k.lanes}, !nontemporal !0")
        else:
            k.line(f"store {value.typed}, ptr {p.ref}, align {size}")
