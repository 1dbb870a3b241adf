"""Causal attention over lengths and head sizes, alone or in turns with PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from barellm.cpu.backend import Bench
from barellm.cpu.step import CpuSession
from barellm.profiling.peers import FOLDER, environments, machine, peer_script
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = 4096  # of a case; a longer sequence is alone
WIDTH = 768  # 12 heads of 64, 6 of 128
TURN = 0.25  # seconds that a turn should take
LONG = 0.1  # seconds of a call that needs no call before it to warm the caches
PAUSE = 0.05  # seconds before a turn: the other's threads stop spinning
WHATS = ("forward", "both")

Case = dict[str, Any]  # batch, seq, heads, D, dtype


def cases(dtype: str, lengths: tuple[int, ...] = LENGTHS) -> list[Case]:
    sizes = [(D, T) for D in (64, 128) for T in lengths]
    return [{"batch": max(1, TOKENS // T), "seq": T, "heads": WIDTH // D, "D": D, "dtype": dtype} for D, T in sizes]


def flops(case: Case, what: str) -> int:
    """Of the causal half: two products forward; five backward, with the scores that are computed again."""
    B, T, H, D = case["batch"], case["seq"], case["heads"], case["D"]
    return (2 if what == "forward" else 7) * 2 * D * B * H * (T * (T + 1) // 2)


class Attention:
    """Our kernels on normal data. `run("forward")`, or "both": forward, and backward of all three operands."""

    def __init__(self, case: Case) -> None:
        dims = Dim("batch", case["batch"]), Dim("seq", case["seq"])
        C, dtype = case["heads"] * case["D"], case["dtype"]
        store = Store()
        programs = {what: Program(store) for what in WHATS}
        attrs = {"heads": case["heads"], "rate": 0.0, "stream": 0}
        for what, p in programs.items():
            qkv = p.input("qkv", (*dims, 3 * C), dtype)
            saved = p.apply(ops.Attention, qkv=qkv, **attrs)
            p.output("out", saved.out)
            if what == "both":
                dout = p.input("dout", (*dims, C), dtype)
                back = p.apply(ops.AttentionBackward, qkv=qkv, out=saved.out, dout=dout, lse=saved.lse, **attrs)
                p.output("dqkv", back.dqkv)
        self.session = CpuSession(programs)
        self.sizes = {"batch": case["batch"], "seq": case["seq"]}
        random = np.random.default_rng(0)
        for name, width in (("qkv", 3 * C), ("dout", C)):
            shape = (case["batch"], case["seq"], width)
            self.session.write(name, random.standard_normal(shape, np.float32))
        for what in WHATS:
            self.session.run(what, **self.sizes)

    def run(self, what: str) -> float:
        """Seconds of one call; the inputs already lie in the arena."""
        table = self.session.records[what]
        start = time.perf_counter()
        self.session.pool.run(table.ctypes.data, len(table))
        return time.perf_counter() - start

    def close(self) -> None:
        self.session.close()


class Peer:
    """PyTorch in a process of its own, in the tuned environment; stopped between its turns."""

    def __init__(self, all_cases: list[Case], environment: dict[str, str]) -> None:
        command = [sys.executable, str(peer_script("torch_attention.py")), json.dumps(all_cases)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            process_group=0,  # where we are killed the system ends it, stopped or not
        )
        self.facts = self._answer()

    def run(self, case: int, what: str, *, calls: int, warm_up: int) -> list[float]:
        """Seconds of `calls` calls, after `warm_up` that do not count."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"case": case, "what": what, "calls": warm_up + calls}) + "\n")
        self._process.stdin.flush()
        seconds = self._answer()["s"][warm_up:]
        self._process.send_signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"PyTorch's side ended with status {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def _peer(all_cases: list[Case], wanted: bool) -> Iterator[Peer | None]:
    if not wanted:
        yield None
        return
    peer = Peer(all_cases, environments()["tuned"]["set"])
    try:
        yield peer
    finally:
        peer.end()


