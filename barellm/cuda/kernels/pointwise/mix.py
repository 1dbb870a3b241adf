"""Linear combinations y = sum k_j x_j of up to four tensors, and their gradients. Shapes: terms x0..x3, y, dy, dx0..dx3 of equal
shapes; coefficients k0..k3 and their gradients (1), often elements of a vector.

Tuples of constants, one entry for each term: NUMBERS: a coefficient that is a constant of the code, None where it is the tensor k_j
(learned); MODES, DK_MODES: how dx_j and dk_j are written; PARTIALS: which row (PLACE) of partials (learned, STRIDE), STRIDE the
most programs, has the sums of dk_j, None where it is not learned.

A gradient of a coefficient is a dot product over all elements: each program sums SPAN of them into `partials`, and the last program
of the launch adds up each row in order (single_pass_reduction.py)."""

from typing import Any

from barellm.cuda.kernel import COUNTER, Lowering, lowering, mode
from barellm.cuda.kernels.common import BLOCK, flat_indices, kernel, store_or_add, unit_of
from barellm.cuda.kernels.single_pass_reduction import is_last_program, store_total
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.mix import COEFFICIENTS, MOST, TERMS
from barellm.runtime.lowering import part

SPAN = 4 * BLOCK  # elements of one program that sums
DX, DK = (" ".join(f"d{name}" for name in names) for names in (TERMS, COEFFICIENTS))


@device
def term(x, k, i, mask, NUMBER):
    """k x, or NUMBER x, at the elements i, fp32."""
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if NUMBER is None:
        value *= tl.load(k)
    elif NUMBER != 1.0:
        value *= NUMBER
    return value


def numbers_of(op: Any) -> tuple[float | None, ...]:
    """NUMBERS of an op, None also for missing terms."""
    return tuple(op.numbers[i] if i < len(op.numbers) else None for i in range(MOST))


@kernel("mix", starts="y", views=" ".join(COEFFICIENTS), constants=lambda op: {"NUMBERS": numbers_of(op)})
def mix(y, x0, x1, x2, x3, k0, k1, k2, k3, scalars, units, NUMBERS, UNIT, BLOCK, MODE):
    """y = the sum of the terms x_j that are not None, each times its coefficient, BLOCK elements for each program."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    total = term(x0, k0, i, mask, NUMBERS[0])
    if x1 is not None:
        total += term(x1, k1, i, mask, NUMBERS[1])
    if x2 is not None:
        total += term(x2, k2, i, mask, NUMBERS[2])
    if x3 is not None:
        total += term(x3, k3, i, mask, NUMBERS[3])
    store_or_add(y + i, mask, total, scalars, MODE)


@device
def term_backward(dx, total, by, x, k, i, mask, scalars, NUMBER, MODE):
    """Write dx = k dy at the elements i (`by`: dy there); gives `total` plus dy x, for dk, where the coefficient is learned."""
    if dx is not None:
        if NUMBER is None:
            store_or_add(dx + i, mask, by * tl.load(k), scalars, MODE)
            total += by * tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        else:
            store_or_add(dx + i, mask, by * NUMBER, scalars, MODE)
    return total


@device
def store_partial(partials, total, PLACE, STRIDE):
    """Store this program's sum for dk into row PLACE of partials, if there is one."""
    if PLACE is not None:
        tl.store(partials + PLACE * STRIDE + tl.program_id(0), tl.sum(total, 0))


@device
def reduce_row(dk, partials, scalars, PLACE, STRIDE, BLOCK, MODE):
    """dk (1) = the sum of row PLACE of partials over all programs, if it is learned."""
    if PLACE is not None:
        store_total(dk, partials + PLACE * STRIDE, tl.num_programs(0), scalars, BLOCK, MODE)


@device
def reduce_rows(counter, dk0, dk1, dk2, dk3, partials, scalars, MODES, PARTIALS, STRIDE, BLOCK):
    """In the last program of the launch: store or add each coefficient's gradient, the sum of its row of partials."""
    if is_last_program(counter):
        reduce_row(dk0, partials, scalars, PARTIALS[0], STRIDE, BLOCK, MODES[0])
        reduce_row(dk1, partials, scalars, PARTIALS[1], STRIDE, BLOCK, MODES[1])
        reduce_row(dk2, partials, scalars, PARTIALS[2], STRIDE, BLOCK, MODES[2])
        reduce_row(dk3, partials, scalars, PARTIALS[3], STRIDE, BLOCK, MODES[3])


