"""Initial values of parameters, (rows, columns); a vector is one row. Elements from `valid` on are zero."""

from __future__ import annotations

import struct
from math import gcd, pi, prod
from typing import Any

from barellm.cuda.kernel import Lowering, cdiv, lowering
from barellm.cuda.kernels.common import BLOCK, SEED, VECTOR, flat, pow2, tile
from barellm.cuda.kernels.random import calls, threefry, to_columns
from barellm.cuda.kernels.storage import store_weight, weight_operands
from barellm.cuda.lang import constant, device, tl

TURN = constant(2 * pi / 2**24)


@device
def normals(first, second):
    """Two standard normals from two words (Box-Muller on 24 bits of each). The logarithm is fp64: near 1, where the radius is
    small, a fast one has no correct digit. The angle is brought into an eighth of a turn in integers, where Taylor's series
    needs five terms; it costs no branch for large angles, which a library's function has."""
    uniform = ((first >> 8) + 1).to(tl.float64) * (1.0 / 16777216.0)
    radius = tl.sqrt((-2.0 * tl.log(uniform)).to(tl.float32))
    angle = (second >> 8).to(tl.int32)
    quarter = (angle + (1 << 21)) >> 22
    a = (angle - (quarter << 22)).to(tl.float32) * TURN
    s = a * a
    sine = a * (1.0 - s * (1.0 / 6 - s * (1.0 / 120 - s * (1.0 / 5040 - s * (1.0 / 362880)))))
    cosine = 1.0 - s * (1.0 / 2 - s * (1.0 / 24 - s * (1.0 / 720 - s * (1.0 / 40320 - s * (1.0 / 3628800)))))
    swapped = (quarter & 1) != 0
    x, y = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    x = tl.where(((quarter + 1) & 2) != 0, -x, x)
    y = tl.where((quarter & 2) != 0, -y, y)
    return radius * x, radius * y


@device
def normal_init(
    param, param_lo, scalars, rows, valid_units, stream, std_bits,
    C: tl.constexpr, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """std * normals; the deviation is given by its fp32 bits, so that parameters share code."""
    row, column, mask = tile(rows, C, BR, BC)
    seed = tl.load(scalars + SEED).to(tl.uint32)
    zero = tl.zeros((BR,), tl.uint32)
    k0, k1 = threefry(seed + zero, zero, zero, stream.to(tl.uint32) + zero)
    first, second = calls(k0, k1, row, tl.program_id(1) * (BC // 2), BR, BC // 2)
    x, y = normals(first, second)
    i = row[:, None] * C + column[None, :]
    live = i < valid_units.to(tl.int64) * UNIT
    value = tl.where(live, to_columns(x, y, BR, BC) * std_bits.to(tl.float32, bitcast=True), 0.0)
    store_weight(param, param_lo, i, mask, value)


@lowering("normal_init")
def lower_normal_init(op: Any, c: Lowering) -> None:
    t = op.outputs["param"]
    C, n = int(t.shape[-1]), valid(op)
    rows, unit = t.size // C, gcd(n, VECTOR) or 1
    BC = max(32, min(256, pow2(C)))
    BR = BLOCK // BC
    operands = {
        **weight_operands("param", t), "rows": rows, "valid_units": n // unit, "stream": int(op.stream),
        "std_bits": struct.unpack("<i", struct.pack("<f", op.std))[0],
    }  # fmt: skip
    constants = {"C": C, "UNIT": unit, "BR": BR, "BC": BC}
    c.launch(normal_init, operands, constants, grid=lambda s: (cdiv(rows, BR), cdiv(C, BC)), writes="param param_lo")


@device
def constant_init(
    param, param_lo, units, valid_units,
    UNIT: tl.constexpr, VALID_UNIT: tl.constexpr, BLOCK: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    i, mask = flat(units, UNIT, BLOCK)
    live = i < valid_units.to(tl.int64) * VALID_UNIT
    store_weight(param, param_lo, i, mask, tl.where(live, VALUE, 0.0))


@lowering("constant_init")
def lower_constant_init(op: Any, c: Lowering) -> None:
    t = op.outputs["param"]
    n = valid(op)
    unit, valid_unit = gcd(t.size, VECTOR), gcd(n, VECTOR) or 1
    operands = {**weight_operands("param", t), "units": t.size // unit, "valid_units": n // valid_unit}
    constants = {"UNIT": unit, "VALID_UNIT": valid_unit, "BLOCK": BLOCK, "VALUE": float(op.value)}
    c.launch(constant_init, operands, constants, grid=lambda s: (cdiv(t.size, BLOCK),), writes="param param_lo")


def valid(op: Any) -> int:
    """Elements before row `valid_rows`."""
    return min(op.valid_rows, int(op.param.shape[0])) * prod(int(n) for n in op.param.shape[1:])
