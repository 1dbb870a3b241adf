"""Explicit fusions: a backend's table of (sequence of primitive ops -> fused op), applied to a finished list of ops.

A match follows the dataflow, so the ops need not be neighbours. The fused op stands at the place of its last op."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from barellm.program.ops.base import Op
from barellm.program.tensor import PERSISTENT, Tensor


@dataclass(frozen=True, eq=False)
class Fusion:
    """One row of a backend's table. The fused op is called `name`; the backend's kernel for it is called `kernel`, which several
    rows may share.

    `sequence` has (op name, {input: "j.tensor"}) for each op i. A link says that this input is that output, or input, of op j < i.
    `inputs` and `outputs` go from the fused op's names to "i.tensor" of the sequence; operands that no link names must be listed
    there. `optional` are inputs of the fused op that may be absent. `when` is a further condition on the matched ops. `attrs` are
    attributes that the fused op has beside those of the sequence."""

    name: str
    sequence: Sequence[tuple[str, dict[str, str]]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    optional: tuple[str, ...] = ()
    when: Callable[[list[Op]], bool] | None = None
    kernel: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, (name, links) in enumerate(self.sequence):
            if (i > 0) != bool(links) or any(_slot(link)[0] >= i for link in links.values()):
                raise ValueError(f"fusion {self.name}: op {i} ({name}) must be linked to earlier ones, the first to none")
        if unknown := set(self.optional) - set(self.inputs):
            raise ValueError(f"fusion {self.name}: optional {sorted(unknown)} are not among its inputs")


class FusedOp(Op):
    """Several primitive ops as one. Its meaning is its `sequence`, run in order without rounding in between.

    Inputs, outputs and modes carry the names of the table's row. Attributes are those of the sequence; a name with
    different values in two of its ops is left out: read it from `sequence`."""

    def __init__(self, fusion: Fusion, sequence: list[Op]) -> None:
        """`sequence`: the matched ops, in the order of the row. Operands are theirs by the row's links; of attributes those that
        are equal in all ops that have them, then the row's own, which win."""
        super().__init__({}, {})
        self.fusion = fusion
        self.name = fusion.name
        self.optional = fusion.optional
        self.sequence = sequence
        self.segment = sequence[-1].segment
        self.recomputed = all(op.recomputed for op in sequence)
        self.scalars = tuple(dict.fromkeys(s for op in sequence for s in op.scalars))
        rounded = []
        for name, link in fusion.inputs.items():
            i, slot = _slot(link)
            if slot in sequence[i].inputs:
                self.inputs[name] = sequence[i].inputs[slot]
                rounded += [name] if slot in sequence[i].rounded else []
        self.rounded = tuple(rounded)
        for name, link in fusion.outputs.items():
            i, slot = _slot(link)
            self.outputs[name], self.modes[name] = sequence[i].outputs[slot], sequence[i].modes[slot]
        for key in dict.fromkeys(k for op in sequence for k in op.attrs):
            values = [op.attrs[key] for op in sequence if key in op.attrs]
            if all(v == values[0] for v in values):
                self.attrs[key] = values[0]
        self.attrs |= fusion.attrs

    @property
    def kernel(self) -> str:
        return self.fusion.kernel or self.name

    def reference(self, **arrays: Any) -> dict[str, np.ndarray]:
        """The outputs where there is nothing to add to."""
        return self.run(arrays, arrays, {})

    def run(self, arrays, scalars, current):
        at = {_slot(link): arrays[name] for name, link in self.fusion.inputs.items() if name in arrays}
        before = {_slot(link): current[name] for name, link in self.fusion.outputs.items() if name in current}
        for i, op in enumerate(self.sequence):
            for name, link in self.fusion.sequence[i][1].items():
                at[i, name] = at[_slot(link)]
            results = op.run({name: at[i, name] for name in op.inputs}, scalars, {k: v for (j, k), v in before.items() if j == i})
            at |= {(i, name): result for name, result in results.items()}
        return {name: at[_slot(link)] for name, link in self.fusion.outputs.items()}

    def flops(self) -> int:
        return sum(op.flops() for op in self.sequence)


