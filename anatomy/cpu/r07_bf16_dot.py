"""Rung 7, bf16 dot: operands of 16 bits, and an instruction that adds two products to each fp32 lane. Half the bytes move, and
one instruction (vdpbf16ps on x86-64, bfdot on aarch64) does four operations a lane instead of two. It wants pairs: two
neighbours along the depth side by side. A has them, because its rows run along the depth. Packing makes them for B, from two
rows; behind an odd depth it puts a zero. Machines without such an instruction compile this rung and do not run it.
"""

from anatomy.cpu.r05_register_tile import VECTORS, columns, multiplied, rows_of, step, store
from anatomy.cpu.r06_packed import panel_bytes
from anatomy.rung import rung


def pairs_of(k, a, i, *, M, K):
    """left(r, u): elements 2 u and 2 u + 1 of row i + r of A in all lanes. The second of a last odd one is zero."""
    rows = [a.at(k.min(i + r, M - 1) * K) for r in range(rows_of(k.isa))]

    def left(r, u):
        word = rows[r].bytes(u << 2)
        if K % 2 == 0:
            return k.splat(k.op("i32", f"load i32, ptr {word.ref}, align 2"))
        low = k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {word.ref}, align 2').ref} to i32")
        there = k.select(u * 2 + 1 < K, word.bytes(2).get(), 0.0)  # a bf16 as fp32 has its bits in the upper half
        return k.splat(low | k.bitcast(there, "i32"))

    return left


def packed_pairs(k, b, j, masks, *, N, K, span):
    """Columns j... of B as pairs in this thread's scratch, (K / 2, span) i32: right(u, v) of `multiplied`."""
    panel, wide = k.thread_scratch("i32"), k.ivec

    def row(p, v):
        bits = b.at(p * N).load_raw(j + v * k.lanes, masks[v])
        return k.op(wide, f"zext {bits.typed} to {wide}")

    with k.loop(0, K // 2) as u:
        for v in range(len(masks)):
            panel.store_raw(row(u * 2, v) | (row(u * 2 + 1, v) << 16), u * span + v * k.lanes)
    if K % 2:
        for v in range(len(masks)):
            panel.store_raw(row(k.int(K - 1), v), K // 2 * span + v * k.lanes)
    return lambda u, v: panel.load_raw(u * span + v * k.lanes)


def double(isa):
    """As rung 5, but each multiply-add is two."""
    operations, nbytes = step(isa)
    return 2 * operations, nbytes


@rung("bf16 dot", step=double, dtype="bf16", scratch=panel_bytes, needs=lambda isa: bool(isa.dot))
def bf16_dot(k, c, a, b, *, M, N, K):
    def panel(j, masks):
        right = packed_pairs(k, b, j, masks, N=N, K=K, span=VECTORS * k.lanes)
        with k.loop(0, M, rows_of(k.isa)) as i:
            left = pairs_of(k, a, i, M=M, K=K)
            tile = multiplied(k, left, right, (K + 1) // 2, fma=lambda x, y, total: k.dot(total, x, y))
            store(k, c, tile, i, j, masks, M=M, N=N)

    columns(k, N, panel)
