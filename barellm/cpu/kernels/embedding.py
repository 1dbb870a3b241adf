"""Token and position embedding. Shapes: tokens (batch, seq) i32, wte (V, C), wpe (maxT, C), y and dy (batch, seq, C)."""

from __future__ import annotations

from barellm.cpu.kernel import KernelBuilder, Lowering, kernel, lowering
from barellm.cpu.kernels.loops import across, past_caches, row_grain, sweep_result, write_row
from barellm.cpu.kernels.reductions import added
from barellm.cpu.kernels.storage import Weight, weight_operands
from barellm.program.ops.base import Op

COLUMNS = 64  # of dwte, that one claim walks the tokens for


def embedding(k: KernelBuilder, y, tokens, wte, wte_lo, wpe, wpe_lo, *, C) -> None:
    seq, pos = k.scalar("seq"), k.scalar("pos")
    token_rows, position_rows = Weight(k, wte, wte_lo), Weight(k, wpe, wpe_lo)
    rows = k.scalar("batch") * seq
    past = past_caches(k, rows, C, y)
    with k.claim(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        of, at = tokens.get(row) * C, (pos + row % seq) * C

        def vector(c, mask, of=of, at=at):
            return token_rows.load(of + c, mask) + position_rows.load(at + c, mask)

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


def add_token_rows(k: KernelBuilder, dweight, tokens, dy, *, C) -> None:
    """A thread claims columns and adds the tokens' rows in order: no sort, no atomics, the same bits for any thread count."""
    rows = k.scalar("batch") * k.scalar("seq")

    def walk(first, width: int) -> None:
        with k.loop(0, rows) as row:
            to, of = dweight.at(tokens.get(row) * C + first), dy.at(row * C + first)
            across(k, width, lambda c, mask, j: to.store(to.load(c, mask) + of.load(c, mask), c, mask))

    with k.claim_each(-(-C // COLUMNS)) as block:
        whole = block < C // COLUMNS
        with k.when(whole):
            walk(block * COLUMNS, COLUMNS)
        if C % COLUMNS:
            with k.otherwise(whole):
                walk(k.int(C - C % COLUMNS), C % COLUMNS)


@lowering("embedding_dwte")
def lower_embedding_dwte(op: Op, c: Lowering) -> None:
    mode = op.modes["dweight"]
    if mode != "add":
        c.call(clear, {"out": op.dweight}, {"size": op.dweight.size, "mode": mode}, writes="out")
    operands = {"dweight": op.dweight, "tokens": op.tokens, "dy": op.dy}
    c.call(add_token_rows, operands, {"C": int(op.dy.shape[-1])}, writes="dweight")


@kernel("embedding_dwpe", constants=lambda op: {"C": int(op.dy.shape[-1]), "positions": int(op.rows)})
def embedding_dwpe(k: KernelBuilder, dweight, dy, *, C, positions, mode_dweight) -> None:
    """dweight[t] = sum of dy[:, t] over the batch in order; nothing beyond the sequence."""
    batch, seq = k.scalar("batch"), k.scalar("seq")
    with k.claim(positions, row_grain(C)) as (begin, end), k.loop(begin, end) as t:
        to = dweight.at(t * C)
        times = k.select(t < seq, batch, 0)

        def body(c, mask, j):
            total = k.var(k.to(0.0, k.vec))
            with k.loop(0, times) as b:
                total.value = total.value + dy.load((b * seq + t) * C + c, mask)
            to.store(added(k, dweight, t * C + c, mask, total.value, mode_dweight), c, mask)

        across(k, C, body, unroll=1)