def fuse(ops: Sequence[Op], table: Iterable[Fusion], *, takes: Callable[[FusedOp], bool] = lambda fused: True) -> list[Op]:
    """Replace every match of the table by its FusedOp, if the backend `takes` it; earlier rows have priority. Observers still see
    the same values; those whose value is no longer in memory are dropped."""
    observed = list(_observed(ops))
    ops = [op for op in ops if not op.observer]
    index, names = None, {op.name for op in ops}  # of `ops` as they are now
    for fusion in table:
        if not names.issuperset(name for name, _ in fusion.sequence):
            continue
        index = index or _Index(ops)
        taken: set[Op] = set()  # ops that are part of a match
        placed: dict[Op, FusedOp] = {}  # last op of a match -> the fused op that takes its place
        for op in ops:
            if op in taken or op.name != fusion.sequence[0][0]:
                continue
            for match in _matches(fusion, [op], index):
                if not (taken.isdisjoint(match) and _complete(fusion, match) and index.movable(fusion, match)):
                    continue
                fused = FusedOp(fusion, match)
                if takes(fused):
                    taken.update(match)
                    placed[max(match, key=index.position.__getitem__)] = fused
                    break
        if placed:
            ops = [placed.get(op, op) for op in ops if op in placed or op not in taken]
            index, names = None, {op.name for op in ops}
    return _with_observers(ops, observed) if observed else ops


def _observed(ops: Sequence[Op]) -> Iterator[tuple[Op, dict[Tensor, Op]]]:
    """The observers among the ops, each with {tensor that it reads: the op that wrote it last}. Tensors that no op has written,
    such as parameters, are not in it."""
    writer: dict[Tensor, Op] = {}
    for op in ops:
        if op.observer:
            yield op, {base: writer[base] for base in _bases(op.inputs) if base in writer}
        else:
            writer |= dict.fromkeys(_bases(op.outputs), op)


def _with_observers(ops: list[Op], observed: list[tuple[Op, dict[Tensor, Op]]]) -> list[Op]:
    """The ops and, right behind the last op that now writes what it reads, each observer whose values are still written."""
    position = {part: i for i, op in enumerate(ops) for part in (op.sequence if isinstance(op, FusedOp) else [op])}
    behind: dict[int, list[Op]] = {}  # position of an op, -1 for the beginning -> the observers that follow it
    for observer, writers in observed:
        if all(base in _bases(ops[position[op]].outputs) for base, op in writers.items()):
            behind.setdefault(max((position[op] for op in writers.values()), default=-1), []).append(observer)
    return [*behind.get(-1, []), *(x for i, op in enumerate(ops) for x in (op, *behind.get(i, [])))]


_Value = tuple[Tensor, int]  # what a tensor, or a view of one, holds after that many writes to its bytes (a version)


