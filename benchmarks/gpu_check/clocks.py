"""The card's clocks, power and temperature while a stage runs, sampled by nvidia-smi: a time says little without them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "utilization.gpu": "busy_percent",
}
EVERY_MS = 200


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """A dictionary that is filled when the context ends; it stays empty without nvidia-smi."""
    found: dict[str, Any] = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield found
        return
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.kill()
            process.wait()
            out.seek(0)
            found |= summary(out.read())


def summary(text: str) -> dict[str, Any]:
    """Of lines of numbers: how many, and of each field the least, the median and the largest. The last line may be torn."""
    rows = [line.split(", ") for line in text.splitlines()]
    numbers = [[float(word) for word in row] for row in rows if len(row) == len(FIELDS) and all(map(_is_number, row))]
    if not numbers:
        return {}
    columns = dict(zip(FIELDS.values(), zip(*numbers, strict=True), strict=True))
    return {"samples": len(numbers)} | {name: [min(c), median(c), max(c)] for name, c in columns.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
