"""Kernels that only compute, or only move bytes. They show the best that this machine can do, which is the bound for all others."""

from __future__ import annotations

from barellm.cpu.kernels.gemm import amx

ACCUMULATORS = 12


def peak(k, out, turns, *, pair: bool) -> None:
    """Every thread: `turns` times 2 x ACCUMULATORS independent multiply-adds (or bf16 pair dots) of a vector, or tile products."""
    if pair and k.isa.tiles:
        amx.repeat(k, turns)
        return
    one = k.const(0x3F803F80, k.ivec)  # two bf16 ones, or an fp32 of about 1
    count = ACCUMULATORS if k.isa.registers == 32 else 8
    acc = [k.var_vec(float(i)) for i in range(count)]
    a = k.splat(k.const(1e-9, "float"))
    with k.loop(0, turns):
        for v in (*acc, *acc):
            v.value = k.dot(v.value, one, one) if pair else k.fma(v.value, a, a)
    total = acc[0].value
    for v in acc[1:]:
        total = total + v.value
    out.store(total, k.thread * k.lanes)


def peak_operations(isa, *, pair: bool) -> int:
    """Floating-point operations of one turn of one thread."""
    if pair and isa.tiles:
        return amx.REPEATED
    return 2 * (ACCUMULATORS if isa.registers == 32 else 8) * isa.lanes * (4 if pair else 2)


def move(k, sums, reads, writes, updates, turns, *, mix, nontemporal: bool) -> None:
    """Each turn reads, writes, and updates in place as many vectors as `mix` says, from three arrays. The sums of what is only
    read go to `sums`, a line for each thread, so that the loads are not dropped."""
    read, write, update = mix
    totals = [k.var_vec(0.0) for _ in range(4)]
    with k.parallel_range(turns, 4096) as (begin, end), k.loop(begin, end) as turn:
        for v in range(read):
            total = totals[v % len(totals)]
            total.value = total.value + reads.load(turn * (read * k.lanes) + v * k.lanes)
        for v in range(write):
            writes.store(1.5, turn * (write * k.lanes) + v * k.lanes, nontemporal=nontemporal)
        for v in range(update):
            at = turn * (update * k.lanes) + v * k.lanes
            updates.store(updates.load(at) * 1.5, at)
    total = totals[0].value + totals[1].value + totals[2].value + totals[3].value
    sums.store(total, k.thread * k.lanes)