class _Index:
    """An index of a list of ops: `position` in it, the ops that read and write each tensor that owns bytes (`readers`, `writers`),
    the ops that read each value (`readers_of`), and the value that each op `read` or has `written` in each of its operands."""

    def __init__(self, ops: list[Op]) -> None:
        """Number the values of each tensor by its writes, in the order of the ops."""
        self.position = {op: i for i, op in enumerate(ops)}
        self.readers: dict[Tensor, list[Op]] = {}
        self.writers: dict[Tensor, list[Op]] = {}
        self.readers_of: dict[_Value, list[Op]] = {}
        self.read: dict[tuple[Op, Tensor], _Value] = {}
        self.written: dict[tuple[Op, Tensor], _Value] = {}
        for op in ops:
            for t in set(op.inputs.values()):
                value = self.read[op, t] = (t, len(self.writers.get(t.base, [])))
                self.readers_of.setdefault(value, []).append(op)
            for base in _bases(op.inputs):
                self.readers.setdefault(base, []).append(op)
            for base in _bases(op.outputs):
                self.writers.setdefault(base, []).append(op)
            for t in set(op.outputs.values()):
                self.written[op, t] = (t, len(self.writers[t.base]))

    def value(self, op: Op, slot: str) -> _Value | None:
        """The value that the op's output `slot` holds after it, or its input before it."""
        if slot in op.outputs:
            return self.written[op, op.outputs[slot]]
        return self.read[op, op.inputs[slot]] if slot in op.inputs else None

    def movable(self, fusion: Fusion, match: list[Op]) -> bool:
        """Whether executing `match` at the place of its last op changes nothing for other ops: none in between writes what a
        matched op reads, or reads or writes what it writes."""
        inside = set(match)
        last = max(self.position[op] for op in match)
        for op in match:
            here = self.position[op]

            def crossed(others: list[Op], here: int = here) -> bool:
                return any(here < self.position[x] < last and x not in inside for x in others)

            if any(crossed(self.writers.get(t, [])) for t in _bases(op.inputs)):
                return False
            if any(crossed(self.writers[t] + self.readers.get(t, [])) for t in _bases(op.outputs)):
                return False
        return self._ordered(fusion, match) and self._hidden(fusion, match)

    def _ordered(self, fusion: Fusion, match: list[Op]) -> bool:
        """Whether no tensor is written twice, dependent ops keep their order, and operands have the links' versions."""
        for i, op in enumerate(match):
            reads, writes = _bases(op.inputs), _bases(op.outputs)
            for earlier in match[:i]:
                wrote = _bases(earlier.outputs)
                if wrote & writes:
                    return False
                touch = wrote & reads or writes & _bases(earlier.inputs)
                if touch and self.position[earlier] > self.position[op]:
                    return False
            links = fusion.sequence[i][1]
            for name, t in op.inputs.items():
                since = 0
                if name in links:
                    j, slot = _slot(links[name])
                    since = j + 1 if slot in match[j].outputs else j
                if any(t.base in _bases(x.outputs) for x in match[since:i]):
                    return False
        return True

    def _hidden(self, fusion: Fusion, match: list[Op]) -> bool:
        """Whether outputs that the fused op lacks are unobservable: stored, not persistent, read only within the match."""
        exposed = {_slot(link) for link in fusion.outputs.values()}
        inside = set(match)
        for i, op in enumerate(match):
            for name, t in op.outputs.items():
                if (i, name) in exposed:
                    continue
                base = t.base
                if base.role in PERSISTENT or base.role == "output" or op.modes[name] != "store":
                    return False
                if not inside.issuperset(self.readers.get(base, []) + self.writers[base]):
                    return False
        return True


def _bases(tensors: dict[str, Tensor]) -> set[Tensor]:
    return {t.base for t in tensors.values()}


def _slot(link: str) -> tuple[int, str]:
    """(number of the op in the row, name of its tensor) of a link "i.name"."""
    i, name = link.split(".")
    return int(i), name


def _matches(fusion: Fusion, chosen: list[Op], index: _Index) -> Iterator[list[Op]]:
    """Extend the partial match `chosen` (the ops of the row's first entries) along the row's links; yields every complete match
    (depth-first search). A value counts as the same only in the same version: `_Index` numbers a tensor's by its writes."""
    if len(chosen) == len(fusion.sequence):
        yield chosen
        return
    name, links = fusion.sequence[len(chosen)]
    # The values that the next op's linked inputs must read. Its candidates are the readers of the first of them.
    wanted = {into: index.value(chosen[j], slot) for into, (j, slot) in ((k, _slot(v)) for k, v in links.items())}
    first = next(iter(wanted.values()))
    for op in index.readers_of.get(first, []) if first is not None else []:  # None: an absent optional input
        if op.name != name or op in chosen:
            continue
        if all(into in op.inputs and index.read[op, op.inputs[into]] == value for into, value in wanted.items()):
            yield from _matches(fusion, [*chosen, op], index)


def _complete(fusion: Fusion, match: list[Op]) -> bool:
    """Whether the row names every operand, and only operands that it calls optional are missing."""
    listed = {_slot(link): name for name, link in fusion.inputs.items()}
    for i, op in enumerate(match):
        if any(name not in fusion.sequence[i][1] and (i, name) not in listed for name in op.inputs):
            return False
    if any(slot not in match[i].inputs and name not in fusion.optional for (i, slot), name in listed.items()):
        return False
    return fusion.when is None or fusion.when(match)
