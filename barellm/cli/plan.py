"""Memory and roofline plan of a training run, to the byte and to the operation, without running or allocating anything."""

import argparse
import itertools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from barellm.cli.parsing import help, options
from barellm.errors import UserError
from barellm.runtime.ranks import ALONE, Planned
from barellm.training.console import show

if TYPE_CHECKING:
    from barellm.config import Config
    from barellm.program.ranks import Ranks
    from barellm.tools.plan.roofline import Ceiling

MOST_SHOWN = 8  # ranks whose memory is shown one by one


def configure(parser: options.Parser) -> None:
    """The command's options. `rare`: those that --help shows on request; last, a key of any configuration is an option."""
    rare = help.Rare(parser)
    options.add(parser, "--measure",
        "show the roofline of a step; an estimate by the rates of this machine, which are measured once")  # fmt: skip
    options.add(parser, "--card NAME",
        "plan for a GPU that need not be here, with the roofline of a step by its data sheet: a100, h100, h200, rtx3060, "
        "rtx3090, rtx4090 or rtx5090")  # fmt: skip
    rare.add_argument(
        "--gemm", type=int, nargs=3, metavar=("M", "N", "K"),
        help="with --device cuda: only the tiling and split-K of one GEMM (fprop, dgrad and wgrad)",
    )  # fmt: skip
    options.add(rare, "--compile",
        "with --device cuda: compile the GEMM kernels, to know their occupancy (blocks per multiprocessor)")  # fmt: skip
    options.add(parser, "--ranks N", "plan one of N processes that train together (docs/ranks.md)", least=1, type=int)
    options.add(rare, "--interconnect NAME",
        "with --ranks: scaling model of a step over this interconnect: memory, 1gbit, 1gbit-1ms, 10gbit, 100gbit, ib400, "
        "nvlink4 (docs/scale.md)")  # fmt: skip
    options.add(rare, "--mfu SHARE", "with --interconnect: model FLOPs utilization of a rank's matmuls (default: 0.4)", 0.4)
    options.add(parser, "--map", "print the memory map: every tensor's address and lifetime")
    options.add(parser, "--optim", "print which parameter gets which optimizer")
    options.add(parser, "--json", "print one JSON object instead of tables")
    options.add_device(parser, "cpu, or cuda, for which no GPU need be there")
    options.add_stage(parser, "the training stage that is planned alone, of a model whose runs have stages")
    options.add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the scaling model (--interconnect) or one GEMM's tiling (--gemm) in its place. Returns the exit status."""
    from barellm.assembly.build import resolved
    from barellm.models.training_schedule import only_stage
    from barellm.tools.plan import devices, plan

    devices.check(args.device)
    if args.card and not args.interconnect:
        args.device = "cuda"
    for name in ("gemm", "compile"):
        if getattr(args, name) and args.device != "cuda":
            raise UserError(f"--{name} is about a GPU's tiles: add --device cuda")
    config = options.configuration(args)
    config.check()
    ceiling = None
    if args.card:
        ceiling = devices.published(args.card)
    elif args.measure:
        from barellm.tools.plan.roofline import measured_ceiling

        ceiling = measured_ceiling(device=args.device)
    config = resolved(only_stage(config, args.stage) if args.stage else config, args.device)
    if args.interconnect:
        return _scale(args, config, ceiling)
    if args.gemm:
        return _one_gemm(args, config.train.dtype)
    ranks = _ranks(args, config)
    numbers, built = plan.report(config, ceiling=ceiling, device=args.device, ranks=ranks, card=args.card or "")
    if 1 < ranks.count <= MOST_SHOWN:
        numbers["of_each_rank"] = plan.of_each_rank(config, ranks.count)
    tilings, lines = _gemms(args, built, numbers["step"], config) if args.device == "cuda" else ([], [])
    numbers |= {"gemms": tilings} if tilings else {}
    if args.json:
        numbers |= {"map": plan.memory_map(built)} if args.map else {}
        print(json.dumps(numbers | ({"optimizers": plan.optimizers(built, config)} if args.optim else {})))
        return 0
    show("\n".join(_tables(numbers) + lines))
    if args.optim:
        show("\n" + "\n".join(_optimizers(plan.optimizers(built, config))))
    if args.map:
        print("\n" + "\n".join(_map(plan.memory_map(built))))
    return 0


