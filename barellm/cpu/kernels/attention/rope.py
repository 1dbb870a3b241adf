"""Rotary position embedding (RoPE, Su et al. 2021). Shapes: x, y (batch, seq, W), rows of any stride; cos, sin (maxT, D / 2) fp32.
Column i of a head and column i + half rotate together, half = D / 2."""

from typing import Any

from barellm.cpu.kernel import Op, Value, batch_and_seq, kernel
from barellm.cpu.kernels.loops import STREAM_BYTES, accumulate, row_grain, store_all, write_row


def constants_of(op: Op) -> dict[str, Any]:
    """Compile-time constants. `strides`: of the rows of x and y, in elements; `lines`: whether the rows of y fill cache lines; `W`:
    columns of a row; `half`: rotated pairs of a head."""
    lines = all(n % 64 == 0 for n in (op.y.first_column, op.y.row_stride))
    sizes = {"W": int(op.x.shape[2]), "half": int(op.cos.shape[1]), "heads": op.heads}
    return {**sizes, **batch_and_seq(op.x), "inverse": op.inverse, "strides": (op.x.row_stride, op.y.row_stride), "lines": lines}


@kernel("rope", constants=constants_of, views="x y", also={"positions": "i32"})
def rope(k, y, x, cos, sin, positions, *, batch, seq, W, half, heads, inverse, strides, lines, mode_y) -> None:
    """The kernel: y (batch, seq, W) = x with the first `heads` heads of each row rotated by the angles of its position (`inverse`:
    by the negative angles), and the other columns copied. `positions` (batch, seq) i32; None: positions begin at the scalar pos.
    cos, sin (maxT, half) fp32: a row's values stay in registers for all heads where there are enough. `mode_y`: store or add."""
    T, pos = k.size(seq), None if positions is not None else k.scalar("pos")
    rows, rotated = k.size(batch) * T, heads * 2 * half
    columns = k.columns(half)
    pairs = half % (2 * k.lanes) == 0
    nontemporal = rows * (W * y.itemsize) > STREAM_BYTES if mode_y == "store" and lines and pairs else None
    in_registers = 2 * len(columns) <= k.isa.registers // 2
    with k.parallel_range(rows, row_grain(W)) as (begin, end), k.loop(begin, end) as row:
        src, dst = x.at(row * strides[0]), y.at(row * strides[1])
        at = (positions.get(row) if pos is None else pos + row % T) * half

        def angle(c: int, mask) -> tuple[Value, Value]:
            """cos and sin of column c's angle at the row's position."""
            sine = sin.at(at).load(c, mask)
            return cos.at(at).load(c, mask), -sine if inverse else sine

        cached = {c: angle(c, mask) for c, mask in columns} if in_registers else {}

        def rotate(first, c: int, mask) -> tuple[Value, Value]:
            """The rotated columns c and half + c (two vectors) of the head that begins at `first`, added to y in mode "add"."""
            co, si = cached[c] if in_registers else angle(c, mask)
            low, high = first + c, first + (half + c)
            a, b = src.load(low, mask), src.load(high, mask)
            new = k.fma(a, co, -(b * si)), k.fma(b, co, a * si)
            return accumulate(k, dst, low, mask, new[0], mode_y), accumulate(k, dst, high, mask, new[1], mode_y)

        with k.loop(0, rotated, 2 * half) as first:  # each head; `pairs`: two vectors at a time, stored together
            if pairs:
                for c in range(0, half, 2 * k.lanes):
                    two = [rotate(first, c + j * k.lanes, None) for j in range(2)]
                    for start, values in zip((0, half), zip(*two, strict=True), strict=True):
                        store_all(k, dst, list(values), first + (start + c), nontemporal)
            else:
                for c, mask in columns:
                    for start, value in zip((0, half), rotate(first, c, mask), strict=True):
                        dst.store(value, first + (start + c), mask)

        for c, mask, put in write_row(k, dst.at(rotated), W - rotated, nontemporal=nontemporal, mode=mode_y):
            put(src.load(c + rotated, mask))
