"""Benchmark a training step or single kernels against their rooflines, also against other programs (baselines)."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from barellm import models
from barellm.cli.parsing import help, options
from barellm.config import Config
from barellm.errors import UserError
from barellm.training.console import show

KINDS = ("step", "ops", "gemm", "attention")
STEPS = 5


def configure(parser: options.Parser) -> None:
    """The command's options. `rare`: those that --help shows on request; texts that begin with a WHAT hold for that one alone."""
    rare = help.Rare(parser)
    text = "step: a training step (the default); ops: each kernel against its roofline; gemm: each matmul by itself; attention: "
    text += "causal attention over lengths and head sizes"
    parser.add_argument("what", nargs="?", default="step", choices=KINDS, metavar="WHAT", help=text)
    text = "step, ops, attention, gemm: baselines to compare with: all that are installed, torch, llmc=PATH; for gemm torch, or "
    options.add(parser, "--baselines --peers LIST", text + "on a GPU cublaslt", dest="peers")
    options.add(rare, "--interleave N", "step --baselines, gemm, attention: interleaved rounds (default: 7)", least=1, type=int)
    options.add(parser, "--out FILE.json", "where the result goes (with --baselines: runs/bench/)")
    options.add(rare, "--publish",
        "put the result among the project's own in benchmarks/results/, by processor, and make the tables again")  # fmt: skip
    options.add(rare, "--tokens LIST", "gemm: numbers of tokens (default: batch x seq), as in 256,1024")
    options.add(rare, "--share N",
        "attention: query heads of each key and value head (grouped-query attention, default: 1)", type=int)  # fmt: skip
    options.add(rare, "--digest", "step: add a hash of all weights and states after the steps")
    options.add(rare, "--serve", 'step: a line "N" of standard input runs N steps, until its end')
    options.add(parser, "--json", "print one JSON object last")
    options.add_device(parser, "auto, cpu or cuda", "auto")
    options.add_stage(parser)
    options.add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and save the result; `step --serve` runs steps on request instead."""
    from barellm.assembly.build import chosen_device, resolved
    from barellm.checkpoint import storage
    from barellm.models.training_schedule import only_stage
    from barellm.tools.plan import devices

    config = options.configuration(args)
    config.check()
    args.device = chosen_device(args.device, config)
    devices.check(args.device)
    config = resolved(only_stage(config, args.stage), args.device)
    if args.what == "step" and args.serve:
        from barellm.tools.profile import step

        step.serve(config, device=args.device)
        return 0
    _check_publish(args, config)
    if args.out:
        _try(Path(args.out))
    result, text = _measured(args, config)
    print(json.dumps(result)) if args.json else show("\n".join(text))  # before the disk may turn out to be full
    out = _out(args, config, result)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        storage.replace_file(out, (json.dumps(result, indent=1) + "\n").encode())
        if not args.json:
            print(f"samples: {out}")
    if args.publish:
        in_checkout("baselines").write_tables()
    return 0


def in_checkout(name: str, option: str = "--baselines") -> Any:
    from barellm.tools.bench.description import in_checkout

    return in_checkout(name, option)


def _try(out: Path) -> None:
    """OSError where nothing can be written there: said now, not after minutes of measuring."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = not out.exists()
    with out.open("a"):
        pass
    if new:
        out.unlink()


