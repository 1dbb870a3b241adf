"""Products of packed signs: y = columns - 2 ones(a xor b). Shapes: a (rows, W), b (N, W) of i32 words, y (rows, N).

A vector holds many columns of b, and each step takes the next few bits of them and of one row of a. How many bits that are, and how
their differences are counted, depends on the machine:

    words     32 bits a step, an i32 for each column: xor with the row's word, VPOPCNTDQ, add
    nibbles   4 bits a step, a byte for each column: the row's nibble chooses a table of 16 bytes, ones(nibble xor i) for each i,
              and pshufb looks all columns up
    bytes     8 bits a step, a byte for each column: xor with the row's byte, a count for each byte (cnt on Arm), add

The nibbles need no xor: it is in the table. So AVX2 multiplies 128 pairs of signs by two instructions. b is first packed into
panels of columns, in the order in which the steps read them; a is read where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.loops import added, shape_of
from barellm.cpu.lang import Pointer, Value, Var
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor

TABLES = 256  # bytes: a table of 16 for each nibble
FLUSH = 7  # words after which bytes are added to wider sums: 7 words of 32 ones make 224
ROWS = 48  # of a claim
SHORT = 1 << 16  # columns that sums of 16 bits count


@dataclass(frozen=True)
class Form:
    """The tile of a machine: `rows` rows of a and `vectors` vectors of columns, each with a register to count in."""

    name: str
    lanes: int  # columns of a vector
    rows: int
    vectors: int

    @classmethod
    def of(cls, isa: ISA) -> Form:
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


def form_of(k: KernelBuilder) -> Form:
    return Form.of(k.isa)


def pack_panels(k: KernelBuilder, panels, b, *, N, W) -> None:
    """Panel p, word w, step s: the bits s of word w of each column of the panel, beside each other. Columns behind the last repeat
    it."""
    form = form_of(k)
    lanes, bits = k.lanes, 32 // form.steps
    with k.parallel_for(ceil_div(N, form.columns)) as panel:
        to = panels.bytes(panel * (W * form.word_bytes))
        with k.loop(0, form.columns, lanes) as column:
            rows = [b.at(k.min(panel * form.columns + column + i, N - 1) * W) for i in range(lanes)]
            with k.loop(0, W) as w:
                words = Value(k, k.ivec, "poison")
                for i, row in enumerate(rows):
                    word = k.op("i32", f"load i32, ptr {row.at(w).ref}, align 4")
                    words = k.op(k.ivec, f"insertelement {words.typed}, {word.typed}, i64 {i}")
                at = to.bytes(w * form.word_bytes)
                if form.name == "words":
                    k.line(f"store {words.typed}, ptr {at.bytes(column * 4).ref}, align 4")
                for step in range(form.steps if form.name != "words" else 0):
                    some = (words >> (bits * step)) & ((1 << bits) - 1)
                    narrow = k.op(f"<{lanes} x i8>", f"trunc {some.typed} to <{lanes} x i8>")
                    k.line(f"store {narrow.typed}, ptr {at.bytes(column + step * form.columns).ref}, align 1")


class Tile:
    """A tile of the result while it is counted: `form.rows` rows of a, from `first` on, and one panel."""

    def __init__(self, k: KernelBuilder, a: Pointer, first: Value, last: Value, *, W: int, short: bool) -> None:
        """`last` is the last row of all: rows behind it count as it does, and are not stored."""
        self.k, self.form, self.W = k, form_of(k), W
        self.rows = [a.at(k.min(first + r, last) * W) for r in range(self.form.rows)]
        self.tables, self.sums = k.thread_scratch(), k.thread_scratch().bytes(TABLES)
        self.item = ("i16", 2) if short else ("i32", 4)
        self.wide = f"<{self.form.lanes} x {self.item[0]}>"

    def sum_at(self, r: int, v: int) -> str:
        return self.sums.bytes((r * self.form.columns + v * self.form.lanes) * self.item[1]).ref

    def clear(self) -> None:
        for r in range(self.form.rows):
            for v in range(self.form.vectors):
                self.k.line(f"store {self.wide} zeroinitializer, ptr {self.sum_at(r, v)}, align 4")

    def count(self, panel: Pointer, begin: Value, end: Value) -> None:
        """Add the differences in words [begin, end) to the sums."""
        k, form = self.k, self.form
        counts = [[k.var(k.const(0, form.type)) for _ in range(form.vectors)] for _ in range(form.rows)]
        with k.loop(begin, end) as w:
            at = panel.bytes(w * form.word_bytes)
            words = [k.op("i32", f"load i32, ptr {row.at(w).ref}, align 4") for row in self.rows]
            for step in range(form.steps):
                columns = []
                for v in range(form.vectors):
                    p = at.bytes(step * form.columns + v * form.lanes * (4 if form.name == "words" else 1))
                    columns.append(k.op(form.type, f"load {form.type}, ptr {p.ref}, align 4"))
                for r, word in enumerate(words):
                    self._step(word, step, columns, counts[r])
        for r in range(form.rows):
            for v in range(form.vectors):
                where = self.sum_at(r, v)
                count = counts[r][v].value
                if form.type != self.wide:
                    count = k.op(self.wide, f"zext {count.typed} to {self.wide}")
                before = k.op(self.wide, f"load {self.wide}, ptr {where}, align 4")
                k.line(f"store {(before + count).typed}, ptr {where}, align 4")

    def _step(self, word: Value, step: int, columns: list[Value], counts: list[Var]) -> None:
        k, form = self.k, self.form
        if form.name == "nibbles":
            # The address of the nibble's table: 16 bytes each.
            offset = ((word << 4) if step == 0 else word >> (4 * step - 4)) & 0xF0
            wide = k.op("i64", f"zext {offset.typed} to i64")
            table = k.op("<16 x i8>", f"load <16 x i8>, ptr {self.tables.bytes(wide).ref}, align 16")
            table = k.shuffle(table, None, [i % 16 for i in range(form.lanes)])
            name = "llvm.x86.avx2.pshuf.b" if form.lanes == 32 else "llvm.x86.avx512.pshuf.b.512"
            found = [k.call(name, form.type, table, column) for column in columns]
        else:
            one = word if form.name == "words" else k.op("i8", f"trunc {(word >> (8 * step)).typed} to i8")
            first = k.op(form.type, f"insertelement {form.type} poison, {one.typed}, i64 0")
            same = k.shuffle(first, None, [0] * form.lanes)
            name = f"llvm.ctpop.v{form.lanes}{'i32' if form.name == 'words' else 'i8'}"
            found = [k.call(name, form.type, same ^ column) for column in columns]
        for count, more in zip(counts, found, strict=True):
            together = count.value + more
            count.value = together if form.name == "words" else self._held(together)

    def _held(self, count: Value) -> Value:
        """The value itself, behind an assembly text without an instruction. LLVM would add the counts of several steps to each
        other first, which shortens a chain that is not the limit, and spills a dozen registers."""
        isa = self.k.isa
        register = "w" if "neon" in isa.features else "v" if isa.masked else "x"
        return self.k.op(self.form.type, f'call {self.form.type} asm "", "={register},0"({count.typed})')

    def store(self, y: Pointer, first: Value, end: Value, column: Value, *, N: int, columns: int, mode: str) -> None:
        """columns - 2 sums to y (rows, N), as far as there are rows and columns. Only a panel that reaches beyond the last column
        is stored under masks: those of AVX2 take ten times as long."""
        k, form = self.k, self.form
        whole = column + form.columns <= N
        for r in range(form.rows):
            with k.when(first + r < end):
                to = y.at((first + r) * N + column)

                def row(masked: bool, r: int = r, to: Pointer = to) -> None:
                    for c in range(0, form.columns, k.lanes):
                        mask = k.mask_first(N - column - c) if masked else None
                        to.store(added(k, to, c, mask, self._value(r, c, columns), mode), c, mask)

                with k.when(whole):
                    row(False)
                if N % form.columns:
                    with k.otherwise(whole):
                        row(True)

    def _value(self, r: int, c: int, columns: int) -> Value:
        """The next vector of a row of the result."""
        k = self.k
        part = f"<{k.lanes} x {self.item[0]}>"
        ones = k.op(
            part, f"load {part}, ptr {self.sums.bytes((r * self.form.columns + c) * self.item[1]).ref}, align 4"
        )
        if part != k.ivec:
            ones = k.op(k.ivec, f"zext {ones.typed} to {k.ivec}")
        return k.to(columns - (ones << 1), k.vec)


def count_signs(k: KernelBuilder, y, a, panels, *, N, W, columns, dims, inner, mode) -> None:
    form = form_of(k)
    if form.name == "nibbles":
        for nibble in range(16):
            table = ", ".join(f"i8 {(nibble ^ i).bit_count()}" for i in range(16))
            k.line(f"store <16 x i8> <{table}>, ptr {k.thread_scratch().bytes(16 * nibble).ref}, align 16")
    rows = k.num_elements(dims) * inner
    blocks = (rows + (ROWS - 1)) // ROWS
    with k.parallel_for(blocks * ceil_div(N, form.columns)) as unit:
        panel, block = unit // blocks, unit % blocks
        end = k.min(block * ROWS + ROWS, rows)
        packed = panels.bytes(panel * (W * form.word_bytes))
        with k.loop(block * ROWS, end, form.rows) as first:
            tile = Tile(k, a, first, end - 1, W=W, short=form.name != "words" and columns < SHORT)
            tile.clear()
            turn = W if form.name == "words" else FLUSH
            with k.loop(0, W, turn) as begin:
                tile.count(packed, begin, k.min(begin + turn, W))
            tile.store(y, first, end, panel * form.columns, N=N, columns=columns, mode=mode)


@lowering("binary_matmul", starts="y", also={"a": "i32", "b": "i32"})
def lower_binary_matmul(op: Op, c: Lowering) -> None:
    form = Form.of(c.isa)
    y: Tensor = op.y
    N, W = int(op.b.shape[0]), int(op.b.shape[1])
    panels = c.workspace("panels", ceil_div(N, form.columns) * W * form.word_bytes)
    c.thread_scratch(TABLES + form.rows * form.columns * 4)
    c.call(pack_panels, {"panels": panels, "b": op.b}, {"N": N, "W": W}, writes="panels")
    constants = {"N": N, "W": W, "columns": op.columns, "mode": op.modes["y"], **shape_of(y)}
    c.call(count_signs, {"y": y, "a": op.a, "panels": panels}, constants, writes="y")
