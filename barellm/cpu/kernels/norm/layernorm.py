"""LayerNorm, and the gradients of both norms. Shapes: x, y, dy, dx (rows, C); weight, bias, dweight, dbias (C); mean, rstd (rows)
fp32. RMSNorm's gradients are those of a LayerNorm without means: with `mean` None nothing is centred. (dims, inner): run-time sizes
and a number, whose product is the number of rows. A masked vector (`mask`) ends a row that lanes do not divide."""

from collections.abc import Callable
from operator import add
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Tensor, Value, kernel, lowering
from barellm.cpu.kernels import loops
from barellm.cpu.kernels.reductions import chunks_of_rows, column_sums, lower_column_sums
from barellm.program.ops.norm.rmsnorm import heads_of

STEP_REGISTERS = 12  # accumulators and what a step needs, beside a row that stays in registers


Factors = Callable[[Any, Value | None, int], tuple[Value, Value]]


def row_sums(k, C: int, factors: Factors, *, unrolled: bool = False, of_u: bool = True) -> list[Value]:
    """[sum(u v)] over a row of C columns, with `of_u` [sum(u v), sum(u)]. factors(c, mask, j) gives the vectors u and v at column
    c; u must be zero in masked lanes. `unrolled`: as in `loops.columns`."""
    products, sums = loops.new_accumulators(k, loops.CHAINS), loops.new_accumulators(k, loops.CHAINS) if of_u else []
    for c, mask, j in loops.columns(k, C, unroll=loops.CHAINS, unrolled=unrolled):
        u, v = factors(c, mask, j)
        if of_u:
            sums[j].value = sums[j].value + u
        products[j].value = k.fma(u, v, products[j].value)
    return [k.sum(loops.tree_reduce(chains, add)) for chains in (products, sums) if chains]


def normalised(op: Op) -> Tensor:
    """What has the shape of the rows that are normalised: x, or of a norm of heads (..., H, D)."""
    return heads_of(op) if op.name.startswith("head_") else op.x


def row_constants(op: Op) -> dict[str, Any]:
    """Constants of a kernel over rows: C columns, and what counts the rows."""
    return {"C": int(normalised(op).shape[-1]), **loops.shape_of(normalised(op))}


