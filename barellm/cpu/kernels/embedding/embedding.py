"""Token and position embedding. Shapes: tokens (batch, seq) i32, wte (V, C), wpe (maxT, C) or none, y and dy (batch, seq, C)."""

from __future__ import annotations

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.loops import (
    LINE,
    added,
    elementwise_map,
    foreach_column,
    foreach_vector,
    past_caches,
    row_grain,
    write_row,
)
from barellm.cpu.kernels.storage import Weight, weight_operands
from barellm.cpu.lang import Pointer, Value
from barellm.program.dtypes import PLANES
from barellm.program.ops.base import Op

CLAIMS = 64  # of ids, each of which looks through all tokens
GROUP = 65536  # bytes of the sums over the batch that a claim keeps
TOGETHER = 4  # rows that are added to one at a time
AHEAD = 4  # rows of the token table that are on their way into the second cache


def embedding(k: KernelBuilder, y, tokens, wte, wte_lo, wpe, wpe_lo, *, C) -> None:
    seq, pos = k.scalar("seq"), None if wpe is None else k.scalar("pos")
    token_rows, position_rows = Weight(k, wte, wte_lo), Weight(k, wpe, wpe_lo)
    rows = k.scalar("batch") * seq
    past = past_caches(k, rows, C, y)
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        of, at = tokens.get(row) * C, None if pos is None else (pos + row % seq) * C

        def vector(c, mask, of=of, at=at):
            token = token_rows.load(of + c, mask)
            return token if at is None else token + position_rows.load(at + c, mask)

        following = tokens.get(k.min(row + AHEAD, rows - 1)) * C
        for table in (wte,) if wte_lo is None else (wte, wte_lo):
            with k.loop(0, C, LINE // table.itemsize) as c:
                k.prefetch(table.at(following + c), near=False)
        write_row(k, y.at(row * C), C, vector, past=past)


@lowering("embedding", also={"tokens": "i32", "wte": PLANES, "wpe": PLANES})
def lower_embedding(op: Op, c: Lowering) -> None:
    operands = {"y": op.y, "tokens": op.tokens, **weight_operands("wte", op.wte)}
    operands |= {"wpe": None, "wpe_lo": None} if op.wpe is None else weight_operands("wpe", op.wpe)
    c.call(embedding, operands, {"C": int(op.y.shape[-1])}, writes="y")


def clear(k: KernelBuilder, out, *, size, mode) -> None:
    """out (size) = 0 where `mode` is to store in this run."""
    keep = k.keep(mode)
    n = k.int(size) if keep is None else k.select(keep, 0, k.int(size))
    elementwise_map(k, n, out, lambda i, mask: k.to(0.0, k.vec))


def sort_by_id(
    k: KernelBuilder, tokens: Pointer, rows: Value, low: Value, high: Value, *, per: int
) -> tuple[Pointer, Pointer]:
    """The rows [0, rows) whose tokens are in [low, high), at most `per` ids: (ends, sorted), in this thread's scratch. Those of
    an id follow each other in their order and end before sorted[ends[id - low]]."""
    ends = k.thread_scratch("i32")
    found = ends.at(per)
    sorted_rows = found.at(rows)
    lowest, beyond, count = k.splat(low), k.splat(high), k.var(k.int(0))
    with k.loop(0, per) as i:
        ends.put(k.int(0), i)

    def inside(first: Value, mask: Value | None) -> Value:
        ids = tokens.load(first, mask)
        both = (ids >= lowest) & (ids < beyond)
        return both if mask is None else both & mask

    def take(first: Value, mask: Value) -> None:
        with k.set_lanes(mask) as lane:
            row = first + lane
            found.put(row, count.value)
            count.value = count.value + 1
            at = tokens.get(row) - low
            ends.put(ends.get(at) + 1, at)

    step = 4 * k.lanes
    whole = rows & -step
    with k.loop(0, whole, step) as first:
        take(first, k.concat([inside(first + j * k.lanes, None) for j in range(4)]))
    with k.loop(whole, rows, k.lanes) as first:
        take(first, inside(first, k.mask_first(rows - first)))

    total = k.var(k.int(0))
    with k.loop(0, per) as i:  # counts become starts,
        here = ends.get(i)
        ends.put(total.value, i)
        total.value = total.value + here
    with k.loop(0, count.value) as i:  # and starts ends
        row = found.get(i)
        at = tokens.get(row) - low
        to = ends.get(at)
        sorted_rows.put(row, to)
        ends.put(to + 1, at)
    return ends, sorted_rows


def add_token_rows(k: KernelBuilder, dweight, tokens, dy, *, C, V) -> None:
    """A thread claims ids, looks for them among all tokens and adds their rows in order: no atomics, the same bits for any thread
    count. TOGETHER rows of an id are added at a time: memory is read in so many streams, and the sum in the second cache once. The
    rows that follow on the list, which no hardware foresees, are on their way meanwhile."""
    rows, per = k.scalar("batch") * k.scalar("seq"), -(-V // CLAIMS)

    with k.parallel_for(-(-V // per)) as chunk:
        low = chunk * per
        high = k.min(low + per, V)
        ends, sorted_rows = sort_by_id(k, tokens, rows, low, high, per=per)
        last = ends.get(high - low - 1) - 1

        def add_rows(to: Pointer, i: Value, count: int) -> None:
            of = [dy.at(sorted_rows.get(i + t) * C) for t in range(count)]
            following = [sorted_rows.get(k.min(i + t + TOGETHER, last)) for t in range(count)]
            ahead = [dweight.at(tokens.get(following[0]) * C), *(dy.at(row * C) for row in following)]

            def add(c, mask, j):
                total = to.load(c, mask)
                for p in of:
                    total = total + p.load(c, mask)
                to.store(total, c, mask)
                for p in ahead:
                    k.prefetch(p.at(c), near=False)

            foreach_column(k, C, add, unroll=2)

        begin = k.var(k.int(0))
        with k.loop(0, high - low) as i:
            to, first, end = dweight.at((low + i) * C), begin.value, ends.get(i)
            whole = first + ((end - first) & -TOGETHER)
            with k.loop(first, whole, TOGETHER) as entry:
                add_rows(to, entry, TOGETHER)
            with k.loop(whole, end) as entry:
                add_rows(to, entry, 1)
            begin.value = end


@lowering("embedding_dwte", starts="dweight", also={"tokens": "i32"})
def lower_embedding_dwte(op: Op, c: Lowering) -> None:
    mode = op.modes["dweight"]
    if mode != "add":
        c.call(clear, {"out": op.dweight}, {"size": op.dweight.size, "mode": mode}, writes="out")
    operands = {"dweight": op.dweight, "tokens": op.tokens, "dy": op.dy}
    c.thread_scratch(4 * (-(-int(op.rows) // CLAIMS) + 2 * op.tokens.size))
    c.call(add_token_rows, operands, {"C": int(op.dy.shape[-1]), "V": int(op.rows)}, writes="dweight")


def embedding_dwpe(k: KernelBuilder, dweight, dy, *, C, positions, mode_dweight) -> None:
    """dweight[t] = sum of dy[:, t] over the batch in order; nothing beyond the sequence. Positions go in groups whose sums stay in
    the second cache, so that memory is read in runs of GROUP bytes, of TOGETHER samples at a time."""
    batch, seq = k.scalar("batch"), k.scalar("seq")
    sums = k.thread_scratch()

    def add_samples(first: Value, count: int, begin: Value, size: Value) -> None:
        of = [dy.at(((first + b) * seq + begin) * C) for b in range(count)]

        def body(i, mask, j):
            total = sums.load(i, mask)
            for p in of:
                total = total + p.load(i, mask)
            sums.store(total, i, mask)

        foreach_vector(k, 0, size, body, unroll=4)

    with k.parallel_range(positions, _positions(C, positions)) as (begin, end):
        n, inside = (end - begin) * C, k.max(k.min(end, seq) - begin, 0) * C
        foreach_vector(k, 0, n, lambda i, mask, j: sums.store(0.0, i, mask))
        whole = batch & -TOGETHER
        with k.loop(0, whole, TOGETHER) as b:
            add_samples(b, TOGETHER, begin, inside)
        with k.loop(whole, batch) as b:
            add_samples(b, 1, begin, inside)
        to = dweight.at(begin * C)
        foreach_vector(
            k, 0, n, lambda i, mask, j: to.store(added(k, to, i, mask, sums.load(i, mask), mode_dweight), i, mask)
        )


def _positions(C: int, positions: int) -> int:
    """How large a group is: there are to be enough groups for all threads."""
    return max(1, min(GROUP // (4 * C), positions // 16))


@lowering("embedding_dwpe", starts="dweight")
def lower_embedding_dwpe(op: Op, c: Lowering) -> None:
    C, positions = int(op.dy.shape[-1]), int(op.rows)
    c.thread_scratch(_positions(C, positions) * C * 4)
    constants = {"C": C, "positions": positions, "mode_dweight": op.modes["dweight"]}
    c.call(embedding_dwpe, {"dweight": op.dweight, "dy": op.dy}, constants, writes="dweight")
