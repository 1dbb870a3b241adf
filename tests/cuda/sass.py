"""What ptxas made of a kernel, as rows of the golden table: registers, shared memory, spills, the instructions that matter."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from barellm.cuda.compile import Code, compiled
from barellm.cuda.kernel import Spec
from barellm.profiling import device_code
from tests.cuda import cubin

SHARED = 232448  # bytes that a block may have on sm_90; sm_80 and sm_100 differ
COUNTED = ("HGMMA", "HMMA", "UTMALDG", "UTMASTG", "UTCHMMA")
WORKERS = 2

Row = dict[str, int]


def rows(specs: Mapping[Spec, str], arch: int) -> dict[str, Row]:
    """A row of numbers for each specialisation, by its label. AssertionError where a cubin has other parameters than a launch."""
    codes = compiled(specs, arch, processes=WORKERS)
    for spec, code in codes.items():
        cubin.hold(spec, code)
    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(row, codes.values()))
    labels = [label(spec) for spec in codes]
    assert len(set(labels)) == len(labels), "two specialisations have one label"
    return dict(zip(labels, found, strict=True))


def label(spec: Spec) -> str:
    """A specialisation in one line: its constants, its operands' types, options that are not the usual ones."""
    constants = " ".join(f"{name}={value}" for name, value in spec.constants if value is not None)
    operands = " ".join(
        f"{name}:{kind.lstrip('*')}" for name, kind in spec.signature if kind != "i32" and name != "scalars"
    )
    loose = [n for n, kind in spec.signature if kind.startswith("*") and n not in spec.aligned]
    options = [f"{k}={v}" for k, v in spec.options if (k, v) not in (("num_warps", 4), ("num_stages", 3))]
    parts = [spec.name, constants, operands, " ".join([*options, *(f"{n} unaligned" for n in loose)])]
    return " | ".join(p for p in parts if p)


def row(code: Code) -> Row:
    found = device_code.read(code.cubin, shared=code.shared_bytes)
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
    if name.startswith("hopper_gemm") and not all(row.get(op) for op in ("HGMMA", "UTMALDG", "UTMASTG")):
        found.append(f"{name}: not done by HGMMA, UTMALDG and UTMASTG: {row}")
    return found
