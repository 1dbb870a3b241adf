"""Simulated number formats: each operand of a matmul is rounded to a format, and the matmul itself is the program's own.

`round_forward` goes through a program's forward ops and `round_gradients`, after the reverse walk, through the backward ones. Both
put rounding ops in front of matmuls, with what finds their exponent biases. A gradient passes a rounding as if it was not there
(straight-through estimator, Bengio et al. 2013), and matmuls of the backward pass read the rounded operands of the forward pass. Of
attention, q, k, v and the gradient of its result are operands; its probabilities and their gradient never leave the kernel."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from barellm.config.number_formats import NumberFormat
from barellm.errors import UserError
from barellm.program.builder import Program
from barellm.program.dtypes import FORMATS
from barellm.program.ops.base import Op, Tensor, View
from barellm.program.ops.gemm import fp8
from barellm.program.ops.optim.scales import ENTRIES, MARGIN, DelayedScale, FloatBias, Measure, Remember, RoundFloating

SLOTS = frozenset(("x", "weight", "dy", "q", "k", "v", "dout"))  # of ops that are products: their operands


@dataclass(frozen=True)
class MatmulFormats:
    """The formats by kind of operand (`config.number_formats.OPERANDS`), the rule of their exponent biases, and the kinds that are
    rounded stochastically, others to nearest even. The rules: "static"; "floating", the least exponent with which the largest |x|
    does not saturate; "delayed", the same of the largest |x| of the ENTRIES micro-batches before, times MARGIN; "learned", that of
    `FloatBias`."""

    of: Mapping[str, NumberFormat]
    rule: str = "static"
    stochastic: tuple[str, ...] = ()

    def round_forward(self, p: Program) -> list[Op]:
        """Insert the roundings of activations and weights; returns the ops that there are then. UserError for a program whose dtype
        does not hold the formats, or whose matmuls are in 8 bits already."""
        digits, most = {"fp32": 23, "bf16": 7}.get(p.compute, -1), max(f.mantissa_bits for f in self.of.values())
        if most > digits:
            fits = "fp32" if most > 7 else "fp32 or bf16"
            raise UserError(f"train.matmul_formats with {most} bits of mantissa expects train.dtype {fits}, found {p.compute}")
        if any(isinstance(op, fp8.Product) for op in p.ops):
            raise UserError("train.matmul_formats is given and model.fp8 too, expected one of them")
        inserting = _Inserting(self, p)
        for op in inserting.walk():
            inserting.round(op, lambda t: "weights" if t.role == "parameter" else "activations")
        return list(p.ops)

    def round_gradients(self, p: Program, forward: list[Op]) -> None:
        """Insert the roundings of gradients; `forward` is what `round_forward` returned."""
        before, inserting = set(forward), _Inserting(self, p)
        known = {t.base for op in p.ops if op in before or op.recomputed for t in op.outputs.values()}
        for op in inserting.walk():
            if op not in before and not op.recomputed:
                inserting.round(op, lambda t: None if t.role == "parameter" or t in known else "gradients")


class _Inserting:
    """One walk over a program's ops, which are appended anew one by one, and in between what rounds their operands."""

    def __init__(self, formats: MatmulFormats, p: Program) -> None:
        self.formats, self.p = formats, p
        self.rounded: dict[tuple[Tensor, str | None], Tensor] = {}  # (tensor, segment) -> its newest value, rounded
        self.source = {op.y: op.x for op in p.ops if isinstance(op, RoundFloating)}
        self.names: Counter[str] = Counter()

    def walk(self) -> Iterator[Op]:
        """Each op before it is appended."""
        ops, self.p.ops = self.p.ops, []
        for op in ops:
            yield op
            self.p.ops.append(op)
            written = {t.base for t in op.outputs.values()}
            self.rounded = {key: y for key, y in self.rounded.items() if key[0] not in written}

    def round(self, op: Op, kind_of: Callable[[Tensor], str | None]) -> None:
        """Make a matmul read rounded operands. `kind_of`: tensor -> kind of operand, or None for one that stays."""
        if not op.product:
            return
        for slot in sorted(SLOTS & op.inputs.keys()):
            t = op.inputs[slot]
            kind, key = kind_of(t.base), (t.base, op.segment)
            if kind is None:
                continue
            if key not in self.rounded:
                self.rounded[key] = self._append(t.base, kind, op)
            op.inputs[slot] = t.on(self.rounded[key]) if isinstance(t, View) else self.rounded[key]

    def _append(self, t: Tensor, kind: str, op: Op) -> Tensor:
        """Append the rounding of operand `t` (one of `kind`) of the matmul `op` to its format, with the state that the rule keeps
        for the scale; returns the rounded tensor, of t's shape. `names` numbers the states of one name."""
        p, form, rule = self.p, self.formats.of[kind], self.formats.rule
        if rule == "static":
            bias = p.constant(f"exponent.{form.top}", np.array([form.top], np.float32))
        else:  # outside of the segment, as a recomputed one must not change the state again
            name, sums = f"{self._layer(op)}.{kind}.exponent_bias", p.apply(Measure, x=t).sums
            self.names[name] += 1
            state = p.state(f"{name}.{self.names[name]}", ({"floating": 1, "delayed": ENTRIES, "learned": 2}[rule],))
            given: dict[str, Any] = {"sums": sums, "per_target": False}
            if rule == "learned":
                bias = p.apply(FloatBias, bias=state, x=t, deviations=False, **given).bias
            elif rule == "delayed":
                bias = p.apply(DelayedScale, history=state, first=2.0**form.top, largest=form.largest).scale
                p.apply(Remember, history=state, **given)
            else:  # a history of one, without a margin
                p.apply(Remember, history=state, **given)
                bias = p.apply(DelayedScale, history=state, first=2.0**form.top, largest=form.largest * MARGIN).scale
        how: dict[str, Any] = {"ties": "even", "dtype": FORMATS[t.dtype].operand, "format": form, "per_target": False}
        how["of_scale"] = rule in ("floating", "delayed")
        if kind in self.formats.stochastic:
            how |= {"ties": "stochastic", "stream": p.random_stream(1.0)}
        with p.segment(op.segment):
            y = p.apply(RoundFloating, x=t, bias=bias, **how).y
        self.source[y] = t
        return y

    def _layer(self, op: Op) -> str:
        """The name of a matmul's weight, by which it is known in all programs; of one without a weight that of its result."""
        inputs = [self.source.get(t.base, t.base) for t in op.inputs.values()]
        names = [t.name for t in inputs if t.role == "parameter"]
        names += [t.base.name.removesuffix(".grad") for t in op.outputs.values() if t.base.role == "gradient"]
        return names[0] if names else op.inputs.get("out", next(iter(op.outputs.values()))).base.name
