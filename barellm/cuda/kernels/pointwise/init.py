"""Initial values of parameters (rows, C), many in one launch by a table (optim/multi_tensor.py) with the fields below; a vector is
one row. Elements from `valid` on (padding) are zero. `param`, `lo`: planes of a weight (storage.py). BF16: rounded to bf16."""

from math import pi, prod
from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, SEED, pow2, unit_of
from barellm.cuda.kernels.optim.multi_tensor import find_entry, integer, launch_multi_tensor, number
from barellm.cuda.kernels.pointwise.random import calls, threefry, to_columns
from barellm.cuda.kernels.storage import WHOLE, lo_pointer, store_weight, to_bf16, weight_columns, weight_constants, weight_pointer
from barellm.cuda.lang import DeviceFunction, constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.grouping import members
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor

FULL_CIRCLE = constant(2 * pi / 2**24)  # of an angle in 24 bits
RANDOM_FIELDS = ("first", "param", "lo", "valid", "rows", "size", "stream")
CONSTANT_FIELDS = ("first", "param", "lo", "valid", "units", "value")
PARAM, LO, VALID, ROWS, SIZE, STREAM = (constant(RANDOM_FIELDS.index(name)) for name in RANDOM_FIELDS[1:])
UNITS, VALUE = (constant(CONSTANT_FIELDS.index(name)) for name in CONSTANT_FIELDS[4:])


@device
def normals(first, second):
    """Two standard normals (radius cos, radius sin) of each two random words, uint32 of any shape, by Box-Muller on 24 bits of
    each: radius = sqrt(-2 ln u), u in (0, 1]. The logarithm is fp64: near 1, where the radius is small, a fast one has no correct
    digit. The angle is reduced to an eighth of a circle in integers, where Taylor's series needs five terms; no branches."""
    uniform = ((first >> 8) + 1).to(tl.float64) * (1.0 / 16777216.0)
    radius = tl.sqrt((-2.0 * tl.log(uniform)).to(tl.float32))
    angle = (second >> 8).to(tl.int32)
    quarter = (angle + (1 << 21)) >> 22  # the nearest quarter of 2^24; a, the rest: at most an eighth of the circle
    a = (angle - (quarter << 22)).to(tl.float32) * FULL_CIRCLE
    s = a * a  # of the Taylor series
    sine = a * (1.0 - s * (1.0 / 6 - s * (1.0 / 120 - s * (1.0 / 5040 - s * (1.0 / 362880)))))
    cosine = 1.0 - s * (1.0 / 2 - s * (1.0 / 24 - s * (1.0 / 720 - s * (1.0 / 40320 - s * (1.0 / 3628800)))))
    swapped = (quarter & 1) != 0  # a quarter further cos is -sin and sin is cos: odd quarters swap, and two of four change the sign
    x, y = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    x = tl.where(((quarter + 1) & 2) != 0, -x, x)
    y = tl.where((quarter & 2) != 0, -y, y)
    return radius * x, radius * y


@device
def uniforms(first, second):
    """Two uniform numbers in (-1, 1) from two words (24 bits of each)."""
    x = ((first >> 8).to(tl.float32) + 0.5) * (1.0 / 8388608.0) - 1.0
    y = ((second >> 8).to(tl.float32) + 0.5) * (1.0 / 8388608.0) - 1.0
    return x, y


