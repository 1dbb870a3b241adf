"""Planted faults: each fence and each wait of a kernel taken away, one at a time, at the first launch of each kernel of a run. The
PTX machine must notice, or the launch's results must differ; what neither shows is a survivor."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from barellm.cuda.compile import Code
from barellm.cuda.kernel import Specialisation
from tests.simulators.interpreter import Box, Parameter, Pointer, Words
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run

# What is taken away, and what comes in its place: a wait for an mbarrier stands in a loop that must end.
KINDS = {
    "fence.proxy.async": (r"fence\.proxy\.async[^;]*;", ""),
    "mbarrier wait": (r"mbarrier\.try_wait\S* (\S+), \[[^;]*;", r"setp.eq.u32 \1, 0, 0;"),
    "cp.async.wait_group": (r"cp\.async\.wait_(?:group[^;]*|all);", ""),
    "cp.async.bulk.wait_group": (r"cp\.async\.bulk\.wait_group[^;]*;", ""),
    "wgmma.wait_group": (r"wgmma\.wait_group[^;]*;", ""),
    "bar.sync": (r"(?:bar|barrier)\.sync[^;]*;", ""),
}
RUNS = (Run(seed=1), Run(seed=2, poison=0x7F, late=False), Run(seed=3, apart=True))


@dataclass
class Planted:
    """`noticed`, `survivors`: faults by kernel and kind; of a survivor with its number among those of the kind in the kernel."""

    arch: int
    kernels: set[str]  # in which; all where it is empty
    noticed: Counter[tuple[str, str]] = field(default_factory=Counter)
    survivors: list[tuple[str, str, int]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    @property
    def found(self) -> dict[str, Any]:
        """As JSON has it."""
        noticed = [[*key, count] for key, count in sorted(self.noticed.items())]
        return {"noticed": noticed, "survivors": sorted(self.survivors)}

    def __call__(self, spec: Specialisation, code: Code, values: list[Parameter], grid: tuple[int, ...]) -> None:
        """Ahead of a launch (emulator.Emulator.before): memory is afterwards as it was."""
        if spec.name in self.seen or (self.kernels and spec.name not in self.kernels):
            return
        self.seen.add(spec.name)
        spans = sorted(set(_spans(values)))
        before = _bytes(spans)
        launch.execute(spec, values, grid, arch=self.arch, run=RUNS[0], code=code)
        right = _bytes(spans)
        for kind, number, changed in mutants(code.cubin.decode()):
            mutant = replace(code, cubin=changed.encode())
            if any(self._notices(spec, mutant, values, grid, run, (spans, before, right)) for run in RUNS):
                self.noticed[spec.name, kind] += 1
            else:
                self.survivors.append((spec.name, kind, number))
        _restore(spans, before)

    def _notices(self, spec, mutant: Code, values, grid, run: Run, memory) -> bool:
        spans, before, right = memory
        _restore(spans, before)
        try:
            launch.execute(spec, values, grid, arch=self.arch, run=run, code=mutant)
        except AssertionError:
            return True
        return _bytes(spans) != right


def mutants(ptx: str) -> Iterator[tuple[str, int, str]]:
    """The code without each fence and wait: its kind, its number among those, the code."""
    for kind, (pattern, instead) in KINDS.items():
        for number, found in enumerate(re.finditer(pattern, ptx)):
            yield kind, number, ptx[: found.start()] + found.expand(instead) + ptx[found.end() :]


def _spans(values: list[Parameter]) -> Iterator[tuple[int, int]]:
    """The allocations that a launch may touch."""
    for value in values:
        if isinstance(value, Box | Words):
            yield value.pointer.start, value.pointer.stop
        if isinstance(value, Words):
            yield from ((w.start, w.stop) for column in value.columns for w in column if isinstance(w, Pointer))
        if isinstance(value, Pointer):
            yield value.start, value.stop


def _bytes(spans: list[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(start, stop - start) for start, stop in spans]


def _restore(spans: list[tuple[int, int]], data: list[bytes]) -> None:
    for (start, _), one in zip(spans, data, strict=True):
        ctypes.memmove(start, one, len(one))
