"""Two training steps of a tiny model on the GPU, in bf16 and fp32: what compute-sanitizer looks at; it makes them 10 to 100 times
slower."""

from __future__ import annotations

from barellm.profiling.step import SEED, StepBench
from barellm.training.machine import open_machine
from benchmarks.gpu_check.correct import model
from benchmarks.gpu_check.stages import Scale


def main() -> None:
    for dtype in ("bf16", "fp32"):
        with open_machine(model(Scale(small=True, mock=False), dtype=dtype), device="cuda") as machine:
            machine.initialize(SEED)
            bench = StepBench(machine)
            print(dtype, [bench.step().loss for _ in range(2)])
    print("two steps done")


if __name__ == "__main__":
    main()
