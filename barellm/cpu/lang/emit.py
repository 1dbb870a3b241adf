"""The builder of one function: Python calls that append LLVM IR, with loops and branches as context managers.

Types are LLVM's, as text. A vector has `isa.lanes` lanes: `k.vec` of fp32, `k.ivec` of i32. Numbers (Python's) are accepted for
operands everywhere and become constants of the other operand's type."""

from __future__ import annotations  # in the class `int` and `float` are methods

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.lang.fp8 import FP8_FORMATS, round_fp8, widen_fp8
from barellm.cpu.lang.values import Pointer, Value, Var, constant, element, is_float, width


class Builder:
    """Emits one function. Subclassed by what kernels see (`cpu.kernel.KernelBuilder`)."""

    def __init__(self, isa: ISA) -> None:
        self.use(isa)
        self.lines: list[str] = []
        self.slots: list[str] = []
        self.declared: set[str] = set()
        self.count = 0

    def use(self, isa: ISA) -> None:
        """What follows is for this instruction set: that of the function, perhaps with fewer lanes."""
        self.isa = isa
        self.lanes = isa.lanes
        self.vec = f"<{isa.lanes} x float>"
        self.ivec = f"<{isa.lanes} x i32>"

    # --- text ---

    def fresh(self, stem: str = "v") -> str:
        """A name that is not used yet."""
        self.count += 1
        return f"{stem}{self.count}"

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def op(self, type_: str, text: str) -> Value:
        """Append the instruction `text` with a result of `type_`, which is returned."""
        name = "%" + self.fresh()
        self.line(f"{name} = {text}")
        return Value(self, type_, name)

    def declare(self, signature: str) -> None:
        self.declared.add(f"declare {signature}")

    def call(self, name: str, type_: str, *args: Value | str) -> Value:
        """A call of an intrinsic or of one of the few functions of the C library that `cpu.jit` allows. An operand is a Value, or
        LLVM's text of a constant, "i32 4"."""
        types = [a.type if isinstance(a, Value) else a.rsplit(" ", 1)[0] for a in args]
        self.declare(f"{type_} @{name}({', '.join(types)})")
        return self.op(type_, f"call {type_} @{name}({', '.join(a.typed if isinstance(a, Value) else a for a in args)})")

    def alloca(self, type_: str, count: int = 1) -> str:
        """The address of a stack slot, in the function's entry block; of several elements aligned to a cache line."""
        name = "%" + self.fresh("slot")
        many = f", i64 {count}" if count > 1 else ""
        self.slots.append(f"  {name} = alloca {type_}{many}, align {max(self.alignment(type_), 64 if many else 1)}")
        return name

    def alignment(self, type_: str) -> int:
        """The natural alignment of a type in bytes: its size."""
        nbytes = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8, "ptr": 8}[element(type_)]
        return nbytes * max(width(type_), 1)

    def function(self, name: str, params: str) -> str:
        """The module's text for this one function."""
        # Without these LLVM may split 512-bit vectors in two on processors that it thinks prefer 256 bits.
        bits = 32 * self.lanes
        attributes = f'attributes #0 = {{ nounwind "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}" }}'
        body = "\n".join([f"define void @{name}({params}) #0 {{", "entry:", *self.slots, *self.lines, "  ret void", "}"])
        return "\n".join([*sorted(self.declared), body, attributes, "!0 = !{i32 1}", ""])

    # --- conversions ---

    def const(self, value: float, type_: str) -> Value:
        return Value(self, type_, constant(value, type_))

    def int(self, value: Any) -> Value:
        return self.to(value, "i64")

    def float(self, value: Any) -> Value:
        return self.to(value, "float")

    def splat(self, value: Any) -> Value:
        """A vector with `value` in all lanes: i32 lanes for an i32 or i64, fp32 lanes for a float or double."""
        if isinstance(value, Value) and width(value.type):
            return value
        if not isinstance(value, Value):
            return self.const(value, self.vec)
        if value.type == "i64":
            value = self.op("i32", f"trunc {value.typed} to i32")
        if value.type == "double":
            value = self.op("float", f"fptrunc {value.typed} to float")
        type_ = f"<{self.lanes} x {value.type}>"
        one = self.op(type_, f"insertelement {type_} poison, {value.typed}, i64 0")
        return self.op(type_, f"shufflevector {one.typed}, {type_} poison, <{self.lanes} x i32> zeroinitializer")

    def to(self, value: Any, type_: str) -> Value:
        """`value` converted to `type_`: numbers become constants, scalars are splatted, integers (signed; i1 is 0 or 1) and floats
        converted by value, wider types truncated or rounded."""
        if not isinstance(value, Value):
            return self.const(value, type_)
        if value.type == type_:
            return value
        if width(type_) and not width(value.type):
            return self.splat(self.to(value, element(type_)))
        source, target = element(value.type), element(type_)
        if is_float(type_) and not is_float(value.type):
            instruction = "uitofp" if source == "i1" else "sitofp"
        elif is_float(value.type) and not is_float(type_):
            instruction = "fptosi"
        elif is_float(type_):
            instruction = "fpext" if target == "double" else "fptrunc"
        else:
            sizes = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
            instruction = ("zext" if source == "i1" else "sext") if sizes[target] > sizes[source] else "trunc"
        return self.op(type_, f"{instruction} {value.typed} to {type_}")

    def match(self, a: Any, b: Any) -> tuple[Value, Value]:
        """Both operands converted to one type: a number to the other's type, a scalar to the vector's (so an i64 becomes i32
        lanes), of two scalars the narrower one to the other's type (in the order i1, i32, i64, float, double)."""
        if isinstance(a, Value) and isinstance(b, Value):
            if a.type == b.type:
                return a, b
            if width(a.type) or width(b.type):
                type_ = a.type if width(a.type) else b.type
            else:
                type_ = max(a.type, b.type, key=["i1", "i32", "i64", "float", "double"].index)
            return self.to(a, type_), self.to(b, type_)
        return (a, self.to(b, a.type)) if isinstance(a, Value) else (self.to(a, b.type), b)

    def bitcast(self, v: Value, type_: str) -> Value:
        return self.op(type_, f"bitcast {v.typed} to {type_}")

    def round_bf16(self, v: Value) -> Value:
        """Round fp32 lanes to bf16 bit patterns (i16 lanes), to nearest even; NaN stays. One instruction, or integer arithmetic."""
        bits16 = f"<{self.lanes} x i16>"
        if self.isa.bf16_round:
            b = self.op(f"<{self.lanes} x bfloat>", f"fptrunc {v.typed} to <{self.lanes} x bfloat>")
            return self.op(bits16, f"bitcast {b.typed} to {bits16}")
        u = self.bitcast(v, self.ivec)
        rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16  # half a unit less one, plus one where the kept part is odd
        nan = self.op(f"<{self.lanes} x i1>", f"fcmp uno {v.typed}, {v.ref}")
        return self.op(bits16, f"trunc {self.select(nan, (u >> 16) | 0x40, rounded).typed} to {bits16}")

    def round_fp16(self, v: Value) -> Value:
        """fp32 lanes to fp16 bit patterns (i16 lanes), to nearest even; beyond the largest to infinity, NaN kept."""
        bits16 = f"<{self.lanes} x i16>"
        if self.isa.half:
            h = self.op(f"<{self.lanes} x half>", f"fptrunc {v.typed} to <{self.lanes} x half>")
            return self.op(bits16, f"bitcast {h.typed} to {bits16}")
        u = self.bitcast(v, self.ivec)
        magnitude, sign = u & 0x7FFFFFFF, (u >> 16) & 0x8000
        # To nearest even, by adding just below a half and the last bit that stays; 112 is the difference of the exponents' biases.
        normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112 << 23)) >> 13
        normal = self.select(normal < 0x7C00, normal, 0x7C00)  # infinity
        # One half has the same unit in the last place as fp16's denormals: adding it rounds.
        denormal = self.bitcast(self.bitcast(magnitude, self.vec) + 0.5, self.ivec) - 0x3F000000
        rounded = self.select(magnitude < (113 << 23), denormal, normal)
        rounded = self.select(magnitude > 0x7F800000, 0x7E00, rounded)  # NaN
        return self.op(bits16, f"trunc {(rounded | sign).typed} to {bits16}")

    def widen16(self, bits: Value, dtype: str) -> Value:
        """Convert i16 lanes, bit patterns of a 16-bit dtype, to fp32 lanes. Exact."""
        n = bits.type[1:].split(" x ")[0]
        vec, ivec = f"<{n} x float>", f"<{n} x i32>"
        if dtype == "fp16" and self.isa.half:
            h = self.op(f"<{n} x half>", f"bitcast {bits.typed} to <{n} x half>")
            return self.op(vec, f"fpext {h.typed} to {vec}")
        wide = self.op(ivec, f"zext {bits.typed} to {ivec}")
        if dtype == "bf16":
            return self.op(vec, f"bitcast {(wide << 16).typed} to {vec}")
        magnitude = wide & 0x7FFF  # fp16 without instructions for it: 10 bits of mantissa go to 23, 112 = 127 - 15 of bias
        scaled = self.op(vec, f"bitcast {(magnitude << 13).typed} to {vec}") * 2.0**112  # denormals become normal
        out = self.op(ivec, f"bitcast {scaled.typed} to {ivec}")
        # From 0x7C00 on infinity and NaN: the exponent is all ones in either format.
        out = self.select(magnitude < 0x7C00, out, (magnitude << 13) | 0x7F800000) | ((wide & 0x8000) << 16)
        return self.op(vec, f"bitcast {out.typed} to {vec}")

    def round_to(self, v: Value, dtype: str) -> Value:
        """fp32 lanes to the bit patterns of a shorter float (i16 or i8 lanes)."""
        if dtype in FP8_FORMATS:
            return round_fp8(self, v, dtype)
        return self.round_bf16(v) if dtype == "bf16" else self.round_fp16(v)

    def widen(self, bits: Value, dtype: str) -> Value:
        """The bit patterns of a shorter float to the fp32 lanes that they are. Exact."""
        return widen_fp8(self, bits, dtype) if dtype in FP8_FORMATS else self.widen16(bits, dtype)

    def prefetch(self, p: Pointer, *, write: bool = False, near: bool = True) -> None:
        """Prefetch the cache line at `p`, to be written or read, into the L1 or (not `near`) the L2; any address will do."""
        self.declare("void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.line(f"call void @llvm.prefetch.p0(ptr {p.ref}, i32 {int(write)}, i32 {3 if near else 2}, i32 1)")

    # --- lanes ---

    def iota(self) -> Value:
        """0, 1, 2, ... as i32 lanes."""
        return Value(self, self.ivec, "<" + ", ".join(f"i32 {i}" for i in range(self.lanes)) + ">")

    def mask_first(self, n: Any) -> Value:
        """The mask (i1 lanes) of the first `n` lanes: none for n <= 0, all for n >= lanes."""
        if isinstance(n, int):
            bits = ", ".join(f"i1 {'true' if i < n else 'false'}" for i in range(self.lanes))
            return Value(self, f"<{self.lanes} x i1>", f"<{bits}>")
        clipped = self.min(self.max(n, 0), self.lanes)
        return self.iota() < clipped

    def lane(self, v: Value, index: int) -> Value:
        return self.op(element(v.type), f"extractelement {v.typed}, i64 {index}")

    def shuffle(self, a: Value, b: Value | None, order: list[int]) -> Value:
        """Lanes of a (0..n-1) and b (n..2n-1) in a constant order."""
        second = b.typed if b is not None else f"{a.type} poison"
        type_ = f"<{len(order)} x {element(a.type)}>"
        return self.op(type_, f"shufflevector {a.typed}, {second}, <{len(order)} x i32> <{', '.join(f'i32 {i}' for i in order)}>")

    def interleave(self, a: Value, b: Value) -> Value:
        """a0 b0 a1 b1 ..."""
        return self.shuffle(a, b, [i for j in range(width(a.type)) for i in (j, width(a.type) + j)])

    def concat(self, parts: list[Value]) -> Value:
        """Vectors joined; the number of parts is a power of two."""
        while len(parts) > 1:
            n = width(parts[0].type)
            parts = [self.shuffle(a, b, list(range(2 * n))) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def tree(self, v: Value, combine: Any) -> Value:
        """Reduce the lanes of v to one scalar by combine(vector, vector), in a fixed tree of halves."""
        n = width(v.type)
        while n > 1:
            n //= 2
            v = combine(self.shuffle(v, None, list(range(n))), self.shuffle(v, None, list(range(n, 2 * n))))
        return self.lane(v, 0)

    def sum(self, v: Value) -> Value:
        return self.tree(v, lambda a, b: a + b)

    def maximum(self, v: Value) -> Value:
        return self.tree(v, self.max)

    # --- arithmetic without operators ---

    def fma(self, a: Any, b: Any, c: Any) -> Value:
        """a * b + c, in one rounding where the ISA has it (operands converted by `match`)."""
        a, b = self.match(a, b)
        b, c = self.match(b, c)
        if not self.isa.fma:
            return a * b + c
        lanes = width(a.type)
        name = f"llvm.fma.v{lanes}f32" if lanes else {"float": "llvm.fma.f32", "double": "llvm.fma.f64"}[a.type]
        return self.call(name, a.type, self.to(a, b.type), b, c)

    def dot(self, acc: Value, a: Value, b: Value) -> Value:
        """acc + the products of two bf16 pairs a lane, summed in fp32; a and b are i32 lanes that hold the pairs."""
        pairs = f"<{2 * self.lanes} x bfloat>"
        names = {"x86": f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", "neon": "llvm.aarch64.neon.bfdot.v4f32.v8bf16"}
        return self.call(names[self.isa.dot], self.vec, acc, self.bitcast(a, pairs), self.bitcast(b, pairs))

    def select(self, condition: Value, a: Any, b: Any) -> Value:
        a, b = self.match(a, b)
        return self.op(a.type, f"select {condition.typed}, {a.typed}, {b.typed}")

    def min(self, a: Any, b: Any) -> Value:
        a, b = self.match(a, b)
        return self.select(a < b, a, b)

    def max(self, a: Any, b: Any) -> Value:
        """The larger one; of a NaN and a number it is b."""
        a, b = self.match(a, b)
        return self.select(a > b, a, b)

    def sqrt(self, v: Value) -> Value:
        lanes = width(v.type)
        name = f"llvm.sqrt.v{lanes}f32" if lanes else {"float": "llvm.sqrt.f32", "double": "llvm.sqrt.f64"}[v.type]
        return self.call(name, v.type, v)

    def copysign(self, v: Value, sign: Value) -> Value:
        """The magnitude of `v` lanes with the signs of others."""
        if not self.isa.masked:
            return self.call(f"llvm.copysign.v{width(v.type)}f32", v.type, v, sign)
        name = "llvm.x86.avx512.pternlog.d.512"  # LLVM makes two operations of what is this one
        a, b, mask = self.bitcast(v, self.ivec), self.bitcast(sign, self.ivec), self.const(0x7FFFFFFF, self.ivec)
        merged = self.call(name, self.ivec, a, b, mask, f"i32 {0b11100100}")
        return self.bitcast(merged, v.type)

    def min_magnitude(self, v: Value, most: int) -> Value:
        """The bits (i32 lanes) of min(|v|, the fp32 whose bits are `most`); of a NaN the latter."""
        if not self.isa.masked:
            return self.min(self.bitcast(v, self.ivec) & 0x7FFFFFFF, most)
        name = "llvm.x86.avx512.mask.range.ps.512"
        limit = self.bitcast(self.const(most, self.ivec), self.vec)
        # 0b1010: the smaller magnitude, sign cleared.
        least = self.call(name, self.vec, v, limit, "i32 10", v, "i16 -1", "i32 4")
        return self.bitcast(least, self.ivec)

    def all(self, mask: Value) -> Value:
        """Whether every lane of a mask is set (i1)."""
        return self.bitcast(mask, f"i{width(mask.type)}").equals(-1)

    def ceil_div(self, a: Any, b: Any) -> Value:
        return (self.int(a) + (b - 1)) // b

    # --- control flow ---

    def var(self, initial: Any) -> Var:
        """A variable of the type of `initial`; of a Python number float or i64."""
        if not isinstance(initial, Value):
            initial = self.const(initial, "float" if isinstance(initial, float) else "i64")
        return Var(self, initial)

    def var_vec(self, value: float) -> Var:
        return Var(self, self.const(value, self.vec))

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """for i in range(start, stop, step): the body is emitted once, and i is an i64. The test comes first."""
        start, stop, step = self.int(start), self.int(stop), self.int(step)
        i = Var(self, start)
        index = start

        def goes_on() -> Value:
            nonlocal index
            index = i.value
            return index < stop

        with self.while_(goes_on, "loop"):
            yield index
            i.value = index + step

    @contextmanager
    def set_lanes(self, mask: Value) -> Iterator[Value]:
        """Loop over the set lanes of a mask (at most 64 lanes) in ascending order: the index (i64) of each."""
        lanes = width(mask.type)
        bits = self.bitcast(mask, f"i{lanes}")
        left = self.var(bits if lanes == 64 else self.op("i64", f"zext {bits.typed} to i64"))
        with self.while_(lambda: left.value.differs(0)):
            now = left.value
            yield self.call("llvm.cttz.i64", "i64", now, "i1 true")
            left.value = now & (now - 1)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """if condition (i1): a branch at run time; the body is emitted once."""
        name = self.fresh("when")
        self.line(f"br i1 {condition.ref}, label %{name}.then, label %{name}.done")
        self.label(f"{name}.then")
        yield
        self.line(f"br label %{name}.done")
        self.label(f"{name}.done")

    @contextmanager
    def otherwise(self, condition: Value) -> Iterator[None]:
        """when not `condition`."""
        with self.when(condition ^ self.const(1, "i1")):
            yield

    @contextmanager
    def while_(self, condition: Any, stem: str = "while") -> Iterator[None]:
        """while condition(): a Python callable that emits the test and returns it (i1). `stem`: of the labels' names."""
        name = self.fresh(stem)
        self.line(f"br label %{name}.head")
        self.label(f"{name}.head")
        again = condition()
        self.line(f"br i1 {again.ref}, label %{name}.body, label %{name}.done")
        self.label(f"{name}.body")
        yield
        self.line(f"br label %{name}.head")
        self.label(f"{name}.done")
