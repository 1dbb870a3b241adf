"""Show the code of a kernel: its IR, its assembly, and what that consists of. Without KERNEL the kernels of a preset are listed."""

import argparse
import json
from typing import Any

from barellm import models
from barellm.cli.parsing.options import add, add_device, add_weights, dtype
from barellm.config import overrides
from barellm.errors import UserError
from barellm.tools.inspect.device_code import line
from barellm.training.console import show

STAGES = {"cpu": ("summary", "ir", "asm"), "cuda": ("summary", "ir", "ptx", "sass")}


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options; `_check_options` refuses those of the other device."""
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="a kernel, an op, or a symbol of the list")
    add(parser, "--preset PRESET", "the preset whose kernels are meant (default: gpt2-124m)", "gpt2-124m")
    add(parser, "--dtype",
        "the dtype of the preset's matmuls (default: auto)", "auto", type=dtype,
        choices=("auto", "fp32", "bf16", "fp16"))  # fmt: skip
    add_device(parser, "cpu, or cuda, for which no GPU need be there")
    add(parser, "--isa NAME", "amx_bf16, avx512_bf16, avx512, avx2, generic, neon_bf16, neon (default: as used here)")
    add(parser, "--target TRIPLE", "another machine, e.g. aarch64-apple-darwin, with --isa")
    add(parser, "--arch NAME", "cuda: sm_80 to sm_120 (default: as used here)")
    add(parser, "--stage",
        "what to print (default: summary); asm: cpu only; ptx, sass: cuda only", "summary",
        choices=dict.fromkeys(stage for stages in STAGES.values() for stage in stages))  # fmt: skip
    add_weights(parser)
    add(parser, "--recompute", "take the programs that recompute activations")
    add(parser, "--json", "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print code (--stage) or summaries of the chosen kernels, or without KERNEL the list of the preset's. Compiles; returns 0."""
    from barellm.assembly.build import resolved
    from barellm.tools.inspect import kernels
    from barellm.tools.plan import devices

    devices.check(args.device)
    _check_options(args)
    changes = {"train.dtype": args.dtype, "train.recompute": args.recompute}
    config = resolved(overrides.changed(models.preset(args.preset), changes), args.device)
    on_cpu = args.device == "cpu"
    machine: Any = kernels.isa_named(args.isa, args.target) if on_cpu else kernels.arch_named(args.arch)
    used = kernels.used_by(config, machine, weights=args.weights or "")
    chosen = kernels.select(used, args.kernel) if args.kernel else used
    isa, target = (machine.name, machine.triple or "this machine") if on_cpu else (f"sm_{machine.arch}", "cuda")
    head = {"preset": config.preset, "dtype": config.train.dtype, "isa": isa, "target": target}
    if args.stage != "summary":
        texts = {u.spec.symbol(): kernels.text(u.spec, machine, args.stage) for u in chosen}
        print(json.dumps(head | {args.stage: texts}) if args.json else "\n".join(texts.values()))
        return 0
    rows = [u.to_json() for u in chosen]
    if args.kernel:
        codes = [kernels.summary(u.spec, machine).to_json() for u in chosen]
        rows = [row | {"code": code} for row, code in zip(rows, codes, strict=True)]
    if args.json:
        print(json.dumps(head | {"kernels": rows}))
    else:
        show(f"{head['preset']}, {head['dtype']}, {head['isa']} ({head['target']}): {len(rows)} kernel instances")
        lines = _summary if on_cpu else _device_summary
        show("\n".join(line for row in rows for line in (lines(row) if args.kernel else [_line(row)])))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.stage not in STAGES[args.device]:
        raise UserError(f"--stage {args.stage} is not for {args.device} (known: {', '.join(STAGES[args.device])})")
    for name in ("arch",) if args.device == "cpu" else ("isa", "target"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} is not for --device {args.device}")


