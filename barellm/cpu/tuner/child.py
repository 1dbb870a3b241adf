"""The tuner's child process on the CPU: `python -m barellm.cpu.tuner.child`."""

from __future__ import annotations

from barellm.cpu.isa import host
from barellm.cpu.tuner.bed import Bed
from barellm.cpu.tuner.work import Work
from barellm.runtime.tuner.child import Child, serve


def opened(work: Work, threads: int, footprint: int) -> Bed:
    return Bed(work, host(), threads, footprint)


if __name__ == "__main__":
    serve(Child(opened))
