"""Filter gradient (wgrad) of a direct convolution of bf16 images, by bf16 dot products or AMX tiles:

    dw[k, c, t] = the sum over n and p of dy[n, k, p] x[n, c, p + shift(t)]

M is output channels, N is input channels, K is positions (conv_polyphase.py), of which two neighbours are a VNNI pair. dy's lines
are copied with zeros between them, so a row of the left operand is an output channel as it lies in memory. x is packed to [pair
of positions][channels]; a second copy has the pairs that begin at odd positions, for taps with odd shifts. A work item owns some
rows x columns of dw for all taps, whose fp32 sums stay in L2, and goes through all images in order, a K block of positions at a
time."""

from dataclasses import dataclass

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import ISA, Pointer
from barellm.cpu.kernels.conv import conv_polyphase, im2col
from barellm.cpu.kernels.gemm import amx, microkernel
from barellm.cpu.kernels.loops import accumulate
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up

KC = 256  # positions of a K block, about: what a tile multiplies of them stays in L1 for all taps
SUM_BYTES = 3 << 18  # of a work item
# The cost model's unit is what a column of a K block costs to pack: multiply-adds in that time, and a row's packing (a copy).
MULTIPLY_ADDS, ROW_COST = 400, 0.4


@dataclass(frozen=True)
class Blocking:
    """A work item owns the gradients of `rows` output channels x `columns` input channels. A K block: `lines` lines of `images`."""

    tile: Tile
    use_amx: bool
    rows: int
    columns: int
    lines: int
    images: int

    def layouts(self, geometry: im2col.ConvGeometry) -> tuple[conv_polyphase.PolyphaseLayout, conv_polyphase.PolyphaseLayout]:
        """The polyphase layouts of x and of dy, whose lines have the same pitch: a position is the same in both."""
        step = amx.TILE_K if self.use_amx else 2
        x = conv_polyphase.PolyphaseLayout(geometry, self.lines, step)
        return x, conv_polyphase.PolyphaseLayout(geometry.pixelwise(), self.lines, step, x.pitch)


