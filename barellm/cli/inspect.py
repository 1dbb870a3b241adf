"""A kernel's IR, its assembly, and what its innermost loop consists of. Without KERNEL: the kernels that the preset uses."""

from __future__ import annotations

import argparse
from typing import Any

STAGES = ("summary", "ir", "asm")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="a kernel, an op, or a symbol of the list")
    parser.add_argument("--preset", default="gpt2-124m", metavar="PRESET", help="whose programs (default: gpt2-124m)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"), help="of the programs")
    parser.add_argument(
        "--isa", metavar="NAME", help="avx512_bf16, avx512, avx2, generic, neon_bf16, neon (default: as used here)"
    )
    parser.add_argument("--target", metavar="TRIPLE", help="another machine, e.g. aarch64-apple-darwin, with --isa")
    parser.add_argument("--stage", default="summary", choices=STAGES, help="what to print (default: summary)")
    parser.add_argument("--recompute", action="store_true", help="the programs with recomputed blocks")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    import json

    from barellm import overrides
    from barellm.config import preset
    from barellm.cpu import jit
    from barellm.profiling import kernels
    from barellm.training.machine import resolved

    changes = {"train.dtype": args.dtype, "train.recompute": args.recompute}
    config = resolved(overrides.changed(preset(args.preset), changes), "cpu")
    isa = kernels.isa_named(args.isa, args.target)
    used = kernels.used_by(config, isa)
    chosen = kernels.select(used, args.kernel) if args.kernel else used
    head = {
        "preset": config.preset,
        "dtype": config.train.dtype,
        "isa": isa.name,
        "target": isa.triple or "this machine",
    }
    if args.stage != "summary":
        texts = {u.spec.symbol(): u.spec.ir(isa) for u in chosen}
        if args.stage == "asm":
            texts = {symbol: jit.assembly(ir, isa) for symbol, ir in texts.items()}
        if args.json:
            print(json.dumps(head | {args.stage: texts}))
        else:
            print("\n".join(texts.values()))
        return 0
    rows = [u.to_json() for u in chosen]
    if args.kernel:
        rows = [row | {"code": kernels.summary(u.spec, isa).to_json()} for u, row in zip(chosen, rows, strict=True)]
    if args.json:
        print(json.dumps(head | {"kernels": rows}))
    else:
        print(f"{head['preset']}, {head['dtype']}, {head['isa']} ({head['target']}): {len(rows)} specialisations")
        print("\n".join(line for row in rows for line in (_summary(row) if args.kernel else [_line(row)])))
    return 0


def _constants(row: dict[str, Any]) -> str:
    return ", ".join(f"{k}={'x'.join(v) if isinstance(v, tuple) else v}" for k, v in row["constants"].items())


def _line(row: dict[str, Any]) -> str:
    kinds = " ".join(str(kind or "-") for kind in row["operands"])
    return f"{row['symbol']:<44}{row['calls']:>5} calls of {'/'.join(row['ops'])} ({kinds}) {_constants(row)}"


def _summary(row: dict[str, Any]) -> list[str]:
    code, inner = row["code"], row["code"]["inner"]
    lines = [
        "",
        f"{row['symbol']}: {'/'.join(row['ops'])}",
        f"  constants            {_constants(row)}",
        f"  instructions         {code['instructions']}, {len(code['loops'])} innermost loops",
        f"  widest register      {code['widest'] or 'scalar'}",
    ]
    if inner:
        products = " + ".join(f"{n} {name}" for name, n in inner["multiply_adds"].items()) or "no multiply-adds"
        spills = inner["stack_references"]
        lines += [
            f"  inner loop {inner['label']:<10}{inner['instructions']} instructions: {products}, {inner['loads']} loads, "
            f"{inner['stores']} stores, {inner['accumulators']} accumulators",
            f"  spills in it         {spills}{'  <-- registers do not suffice' if spills else ''}",
        ]
    others = [x for x in code["loops"] if inner and x["label"] != inner["label"] and x["stack_references"]]
    lines += [f"  also {x['label']:<16}{x['stack_references']} stack references" for x in others]
    return lines
