"""What this machine can do at best: kernels that only compute, or only move bytes. The bounds that others are held against."""

from __future__ import annotations

from barellm.cpu.kernels import amx

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


def copy(k, out, source, count, *, nontemporal: bool) -> None:
    """out = source, `count` fp32 elements, a multiple of 4096."""
    with k.claim(count, 65536) as (begin, end), k.loop(begin, end, 4 * k.lanes) as i:
        for v in range(4):
            out.store(source.load(i + v * k.lanes), i + v * k.lanes, nontemporal=nontemporal)


def update(k, out, count) -> None:
    """out = 1.5 out in place."""
    with k.claim(count, 65536) as (begin, end), k.loop(begin, end, 4 * k.lanes) as i:
        for v in range(4):
            out.store(out.load(i + v * k.lanes) * 1.5, i + v * k.lanes)


def read(k, out, source, count) -> None:
    """Only reads `count` fp32 elements, a multiple of 65536; the sums go to `out`, a line for each thread."""
    sums = [k.var_vec(0.0) for _ in range(4)]
    with k.claim(count, 65536) as (begin, end), k.loop(begin, end, 4 * k.lanes) as i:
        for v, total in enumerate(sums):
            total.value = total.value + source.load(i + v * k.lanes)
    total = sums[0].value + sums[1].value + sums[2].value + sums[3].value
    out.store(total, k.thread * k.lanes)
