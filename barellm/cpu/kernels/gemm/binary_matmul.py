"""Binary (XNOR-popcount) GEMM of packed signs: y = columns - 2 ones(a xor b). Shapes: a (rows, W), b (N, W) of i32 words, y (rows,
N).

A vector holds many columns of b, and each step takes the next few bits of them and of one row of a. How many bits, and how the
popcount is done, depends on the ISA:

    words     32 bits a step, an i32 for each column: xor with the row's word, VPOPCNTDQ, add
    nibbles   4 bits a step, a byte for each column: the row's nibble chooses a table of 16 bytes, ones(nibble xor i) for each i,
              and pshufb looks all columns up
    bytes     8 bits a step, a byte for each column: xor with the row's byte, a count for each byte (cnt on Arm), add

The nibbles need no xor: it is in the table. So AVX2 multiplies 128 pairs of signs by two instructions. b is first packed into
panels of columns, in the order in which the steps read them; a is read where it lies."""

from dataclasses import dataclass

from barellm.cpu.kernel import ISA, Lowering, Op, Tensor, Value, lowering
from barellm.cpu.kernels.loops import accumulate, shape_of
from barellm.program.integers import ceil_div

TABLES = 256  # bytes: a table of 16 for each nibble
FLUSH = 7  # words after which bytes are added to wider sums: 7 words of 32 ones make 224
ROWS = 48  # of a work item
SHORT = 1 << 16  # columns that sums of 16 bits count


@dataclass(frozen=True)
class Tiling:
    """The micro-tile of an ISA: `rows` rows of a and `vectors` vectors of columns, each with a register of counts."""

    name: str
    lanes: int  # columns of a vector
    rows: int
    vectors: int

    @classmethod
    def of(cls, isa: ISA) -> "Tiling":
        if isa.popcount == "words":
            return cls("words", isa.lanes, 4, 4)
        # 32 registers hold four rows; of 16, three rows and three vectors take nine, and three hold b's columns.
        rows, vectors = (4, 4) if isa.registers == 32 else (3, 3)
        return cls(isa.popcount, 4 * isa.lanes, rows, vectors)

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return self.lanes * self.vectors

    @property
    def steps(self) -> int:
        """Steps in a word."""
        return {"words": 1, "nibbles": 8, "bytes": 4}[self.name]

    @property
    def word_bytes(self) -> int:
        """Bytes of a panel for one word of each column."""
        return self.columns * self.steps * (4 if self.name == "words" else 1)

    @property
    def type(self) -> str:
        return f"<{self.lanes} x {'i32' if self.name == 'words' else 'i8'}>"


def pack_panels(k, panels, b, *, N, W) -> None:
    """The kernel: panels, [panel][word][step][column] = the bits of step s of word w of b (N, W) i32 for each column of the panel,
    an i32 or a byte each. Columns beyond the last repeat it."""
    tiling = Tiling.of(k.isa)
    lanes, bits = k.lanes, 32 // tiling.steps  # bits of a step
    with k.parallel_for(ceil_div(N, tiling.columns)) as panel:
        dst = panels.bytes(panel * (W * tiling.word_bytes))
        with k.loop(0, tiling.columns, lanes) as column:
            rows = [b.at(k.min(panel * tiling.columns + column + i, N - 1) * W) for i in range(lanes)]
            with k.loop(0, W) as w:
                words = Value(k, k.ivec, "poison")
                for i, row in enumerate(rows):
                    word = k.op("i32", f"load i32, ptr {row.at(w).ref}, align 4")
                    words = k.op(k.ivec, f"insertelement {words.typed}, {word.typed}, i64 {i}")
                at = dst.bytes(w * tiling.word_bytes)  # the panel's columns of word w
                if tiling.name == "words":
                    k.line(f"store {words.typed}, ptr {at.bytes(column * 4).ref}, align 4")
                for step in range(tiling.steps if tiling.name != "words" else 0):
                    some = (words >> (bits * step)) & ((1 << bits) - 1)
                    narrow = k.op(f"<{lanes} x i8>", f"trunc {some.typed} to <{lanes} x i8>")
                    k.line(f"store {narrow.typed}, ptr {at.bytes(column + step * tiling.columns).ref}, align 1")


