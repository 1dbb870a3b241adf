"""Objects for kernels: from the cache, or compiled in several processes."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from barellm.cpu import jit
from barellm.cpu.isa import ISA
from barellm.runtime.compilers import Compile, Service, compile_all

SHARE = 4  # objects for each helper at least: starting one costs as much as compiling a few


def cached_objects(emitters: dict[str, Callable[[], str]], isa: ISA, *, processes: int) -> list[bytes]:
    """The object of each key. What the cache does not have is compiled from its IR, by `processes` processes at most, and kept."""
    objects = {key: jit.load(key, isa) for key in emitters}
    missing = {key: emitters[key] for key, code in objects.items() if code is None}
    if missing:
        compiled = compile_all(missing, Service("barellm.cpu.compilers", asdict(isa)), processes=processes, share=SHARE)
        for key, code in compiled.items():
            jit.keep(key, isa, code)
        objects |= compiled
        jit.prune()
    return [code for code in objects.values() if code is not None]


def compiler(argument: dict[str, Any]) -> Compile:
    """The function from IR to an object, for the ISA with these fields."""
    isa = ISA(**argument)
    return lambda ir: jit.compile_object(ir, isa)