def _measured(args: argparse.Namespace, config: Config) -> tuple[dict[str, Any], list[str]]:
    """Run the chosen benchmark: (result for JSON, lines for the terminal)."""
    rounds = _rounds(args)
    report: Callable[[str], None] = (lambda line: None) if args.json else show
    chosen, baseline = _peers(args)
    if args.what == "gemm":
        from barellm.tools.bench import gemms

        report("\n".join(_gemm_head({"torch": "PyTorch", "cublaslt": "cuBLASLt"}.get(baseline, ""))))
        result = gemms.measure(
            config, tokens=_tokens(args, config), rounds=rounds, report=lambda r: report(_gemm_line(r)), device=args.device,
            baseline=baseline,
        )  # fmt: skip
        return result, _gemm_summary(result)
    if args.what == "attention":
        from barellm.tools.bench import attentions

        # Its lines are the report, written as they come.
        given = {"torch": bool(chosen), "rounds": rounds, "report": report, "device": args.device}
        return attentions.measure(config.train.dtype, share=1 if args.share is None else args.share, **given), []
    if args.what == "ops":
        from barellm.tools.bench import ops

        result = ops.measure(config, steps=warm_steps(args) or STEPS, device=args.device)
        if chosen:
            result |= in_checkout("baselines").torch_ops(config, result["ops"])
        return result, _ops_lines(result)
    if chosen:
        result = in_checkout("baselines").measure(config, chosen, rounds=rounds, report=report, device=args.device)
        return result, _peers_lines(result)
    from barellm.tools.profile import step

    result = step.measure(config, steps=warm_steps(args) or STEPS, digest=args.digest, device=args.device)
    return result, _step_lines(result)


def _rounds(args: argparse.Namespace) -> int:
    """The number of interleaved rounds. UserError for options that this benchmark or device does not have."""
    what, on_cpu = args.what, args.device == "cpu"
    interleaved = what in ("gemm", "attention") or (what == "step" and args.peers is not None)
    if args.interleave is not None and not interleaved:
        raise UserError("--interleave is for step --baselines, gemm and attention")
    if args.tokens is not None and what != "gemm":
        raise UserError("--tokens is for gemm")
    if args.share is not None and what != "attention":
        raise UserError("--share is for attention")
    rounds = 7 if args.interleave is None else args.interleave
    if args.peers is not None and what == "ops" and not on_cpu:
        raise UserError(f"--baselines is not for bench ops on {args.device}")
    if args.peers == "cublaslt" and what == "gemm" and on_cpu:
        raise UserError("--baselines cublaslt is for bench gemm --device cuda: on a CPU it knows --baselines torch")
    return rounds


def _peers(args: argparse.Namespace) -> tuple[dict[str, str] | None, str]:
    """(baselines by name or None, name of the baseline of gemm or ops or ""), as --baselines says."""
    if args.peers is None:
        return None, ""
    if args.what == "gemm" and args.peers == "cublaslt":
        return None, "cublaslt"
    chosen = in_checkout("baselines").chosen(args.peers)
    if args.what != "step" and list(chosen) != ["torch"]:
        more = ", or --baselines cublaslt" if args.what == "gemm" and args.device == "cuda" else ""
        raise UserError(f"bench {args.what} knows PyTorch's ops only: --baselines torch{more}")
    return chosen, "torch"


def _check_publish(args: argparse.Namespace, config: Config) -> None:
    """UserError if --publish has no place for this result, before anything is measured."""
    if not args.publish:
        return
    if args.out:
        raise UserError("--publish chooses the file itself: leave out --out")
    if args.what not in ("step", "attention") or args.peers is None:
        raise UserError("--publish is for step --baselines and attention --baselines")
    in_checkout("baselines", "--publish")
    if args.what != "attention" and config.model != models.preset(config.preset).model:
        raise UserError(f"--publish is for the models of presets: this one is not {config.preset}'s")


def _out(args: argparse.Namespace, config: Config, r: dict[str, Any]) -> Path | None:
    """The file for the result: --out; else, for the kinds that need long, a file in runs/ or where --publish puts it."""
    if args.out:
        return Path(args.out)
    if r["kind"] != "peers" and not (r["kind"] == "attention" and "peer" in r):
        return None
    folder = in_checkout("baselines").results() if args.publish else Path("runs", "bench")
    return folder / f"{'-'.join(_name(args, config, r))}.json"


