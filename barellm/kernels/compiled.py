"""Compilation of an array function for the shapes, dtypes and options of a call, with a cache."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

import numpy as np

from barellm.errors import WrongType
from barellm.kernels.arrays import ALIGN, LEAD, Array, address, axes_of, check_array, empty, format_name, ready, size_of, sizes_of
from barellm.kernels.executor import CompiledOps
from barellm.kernels.function_spec import FunctionSpec
from barellm.program.backward import pullback
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, Tensor

MAX_CACHED = 128  # compiled calls (LRU)
DIMS = {LEAD: "batch", "B": "batch", "T": "seq"}  # legend letter -> run-time size: other values need no compilation
FLOATS = ("fp32", "bf16")


class Compiled:
    """One function for certain shapes, dtypes and options. With `gradients` it saves what the backward pass reads."""

    def __init__(
        self, spec: FunctionSpec, given: Mapping[str, np.ndarray], transposed: set[str], options: Mapping[str, Any], gradients: bool
    ) -> None:
        """Build and compile the function for the shapes and dtypes of `given`; `transposed` arrays are passed as their storage."""
        shapes = {k: a.shape[::-1] if k in transposed else a.shape for k, a in given.items()}
        sizes = sizes_of(spec.name, spec.shapes, shapes) | {k: n for k, n in options.items() if isinstance(n, int)}
        formats = {k: format_name(spec.name, k, a, spec.formats.get(k, FLOATS)) for k, a in given.items()}
        self.inputs = []
        for k in given:
            axes = _axes(spec.shapes[k], sizes)
            self.inputs.append(Tensor(k, axes[::-1] if k in transposed else axes, formats[k], "input"))
        p = Program(Store(), compute=self.inputs[0].dtype if self.inputs[0].dtype in FLOATS else "fp32")
        layouts = {f"{k}_transposed": k in transposed for k in spec.transposable}
        arguments = {**dict.fromkeys(spec.shapes), **{t.name: t for t in self.inputs}, **layouts, **options}
        made = spec.build(p, **arguments) if spec.build else getattr(p, spec.name)(**arguments)
        self.results: list[Tensor] = list(made) if isinstance(made, tuple) else [made]
        self.shapes = [_shape(legend, sizes, t) for legend, t in zip(spec.results, self.results, strict=True)]
        for t in self.results:
            t.role = "output"
        self.saved: list[Tensor] = []
        forward = list(p.ops)
        if gradients:
            self._differentiate(p, shapes, transposed)
        self.forward = CompiledOps(forward, [*self.inputs, *self.results, *self.saved])

    def _differentiate(self, p: Any, shapes: Mapping[str, tuple[int, ...]], transposed: set[str]) -> None:
        """Append the backward ops, compiled on first use, and find which forward tensors they read (`saved`)."""
        count = len(p.ops)
        floating = [t for t in self.results if t.dtype in FLOATS]
        self.seeds = [Tensor(f"d{t.name}", t.shape, t.dtype, "input") for t in floating]
        self.seed_shapes = [s for s, t in zip(self.shapes, self.results, strict=True) if t in floating]
        roots = [t for t in self.inputs if t.dtype in FLOATS]
        self.gradients = pullback(p, dict(zip(floating, self.seeds, strict=True)), roots)
        self.gradient_shapes = [(shapes[t.name], t.name in transposed) for t in roots]
        forward, self._behind = p.ops[:count], p.ops[count:]
        read = {t for op in self._behind for t in op.inputs.values()}
        self.saved = [t for op in forward for t in op.outputs.values() if t in read and t not in self.results]
        for t in (*self.saved, *self.gradients):
            t.role = "output"
        self._backward: CompiledOps | None = None

    @property
    def backward(self) -> CompiledOps:
        """The backward pass, compiled lazily."""
        if self._backward is None:
            operands = (*self.inputs, *self.results, *self.saved, *self.seeds, *self.gradients)
            self._backward = CompiledOps(self._behind, list(operands))
        return self._backward


def _axes(legend: str, sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """A tensor's shape from a legend (`arrays`), such as "... K" or "B T (H D)": one axis per word, of which "..." (LEAD) stands
    for all leading axes and parentheses for a product. Letters in DIMS vary between calls without recompiling."""

    def axis(word: str) -> int:
        if word.startswith("("):
            return prod(axis(letter) for letter in word.strip("()").split())
        size = prod(sizes[LEAD]) if word == LEAD else size_of(word, sizes)
        return Dim(DIMS[word], size) if word in DIMS else size

    return tuple(axis(word) for word in re.findall(r"\([^)]*\)|\S+", legend))


def _shape(legend: str, sizes: Mapping[str, Any], made: Tensor) -> tuple[int, ...]:
    """The shape of a result as the caller sees it. A letter that no argument has is what was made of it."""
    letters = axes_of(legend)
    if any(not letter.isdigit() and letter not in sizes for letter in letters):
        return tuple(int(n) for n in made.shape)
    axes: list[int] = []
    for letter in letters:
        axes += sizes[LEAD] if letter == LEAD else [size_of(letter, sizes)]
    return tuple(axes)


class Cache:
    """An LRU cache of compiled calls. Of two threads that miss at the same time both compile, and the first one's is kept."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Any, Compiled] = OrderedDict()
        self.misses = 0
        self.unlock()

    def unlock(self) -> None:
        """A new lock: in a forked child the old one may be held by a thread that does not exist."""
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Compiled]) -> Compiled:
        """The compiled call of a key, made on a miss; least recently used ones are evicted."""
        with self._lock:
            if (found := self.entries.get(key)) is not None:
                self.entries.move_to_end(key)
                return found
            self.misses += 1
        made = make()
        with self._lock:
            made = self.entries.setdefault(key, made)
            while len(self.entries) > MAX_CACHED:
                self.entries.popitem(last=False)
        return made


