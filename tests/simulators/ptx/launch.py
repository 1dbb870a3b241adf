"""Launches on the PTX machine: what Triton emits for a specialisation, its parameters as ptxas lays them out, a grid's blocks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import triton.language as tl

from barellm.cuda import compile as compiler
from barellm.cuda.compile import Code, Descriptor
from barellm.cuda.compile import _path as cubin_path
from barellm.cuda.kernel import Specialisation
from barellm.runtime import artefacts
from tests.simulators.interpreter import Box, Memory, Parameter, Pointer, Words
from tests.simulators.ptx import arithmetic, asynchronous, cluster, flow, lanes, memory, tensorcore  # noqa: F401  (fill the registry)
from tests.simulators.ptx.machine import PARAMETERS_AT, WINDOW, Counts, Machine, Run
from tests.simulators.ptx.parse import parse

RUNS = {  # which must give equal bits
    "asynchronous data late, NaN where nothing was written": Run(seed=1, poison=0xFF, late=True),
    "asynchronous data at once, 3e38 where nothing was written": Run(seed=2, poison=0x7F, late=False),
}
TOGETHER = 4096  # threads of the blocks that run at once


@cache
def code_of(spec: Specialisation, arch: int) -> Code:
    """As `compiled`, with PTX in the cubin's place."""
    compile_to_cache(spec, arch)
    data = artefacts.load(cubin_path(spec, arch).with_suffix(".ptx"))
    assert data is not None, spec
    return Code.unpacked(data)


def compile_to_cache(spec: Specialisation, arch: int) -> None:
    """Unless the cache has both: the cubin, where `compiled` finds it, and beside it the PTX that ptxas made it from."""
    path = cubin_path(spec, arch)
    if any(artefacts.load(path.with_suffix(kind)) is None for kind in (".cubin", ".ptx")):
        kernel = compiler.triton_compile(spec, arch)
        code = compiler.code_of(spec, kernel, arch)
        artefacts.keep(path, code.packed())
        artefacts.keep(path.with_suffix(".ptx"), replace(code, cubin=kernel.asm["ptx"].encode()).packed())


def execute(
    spec: Specialisation,
    values: Sequence[Parameter],
    grid: tuple[int, ...],
    *,
    arch: int,
    run: Run | None = None,
    counts: Counts | None = None,
    code: Code | None = None,
) -> None:
    """All blocks of a grid, in a drawn order. `values`: the parameters in the signature's order; `code`: instead of the
    specialisation's own."""
    run = run or Run()
    code = code or code_of(spec, arch)
    kernel = parse(code.cubin.decode())
    assert kernel.threads == code.threads and code.shared_bytes <= 1 << WINDOW, spec
    assert tuple((p.nbytes, p.align) for p in kernel.parameters) == code.params, spec
    operands = Memory()
    packed, maps = pack(spec, code, values, operands)
    nx, ny, nz = (*grid, 1, 1)[:3]
    blocks = np.array([(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)])
    size = kernel.cluster
    assert nx % size == 0, f"{spec.name}: a grid of {nx} blocks in clusters of {size}"
    clusters = np.random.default_rng(run.seed).permutation(len(blocks) // size)
    blocks = blocks.reshape(-1, size, 3)[clusters].reshape(-1, 3)
    step = max(1, TOGETHER // code.threads // size) * size
    for k in range(0, len(blocks), step):
        sample_indices = [tuple(block) for block in blocks[k : k + step].tolist()]
        machine = Machine(
            kernel, sample_indices, (nx, ny, nz), memory=operands, parameters=packed, shared_bytes=code.shared_bytes, maps=maps,
            run=replace(run, seed=run.seed + k), counts=counts,
        )  # fmt: skip
        machine.run()


def pack(
    spec: Specialisation, code: Code, values: Sequence[Parameter], operands: Memory
) -> tuple[bytes, dict[int, tuple[Box, Descriptor]]]:
    """The parameters' bytes, and of each tensor map, by its address, what it describes and how it is encoded."""
    packed = bytearray(code.offsets[-1] + code.params[-1][0])
    offsets, described = iter(code.offsets), iter(code.descriptors)
    maps = {}
    for (name, type_), value in zip(spec.signature, values, strict=True):
        at = next(offsets)
        if isinstance(value, Box):
            maps[PARAMETERS_AT + at] = value, next(described)
            for form, number in zip("iiqq", (value.rows, value.columns, value.stride, 1), strict=True):
                struct.pack_into(f"<{form}", packed, next(offsets), number)
        elif isinstance(value, Words):
            struct.pack_into("<Q", packed, at, operands.table(type_, value, tl.str_to_ty("*i64", None)))
        elif isinstance(value, Pointer):
            assert name not in spec.aligned or value.address % 16 == 0, f"{spec.name}: {name} is compiled as a multiple of 16"
            struct.pack_into("<Q", packed, at, operands.tagged(value, tl.str_to_ty(type_, None)))
        else:
            struct.pack_into("<i", packed, at, value)
    return bytes(packed), maps
