"""Autotune the GEMM configuration of each matmul of a preset on this machine (on a GPU also attention), and cache it.

Every candidate runs in a child process. It is held against float64 and, bit for bit, against the default before it is timed, so
tuning changes how long a run takes and nothing else."""

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from barellm.cli.parsing.options import Parser, add, add_configuration, add_device, configuration
from barellm.errors import UserError
from barellm.training.console import show

if TYPE_CHECKING:
    from barellm.config import Config
    from barellm.runtime.tuner.decision import Tuner, Verdict

HEAD = f"{'kernel, and below it the configuration':<46}{'GFLOP/s':>9}{'gain':>9}{'tried':>7}{'rejected':>9}"


def configure(parser: Parser) -> None:
    add(parser, "--self-test", "inject wrong, hanging and crashing candidates: status 0 if each is rejected for its reason")
    add(parser, "--clear", "forget everything that was tuned")
    add(parser, "--json", "print one JSON object")
    add_device(parser)
    add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    """Tune the preset's GEMMs until done, out of time or interrupted; results are saved as they come. Returns 130 after Ctrl-C."""
    from barellm.tools.plan import devices

    devices.check(args.device)
    if args.clear:
        return _clear(args)
    if args.self_test:
        return _self_test(args)
    from barellm.assembly.build import resolved

    minutes = _minutes(args)
    config = configuration(args)
    config.check()
    config = resolved(config, args.device)
    train = config.train
    tuner, problems = (_on_gpu if args.device == "cuda" else _on_cpu)(config)
    found: list[Verdict] = []
    status, noun = "done", "kernels" if args.device == "cuda" else "GEMMs"

    def each(verdict: "Verdict") -> None:
        found.append(verdict)
        if not args.json:
            print(_line(verdict), flush=True)

    if not args.json:
        print(f"{config.preset}, batch {train.micro_batch_size} x {train.seq}, {train.dtype}: {len(problems)} {noun}")
        print(f"{tuner.machine}\n\n{HEAD}", flush=True)
    try:
        tuner.tune(problems, seconds=60 * minutes, each=each)
        if len(found) < len(problems):
            status = f"stopped after {minutes:g} minutes"
    except KeyboardInterrupt:
        status = "interrupted"
    improved = [v for v in found if v.best != v.default]
    if args.json:
        head = {"kind": "tune", "preset": config.preset, "batch": train.micro_batch_size}
        head |= {"seq": train.seq, "dtype": train.dtype}
        head |= {"machine": tuner.machine, "database": str(tuner.database.path), "status": status}
        print(json.dumps(head | {"products": len(problems), "tuned": [v.to_json() for v in found]}))
    else:
        for v in found:
            for name, reason in v.rejected:
                show(f"rejected for {v.problem}: {name}: {reason}")
            if v.rival:
                name, ratio = v.rival
                show(f"not kept for {v.problem}, since its bits are others: {name}, {ratio:.2f} of the default's time")
        done = f"{len(found)} of {len(problems)} {noun}, {len(improved)} faster than their default by more than noise"
        show(f"\n{status}: {done}; kept in {tuner.database.path}")
    return 130 if status == "interrupted" else 0


def _on_cpu(config: "Config") -> "tuple[Tuner, list[Any]]":
    """(the tuner, the GEMMs of the preset's training, evaluation and decoding programs as the CPU lowers them)."""
    from barellm.assembly.build import build_programs
    from barellm.cpu.isa import host
    from barellm.cpu.step import lower_and_plan
    from barellm.cpu.threads import thread_count
    from barellm.cpu.tuner.problem import problems_of
    from barellm.cpu.tuner.tuner import CpuTuner

    isa, threads = host(), thread_count()
    built = lower_and_plan(build_programs(config), isa=isa, threads=threads)
    calls = [call for program in ("forward_backward", "eval", "decode") for call in built.calls[program]]
    return CpuTuner(isa, threads, built.plan.arena_bytes), problems_of(calls)


def _on_gpu(config: "Config") -> "tuple[Tuner, list[Any]]":
    """(the tuner, the kernels to tune on the GPU). UserError without a GPU."""
    from barellm.assembly.build import build_programs
    from barellm.cuda import driver
    from barellm.cuda.kernel import Target
    from barellm.cuda.tuner.candidates import problems_of
    from barellm.cuda.tuner.tuner import CudaTuner

    target = Target.of(driver.device(), tf32=config.train.tf32)
    problems = problems_of(build_programs(config), target)
    return CudaTuner(target, problems), problems


def _minutes(args: argparse.Namespace) -> float:
    """The time limit from --minutes, which is a limit on tuning here; infinite if not given."""
    requested = getattr(args, "train.minutes")
    if requested is None:
        return math.inf
    try:
        minutes = float(requested)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise UserError(f"--minutes is {requested!r}, expected a number above 0")
    return minutes


def _line(v: "Verdict") -> str:
    gain = f"{100 * (1 / v.ratio - 1):+.1f} %" if v.best != v.default else ""
    words = f"{v.problem!s:<46}{v.gflops:>9.1f}{gain:>9}{v.tried:>7}{len(v.rejected):>9}\n  {v.default!s}"
    return words + f", best:\n  {v.best!s}" * (v.best != v.default)


def _clear(args: argparse.Namespace) -> int:
    """Delete all tuning results."""
    from barellm.cpu import tuning
    from barellm.runtime.tuner.database import clear

    removed = clear(tuning.folder())
    if args.json:
        print(json.dumps({"kind": "tune", "cleared": removed}))
    else:
        print(f"forgotten: what {removed} version{'' if removed == 1 else 's'} of the kernels had in {tuning.folder()}")
    return 0


def _self_test(args: argparse.Namespace) -> int:
    """Run the tuner's self-test and print each trial. Exit status 1 if one fails."""
    if args.device == "cuda":
        from barellm.cuda import driver
        from barellm.cuda.kernel import Target
        from barellm.cuda.tuner.tuner import self_test

        trials = self_test(Target.of(driver.device()))
    else:
        from barellm.cpu.threads import thread_count
        from barellm.cpu.tuner.tuner import self_test

        trials = self_test(threads=thread_count())
    passed = all(t.passed for t in trials)
    if args.json:
        rows: list[dict[str, Any]] = [vars(t) for t in trials]
        print(json.dumps({"kind": "tune self-test", "passed": passed, "candidates": rows}))
    else:
        for t in trials:
            verdict = f"rejected: {t.reason}" if t.reason else "not rejected"
            print(f"{'ok' if t.passed else 'WRONG':<6}{t.candidate:<16}{verdict}")
        print("every faulty candidate was rejected for its reason" if passed else "the tuner cannot be trusted here")
    return 0 if passed else 1
