"""Steps on a GPU with the time of every launch, interleaved with untimed ("usual") steps.

In the CUDA graph that a timed step replays there are events between the launches: from one to the next is a launch with what it
waits for. What a usual step takes longer than the sum of launches is the host's time and the copies of inputs; what it takes less,
launches gained by following each other closely."""

from dataclasses import dataclass

import numpy as np

from barellm.tools.profile.step import StepBench

LEAST, SECONDS, MOST = 5, 2.0, 50  # of steps that are timed


@dataclass(frozen=True)
class DeviceStep:
    """A cycle of `steps` steps. `launches_s`: programs in their order, and the seconds of each launch. `seconds`: their sum."""

    launches_s: list[tuple[str, np.ndarray]]
    steps: int = 1

    @property
    def seconds(self) -> float:
        return float(sum(times.sum() for _, times in self.launches_s))

    @property
    def calls_s(self) -> dict[str, np.ndarray]:
        """{program: (launches, 2)}: seconds of work, and of waiting behind it (0 here), of an average step of the cycle: as
        `call_seconds` of trace.py has them for a CPU."""
        sums: dict[str, np.ndarray] = {}
        for name, times in self.launches_s:
            sums[name] = sums.get(name, 0.0) + np.stack([times, np.zeros_like(times)], axis=-1) / self.steps
        return sums


@dataclass(frozen=True)
class DeviceTraces:
    """Pairs of a timed and an untimed step. `usual_s`: seconds of the untimed, from writing inputs to the GPU's end."""

    timed: list[DeviceStep]
    usual_s: list[float]

    def median_step(self) -> DeviceStep:
        return sorted(self.timed, key=lambda step: step.seconds)[len(self.timed) // 2]

    def median_calls_s(self) -> dict[str, np.ndarray]:
        """The same as `DeviceStep.calls_s`, with the median of each launch."""
        return {name: np.median([step.calls_s[name] for step in self.timed], axis=0) for name in self.timed[0].calls_s}


def pairs_for(bench: StepBench) -> int:
    """How many pairs of steps a few seconds allow, by the duration of one step, which is run for that."""
    return round(min(max(SECONDS / bench.step().seconds, LEAST), MOST))


def record(bench: StepBench, steps: int) -> DeviceTraces:
    """Run `steps` pairs of a timed and a usual step, alternating which comes first."""
    timed, usual = [], []
    for i in range(steps):
        for traced in (True, False) if i % 2 == 0 else (False, True):
            if traced:
                launches = [(name, np.array([ms / 1e3 for _, ms in launch_ms])) for name, launch_ms in bench.timed()]
                timed.append(DeviceStep(launches, bench.training_schedule.cycle))
            else:
                usual.append(bench.step().seconds)
    return DeviceTraces(timed, usual)
