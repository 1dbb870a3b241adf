"""PowerSGD (Vogels et al. 2019): low-rank factors of a gradient, their orthonormal basis (Householder QR), and error feedback.

A matrix M = grad + error is read once, row by row, at memory bandwidth, and multiplied with all columns of a factor while its rows
are cached. Shapes: grad, error (rows, cols); a factor is (rank, n), one column after the other."""

from collections.abc import Iterator
from operator import add
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Value, lowering, part
from barellm.cpu.kernels.loops import CHAINS, GRAIN, columns, groups, new_accumulators, pieces, tree_reduce, vectors
from barellm.cpu.kernels.reductions import add_chunks, chunks_of_rows, lower_partials, rows_per_chunk
from barellm.program.integers import round_up

LEAST = 1e-37  # of the largest number of a column: the inverse of a smaller one is not finite
# Rows and columns of a factor that are multiplied together, by register count.
ACROSS, DOWN = {16: (2, 4), 32: (4, 6)}, {16: (4, 2), 32: (4, 6)}


def tiles(k, begin, end, rank: int, tile: tuple[int, int]) -> Iterator[tuple[Value, int, Any, int]]:
    """(row, number of rows, column, number of columns) of each tile of rows [begin, end) x the `rank` columns of a factor, as the
    loops of `loops`. `tile`: (rows, columns) of a full tile."""
    height, width = tile
    for i, count in groups(k, begin, end, height):
        for j, size in pieces(k, rank, width):
            yield i, count, j, size


