"""Cubins read byte by byte, past Triton and its PTX: where a kernel's parameters lie, as the driver will copy them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

from barellm.cuda.compile import Code
from barellm.cuda.kernel import Specialisation
from tests.cuda import standin

SECTIONS = struct.Struct("<IIQQQQIIQQ")  # an ELF section's head: name, type, flags, address, offset, size, ...
ATTRIBUTE = struct.Struct("<BBH")  # of .nv.info: how the value is given, which one, the value or its size
PARAMETER = struct.Struct("<IHHI")  # 0, number, offset, and size << 18 with flags below
BLOCK = struct.Struct("<IHH")  # a symbol, where the parameters begin in constant memory, their bytes
SIZED = 4  # the value follows
KPARAM_INFO, PARAM_CBANK = 0x17, 0x0A


def sections(elf: bytes) -> dict[str, bytes]:
    (table,), (count, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 60)
    heads = [SECTIONS.unpack_from(elf, table + SECTIONS.size * i) for i in range(count)]
    text = heads[names][4]
    return {elf[text + h[0] : elf.index(b"\0", text + h[0])].decode(): elf[h[4] : h[4] + h[5]] for h in heads}


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Which, and the value where it follows."""
    at = 0
    while at < len(info):
        form, which, size = ATTRIBUTE.unpack_from(info, at)
        at += ATTRIBUTE.size
        if form == SIZED:
            yield which, info[at : at + size]
            at += size


def parameters(code: Code) -> tuple[list[tuple[int, int]], int, int]:
    """(offset, bytes) of each parameter of the kernel; where the block of them begins in constant memory; its bytes."""
    found: dict[int, tuple[int, int]] = {}
    start = total = 0
    for which, value in attributes(sections(code.cubin)[f".nv.info.{code.name}"]):
        if which == KPARAM_INFO:
            _, number, offset, packed = PARAMETER.unpack(value)
            found[number] = offset, packed >> 18
        elif which == PARAM_CBANK:
            _, start, total = BLOCK.unpack(value)
    assert sorted(found) == list(range(len(found)))
    return [found[i] for i in range(len(found))], start, total


def hold(spec: Specialisation, code: Code) -> None:
    """The cubin's parameters, what a launch will pack, and what the driver in Python takes for them are one."""
    known, start, total = parameters(code)
    assert start == standin.PARAMETERS_AT[code.arch], f"{code.name}: parameters from {start:#x} of constant memory on"
    placed = standin.placed(code.params, code.arch)
    assert known == placed and total == sum(known[-1]), f"{code.name}: {known} in the cubin, {placed} from the PTX"
    expected = replace(standin.code(spec, code.arch, code.cubin), shared_bytes=code.shared_bytes)
    assert code == expected, f"{code.name} is not what the driver in Python takes it for"
