"""Dropout and its gradient. Shapes: x, y, dx, dy (batch, seq, C). The bits are those of
`program/ops/pointwise/random.py`, or the draws of `program/ops/pointwise/tausworthe.py`."""

from collections.abc import Iterator
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Pointer, Value, batch_and_seq, lowering
from barellm.cpu.kernels.loops import accumulate, blocks, row_grain, row_words
from barellm.cpu.lang import random
from barellm.cpu.lang.tausworthe import Streams
from barellm.program.ops.pointwise.random import HALF
from barellm.program.ops.pointwise.tausworthe import BLOCK


def keyed_rows(k, out, x, stream, batch, seq, C: int) -> Iterator[tuple[Pointer, Pointer, Any, Value]]:
    """`for dst, src, key, position in ...`: each row of out and x (batch, seq, C), in parallel, with its generator's key, which
    follows from (seed, step, sample, stream), and its position. So the bits do not depend on threads or on the batch size."""
    seq, (seed, step, sample) = k.size(seq), map(k.scalar, ("seed", "step", "sample"))
    with k.parallel_range(k.size(batch) * seq, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        key = random.sample_key(k, seed, step, sample + row // seq, stream)
        position = row % seq
        yield out.at(row * C), x.at(row * C), key, position


def store_dropped(k, dst, src, column, mask, word, rate: float, mode: str) -> None:
    """dst[column ...] = src * keep / (1 - rate), stored or added, of one vector; `word`: its random lanes."""
    y = src.load(column, mask) * random.keep(k, word, rate)
    dst.store(accumulate(k, dst, column, mask, y, mode), column, mask)


def dropout(k, out, x, stream, *, batch, seq, C: int, rate: float, mode: str) -> None:
    """The kernel: out (batch, seq, C) = x * keep / (1 - rate), stored or added, by threefry words (`keyed_rows` has their key)."""
    for dst, src, key, position in keyed_rows(k, out, x, stream, batch, seq, C):
        for column, mask, word in row_words(k, key, position, C):
            store_dropped(k, dst, src, column, mask, word, rate, mode)


def tausworthe_dropout(k, out, x, stream, *, batch, seq, C: int, rate: float, bits: str, mode: str) -> None:
    """The kernel: `dropout` with draws of a Tausworthe generator, whose streams begin at each block; `bits`: its kind."""
    for dst, src, key, position in keyed_rows(k, out, x, stream, batch, seq, C):
        for number, columns in blocks(k, C, BLOCK):
            streams = Streams(k, bits, key, position, number)
            first = k.int(number) * BLOCK
            for draw, size in blocks(k, columns, HALF):
                c = first + draw * HALF  # the next draw of the HALF streams is for the `size` columns from c on
                for part, word in enumerate(streams.draw()):
                    left = size - part * k.lanes
                    if left > 0:
                        mask = None if left >= k.lanes else k.mask_first(left)
                        store_dropped(k, dst, src, c + part * k.lanes, mask, word, rate, mode)


@lowering("dropout", "tausworthe_dropout", starts="y")
@lowering("dropout_backward", "tausworthe_dropout_backward", starts="dx")
def lower_dropout(op: Op, c: Lowering) -> None:
    (name, out), x = next(iter(op.outputs.items())), op.inputs.get("x", op.inputs.get("dy"))
    constants = {"C": int(out.shape[-1]), "rate": op.rate, "mode": op.modes[name], **batch_and_seq(out)}
    operands = {"out": out, "x": x, "stream": op.stream}
    if "bits" in op.attrs:
        c.call(tausworthe_dropout, operands, {**constants, "bits": op.bits}, writes="out")
    else:
        c.call(dropout, operands, constants, writes="out")
