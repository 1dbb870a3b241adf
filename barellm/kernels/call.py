"""How array functions are called. Nothing heavy is imported before the first call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from barellm.errors import WrongType

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.kernels.compiled import VjpFunction
    from barellm.kernels.function_spec import FunctionSpec

P = ParamSpec("P")
R = TypeVar("R")

_recording = threading.local()
_run: Callable[..., list[Array]] | None = None  # `compiled.run`, from the first call on


def call(spec: FunctionSpec, given: Mapping[str, Any], out: Array | None = None, **options: Any) -> list[Array]:
    """The results of a function on arrays; an optional argument that is absent is None. `out` takes the first result."""
    global _run
    if _run is None:
        from barellm.kernels.compiled import run as _run
    return _run(spec, given, options, out, getattr(_recording, "tape", None))


def vjp(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, VjpFunction]:
    """The result of an array function, and its VJP (vector-Jacobian product): a function from the gradient of the result to the
    gradients of the arguments, as `jax.vjp` has it.

        y, vjp_fn = kernels.vjp(kernels.layernorm, x, weight, bias)
        dx, dweight, dbias = vjp_fn(dy)"""
    outer = getattr(_recording, "tape", None)
    tape: list[VjpFunction] = []
    _recording.tape = tape
    try:
        y = function(*args, **kwargs)
    finally:
        _recording.tape = outer
    if len(tape) != 1:
        name = getattr(function, "__name__", str(function))
        found = f"{name} made {len(tape)} calls of such functions"
        raise WrongType(f"vjp expects a function of barellm.kernels that has gradients; {found}")
    return y, tape[0]