@device
def mix_backward(
    partials, counter, dk0, dk1, dk2, dk3, dx0, dx1, dx2, dx3, dy, x0, x1, x2, x3, k0, k1, k2, k3, scalars, units,
    NUMBERS, MODES, DK_MODES, PARTIALS, STRIDE, UNIT, SPAN, BLOCK,
):  # fmt: skip
    """dx_j = k_j dy of up to four terms, and dk_j = sum(dy x_j) of learned coefficients, in one pass over dy (n), SPAN elements for
    each program, whose sums t_j of dy x_j go to partials (learned, STRIDE) fp32; the last program adds them up. x_j: the forward
    pass's; None: there is no such term. NUMBERS, MODES, DK_MODES, PARTIALS: of the module, an entry for each term."""
    n = units.to(tl.int64) * UNIT
    t0, t1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    t2, t3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, SPAN, BLOCK):
        i = tl.program_id(0).to(tl.int64) * SPAN + first + tl.arange(0, BLOCK)
        mask = i < n
        by = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)  # fp32
        t0 = term_backward(dx0, t0, by, x0, k0, i, mask, scalars, NUMBERS[0], MODES[0])
        t1 = term_backward(dx1, t1, by, x1, k1, i, mask, scalars, NUMBERS[1], MODES[1])
        t2 = term_backward(dx2, t2, by, x2, k2, i, mask, scalars, NUMBERS[2], MODES[2])
        t3 = term_backward(dx3, t3, by, x3, k3, i, mask, scalars, NUMBERS[3], MODES[3])
    store_partial(partials, t0, PARTIALS[0], STRIDE)
    store_partial(partials, t1, PARTIALS[1], STRIDE)
    store_partial(partials, t2, PARTIALS[2], STRIDE)
    store_partial(partials, t3, PARTIALS[3], STRIDE)
    if counter is not None:
        reduce_rows(counter, dk0, dk1, dk2, dk3, partials, scalars, DK_MODES, PARTIALS, STRIDE, BLOCK)


@lowering("mix_backward", starts=f"{DX} {DK}", views=f"{DK} {' '.join(COEFFICIENTS)}")
def lower_mix_backward(op: Any, c: Lowering) -> None:
    """Plan one launch of mix_backward, for all dx_j and dk_j; with partials and a counter only if coefficients are learned."""
    learned = [i for i, number in enumerate(op.numbers) if number is None]
    n, most = c.elements(op.dy), ceil_div(op.dy.size, SPAN)
    named = op.inputs | op.outputs
    operands = {name: named.get(name) for name in (*TERMS, *COEFFICIENTS, *(f"d{x}" for x in TERMS))}
    operands |= {"partials": c.scratch("partials", (len(learned), most)) if learned else None}
    operands |= {"counter": COUNTER if learned else None}
    for i in range(MOST):
        operands[f"dk{i}"] = (part(op.outputs[f"dk{i}"]), "fp32") if i in learned else None
    constants = {
        "NUMBERS": numbers_of(op), "STRIDE": most, "UNIT": unit_of(op.dy), "SPAN": SPAN, "BLOCK": BLOCK,
        "MODES": tuple(mode(op, f"dx{i}") if f"dx{i}" in op.outputs else None for i in range(MOST)),
        "DK_MODES": tuple(mode(op, f"dk{i}") if i in learned else None for i in range(MOST)),
        "PARTIALS": tuple(learned.index(i) if i in learned else None for i in range(MOST)),
    }  # fmt: skip
    unit = unit_of(op.dy)
    c.launch(
        mix_backward, {"dy": op.dy, "units": lambda s: n(s) // unit, **operands}, constants,
        grid=lambda s: (ceil_div(n(s), SPAN),), writes=f"partials {DX} {DK}",
    )  # fmt: skip
