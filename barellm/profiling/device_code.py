"""What a CUDA kernel became: registers, stack, shared memory, and how often the instructions that matter stand in its machine code.

Reads what cuobjdump says of a cubin; Triton brings it along. Spilled registers live in local memory: every load and store of it
(LDL, STL) counts as a spill.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What is counted, by how a mnemonic begins. HGMMA, HMMA: tensor cores of Hopper, and before; UTMA*: bulk copies of the tensor
# memory accelerator; LDGSTS: copies to shared memory that nobody waits for; BAR, SYNCS: barriers.
COUNTED = ("HGMMA", "HMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDG", "LDGSTS", "STG", "LDS", "STS", "LDL", "STL", "FFMA", "FADD",
           "MUFU", "SHFL", "BAR", "SYNCS", "ATOMG", "RED")  # fmt: skip
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

    @property
    def spills(self) -> int:
        return self.counts.get("LDL", 0) + self.counts.get("STL", 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"spills": self.spills}


def count(sass: str) -> tuple[int, dict[str, int]]:
    """(instructions, how many there are of each that is COUNTED): "LDG.E.128" counts as LDG; NOPs, which pad, do not count."""
    names = Counter(m[1].split(".", 1)[0] for m in INSTRUCTION.finditer(sass))
    names.pop("NOP", None)
    return sum(names.values()), {name: names[name] for name in COUNTED if names[name]}


def read(cubin: bytes, *, shared: int) -> DeviceCode:
    """The code of a cubin with one kernel. `shared`: as above."""
    usage = _cuobjdump(cubin, "-res-usage")
    found = USAGE.search(usage)
    if not found:
        raise ValueError(f"cuobjdump names no kernel: {usage.strip()[:200]}")
    instructions, counts = count(_cuobjdump(cubin, "-sass"))
    return DeviceCode(int(found[1]), int(found[2]), shared, instructions, counts)


def _cuobjdump(cubin: bytes, what: str) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, what, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def line(counts: Mapping[str, int]) -> str:
    """`"4 HGMMA, 6 UTMALDG"`."""
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "none of those counted"
