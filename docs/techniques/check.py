"""Runs the commands of the rows, each in a folder of its own, and compares what they print."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from docs.techniques import FOLDER, GIVEN, ROOT, TEXTS, Bad, Row, rows

LIMIT = 60  # seconds of processor time of a command with all processes that it starts
PATIENCE = 600  # seconds that the checker itself waits: those in which it is stopped do not count


@dataclass(frozen=True)
class Outcome:
    wrong: list[str]  # empty where all is as expected
    seconds: float  # of processor time
    output: str


def furnish(folder: Path) -> None:
    """The files that commands find."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    for name in GIVEN:
        shutil.copyfile(FOLDER / name, folder / name)


def environment() -> dict[str, str]:
    """This interpreter's `python` and `barellm`, the packages of the checkout, no GPU unless a command asks for it, plain text."""
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), given.get("PATH"))))
    plain = {"BARELLM_SELF_CHECK": "0", "MPLBACKEND": "agg", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return given | plain | {"PATH": path, "PYTHONPATH": str(ROOT)}


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait(process: subprocess.Popen[str], patience: int) -> str | None:
    """What a process prints until it ends; None if it does not. Second by second: who stops a command stops the checker too."""
    for _ in range(patience):
        try:
            return process.communicate(timeout=1)[0]
        except subprocess.TimeoutExpired:
            pass
    return None


def outcome(row: Row, limit: int = LIMIT, patience: int = PATIENCE) -> Outcome:
    """Run a row's command. Processor seconds count, as a machine that does other work, or stops a process for a while, makes a
    command late but not longer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        furnish(folder)
        before = _spent()
        process = subprocess.Popen(
            ["bash", "-c", f"set -e -o pipefail; ulimit -t {limit + 1}\n{row.run}"],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        output, wrong = _wait(process, patience), []
        if output is None:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            wrong.append(f"did not end in {patience} s")
        seconds = _spent() - before
    if not wrong and process.returncode:
        wrong.append(f"status {process.returncode}")
    if seconds > limit:
        wrong.append(f"{seconds:.1f} s of processor time, expected at most {limit}")
    wrong += [text for each in row.expect if (text := each.missing(output))]
    return Outcome(wrong, seconds, output)


def chosen(names: Iterable[str], part: str) -> list[Row]:
    """The rows of these names, or all; of them the K-th of N parts, `part` being K/N, by a checksum of the name."""
    every = rows()
    for name in names:
        if name not in every:
            near = [other for other in every if name.lower() in other.lower()]
            raise Bad(f"no row is called {name!r}; " + (f"near: {', '.join(near)}" if near else "docs/techniques.md has all names"))
    some = [every[name] for name in names] or list(every.values())
    if part:
        k, slash, n = part.partition("/")
        if not (slash and k.isdecimal() and n.isdecimal() and int(n)):
            raise Bad(f"--part is {part!r}, expected K/N, as 3/5")
        some = [row for row in some if zlib.crc32(row.name.encode()) % int(n) == int(k) % int(n)]
    return some


def check(some: list[Row], verbose: bool = False) -> int:
    """Print a line for each row, and what a command printed where it failed. The status of the program."""
    began, failed, spent = time.monotonic(), [], 0.0
    for row in some:
        if row.gap:
            print(f"gap            {row.name}", flush=True)
            continue
        result = outcome(row)
        spent += result.seconds
        print(f"{'FAIL' if result.wrong else 'ok':4} {result.seconds:7.1f} s  {row.name}", flush=True)
        if result.wrong:
            failed.append(row.name)
        if result.wrong or verbose:
            lines = [*result.wrong, *(f"| {text}" for text in result.output.splitlines()[-40:])]
            print("".join(f"       {text}\n" for text in lines), end="", flush=True)
    gaps = sum(bool(row.gap) for row in some)
    took = time.monotonic() - began
    passed = len(some) - gaps - len(failed)
    print(f"{passed} as expected, {len(failed)} not, {gaps} gaps; {spent:.0f} s of processor time in {took:.0f} s")
    return 1 if failed else 0
