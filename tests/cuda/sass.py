"""What ptxas made of a kernel, as rows of the golden table: registers, shared memory, spills, the instructions that matter."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from barellm.cuda import step
from barellm.cuda.compile import Code, compiled
from barellm.cuda.kernel import Specialisation
from barellm.tools.inspect import device_code
from tests.cuda import cubin

SHARED = 232448  # bytes that a block may have on sm_90; sm_80 and sm_100 differ
COUNTED = ("HGMMA", "QGMMA", "WARPGROUP", "HMMA", "UTMALDG", "UTMASTG", "UTCHMMA")
RAW = {80: "SM80", 86: "SM86", 89: "SM89", 90: "SM90a", 100: "SM100a", 120: "SM120"}  # nvdisasm's names

Row = dict[str, int]


def rows(specs: Mapping[Specialisation, str], arch: int) -> dict[str, Row]:
    """A row of numbers for each specialisation, by its label. AssertionError where a cubin has other parameters than a launch."""
    codes = compiled(specs, arch, processes=step.processes())
    for spec, code in codes.items():
        cubin.hold(spec, code)
    found = [row_of(code, sass) for code, sass in zip(codes.values(), disassembled([*codes.values()], arch), strict=True)]
    labels = [label(spec) for spec in codes]
    assert len(set(labels)) == len(labels), "two specialisations have one label"
    return dict(zip(labels, found, strict=True))


def label(spec: Specialisation) -> str:
    """A specialisation in one line: its constants, its operands' types, options that are not the usual ones."""
    constants = " ".join(f"{name}={value}" for name, value in spec.constants if value is not None)
    operands = " ".join(f"{name}:{kind.lstrip('*')}" for name, kind in spec.signature if kind != "i32" and name != "scalars")
    loose = [n for n, kind in spec.signature if kind.startswith("*") and n not in spec.aligned]
    options = [f"{k}={v}" for k, v in spec.options if (k, v) not in (("num_warps", 4), ("num_stages", 3))]
    parts = [spec.name, constants, operands, " ".join([*options, *(f"{n} unaligned" for n in loose)])]
    return " | ".join(p for p in parts if p)


def disassembled(codes: Sequence[Code], arch: int) -> list[str]:
    """SASS of each cubin, without labels. All of it comes from one nvdisasm, whose start takes a third of a second: it reads their
    instructions one behind the other."""
    texts = [cubin.sections(code.cubin)[f".text.{code.name}"] for code in codes]
    ends = [*accumulate(map(len, texts))]
    found: list[list[str]] = [[] for _ in codes]
    for line in device_code.output("nvdisasm", b"".join(texts), "-b", RAW[arch]).splitlines():
        if at := ADDRESS.match(line):
            found[bisect(ends, int(at[1], 16))].append(line)
    assert all(found)
    return ["\n".join(lines) for lines in found]


def row_of(code: Code, sass: str | None = None) -> Row:
    """`sass`: where it is disassembled already."""
    found = device_code.read(code.cubin, shared=code.shared_bytes, sass=sass)
    assert code.registers == found.registers, f"{code.name}: {code.registers} registers in its attributes"
    counts = {"registers": found.registers, "stack": found.stack, "shared": found.shared, "spills": found.spills}
    counts |= {name: found.counts.get(name, 0) for name in COUNTED} | found.widths
    return {name: n for name, n in counts.items() if n or name in ("spills", "registers", "shared")}


def wrong(name: str, row: Row) -> list[str]:
    """What no kernel may have, golden or not."""
    found = []
    if row["spills"] or row.get("stack"):
        found.append(f"{name}: {row['spills']} instructions that spill, {row.get('stack', 0)} bytes of stack")
    if row["shared"] > SHARED:
        found.append(f"{name}: {row['shared']} bytes of shared memory, at most {SHARED}")
    if row.get("HGMMA", 0) >= 8 and row["WARPGROUP"] >= 2 * row["HGMMA"]:
        found.append(f"{name}: each of {row['HGMMA']} products is waited for before the next: ptxas has serialized them")
    if name.startswith("hopper_gemm") and not all(row.get(op) for op in ("HGMMA", "UTMALDG", "UTMASTG")):
        found.append(f"{name}: not done by HGMMA, UTMALDG and UTMASTG: {row}")
    return found


INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/")
LABEL = re.compile(r"(\.L_x_\d+):")
NO_RESULT = (
    "ST",
    "RED",
    "BAR",
    "BRA",
    "EXIT",
    "DEPBAR",
    "LDGSTS",
    "MEMBAR",
    "FENCE",
    "WARP",
    "HGMMA",
    "BSSY",
    "BSYNC",
    "UTMA",
    "SYNCS",
    "R2UR",
)


def overwritten(sass: str) -> list[str]:
    """Instructions that write a register which a product under way reads: ptxas before CUDA 13.3 may let them
    (triton-lang/triton#11781). A product reads its operand in registers until it is waited for, also around a loop."""
    code: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif i := INSTRUCTION.match(line):
            code.append((i[1], i[2], i[3]))
    found, reading = [], set()
    for k, (_, op, args) in enumerate(code):
        if op.startswith("HGMMA") and (operands := re.match(r"R\d+, R(\d+)", args)):
            reading = reading | {int(operands[1]) + n for n in range(4)}
        elif op.startswith("WARPGROUP.DEPBAR"):
            reading = set()
        found += _writers(code[k : k + 1], reading)
        back = re.search(r"\((\.L_x_\d+)\)", args) if op == "BRA" else None
        if back and labels[back[1]] <= k:
            found += _writers(code[labels[back[1]] :], reading)
    return found


def _writers(code: Iterable[tuple[str, str, str]], registers: set[int]) -> list[str]:
    """Up to the next wait."""
    found = []
    for at, op, args in code:
        if op.startswith("WARPGROUP.DEPBAR"):
            break
        to = None if op.startswith(NO_RESULT) else re.match(r"(?:U?P\w+, )?R(\d+)", args)
        size = 4 if ".128" in op or op.endswith(".4") else 2 if ".64" in op or "WIDE" in op or op.startswith("CS2R") else 1
        if to and registers & set(range(int(to[1]), int(to[1]) + size)):
            found.append(f"{at}: {op} {args}")
    return found
