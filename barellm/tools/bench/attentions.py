"""Causal attention over lengths and head sizes, alone or interleaved with PyTorch's scaled_dot_product_attention."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from barellm.errors import UserError
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.tools.bench import interleaved
from barellm.tools.bench.description import in_checkout, machine
from barellm.tools.plan import devices
from barellm.tools.plan.roofline import open_bench

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = {"cpu": 4096, "cuda": 32768}  # of a case; a longer sequence is alone
WIDTH = 768  # 12 heads of 64, 6 of 128
TURN = {"cpu": 0.25, "cuda": 0.1}  # seconds that a round should take; a GPU is timed by its own clock
BACKENDS = ("flash", "cudnn", "efficient")  # of PyTorch's on a GPU, in 16 bits; each is interleaved
LONG = 0.1  # seconds of a call that needs no call before it to warm the caches
PAUSE = 0.05  # seconds before a round: the other's threads stop spinning
WHATS = ("forward", "both")

AttentionSizes = dict[str, Any]  # batch, seq, heads, D, dtype; kv_heads where they are fewer than heads
SIZES = (64, 128)  # columns of a head


def cases(dtype: str, lengths: tuple[int, ...] = LENGTHS, device: str = "cpu", share: int = 1) -> list[AttentionSizes]:
    """The benchmark's shapes; `share` query heads per key-value head. UserError if it does not divide the heads."""
    if share < 1 or any(WIDTH // D % share for D in SIZES):
        counts = " and ".join(str(WIDTH // D) for D in SIZES)
        raise UserError(f"--share is {share}, expected what divides {counts} heads")
    return [
        {"batch": max(1, TOKENS[device] // T), "seq": T, "heads": WIDTH // D, "D": D, "dtype": dtype}
        | ({"kv_heads": WIDTH // D // share} if share > 1 else {})
        for D in SIZES
        for T in lengths
    ]


def flops(case: AttentionSizes, what: str) -> int:
    """Operations of the causal half: two matmuls forward; five backward, with the scores that are computed again."""
    B, T, H, D = case["batch"], case["seq"], case["heads"], case["D"]
    return (2 if what == "forward" else 7) * 2 * D * B * H * (T * (T + 1) // 2)


def programs(case: AttentionSizes) -> dict[str, Program]:
    """Programs "forward" and "both" (forward and backward pass for q, k and v) of a case."""
    dims = Dim("batch", case["batch"]), Dim("seq", case["seq"])
    C, dtype, kv_heads = case["heads"] * case["D"], case["dtype"], case.get("kv_heads", case["heads"])
    widths = C, kv_heads * case["D"], kv_heads * case["D"]
    store = Store()
    made = {what: Program(store) for what in WHATS}
    attrs = {"heads": case["heads"], "kv_heads": kv_heads, "rate": 0.0, "stream": 0}
    for what, p in made.items():
        qkv = p.input("qkv", (*dims, sum(widths)), dtype)
        operands = dict(zip("qkv", p.split(qkv, widths), strict=True))
        saved = p.apply(ops.Attention, **operands, **attrs)
        p.output("out", saved.out)
        if what == "both":
            dout = p.input("dout", (*dims, C), dtype)
            dqkv = p.output("dqkv", p.activation("dqkv", qkv.shape, dtype))
            into = {f"d{n}": (view, "store") for n, view in zip("qkv", p.split(dqkv, widths), strict=True)}
            p.apply(ops.AttentionBackward, into=into, **{**operands, "out": saved.out, "dout": dout, "lse": saved.lse}, **attrs)
    return made


class OurAttention:
    """Our kernels on normally distributed data: `run("forward")`, or `run("both")` with the backward pass of q, k and v."""

    def __init__(self, case: AttentionSizes, device: str = "cpu") -> None:
        """Open a session for the case with random data, and run each program once."""
        C = case["heads"] * case["D"]
        width = C + 2 * case.get("kv_heads", case["heads"]) * case["D"]
        self.session = devices.open_session(programs(case), device)
        self.sizes = {"batch": case["batch"], "seq": case["seq"]}
        random = np.random.default_rng(0)
        for name, columns in (("qkv", width), ("dout", C)):
            self.session.write(name, random.standard_normal((case["batch"], case["seq"], columns), np.float32))
        for what in WHATS:
            self.session.run(what, **self.sizes)

    def run(self, what: str, calls: int) -> list[float]:
        """Seconds of each of so many calls; the inputs already lie in the arena."""
        return devices.replay_seconds(self.session, what, calls, **self.sizes)

    def close(self) -> None:
        self.session.close()


def measure(
    dtype: str, *, torch: bool, rounds: int, report: Callable[[str], None], lengths: tuple[int, ...] = LENGTHS, device: str = "cpu",
    share: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Benchmark attention; returns JSON with a row per shape for "forward" and "both". With `torch`, PyTorch's attention (on a GPU
    each of BACKENDS) is interleaved with ours."""
    all_cases, load = cases(dtype, lengths, device, share), os.getloadavg()
    rows: list[dict[str, Any]] = []
    baselines, pytorch = in_checkout("baselines") if torch else None, contextlib.nullcontext()
    if baselines:
        script, environment = baselines.baseline_script("torch_attention.py"), baselines.environments()["tuned"]["set"]
        given = {"device": device, "environment": environment if device == "cpu" else {}}
        pytorch = in_checkout("baseline_process").opened(script, all_cases, **given)
    report(HEAD + " torch" * torch)
    with pytorch as baseline, contextlib.closing(open_bench(device)) as bench:
        for i, case in enumerate(all_cases):
            ours = OurAttention(case, device)
            timed = partial(
                interleaved.samples, ours.run, baseline, i, rounds=rounds, turn_s=TURN[device], long_s=LONG,
                pause=partial(time.sleep, PAUSE), backends=BACKENDS if device == "cuda" and dtype != "fp32" else (),
            )  # fmt: skip
            try:
                for what in WHATS:
                    peak = bench.peak(dtype)  # near to what is held against it: the machine's speed changes
                    rows.append(row(case, what, timed(what=what), peak))
                    report(line(rows[-1]))
            finally:
                ours.close()
    result = {
        "kind": "attention", "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "dtype": dtype, "rounds": rounds,
        "machine": machine(device), "load_before": load, "load_after": os.getloadavg(), "cases": rows,
    }  # fmt: skip
    if baselines and baseline:
        tuned = json.loads((baselines.FOLDER / "peers" / "environments.json").read_text())["tuned"]
        result |= {"peer": f"PyTorch {baseline.facts['version']}", "peer_threads": baseline.facts["threads"]}
        result |= {"environment": tuned} if device == "cpu" else {}
    return result


def row(case: AttentionSizes, what: str, turns: dict[str, list[list[float]]], peak: float) -> dict[str, Any]:
    """A result row. `of_square`: our time over that of the full T x T square at peak; below 1 the masked half was skipped. `ratio`:
    median over rounds of PyTorch's time over ours, of its fastest backend if there are several (`ratios`)."""
    by_turn = {name: [median(samples) for samples in found] for name, found in turns.items()}
    ours, work = median(by_turn["ours"]), flops(case, what)
    made = case | {
        "what": what, "ours_s": ours, "flops": work, "peak_flops": peak, "percent_of_peak": 100 * work / ours / peak,
        "of_square": ours * peak / (work * 2 * case["seq"] / (case["seq"] + 1)), "turns_s": turns,
    }  # fmt: skip
    baselines = {name: found for name, found in by_turn.items() if name != "ours"}
    ratios = {n: median(p / o for o, p in zip(by_turn["ours"], found, strict=True)) for n, found in baselines.items()}
    if baselines:
        best = min(baselines, key=lambda name: median(baselines[name]))
        made |= {"peer_s": median(baselines[best]), "ratio": ratios[best]}
        made |= {"ratios": ratios, "backend": best} if best != "peer" else {}
    return made


HEAD = f"{'batch x seq':<12}{'heads':>6}{'of':>5}  {'pass':<8}{'ms':>9}{'GFLOP/s':>9}{'% peak':>7}{'/ square':>9}"


def line(r: dict[str, Any]) -> str:
    """A row below HEAD; with a baseline, how many times as fast as it."""
    heads = f"{r['heads']}/{r['kv_heads']}" if "kv_heads" in r else f"{r['heads']}"
    sizes = f"{'{batch} x {seq}'.format(**r):<12}{heads:>6}{r['D']:>5}  {r['what']:<8}"
    rate = f"{r['ours_s'] * 1e3:>9.2f}{r['flops'] / r['ours_s'] / 1e9:>9.0f}{r['percent_of_peak']:>7.0f}{r['of_square']:>9.2f}"
    ratio = f"{r['ratio']:>6.2f}x {r.get('backend', '')[:5]}".rstrip() if "ratio" in r else ""
    return sizes + rate + ratio