def select_blocking(isa: ISA, tile: Tile, use_amx: bool, geometry: im2col.ConvGeometry, images: int, threads: int) -> Blocking:
    """The work items that take the least estimated time, packing counted. Lines and images of a K block depend on the shape alone:
    they are the order in which sums are added."""
    (P, _), rows, groups = geometry.output_size, geometry.rows, geometry.groups
    pitch, tile_n = conv_polyphase.PolyphaseLayout(geometry, P, 1).pitch, tile.nr(isa)
    lines = ceil_div(P, ceil_div(P, max(1, min(P, KC // pitch))))
    num_images = max(1, min(images, KC // (P * pitch))) if lines == P else 1  # of a K block of whole images

    def cost(size: tuple[int, int]) -> float:
        """A thread's estimated time: its share of the work items, in whole ones."""
        item_rows, columns = size
        items = groups * ceil_div(rows, item_rows) * ceil_div(geometry.channels, columns)
        work = item_rows * columns * geometry.taps / MULTIPLY_ADDS + ROW_COST * item_rows + columns
        return ceil_div(items, threads) * work

    sizes = [
        (r, c)
        for r in range(tile.mr, round_up(rows, tile.mr) + 1, tile.mr)
        for c in range(tile_n, round_up(geometry.channels, tile_n) + 1, tile_n)
        if 4 * r * c * geometry.taps <= SUM_BYTES
    ] or [(tile.mr, tile_n)]  # sizes whose sums stay in L2, or else one tile
    item_rows, columns = min(sizes, key=cost)
    return Blocking(tile, use_amx, item_rows, columns, lines, num_images)


class ScratchLayout:
    """Offsets in a thread's scratch, in bytes, and its size `nbytes`: planes of dy, planes of `x`, packed x (`panel`) [column
    block][image][parity], `sums` [tile][tap][tile.mr][tile_n]. `parities`: of the taps' shifts; pairs of positions begin at even or
    at odd ones; `pairs` of an image's planes take `copy` bytes for a column block."""

    def __init__(self, isa: ISA, geometry: im2col.ConvGeometry, b: Blocking) -> None:
        x, dy = b.layouts(geometry)
        tile_n = b.tile.nr(isa)
        self.parities = sorted({shift % 2 for shift in x.shifts()})
        self.pairs = round_up(ceil_div(x.padded_size(isa.lanes), 2), isa.lanes)
        self.copy = 4 * self.pairs * tile_n
        self.x = dy.zeros_nbytes(isa.lanes) + 2 * b.rows * b.images * dy.channel_pitch(isa.lanes)  # planes of x, behind those of dy
        self.panel = self.x + x.nbytes(isa, tile_n) + 64 * isa.lanes  # packed x
        self.sums = self.panel + b.columns // tile_n * b.images * len(self.parities) * self.copy
        self.nbytes = self.sums + 4 * b.rows * b.columns * geometry.taps


class WeightGradient:
    """One thread's work item. In scratch (`scratch`): `dy` and `x`, polyphase planes, those of x of `layout`; `panel`, x packed to
    pairs of positions; `sums` of dw, fp32. `steps`: of a micro-kernel, for an image; `tile_n`: input channels of a block.

    `seek` sets the item's `group`, its `num_rows` output channels from `row` on, and its `num_columns` input channels from
    `column` on."""

    def __init__(self, k, dw, dy, x, *, images: im2col.Images, geometry: im2col.ConvGeometry, blocking: Blocking,
            mode: str) -> None:  # fmt: skip
        self.k, self.dw, self.images, self.geometry = k, dw, k.num_elements(*images), geometry
        self.groups, self.rows, self.blocking, self.mode = geometry.groups, geometry.rows, blocking, mode
        self.scratch, at = ScratchLayout(k.isa, geometry, blocking), k.thread_scratch()
        self.tile_n = blocking.tile.nr(k.isa)
        self.layout, dy_layout = blocking.layouts(geometry)
        self.steps = dy_layout.positions // (amx.TILE_K if blocking.use_amx else 2)
        self.dy = conv_polyphase.PolyphaseBuffer(k, dy_layout, dy, at, channels=blocking.rows)
        self.x = conv_polyphase.PolyphaseBuffer(k, self.layout, x, at.bytes(self.scratch.x), channels=self.tile_n)
        self.panel, self.sums = at.bytes(self.scratch.panel), at.bytes(self.scratch.sums)

    def seek(self, item, row_blocks: int, column_blocks: int) -> None:
        """Find the parts of work item number `item`."""
        k, b = self.k, self.blocking
        self.group, rest = item // (row_blocks * column_blocks), item % (row_blocks * column_blocks)
        self.row, self.column = rest // column_blocks * b.rows, rest % column_blocks * b.columns
        self.num_rows = k.min(k.int(self.rows) - self.row, b.rows)
        self.num_columns = k.min(k.int(self.geometry.channels) - self.column, b.columns)

    def pack_k_block(self, image, num_images, line) -> None:
        """Pack a K block: the lines from `line` on of `num_images` images from `image` on. dy as polyphase planes, a row an output
        channel; x as planes, and from these, transposed, pairs of positions [pair][tile_n][2] for each parity (`_packed_x`)."""
        k, lanes = self.k, self.k.lanes
        with k.loop(0, num_images) as n:
            self.dy.seek(image + n, self.group, self.row, line)
            self.dy.pack(n * self.blocking.rows)
            with k.loop(0, self.num_columns, self.tile_n) as c:
                self.x.seek(image + n, self.group, self.column + c, line)
                self.x.pack()
                for parity in self.scratch.parities:
                    dst = self._packed_x(c // self.tile_n, n, parity)
                    with k.loop(0, self.scratch.pairs, lanes) as pair, k.loop(0, self.tile_n, lanes) as v:
                        at = self.x.at.at(pair * 2 + v * self.x.pitch + parity)  # two positions of channel v
                        vectors = []
                        for i in range(lanes):
                            p = at.at(i * self.x.pitch)
                            vectors.append(k.op(k.ivec, f"load {k.ivec}, ptr {p.ref}, align 2"))
                        for i, value in enumerate(transpose(k, vectors)):
                            dst.store_raw(value, (pair + i) * self.tile_n + v)

    def _packed_x(self, block, n, parity: int) -> Pointer:
        """The packed x, [pair][tile_n][2], of a column block of image n of the K block, in pairs that begin at `parity`."""
        number = (block * self.blocking.images + n) * len(self.scratch.parities) + self.scratch.parities.index(parity)
        return self.panel.as_dtype("i32").bytes(number * self.scratch.copy)

    def _sums(self, row, column, t: int) -> Pointer:
        """The sums (tile.mr, tile_n) of tap t of the tile at (row, column) of the work item."""
        blocks = self.blocking.columns // self.tile_n
        tile = (row // self.blocking.tile.mr * blocks + column // self.tile_n) * self.geometry.taps + t
        return self.sums.bytes(tile * (4 * self.blocking.tile.mr * self.tile_n))

    def macro_kernel(self, num_images, add_previous) -> None:
        """The sums of all tiles and taps over a K block, plus those before where `add_previous` (i1). A tap is a shift of x."""
        k, tile = self.k, self.blocking.tile
        with k.loop(0, self.num_columns, self.tile_n) as c, k.loop(0, self.num_rows, tile.mr) as r:
            for t, shift in enumerate(self.layout.shifts()):
                panel = self._packed_x(c // self.tile_n, k.int(0), shift % 2).bytes(shift // 2 * (4 * self.tile_n))
                self._micro_kernel(self._sums(r, c, t), self.dy.at.at(r * self.dy.pitch), panel, num_images, add_previous)

    def _micro_kernel(self, dst, left, panel, num_images, add_previous) -> None:
        """dst [tile.mr][tile_n] fp32 = dy x^T over the positions of a K block, plus the old dst where `add_previous` (i1). `left`:
        dy's packed lines, [row][position], of the first of `num_images` images; `panel`: VNNI pairs of x, [pair][tile_n][2], a
        tap's."""
        k, tile, steps = self.k, self.blocking.tile, self.steps
        left_bytes = 2 * self.blocking.rows * self.dy.pitch  # bytes from an image to the next
        panel_bytes = len(self.scratch.parities) * self.scratch.copy  # of packed x, likewise
        row = 2 * self.dy.pitch  # bytes from an output channel to the next
        if self.blocking.use_amx:
            amx.load_accumulators(k, dst, add_previous, row=4 * self.tile_n)
            with k.loop(0, num_images) as n:
                a = amx.TileA(left.bytes(n * left_bytes), row, amx.LINE, amx.SIDE * row)
                amx.accumulate_steps(k, a, panel.bytes(n * panel_bytes), k.int(steps))
            amx.store_accumulators(k, dst, row=4 * self.tile_n)
            return
        with microkernel.accumulators(k, tile, dst, self.tile_n, add_previous) as acc, k.loop(0, num_images) as n:
            load_dy, right = microkernel.broadcast_packed(k, left.bytes(n * left_bytes), 4, row), panel.bytes(n * panel_bytes)
            with k.loop(0, steps) as u:
                microkernel.rank1_update(k, acc, load_dy, right, u, True)

    def store_gradients(self) -> None:
        """The epilogue: the sums of a row, [tap][column] fp32, are transposed to dw's, [column][tap]."""
        k, lanes, taps, C = self.k, self.k.lanes, self.geometry.taps, self.geometry.channels
        rows = self.blocking.tile.mr
        with k.loop(0, self.num_rows) as r, k.loop(0, self.num_columns, lanes) as c:
            first = self._sums(r, c, 0).at(r % rows * self.tile_n + c % self.tile_n)
            dst = self.dw.at(((self.group * self.rows + self.row + r) * C + self.column + c) * taps)
            count = k.min(self.num_columns - c, lanes)  # input channels that exist
            for t in range(0, taps, lanes):
                n = min(lanes, taps - t)  # taps of this vector
                of_taps = [first.at((t + min(i, n - 1)) * (rows * self.tile_n)).load() for i in range(lanes)]
                mask = None if n == lanes else k.mask_first(n)
                for i, value in enumerate(transpose(k, of_taps)):
                    with k.when(count > i):
                        place = dst.at(i * taps + t)
                        place.store(accumulate(k, place, 0, mask, value, self.mode), 0, mask)


def conv_wgrad_bf16(k, dw, dy, x, *, geometry: im2col.ConvGeometry, blocking: Blocking, **sizes) -> None:
    """The kernel: dw (groups rows, channels taps) fp32, from dy (N, groups rows, P, Q) bf16 and x (N, groups channels, H, W) bf16.
    `sizes`: images, and the mode of dw."""
    gradient = WeightGradient(k, dw, dy, x, geometry=geometry, blocking=blocking, **sizes)
    row_blocks, column_blocks = ceil_div(gradient.rows, blocking.rows), ceil_div(geometry.channels, blocking.columns)
    items = gradient.groups * row_blocks * column_blocks
    with amx.tile_registers(k, blocking.use_amx), k.parallel_for(items) as item:
        gradient.seek(item, row_blocks, column_blocks)
        # K blocks, of lines of some images.
        with k.loop(0, gradient.images, blocking.images) as image, k.loop(0, geometry.output_size[0], blocking.lines) as line:
            gradient.pack_k_block(image, k.min(gradient.images - image, blocking.images), line)
            gradient.macro_kernel(k.min(gradient.images - image, blocking.images), (image + line).differs(0))
        gradient.store_gradients()