class CountTile:
    """The micro-kernel's tile of the result: `tiling.rows` rows of a, from `first` on, and the columns of one panel. The numbers of
    bits that differ are in scratch, [row][column] of i16 or i32, and for a few words in registers."""

    def __init__(self, k, a, first, last, *, W: int, short: bool) -> None:
        """`last`: the last row of all; rows behind it count as it does and are not stored. `W`: words of a row; `short`: sums fit
        16 bits. Attributes: `rows`: the tile's rows of a; `tables` (nibbles: 16 of 16 bytes) and behind them `sums` in scratch;
        `item`: (type, bytes) of a sum; `wide`: type of a vector of sums."""
        self.k, self.tiling, self.W = k, Tiling.of(k.isa), W
        self.rows = [a.at(k.min(first + r, last) * W) for r in range(self.tiling.rows)]
        self.tables, self.sums = k.thread_scratch(), k.thread_scratch().bytes(TABLES)
        self.item = ("i16", 2) if short else ("i32", 4)
        self.wide = f"<{self.tiling.lanes} x {self.item[0]}>"

    def sum_at(self, r: int, v: int) -> str:
        return self.sums.bytes((r * self.tiling.columns + v * self.tiling.lanes) * self.item[1]).ref

    def clear(self) -> None:
        for r in range(self.tiling.rows):
            for v in range(self.tiling.vectors):
                self.k.line(f"store {self.wide} zeroinitializer, ptr {self.sum_at(r, v)}, align 4")

    def count_words(self, panel, begin, end) -> None:
        """Add the numbers of different bits in words [begin, end) of the tile's rows and of the panel's columns
        ([word][step][column], packed by `pack_panels`) to the sums in scratch: counted in registers, bytes (words: i32), so that
        end - begin is FLUSH at most, and then added."""
        k, tiling = self.k, self.tiling
        # Numbers of bits that differ, in registers.
        counts = [[k.var(k.const(0, tiling.type)) for _ in range(tiling.vectors)] for _ in range(tiling.rows)]
        with k.loop(begin, end) as w:
            at = panel.bytes(w * tiling.word_bytes)
            words = [k.op("i32", f"load i32, ptr {row.at(w).ref}, align 4") for row in self.rows]
            for step in range(tiling.steps):
                columns = []
                for v in range(tiling.vectors):
                    p = at.bytes(step * tiling.columns + v * tiling.lanes * (4 if tiling.name == "words" else 1))
                    columns.append(k.op(tiling.type, f"load {tiling.type}, ptr {p.ref}, align 4"))
                for r, word in enumerate(words):
                    self._popcount_step(word, step, columns, counts[r])
        for r in range(tiling.rows):
            for v in range(tiling.vectors):
                where = self.sum_at(r, v)
                count = counts[r][v].value
                if tiling.type != self.wide:
                    count = k.op(self.wide, f"zext {count.typed} to {self.wide}")
                before = k.op(self.wide, f"load {self.wide}, ptr {where}, align 4")
                k.line(f"store {(before + count).typed}, ptr {where}, align 4")

    def _popcount_step(self, word, step: int, columns, counts) -> None:
        """counts[v] += popcount(bits of step `step` of a row's `word` xor those of the panel's columns[v])."""
        k, tiling = self.k, self.tiling
        if tiling.name == "nibbles":
            # The address of the nibble's table: 16 bytes each.
            offset = ((word << 4) if step == 0 else word >> (4 * step - 4)) & 0xF0  # 16 times the nibble
            wide = k.op("i64", f"zext {offset.typed} to i64")
            table = k.op("<16 x i8>", f"load <16 x i8>, ptr {self.tables.bytes(wide).ref}, align 16")
            table = k.shuffle(table, None, [i % 16 for i in range(tiling.lanes)])  # pshufb looks up in each 128 bits
            name = "llvm.x86.avx2.pshuf.b" if tiling.lanes == 32 else "llvm.x86.avx512.pshuf.b.512"
            popcounts = [k.call(name, tiling.type, table, column) for column in columns]
        else:
            bits = word if tiling.name == "words" else k.op("i8", f"trunc {(word >> (8 * step)).typed} to i8")
            first = k.op(tiling.type, f"insertelement {tiling.type} poison, {bits.typed}, i64 0")
            splat = k.shuffle(first, None, [0] * tiling.lanes)
            name = f"llvm.ctpop.v{tiling.lanes}{'i32' if tiling.name == 'words' else 'i8'}"
            popcounts = [k.call(name, tiling.type, splat ^ column) for column in columns]
        for count, more in zip(counts, popcounts, strict=True):
            total = count.value + more
            count.value = total if tiling.name == "words" else self._pin(total)

    def _pin(self, count) -> Value:
        """The value itself, through an empty inline assembly, which LLVM does not look into. It would add the counts of several
        steps to each other first, which shortens a chain that is not the limit, and spills a dozen registers."""
        isa = self.k.isa
        register = "w" if "neon" in isa.features else "v" if isa.masked else "x"
        return self.k.op(self.tiling.type, f'call {self.tiling.type} asm "", "={register},0"({count.typed})')

    def store(self, y, first, end, column, *, N: int, columns: int, mode: str) -> None:
        """y (rows, N) fp32 or 16-bit = columns - 2 sums, stored or added (`mode`), for the tile's rows, `first` and the next ones
        as far as below `end`, and the panel's columns, `column` (i64) and the next ones as far as below N. `columns`: signs of a
        row of a, so the dot product if none differs. N is known here: where panels do not divide it, both a branch without masks
        and, for the last panel, one with masks are emitted, since AVX2's masked stores are slow."""
        k, tiling = self.k, self.tiling
        whole = column + tiling.columns <= N  # i1: all of the panel's columns exist
        for r in range(tiling.rows):
            with k.when(first + r < end):
                dst = y.at((first + r) * N + column)
                for masked, branch in ((False, k.when), (True, k.otherwise))[: 2 if N % tiling.columns else 1]:
                    with branch(whole):
                        for c in range(0, tiling.columns, k.lanes):  # a vector of columns
                            mask = k.mask_first(N - column - c) if masked else None
                            dst.store(accumulate(k, dst, c, mask, self._dot_products(r, c, columns), mode), c, mask)

    def _dot_products(self, r: int, c: int, columns: int) -> Value:
        """columns - 2 sums of a vector of the tile: row r, `lanes` columns from c on, as fp32."""
        k = self.k
        part = f"<{k.lanes} x {self.item[0]}>"
        ones = k.op(part, f"load {part}, ptr {self.sums.bytes((r * self.tiling.columns + c) * self.item[1]).ref}, align 4")
        if part != k.ivec:
            ones = k.op(k.ivec, f"zext {ones.typed} to {k.ivec}")
        return k.to(columns - (ones << 1), k.vec)


