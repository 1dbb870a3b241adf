"""Kernels written by hand, for tests of the PTX machine."""

from __future__ import annotations

import struct

import numpy as np
import triton.language as tl

from tests.simulators.interpreter import Memory, Pointer
from tests.simulators.ptx import launch  # noqa: F401  (fills the registry)
from tests.simulators.ptx.machine import Counts, Machine, Run
from tests.simulators.ptx.parse import parse

MODULE = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0, .param .u64 kernel_param_1)
.reqntid THREADS
{
    .reg .pred %p<8>;
    .reg .b16 %rs<32>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<32>;
    ld.param.b64 %rd0, [kernel_param_0];
    ld.param.b64 %rd1, [kernel_param_1];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd2, %r0, SIZE;
    add.s64 %rd3, %rd0, %rd2;    // where a thread's input lies
    add.s64 %rd4, %rd1, %rd2;    // and its output
BODY
    ret;
}
"""


def run(body: str, given: np.ndarray, out: str, *, threads: int = 32, how: Run | None = None) -> np.ndarray:
    """What a body gives: `%rd3` is the address of this thread's element of `given`, `%rd4` that of its result, 8 bytes each."""
    data = np.zeros(max(len(given), threads), "u8")
    data.view(f"V{given.dtype.itemsize}").reshape(len(data), -1)[: len(given), 0] = given.view(f"V{given.dtype.itemsize}")
    result = np.zeros(threads, "u8")
    run_on(body, data, result, threads=threads, how=how)
    return result.view(out).reshape(threads, -1)[:, 0].copy()


def run_on(
    body: str, data: np.ndarray, result: np.ndarray, *, threads: int = 32, how: Run | None = None, counts: Counts | None = None
) -> None:
    """A body, with the addresses of what it reads in `%rd0` and of what it writes in `%rd1`."""
    memory = Memory()
    addresses = []
    for array, writable in ((data, False), (result, True)):
        start = array.ctypes.data
        addresses.append(memory.tagged(Pointer(start, start, start + array.nbytes, writable), tl.str_to_ty("*i64", None)))
    text = MODULE.replace("BODY", body).replace("THREADS", str(threads)).replace("SIZE", "8")
    Machine(
        parse(text), [(0, 0, 0)], (1, 1, 1), memory=memory, parameters=struct.pack("<QQ", *addresses), shared_bytes=1024,
        run=how, counts=counts,
    ).run()  # fmt: skip