CACHE = Cache()
os.register_at_fork(after_in_child=lambda: CACHE.unlock())


def run(
    spec: FunctionSpec, given: Mapping[str, Any], options: Mapping[str, Any], out: Array | None, tape: list[VjpFunction] | None
) -> list[Array]:
    """Call a function on arrays; returns the results, the first in `out` if given. Its VjpFunction is appended to `tape`."""
    taken = {k: check_array(spec.name, k, a) for k, a in given.items() if a is not None or k not in spec.optional}
    transposed = {k for k in spec.transposable if k in taken and _is_transposed(taken[k])}
    read = {k: ready(a.T if k in transposed else a) for k, a in taken.items()}
    key = (spec, tape is None, *((k, a.shape, a.dtype, k in transposed) for k, a in read.items()), *options.items())

    def make() -> Compiled:
        return Compiled(spec, read, transposed, options, gradients=tape is not None)

    compiled = CACHE.get(key, make)
    results = [empty(shape, t.dtype) for shape, t in zip(compiled.shapes, compiled.results, strict=True)]
    if out is not None:
        results[0] = _target(spec, out, results[0], read.values())
    saved = [empty(tuple(map(int, t.shape)), t.dtype) for t in compiled.saved]
    compiled.forward.run([address(a) for a in (*read.values(), *results, *saved)])
    if tape is not None:
        tape.append(VjpFunction(spec, compiled, [*read.values(), *results, *saved]))
    if out is not None and results[0] is not out:
        out[...] = results[0]
        results[0] = out
    return results


def _is_transposed(array: np.ndarray) -> bool:
    return array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous


def _target(spec: FunctionSpec, out: Any, result: np.ndarray, read: Collection[np.ndarray]) -> np.ndarray:
    """`out` if kernels can write there directly (contiguous, aligned, no overlap with inputs), else `result`, to be copied."""
    out = check_array(spec.name, "out", out)
    if out.shape != result.shape or out.dtype != result.dtype:
        wanted, found = f"{result.shape} {result.dtype}", f"{out.shape} {out.dtype}"
        raise ValueError(f"{spec.name} expects out {wanted}, it is {found}")
    if not out.flags.writeable:
        raise ValueError(f"{spec.name} expects an out that can be written, it is read-only")
    direct = out.flags.c_contiguous and address(out) % ALIGN == 0
    return out if direct and not any(np.may_share_memory(out, a) for a in read) else result


class VjpFunction:
    """The VJP of one call: `vjp_fn(dy)` gives the gradients of its float arguments, in their order, each with the shape and dtype
    of its argument. It reads the arguments and results of the call in place, so they must not have changed."""

    def __init__(self, spec: FunctionSpec, compiled: Compiled, kept: list[np.ndarray]) -> None:
        self._rule, self._compiled, self._kept = spec, compiled, kept

    def __call__(self, *gradients: Array) -> tuple[Array, ...]:
        """One gradient for each float result of the call."""
        c, name = self._compiled, self._rule.name
        if len(gradients) != len(c.seeds):
            raise WrongType(f"vjp_fn of {name} expects {len(c.seeds)} gradients, it was given {len(gradients)}")
        seeds = []
        for t, shape, given in zip(c.seeds, c.seed_shapes, gradients, strict=True):
            argument = "dy" if len(c.seeds) == 1 else t.name
            given = check_array(f"vjp_fn of {name}", argument, given)
            format_name(f"vjp_fn of {name}", argument, given, (t.dtype,))
            if given.shape != shape:
                raise ValueError(f"vjp_fn of {name} expects {argument} {shape}, it has shape {given.shape}")
            seeds.append(ready(given))
        made = [
            empty(shape[::-1] if transposed else shape, t.dtype)
            for t, (shape, transposed) in zip(c.gradients, c.gradient_shapes, strict=True)
        ]
        c.backward.run([address(a) for a in (*self._kept, *seeds, *made)])
        return tuple(a.T if transposed else a for a, (_, transposed) in zip(made, c.gradient_shapes, strict=True))
