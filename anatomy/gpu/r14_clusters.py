"""Rung 14, clusters: two blocks do the tiles of two rows that lie one above the other, and share what they load of B. Each block
loads one half of their columns, and TMA writes it into the shared memory of both. So a block loads 32 KiB for a step instead of
48. Both blocks must have read a buffer before either may fill it again, so each consumer releases it in both. Triton 3.6 has no
words for this: the kernel is rung 12's, and what is missing is written into its PTX before ptxas makes machine code of it.
"""

from __future__ import annotations

import re
from itertools import cycle

import numpy as np

from anatomy.gpu.r12_tma_stores import tma_stores
from anatomy.gpu.r13_hilbert import hilbert
from anatomy.gpu_rung import gpu_rung
from barellm.program.integers import ceil_div

BLOCKS = 2  # of a cluster
B_MAP = 10  # parameters before the map of B: a map and its four sizes count as five
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"  # all threads of both blocks

START = f"""
    .reg .b32 %rank, %peer, %far;
    .reg .b16 %both;
    .reg .pred %mine;
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 %peer, %rank, 1;
    mov.b16 %both, {2**BLOCKS - 1};
"""


def paired(ptx):
    """The PTX of rung 12 for clusters of two blocks. Loops may be unrolled, so some of what changes is there several times."""

    def change(pattern, replacement, each=None):
        nonlocal ptx
        ptx, found = re.subn(pattern, replacement, ptx)
        assert found and found % (each or found) == 0, f"{found} x {pattern}"

    change(r"\.reqntid \d+\n", rf"\g<0>.explicitcluster\n.reqnctapercluster {BLOCKS}, 1, 1\n")
    change(r"(?=\n// %bb\.0:)", START)

    # Barriers are made before the other block arrives at them, and no block ends while the other may still write into it.
    made = f"\n fence.mbarrier_init.release.cluster;\n {MEET}"
    change(r"fence\.proxy\.async\.shared::cta;(?=\s+// end inline asm\s+st\.shared)", rf"\g<0>{made}")
    (idle,) = re.findall(r"(setmaxnreg\.dec\S+\s+\d+;)\s+barrier\.sync\s+1;\s+ld\.shared\.b8", ptx)  # for the first four warps
    change(r"(@%p\d+ bra\s+\S+;\s+)(bra\.uni)(?=.*\n\S+:.*\n\s*setmaxnreg\.inc)", rf"\1{idle}\n {MEET}\n \2")
    change(r"\n\s*ret;", f"\n {MEET}\\g<0>")

    # A buffer is free when the consumers of both blocks have read it.
    change(r"(mbarrier\.init\S+ \[%r\d+\]), 2;", rf"\1, {2 * BLOCKS};", 3)
    far = "mapa.shared::cluster.u32 %far, \\2, %peer;\n \\1 mbarrier.arrive.shared::cluster.b64 _, [%far];"
    change(r"(@%p\d+) mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\];", rf"\g<0>\n \1 {far}")

    # Of B's four copies, each 64 columns wide, a block starts the two of its rank, for both.
    (b_map,) = re.findall(rf"mov\.b64\s+(%rd\d+), \w+_param_{B_MAP};", ptx)
    (b_map,) = re.findall(rf"cvta\.param\.u64\s+(%rd\d+), {b_map};", ptx)
    number = cycle(range(4))

    def to_both(copy):
        guard, opcode, operands = copy.groups()
        mine = f"setp.eq.and.u32 %mine, %rank, {next(number) // 2}, {guard};"
        return f"{mine}\n @%mine {opcode}.multicast::cluster {operands}, %both;"

    change(rf"@(%p\d+) (cp\.async\.bulk\.tensor\S+) (\[%r\d+\], \[{b_map}, [^\]]*\], \[%r\d+\]);", to_both, 4)
    return ptx


@gpu_rung("clusters", dtype="bf16", mend=paired)
def launch(p):
    """A pair of tiles is a point of the curve. Behind the last row of tiles, a block finds nothing and stores nothing."""
    rows, columns = ceil_div(p.M, 256), ceil_div(p.N, 256)
    upper = hilbert(rows, columns)[:, None] // columns * 2 * columns + hilbert(rows, columns)[:, None] % columns
    order = p.table((upper + np.array([0, columns])).astype(np.int32).reshape(-1))
    maps = {"c_map": p.map(p.c, 64, 256), "a_map": p.map(p.a, 64, 64), "b_map": p.map(p.b, 64, 256), "order": order}
    blocks = BLOCKS * min(max(p.target.sms // BLOCKS, 1), rows * columns)
    p.launch(tma_stores, maps, (blocks,), warps=4, M=256 * rows)
