"""Steps of gpt2-124m at 64 x 1024, launch by launch, in which a profiler is shown each kernel once: what Nsight Compute looks at.

The first launch of each name comes first, in a step of their own; then the first of each other kernel instance. It prints the names
of everything that the steps launch, as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from barellm.cuda import driver
from barellm.cuda.kernel import Specialisation
from barellm.cuda.launch import BoundLaunch
from benchmarks.gpu_check.correct import opened
from benchmarks.gpu_check.first import whole_step
from benchmarks.gpu_check.stages import Scale

Key = Callable[[Specialisation], Hashable]
KEYS: tuple[Key, ...] = (lambda spec: spec.name, lambda spec: spec)  # what is shown once in each of the steps


def main(*, small: bool = False, seconds: float = 60.0) -> list[str]:
    """The names of the kernels that the steps launch. After `seconds`, nothing more is shown to the profiler."""
    end = time.monotonic() + seconds
    launched: dict[str, None] = {}
    with opened(whole_step(Scale(small=small, mock=False)), "cuda") as bench:
        session = bench.compiled.session
        seen: set[Specialisation] = set()
        for key in KEYS:
            with showing(session, key, seen, end) as names:
                bench.step(run=session.run_unrolled)
            launched |= dict.fromkeys(names)
    return list(launched)


@contextmanager
def showing(session: Any, key: Key, seen: set[Specialisation], end: float) -> Iterator[list[str]]:
    """Within the context a profiler is shown the first launch for each key that none of `seen` has. The names of all launches."""
    specs = {int(kernel.function): spec for spec, kernel in session.kernels.items()}
    run, names, keys = BoundLaunch.run, [], {key(spec) for spec in seen}

    def shown(launch: BoundLaunch, stream: Any) -> None:
        spec = specs[int(launch.function)]
        names.append(spec.name)
        if key(spec) in keys or launch.empty or time.monotonic() > end:
            run(launch, stream)
            return
        keys.add(key(spec))
        seen.add(spec)
        with driver.profiled():
            run(launch, stream)

    with patch.object(BoundLaunch, "run", shown):
        yield names


if __name__ == "__main__":
    print(json.dumps({"launched": main(seconds=float(sys.argv[1]))}), flush=True)