def _constants(row: dict[str, Any]) -> str:
    def text(name: str, value: Any) -> str:
        return ("x" if name == "dims" else "+").join(map(str, value)) if isinstance(value, tuple) else f"{value}"

    return ", ".join(f"{k}={text(k, v)}" for k, v in row["constants"].items())


def _line(row: dict[str, Any]) -> str:
    kinds = " ".join(str(kind or "-") for kind in row["operands"])
    return f"{row['symbol']:<44}{row['calls']:>5} calls of {'/'.join(row['ops'])} ({kinds}) {_constants(row)}"


def _head(row: dict[str, Any]) -> list[str]:
    return ["", f"{row['symbol']}: {'/'.join(row['ops'])}", f"  constants            {_constants(row)}"]


def _summary(row: dict[str, Any]) -> list[str]:
    """A CPU kernel's summary in lines: instructions, inner loop, register spills."""
    code, inner = row["code"], row["code"]["inner"]
    lines = [
        *_head(row),
        f"  instructions         {code['instructions']}, {len(code['loops'])} innermost loops",
        f"  widest register      {code['widest'] or 'scalar'}",
    ]
    if inner:
        products = " + ".join(f"{n} {name}" for name, n in inner["multiply_adds"].items()) or "no multiply-adds"
        spills = inner["stack_references"]
        lines += [
            f"  inner loop {inner['label']:<10}{inner['instructions']} instructions: {products}, {inner['loads']} loads, "
            f"{inner['stores']} stores, {inner['accumulators']} accumulators",
            f"  register spills      {spills}{'  <-- not enough registers' if spills else ''}",
        ]
    spilling = [x for x in code["loops"] if inner and x["label"] != inner["label"] and x["stack_references"]]
    lines += [f"  also {x['label']:<16}{x['stack_references']} stack references" for x in spilling]
    if "weights" in row["constants"]:
        lines += [f"  {line}" for line in _of_a_weight(row, code["loops"], code["widest"])]
    return lines


def _of_a_weight(row: dict[str, Any], loops: list[dict[str, Any]], widest: str) -> list[str]:
    """Instructions per quantized weight, from the kernel's loop for one row (the one with the fewest multiply-adds). With byte dot
    products a lane holds four bytes, and a weight may take several."""
    from barellm.cpu.kernels.gemm.quantized_digits import products_of_a_weight

    lanes = {"zmm": 16, "ymm": 8}.get(widest, 4)
    byte_products = any("vpdpbusd" in loop["multiply_adds"] for loop in loops)
    if byte_products:
        weights_of = {"vpdpbusd": 4 / products_of_a_weight(row["constants"]["weights"], row["operands"][2])}
    else:
        weights_of = {"vdpbf16ps": 2, "bfdot": 2}  # in a lane; other instructions: 1
    counts = []  # (weights, instructions) of each loop that has any
    for loop in loops:
        other = 0 if byte_products else 1
        in_a_lane = int(sum(n * weights_of.get(name, other) for name, n in loop["multiply_adds"].items()))
        if in_a_lane:
            counts.append((lanes * in_a_lane, loop["instructions"]))
    if not counts:
        return []
    weights, instructions = min(counts, key=lambda count: count[0])
    return [f"one row              {instructions} instructions for {weights} weights: {instructions / weights:.2f} each"]


def _device_summary(row: dict[str, Any]) -> list[str]:
    """A GPU kernel's summary in lines: registers, shared memory, instruction counts."""
    code = row["code"]
    spills = f"{code['spills']}{'  <-- not enough registers' if code['spills'] else ''}"
    return [
        *_head(row),
        f"  operands             {', '.join(row['operands'])}",
        f"  options              {', '.join(f'{name} {value}' for name, value in row['options'].items())}",
        f"  registers            {code['registers']} a thread, {code['stack']} bytes of stack, spills {spills}",
        f"  shared memory        {code['shared']:,} bytes a block",
        f"  instructions         {code['instructions']}: {line(code['counts'])}",
    ]