def _name(args: argparse.Namespace, config: Config, r: dict[str, Any]) -> list[str]:
    """Parts of a result's file name: everything that changes its numbers."""
    on_gpu = ["cuda"] * (args.device == "cuda")
    if r["kind"] == "attention":
        return ["attention", *on_gpu, r["dtype"], *([f"share-{args.share}"] if (args.share or 1) > 1 else [])]
    train, moments = config.train, config.optim.moments
    changed = ["changed"] * (config.model != models.preset(config.preset).model)
    parts = [config.preset, *changed, f"{train.micro_batch_size}x{train.seq}", train.dtype]
    backend = [train.gemm_backend] * (train.gemm_backend != "barellm")
    parts += on_gpu + ["recompute"] * train.recompute + backend + ["tf32"] * train.tf32
    return parts + [f"moments-{moments}"] * (moments != "fp32")


def warm_steps(args: argparse.Namespace) -> int | None:
    """Warm steps to time: --steps, which is not the preset's number of training steps. None where it is not given."""
    requested = getattr(args, "train.steps")
    if requested is None:
        return None
    if not requested.isdigit() or int(requested) < 1:
        raise UserError(f"--steps is {requested!r}, expected at least 1")
    return int(requested)


def _tokens(args: argparse.Namespace, config: Config) -> list[int]:
    if args.tokens is None:
        return [config.train.micro_batch_size * config.train.seq]
    parts = args.tokens.split(",")
    if not all(part.isdigit() and 1 <= int(part) <= 1 << 16 for part in parts):
        raise UserError(f"--tokens is {args.tokens!r}, expected numbers from 1 to 65536, as in 256,1024")
    return [int(part) for part in parts]


def _gemm_head(baseline: str) -> list[str]:
    lines = ["% of peak, operands in the caches (warm) and not (cold); +: adds to a gradient"]
    lines += [f"times as fast as {baseline}, warm and cold"] * bool(baseline)
    head = f"{'layer':<12}{'op':<18}{'M x N x K':<17}{'ms':>9}{'warm %':>7}{'cold %':>7}{'times' * bool(baseline):>10}"
    return [*lines, "", head.rstrip()]


def _gemm_line(r: dict[str, Any]) -> str:
    op = f"{r['op']}{' +' * (r['mode'] == 'add')}"
    name = f"{r['layer']:<12}{op:<18}{'{tokens}x{N}x{K}'.format(**r):<17}"
    baseline = f"{r['times_peer_warm']:>5.2f}{r['times_peer_cold']:>5.2f}" if "times_peer_cold" in r else ""
    return f"{name}{r['warm_s'] * 1e3:>9.3f}{r['warm_percent']:>7.1f}{r['cold_percent']:>7.1f}{baseline}"


def _gemm_summary(r: dict[str, Any]) -> list[str]:
    """The closing lines of bench gemm: least share of the roofline, and speedup over the baseline by pass."""
    lowest = {kind: min(row[f"{kind}_percent"] for row in r["products"]) for kind in ("warm", "cold")}
    from barellm.tools.plan.devices import where

    what = "{preset}, {dtype}, ".format(**r) + where(r["machine"])
    lines = [f"{what}, {len(r['products'])} GEMMs: at least {lowest['warm']:.1f} % warm, {lowest['cold']:.1f} % cold"]
    if "peer" not in r:
        return lines
    from barellm.tools.bench.gemms import speedups_by_pass

    lines.append(f"times as fast as {r['peer']}, which fuses nothing; least, median, greatest:")
    for which, kinds in speedups_by_pass(r["products"]).items():
        speedups = "".join(f"  {kind} " + " ".join(f"{n:.2f}" for n in numbers) for kind, numbers in kinds.items())
        lines.append(f"  {which:<6}{speedups}")
    return lines


def title_line(r: dict[str, Any]) -> str:
    from barellm.tools.plan.devices import where

    return "{preset}, batch {batch} x {seq}, {dtype}, ".format(**r) + where(r)


def ceiling_line(r: dict[str, Any]) -> str:
    rates = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in r["ceiling"]["bandwidth"].items())
    peaks = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in r["ceiling"]["flops"].items())
    return f"peak GFLOP/s: {peaks}; memory GB/s: {rates}"


