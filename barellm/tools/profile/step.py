"""Measures training steps on random tokens, as a run would do them: one micro-batch, and the programs with which its training
schedule ends the step. Where steps differ, those of a schedule's cycle are measured together, and their mean is one step."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from barellm.assembly.build import CompiledModel, open_model
from barellm.config import Config
from barellm.models.training_schedule import runs_per_step
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE
from barellm.tools.profile.process import CallCounter, Usage, resident_bytes, seconds_since_start
from barellm.training.training_schedule import training_schedule

SEED = 1337


@dataclass
class Sample:
    """The measurement of one cycle: the seconds of a step, the loss of the last, and what the process used meanwhile."""

    seconds: float
    loss: float
    usage: Usage

    def to_json(self) -> dict[str, Any]:
        return {"s": self.seconds, "loss": self.loss, **self.usage.__dict__}


def one_micro_batch(config: Config) -> Config:
    """The run with steps of one micro-batch."""
    return replace(config, train=replace(config.train, gradient_accumulation_steps=1, batch_rampup_from=0, batch_rampup_tokens=0))


class StepBench:
    """A compiled model that takes training steps on tokens that depend on the step only. Each of `ranks` takes its rows."""

    def __init__(self, compiled: CompiledModel, ranks: Ranks = ALONE) -> None:
        """`steps`: how many it has taken; `shares`: how often each program runs in a step, on average."""
        self.compiled = compiled
        self.steps = 0
        self.train = compiled.config.train
        self.rows = self.train.micro_batch_size // ranks.count
        self.first = ranks.rank * self.rows
        self.vocabulary = compiled.config.model.vocab_size
        config = one_micro_batch(compiled.config)
        self.training_schedule, self.shares = training_schedule(config), runs_per_step(config)
        self.total = self.train.steps or None  # steps of the run, on which the schedule depends
        self.loss = 0.0  # of the last step

    def step(self, wrap: Callable[[], Any] | None = None, run: Callable[..., Any] | None = None) -> Sample:
        """Take a cycle of steps and measure it; inputs are made before. `wrap()` is a context manager around what is timed; `run`:
        the function that runs a program (None: the session's)."""
        session = self.compiled.session
        run_program, inputs, cycle = run or session.run, self.inputs(), self.training_schedule.cycle
        usage, start = Usage.now(), time.perf_counter()
        if wrap is None:
            self._run(run_program, inputs)
        else:
            with wrap():
                self._run(run_program, inputs)
        sample = Sample((time.perf_counter() - start) / cycle, 0.0, Usage.now().since(usage))
        sample.loss = self.loss
        return sample

    def inputs(self) -> list[np.ndarray]:
        """Tokens and targets of the steps of the next cycle: (2, batch, seq) i32 each."""
        shape = (2, self.train.micro_batch_size, self.train.seq)
        return [
            np.random.default_rng((SEED, self.steps + i)).integers(0, self.vocabulary, shape, dtype=np.int32)
            for i in range(self.training_schedule.cycle)
        ]

    def _run(self, run: Callable[..., Any], inputs: list[np.ndarray]) -> list[tuple[str, Any]]:
        """Run the programs of a cycle by `run`, and wait for their end: (name, what `run` returned) of each, in order."""
        train, session, results = self.train, self.compiled.session, []
        for tokens, targets in inputs:
            at = self.steps
            plan = self.training_schedule.step(at, self.total)
            self.training_schedule.on_step(session, at, self.total)
            rank_rows = slice(self.first, self.first + self.rows)
            session.write("tokens", tokens[rank_rows])
            session.write("targets", targets[rank_rows])
            micro = run(
                "forward_backward", batch=self.rows, seq=train.seq, accumulate=int(plan.adds), inv_targets=plan.inv_targets,
                seed=SEED, step=at + 1, sample=at * train.micro_batch_size + self.first,
            )  # fmt: skip
            self.loss = float(session.read("loss")[0]) * plan.shown  # as a run does: the update may need its place
            results += [("forward_backward", micro), *((name, run(name, **scalars)) for name, scalars in plan.updates)]
            self.steps += 1
        session.synchronize()
        return results

    def timed(self) -> list[tuple[str, Any]]:
        """Run a cycle by the session's `timed`: (program, what that returned) of each, in order."""
        return self._run(self.compiled.session.timed, self.inputs())


@contextmanager
def opened(config: Config, *, device: str = "cpu", ranks: Ranks = ALONE) -> Iterator[tuple[StepBench, dict[str, Any]]]:
    """Context manager: (bench after its first step, facts about the start for `step_result`). `config` has its dtype resolved.
    first_step_s is from process start to the end of the first step, split into import, plan (programs, lowering, addresses),
    compile, map, init (weights), step and rest; on a GPU also load (of code by the driver)."""
    imported = seconds_since_start()
    resident_before, start = resident_bytes()[0], time.perf_counter()
    counter = CallCounter()
    with ExitStack() as stack:
        with counter.watching_new_threads():
            compiled = stack.enter_context(open_model(config, device=device, ranks=ranks))
        begun = time.perf_counter()
        compiled.initialize(SEED)
        compiled.session.synchronize()
        initialised = time.perf_counter()
        bench = StepBench(compiled, ranks)
        first = bench.step()
        everything = (imported or 0.0) + time.perf_counter() - start
        split = {"import": imported or 0.0, **compiled.session.seconds, "init": initialised - begun, "step": first.seconds}
        facts = {"first_step_s": everything, "first_step_split": split | {"rest": everything - sum(split.values())}}
        yield bench, facts | {"first_step": first.to_json(), "resident_before_bytes": resident_before, "counter": counter}


def measure(config: Config, *, steps: int, digest: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Measure `steps` warm steps after the first, and return one JSON object. `config` has its dtype resolved."""
    with opened(config, device=device) as (bench, facts):
        counter = facts.pop("counter")
        samples = [bench.step() for _ in range(steps)]
        now, peak_rss = resident_bytes()
        marks = {"digest": bench.compiled.session.digest()} if digest else {}
        bench.step(counter.counting)
        return step_result(bench, facts, samples, now=now, peak_rss=peak_rss, counter=counter) | marks


def step_result(
    bench: StepBench, facts: dict[str, Any], samples: list[Sample], *, now: int, peak_rss: int, counter: CallCounter
) -> dict[str, Any]:
    """The JSON of `measure`, from the `facts` of `opened`, `samples` of warm steps, resident bytes `now` and at their peak, and the
    Python calls of one step (`counter`)."""
    compiled, train = bench.compiled, bench.train
    seconds = [s.seconds for s in samples]
    median_s = median(seconds)
    flops = sum(share * compiled.programs[name].flops for name, share in bench.shares.items())
    peak = compiled.peak().value
    tokens = train.micro_batch_size * train.seq
    arena = compiled.plan.arena_bytes
    added = now - facts["resident_before_bytes"]
    return {
        "kind": "step", "preset": compiled.config.preset, "batch": train.micro_batch_size, "seq": train.seq,
        "dtype": train.dtype, "recompute": train.recompute, "moments": compiled.config.optim.moments,
        **where_it_ran(compiled), **facts, "besides_step_s": facts["first_step_s"] - median_s, "steps": len(seconds),
        "step_s": seconds, "median_s": median_s, "min_s": min(seconds), "tokens_per_s": tokens / median_s, "flops": flops,
        "peak_flops": peak, "percent_of_peak": 100 * flops / median_s / peak, "arena_bytes": arena,
        "live_peak_bytes": compiled.plan.live_peak_bytes, "peak_rss_bytes": peak_rss, "rss_added_bytes": added,
        "rss_added_over_plan": added / arena, "minor_faults": max(s.usage.minor_faults for s in samples),
        "minor_faults_by_step": [s.usage.minor_faults for s in samples], "python_calls": counter.calls,
        "c_calls": counter.c_calls, "voluntary_switches": median(s.usage.voluntary_switches for s in samples),
        "voluntary_switches_by_step": [s.usage.voluntary_switches for s in samples],
        "involuntary_switches_by_step": [s.usage.involuntary_switches for s in samples],
        "cpu_s_by_step": [s.usage.cpu_s for s in samples], "losses": [s.loss for s in samples],
    }  # fmt: skip


def where_it_ran(compiled: CompiledModel) -> dict[str, Any]:
    """`device`, `isa`, and `threads` or `multiprocessors`."""
    names = ("device", "isa", "threads", "multiprocessors")
    return {name: value for name, value in compiled.meta().items() if name in names}


def serve(config: Config, *, device: str = "cpu", ranks: Ranks = ALONE, lines: Iterable[str] | None = None) -> None:
    """Serve one side of an interleaved benchmark: print JSON about the start, then for each request line (a number of steps) JSON
    about these steps. `lines`: the requests; None: standard input."""
    with opened(config, device=device, ranks=ranks) as (bench, facts):
        start = where_it_ran(bench.compiled) | {"dtype": bench.train.dtype}
        start |= {"arena_bytes": bench.compiled.plan.arena_bytes}
        on_device = {"peak_device_bytes": bench.compiled.plan.arena_bytes} if device == "cuda" else {}
        print(json.dumps(start | {k: v for k, v in facts.items() if k != "counter"}), flush=True)
        for line in sys.stdin if lines is None else lines:
            samples = [bench.step() for _ in range(int(line))]
            repetition = {
                "step_s": [s.seconds for s in samples], "losses": [s.loss for s in samples],
                "cpu_s": sum(s.usage.cpu_s for s in samples), "minor_faults": sum(s.usage.minor_faults for s in samples),
                "peak_rss_bytes": resident_bytes()[1], **on_device,
            }  # fmt: skip
            print(json.dumps(repetition), flush=True)
