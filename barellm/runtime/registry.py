"""A table of what the kernels of a backend can do: of each op how outputs are written, its dtypes and views. All else is refused.

A kernel that does not know a mode would store where it should add. One that does not know a dtype, or the stride of a view, would
read the wrong elements. So an op is lowered only as its entry says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from barellm.errors import UserError
from barellm.program.grouping import members
from barellm.program.ops.base import Op, Span, describe

MODES = ("store", "add", "start")
L = TypeVar("L")


@dataclass(frozen=True)
class Entry(Generic[L]):
    """How one op is lowered, and what its kernel can do. `modes` has the modes of those outputs that it can do more to than store.
    `floats` are the dtypes that every operand may have, and `also` those that some may have beside them. `views` are the operands
    whose rows may lie further apart than they are long, and `spans` those that may be a part of a tensor's elements."""

    lower: Callable[[L], None]
    modes: Mapping[str, tuple[str, ...]]
    floats: tuple[str, ...]
    also: Mapping[str, tuple[str, ...]]
    views: frozenset[str]
    spans: frozenset[str]


class Refused(UserError, ValueError):
    """An op that a backend cannot do, in one line."""


class Registry(Generic[L]):
    """The entries of one backend. `floats` are the dtypes in which its kernels load and store numbers. `replaced` is called when
    an entry takes the place of another: when a cell of a notebook is run again, or a module is loaded again."""

    def __init__(self, backend: str, *, floats: tuple[str, ...], replaced: Callable[[], None] = lambda: None) -> None:
        self.backend, self.floats, self.replaced = backend, floats, replaced
        self.entries: dict[str, Entry[L]] = {}

    def add(
        self, op_name: str, lower: Callable[[L], None], *, adds: str = "", starts: str = "", floats: str = "",
        also: Mapping[str, str] | None = None, views: str = "", spans: str = "",
    ) -> None:  # fmt: skip
        """Register how `op_name` is lowered; a second entry for an op replaces the first. The words name operands: `adds` are
        outputs that can be added to, `starts` those that can be started too, `views` operands that may be views, and `spans`
        operands that may be spans ("*": all). `also` has dtypes that an operand may have beside `floats`, which are those of
        the backend unless given."""
        modes = dict.fromkeys(adds.split(), MODES[:2]) | dict.fromkeys(starts.split(), MODES)
        if op_name in self.entries:
            self.replaced()
        more = {name: tuple(words.split()) for name, words in (also or {}).items()}
        numbers = tuple(floats.split()) or self.floats
        self.entries[op_name] = Entry(lower, modes, numbers, more, frozenset(views.split()), frozenset(spans.split()))

    def lowering(self, *op_names: str, **takes: Any) -> Callable[[Callable[[Any, L], None]], Callable[[Any, L], None]]:
        """Register how ops become calls: a function of the op and what the lowering gives. `takes`: as `add` has it."""

        def register(lower: Callable[[Any, L], None]) -> Callable[[Any, L], None]:
            for name in op_names:
                self.add(name, lambda c: lower(c.op, c), **takes)  # pyright: ignore[reportAttributeAccessIssue]
            return lower

        return register

    def takes(self, op_name: str, operand: str) -> tuple[str, ...]:
        """The dtypes that an operand may have."""
        entry = self.entries[op_name]
        return (*entry.floats, *entry.also.get(operand, ()))

    def lower(self, op: Op, into: L) -> None:
        """Lower an op. UserError if the backend has no kernel for it, or none that takes its operands as they are."""
        refusal = self.refusal(op)
        if refusal:
            raise Refused(refusal)
        self.entries[op.kernel].lower(into)

    def fuses(self, op: Op) -> bool:
        """Whether a sequence may become this op. If its kernel does not take the operands, those of the sequence may."""
        return op.kernel not in self.entries or self.refusal(op) is None

    def refusal(self, op: Op) -> str | None:
        """Why an op cannot be lowered, in one line; None if it can: by its kernel, then of each tensor mode, dtype and view."""
        entry = self.entries.get(op.kernel)
        if entry is None:
            dtypes = ", ".join(dict.fromkeys(t.dtype for t in op.outputs.values()))
            return f"the {self.backend} backend has no kernel for {op.name} ({dtypes})"
        who = f"the {self.backend} backend's kernel for {op.name}"
        for one in members(op):
            for name, t in (one.inputs | one.outputs).items():
                mode, modes = one.modes.get(name, "store"), entry.modes.get(name, MODES[:1])
                if mode not in modes:
                    return f"{who} cannot write {name} ({t.dtype}) in mode {mode!r}, only {_either(modes)}"
                if t.dtype not in (dtypes := self.takes(op.kernel, name)):
                    written = f" in mode {mode!r}" if name in one.outputs else ""
                    return f"{who} takes no {t.dtype} for {name}{written}, only {_either(dtypes)}"
                if isinstance(t, Span) and entry.spans & {name, "*"}:
                    continue
                if t.base is not t and name not in entry.views:
                    return f"{who} takes no view for {name}, found {describe(**{name: t})}"
        return None


def _either(words: tuple[Any, ...]) -> str:
    return " or ".join([", ".join(words[:-1])] * (len(words) > 1) + [words[-1]])
