"""Sums of tensors times numbers, and their gradients. Shapes: terms x0..x3, y, dy, dx0..dx3 of equal shapes; coefficients k0..k3
and their gradients (1), often elements of a vector. A coefficient is a constant of the code (N0..N3), or None where it is the
tensor.

Sums over all elements go by spans of SPAN, one for each program, whose partial sums the last program adds in order.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import COUNTER, Lowering, lowering, mode
from barellm.cuda.kernels.common import BLOCK, flat_indices, launch_elementwise, store_or_add, unit_of
from barellm.cuda.kernels.single_pass_reduction import is_last_program, store_total
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.mix import COEFFICIENTS, MOST, TERMS
from barellm.runtime.lowering import part

SPAN = 4 * BLOCK  # elements of one program that sums
DX, DK = (" ".join(f"d{name}" for name in names) for names in (TERMS, COEFFICIENTS))


@device
def term(x, k, i, mask, NUMBER: tl.constexpr):
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if NUMBER is None:
        value *= tl.load(k)
    elif NUMBER != 1.0:
        value *= NUMBER
    return value


@device
def mix(
    y, x0, x1, x2, x3, k0, k1, k2, k3, scalars, units,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    i, mask = flat_indices(units, UNIT, BLOCK)
    total = term(x0, k0, i, mask, N0)
    if x1 is not None:
        total += term(x1, k1, i, mask, N1)
    if x2 is not None:
        total += term(x2, k2, i, mask, N2)
    if x3 is not None:
        total += term(x3, k3, i, mask, N3)
    store_or_add(y + i, mask, total, scalars, MODE)


def numbers_of(op: Any) -> dict[str, float | None]:
    """Constants N0..N3; what has no term has none."""
    return {f"N{i}": op.numbers[i] if i < len(op.numbers) else None for i in range(MOST)}


@lowering("mix", starts="y", views=" ".join(COEFFICIENTS))
def lower_mix(op: Any, c: Lowering) -> None:
    operands = {name: op.inputs.get(name) for name in (*TERMS, *COEFFICIENTS)}
    launch_elementwise(c, mix, op.y, {"y": op.y, **operands}, writes="y", MODE=mode(op, "y"), **numbers_of(op))


@device
def term_backward(dx, total, by, x, k, i, mask, scalars, NUMBER: tl.constexpr, MODE: tl.constexpr):
    """Writes dx, and gives `total` plus dy x where the coefficient is learned."""
    if dx is not None:
        if NUMBER is None:
            store_or_add(dx + i, mask, by * tl.load(k), scalars, MODE)
            total += by * tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        else:
            store_or_add(dx + i, mask, by * NUMBER, scalars, MODE)
    return total


@device
def put_sum(partials, total, PLACE: tl.constexpr, STRIDE: tl.constexpr):
    if PLACE is not None:
        tl.store(partials + PLACE * STRIDE + tl.program_id(0), tl.sum(total, 0))


@device
def put_row(dk, partials, scalars, PLACE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    if PLACE is not None:
        store_total(dk, partials + PLACE * STRIDE, tl.num_programs(0), scalars, BLOCK, MODE)


@device
def put_rows(
    counter, dk0, dk1, dk2, dk3, partials, scalars,
    MODE0: tl.constexpr, MODE1: tl.constexpr, MODE2: tl.constexpr, MODE3: tl.constexpr,
    PLACE0: tl.constexpr, PLACE1: tl.constexpr, PLACE2: tl.constexpr, PLACE3: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if is_last_program(counter):
        put_row(dk0, partials, scalars, PLACE0, STRIDE, BLOCK, MODE0)
        put_row(dk1, partials, scalars, PLACE1, STRIDE, BLOCK, MODE1)
        put_row(dk2, partials, scalars, PLACE2, STRIDE, BLOCK, MODE2)
        put_row(dk3, partials, scalars, PLACE3, STRIDE, BLOCK, MODE3)


@device
def mix_backward(
    partials, counter, dk0, dk1, dk2, dk3, dx0, dx1, dx2, dx3, dy, x0, x1, x2, x3, k0, k1, k2, k3, scalars, units,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    MODE0: tl.constexpr, MODE1: tl.constexpr, MODE2: tl.constexpr, MODE3: tl.constexpr,
    DK_MODE0: tl.constexpr, DK_MODE1: tl.constexpr, DK_MODE2: tl.constexpr, DK_MODE3: tl.constexpr,
    PLACE0: tl.constexpr, PLACE1: tl.constexpr, PLACE2: tl.constexpr, PLACE3: tl.constexpr,
    STRIDE: tl.constexpr, UNIT: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All in one pass. PLACE: which row of partials (learned, programs) a coefficient's sums have. The last program adds up each
    row."""
    n = units.to(tl.int64) * UNIT
    t0, t1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    t2, t3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, SPAN, BLOCK):
        i = tl.program_id(0).to(tl.int64) * SPAN + first + tl.arange(0, BLOCK)
        mask = i < n
        by = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
        t0 = term_backward(dx0, t0, by, x0, k0, i, mask, scalars, N0, MODE0)
        t1 = term_backward(dx1, t1, by, x1, k1, i, mask, scalars, N1, MODE1)
        t2 = term_backward(dx2, t2, by, x2, k2, i, mask, scalars, N2, MODE2)
        t3 = term_backward(dx3, t3, by, x3, k3, i, mask, scalars, N3, MODE3)
    put_sum(partials, t0, PLACE0, STRIDE)
    put_sum(partials, t1, PLACE1, STRIDE)
    put_sum(partials, t2, PLACE2, STRIDE)
    put_sum(partials, t3, PLACE3, STRIDE)
    if counter is not None:
        put_rows(
            counter, dk0, dk1, dk2, dk3, partials, scalars,
            DK_MODE0, DK_MODE1, DK_MODE2, DK_MODE3, PLACE0, PLACE1, PLACE2, PLACE3, STRIDE, BLOCK,
        )  # fmt: skip


@lowering("mix_backward", starts=f"{DX} {DK}", views=f"{DK} {' '.join(COEFFICIENTS)}")
def lower_mix_backward(op: Any, c: Lowering) -> None:
    learned = [i for i, number in enumerate(op.numbers) if number is None]
    n, most = c.elements(op.dy), ceil_div(op.dy.size, SPAN)
    named = op.inputs | op.outputs
    operands = {name: named.get(name) for name in (*TERMS, *COEFFICIENTS, *(f"d{x}" for x in TERMS))}
    operands |= {"partials": c.scratch("partials", (len(learned), most)) if learned else None}
    operands |= {"counter": COUNTER if learned else None}
    constants: dict[str, Any] = numbers_of(op) | {"STRIDE": most, "UNIT": unit_of(op.dy), "SPAN": SPAN, "BLOCK": BLOCK}
    for i in range(MOST):
        operands[f"dk{i}"] = (part(op.outputs[f"dk{i}"]), "fp32") if i in learned else None
        constants[f"MODE{i}"] = mode(op, f"dx{i}") if f"dx{i}" in op.outputs else None
        constants[f"DK_MODE{i}"] = mode(op, f"dk{i}") if i in learned else None
        constants[f"PLACE{i}"] = learned.index(i) if i in learned else None
    unit = unit_of(op.dy)
    c.launch(
        mix_backward,
        {"dy": op.dy, "units": lambda s: n(s) // unit, **operands},
        constants,
        grid=lambda s: (ceil_div(n(s), SPAN),),
        writes=f"partials {DX} {DK}",
    )
