"""Every matrix product of a model's training step, by itself, as a share of the peak measured in the same run.

A product is timed with its operands in the caches, the same ones again and again ("warm"), and with operands that were not
touched for longer than the last-level cache remembers ("cold"). Inside a step weights are cold and activations partly warm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from barellm.config import Config, ModelConfig
from barellm.cpu.backend import Bench, describe
from barellm.cpu.lang.sync import BARRIER, RECORD_NBYTES
from barellm.cpu.step import CpuSession
from barellm.profiling.peers import description
from barellm.profiling.roofline import Ceiling
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.storage import dtype_of

COLD_BYTES = 96 << 20  # three last-level caches of 32 MiB
MOST_COPIES = 200
CLASSIFIER_TOKENS = 1024  # the classifier does its products in chunks of so many
TABLE_SECONDS = 0.015  # of one timed walk, so that starting it does not count


@dataclass(frozen=True)
class Product:
    """One product with the weight (N, K) of a layer. `op`: what it is after fusion; `mode`: how its result is written."""

    layer: str
    op: str
    N: int
    K: int
    tokens: int
    mode: str = "store"


def products(model: ModelConfig, tokens: int) -> list[Product]:
    """Forward, input gradient, weight gradient (first and further micro-batches) of each of the five shapes of a block."""
    C = model.channels
    layers = {
        "qkv": (3 * C, C, "linear", "matmul_dx"),
        "proj": (C, C, "linear_residual", "matmul_dx"),
        "fc": (4 * C, C, "linear_gelu", "matmul_dx"),
        "fcproj": (C, 4 * C, "linear_residual", "matmul_dx_gelu"),
        "head": (model.padded_vocab, C, "matmul", "matmul_dx"),
    }
    found = []
    for layer, (N, K, forward, dx) in layers.items():
        count = min(tokens, CLASSIFIER_TOKENS) if layer == "head" else tokens
        found += [Product(layer, op, N, K, count) for op in (forward, dx, "matmul_dw")]
        found.append(Product(layer, "matmul_dw", N, K, count, "add"))
    return found


def append(p: Program, product: Product, copy: int) -> None:
    """The product's primitive ops, over tensors that keep their places: no two copies share bytes."""
    N, K, mode = product.N, product.K, product.mode
    sizes = (Dim("batch", 1), Dim("seq", product.tokens))

    def activation(name: str, width: int, dtype: str = p.compute) -> Tensor:
        return p.store.get(f"{name}.{copy}", (*sizes, width), dtype, "state")

    weight = p.parameter(f"weight.{copy}", (N, K))
    if product.op == "matmul_dw":
        into = {"dweight": (p.gradient_of(weight), mode)}
        p.apply(ops.MatmulDw, into=into, dy=activation("dy", N), x=activation("x", K))
    elif product.op == "matmul_dx":
        p.apply(ops.MatmulDx, into={"dx": (activation("dx", K), mode)}, dy=activation("dy", N), weight=weight)
    elif product.op == "matmul_dx_gelu":
        dx = p.apply(ops.MatmulDx, dy=activation("dy", N), weight=weight).dx
        p.apply(ops.GeluBackward, into={"dx": (activation("dx", K), mode)}, dy=dx, x=activation("pre", K))
    elif product.op == "matmul":
        p.apply(ops.Matmul, into={"y": (activation("y", N), mode)}, x=activation("x", K), weight=weight)
    else:
        y = p.apply(ops.Matmul, x=activation("x", K), weight=weight).y
        bias = p.parameter(f"bias.{copy}", (N,))
        if product.op == "linear":
            p.apply(ops.Bias, into={"y": (activation("y", N), mode)}, x=y, bias=bias)
        elif product.op == "linear_gelu":
            pre = p.apply(ops.Bias, into={"y": (activation("pre", N), mode)}, x=y, bias=bias).y
            p.apply(ops.Gelu, into={"y": (activation("y", N), mode)}, x=pre)
        else:
            y = p.apply(ops.Bias, x=y, bias=bias).y
            stream = activation("y", N, "fp32")
            p.apply(ops.Add, into={"y": (stream, mode)}, a=activation("residual", N, "fp32"), b=y)


