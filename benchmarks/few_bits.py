"""Tokens/s of decoding with weights of few bits, beside 16- and 32-bit weights and beside llama.cpp, in turns.

    python -m benchmarks.few_bits gpt2-774m --peer-python /path/to/python --out benchmarks/results/few-bits-gpt2-774m.json

Weights are random: no time depends on their values. `--peer-python` is an interpreter that has llama-cpp-python and gguf;
without it only our own formats are measured. Each round decodes the same positions with every variant once; the bandwidth of
reading is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from barellm import models
from barellm.assembly.build import CompiledModel, open_model
from barellm.cpu.backend import Bench, default_dtype, describe
from barellm.cpu.processor import name as processor
from barellm.tools.bench.decoding import weight_bytes

POSITIONS, FIRST = 256, 32
PEER = Path(__file__).parent / "peers" / "llamacpp_decode.py"


class Ours:
    """A session of a preset whose weights were never read from anywhere: every byte of them is the same."""

    def __init__(self, compiled: CompiledModel) -> None:
        self.session, self.nbytes = compiled.session, weight_bytes(compiled.programs["decode"])
        for t in self.session.tensors.values():
            if t.role == "parameter":  # of fp16, bf16 and fp32 this byte makes numbers of some hundredths
                start = self.session.plan.offsets[t]
                self.session._fill(start, start + t.nbytes, 0x25)

    def _run(self, first: int, count: int) -> None:
        self.session.write("tokens", np.arange(7, 7 + count, dtype=np.int32)[None])
        self.session.run("decode", batch=1, seq=count, pos=first)
        self.session.read("logits")

    def prompt(self, count: int) -> float:
        start = time.perf_counter()
        self._run(0, count)
        return time.perf_counter() - start

    def decode(self, first: int, count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            self._run(first + i, 1)
        return time.perf_counter() - start


class Peer:
    """llama.cpp in another process."""

    def __init__(self, python: str, kind: str, model: Any, threads: int, folder: str) -> None:
        sizes = {"layers": model.layers, "heads": model.heads, "d_model": model.d_model, "threads": threads}
        options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        command = [python, str(PEER), kind, *options, "--folder", folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        line = self._line()
        self.facts = json.loads(line.removeprefix("ready "))
        path = Path(folder) / f"gpt2-{model.layers}-{model.d_model}-{kind}.gguf"
        self.nbytes = path.stat().st_size - 4 * 1024 * model.d_model  # without the positions, which no token reads as a whole

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with {self.process.wait()}")
        return line

    def _ask(self, *words: object) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return float(self._line())

    def prompt(self, count: int) -> float:
        return self._ask("prompt", count)

    def decode(self, first: int, count: int) -> float:
        return self._ask(first, count)

    def close(self) -> None:
        self.process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--variants", nargs="+", default=["int4", "int4/64", "nf4", "int8", "bf16", "fp32"])
    parser.add_argument("--peer-python")
    parser.add_argument("--peers", nargs="*", default=["q4_0", "q8_0"])
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = models.preset(args.preset)
    facts = describe()
    threads = int(str(facts["threads"]))
    with ExitStack() as stack:
        variants: dict[str, Any] = {}
        for name in args.variants:
            print(name, time.strftime("%H:%M:%S"), file=sys.stderr)
            dtype, weights = (name, "") if name in ("fp32", "bf16") else (default_dtype(), name)
            one = replace(config, train=replace(config.train, dtype=dtype, micro_batch_size=1))
            variants[name] = Ours(
                stack.enter_context(open_model(one, device="cpu", training=False, positions=POSITIONS, weights=weights))
            )
        for kind in args.peers if args.peer_python else []:
            peer = variants[f"llama.cpp {kind}"] = Peer(args.peer_python, kind, config.model, threads, args.folder)
            stack.callback(peer.close)
            facts |= peer.facts
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        prompts: dict[str, list[float]] = {name: [] for name in variants}
        bandwidth: list[float] = []
        result: dict[str, Any] = {}
        bench = Bench(threads)
        stack.callback(bench.close)
        for turn in range(args.rounds + 1):
            print(f"round {turn} of {args.rounds}", time.strftime("%H:%M:%S"), file=sys.stderr)
            bandwidth.append(bench.bandwidth((8, 0, 0)))
            for name, v in variants.items():
                if turn < 2:
                    prompts[name].append(v.prompt(args.prompt))
                seconds[name].append(v.decode(FIRST, args.tokens) / args.tokens)
            if turn:
                result = {"preset": args.preset, "processor": processor(), **facts, "prompt": args.prompt, "bandwidth": bandwidth}
                result["rows"] = {name: row(v.nbytes, seconds[name], prompts[name], max(bandwidth)) for name, v in variants.items()}
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in result["rows"].items():
        print(
            f"{name:<16}{found['tokens_per_s']:8.2f} tokens/s {found['bytes'] / 1e6:8.1f} MB "
            f"{100 * found['of_bandwidth']:5.0f} % of reading, prompt {found['prompt_s']:.2f} s",
            file=sys.stderr,
        )


def row(nbytes: int, seconds: list[float], prompts: list[float], bandwidth: float) -> dict[str, Any]:
    """What the result says of a variant. The first round, in which caches fill, is not counted."""
    median = statistics.median(seconds[1:])
    return {
        "tokens_per_s": 1 / median,
        "bytes": nbytes,
        "of_bandwidth": nbytes / median / bandwidth,
        "prompt_s": min(prompts),
        "seconds": seconds[1:],
    }


if __name__ == "__main__":
    main()