@kernel("head_rmsnorm", constants=lambda op: {"eps": op.eps, **row_constants(op)})
@kernel("rmsnorm", constants=lambda op: {"eps": op.eps, **row_constants(op)})
@kernel("layernorm", constants=lambda op: {"eps": op.eps, **row_constants(op)})
def norm(k, y, mean, rstd, x, weight, bias, *, C, eps, dims, inner) -> None:
    """The kernel of both norms, for each row of x (rows, C). LayerNorm: y = (x - mean) rstd weight + bias, rstd = 1 / sqrt(variance
    + eps); with `mean` None RMSNorm: y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps). Writes mean, rstd (rows) fp32; weight,
    bias (C), None: 1 and 0. Memory is read once: the row stays in registers, or in the L1 if it is long. LayerNorm's sums are of x
    minus the row's first element (shifted-data algorithm): E[x^2] - E[x]^2 loses all digits at |mean| = 3000 deviations."""
    in_registers = k.lanes * (k.isa.registers - STEP_REGISTERS) >= C
    rows = k.num_elements(dims) * inner
    nontemporal = loops.exceeds_caches(k, rows, C, y)
    with k.parallel_range(rows, loops.row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        src, dst = x.at(row * C), y.at(row * C)
        first = None if mean is None else src.get(0)
        shift = None if first is None else k.splat(first)
        cached: dict[int, Value] = {}  # column -> vector, with in_registers

        def shifted(c, mask) -> Value:
            """x at column c, of a LayerNorm minus the row's first element, and zero in masked lanes."""
            v = src.load(c, mask)
            if shift is None:
                return v
            v = v - shift
            return v if mask is None else k.select(mask, v, 0.0)

        def square_factors(c, mask, _) -> tuple[Value, Value]:
            v = shifted(c, mask)
            if in_registers:
                cached[c] = v
            return v, v

        # The row's sums, and from them its mean and rstd.
        square, *sums = row_sums(k, C, square_factors, unrolled=in_registers, of_u=first is not None)
        if first is not None:
            offset = sums[0] * (1.0 / C)  # mean, less the first element
            variance = k.max(0.0, square * (1.0 / C) - offset * offset)
        else:
            offset, variance = None, square * (1.0 / C)
        inverse = 1.0 / k.sqrt(variance + eps)
        if offset is not None:
            mean.put(first + offset, row)
        rstd.put(inverse, row)

        centre = None if offset is None else k.splat(offset)
        scale = k.splat(inverse)
        for c, mask, put in loops.write_row(k, dst, C, nontemporal=nontemporal, unrolled=in_registers):
            n = cached[c] if in_registers else shifted(c, mask)
            n = (n if centre is None else n - centre) * scale
            if weight is not None:
                w = weight.load(c, mask)
                n = n * w if bias is None else k.fma(n, w, bias.load(c, mask))
            put(n)


class Normalised:
    """A normalised row, before the weight: (x - mean) rstd, or x rstd where `mean` is None. Recomputed by each load."""

    def __init__(self, k, row, src, mean, rstd) -> None:
        self.src, self.scale = src, k.splat(rstd.get(row))
        self.centre = None if mean is None else k.splat(mean.get(row))

    def load(self, c, mask) -> Value:
        x = self.src.load(c, mask)
        return (x if self.centre is None else x - self.centre) * self.scale


class GradientOfRow:
    """dx = rstd (dn - mean(dn) - n mean(dn n)) of a row, dn = dy weight, n the normalised row; without mean(dn) where `mean` is
    None. A first pass computes the means; the second finds the row in the L1."""

    def __init__(self, k, row, dy, x, weight, mean, rstd, *, C: int) -> None:
        """Row `row` of dy and x (rows, C), weight (C) or None: 1, and mean, rstd (rows) fp32 of the forward pass; `mean` None:
        RMSNorm. `scale`: rstd in all lanes."""
        self.k, self.C = k, C
        self.dy, self.x, self.weight = dy.at(row * C), x.at(row * C), weight
        self.normalised = Normalised(k, row, self.x, mean, rstd)
        self.centred, self.scale = mean is not None, self.normalised.scale

    def factors(self, c, mask) -> tuple[Value, Value, Value]:
        """Vectors of dy, dn and n."""
        g = self.dy.load(c, mask)
        dn = g if self.weight is None else g * self.weight.load(c, mask)
        return g, dn, self.normalised.load(c, mask)

    def means(self, also: Callable[..., None] | None = None) -> list[Value]:
        """The first pass: [mean(dn n)] or, where the row is centred, [mean(dn n), mean(dn)], in all lanes. also(c, mask, j, dy, n)
        is called for each vector, for sums that a caller needs."""

        def factors(c, mask, j):
            g, dn, n = self.factors(c, mask)
            if also is not None:
                also(c, mask, j, g, n)
            return dn, n

        sums = row_sums(self.k, self.C, factors, of_u=self.centred)
        return [self.k.splat(total * (1.0 / self.C)) for total in sums]

    def dx(self, dn, n, means) -> Value:
        """A vector of dx from those of dn and n and the row's means."""
        # The difference first: where dn is its own mean, the result is zero and not the rounding of two products.
        return self.k.fma(-n, means[0], dn - means[1] if self.centred else dn) * self.scale

    def prefetch(self, row, c, j: int) -> None:
        """Prefetch into L2 what the other pass reads at column c. Either pass alone would leave DRAM idle while it computes."""
        if j * self.k.lanes * row.itemsize % loops.LINE == 0:
            self.k.prefetch(row.at(c), near=False)


@kernel("head_rmsnorm_dx", constants=row_constants)
@kernel("rmsnorm_dx", constants=row_constants)
@kernel("layernorm_dx", constants=row_constants)
def norm_dx(k, dx, dy, x, weight, mean, rstd, *, C, dims, inner, mode_dx) -> None:
    """dx of LayerNorm, or with `mean` None of RMSNorm (formula: `GradientOfRow`), stored or added (mode_dx)."""
    rows = k.num_elements(dims) * inner
    nontemporal = loops.exceeds_caches(k, rows, C, dx) if mode_dx == "store" else None
    with k.parallel_range(rows, loops.row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        gradient, dst = GradientOfRow(k, row, dy, x, weight, mean, rstd, C=C), dx.at(row * C)
        means = gradient.means()
        for c, mask, put in loops.write_row(k, dst, C, nontemporal=nontemporal, mode=mode_dx):
            _, dn, n = gradient.factors(c, mask)
            put(gradient.dx(dn, n, means))


def dparams_partials(k, partials, dy, x, mean, rstd, *, C, count, dims, inner) -> None:
    """partials (chunks, count, C) = sums over the rows of each chunk of dy n (dweight) and, if `count` is 2, of dy (dbias)."""
    for row, columns in column_sums(k, partials, k.num_elements(dims) * inner, C, count):
        normalised, d = Normalised(k, row, x.at(row * C), mean, rstd), dy.at(row * C)
        for c, mask, add_terms in columns:
            g = d.load(c, mask)
            add_terms(*[g * normalised.load(c, mask), g][:count])


def read_outputs(op: Op) -> dict[str, Any]:
    """The outputs that some op reads: a LayerNorm without bias has a dbias that none does."""
    return {name: t for name, t in op.outputs.items() if name == "dweight" or t.role != "activation"}


@lowering("head_rmsnorm_dweight", starts="dweight")
@lowering("rmsnorm_dweight", starts="dweight")
@lowering("layernorm_dparams", starts="dweight dbias")
def norm_dparams(op: Op, c: Lowering) -> None:
    lower_column_sums(c, dparams_partials, {}, normalised(op), read_outputs(op), op.modes)


def norm_backward(k, partials, dx, rounded, dy, x, weight, mean, rstd, *, C, count, sums, dims, inner, mode_dx) -> None:
    """The kernel of both norms' whole backward pass: dx (rows, C), `rounded` = dx in bf16 where given, and partials (chunks, count,
    C) fp32 of the sums over rows that `sums` names: dweight, dbias, and dx_sum (of dx). dy and dx are read once. `mean` None:
    RMSNorm. Results that exceed the caches are stored non-temporally."""
    rows = k.num_elements(dims) * inner
    store_group = loops.ROW_UNROLL if C % (loops.ROW_UNROLL * k.lanes) == 0 else 1  # vectors that are stored at once
    results = [(dx, loops.exceeds_caches(k, rows, C, dx) if mode_dx == "store" else None)]
    if rounded is not None:
        results.append((rounded, loops.exceeds_caches(k, rows, C, rounded)))

    with chunks_of_rows(k, partials, rows, C, count) as (chunk_sums, begin, end), k.loop(begin, end) as row:
        gradient = GradientOfRow(k, row, dy, x, weight, mean, rstd, C=C)
        dst = [out.at(row * C) for out, _ in results]
        cached: list[Value] = []  # vectors of dx that wait to be stored

        def add_to_sum(name: str, c, mask, add: Callable[[Value], Value]) -> None:
            """Replace the row of partials of sum `name`, if it is computed, by add(the row)."""
            if name in sums:
                offset = sums.index(name) * C + c
                chunk_sums.store(add(chunk_sums.load(offset, mask)), offset, mask)

        def first(c, mask, j, g, n):
            """The first pass, for all that needs no mean. g: dy, n: the normalised x of a vector of columns."""
            add_to_sum("dweight", c, mask, lambda total: k.fma(g, n, total))
            add_to_sum("dbias", c, mask, lambda total: total + g)
            if mode_dx != "store":
                gradient.prefetch(dst[0], c, j)

        means = gradient.means(first)
        for c, mask, j in loops.columns(k, C):  # `store_group` vectors are stored together, so that they fill a cache line
            _, dn, n = gradient.factors(c, mask)
            new = loops.accumulate(k, dst[0], c, mask, gradient.dx(dn, n, means), mode_dx)
            cached.append(new)
            if len(cached) == store_group:
                for out, (_, nontemporal) in zip(dst, results, strict=True):
                    if store_group > 1:
                        loops.store_all(k, out, cached, c - (store_group - 1) * k.lanes, nontemporal)
                    else:
                        out.store(new, c, mask)
                cached.clear()
            add_to_sum("dx_sum", c, mask, lambda total, new=new: total + new)
            gradient.prefetch(gradient.x.at(C), c, j)
            gradient.prefetch(gradient.dy.at(C), c, j)


@lowering("rmsnorm_backward", starts="dx dweight")
@lowering("layernorm_backward", starts="dx dweight dbias dx_sum")
def lower_norm_backward(op: Op, c: Lowering) -> None:
    sums = {name: t for name, t in read_outputs(op).items() if t.shape == op.x.shape[-1:]}
    constants = {"sums": tuple(sums), "mode_dx": op.modes["dx"]}
    lower_column_sums(c, norm_backward, {}, op.x, sums, op.modes, writes="dx rounded", **constants)
