"""The machine code of a CUDA kernel: registers, stack, shared memory, and how often it has the instructions that matter.

It is read from what cuobjdump and nvdisasm print about a cubin; Triton brings these tools along. (Its own disassembly drops half of
a kernel whose warps have roles.) Spilled registers live in local memory, so its loads and stores (LDL, STL) are spills."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What is counted, by how a mnemonic begins. HGMMA (of 8 bits QGMMA), HMMA, UTCHMMA: tensor cores of Hopper, before, after;
# IMMA, BMMA: of bytes and of single bits; WARPGROUP: where Hopper's begin, and are waited for; UTMA*: bulk copies of the tensor
# memory accelerator; LDGSTS: copies to shared memory that nobody waits for; BAR, SYNCS: barriers.
COUNTED = ("HGMMA", "QGMMA", "WARPGROUP", "HMMA", "IMMA", "BMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDG", "LDGSTS",
           "STG", "LDS", "STS", "LDL", "STL", "FFMA", "FADD", "MUFU", "SHFL", "BAR", "SYNCS", "ATOMG", "RED")  # fmt: skip
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
USAGE = re.compile(r"Function \S+:\s*\n\s*REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class DeviceCode:
    """`shared`: bytes for a block that a launch asks for. `stack`: bytes for a thread."""

    registers: int
    stack: int
    shared: int
    instructions: int
    counts: dict[str, int]
    widths: dict[str, int]  # loads and stores of global memory by bits: "LDG.128"

    @property
    def spills(self) -> int:
        return self.counts.get("LDL", 0) + self.counts.get("STL", 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"spills": self.spills}


def count(sass: str) -> tuple[int, dict[str, int], dict[str, int]]:
    """(instructions without NOP, counts of those in COUNTED, counts by access width): "LDG.E.128" is LDG, and LDG.128."""
    words = [m[1].split(".") for m in INSTRUCTION.finditer(sass)]
    names = Counter(name for name, *_ in words)
    names.pop("NOP", None)
    moves = [(name, rest) for name, *rest in words if name in ("LDG", "STG")]
    widths = Counter(f"{name}.{next((w for w in ('128', '64') if w in rest), '32')}" for name, rest in moves)
    return sum(names.values()), {name: names[name] for name in COUNTED if names[name]}, dict(widths)


def read(cubin: bytes, *, shared: int, sass: str | None = None) -> DeviceCode:
    """The code of a cubin with one kernel. `shared`: as above; `sass`: its disassembly, where it is known."""
    usage = output("cuobjdump", cubin, "-res-usage")
    found = USAGE.search(usage)
    if not found:
        raise ValueError(f"cuobjdump names no kernel: {usage.strip()[:200]}")
    return DeviceCode(int(found[1]), int(found[2]), shared, *count(sass or disassembled(cubin)))


def disassembled(cubin: bytes) -> str:
    """SASS."""
    return output("nvdisasm", cubin, "-c")


def output(tool: str, cubin: bytes, *options: str) -> str:
    """The output of a tool that Triton brings along, about a file with these bytes."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [getattr(knobs.nvidia, tool).path, *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def line(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "none of those counted"
