"""Measure: a training step, single kernels against the bound, or both beside PyTorch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from barellm.cli.options import add_configuration, configuration
from barellm.errors import UserError

KINDS = ("step", "ops", "peers")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=KINDS, metavar="WHAT", help="step: a training step; ops: each kernel against its bound; "
                        "peers: our step and PyTorch's, interleaved")  # fmt: skip
    parser.add_argument(
        "--digest", action="store_true", help="step: add a hash of all weights and states after the steps"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument(
        "--serve", action="store_true", help='step: a line "N" of standard input runs N steps, until its end'
    )
    parser.add_argument("--torch", action="store_true", help="ops: add the time of PyTorch's own op for the same work")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="peers: turns of every variant (default: 7)")
    parser.add_argument(
        "--out", metavar="FILE.json", help="peers: where every sample goes (default: benchmarks/results/)"
    )
    add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    from barellm.training.machine import resolved
    from barellm.training.run import check

    config = configuration(args)
    check(config)
    config = resolved(config, "cpu")
    if args.what == "step":
        from barellm.profiling import step

        if args.serve:
            step.serve(config)
            return 0
        result = step.measure(config, steps=_steps(args), digest=args.digest)
        text = _step_lines(result)
    elif args.what == "ops":
        from barellm.profiling import ops

        result = ops.measure(config, steps=_steps(args))
        if args.torch:
            from barellm.profiling import peers

            result |= peers.torch_ops(config, result["ops"])
        text = _ops_lines(result)
    else:
        from barellm.profiling import peers

        if args.rounds < 1:
            raise UserError(f"--rounds is {args.rounds}, expected at least 1")
        result = peers.measure(config, rounds=args.rounds, report=print if not args.json else lambda line: None)
        train = config.train
        name = f"{config.preset}-{train.batch}x{train.seq}-{train.dtype}.json"
        out = Path(args.out) if args.out else peers.FOLDER / "results" / name
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        text = [*_peers_lines(result), f"samples: {out}"]
    print(json.dumps(result) if args.json else "\n".join(text))
    return 0


def _steps(args: argparse.Namespace) -> int:
    """Warm steps to time: --steps, which is not the preset's number of training steps."""
    asked = getattr(args, "train.steps")
    if asked is None:
        return 5
    if not asked.isdigit() or int(asked) < 1:
        raise UserError(f"--steps is {asked!r}, expected at least 1")
    return int(asked)


def _step_lines(r: dict[str, Any]) -> list[str]:
    split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in r["first_step_split"].items())
    speed = f"{r['median_s'] * 1e3:.1f} ms (median of {r['steps']}, least {r['min_s'] * 1e3:.1f})"
    peak = f"{r['percent_of_peak']:.1f} % of {r['peak_flops'] / 1e9:.0f} GFLOP/s (measured)"
    lines = [
        f"{r['preset']}, batch {r['batch']} x {r['seq']}, {r['dtype']}, {r['isa']}, {r['threads']} threads",
        f"step        {speed}, {r['tokens_per_s']:,.0f} tokens/s",
        f"operations  {r['flops'] / 1e9:,.2f} GFLOP, {peak}",
        f"first step  {r['first_step_s']:.2f} s after the start: {split}",
        f"memory      arena {r['arena_bytes']:,} bytes; the process added {r['rss_added_bytes']:,} "
        f"({100 * (r['rss_added_over_plan'] - 1):+.1f} %), peak {r['peak_rss_bytes']:,}",
        f"warm steps  {r['minor_faults']} page faults at most, {r['python_calls']} Python calls, "
        f"{r['voluntary_switches']} voluntary switches",
    ]
    return lines + ([f"digest      {r['digest']}"] if "digest" in r else [])


def _ops_lines(r: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"{kind} {rate / 1e9:.0f} GB/s" for kind, rate in r["ceiling"]["bandwidth"].items())
    peaks = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in r["ceiling"]["flops"].items())
    columns = {"count": 6, "ms": 10, "% of step": 11, "GFLOP/s": 10, "GB/s": 8, "% of bound": 12, "alone ms": 10}
    columns |= {"/ torch": 10} if "peer" in r else {}
    head = f"{'op':<28}{'shape':<16}" + "".join(f"{name:>{width}}" for name, width in columns.items())
    lines = [
        f"{r['preset']}, batch {r['batch']} x {r['seq']}, {r['dtype']}, {r['isa']}, {r['threads']} threads",
        f"peak {peaks}; memory {rates}",
        "",
        head,
    ]
    for row in sorted(r["ops"], key=lambda row: -row["s"]):
        rates = f"{row['flops'] / row['s'] / 1e9:>10.1f}{row['bytes'] / row['s'] / 1e9:>8.1f}"
        share = f"{row['s'] * 1e3:>10.3f}{100 * row['s'] / r['ops_s']:>11.1f}"
        peer = f"{row['times_peer']:>10.2f}" if "times_peer" in row else ""
        name = f"{row['program']} {row['op']}"
        lines.append(
            f"{name:<28}{row['shape']:<16}{row['count']:>6}{share}{rates}{row['percent_of_bound']:>12.1f}{peer}"
        )
    total = f"{r['ops_s'] * 1e3:.2f} ms of ops, {100 * r['bound_s'] / r['ops_s']:.1f} % of the bound"
    peer = (
        [f"/ torch: ours alone over {r['peer']}, also in a loop; layernorm_dx with layernorm_dparams"]
        if "peer" in r
        else []
    )
    return [*lines, "", f"{total}; the step without stamps {r['step_s'] * 1e3:.2f} ms", *peer]


def _peers_lines(r: dict[str, Any]) -> list[str]:
    lines = [f"{r['preset']}, batch {r['batch']} x {r['seq']}, {r['dtype']}: bound {r['bound_s'] * 1e3:.1f} ms"]
    for v in r["variants"]:
        ratio = v["median_s"] / r["ours_s"]
        start, peak = v["first_step_s"], v["peak_rss_bytes"] / 1e9
        lines.append(
            f"  {v['name']:<26}{v['median_s'] * 1e3:>9.1f} ms  {ratio:>5.2f}x   first step {start:.1f} s, peak {peak:.2f} GB"
        )
    best = f"{r['ratio_to_best']:.2f}x faster than the best peer ({r['best_peer']})"
    return [*lines, f"  {r['percent_of_bound']:.1f} % of the bound, {best}"]