class Timed:
    """A product compiled and mapped in as many copies as overflow the caches; `warm()` and `cold()` give seconds of one."""

    def __init__(self, product: Product, dtype: str) -> None:
        one = Program(Store(), compute=dtype)
        append(one, product, 0)
        self.nbytes = sum(t.nbytes for t in one.store.tensors.values())
        copies = min(max(2, -(-COLD_BYTES // self.nbytes)), MOST_COPIES)
        program = Program(Store(), compute=dtype)
        for copy in range(copies):
            append(program, product, copy)
        self.session = CpuSession({"products": program})
        self.ops = self.session.lowered["products"].ops
        assert [op.name for op in self.ops] == [product.op] * copies
        _fill(self.session.arena)
        self.session.run("products", batch=1, seq=product.tokens)
        records = self.session.records["products"]
        once = self._table(records, 1)()
        turns = 1 + int(TABLE_SECONDS / (once * copies))
        self.cold = self._table(records, turns)
        self.warm = self._table(records[:1], turns * copies)

    def _table(self, records: np.ndarray, turns: int) -> Callable[[], float]:
        """A function that walks `records` `turns` times, with a barrier behind each, and gives the seconds of one."""
        rows, words = len(records) * turns, RECORD_NBYTES // 8
        block = np.zeros((rows + 1) * words, np.int64)
        skip = -block.ctypes.data % RECORD_NBYTES // 8
        table = block[skip : skip + rows * words].reshape(turns, *records.shape)
        table[:] = records
        table[..., BARRIER // 8] = 1

        def run() -> float:
            start = time.perf_counter()
            self.session.pool.run(table.ctypes.data, rows)
            return (time.perf_counter() - start) / rows

        return run

    def close(self) -> None:
        self.session.close()


def _fill(arena: np.ndarray) -> None:
    """Random normal bf16 everywhere, which as pairs are fp32 numbers as normal; it also backs the memory with pages."""
    words = arena[: arena.size // 2 * 2].view(np.uint16)
    block = np.random.default_rng(1).standard_normal(1 << 20).astype(dtype_of("bf16")).view(np.uint16)
    for start in range(0, words.size, block.size):
        words[start : start + block.size] = block[: words.size - start]


def measure(
    config: Config, *, tokens: list[int], rounds: int, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """A row per product of the model and number of tokens, `report`ed when it is there. Peaks, warm and cold take turns; all are
    medians of `rounds`. `config` has its dtype resolved."""
    bench, rows = Bench(), []
    try:
        for product in (p for count in tokens for p in products(config.model, count)):
            rows.append(_row(product, config.train.dtype, rounds, bench))
            report(rows[-1])
    finally:
        bench.close()
    machine = {name: describe()[name] for name in ("isa", "threads")}
    return {**description("gemm", config), **machine, "rounds": rounds, "products": rows}


def _row(product: Product, dtype: str, rounds: int, bench: Bench) -> dict[str, Any]:
    timed = Timed(product, dtype)
    try:
        samples = [(bench.peak("fp32"), bench.peak(dtype), timed.warm(), timed.cold()) for _ in range(rounds)]
    finally:
        timed.close()
    fp32, peak, warm, cold = (median(column) for column in zip(*samples, strict=True))
    op = timed.ops[0]
    bound = Ceiling({"fp32": fp32, "bf16": peak}, {}).operations(op)
    return {
        **product.__dict__,
        "dtype": dtype,
        "flops": op.flops(),
        "nbytes": timed.nbytes,
        "peak_flops": peak,
        "warm_s": warm,
        "cold_s": cold,
        "warm_percent": 100 * bound / warm,
        "cold_percent": 100 * bound / cold,
    }
