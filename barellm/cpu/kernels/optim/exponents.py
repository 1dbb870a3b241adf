"""Exponent histograms (dynamic-range statistics). Shapes: x any, n elements; counts (256) i32, one for each biased fp32 exponent;
sums (4): of x, |x| and x^2, and the largest |x|, of the finite elements; partials (chunks, 256), (chunks, 4).

x is split into chunks, whose number depends on n alone; one thread counts each. Neighbours often have equal exponents, and to
increment a counter waits for the store of the increment before: so each of TABLES neighbours has counters of its own."""

from typing import Any

from barellm.cpu.kernel import PLANES, Lowering, Op, Region, Tensor, Value, lowering, part, weight_operand
from barellm.cpu.kernels.loops import flat, new_accumulators, tree_reduce, vectors
from barellm.cpu.kernels.numbers import FP32_FRACTION, FP32_MAGNITUDE
from barellm.program.ops.optim.exponent_stats import BINS, NOT_FINITE, SUMS

CHUNKS, CHUNK = 64, 32768  # at most so many chunks, of at least so many elements
TABLES, WIDTH = 8, BINS + 64  # WIDTH: of a table, with the bin of lanes that hold no element
UNROLL = 2


def elements_per_chunk(k, n) -> Value:
    return k.max(k.ceil_div(n, CHUNKS), CHUNK)


def exponent_stats(k, counts, sums, x, *, dims, width) -> None:
    """The kernel: for each chunk of x (`dims` times `width` elements), a row of counts (chunks, 256) i32 and of sums (chunks, 4)
    fp32. The thread's TABLES tables of counters, [table][WIDTH] i32 in scratch, are zeroed before and added up after the chunk."""
    n = k.num_elements(dims) * width
    chunk_elements = elements_per_chunk(k, n)
    with k.parallel_for(k.ceil_div(n, chunk_elements)) as chunk:
        tables = k.thread_scratch("i32")  # [table][WIDTH]
        bins = tables.at(TABLES * WIDTH)  # exponents between vector lanes and addresses
        for i, mask, _ in vectors(k, 0, TABLES * WIDTH):
            tables.store(0, i, mask)
        total, size, square = (new_accumulators(k, UNROLL) for _ in range(3))
        largest = new_accumulators(k, UNROLL)
        begin = chunk * chunk_elements
        for i, mask, j in vectors(k, begin, k.min(begin + chunk_elements, n), unroll=UNROLL):
            # The vector goes to chain j's sums, and each lane's exponent is counted: `bins` turns lanes into addresses.
            v = x.load(i, mask)
            bits = k.bitcast(v, k.ivec)
            e = (bits >> FP32_FRACTION) & NOT_FINITE  # the exponent field, all ones for infinity and NaN
            v = k.select(e < NOT_FINITE, v, 0.0)
            a = k.bitcast(k.bitcast(v, k.ivec) & FP32_MAGNITUDE, k.vec)  # |x|
            total[j].value = total[j].value + v
            size[j].value = size[j].value + a
            square[j].value = k.fma(v, v, square[j].value)
            largest[j].value = k.max(a, largest[j].value)
            dst = bins.at(j * k.lanes)
            # Masked lanes count in bin BINS, which nobody reads.
            dst.store(e if mask is None else k.select(mask, e, BINS))
            # Neighbouring lanes count in tables of their own: equal exponents would wait for each other's store.
            for lane in range(k.lanes):
                counter = tables.at(dst.get(lane) + lane % TABLES * WIDTH)
                counter.put(counter.get() + 1)
        for i, mask, _ in vectors(k, 0, BINS):
            count = tables.load(i, mask)
            for table in range(1, TABLES):
                count = count + tables.load(i + table * WIDTH, mask)
            counts.store(count, chunk * BINS + i, mask)
        for column, chains in enumerate((total, size, square)):
            sums.put(k.sum(tree_reduce(chains, lambda a, b: a + b)), chunk * len(SUMS) + column)
        sums.put(k.maximum(tree_reduce(largest, k.max)), chunk * len(SUMS) + SUMS.index("max_abs"))


def combine_exponent_stats(k, counts, sums, partial_counts, partial_sums, *, dims, width) -> None:
    """The kernel: counts (256) and sums (4) = the sums of the chunks' rows of partial_counts and partial_sums (the maximum of their
    maxima), which `exponent_stats` wrote, in the chunks' order, in double."""
    n = k.num_elements(dims) * width
    with k.parallel_for(1):
        chunks = k.ceil_div(n, elements_per_chunk(k, n))
        for i, mask, _ in vectors(k, 0, BINS, unroll=1):
            total = k.var(k.const(0, k.ivec))
            with k.loop(0, chunks) as chunk:
                total.value = total.value + partial_counts.load(chunk * BINS + i, mask)
            counts.store(total.value, i, mask)
        for column, name in enumerate(SUMS):
            total = k.var(k.const(0.0, "double"))
            with k.loop(0, chunks) as chunk:
                value = k.to(partial_sums.get(chunk * len(SUMS) + column), "double")
                total.value = k.max(value, total.value) if name == "max_abs" else total.value + value
            sums.put(k.to(total.value, "float"), column)


def result_region(out: Tensor) -> tuple[Region, str]:
    """(bytes, dtype) of a result, which may be columns of a tensor that has one row."""
    first = out.first_column * 4
    return Region(out.base, first, first + 4 * out.size), out.dtype


@lowering("exponent_stats", "measure", also={"x": PLANES, "counts": "i32"}, views="counts sums")
def lower_exponent_stats(op: Op, c: Lowering) -> None:
    """Append one call for a small tensor; else one row of results for each chunk, and a call that combines the rows."""
    outs: dict[str, Any] = {name: result_region(op.outputs[name]) for name in ("counts", "sums")}
    x, like = weight_operand(op.x), flat(op.x)
    c.thread_scratch(4 * (TABLES * WIDTH + UNROLL * c.isa.lanes))
    if op.x.size <= CHUNK:
        c.call(exponent_stats, {**outs, "x": x}, like, writes="counts sums")
        return
    chunks = min(CHUNKS, -(-op.x.size // CHUNK))
    partials = {
        "counts": (part(c.workspace("counts", 4 * chunks * BINS)), "i32"),
        "sums": (part(c.workspace("sums", 4 * chunks * len(SUMS))), "fp32"),
    }
    c.call(exponent_stats, {**partials, "x": x}, like, writes="counts sums")
    given = {f"partial_{name}": operand for name, operand in partials.items()}
    c.call(combine_exponent_stats, {**outs, **given}, like, writes="counts sums")
