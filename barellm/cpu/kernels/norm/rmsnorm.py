"""RMSNorm, of rows or of their heads. Shapes: x, y (rows, C); weight (C) or none; rstd (rows) fp32. Its gradients are in
layernorm.py, as are (dims, inner): sizes whose product is the number of rows."""

from barellm.cpu.kernel import Value, kernel
from barellm.cpu.kernels.loops import exceeds_caches, row_grain, write_row
from barellm.cpu.kernels.norm.layernorm import head_constants, row_constants, row_sums


@kernel("head_rmsnorm", constants=lambda op: {"eps": op.eps, **head_constants(op)})
@kernel("rmsnorm", constants=lambda op: {"eps": op.eps, **row_constants(op)})
def rmsnorm(k, y, rstd, x, weight, *, C, eps, dims, inner) -> None:
    """y = x rstd weight (`weight` None: 1), rstd = 1 / sqrt(mean(x^2) + eps) of each row. Memory is read once: the row stays in
    registers, or in the L1 if it is long."""
    in_registers = k.lanes * (k.isa.registers - 12) >= C  # 12: accumulators and what a step needs
    rows = k.num_elements(dims) * inner
    nontemporal = exceeds_caches(k, rows, C, y)
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        src, dst = x.at(row * C), y.at(row * C)
        cached: dict[int, Value] = {}

        def square_factors(c, mask, j):
            v = src.load(c, mask)
            if in_registers:
                cached[c] = v
            return v, v

        (square,) = row_sums(k, C, square_factors, unrolled=in_registers, of_u=False)
        inverse = 1.0 / k.sqrt(square * (1.0 / C) + eps)
        rstd.put(inverse, row)
        scale = k.splat(inverse)
        for c, mask, put in write_row(k, dst, C, nontemporal=nontemporal, unrolled=in_registers):
            n = (cached[c] if in_registers else src.load(c, mask)) * scale
            put(n if weight is None else n * weight.load(c, mask))