def _ranks(args: argparse.Namespace, config: "Config") -> "Ranks":
    """The first of --ranks, or this process alone."""
    from barellm.training import agreement

    if args.ranks is None:
        return ALONE
    ranks = Planned(0, args.ranks)
    agreement.check(config, device=args.device, ranks=ranks)
    return ranks


def _scale(args: argparse.Namespace, config: "Config", ceiling: "Ceiling | None") -> int:
    """Print the scaling model's prediction. Without --measure or --card the roofline is an H100's."""
    from barellm.tools.plan import devices, scale

    if args.ranks is None:
        raise UserError(f"--interconnect is {args.interconnect}, expected --ranks too, at least 1")
    if not 0 < args.mfu <= 1:
        raise UserError(f"--mfu is {args.mfu:g}, expected more than 0 and at most 1")
    ceiling = ceiling or devices.published("h100")
    found = scale.prediction(config, args.ranks, args.interconnect, ceiling=ceiling, utilisation=args.mfu)
    print(json.dumps(found)) if args.json else show("\n".join(scale.table(found)))
    return 0


def _one_gemm(args: argparse.Namespace, dtype: str) -> int:
    """Print the tiling of the GEMM of --gemm and of its gradients."""
    from barellm.cuda.kernel import Sizes
    from barellm.tools.plan import devices, waves

    M, N, K = args.gemm
    if min(M, N, K) < 1:
        raise UserError(f"--gemm is {M} {N} {K}, expected sizes of at least 1")
    built = devices.lower({"gemm": waves.one_gemm(M, N, K, dtype)}, devices.target_of(args.card) if args.card else "cuda")
    tilings, lines = _tilings(args, built, ["gemm"], Sizes(batch=M))
    print(json.dumps({"dtype": dtype, **built.machine, "gemms": tilings})) if args.json else show("\n".join(lines))
    return 0


def _gemms(args: argparse.Namespace, built: Any, step: Iterable[str], config: "Config") -> tuple[list[Any], list[str]]:
    from barellm.cuda.kernel import Sizes

    tilings, lines = _tilings(args, built, step, Sizes(config.train.micro_batch_size, config.train.seq))
    return tilings, ["", *lines]


def _tilings(args: argparse.Namespace, built: Any, programs: Iterable[str], sizes: Any) -> tuple[list[Any], list[str]]:
    """(tilings as JSON, lines) of the programs' GEMMs; --compile takes occupancy from compiled kernels."""
    from barellm.tools.plan import devices, waves

    card = args.card or "h100"
    sheet, codes = devices.sheet(card), {}
    if args.compile:
        from barellm.cuda.compile import compiled

        codes = compiled(waves.specifications(built, programs), built.target.arch, processes=2)
    found = waves.gemms(built, programs, sizes, codes)
    tilings = [{**tiling.to_json(sheet), "count": count, "card": card} for tiling, count in found.items()]
    about = f"GEMMs on {built.target.sms} multiprocessors; roofline by {card}'s data sheet"
    others = ", ".join(f"{name} {count}" for name, count in waves.uncounted(built, programs).items())
    lines = [about, *waves.table(found, sheet, known=args.compile)]
    return tilings, [*lines, f"not counted, as their tiles are not known here: {others}"] if others else lines


