"""Show where a training step's time goes: a table by op, a timeline for ui.perfetto.dev and a picture."""

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from barellm.cli.parsing.options import Parser, add, add_configuration, add_device, add_stage, configuration
from barellm.errors import UserError
from barellm.program.ranks import Ranks


def configure(parser: Parser) -> None:
    add(parser, "--out DIR", "folder for profile.json, timeline.json, profile.svg (default: runs/profile-PRESET-BATCHxSEQ-DTYPE)")
    add(parser, "--json", "print the content of profile.json instead of the table")
    add(parser, "--ranks N", "profile the first of N processes of this machine that train together", type=int)
    add_device(parser, "auto, cpu or cuda", "auto")
    add_stage(parser)
    add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    from barellm.distributed.dispatch import dispatched

    return dispatched("profile", args, _profile)


def _profile(args: argparse.Namespace, ranks: Ranks) -> int:
    """Profile this rank's steps, write the files and print the table. Exit status 1 if the parts do not add up to the step."""
    from barellm.assembly.build import chosen_device, resolved
    from barellm.cli.bench import warm_steps
    from barellm.models.training_schedule import only_stage
    from barellm.tools.plan import devices
    from barellm.tools.profile import profile
    from barellm.training import agreement, console

    steps = warm_steps(args)
    config = configuration(args)
    config.check()
    args.device = chosen_device(args.device, config, ranks=ranks.count)
    devices.check(args.device)
    agreement.check(config, device=args.device, ranks=ranks)
    config = resolved(only_stage(config, args.stage), args.device)
    train = config.train
    suffix = "-cuda" * (args.device == "cuda") + f"-{ranks.count}-ranks" * (ranks.count > 1)
    out = Path(args.out or f"runs/profile-{config.preset}-{train.micro_batch_size}x{train.seq}-{train.dtype}{suffix}")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file, expected a folder")
    made_folder = ranks.rank == 0 and not out.exists()
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    try:
        result = profile.measure(config, steps=steps, folder=out, device=args.device, ranks=ranks)
    except BaseException:
        if made_folder:
            with suppress(OSError):  # what was written stays
                out.rmdir()
        raise
    if ranks.rank:
        return 0
    if args.json:
        print(json.dumps(result))
    else:
        console.show("\n".join([*lines(result), f"files: {out}/{{{','.join(profile.FILES.values())}}}"]))
    return 0 if result["adds_up"] else 1


def lines(r: dict[str, Any]) -> list[str]:
    """The profile in lines: ops of each program with their kernels, then threads or GPU, then communication."""
    from barellm.cli.bench import ceiling_line, title_line
    from barellm.tools.profile import communication

    step = r["step_s"]
    columns = {"n": 4, "ms": 9, "wait ms": 8, "% step": 7, "GFLOP/s": 8, "GB/s": 6, "% roof": 7}
    head = "".join(f"{name:>{width}}" for name, width in columns.items())
    out = [title_line(r), ceiling_line(r)]
    for program in dict.fromkeys(row["program"] for row in sorted(r["ops"], key=lambda row: -row["s"])):
        out += ["", f"{program:<31}{head}"]
        for row in sorted((row for row in r["ops"] if row["program"] == program), key=lambda row: -row["s"]):
            name = f"{row['op']} {row['shape']}"
            times = f"{row['s'] * 1e3:>9.3f}{row['wait_s'] * 1e3:>8.3f}{row['percent_of_step']:>7.2f}"
            rates = f"{row['flops'] / row['s'] / 1e9:>8.1f}{row['bytes'] / row['s'] / 1e9:>6.1f}"
            out.append(f"{name:<31}{row['count']:>4}{times}{rates}{row['percent_of_bound']:>7.1f}")
            for symbol, part in row["kernels"].items():
                times = f"{part['s'] * 1e3:>9.3f}{part['wait_s'] * 1e3:>8.3f}{100 * part['s'] / step:>7.2f}"
                out.append(f"  {symbol:<29}{part['calls']:>4}{times}")
    out += ["", "% roof: of the roofline, an estimate; above 100 where tensors stay in caches"]
    out += _of_threads(r) if r["by_thread"] else _of_gpu(r)
    return out + (communication.lines(r["between_ranks"], step) if "between_ranks" in r else [])


def _of_gpu(r: dict[str, Any]) -> list[str]:
    step, timed = r["step_s"], len(r["timed_s"])
    return [
        "",
        f"step {step * 1e3:.3f} ms as usual (the median of {len(r['usual_s'])}); its launches {r['work_s'] * 1e3:.3f} ms (the "
        f"median of {timed} timed, with an event behind each launch): the GPU idles at least {100 * r['idle_s'] / step:.2f} %; "
        f"the ops' roofline is {100 * r['bound_s'] / step:.1f} % of it",
    ]


def _of_threads(r: dict[str, Any]) -> list[str]:
    """Lines on work, barriers and idle time of each thread, in ms. `r`: `profile.measure`'s result."""
    step, low_high = r["step_s"], "{:+.2f} to {:+.2f}".format(*r["tracing_quartiles_percent"])
    out = ["", f"{'thread':<10}" + "".join(f"{name:>14}" for name in ("work ms", "barriers ms", "idle ms", "missed %"))]
    for t in r["by_thread"]:
        parts = "".join(f"{t[name] * 1e3:>14.3f}" for name in ("work_s", "barrier_s", "idle_s"))
        out.append(f"{t['thread']:<10}{parts}{t['residual_percent']:>14.3f}")
    shares = ", ".join(f"{100 * r[f'{name}_s'] / step:.2f} % {name}" for name in ("work", "barrier", "idle"))
    out += [
        "",
        f"step {step * 1e3:.3f} ms (the median of {len(r['traced_s'])} traced): {shares}",
        f"the ops' roofline (estimate) is {100 * r['bound_s'] / step:.1f} % of it",
        f"tracing costs {r['tracing_percent']:+.2f} % (median of {len(r['traced_s'])} pairs, half of them {low_high})",
    ]
    if not r["adds_up"]:
        out.append("this profile does NOT add up: the parts of a thread miss more than 2 % of the step")
    return out