def factor_across(k, y, grad, error, f, *, rows, cols, rank) -> None:
    """The kernel: y (rank, rows) = (M f^T)^T, f (rank, cols): dot products along the rows of M = grad + error (rows, cols). In a
    register tile M is read once for all its rows of f."""
    tile = ACROSS[k.isa.registers]
    with k.parallel_range(rows, round_up(max(1, GRAIN // cols), tile[0])) as (begin, end):
        for i, height, j, width in tiles(k, begin, end, rank, tile):
            sums = [new_accumulators(k, width) for _ in range(height)]
            for c, mask, _ in columns(k, cols, unroll=1):
                factors = [f.load((j + b) * cols + c, mask) for b in range(width)]
                for a, row_sums in enumerate(sums):
                    m = grad.load((i + a) * cols + c, mask) + error.load((i + a) * cols + c, mask)
                    for total, value in zip(row_sums, factors, strict=True):
                        total.value = k.fma(m, value, total.value)
            for a, row_sums in enumerate(sums):
                for b, total in enumerate(row_sums):
                    y.put(k.sum(total.value), (j + b) * rows + i + a)


def factor_down(k, partials, grad, error, f, *, rows, cols, rank) -> None:
    """The kernel: partials (chunks, rank, cols) = f M over each chunk's rows, M = grad + error (rows, cols), f (rank, rows)."""
    with chunks_of_rows(k, partials, k.int(rows), cols, rank) as (dst, begin, end):
        assert dst is not None
        for i, height, j, width in tiles(k, begin, end, rank, DOWN[k.isa.registers]):
            factors = [[k.splat(f.get((j + b) * rows + i + a)) for a in range(height)] for b in range(width)]
            for c, mask, _ in columns(k, cols, unroll=1):
                at = [(i + a) * cols + c for a in range(height)]
                m = [grad.load(x, mask) + error.load(x, mask) for x in at]
                for b, row_factors in enumerate(factors):
                    total = dst.load((j + b) * cols + c, mask)
                    for value, factor in zip(m, row_factors, strict=True):
                        total = k.fma(value, factor, total)
                    dst.store(total, (j + b) * cols + c, mask)


def add_factors(k, y, partials, *, rows, size) -> None:
    """y (size) = the sum of the chunks' partials, in order."""
    chunks = k.ceil_div(k.int(rows), rows_per_chunk(k, k.int(rows)))
    add_chunks(k, y, partials, chunks, size, size, "store")


@lowering("factor", floats="fp32", also={"y": "bf16", "f": "bf16"}, spans="y f")
def lower_factor(op: Op, c: Lowering) -> None:
    """Append the calls of one factor, of M = grad + error: y = M f, or where the op is `transposed` y = M^T f, which is a sum over
    the rows of M: partial sums over chunks of rows, then their sum in order."""
    rows, cols = (int(n) for n in op.grad.shape)
    rank = op.attrs["rank"]
    operands: dict[str, Any] = {"grad": op.grad, "error": op.error, "f": op.f}
    sizes = {"rows": rows, "cols": cols, "rank": rank}
    if not op.attrs["transposed"]:
        c.call(factor_across, operands | {"y": op.y}, sizes, writes="y")
        return
    size = rank * cols  # elements of y
    partials = lower_partials(c, op.grad, size)
    c.call(factor_down, operands | {"partials": partials}, sizes, writes="partials")
    c.call(add_factors, {"y": op.y, "partials": partials}, {"rows": rows, "size": size}, writes="y")


# --- the orthonormal basis ---


def dot(k, a, b, first, n) -> Value:
    """The dot product of elements [first, n) of a and b."""
    sums = new_accumulators(k, CHAINS)
    for i, mask, j in vectors(k, first, n, unroll=CHAINS):
        sums[j].value = k.fma(a.load(i, mask), b.load(i, mask), sums[j].value)
    return k.sum(tree_reduce(sums, add))


def reflect(k, x, v, tau, n: int) -> None:
    """A Householder reflection: x (n) -= tau (v . x) v."""
    size = k.splat(tau * dot(k, v, x, 0, n))
    for i, mask, _ in vectors(k, 0, n):
        x.store(x.load(i, mask) - size * v.load(i, mask), i, mask)


def householder(k, y, x, work, taus, *, n, rank) -> None:
    """The kernel: y (rank, n) = an orthonormal basis of the columns of x (rank, n): the Q of Householder QR (as LAPACK's geqrf and
    orgqr), on one thread; other threads take other matrices. `work` (rank, n) fp32 gets the columns of x, scaled, and then the
    reflection vectors v; `taus` (rank) their factors."""
    with k.parallel_for(1):
        scale_columns(k, work, x, n, rank)
        factor_columns(k, work, taus, n, rank)
        form_q(k, y, work, taus, n, rank)


def scale_columns(k, work, x, n: int, rank: int) -> None:
    """work = the columns of x, each divided by its largest magnitude, so that squares neither vanish nor overflow."""
    with k.loop(0, rank) as j:
        column, largest = x.at(j * n), k.var_vec(0.0)
        for i, mask, _ in vectors(k, 0, n):
            value = column.load(i, mask)
            largest.value = k.max(k.max(value, -value), largest.value)
        max_abs = k.maximum(largest.value)
        scale, dst = k.splat(k.select(max_abs > LEAST, 1.0 / max_abs, 1.0)), work.at(j * n)
        for i, mask, _ in vectors(k, 0, n):
            dst.store(column.load(i, mask) * scale, i, mask)


def factor_columns(k, work, taus, n: int, rank: int) -> None:
    """geqrf: each column j of work becomes the vector v of its reflection (v[j] = 1, zero before; taus[j]: its factor), as
    `program.ops.optim.powersgd.reflection`, which is applied to all later columns."""
    with k.loop(0, rank) as j:
        v = work.at(j * n)
        squares = dot(k, v, v, j + 1, n)  # of what is below the diagonal
        alpha = v.get(j)  # the diagonal
        norm = k.sqrt(k.fma(alpha, alpha, squares))
        beta = k.select(alpha < 0.0, norm, -norm)  # the new diagonal, of the sign that avoids cancellation in alpha - beta
        none = squares.equals(0.0)  # there is nothing to reflect
        tau = (beta - alpha) / beta
        inverse = k.splat(k.select(none, 0.0, 1.0 / (alpha - beta)))
        for i, mask, _ in vectors(k, j + 1, n):
            v.store(v.load(i, mask) * inverse, i, mask)
        for i, mask, _ in vectors(k, 0, j):
            v.store(0.0, i, mask)
        v.put(1.0, j)
        taus.put(k.select(none, 0.0, tau), j)
        with k.loop(j + 1, rank) as later:
            reflect(k, work.at(later * n), v, taus.get(j), n)


def form_q(k, y, work, taus, n: int, rank: int) -> None:
    """orgqr: y = the reflections, last first, applied to unit vectors; number `last` changes none before its own."""
    with k.loop(0, rank) as j:
        dst = y.at(j * n)
        for i, mask, _ in vectors(k, 0, n):
            dst.store(0.0, i, mask)
        y.put(1.0, j * n + j)
    with k.loop(0, rank) as back:
        last = (rank - 1) - back
        with k.loop(last, rank) as j:
            reflect(k, y.at(j * n), work.at(last * n), taus.get(last), n)


@lowering("householder", floats="fp32", also={"x": "bf16"}, spans="x")
def lower_householder(op: Op, c: Lowering) -> None:
    rank = op.attrs["rank"]
    work = (part(c.workspace("work", 4 * op.x.size)), "fp32")
    taus = (part(c.workspace("taus", 4 * rank)), "fp32")
    constants = {"n": op.x.size // rank, "rank": rank}
    c.call(householder, {"y": op.y, "x": op.x, "work": work, "taus": taus}, constants, writes="y work taus")


# --- error feedback ---

TOGETHER = 2  # vectors of a row in a tile
TALL = {16: 2, 32: 4}  # rows of a tile, for which a vector of the right factors is loaded once, by register count


def vector_groups(k, cols: int) -> Iterator[list[tuple[Any, Value | None]]]:
    """`for vectors in ...`: the vectors of a row, (first column, mask) each, TOGETHER at a time, then one by one."""
    full_columns = cols - cols % (TOGETHER * k.lanes)
    if full_columns:
        with k.loop(0, full_columns, TOGETHER * k.lanes) as c:
            yield [(c + j * k.lanes, None) for j in range(TOGETHER)]
    for c, mask in k.columns(cols - full_columns):
        yield [(full_columns + c, mask)]


def feedback(k, grad, error, left_own, left_total, right_own, right_total, clip, *, rows, cols, rank) -> None:
    """The kernel: error (rows, cols) = grad + error - left_own^T right_own, what this rank's factors leave out (error feedback);
    grad = left_total^T right_total, the gradient that all ranks' factors give. Left factors (rank, rows), right ones (rank, cols).
    Nothing changes if the norm is not finite (`clip`)."""
    clip_scale, tile_rows = clip.get(1), TALL[k.isa.registers]
    grain = round_up(max(1, GRAIN // cols), tile_rows)  # rows of a work item
    # NaN says that the gradient's norm is not finite: no work items.
    with k.parallel_range(k.select(clip_scale.equals(clip_scale), k.int(rows), 0), grain) as (begin, end):
        for vectors_of_row in vector_groups(k, cols):  # all rows for some columns: the right factors' columns stay cached
            for i, height in groups(k, begin, end, tile_rows):  # a register tile: `height` rows x these vectors
                # [row][vector] of the tile: (first element, mask), and what error and grad become there.
                places = [[((i + a) * cols + c, mask) for c, mask in vectors_of_row] for a in range(height)]
                residuals = [[k.var(grad.load(*place) + error.load(*place)) for place in row] for row in places]
                products = [new_accumulators(k, len(vectors_of_row)) for _ in range(height)]
                with k.loop(0, rank) as j:
                    right_of_own = [right_own.load(j * cols + c, mask) for c, mask in vectors_of_row]
                    right_of_total = [right_total.load(j * cols + c, mask) for c, mask in vectors_of_row]
                    for a in range(height):
                        left_of_own = k.splat(left_own.get(j * rows + i + a))
                        left_of_total = k.splat(left_total.get(j * rows + i + a))
                        for v in range(len(vectors_of_row)):
                            residuals[a][v].value = k.fma(-left_of_own, right_of_own[v], residuals[a][v].value)
                            products[a][v].value = k.fma(left_of_total, right_of_total[v], products[a][v].value)
                for a in range(height):
                    for v, place in enumerate(places[a]):
                        error.store(residuals[a][v].value, *place)
                        grad.store(products[a][v].value, *place)


def keep_factor(k, q, total, clip, n) -> None:
    """q (n) = total, the factor that the next step starts from (warm start), unless the norm is not finite."""
    ok = clip.get(1)
    with k.parallel_range(k.select(ok.equals(ok), n, 0), GRAIN) as (begin, end):
        for i, mask, _ in vectors(k, begin, end):
            q.store(total.load(i, mask), i, mask)


@lowering("feedback", floats="fp32", also={"own": "bf16", "total": "bf16"}, spans="own total")
def lower_feedback(op: Op, c: Lowering) -> None:
    """Call the feedback, then keep the factor. `tall`: op.p is the right factor (of the columns), else the left one."""
    rows, cols = (int(n) for n in op.grad.shape)
    left, right = (op.own, op.total), (op.p, op.p)
    if not op.attrs["tall"]:
        left, right = right, left
    operands = {"grad": op.outputs["grad"], "error": op.outputs["error"], "clip": op.clip}
    operands |= dict(zip(("left_own", "left_total", "right_own", "right_total"), (*left, *right), strict=True))
    constants = {"rows": rows, "cols": cols, "rank": op.attrs["rank"]}
    c.call(feedback, operands, constants, writes="grad error")
    c.call(keep_factor, {"q": op.outputs["q"], "total": op.total, "clip": op.clip, "n": op.q.size}, writes="q")
