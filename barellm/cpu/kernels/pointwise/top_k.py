"""The largest elements of rows. Shapes: x, dx (rows, C); values, dvalues, indices (rows, K). (dims, inner): sizes whose product is
rows.

Radix select. A float's bits, with those below the sign flipped if it is negative, are integers in the same order: keys. The K-th
largest key is found bit by bit: 32 passes over the row count the keys that are not below a guess. So the time does not depend on
the values. A thread keeps the keys of its row in scratch."""

from contextlib import nullcontext

from barellm.cpu.kernel import Lowering, Op, Value, Var, kernel, lowering
from barellm.cpu.kernels import loops
from barellm.cpu.kernels.loops import CHAINS, shape_of, tree_reduce
from barellm.cpu.kernels.numbers import FP32_INFINITY, FP32_MAGNITUDE

LOWEST = -(1 << 31)  # below every key: of lanes that are no elements


def key_of(k, x) -> Value:
    """The key of each lane; both zeros have the same, and NaN has that of infinity."""
    bits = k.bitcast(x + 0.0, k.ivec)  # -0 + 0 is 0
    sign = k.op(k.ivec, f"ashr {bits.typed}, {k.const(31, k.ivec).ref}")
    return k.select(x.equals(x), bits ^ (sign & FP32_MAGNITUDE), FP32_INFINITY)


def count(k, keys, C: int, least) -> Value:
    """How many of the C keys of a row are >= `least` (i64), counted lane by lane in CHAINS accumulators."""
    sums = [k.var(k.to(0, k.ivec)) for _ in range(CHAINS)]
    bound = k.splat(least)
    for c, mask, j in loops.columns(k, C, unroll=CHAINS):
        reaches = keys.load(c, mask) >= bound
        sums[j].value = sums[j].value + k.select(reaches if mask is None else reaches & mask, k.to(1, k.ivec), 0)
    return k.to(k.sum(tree_reduce(sums, lambda a, b: a + b)), "i64")


def threshold(k, keys, C: int, K: int) -> Value:
    """The K-th largest key (i64): the largest number that at least K keys reach, found from the highest bit to the lowest."""
    largest = k.var(k.int(LOWEST))
    with k.when(count(k, keys, C, k.int(0)) >= K):  # the sign bit first: K keys are not negative
        largest.value = k.int(0)
    with k.loop(0, 31) as bit:
        guess = largest.value + (k.int(1 << 30) >> bit)  # with one more bit, from bit 30 down
        with k.when(count(k, keys, C, guess) >= K):
            largest.value = guess
    return largest.value


def collect(k, keys, selected, columns, C: int, K: int, least) -> None:
    """selected (K) = the keys of a row above `least`, and as many equal to it as make K; columns (K) = their columns, ascending."""
    ties = k.var(K - count(k, keys, C, least + 1))  # how many equal ones there is room for
    size = k.var(k.int(0))  # how many are selected so far

    def append(c) -> None:
        key = keys.get(c)
        tie = key.equals(least) & (ties.value > 0)
        with k.when((key > least) | tie):
            selected.put(key, size.value)
            columns.put(c, size.value)
            size.value = size.value + 1
            ties.value = ties.value - k.to(tie, "i64")

    bound = k.splat(least)
    for c, mask, _ in loops.columns(k, C, unroll=1):
        reaches = keys.load(c, mask) >= bound
        with k.set_lanes(reaches if mask is None else reaches & mask) as lane:
            append(k.int(c) + lane)


def rank_of(k, selected, K: int, i) -> Value:
    """The rank (i64, 0 is the largest) of element i of the K selected keys: how many are larger, or equal with a lower column."""
    key, rank = selected.get(i), Var(k, k.to(0, k.ivec))
    key_lanes = k.splat(key)
    limit = k.splat(i)
    for c, mask, _ in loops.columns(k, K, unroll=1):
        other = selected.load(c, mask)
        lower_column = (k.iota() + k.splat(k.int(c))) < limit  # they are in the order of their columns
        precedes = (other > key_lanes) | (other.equals(key_lanes) & lower_column)
        rank.value = rank.value + k.select(precedes if mask is None else precedes & mask, k.to(1, k.ivec), 0)
    return k.to(k.sum(rank.value), "i64")


def top_k(k, values, indices, x, *, C, K, dims, inner) -> None:
    """The kernel: values (rows, K) = the K largest elements of each row of x (rows, C), descending; indices (rows, K) i32 = their
    columns. Of equal elements the one with the lower column comes first. Keys, selected keys and columns are in scratch."""
    keys = k.thread_scratch("i32")
    selected, columns = keys.at(padded(C)), keys.at(padded(C) + padded(K))
    with k.parallel_for(k.num_elements(dims) * inner) as row:
        src, dst, index_row = x.at(row * C), values.at(row * K), indices.at(row * K)
        for c, mask, _ in loops.columns(k, C):
            keys.store_raw(key_of(k, src.load(c, mask)), c, mask)
        collect(k, keys, selected, columns, C, K, threshold(k, keys, C, K))
        with k.loop(0, K) as i:
            rank, column = rank_of(k, selected, K, i), columns.get(i)
            dst.put(src.get(column), rank)
            index_row.put(column, rank)


def padded(n: int) -> int:
    """n rounded up to cache lines of i32."""
    return -(-n // 16) * 16


@lowering("top_k", also={"indices": "i32"})
def lower_top_k(op: Op, c: Lowering) -> None:
    C, K = int(op.x.shape[-1]), int(op.K)
    c.thread_scratch(4 * (padded(C) + 2 * padded(K)))
    c.call(top_k, {}, {"C": C, "K": K, **shape_of(op.x)})


@kernel(
    "top_k_dx", constants=lambda op: {"C": op.C, "K": int(op.dvalues.shape[-1]), **shape_of(op.dvalues)}, also={"indices": "i32"}
)
def top_k_dx(k, dx, dvalues, indices, *, C, K, dims, inner, mode_dx) -> None:
    """dx (rows, C) = dvalues (rows, K) at the columns `indices`, zero elsewhere; stored or added (mode_dx)."""
    adds = k.keep(mode_dx)
    with k.parallel_for(k.num_elements(dims) * inner) as row:
        dst, src, index_row = dx.at(row * C), dvalues.at(row * K), indices.at(row * K)

        with nullcontext() if adds is None else k.otherwise(adds):
            loops.fill(k, dst, 0.0, C)
        with k.loop(0, K) as i:
            column, new = index_row.get(i), src.get(i)
            dst.put(new if adds is None else new + dst.get(column), column)