@device
def random_init(table, scalars, ENTRIES, WIDE, UNIT, FORMAT, C, BR, BC, NORMAL, BF16):
    """param (rows, C) = size times standard normal numbers (NORMAL) or uniform ones in (-1, 1), by Threefry with the run's seed,
    the parameter's stream and the counter (column, row): a block (BR, BC) of one table entry (RANDOM_FIELDS) for each program.
    Writes param and lo, as FORMAT says (storage.py). Grid: blocks of rows of all parameters, blocks of columns. BC: 32 at least."""
    entry, block = find_entry(table, ENTRIES, WIDE)
    row = block * BR + tl.arange(0, BR)  # of the parameter
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (row < integer(table, entry, ROWS, ENTRIES))[:, None] & (column < C)[None, :]
    seed = tl.load(scalars + SEED).to(tl.uint32)
    zero = tl.zeros((BR,), tl.uint32)
    k0, k1 = threefry(seed + zero, zero, zero, integer(table, entry, STREAM, ENTRIES).to(tl.uint32) + zero)
    first, second = calls(k0, k1, row, tl.program_id(1) * (BC // 2), BR, BC // 2)
    if NORMAL:
        x, y = normals(first, second)
    else:
        x, y = uniforms(first, second)
    i = row[:, None] * C + column[None, :]
    live = i < integer(table, entry, VALID, ENTRIES)  # elements behind it are padding
    size = number(table, entry, SIZE, ENTRIES).to(tl.float32)
    param, lo = weight_pointer(table, entry, PARAM, ENTRIES, WHOLE, FORMAT), None
    if FORMAT is not None:
        lo = lo_pointer(table, entry, LO, ENTRIES, UNIT, FORMAT)
    value = tl.where(live, to_columns(x, y, BR, BC) * size, 0.0)
    if BF16:
        value = to_bf16(value)
    store_weight(param, lo, i, mask, value)


@lowering("normal_init", "uniform_init", floats="fp32", also={"param": PLANES})
def lower_random_init(op: Any, c: Lowering) -> None:
    """Plan one launch: the normal (std) or uniform (bound) initial values of a group of parameters with rows of one length."""
    inits, params = members(op), parameters(op)
    normal = inits[0].name == "normal_init"
    C = int(params[0].shape[-1])
    rows = [t.size // C for t in params]
    BC = max(32, min(256, pow2(C)))
    BR = BLOCK // BC
    more = {
        "rows": ("i64", rows),
        "size": ("fp64", [float(i.attrs["std" if normal else "bound"]) for i in inits]),
        "stream": ("i64", [int(i.attrs["stream"]) for i in inits]),
    }
    fixed = {"C": C, "BR": BR, "BC": BC, "NORMAL": normal, "BF16": inits[0].bf16}
    launch_init(c, random_init, RANDOM_FIELDS, [ceil_div(n, BR) for n in rows], more, ceil_div(C, BC), **fixed)


@device
def constant_init(table, ENTRIES, WIDE, UNIT, FORMAT, BLOCK):
    """Store `value` in all valid elements, BLOCK of them for each program."""
    entry, block = find_entry(table, ENTRIES, WIDE)
    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < integer(table, entry, UNITS, ENTRIES) * UNIT
    live = i < integer(table, entry, VALID, ENTRIES)  # elements behind it are padding
    param, lo = weight_pointer(table, entry, PARAM, ENTRIES, WHOLE, FORMAT), None
    if FORMAT is not None:
        lo = lo_pointer(table, entry, LO, ENTRIES, UNIT, FORMAT)
    store_weight(param, lo, i, mask, tl.where(live, number(table, entry, VALUE, ENTRIES).to(tl.float32), 0.0))


@lowering("constant_init", floats="fp32", also={"param": PLANES})
def lower_constant_init(op: Any, c: Lowering) -> None:
    sizes = [t.size for t in parameters(op)]
    unit = unit_of(parameters(op)[0])
    more = {"units": ("i64", [n // unit for n in sizes]), "value": ("fp64", [float(i.attrs["value"]) for i in members(op)])}
    launch_init(c, constant_init, CONSTANT_FIELDS, [ceil_div(n, BLOCK) for n in sizes], more, BLOCK=BLOCK)


def launch_init(
    c: Lowering, function: DeviceFunction, fields: tuple[str, ...], programs: list[int], more: dict[str, Any],
    blocks: int = 1, **constants: Any,
) -> None:  # fmt: skip
    """Plan one launch of `function` for the parameters of an op or a group. `fields`: of the table; `programs`: how many each
    parameter has, axis 0 of the grid; `blocks`: of columns, axis 1; `more`: the fields besides first, param, lo and valid."""
    params = parameters(c.op)
    valid = [
        min(int(i.attrs["valid_rows"]), int(t.shape[0])) * prod(t.shape[1:]) for i, t in zip(members(c.op), params, strict=True)
    ]
    columns = {**weight_columns(params), "valid": ("i64", valid), **more}
    fixed = {"UNIT": unit_of(params[0]), **weight_constants(params[0]), **constants}
    launch_multi_tensor(c, function, fields, programs, columns, fixed, writes="param lo", blocks=blocks)


def parameters(op: Op) -> list[Tensor]:
    return [init.outputs["param"] for init in members(op)]