def measure(
    dtype: str, *, torch: bool, rounds: int, report: Callable[[str], None], lengths: tuple[int, ...] = LENGTHS
) -> dict[str, Any]:
    """One JSON object with a row per case, forward and "both". With `torch` each round has a turn of ours and one of PyTorch's."""
    all_cases, load = cases(dtype, lengths), os.getloadavg()
    rows: list[dict[str, Any]] = []
    with _peer(all_cases, torch) as peer, contextlib.closing(Bench()) as bench:
        for i, case in enumerate(all_cases):
            ours = Attention(case)
            try:
                for what in WHATS:
                    peak = bench.peak(
                        dtype
                    )  # near to what it is compared with: the machine's speed changes by the minute
                    rows.append(row(case, what, _turns(ours, peer, i, what, rounds), peak))
                    report(line(rows[-1]))
            finally:
                ours.close()
    result = {
        "kind": "attention",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "dtype": dtype,
        "rounds": rounds,
        "machine": machine(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "cases": rows,
    }
    if peer:
        tuned = json.loads((FOLDER / "peers" / "environments.json").read_text())["tuned"]
        result |= {
            "peer": f"PyTorch {peer.facts['version']}",
            "peer_threads": peer.facts["threads"],
            "environment": tuned,
        }
    return result


def _turns(ours: Attention, peer: Peer | None, case: int, what: str, rounds: int) -> dict[str, list[list[float]]]:
    """Samples of each side by turn."""
    once = ours.run(what)
    if peer:
        peer.run(case, what, calls=1, warm_up=0)
        once = max(once, peer.run(case, what, calls=1, warm_up=0)[0])
    calls, warm_up = max(1, round(TURN / once)), int(once < LONG)

    def turn(name: str) -> list[float]:
        time.sleep(PAUSE)
        if name == "peer":
            assert peer
            return peer.run(case, what, calls=calls, warm_up=warm_up)
        return [ours.run(what) for _ in range(warm_up + calls)][warm_up:]

    samples: dict[str, list[list[float]]] = {"ours": [], "peer": []} if peer else {"ours": []}
    for i in range(rounds):
        for name in list(samples) if i % 2 else reversed(list(samples)):
            samples[name].append(turn(name))
    return samples


def row(case: Case, what: str, turns: dict[str, list[list[float]]], peak: float) -> dict[str, Any]:
    """`of_square`: our seconds over what the whole square of scores would take at the peak; below 1, the masked half cannot have
    been computed. `ratio`: the median over rounds of PyTorch's median over ours."""
    by_turn = {name: [median(samples) for samples in found] for name, found in turns.items()}
    ours, work = median(by_turn["ours"]), flops(case, what)
    made = case | {
        "what": what,
        "ours_s": ours,
        "flops": work,
        "peak_flops": peak,
        "percent_of_peak": 100 * work / ours / peak,
        "of_square": ours * peak / (work * 2 * case["seq"] / (case["seq"] + 1)),
        "turns_s": turns,
    }
    if "peer" in by_turn:
        made["peer_s"] = median(by_turn["peer"])
        made["ratio"] = median(p / o for o, p in zip(by_turn["ours"], by_turn["peer"], strict=True))
    return made


def line(r: dict[str, Any]) -> str:
    sizes = f"{r['batch']} x {r['seq']}, {r['heads']} heads of {r['D']}"
    rate = f"{r['ours_s'] * 1e3:>10.2f} ms{r['flops'] / r['ours_s'] / 1e9:>8.0f} GFLOP/s{r['percent_of_peak']:>5.0f} % of peak"
    ratio = f"{r['ratio']:>8.2f}x PyTorch's" if "ratio" in r else ""
    return f"{sizes:<28}{r['what']:<9}{rate}{r['of_square']:>7.2f} of the square's time{ratio}"