def _step_lines(r: dict[str, Any]) -> list[str]:
    """The result of bench step (`profile.step.step_result`'s JSON, here `r`) as lines for the terminal."""
    split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in r["first_step_split"].items())
    speed = f"{r['median_s'] * 1e3:.1f} ms (median of {r['steps']}, least {r['min_s'] * 1e3:.1f})"
    peak = f"{r['percent_of_peak']:.1f} % of {r['peak_flops'] / 1e9:.0f} GFLOP/s (measured)"
    lines = [
        title_line(r),
        f"step        {speed}, {r['tokens_per_s']:,.0f} tokens/s",
        f"operations  {r['flops'] / 1e9:,.2f} GFLOP, {peak}",
        f"first step  {r['first_step_s']:.2f} s after the start",
        f"         {split}",
        f"memory      arena {r['arena_bytes']:,} bytes; peak of the process {r['peak_rss_bytes']:,}",
        f"            the process added {r['rss_added_bytes']:,} ({100 * (r['rss_added_over_plan'] - 1):+.1f} %)",
        f"warm steps  {r['minor_faults']} page faults at most, {r['python_calls']} Python calls, "
        f"{r['voluntary_switches']} voluntary switches",
    ]
    return lines + ([f"digest      {r['digest']}"] if "digest" in r else [])


def _ops_lines(r: dict[str, Any]) -> list[str]:
    """The result `r` of bench ops as a table, the slowest op first; columns of `alone_s` and the baseline only where measured."""
    columns = {"n": 4, "ms": 9, "% step": 7, "GFLOP/s": 8, "GB/s": 6, "% roof": 7}
    columns |= {"alone ms": 9} if "alone_s" in r["ops"][0] else {}
    columns |= {"/ torch": 10} if "peer" in r else {}
    head = f"{'op':<30}" + "".join(f"{name:>{width}}" for name, width in columns.items())
    lines = [title_line(r), ceiling_line(r), "", head]
    for row in sorted(r["ops"], key=lambda row: -row["s"]):
        rates = f"{row['flops'] / row['s'] / 1e9:>8.1f}{row['bytes'] / row['s'] / 1e9:>6.1f}"
        share = f"{row['s'] * 1e3:>9.3f}{100 * row['s'] / r['ops_s']:>7.1f}"
        bound = f"{row['percent_of_bound']:>7.1f}" + (f"{row['alone_s'] * 1e3:>9.3f}" if "alone_s" in row else "")
        baseline = f"{row['times_peer']:>10.2f}" if "times_peer" in row else ""
        name = f"{row['op']} {row['shape']}"
        lines.append(f"{name:<30}{row['count']:>4}{share}{rates}{bound}{baseline}")
    total = f"{r['ops_s'] * 1e3:.2f} ms of ops, {100 * r['bound_s'] / r['ops_s']:.1f} % of the roofline"
    baseline = [f"/ torch: ours alone over {r['peer']}, also in a loop"] if "peer" in r else []
    return [*lines, "", f"{total}; the step untraced {r['step_s'] * 1e3:.2f} ms", *baseline]


def _peers_lines(r: dict[str, Any]) -> list[str]:
    lines = [f"{r['preset']}, batch {r['batch']} x {r['seq']}, {r['dtype']}: roofline {r['bound_s'] * 1e3:.1f} ms"]
    lines.append(f"  {'':<30}{'ms':>9}{'/ ours':>9}{'first step s':>14}{'peak GB':>9}")
    for v in r["variants"]:
        times = f"{v['median_s'] * 1e3:>9.1f}{v['median_s'] / r['ours_s']:>8.2f}x"
        lines.append(f"  {v['name']:<30}{times}{v['first_step_s']:>14.1f}{v['peak_rss_bytes'] / 1e9:>9.2f}")
    best = f"{r['ratio_to_best']:.2f}x faster than the best baseline ({r['best_peer']})"
    return [*lines, f"  {r['percent_of_bound']:.1f} % of the roofline, {best}"]
