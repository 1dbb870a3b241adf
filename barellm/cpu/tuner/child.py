"""The tuner's child process on the CPU: `python -m barellm.cpu.tuner.child`."""

from __future__ import annotations

from barellm.cpu.isa import host
from barellm.cpu.tuner.harness import Harness
from barellm.cpu.tuner.problem import Problem
from barellm.runtime.tuner.child import Child, serve


def opened(work: Problem, threads: int, footprint: int) -> Harness:
    return Harness(work, host(), threads, footprint)


if __name__ == "__main__":
    serve(Child(opened))
