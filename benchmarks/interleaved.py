"""Interleaved rounds: every variant of a step in a process of its own, all but one stopped, every sample kept.

A variant's process prints a JSON line after its first step ("first_step_s" since its start), then answers each line "N" of its
standard input with a JSON line about N steps ("step_s", "cpu_s", "minor_faults", "peak_rss_bytes"), until the input ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from barellm import models
from barellm.config import Config, overrides
from barellm.errors import UserError
from barellm.runtime.memory import memory_limit

SETTLE_SECONDS = 0.3  # seconds between rounds: the system's own work of starting and stopping
ROUND_SECONDS = 1.0  # seconds that a round's steps should take together
LONG = 3.0  # seconds of a step that needs no step before it to warm the caches
SHARE = 0.9  # of the memory: what all processes together may have
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


@dataclass
class Variant:
    """A way to run the step: its command line, and what is set in its environment beyond ours. `cpus`: the processors that it
    may use, None for all. `contention`: a processor on which another process computes during its rounds."""

    name: str
    command: list[str]
    environment: dict[str, str]
    why: str
    cpus: tuple[int, ...] | None = None
    contention: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    resident: bool = True  # between its rounds; else it is restarted for each
    peak_rss_bytes: int = 0
    peak_device_bytes: int = 0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._caches = Path()

    def start(self, caches: Path) -> None:
        """Until its first step is done, and stopped there. `caches`: a folder, empty for a cold start."""
        caches.mkdir(exist_ok=True)
        self._caches = caches
        names = ("BARELLM_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
        with _allowed(self.cpus):
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | dict.fromkeys(names, str(caches)) | self.environment,
                # A group of its own: its children stop and end with it, and the system ends it where we are killed.
                process_group=0,
            )
        answer = self._answer()
        self.facts = self.facts or answer
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int, *, warm_up: int = 1) -> None:
        """`warm_up` steps that only fill the caches, and `steps` that count. The others are stopped meanwhile."""
        if self._process is None:
            self.start(self._caches)
        with _contention(self.contention) as contention:
            self._signal(signal.SIGCONT)
            assert self._process and self._process.stdin
            with contextlib.suppress(BrokenPipeError):  # it has ended: _answer says so
                self._process.stdin.write(f"{warm_up + steps}\n")
                self._process.stdin.flush()
            answer = self._answer()
            self._signal(signal.SIGSTOP)
        answer["warm_up_s"], answer["step_s"] = answer["step_s"][:warm_up], answer["step_s"][warm_up:]
        self.peak_rss_bytes = max(self.peak_rss_bytes, answer["peak_rss_bytes"])
        self.peak_device_bytes = max(self.peak_device_bytes, answer.get("peak_device_bytes", 0))
        self.turns.append(answer | contention)
        if not self.resident:
            self.end()

    def end(self) -> None:
        """Kills it and its children, stopped or not, and waits until it is gone. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe:
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process and self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended with status {self._process.wait()}: {' '.join(self.command)}")
        return json.loads(line)

    @property
    def samples(self) -> list[float]:
        """Seconds of the steps that count."""
        return [s for turn in self.turns for s in turn["step_s"]]

    def to_json(self, root: Path) -> dict[str, Any]:
        """Paths below `root` without it, others by their last part."""
        return {
            "name": self.name, "why": self.why, "environment": self.environment,
            "command": [_portable(word, root) for word in self.command], "held": self.resident, "median_s": median(self.samples),
            "min_s": min(self.samples), "median_of_turns_s": [median(turn["step_s"]) for turn in self.turns], **self.facts,
            "peak_rss_bytes": self.peak_rss_bytes,
            **({"peak_device_bytes": self.peak_device_bytes} if self.peak_device_bytes else {}), "turns": self.turns,
        }  # fmt: skip