def count_signs(k, y, a, panels, *, N, W, columns, dims, inner, mode) -> None:
    """The kernel: y (rows, N) = columns - 2 popcount(a (rows, W) xor b), a in i32 words of signs, b packed as `panels` by
    `pack_panels`: the GEMM of `columns` signs a row. A work item is ROWS rows of one panel. (dims, inner): their product is the
    number of rows; `mode`: of y. W: words of a row."""
    tiling = Tiling.of(k.isa)
    if tiling.name == "nibbles":  # table of nibble n: popcount(n xor i) for each i
        for nibble in range(16):
            table = ", ".join(f"i8 {(nibble ^ i).bit_count()}" for i in range(16))
            k.line(f"store <16 x i8> <{table}>, ptr {k.thread_scratch().bytes(16 * nibble).ref}, align 16")
    rows = k.num_elements(dims) * inner
    blocks = (rows + (ROWS - 1)) // ROWS
    with k.parallel_for(blocks * ceil_div(N, tiling.columns)) as unit:
        panel, block = unit // blocks, unit % blocks
        end = k.min(block * ROWS + ROWS, rows)
        packed = panels.bytes(panel * (W * tiling.word_bytes))
        with k.loop(block * ROWS, end, tiling.rows) as first:
            tile = CountTile(k, a, first, end - 1, W=W, short=tiling.name != "words" and columns < SHORT)
            tile.clear()
            words = W if tiling.name == "words" else FLUSH  # that are counted before sums are wider
            with k.loop(0, W, words) as begin:
                tile.count_words(packed, begin, k.min(begin + words, W))
            tile.store(y, first, end, panel * tiling.columns, N=N, columns=columns, mode=mode)


@lowering("binary_matmul", starts="y", also={"a": "i32", "b": "i32"})
def lower_binary_matmul(op: Op, c: Lowering) -> None:
    tiling = Tiling.of(c.isa)
    y: Tensor = op.y
    N, W = int(op.b.shape[0]), int(op.b.shape[1])
    panels = c.workspace("panels", ceil_div(N, tiling.columns) * W * tiling.word_bytes)
    c.thread_scratch(TABLES + tiling.rows * tiling.columns * 4)
    c.call(pack_panels, {"panels": panels, "b": op.b}, {"N": N, "W": W}, writes="panels")
    constants = {"N": N, "W": W, "columns": op.columns, "mode": op.modes["y"], **shape_of(y)}
    c.call(count_signs, {"y": y, "a": op.a, "panels": panels}, constants, writes="y")
