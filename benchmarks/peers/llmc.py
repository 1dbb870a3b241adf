"""The peer llm.c: its own program, built from its train_gpt2.c (CPU, fp32, OpenMP), on random weights and random tokens.

    gcc -Ofast -march=native -fopenmp -DOMP train_gpt2.c -o train_gpt2 -lm          # in a checkout of llm.c
    echo 2 | python llmc.py --program llm.c/train_gpt2 --batch 4 --seq 64

The program has no options. It trains in the folder where it is started, on files that are written there now; batch and length
are constants of its source (4 x 64), so that another shape needs a program that was built for it. It prints the milliseconds
of each step, which is where the numbers are from; the terminal that it is given makes it print at once.

It steps whether asked or not, so it is stopped between turns from outside, somewhere in a step. That step, the first that ends
in a turn, is left out, and the N that follow it count. Before step 20, where it would generate text for minutes, the program
is started anew.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEP = re.compile(r"step (\d+): train loss (\S+) \(took (\S+) ms\)")
ACTIVATIONS = re.compile(r"num_activations: (\d+)")
LAST = 19  # the last step before it generates text
TOKENS = Path("dev/data/tinyshakespeare")
NAMES = ("train", "val")
OUTPUT = 4096  # bytes that are kept of what it said, for a message


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--program", type=Path, required=True)
    for name, default in {"layers": 12, "heads": 12, "d_model": 768, "vocab": 50304, "batch": 4, "seq": 64}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), a)
        program = Program(a, Path(folder))
        try:
            loss, seconds = program.start()
            first = {"first_step_s": program.first_step_s, "step_s": seconds, "loss": loss, "threads": program.threads()}
            print(json.dumps(first), flush=True)
            for line in sys.stdin:
                print(json.dumps(program.turn(int(line))), flush=True)
        finally:
            program.end()


def write_inputs(folder: Path, a: argparse.Namespace) -> None:
    """A checkpoint of random weights, and random tokens, in llm.c's formats: a header of 256 int32, then the values."""
    C, L, longest = a.d_model, a.layers, max(a.seq, 1024)
    rng = np.random.default_rng(0)
    words = [20240326, 3, longest, a.vocab, L, a.heads, C, a.vocab]
    matrices = {"wte": a.vocab * C, "wpe": longest * C, "qkvw": L * 3 * C * C, "attprojw": L * C * C, "fcw": L * 4 * C * C}
    matrices["fcprojw"] = matrices["fcw"]
    vectors = {"ln1w": (L * C, 1), "ln1b": (L * C, 0), "qkvb": (L * 3 * C, 0), "attprojb": (L * C, 0), "ln2w": (L * C, 1),
               "ln2b": (L * C, 0), "fcb": (L * 4 * C, 0), "fcprojb": (L * C, 0), "lnfw": (C, 1), "lnfb": (C, 0)}  # fmt: skip
    order = ["wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb", "ln2w", "ln2b", "fcw", "fcb", "fcprojw",
             "fcprojb", "lnfw", "lnfb"]  # fmt: skip
    with (folder / "gpt2_124M.bin").open("wb") as file:
        file.write(header(words))
        for name in order:
            if name in matrices:
                values = rng.standard_normal(matrices[name], dtype=np.float32)
                values *= 0.02 / ((2 * L) ** 0.5 if "proj" in name else 1)
            else:
                count, value = vectors[name]
                values = np.full(count, value, np.float32)
            file.write(values)
    (folder / TOKENS).mkdir(parents=True)
    for name in NAMES:
        tokens = rng.integers(0, a.vocab, 64 * a.batch * a.seq + 1, dtype=np.uint16)
        with (folder / TOKENS / f"tiny_shakespeare_{name}.bin").open("wb") as file:
            file.write(header([20240520, 1, tokens.size]) + tokens.tobytes())


def header(words: list[int]) -> bytes:
    return np.array(words + [0] * (256 - len(words)), "<i4").tobytes()


def activations(a: argparse.Namespace) -> int:
    """The number that llm.c prints for a batch, a length and a model: from it follows what shape a program was built for."""
    C, rows = a.d_model, a.batch * a.seq
    layer = 18 * C + 4 + 2 * a.heads * a.seq
    return rows * (C + a.layers * layer + C + 2 + 2 * a.vocab + 1)


class Program:
    """llm.c's train_gpt2 in `folder`, its output read line by line."""

    def __init__(self, a: argparse.Namespace, folder: Path) -> None:
        self.a, self.folder = a, folder
        self.process: subprocess.Popen | None = None
        self.terminal = -1
        self.pending = ""
        self.said = ""
        self.step = 0
        self.first_step_s = 0.0
        self.before = (0.0, 0)  # counters of the programs that this one replaced

    def start(self) -> tuple[float, float]:
        """Loss and seconds of its first step."""
        self.before = self.counters()
        self.end()
        self.pending, begun = "", time.perf_counter()
        self.terminal, theirs = pty.openpty()
        program = str(self.a.program.absolute())
        self.process = subprocess.Popen([program], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
        os.close(theirs)
        wanted = activations(self.a)
        while True:
            line = self.line()
            if (found := ACTIVATIONS.search(line)) and int(found[1]) != wanted:
                self.fail(f"is not built for batch {self.a.batch} x {self.a.seq}: it has {found[1]} activations, expected {wanted}")
            if found := STEP.search(line):
                self.first_step_s = time.perf_counter() - begun
                return self.took(found)

    def turn(self, steps: int) -> dict:
        """The step in which it was stopped, which does not count, and `steps` that do."""
        while select.select([self.terminal], [], [], 0)[0]:  # what ended before it was stopped
            self.next_step()
        self.next_step()
        before = self.counters()
        results = [self.next_step() for _ in range(steps)]
        after = self.counters()
        return {
            "step_s": [seconds for _, seconds in results],
            "losses": [loss for loss, _ in results],
            "cpu_s": after[0] - before[0],
            "minor_faults": after[1] - before[1],
            "peak_rss_bytes": self.peak_rss_bytes(),
        }

    def next_step(self) -> tuple[float, float]:
        if self.step == LAST:
            self.start()
        while not (found := STEP.search(self.line())):
            pass
        return self.took(found)

    def took(self, found: re.Match) -> tuple[float, float]:
        self.step = int(found[1])
        return float(found[2]), float(found[3]) / 1e3

    def line(self) -> str:
        while "\n" not in self.pending:
            try:
                read = os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:  # what a terminal answers when nobody is at its other end
                read = ""
            if not read:
                self.fail(f"ended without a step: {' '.join(self.said.split())}")
            self.pending += read
            self.said = (self.said + read)[-OUTPUT:]
        line, _, self.pending = self.pending.partition("\n")
        return line

    def fail(self, message: str) -> None:
        print(f"{self.a.program} {message}", file=sys.stderr)
        raise SystemExit(2)

    def counters(self) -> tuple[float, int]:
        """CPU seconds and page faults so far."""
        if self.process is None:
            return self.before
        fields = self.proc("stat").rpartition(")")[2].split()
        seconds, faults = self.before
        return seconds + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), faults + int(fields[7])

    def peak_rss_bytes(self) -> int:
        return self.status("VmHWM") * 1024

    def threads(self) -> int:
        return self.status("Threads")

    def status(self, name: str) -> int:
        return next(int(line.split()[1]) for line in self.proc("status").splitlines() if line.startswith(f"{name}:"))

    def proc(self, name: str) -> str:
        assert self.process
        return Path(f"/proc/{self.process.pid}/{name}").read_text()

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            os.close(self.terminal)
            self.process = None


if __name__ == "__main__":
    main()