def interleave(variants: list[Variant], *, rounds: int, report: Callable[[str], None], device_bytes: int | None = None) -> int:
    """Every variant started once, then `rounds` interleaved rounds, each round in another order. Returns the steps of a round.
    `device_bytes`: of the GPU that the variants share, which must hold those that wait for their turn too.

    No process is left when this returns or raises."""
    limits = {"peak_rss_bytes": SHARE * free_bytes()}
    limits |= {"peak_device_bytes": SHARE * device_bytes} if device_bytes else {}
    with _ended(variants), tempfile.TemporaryDirectory() as folder:
        for i, v in enumerate(variants):
            _first_steps(v, variants[:i], Path(folder) / str(i), device_bytes)
            for name, limit in limits.items():
                _hold_what_fits(variants[: i + 1], of=name, limit=limit, more=i + 1 < len(variants))
            report(f"{v.name}: first step after {v.facts['first_step_s']:.2f} s, then {v.samples[0]:.4f} s")
        trial = {v.name: v.samples[0] for v in variants}
        steps = max(1, round(ROUND_SECONDS / max(trial.values())))
        # The same for all: one whose trial happened to be long would have no caches filled, and others would.
        warm_up = int(min(trial.values()) < LONG)
        for v in variants:
            v.turns.clear()
        for i in range(rounds):
            for v in variants[i % len(variants) :] + variants[: i % len(variants)]:
                time.sleep(SETTLE_SECONDS)
                v.turn(steps, warm_up=warm_up)
            latest = ", ".join(f"{median(v.turns[-1]['step_s']):.4f}" for v in variants)
            report(f"round {i + 1} of {rounds}, in this order: {latest} s")
    return steps


def _first_steps(v: Variant, others: list[Variant], caches: Path, device_bytes: int | None) -> None:
    """Take the first steps of a variant. How much of a GPU it needs is not known before. If it ends for lack of that, no process
    keeps its memory between rounds, and it tries again."""
    try:
        v.start(caches)
        v.turn(1, warm_up=0)
    except UserError:
        if device_bytes is None or not any(w.resident for w in others):
            raise
        for w in (v, *others):
            w.resident = False
            w.end()
        v.turn(1, warm_up=0)


def _hold_what_fits(started: list[Variant], *, of: str, limit: float, more: bool) -> None:
    """While all that are held do not fit into memory beside the largest other one, the largest is held no longer. `more`: others
    are still to be started."""
    while True:
        resident = [v for v in started if v.resident]
        alone = len(resident) == len(started) and not more
        # Of one that is held no longer, or of the next to be started.
        beside = 0 if alone else max(getattr(v, of) for v in started)
        if not resident or sum(getattr(v, of) for v in resident) + beside <= limit:
            return
        largest = max(resident, key=lambda v: getattr(v, of))
        largest.resident = False
        largest.end()


def free_bytes() -> int:
    """The bytes that processes can have now: the limit of this one's group, or less if others use the machine's memory."""
    limit = memory_limit()[0]
    with contextlib.suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return min(limit, int(lines["MemAvailable"].split()[0]) * 1024)
    return limit


@contextlib.contextmanager
def _ended(variants: list[Variant]) -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: after its children."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for v in variants:
            v.end()
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _allowed(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Processes started meanwhile may use these processors only."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _contention(cpu: int | None) -> Iterator[dict[str, float]]:
    """A process that computes on `cpu` without end. What is yielded has, afterwards, the share of the core that it got."""
    results: dict[str, float] = {}
    if cpu is None:
        yield results
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(cpu)], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        process.stdout.readline()
        start, used = time.perf_counter(), cpu_seconds(process.pid)
        yield results
        results["rival_share"] = (cpu_seconds(process.pid) - used) / (time.perf_counter() - start)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, to 0.01 s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _portable(word: str, root: Path) -> str:
    if not os.path.isabs(word):
        return word
    if word == sys.executable:
        return Path(word).name
    path = Path(word)
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def ours(config: Config, *, name: str = "barellm", device: str = "cpu", **more: Any) -> Variant:
    """`config`'s step in a process of its own. `more`: further fields of the Variant."""
    usual = overrides.flat(models.preset(config.preset))
    changes = {key: value for key, value in overrides.flat(config).items() if value != usual[key]}
    command = [sys.executable, "-m", "barellm", "bench", "step", config.preset, "--serve", "--device", device]
    command += [f"--{key}={value}" for key, value in changes.items()]
    command += [f"--model={file}" for file in models.ADDED.values()]
    return Variant(name, command, **({"environment": {}, "why": "threads pinned, one arena"} | more))
