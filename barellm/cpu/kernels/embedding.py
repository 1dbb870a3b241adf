"""Token and position embedding. Shapes: tokens (batch, seq) i32, wte (V, C), wpe (maxT, C), y and dy (batch, seq, C)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.loops import across, past_caches, row_grain, sweep, sweep_result, write_row
from barellm.cpu.kernels.reductions import added
from barellm.cpu.kernels.storage import Weight, weight_operands
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.base import Op

CLAIMS = 64  # of ids, each of which looks through all tokens
GROUP, TOGETHER = 65536, 4  # bytes of the sums over the batch that a claim keeps, samples that it adds at a time
AHEAD, LOOK = (
    4,
    128,
)  # rows of the token table that are on their way into the second cache; tokens that dwte looks ahead
LINE = 64  # bytes of a cache line


def embedding(k: KernelBuilder, y, tokens, wte, wte_lo, wpe, wpe_lo, *, C) -> None:
    seq, pos = k.scalar("seq"), k.scalar("pos")
    token_rows, position_rows = Weight(k, wte, wte_lo), Weight(k, wpe, wpe_lo)
    rows = k.scalar("batch") * seq
    past = past_caches(k, rows, C, y)
    with k.claim(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        of, at = tokens.get(row) * C, (pos + row % seq) * C

        def vector(c, mask, of=of, at=at):
            return token_rows.load(of + c, mask) + position_rows.load(at + c, mask)

        following = tokens.get(k.min(row + AHEAD, rows - 1)) * C
        for table in (wte,) if wte_lo is None else (wte, wte_lo):
            with k.loop(0, C, LINE // table.itemsize) as c:
                k.prefetch(table.at(following + c), near=False)
        write_row(k, y.at(row * C), C, vector, past=past)


@lowering("embedding")
def lower_embedding(op: Op, c: Lowering) -> None:
    operands = {"y": op.y, "tokens": op.tokens, **weight_operands("wte", op.wte), **weight_operands("wpe", op.wpe)}
    c.call(embedding, operands, {"C": int(op.y.shape[-1])}, writes="y")


def clear(k: KernelBuilder, out, *, size, mode) -> None:
    """out (size) = 0 where `mode` is to store in this run."""
    keep = k.keep(mode)
    n = k.int(size) if keep is None else k.select(keep, 0, k.int(size))
    sweep_result(k, n, out, lambda i, mask: k.to(0.0, k.vec))


def add_token_rows(k: KernelBuilder, dweight, tokens, dy, *, C, V) -> None:
    """A thread claims ids, looks for them among all tokens and adds their rows in order: no sort, no atomics, the same bits for any
    thread count. Rows are read whole, and fetched when their token is found some way ahead."""
    rows, per = k.scalar("batch") * k.scalar("seq"), -(-V // CLAIMS)

    with k.claim_each(-(-V // per)) as chunk:
        low = k.splat(chunk * per)
        high = k.splat(k.min((chunk + 1) * per, V))

        @contextmanager
        def found(first: Value) -> Iterator[tuple[Pointer, Pointer]]:
            """Where the rows are, of dweight and of dy, of those of `lanes` tokens from the first that have the claim's ids."""
            inside = k.mask_first(rows - first)
            ids = tokens.load(first, inside)
            with k.set_lanes((ids >= low) & (ids < high) & inside) as lane:
                row = first + lane
                yield dweight.at(tokens.get(row) * C), dy.at(row * C)

        with k.loop(0, rows, k.lanes) as first:
            with found(first + LOOK) as (to, of), k.loop(0, C, LINE // 4) as c:
                k.prefetch(to.at(c), near=False)
                k.prefetch(of.at(c), near=False)
            with found(first) as (to, of):
                across(k, C, lambda c, mask, j, to=to, of=of: to.store(to.load(c, mask) + of.load(c, mask), c, mask))


@lowering("embedding_dwte")
def lower_embedding_dwte(op: Op, c: Lowering) -> None:
    mode = op.modes["dweight"]
    if mode != "add":
        c.call(clear, {"out": op.dweight}, {"size": op.dweight.size, "mode": mode}, writes="out")
    operands = {"dweight": op.dweight, "tokens": op.tokens, "dy": op.dy}
    c.call(add_token_rows, operands, {"C": int(op.dy.shape[-1]), "V": int(op.rows)}, writes="dweight")


def embedding_dwpe(k: KernelBuilder, dweight, dy, *, C, positions, mode_dweight) -> None:
    """dweight[t] = sum of dy[:, t] over the batch in order; nothing beyond the sequence. Positions go in groups whose sums stay in
    the second cache, so that memory is read in runs of GROUP bytes, of TOGETHER samples at a time."""
    batch, seq = k.scalar("batch"), k.scalar("seq")
    sums = k.private()

    def add_samples(first: Value, count: int, begin: Value, size: Value) -> None:
        of = [dy.at(((first + b) * seq + begin) * C) for b in range(count)]

        def body(i, mask, j):
            total = sums.load(i, mask)
            for p in of:
                total = total + p.load(i, mask)
            sums.store(total, i, mask)

        sweep(k, 0, size, body, unroll=4)

    with k.claim(positions, _positions(C, positions)) as (begin, end):
        n, inside = (end - begin) * C, k.max(k.min(end, seq) - begin, 0) * C
        sweep(k, 0, n, lambda i, mask, j: sums.store(0.0, i, mask))
        whole = batch & -TOGETHER
        with k.loop(0, whole, TOGETHER) as b:
            add_samples(b, TOGETHER, begin, inside)
        with k.loop(whole, batch) as b:
            add_samples(b, 1, begin, inside)
        to = dweight.at(begin * C)
        sweep(k, 0, n, lambda i, mask, j: to.store(added(k, to, i, mask, sums.load(i, mask), mode_dweight), i, mask))


def _positions(C: int, positions: int) -> int:
    """Of a group: there are to be enough groups for all threads."""
    return max(1, min(GROUP // (4 * C), positions // 16))


@lowering("embedding_dwpe")
def lower_embedding_dwpe(op: Op, c: Lowering) -> None:
    C, positions = int(op.dy.shape[-1]), int(op.rows)
    c.private(_positions(C, positions) * C * 4)
    constants = {"C": C, "positions": positions, "mode_dweight": op.modes["dweight"]}
    c.call(embedding_dwpe, {"dweight": op.dweight, "dy": op.dy}, constants, writes="dweight")
