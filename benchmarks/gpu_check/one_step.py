"""One step of gpt2-124m at 64 x 1024, launch by launch: what Nsight Compute looks at."""

from __future__ import annotations

from benchmarks.gpu_check.correct import opened
from benchmarks.gpu_check.first import whole_step
from benchmarks.gpu_check.stages import Scale


def main(*, small: bool = False) -> float:
    """The loss of the step."""
    with opened(whole_step(Scale(small=small, mock=False)), "cuda") as bench:
        return bench.step(run=bench.machine.session.run_unrolled).loss


if __name__ == "__main__":
    print(main())
