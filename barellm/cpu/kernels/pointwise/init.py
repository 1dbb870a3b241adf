"""Initial values of parameters, (rows, columns); a vector is one row. Elements from `valid` on are zero."""

import struct
from math import prod

from barellm.cpu.kernel import PLANES, Lowering, Op, lowering
from barellm.cpu.kernels import loops, storage
from barellm.cpu.lang import Value, random
from barellm.cpu.lang.vector import ln, sincos_turn
from barellm.program.ops.pointwise.random import HALF


def normals(k, first, second) -> tuple[Value, Value]:
    """Two standard normals from two words (Box-Muller on 24 bits of each)."""
    uniform = k.to((first >> 8) + 1, k.vec) * 2.0**-24
    radius = k.sqrt(ln(k, uniform) * -2.0)
    sine, cosine = sincos_turn(k, second >> 8)
    return radius * cosine, radius * sine


def uniforms(k, first, second) -> tuple[Value, Value]:
    """Two numbers between -1 and 1 from two words, uniform (24 bits of each)."""
    return tuple((k.to(word >> 8, k.vec) + 0.5) * 2.0**-23 - 1.0 for word in (first, second))  # pyright: ignore[reportReturnType]


def random_init(k, param, param_lo, rows, columns, valid, stream, size_bits, *, normal: bool, bf16) -> None:
    """The kernel: param (rows, columns) = size * standard normals, or uniform numbers in (-1, 1); zero from element `valid` on.
    What differs between parameters is given at run time, `size` as its fp32 bits (`size_bits`), so that all share the code.
    `stream`: the random stream's number; `param_lo`: a weight's second plane (storage.py), or None."""
    size = k.splat(k.bitcast(k.to(size_bits, "i32"), "float"))
    key = random.sample_key(k, k.scalar("seed"), 0, 0, stream)
    weights = storage.Weight(k, param, param_lo, bf16)
    width = 2 * HALF  # columns of a block of random words
    blocks = (columns + width - 1) // width
    with k.parallel_range(rows * blocks, loops.GRAIN // width) as (begin, end), k.loop(begin, end) as unit:
        row, block = unit // blocks, unit % blocks
        for part, offset in random.column_blocks(k.lanes):
            both = (normals if normal else uniforms)(k, *random.words(k, key, row, block, part))
            for half, z in enumerate(both):
                c = block * width + offset + half * HALF
                at = row * columns + c  # element of the parameter
                in_row, is_valid = k.mask_first(columns - c), k.mask_first(valid - at)
                weights.store(k.select(is_valid, z * size, 0.0), at, in_row)


@lowering("normal_init", "uniform_init", floats="fp32 bf16", also={"param": PLANES})
def lower_random_init(op: Op, c: Lowering) -> None:
    normal = op.name == "normal_init"
    t, size = op.outputs["param"], op.std if normal else op.bound
    columns = int(t.shape[-1])
    operands = {**storage.weight_operands("param", t), "rows": t.size // columns, "columns": columns, "valid": _valid(op),
                "stream": int(op.stream), "size_bits": struct.unpack("<i", struct.pack("<f", size))[0]}  # fmt: skip
    c.call(random_init, operands, {"normal": normal, "bf16": bool(op.bf16)}, writes="param param_lo")


def constant_init(k, param, param_lo, n, valid, *, value) -> None:
    weights = storage.Weight(k, param, param_lo)
    with k.parallel_range(n, loops.GRAIN) as (begin, end):
        for i, mask, _ in loops.vectors(k, begin, end):
            weights.store(k.select(k.mask_first(valid - i), k.to(value, k.vec), 0.0), i, mask)


@lowering("constant_init", floats="fp32 bf16", also={"param": PLANES})
def lower_constant_init(op: Op, c: Lowering) -> None:
    t = op.outputs["param"]
    operands = {**storage.weight_operands("param", t), "n": t.size, "valid": _valid(op)}
    c.call(constant_init, operands, {"value": float(op.value)}, writes="param param_lo")


def _valid(op: Op) -> int:
    """Elements before row `valid_rows`."""
    return min(op.valid_rows, int(op.param.shape[0])) * prod(int(n) for n in op.param.shape[1:])
