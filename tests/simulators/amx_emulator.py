"""AMX's tile instructions as functions in LLVM IR, so that kernels written for them run on a processor without.

`emulate` gives every call of a tile intrinsic a file of eight tiles in the kernel's own frame, one a thread like registers.
Semantics as in Intel's manual: a row beyond a tile's rows, and bytes beyond its colsb, are zero after a load; tdpbf16ps adds
up even and odd elements of the pairs apart, by fused multiply-adds that flush denormals, and then both to the accumulator;
ldtilecfg and tilerelease clear all tiles. Where the processor would fault (an unconfigured tile, shapes that do not fit), the
result is NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from barellm.cpu import isa as isas
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Specialisation
from barellm.cpu.lang import Builder, Pointer, Value

NAME = f"amx_bf16_emulated_{sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"  # a key of the object cache
ISA_EMULATED = replace(isas.X86["amx_bf16"], name=NAME, cpu="x86-64-v4", features="+avx512bf16")
EMULATED = [ISA_EMULATED] if "avx512_bf16" in isas.available() else []
TILES, ROW, TILE = 8, 64, 1024  # bytes
CONFIG = TILES * TILE  # the configuration follows the tiles
NAN = -1
REAL = Specialisation.ir


def ir(spec: Specialisation, isa: ISA) -> str:
    """Takes the place of Specialisation.ir."""
    text = REAL(spec, isa)
    return emulate(text) if isa.name == NAME else text


def emulate(real: str) -> str:
    """IR with functions in place of tile intrinsics."""
    text = re.sub(r"^declare void @llvm\.x86\.(ld)?t(ile|dp).*\n", "", real, flags=re.M)
    if text == real:
        return real
    text = re.sub(r"call void @llvm\.x86\.(\w+)\(", r"call void @amx_\1(ptr %tilefile, ", text).replace("tilefile, )", "tilefile)")
    head = f"entry:\n  %tilefile = alloca [{CONFIG + ROW} x i8], align 64\n  call void @amx_tilerelease(ptr %tilefile)"
    lines = (text.replace("entry:", head, 1) + _functions()).splitlines()
    once = {line for line in lines if line.startswith(("declare", "attributes", "!0"))}
    return "\n".join([*sorted(once), *(line for line in lines if line not in once)]) + "\n"


class Tile:
    """A tile named by an i8 parameter: its bytes, its shape now."""

    def __init__(self, k: Builder, number: str) -> None:
        self.k, index = k, k.op("i64", f"zext i8 {number} to i64")
        file = Pointer(k, "%file", "i32")
        self.data = file.bytes(index * TILE)
        at = file.bytes(index + (CONFIG + 48))
        self.rows = k.op("i64", f"zext i8 {k.op('i8', f'load i8, ptr {at.ref}').ref} to i64")
        at = file.bytes(index * 2 + (CONFIG + 16))
        self.colsb = k.op("i64", f"zext i16 {k.op('i16', f'load i16, ptr {at.ref}').ref} to i64")
        self.missing = (self.rows * self.colsb).equals(0)

    def mask(self, row: Value) -> Value:
        return self.k.mask_first(self.k.select(row < self.rows, self.colsb // 4, 0))

    def fill(self, value: int) -> None:
        with self.k.loop(0, TILE // 4, self.k.lanes) as i:
            self.data.store_raw(value, i)


def _parameters(**kinds: str) -> str:
    return ", ".join(["ptr %file", *(f"{kind} %{name}" for name, kind in kinds.items())])


@cache
def _functions() -> str:
    made: list[tuple[str, str, Callable[[Builder], None]]] = [
        ("ldtilecfg", _parameters(config="ptr"), _ldtilecfg),
        ("tilerelease", _parameters(), _tilerelease),
        ("tilezero", _parameters(t="i8"), lambda k: Tile(k, "%t").fill(0)),
        ("tileloadd64", _parameters(t="i8", base="ptr", stride="i64"), _tileloadd64),
        ("tilestored64", _parameters(t="i8", base="ptr", stride="i64"), _tilestored64),
        ("tdpbf16ps", _parameters(d="i8", a="i8", b="i8"), _tdpbf16ps),
    ]
    text = ""
    for name, parameters, emit in made:
        k = Builder(ISA_EMULATED)
        emit(k)
        text += k.function(f"amx_{name}", parameters)
    return text


def _ldtilecfg(k: Builder) -> None:
    _tilerelease(k)
    config = Pointer(k, "%config", "i32").load_raw()
    palette = k.op("i32", f"and {k.lane(config, 0).typed}, 255")
    with k.when(palette.equals(1)):
        Pointer(k, "%file", "i32").bytes(CONFIG).store_raw(config)


def _tilerelease(k: Builder) -> None:
    with k.loop(0, (CONFIG + ROW) // 4, k.lanes) as i:
        Pointer(k, "%file", "i32").store_raw(0, i)


def _row(k: Builder, r: Value) -> Pointer:
    return Pointer(k, "%base", "i32").bytes(r * Value(k, "i64", "%stride"))


def _tileloadd64(k: Builder) -> None:
    tile = Tile(k, "%t")
    with k.loop(0, TILE // ROW) as r:
        tile.data.store_raw(_row(k, r).load_raw(0, tile.mask(r)), r * k.lanes)
    with k.when(tile.missing):
        tile.fill(NAN)


def _tilestored64(k: Builder) -> None:
    tile = Tile(k, "%t")
    with k.loop(0, TILE // ROW) as r:
        _row(k, r).store_raw(tile.data.load_raw(r * k.lanes), 0, tile.mask(r))
    with k.when(tile.missing), k.loop(0, TILE // ROW) as r:
        _row(k, r).store_raw(NAN)


def flushed(k: Builder, x: Value) -> Value:
    """Denormals as zeros of their sign."""
    bits = k.bitcast(x, k.ivec)
    return k.bitcast(k.select((bits & 0x7F800000).equals(0), bits & -0x80000000, bits), k.vec)


def halves(k: Builder, pairs: Value) -> list[Value]:
    """The even and the odd bf16 of 32-bit lanes, as fp32."""
    return [flushed(k, k.bitcast(bits, k.vec)) for bits in (pairs << 16, pairs & -0x10000)]


def _tdpbf16ps(k: Builder) -> None:
    d, a, b = (Tile(k, f"%{name}") for name in "dab")
    with k.loop(0, d.rows) as m:
        sums = [k.var_vec(0.0), k.var_vec(0.0)]
        with k.loop(0, a.colsb // 4) as p:
            pair = k.splat(k.op("i32", f"load i32, ptr {a.data.at(m * k.lanes + p).ref}, align 4"))
            for total, x, y in zip(sums, halves(k, pair), halves(k, b.data.load_raw(p * k.lanes)), strict=True):
                total.value = flushed(k, k.fma(x, y, total.value))
        row = d.data.as_dtype("fp32").at(m * k.lanes)
        both = flushed(k, sums[0].value + sums[1].value)
        row.store(flushed(k, flushed(k, row.load()) + both))
    fits: Any = d.rows.equals(a.rows) & d.colsb.equals(b.colsb) & (a.colsb // 4).equals(b.rows)
    for tile in (d, a, b):
        fits = fits & (tile.missing ^ k.const(1, "i1"))
    with k.otherwise(fits):
        d.fill(NAN)
