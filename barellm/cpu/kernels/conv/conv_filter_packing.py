"""Packing of convolution filters for the bf16 implicit GEMM: VNNI layout [column block][chunk][tap][pairs][tile_n][2].

A column is an output channel, a pair is of two input channels. In filters (K, C, R, S) a channel's taps are adjacent, so vectors of
as many filters are transposed first, two adjacent taps at a time; then halves of two rows make a pair of channels."""

from dataclasses import dataclass

from barellm.cpu.kernel import ISA, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up


@dataclass(frozen=True)
class FilterPacking:
    """Filters of each of `groups` groups from `channels` to `columns` channels, in chunks of `pairs` pairs of channels and
    blocks of `tile_n` columns. `taps` are the elements of a filter of `size` elements that are packed. They are read from (groups
    columns, channels, size) or, `transposed`, from (groups channels, columns, size)."""

    groups: int
    channels: int
    columns: int
    size: int
    taps: tuple[int, ...]
    pairs: int
    tile_n: int
    transposed: bool

    @property
    def chunks(self) -> int:
        return ceil_div(self.channels, 2 * self.pairs)

    @property
    def step_nbytes(self) -> int:
        """Of a tap and a chunk of channels, for a column block."""
        return 4 * self.pairs * self.tile_n

    @property
    def block_nbytes(self) -> int:
        return self.chunks * len(self.taps) * self.step_nbytes

    @property
    def nbytes(self) -> int:
        return self.groups * ceil_div(self.columns, self.tile_n) * self.block_nbytes

    @property
    def pitch(self) -> int:
        """Elements from a channel to the next in a thread's scratch, where a chunk lies as pairs of adjacent taps."""
        return round_up(self.size, 2) if self.transposed else self.size

    def scratch_nbytes(self, isa: ISA) -> int:
        """Of a thread: a chunk of a vector of filters."""
        return 4 * isa.lanes * (self.pairs * self.pitch + isa.lanes)


def pack_filters(k, a, w, *, packing: FilterPacking) -> None:
    """The kernel: a = the filters w in VNNI layout (`FilterPacking`). A work item is a chunk of channels of a vector of filters: it
    is transposed into scratch, [channel][pair of taps][filter], where channels behind the last are zero; then, of a tap, the rows
    of two adjacent channels are interleaved to pairs. w: bf16, or rounded to it."""
    f, lanes = packing, k.lanes
    vectors_per_block = f.tile_n // lanes  # of `lanes` filters
    vectors = ceil_div(f.columns, f.tile_n) * vectors_per_block  # of a group
    buffer = k.thread_scratch("i32")
    with k.parallel_for(f.groups * vectors * f.chunks) as item:
        chunk, rest = item % f.chunks, item // f.chunks
        vector, group = rest % vectors, rest // vectors
        first, channel = vector * lanes, chunk * (2 * f.pairs)  # first filter, first channel of the item
        count = k.min(k.int(f.channels) - channel, 2 * f.pairs)  # channels of the chunk that exist
        with k.loop(count * f.pitch // 2, f.pairs * f.pitch) as i:
            buffer.store_raw(0, i * lanes)
        transpose_chunk = _transpose_exchanged if f.transposed else _transpose_adjacent
        transpose_chunk(k, f, buffer, w, group, first, channel, count)

        block = vector // vectors_per_block
        begin = (group * ceil_div(f.columns, f.tile_n) + block) * f.block_nbytes + chunk * (len(f.taps) * f.step_nbytes)
        dst = a.as_dtype("i32").bytes(begin).at(vector % vectors_per_block * lanes)  # this vector's columns of the block
        with k.loop(0, f.pairs) as pair:
            src = buffer.at(pair * (f.pitch * lanes))
            for t, tap in enumerate(f.taps):
                # Where the tap is in the pair's even and odd channel; each row holds two adjacent taps.
                even, odd = tap, f.pitch + tap
                rows = [k.bitcast(src.load_raw(e // 2 * lanes), f"<{2 * lanes} x i16>") for e in (even, odd)]
                halves = [x for i in range(lanes) for x in (2 * i + even % 2, 2 * (lanes + i) + odd % 2)]
                dst.store_raw(k.bitcast(k.shuffle(*rows, halves), k.ivec), (pair + t * f.pairs) * f.tile_n)


def _transpose_adjacent(k, f: FilterPacking, buffer, w, group, first, channel, count) -> None:
    """buffer [channel of the chunk][pair of taps][filter] bf16 = the transpose of `count` channels, from `channel` on, of `lanes`
    filters, from `first` on, of a group of w, in which the channels' taps are adjacent. Filters behind the last are read as it."""
    columns = [k.min(first + i, f.columns - 1) for i in range(k.lanes)]  # the filter that each lane has
    rows = [w.at(((group * f.columns + c) * f.channels + channel) * f.size) for c in columns]
    total = count * f.size
    full = total - total % (2 * k.lanes)
    with k.loop(0, full, 2 * k.lanes) as e:
        _transpose_square(k, buffer.at(e * (k.lanes // 2)), [p.at(e) for p in rows])
    with k.when(full < total):
        _transpose_square(k, buffer.at(full * (k.lanes // 2)), [p.at(full) for p in rows], total - full)


def _transpose_exchanged(k, f: FilterPacking, buffer, w, group, first, channel, count) -> None:
    """`_transpose_adjacent` of filters w (groups channels, columns, size), in which the filters' taps are adjacent."""
    columns = [k.min(first + i, f.columns - 1) for i in range(k.lanes)]
    with k.loop(0, count) as c:
        src = w.at((group * f.channels + channel + c) * (f.columns * f.size))
        dst = buffer.at(c * (f.pitch // 2 * k.lanes))
        if f.size == 1:
            bits = _as_bf16(k, src.at(first), k.mask_first(k.int(f.columns) - first))
            dst.store_raw(k.op(k.ivec, f"zext {bits.typed} to {k.ivec}"))
        for e in range(0, f.size if f.size > 1 else 0, 2 * k.lanes):
            rows = [src.at(column * f.size + e) for column in columns]
            _transpose_square(k, dst.at(e * (k.lanes // 2)), rows, None if e + 2 * k.lanes <= f.size else f.size - e)


def _transpose_square(k, dst, rows, count=None) -> None:
    """dst (pairs of adjacent taps, lanes) = the first 2 `lanes` taps of each of the `lanes` rows, transposed; of only `count` taps,
    padded with zeros. Pairs behind the last tap are overwritten later or not read."""
    lanes = k.lanes
    masks = [None if count is None else k.mask_first(count - i) for i in (0, lanes)]  # of the first and the second vector of taps
    pairs = [k.concat([_as_bf16(k, p.at(i), mask) for i, mask in zip((0, lanes), masks, strict=True)]) for p in rows]
    for i, v in enumerate(transpose(k, [k.bitcast(v, k.ivec) for v in pairs])):
        dst.store_raw(v, i * lanes)


def _as_bf16(k, p, mask) -> Value:
    """A vector of elements as bf16."""
    return p.load_raw(0, mask) if p.dtype == "bf16" else k.round_bf16(p.load(0, mask))