def _tables(n: dict[str, Any]) -> list[str]:
    """The plan in lines: memory, operations by family, fused ops, roofline. `n`: the numbers of `plan.report`, those of --json."""
    from barellm.tools.plan.devices import where

    rank = f" of rank {n['rank']} of {n['ranks']}" if "rank" in n else ""
    trained = f", {n['trained']:,} of them trained" if n["trained"] != n["parameters"] else ""
    mode = f"{n['dtype']}{', recompute' if n['recompute'] else ''}"
    lines = [
        f"{n['preset']}: {n['parameters']:,} parameters{trained}, micro-batch {n['batch']} x {n['seq']}{rank}, {mode}; {where(n)}",
        "",
        f"{'memory':<28}{'bytes':>18}{'MiB':>12}",
    ]
    rows = [(name.replace("_", " "), nbytes) for name, nbytes in n["memory"].items() if nbytes]
    rows.append(("memory pool", n["arena_bytes"]))
    lines += [f"  {name:<26}{nbytes:>18,}{nbytes / 2**20:>12.1f}" for name, nbytes in rows]
    lines += [
        f"  peak live memory: {n['live_peak_bytes']:,} bytes (pool / peak: {n['ratio']:.4f})",
        f"  in {n['peak_at']['program']}: {n['peak_at']['op']}",
        f"  whether it fits is not known: {n['limit_source']}"
        if n["fits"] is None
        else f"  {'fits' if n['fits'] else 'DOES NOT FIT'}: {n['limit_source']} is {n['limit_bytes']:,} bytes",
        *(
            f"  rank {rank}: optimizer state {row['optimizer_state']:,}, memory pool {row['arena_bytes']:,} bytes"
            for rank, row in enumerate(n.get("of_each_rank", ()))
        ),
        "",
        f"{'micro-batch + update, unfused':<29}{'ops':>7}{'GFLOP':>14}{'GB':>12}",
    ]
    lines += [
        f"  {name:<26}{row['count']:>8}{row['flops'] / 1e9:>14.3f}{row['bytes'] / 1e9:>12.3f}"
        for name, row in n["families"].items()
    ]
    timed, batches = "expected_s" in n, f"{n['accumulate']} micro-batch{'es' * (n['accumulate'] != 1)}"
    lines += ["", f"{f'a step of {batches}, fused':<39}{'ops':>6}{'GFLOP':>13}{'GB':>10}{'roofline ms' * timed:>12}".rstrip()]
    for row in n["ops"]:
        name = f"{row['program']} {row['op']}"
        tail = f"{row['expected_s'] * 1e3:>12.2f}" if timed else ""
        lines.append(f"  {name:<37}{row['count']:>6g}{row['flops'] / 1e9:>13.3f}{row['bytes'] / 1e9:>10.3f}{tail}")
    fused = ", ".join(f"{name} {count}" for name, count in n["fusions"].items())
    calls = ", ".join(f"{name} {n['programs'][name]['calls']}" for name in n["step"])
    what = "launches" if n["device"] == "cuda" else "calls"
    lines += ["", f"fusions: {fused}", f"{what}: {calls}", f"kernels to compile: {n['kernels']}"]
    lines.append(f"a step: {n['tokens']:,} tokens in {batches}, {n['model_flops']:,} model FLOPs")
    if timed:
        peaks = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in n["ceiling"]["flops"].items())
        rates = ", ".join(f"{kind} {rate / 1e9:.0f} GB/s" for kind, rate in n["ceiling"]["bandwidth"].items())
        speed = n["tokens"] / n["expected_s"]
        lines += [f"{n['ceiling']['from']}: {peaks}; {rates}"]
        lines += [f"roofline (estimate): {n['expected_s']:.4f} s a step, {speed:,.0f} tokens/s"]
    return lines


def _optimizers(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["optimizer, peak learning rate, hyperparameters: tensors, their shape and number"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        options = ", ".join(f"{name} {value}" for name, value in r["options"].items())
        groups.setdefault(f"{r['optimizer']}, {r['rate']:.3g}, {options}", []).append(r)
    for rule, same in groups.items():
        lines += ["", rule] + [f"  {r['names']:<44}{' x '.join(map(str, r['shape'])):>24}{r['count']:>8}" for r in same]
    return lines


def _map(rows: list[dict[str, Any]]) -> list[str]:
    """Each program's own below its name, with the ops that they are alive in."""
    lines: list[str] = []
    for program, found in itertools.groupby(rows, lambda r: r.get("program", "always alive")):
        lines += [*[""] * bool(lines), program, f"{'offset':>16}{'bytes':>16}  {'role' if 'always' in program else 'ops':<11}name"]
        for r in found:
            alive = f"{r['first']}..{r['last']}" if "program" in r else r["role"]
            lines.append(f"{r['offset']:>16,}{r['bytes']:>16,}  {alive:<11}{r['name']}")
    return lines
