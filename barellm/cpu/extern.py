"""Calls out of a step: entries of its table that are no kernels, such as those that wait for other processes.

Every thread walks the table; at such an entry the first one calls, and the others go on to the next barrier."""

import ctypes
import os
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from barellm.runtime.lowering import Region

Prepare = Callable[[list[np.ndarray]], Callable[[], None]]


def extern(k, target, *, scalar: str = "") -> None:
    """The first thread calls the function at the address `target` with the address of this call's arguments; if a run-time `scalar`
    is named, only in runs in which that is not 0."""
    is_caller = k.thread.equals(0)
    if scalar:
        is_caller = is_caller & k.scalar(scalar).differs(0)
    with k.when(is_caller):
        function = k.op("ptr", f"inttoptr i64 {target.ref} to ptr")
        k.line(f"call void {function.ref}(ptr %args)")


def callback(prepare: Prepare, regions: Sequence[Region]) -> tuple[int, object]:
    """(address of a function for `extern`, an object to keep as long as it may be called). The function's further arguments are the
    addresses of `regions`. `prepare` gets the bytes of the regions at the first call, and returns what each call does."""
    sizes = [region.stop - region.start for region in regions]
    calls: list[Callable[[], None]] = []

    def run(args: int) -> None:
        """Prepare at the first call, as addresses are known only then; an exception ends the process."""
        try:
            if not calls:
                addresses = (ctypes.c_int64 * (1 + len(sizes))).from_address(args)[1:]
                buffers = [(ctypes.c_uint8 * n).from_address(at) for at, n in zip(addresses, sizes, strict=True)]
                calls.append(prepare([np.ctypeslib.as_array(one) for one in buffers]))
            calls[0]()
        except BaseException:  # nothing can pass through native code, and the step cannot go on without what was to come
            traceback.print_exc()
            os._exit(1)

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address, function
