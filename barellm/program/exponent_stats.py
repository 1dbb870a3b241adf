"""Exponent statistics (dynamic range) of every tensor in a training step, collected while the step runs.

Activations and their gradients are in memory for a part of the step only. So the `exponent_stats` ops are put into a program right
behind those that write what they read. They all write columns of two tensors that stay in the arena."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from barellm.program import backward, dtypes
from barellm.program.builder import Program
from barellm.program.ops.base import Op, Tensor, View
from barellm.program.ops.optim.exponent_stats import BINS, SUMS, ExponentStats
from barellm.program.ops.pointwise.elementwise import Rescale

COUNTS, TOTALS = "exponent_stats.counts", "exponent_stats.sums"  # persistent: (1, 256 n) i32 and (1, 4 n) of n tensors
KINDS = ("activation", "gradient", "weight", "weight gradient")


@dataclass(frozen=True)
class TensorWithStats:
    """One tensor of a step: its name, one of KINDS, its planned shape, and its number among all."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    number: int


def add_exponent_stats(p: Program, gradients: Mapping[Tensor, tuple[Tensor, Op]]) -> None:
    """Insert `ExponentStats` ops into a program with backward ops: for forward tensors that have `gradients`, for these gradients,
    the weights and their gradients, in the order of the network. `gradients`: of `backward`. Each op stands behind the one that
    writes its tensor; all write into the caches COUNTS and TOTALS, of which each has BINS and len(SUMS) columns."""
    wanted = list(_wanted(p, gradients))
    count = len(wanted)
    counts, sums = p.cache(COUNTS, (1, count * BINS), "i32"), p.cache(TOTALS, (1, count * len(SUMS)), "fp32")
    observers: dict[Op | None, list[Op]] = {}
    ops = p.ops
    p.ops = []
    for number, (name, kind, t, writer) in enumerate(wanted):
        columns = {"counts": View(counts, number * BINS, BINS), "sums": View(sums, number * len(SUMS), len(SUMS))}
        op = p.apply(ExponentStats, into={k: (v, "store") for k, v in columns.items()}, x=t, label=name, kind=kind)
        op.segment = writer and writer.segment
        observers.setdefault(writer, []).append(op)
    p.ops = [*observers.get(None, []), *(x for op in ops for x in (op, *observers.get(op, [])))]


def tensors_with_stats(p: Program) -> list[TensorWithStats]:
    """What a program observes, in the order of the network."""
    ops = [op for op in p.ops if isinstance(op, ExponentStats) and op.counts.base.name == COUNTS]
    found = [
        TensorWithStats(op.label, op.kind, tuple(int(n) for n in op.x.shape), op.x.dtype, op.counts.first_column // BINS)
        for op in ops
    ]
    return sorted(found, key=lambda each: each.number)


def _wanted(p: Program, gradients: Mapping[Tensor, tuple[Tensor, Op]]) -> Iterator[tuple[str, str, Tensor, Op | None]]:
    """The tensors to observe: (name, one of KINDS, tensor, the op after which it is observed or None for the program's start).
    Equal names of activations get numbers, "x.2"; the result of a bias or rescale takes over its input's name."""
    remaining = set(p.ops)  # without ops that were eliminated since `gradients` was made
    activations: dict[str, tuple[Tensor, Op]] = {}  # name -> activation, and the op that writes it
    products: dict[Tensor | None, str] = {}  # a matmul's result -> its name, which a rescaling of it takes over
    for op in p.ops:
        for slot, t in op.outputs.items():
            if t in gradients and t.base is t and not op.recomputed and dtypes.FORMATS[t.dtype].kind == "float":
                factor_of = products.get(op.inputs.get("x")) if isinstance(op, Rescale) else None
                name = base_name = factor_of or _name(op, slot, t)
                number = 1
                # What a bias or a factor makes of a matmul takes its place.
                while name in activations and activations[name][0] not in op.inputs.values():
                    number += 1
                    name = f"{base_name}.{number}"
                activations[name] = t, op
                if op.product and "weight" in op.inputs:
                    products[t] = name
    for name, (t, op) in activations.items():
        yield name, "activation", t, op
    # What passes through an addition unchanged is one gradient of several tensors: the last of them gives it its name.
    names = {gradients[t]: name for name, (t, _) in activations.items()}
    for (grad, writer), name in names.items():
        if writer in remaining and grad.base is grad:
            yield name, "gradient", grad, writer
    for weight in p.store.of_role("parameter"):
        yield weight.name, "weight", weight, None
    for weight in p.store.of_role("parameter"):
        grad = p.store.tensors.get(f"{weight.name}.grad")
        if grad is not None and (writer := backward.last_writer(p.ops, grad)):
            yield weight.name, "weight gradient", grad, writer


def _name(op: Op, slot: str, t: Tensor) -> str:
    """An activation is called as the layer whose parameters made it, or else as the op that did."""
    names = [x.name for x in op.inputs.values() if x.role == "parameter" and x.base is x]
    layers = {name.removesuffix(".weight").removesuffix(".bias") for name in names}
    return layers.pop() if len(layers) == 1 else ".".join(word for word in t.name.split(".") if word != slot)
