"""RMSNorm, of rows or of their heads. Shapes: x, y (rows, C); weight (C) or none; rstd (rows) fp32. Its gradients are in
layernorm.py."""

from __future__ import annotations

from barellm.cpu.kernel import KernelBuilder, kernel
from barellm.cpu.kernels.loops import past_caches, row_grain, write_row
from barellm.cpu.kernels.norm.layernorm import head_constants, row_constants, row_sums
from barellm.cpu.lang import Value


@kernel("head_rmsnorm", constants=lambda op: {"eps": op.eps, **head_constants(op)})
@kernel("rmsnorm", constants=lambda op: {"eps": op.eps, **row_constants(op)})
def rmsnorm(k: KernelBuilder, y, rstd, x, weight, *, C, eps, dims, inner) -> None:
    """Memory is read once: the row stays in registers, or in the first cache where it is long."""
    in_registers = k.lanes * (k.isa.registers - 12) >= C
    rows = k.num_elements(dims) * inner
    past = past_caches(k, rows, C, y)
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        of, to = x.at(row * C), y.at(row * C)
        cached: dict[int, Value] = {}

        def twice(c, mask, j):
            v = of.load(c, mask)
            if in_registers:
                cached[c] = v
            return v, v

        (square,) = row_sums(k, C, twice, unrolled=in_registers, of_u=False)
        inverse = 1.0 / k.sqrt(square * (1.0 / C) + eps)
        rstd.put(inverse, row)
        scale = k.splat(inverse)

        def finish(c, mask):
            n = (cached[c] if in_registers else of.load(c, mask)) * scale
            return n if weight is None else n * weight.load(c, mask)

        write_row(k, to, C, finish, past=past, unrolled=in_registers)
