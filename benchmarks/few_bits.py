"""Tokens/s of decoding with weights of few bits, beside 16- and 32-bit weights and beside llama.cpp, in turns.

    python -m benchmarks.few_bits smollm2-135m --llama-cpp DIR --out benchmarks/results/decode-smollm2-135m.json

Weights are random: no time depends on their values. `--llama-cpp` is a folder with llama.cpp's programs (cmake builds them from the
sources in its Python package); without it only our own formats are measured. Each round decodes the same positions with every
variant once; the bandwidth of reading is measured in the same rounds.
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
from barellm.checkpoint.weights import parameters
from barellm.cpu.backend import Bench, default_dtype, describe
from barellm.cpu.processor import name as processor
from barellm.interop import gguf_writer
from barellm.tools.bench.decoding import weight_bytes
from benchmarks.random_weights import random_weights

POSITIONS, FIRST = 256, 32


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


class LlamaCpp:
    """llama.cpp's own llama-bench, a process for each measurement. `file` is a GGUF file of a model of the same sizes."""

    def __init__(self, binary: Path, file: Path, threads: int) -> None:
        self.command = [str(binary), "-m", str(file), "-t", str(threads), "-o", "json", "-r", "1"]
        self.nbytes = file.stat().st_size
        self.build = self._measured("-p", "0", "-n", "1")["build_commit"]

    def _measured(self, *words: str) -> dict[str, Any]:
        done = subprocess.run([*self.command, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        return json.loads(done.stdout)[0]

    def prompt(self, count: int) -> float:
        return 1e-9 * self._measured("-p", str(count), "-n", "0", "-ub", str(count))["avg_ns"]

    def decode(self, first: int, count: int) -> float:
        """Behind `first` tokens, as ours."""
        return 1e-9 * self._measured("-p", "0", "-n", str(count), "-d", str(first))["avg_ns"]


def gguf_file(binaries: Path, preset: str, kind: str, folder: Path) -> Path:
    """The preset with random weights in `kind` ("bf16", "q4_0", ...), made in `folder` where it is not there."""
    source, out = folder / f"{preset}-bf16.gguf", folder / f"{preset}-{kind}.gguf"
    if not source.exists():
        gguf_writer.write(random_weights(models.preset(preset).model), source, dtype="bf16", name=preset, licence=None)
    if not out.exists():  # --pure: every matrix in this kind, as ours
        command = [str(binaries / "llama-quantize"), "--pure", str(source), str(out), kind.upper()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--variants", nargs="+", default=["int4", "int4/64", "nf4", "int8", "bf16", "fp32"])
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="its llama-bench and llama-quantize")
    parser.add_argument("--peers", nargs="*", default=["q4_0", "q8_0"])
    parser.add_argument("--folder", type=Path, default="/tmp", metavar="DIR", help="where its files are made")
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
            how: dict[str, Any] = {"training": False, "positions": POSITIONS, "weights": weights, "bf16": parameters(one.model)}
            variants[name] = Ours(stack.enter_context(open_model(one, device="cpu", **how)))
        for kind in args.peers if args.llama_cpp and not gguf_writer.refused(config.model) else []:
            file = gguf_file(args.llama_cpp, args.preset, kind, args.folder)
            peer = variants[f"llama.cpp {kind}"] = LlamaCpp(args.llama_cpp / "llama-bench", file, threads)
            facts["llama.cpp"] = peer.build
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
