"""The filters of a convolution as its products of pairs have them: bf16, [column block][chunk][element][pairs][span][2].

A column is an output channel, a pair is of two input channels, an element is one of the filter's. Filters (K, C, R, S) have the
channels' elements side by side, so vectors of as many filters are transposed first, two adjacent elements at a time; then halves
of two rows make a pair of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up


@dataclass(frozen=True)
class Filters:
    """Filters of each of `groups` groups from `channels` to `columns` channels, in chunks of `pairs` pairs of channels and blocks
    of `span` columns. `elements` are the places in a filter of `size` elements that are wanted. They are read from (groups
    columns, channels, size) or, `turned`, from (groups channels, columns, size)."""

    groups: int
    channels: int
    columns: int
    size: int
    elements: tuple[int, ...]
    pairs: int
    span: int
    turned: bool

    @property
    def chunks(self) -> int:
        return ceil_div(self.channels, 2 * self.pairs)

    @property
    def step_nbytes(self) -> int:
        """Of an element of the filter and a chunk of channels, for a block of columns."""
        return 4 * self.pairs * self.span

    @property
    def block_nbytes(self) -> int:
        return self.chunks * len(self.elements) * self.step_nbytes

    @property
    def nbytes(self) -> int:
        return self.groups * ceil_div(self.columns, self.span) * self.block_nbytes

    @property
    def pitch(self) -> int:
        """Elements from a channel to the next in a thread's scratch, where a chunk lies as pairs of adjacent elements."""
        return round_up(self.size, 2) if self.turned else self.size

    def thread_scratch(self, isa: ISA) -> int:
        """A thread's scratch: a chunk of a vector of filters."""
        return 4 * isa.lanes * (self.pairs * self.pitch + isa.lanes)


def pack_filters(k: KernelBuilder, a, w, *, filters: Filters) -> None:
    f, lanes = filters, k.lanes
    vectors = ceil_div(f.columns, f.span) * (f.span // lanes)
    buffer = k.thread_scratch("i32")
    with k.parallel_for(f.groups * vectors * f.chunks) as unit:
        chunk, rest = unit % f.chunks, unit // f.chunks
        vector, group = rest % vectors, rest // vectors
        first, channel = vector * lanes, chunk * (2 * f.pairs)
        count = k.min(k.int(f.channels) - channel, 2 * f.pairs)
        with k.loop(count * f.pitch // 2, f.pairs * f.pitch) as i:
            buffer.store_raw(0, i * lanes)
        _transpose(k, f, buffer, w, group, first, channel, count)
        block = vector // (f.span // lanes)
        begin = (group * ceil_div(f.columns, f.span) + block) * f.block_nbytes + chunk * (
            len(f.elements) * f.step_nbytes
        )
        to = a.as_dtype("i32").bytes(begin).at(vector % (f.span // lanes) * lanes)
        with k.loop(0, f.pairs) as pair:
            of = buffer.at(pair * (f.pitch * lanes))
            for t, element in enumerate(f.elements):
                places = element, f.pitch + element
                rows = [k.bitcast(of.load_raw(e // 2 * lanes), f"<{2 * lanes} x i16>") for e in places]
                halves = [x for i in range(lanes) for x in (2 * i + places[0] % 2, 2 * (lanes + i) + places[1] % 2)]
                to.store_raw(k.bitcast(k.shuffle(*rows, halves), k.ivec), (pair + t * f.pairs) * f.span)


def _transpose(
    k: KernelBuilder, f: Filters, buffer: Pointer, w: Pointer, group: Value, first: Value, channel: Value, count: Value
) -> None:
    """buffer (channels of the chunk x elements, in pairs) x filters. A filter that is not there is read as the last one."""
    columns = [k.min(first + i, f.columns - 1) for i in range(k.lanes)]
    if not f.turned:
        rows = [w.at(((group * f.columns + c) * f.channels + channel) * f.size) for c in columns]
        total = count * f.size
        whole = total - total % (2 * k.lanes)
        with k.loop(0, whole, 2 * k.lanes) as e:
            _square(k, buffer.at(e * (k.lanes // 2)), [p.at(e) for p in rows])
        with k.when(whole < total):
            _square(k, buffer.at(whole * (k.lanes // 2)), [p.at(whole) for p in rows], total - whole)
        return
    with k.loop(0, count) as c:
        of = w.at((group * f.channels + channel + c) * (f.columns * f.size))
        to = buffer.at(c * (f.pitch // 2 * k.lanes))
        if f.size == 1:
            bits = _bits(k, of.at(first), k.mask_first(k.int(f.columns) - first))
            to.store_raw(k.op(k.ivec, f"zext {bits.typed} to {k.ivec}"))
        for e in range(0, f.size if f.size > 1 else 0, 2 * k.lanes):
            rows = [of.at(column * f.size + e) for column in columns]
            _square(k, to.at(e * (k.lanes // 2)), rows, None if e + 2 * k.lanes <= f.size else f.size - e)


def _square(k: KernelBuilder, to: Pointer, rows: list[Pointer], count: Any = None) -> None:
    """to (pairs, lanes) = 2 lanes elements of each row, or the first `count` and zeros. What lies behind the run's end is written
    again or not read."""
    lanes = k.lanes
    masks = [None if count is None else k.mask_first(count - i) for i in (0, lanes)]
    pairs = [k.concat([_bits(k, p.at(i), mask) for i, mask in zip((0, lanes), masks, strict=True)]) for p in rows]
    for i, v in enumerate(transpose(k, [k.bitcast(v, k.ivec) for v in pairs])):
        to.store_raw(v, i * lanes)


def _bits(k: KernelBuilder, p: Pointer, mask: Value | None) -> Value:
    """A vector of elements as bf16."""
    return p.load_raw(0, mask) if p.dtype == "bf16" else k.round_bf16(p.load(0, mask))
