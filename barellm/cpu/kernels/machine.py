"""Roofline microbenchmarks: kernels that only compute (peak FLOP/s) or only move bytes (peak bandwidth)."""

from functools import reduce
from operator import add

from barellm.cpu.kernels.gemm import amx

ACCUMULATORS = 12  # enough to hide a multiply-add's latency on two ports; 8 with 16 registers


def peak(k, out, iterations, *, pair: bool) -> None:
    """The kernel of the peak FLOP/s: every thread does `iterations` times 2 x ACCUMULATORS independent vector multiply-adds, with
    `pair` dot products of bf16 pairs, or tile products on AMX. `out` (threads, lanes) gets their sum, which keeps them alive."""
    if pair and k.isa.tiles:
        amx.peak_loop(k, iterations)
        return
    one = k.const(0x3F803F80, k.ivec)  # two bf16 ones, or an fp32 of about 1
    count = ACCUMULATORS if k.isa.registers == 32 else 8
    acc = [k.var_vec(float(i)) for i in range(count)]
    a = k.splat(k.const(1e-9, "float"))
    with k.loop(0, iterations):
        for v in (*acc, *acc):
            v.value = k.dot(v.value, one, one) if pair else k.fma(v.value, a, a)
    out.store(reduce(add, [v.value for v in acc]), k.thread * k.lanes)


def peak_operations(isa, *, pair: bool) -> int:
    """Floating-point operations of one iteration of one thread."""
    if pair and isa.tiles:
        return amx.PEAK_FLOPS
    return 2 * (ACCUMULATORS if isa.registers == 32 else 8) * isa.lanes * (4 if pair else 2)


def move(k, sums, reads, writes, updates, iterations, *, mix, nontemporal: bool) -> None:
    """The kernel of the peak bandwidth: each of `iterations` reads, writes, and updates in place as many vectors as `mix` (read,
    write, update) says, from three arrays. The sums of what is read go to `sums` (threads, lanes), which keeps the loads."""
    read, write, update = mix
    totals = [k.var_vec(0.0) for _ in range(4)]
    with k.parallel_range(iterations, 4096) as (begin, end), k.loop(begin, end) as i:
        for v in range(read):
            total = totals[v % len(totals)]
            total.value = total.value + reads.load(i * (read * k.lanes) + v * k.lanes)
        for v in range(write):
            writes.store(1.5, i * (write * k.lanes) + v * k.lanes, nontemporal=nontemporal)
        for v in range(update):
            at = i * (update * k.lanes) + v * k.lanes
            updates.store(updates.load(at) * 1.5, at)
    total = totals[0].value + totals[1].value + totals[2].value + totals[3].value
    sums.store(total, k.thread * k.lanes)
