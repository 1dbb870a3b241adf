"""QK norm (RMSNorm of each head of queries and keys) and half-truncated RoPE, forward and backward. Shapes: x, y, dy, dx (batch,
seq, W), rows of x and dx each with their own stride; rstd (batch, seq, heads + kv_heads); cos, sin (positions, D / 4) fp32. The
first `half` = D / 2 columns of a head rotate, in planes of two adjacent ones. `shift`: modded-nanogpt's shifted keys, the upper
half of whose columns comes from the position before. `paired`: two adjacent heads share a row, each with its angles."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import add
from typing import Any

from barellm.cpu.kernel import Op, Value, batch_and_seq, kernel
from barellm.cpu.kernels.loops import LINE, STREAM_BYTES, accumulate, new_accumulators, row_grain, store_all, tree_reduce

CHAINS = 4  # independent accumulation chains of a sum
PREFETCH_VIEW_ROWS = 32  # of a strided view: the hardware prefetcher does not follow rows with gaps
PREFETCH_ROWS = 4  # of dy, where a head reads halves of two: without, that took 1.5 times as long


def constants_of(op: Op) -> dict[str, Any]:
    """Compile-time constants. `strides`: of the rows of x and of the result; `lines`: whether its rows fill cache lines."""
    out = next(iter(op.outputs.values()))
    lines = all(n % 64 == 0 for n in (out.first_column, out.row_stride))
    axes = {**batch_and_seq(op.x), "half": 2 * int(op.cos.shape[1])}
    attrs = {name: op.attrs[name] for name in ("heads", "kv_heads", "paired", "shift")}
    return {**axes, **attrs, "strides": (op.x.row_stride, out.row_stride), "lines": lines}


class Angles:
    """RoPE of a head by the angles in one row of the tables: adjacent columns 2 i and 2 i + 1 rotate in plane i; with `back` by the
    negative angle. `cached`: the factors of all columns stay in registers."""

    def __init__(self, k, cos, sin, *, half: int, back: bool, cached: bool) -> None:
        self.k, self.cos, self.sin, self.half, self.back = k, cos, sin, half, back
        self.cached = {c: self._factors(c) for c in range(0, half, k.lanes)} if cached else {}

    def rotate(self, v, c: int) -> Value:
        """Rotate v, which holds the columns of a head from c on; columns from `half` on do not rotate."""
        if c >= self.half:
            return v
        same, other = self.cached.get(c) or self._factors(c)
        neighbours = self.k.shuffle(v, None, [i ^ 1 for i in range(self.k.lanes)])
        return self.k.fma(v, same, neighbours * other)

    def _factors(self, c: int) -> tuple[Value, Value]:
        """(factor of each column, factor of its neighbour in the plane): cosine and sine. The sine is negative for odd columns, or
        with `back` for even ones. Columns that do not rotate have 1 and 0."""
        k, left = self.k, self.half - c
        same, other = self._load_per_column(self.cos, c), self._load_per_column(self.sin, c)
        if left < k.lanes:
            same = k.select(k.mask_first(left), same, 1.0)
        signs = ", ".join(f"i32 {0 if i % 2 == self.back else -(1 << 31)}" for i in range(k.lanes))
        flipped = k.bitcast(other, k.ivec) ^ Value(k, k.ivec, f"<{signs}>")
        return same, k.bitcast(flipped, k.vec)

    def _load_per_column(self, table, c: int) -> Value:
        """Load the table's values for columns from c on: each plane's value in both of its columns, zero beyond the last plane."""
        k, planes, left = self.k, self.k.lanes // 2, (self.half - c) // 2
        if left >= planes:
            numbers = k.op(f"<{planes} x float>", f"load <{planes} x float>, ptr {table.at(c // 2).ref}, align 4")
        else:
            numbers = table.load(c // 2, k.mask_first(left))
        return k.shuffle(numbers, None, [i // 2 for i in range(k.lanes)])


@dataclass(frozen=True)
class HeadOfRow:
    """A head of a row of x. `begin`: the first row of the work item; `t`: the position in its sequence; `is_shifted`: the upper
    half of its columns comes from the position before."""

    row: Value
    begin: Value
    t: Value
    head: Value
    angles: Angles
    is_shifted: bool


class HeadLoop:
    """The parallel loop over all heads of all rows, and the loads, stores and sums of a head's vectors."""

    def __init__(self, k, cos, sin, *, batch, seq, half, heads, kv_heads, paired, shift, back) -> None:
        """cos, sin: the tables; `back`: rotate by the negative angle. Attributes: `count` heads of a row of W columns, `D` of each,
        of which `half` rotate; `step`: 2 with `paired`, else 1; T, `rows`: positions, of all sequences."""
        self.k, self.tables, self.half, self.back = k, (cos, sin), half, back
        self.heads, self.count, self.step, self.shift = heads, heads + kv_heads, 2 if paired else 1, shift
        self.T = k.size(seq)
        self.rows, self.D = k.size(batch) * self.T, 2 * half
        self.W = self.D * self.count

    def heads_of_rows(self) -> Iterator[HeadOfRow]:
        """Yield each head of each row, inside the emitted loops over (batch * seq) rows and heads; with `paired` two adjacent ones
        at a time, each with its own angles. With `shift` the heads of keys have a loop of their own."""
        k, quarter = self.k, self.half // 2  # planes of a head
        parts = [(0, self.heads, False), (self.heads, self.count, True)] if self.shift else [(0, self.count, False)]
        # Whether factors of all columns fit half the registers.
        cached = 2 * self.step * -(-self.half // k.lanes) <= k.isa.registers // 2
        with k.parallel_range(self.rows, row_grain(self.W)) as (begin, end), k.loop(begin, end) as row:
            t = row % self.T
            angles = []
            for i in range(self.step):
                cos, sin = (table.at((t * self.step + i) * quarter) for table in self.tables)
                angles.append(Angles(k, cos, sin, half=self.half, back=self.back, cached=cached))
            for low, high, is_shifted in parts:
                with k.loop(low, high, self.step) as head:
                    for i in range(self.step):
                        yield HeadOfRow(row, begin, t, head + i, angles[i], is_shifted)

    def vectors(self, low: int, high: int) -> list[tuple[int, int, Value | None]]:
        """(index, first column, mask) of each of a head's vectors that has columns in [low, high); mask None: all."""
        k, vectors = self.k, []
        for j, c in enumerate(range(0, self.D, k.lanes)):
            first, last = max(low - c, 0), min(high - c, k.lanes)  # lanes of the vector
            if first < last:
                lanes = ", ".join(f"i1 {'true' if first <= i < last else 'false'}" for i in range(k.lanes))
                vectors.append((j, c, None if last - first == k.lanes else Value(k, f"<{k.lanes} x i1>", f"<{lanes}>")))
        return vectors

    def load(self, row) -> list[Value]:
        """The vectors of a head."""
        return [row.load(c, mask) for _, c, mask in self.vectors(0, self.D)]

    def prefetch(self, head, rows: int, stride: int, *, near: bool) -> None:
        """Prefetch the same head `rows` rows further."""
        for c in range(0, self.D, LINE // head.itemsize):
            self.k.prefetch(head.at(rows * stride + c), near=near)

    def store(self, row, values, nontemporal) -> None:
        """Store the vectors of a head, in pairs (a cache line of 16-bit dtypes) if no vector is partial."""
        n = self.k.lanes
        if self.half % (2 * n) == 0:
            for j in range(0, len(values), 2):
                store_all(self.k, row, values[j : j + 2], j * n, nontemporal)
        else:
            for j, c, mask in self.vectors(0, self.D):
                row.store(values[j], c, mask)

    def replace_upper(self, values, upper) -> None:
        """values[j] = upper[j] in the columns of the upper half; `upper` has only the vectors that contain such columns."""
        for new, (j, c, mask) in zip(upper, self.vectors(self.half, self.D), strict=True):
            values[j] = new if mask is None or c >= self.half else self.k.select(mask, new, values[j])

    def nontemporal(self, out, lines: bool) -> Value | None:
        """Whether (i1) the result bypasses the caches: it is larger than STREAM_BYTES; None where its alignment forbids that."""
        aligned = lines and self.half % (2 * self.k.lanes) == 0
        return self.rows * (self.W * out.itemsize) > STREAM_BYTES if aligned else None

    def dot(self, a, b) -> Value:
        """The dot product of two heads' columns."""
        sums = new_accumulators(self.k, CHAINS)
        for j, (u, v) in enumerate(zip(a, b, strict=True)):
            chain = sums[j % CHAINS]
            chain.value = self.k.fma(u, v, chain.value)
        return self.k.sum(tree_reduce(sums, add))


@kernel("qk_rotary", constants=lambda op: {"eps": op.eps, **constants_of(op)}, views="x")
def qk_rotary(k, y, rstd, x, cos, sin, *, eps, strides, lines, **shape) -> None:
    """The kernel: y (batch, seq, W) = RoPE(x * rstd) of each head, rstd (batch, seq, heads + kv_heads) fp32 = 1 / sqrt(mean(x^2) +
    eps) over its D columns. Memory is read once: a head stays in registers. The upper half of a shifted head is that of the
    position before, normalized by that position's rstd."""
    heads = HeadLoop(k, cos, sin, back=False, **shape)
    nontemporal = heads.nontemporal(y, lines)

    def rstd_of(v) -> Value:
        return 1.0 / k.sqrt(heads.dot(v, v) * (1.0 / heads.D) + eps)

    for at in heads.heads_of_rows():
        src = x.at(at.row * strides[0] + at.head * heads.D)
        v = heads.load(src)
        if strides[0] != heads.W:
            heads.prefetch(src, PREFETCH_VIEW_ROWS, strides[0], near=False)
        head_rstd = rstd_of(v)
        rstd.put(head_rstd, at.row * heads.count + at.head)
        n = [at.angles.rotate(x * k.splat(head_rstd), j * k.lanes) for j, x in enumerate(v)]
        if at.is_shifted:
            # This thread has written the previous position's rstd already, unless that row was another work item's.
            previous_rstd, has_previous = k.var(head_rstd), at.t > 0
            previous = src.at(k.select(has_previous, k.int(-strides[0]), 0))
            with k.when(has_previous):
                with k.when(at.row.equals(at.begin)):
                    previous_rstd.value = rstd_of(heads.load(previous))
                with k.when(at.row > at.begin):
                    previous_rstd.value = rstd.get((at.row - 1) * heads.count + at.head)
            scale = k.splat(previous_rstd.value)
            upper = heads.vectors(heads.half, heads.D)
            heads.replace_upper(n, [previous.load(c, mask) * scale for _, c, mask in upper])
        heads.store(y.at(at.row * strides[1] + at.head * heads.D), n, nontemporal)


@kernel("qk_rotary_backward", constants=constants_of, views="x dx")
def qk_rotary_backward(k, dx, dy, x, rstd, cos, sin, *, strides, lines, mode_dx, **shape) -> None:
    """The kernel: dx = rstd (dn - n mean(dn n)) of each head, where n = x rstd, and dn is dy rotated back; of a shifted head the
    upper half of dn goes back to the position before. rstd: as `qk_rotary` stored it; dx is stored or added (mode_dx)."""
    heads = HeadLoop(k, cos, sin, back=True, **shape)
    nontemporal = heads.nontemporal(dx, lines) if mode_dx == "store" else None
    for at in heads.heads_of_rows():
        column = at.head * heads.D
        src, dst, dy_head = (p.at(at.row * stride + column) for p, stride in ((x, strides[0]), (dx, strides[1]), (dy, heads.W)))
        dn = heads.load(dy_head)
        if heads.shift:
            heads.prefetch(dy_head, PREFETCH_ROWS, heads.W, near=True)
        if strides[0] != heads.W:
            heads.prefetch(src, PREFETCH_VIEW_ROWS, strides[0], near=False)
        if at.is_shifted:
            unshift_upper_half(heads, dn, dy_head, at.t)
        dn = [at.angles.rotate(g, j * k.lanes) for j, g in enumerate(dn)]
        scale = k.splat(rstd.get(at.row * heads.count + at.head))
        n = [x * scale for x in heads.load(src)]
        mean = k.splat(heads.dot(dn, n) * (1.0 / heads.D))
        new = []
        for j, c, mask in heads.vectors(0, heads.D):
            value = k.fma(-n[j], mean, dn[j]) * scale
            new.append(accumulate(k, dst, c, mask, value, mode_dx))
        heads.store(dst, new, nontemporal)


def unshift_upper_half(heads: HeadLoop, dn, row, t) -> None:
    """Replace the upper half of `dn`, the vectors of a head's gradient at position t, by that of the next position, or by zero at
    the last one. Position 0 keeps its own as well. `row`: the head in dy."""
    k, upper = heads.k, heads.vectors(heads.half, heads.D)
    moved = new_accumulators(k, len(upper))
    with k.when(t + 1 < heads.T):
        for total, (_, c, mask) in zip(moved, upper, strict=True):
            total.value = row.load(heads.W + c, mask)
    with k.when(t.equals(0)):
        for total, (j, _, _) in zip(moved, upper, strict=True):
            total.value = total.value + dn[j]
    heads.replace_upper(dn, [total.value for total in moved])
