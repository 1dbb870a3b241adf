"""A launch's parameters as the drivers of the tests hand them to who runs a kernel: out of bytes, with the memory around each
pointer.

A tensor map is 128 bytes, whose layout on a GPU is not published: both drivers, mock.py and libcuda.c, write `MAP`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from barellm.cuda.compile import Code
from barellm.cuda.kernel import Specialisation
from tests.cuda.standin import ELEMENTS, boxed
from tests.simulators.interpreter import Box, Parameter, Pointer, Words

# The driver's number of the element type, its bytes; address, columns, rows, bytes from row to row; box, swizzle, promotion, fill.
MAP, MAGIC = struct.Struct("<8sIIQQQQIIIII"), b"mock map"
Span = Callable[[int, int], tuple[int, int]]  # an address and a number of bytes -> the allocation that holds them


def decoded(spec: Specialisation, code: Code, params: Sequence[bytes], span: Span) -> list[Parameter]:
    """Each parameter of the signature from the bytes of those of the code. AssertionError where they are not what the code was
    compiled for."""
    rest, described = iter(params), iter(code.descriptors)
    values: list[Parameter] = []
    for (name, type_), kind in zip(spec.signature, code.arguments, strict=True):
        data = next(rest)
        if kind == "*":
            values.append(around(*struct.unpack("<Q", data), span))
        elif kind == "i32":
            values.append(*struct.unpack("<i", data))
        else:
            assert kind == "map", (name, kind)
            magic, number, nbytes, address, columns, rows, pitch, *box, swizzle, _, _ = MAP.unpack(data[: MAP.size])
            element, shape = boxed(type_)
            d = next(described)
            assert magic == MAGIC and (number, nbytes) == (ELEMENTS[element][0], ELEMENTS[element][2]), (spec.name, name)
            assert tuple(reversed(box)) == d.box and swizzle == d.swizzle, (spec.name, name, box, d)
            sizes = [*struct.unpack("<ii", next(rest) + next(rest)), *struct.unpack("<qq", next(rest) + next(rest))]
            assert sizes == [rows, columns, pitch // nbytes, 1], (spec.name, name, sizes)
            end = address + (rows - 1) * pitch + columns * nbytes
            pointer = Pointer(address, *span(address, end - address), True)
            values.append(Box(pointer, rows, columns, pitch // nbytes, (shape[0], shape[1])))
    assert [int.from_bytes(scratch) for scratch in rest] == [0, 0], f"{spec.name}: Triton's scratch"
    return values


def around(address: int, span: Span) -> Pointer:
    """An address with all of its allocation."""
    return Pointer(address, *span(address, 1), True)


def with_tables(spec: Specialisation, values: Sequence[Parameter], span: Span) -> list[Parameter]:
    """The parameters with what tables have in memory now."""
    found = list(values)
    for i, (_, type_) in enumerate(spec.signature):
        value = found[i]
        if type_.startswith("table<"):
            assert isinstance(value, Pointer), (spec.name, type_)
            found[i] = Words.read(type_, value, lambda address: around(address, span))
    return found
