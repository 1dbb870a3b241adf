"""The cases that the tuner's bed runs: a program of one op, its operands, and what its result must be, by float64. Operands and
results are persistent tensors, so that they are written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from math import prod, sqrt
from typing import Any

import numpy as np

from barellm.cuda.kernel import Sizes
from barellm.cuda.tuner.problem import AttentionProblem, GemmProblem, Problem
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import FORMATS, numpy_dtype
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, SLOPES
from barellm.program.ops.pointwise.random import keep
from barellm.program.tensor import Dim
from barellm.runtime.tuner.child import Wrong

EPS = 2.0**-24
# Of the sums of magnitudes of attention: operands of 16 bits round probabilities, then results.
ATTENTION = {"fp32": 2.0**-16, "bf16": 2.0**-7, "fp16": 2.0**-10}
SAMPLE = 256  # rows and columns that are held against float64; bits are compared everywhere
TILE = 128  # rows and columns by which a wrong value's place is told
PERIOD = 1_000_003  # numbers that are drawn; a prime, so that rows and tiles differ
SCALARS = {"seed": 5, "step": 2, "sample": 9}  # of attention with dropout
RATE, STREAM = 0.2, 3

Read = Callable[[str, np.ndarray], np.ndarray]  # (output, numbers of rows) -> those rows as they lie in memory


def random_normal(shape: tuple[int, ...], dtype: str = "fp32", seed: int = 1) -> np.ndarray:
    """Normally distributed numbers, which repeat after PERIOD of them."""
    base = np.random.default_rng(seed).standard_normal(min(PERIOD, prod(shape)), np.float32).astype(numpy_dtype(dtype))
    return np.resize(base, shape)


def sample_indices(count: int, most: int = SAMPLE) -> np.ndarray:
    """Numbers below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


class Case(ABC):
    """`outputs`: name -> columns of its rows. `runs`: the sizes that are tried, the whole last."""

    outputs: dict[str, int]
    runs: list[Sizes]

    def __init__(self, compute: str) -> None:
        self.compute, self.store = compute, Store()
        self.scalars: dict[str, int] = {}
        self.worst = 0.0  # error over its bound, of all values looked at

    def give(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """A tensor that is there before a run."""
        self.store.get(name, shape, dtype, "state")

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        """The values of every persistent tensor before a run."""
        return {
            name: random_normal(t.shape, t.dtype, seed) for seed, (name, t) in enumerate(self.store.tensors.items())
        }

    @abstractmethod
    def program(self) -> Program:
        """A program of one op. Every call returns another program over the same tensors."""

    @abstractmethod
    def rows(self, output: str, sizes: Sizes) -> int:
        """How many rows an output has in a run of these sizes."""

    @abstractmethod
    def hold(self, read: Read, sizes: Sizes) -> None:
        """Wrong where a value is off."""

    def compare(
        self, name: str, found: np.ndarray, want: np.ndarray, bound: np.ndarray, at: tuple[Any, Any], sizes: Sizes
    ) -> None:
        """Hold values against float64. `at`: the rows and columns that they are of. A reason names the first wrong tile, and how
        many times its bound the largest error is: 1.3 looks like a bound that is too small, 1000 like a fault."""
        values = found.astype(np.float64)
        (half_ulp,) = (f.half_ulp for f in FORMATS.values() if f.kind == "float" and numpy_dtype(f.name) == found.dtype)
        bound = bound + 1.1 * half_ulp * (np.abs(want) + bound)
        times = np.nan_to_num(np.abs(values - want) / bound, nan=np.inf)
        self.worst = max(self.worst, float(times.max()))
        bad = times > 1
        if bad.any():
            r, c = (int(i) for i in np.argwhere(bad)[0])
            row, column = int(at[0][r]), int(at[1][c])
            where = f"{name}[{row}, {column}] is {values[r, c]:.6g}, expected {want[r, c]:.6g}"
            tile = f"first in tile ({row // TILE}, {column // TILE}) of {TILE} x {TILE}"
            many = f"{int(bad.sum())} of {bad.size} looked at, by up to {times.max():.3g} times the bound"
            raise Wrong(f"wrong values ({sizes.batch} x {sizes.seq}): {where}; {many}; {tile}")


class GemmCase(Case):
    """A product with the weight (N, K), as its `role` says."""

    def __init__(self, work: GemmProblem) -> None:
        super().__init__("fp32" if work.dtype == "tf32" else work.dtype)
        self.work, kind, seq = work, self.compute, (Dim("batch", 1), Dim("seq", work.tokens))
        # The result is (tokens, N), (tokens, K) or (N, K), and the depth is what is left of the three.
        N, K = {"nt": (work.cols, work.depth), "nn": (work.depth, work.cols), "tn": (work.rows, work.cols)}[work.role]
        if work.role != "nt":
            self.give("dy", (*seq, N), kind)
        if work.role != "nn":
            self.give("x", (*seq, K), kind)
        if work.role != "tn":
            self.give("weight", (N, K), kind)
        if work.epilogue in (*ACTIVATIONS, "residual"):
            self.give("bias", (N,), "fp32")
        if work.epilogue == "residual":
            self.give("residual", (*seq, N), "fp32")
        if work.epilogue in SLOPES:
            self.give("pre", (*seq, work.cols), kind)
        if work.role == "tn":
            self.give("out", (N, K), "fp32")
        self.added = work.epilogue in ("add", "start")
        self.scalars = {"accumulate": int(self.added)}
        self.outputs = {"pre": N} if work.epilogue in ACTIVATIONS else {}
        self.outputs |= {"out": work.cols}
        tokens = work.tokens
        self.runs = [Sizes(1, count) for count in sorted({1, min(37, tokens), max(1, tokens - 1), tokens})]

    def program(self) -> Program:
        work, t = self.work, self.store.tensors
        p = Program(self.store, compute=self.compute)
        if work.role == "tn":
            p.apply(ops.MatmulDw, into={"dweight": (t["out"], work.epilogue or "store")}, dy=t["dy"], x=t["x"])
            return p
        if work.role == "nn":
            out = p.apply(ops.MatmulDx, dy=t["dy"], weight=t["weight"]).dx
        else:
            out = p.apply(ops.Matmul, x=t["x"], weight=t["weight"]).y
            out = p.apply(ops.Bias, x=out, bias=t["bias"]).y if "bias" in t else out
            if work.epilogue in ACTIVATIONS:
                p.output("pre", out)
                out = p.activate(out, work.epilogue)
            out = p.apply(ops.Add, a=t["residual"], b=out).y if "residual" in t else out
        out = p.apply(SLOPES[work.epilogue].backward, dy=out, x=t["pre"]).dx if work.epilogue in SLOPES else out
        p.output("out", out)
        return p

    def rows(self, output: str, sizes: Sizes) -> int:
        return self.work.rows if self.work.role == "tn" else sizes.tokens

    def hold(self, read: Read, sizes: Sizes) -> None:
        rows, cols = sample_indices(self.rows("out", sizes)), sample_indices(self.work.cols)

        def of(name: str) -> np.ndarray:
            a = self.given[name]
            return a[0, : sizes.seq] if a.ndim == 3 else a

        if self.work.role == "nt":
            left, right = of("x")[rows], of("weight")[cols].T
        elif self.work.role == "nn":
            left, right = of("dy")[rows], of("weight")[:, cols]
        else:
            left, right = of("dy")[:, rows].T, of("x")[:, cols]
        left, right = left.astype(np.float64), right.astype(np.float64)
        want = left @ right
        bound = 10 * EPS * np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=0) + EPS
        if self.work.dtype == "tf32":
            bound = bound + 2.0**-9 * (np.abs(left) @ np.abs(right))

        def compare(name: str) -> None:
            self.compare(name, read(name, rows)[:, cols], want, bound, (rows, cols), sizes)

        if "bias" in self.store.tensors:
            want = want + of("bias")[cols]
        if self.work.epilogue in ACTIVATIONS:
            compare("pre")
            want = ACTIVATIONS[self.work.epilogue].value(want)
        elif self.work.epilogue in SLOPES:
            pre = of("pre")[np.ix_(rows, cols)].astype(np.float64)
            bound = bound + 1e-5 * np.abs(want)  # where the slope is near 0
            want = want * SLOPES[self.work.epilogue].slope(pre)
        elif self.work.epilogue == "residual":
            want = want + of("residual")[np.ix_(rows, cols)]
        elif self.added:
            want = want + of("out")[np.ix_(rows, cols)]
        compare("out")


class AttentionCase(Case):
    """Attention forward, or backward from an `out` and an `lse` that are nearly those of the forward pass, because dqkv is a
    function of both."""

    def __init__(self, work: AttentionProblem) -> None:
        super().__init__(work.dtype)
        self.work, B, T = work, Dim("batch", work.batch), Dim("seq", work.seq)
        self.C, H, kind = work.heads * work.head, work.heads, work.dtype
        self.kv_heads = work.kv_heads or H
        self.widths = self.C, self.kv_heads * work.head, self.kv_heads * work.head  # of q, k, v, side by side
        self.give("qkv", (B, T, sum(self.widths)), kind)
        if work.role != "forward":
            self.give("out", (B, T, self.C), kind)
            self.give("dout", (B, T, self.C), kind)
            self.give("lse", (B, H, T), "fp32")
        self.scalars = SCALARS if work.dropout else {}
        self.outputs = {"out": self.C, "lse": 1} if work.role == "forward" else {"dqkv": sum(self.widths)}
        sizes = {(1, 1), (1, min(37, work.seq)), (work.batch, max(1, work.seq - 1)), (work.batch, work.seq)}
        self.runs = [Sizes(*pair) for pair in sorted(sizes)]

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        found = super().given
        if "lse" in found:
            found["lse"] = (0.1 * found["lse"] + 0.5 + np.log1p(np.arange(self.work.seq))).astype(np.float32)
        return found

    def program(self) -> Program:
        t = self.store.tensors
        attrs: dict[str, Any] = {"heads": self.work.heads, "kv_heads": self.kv_heads}
        attrs |= {"rate": RATE if self.work.dropout else 0.0, "stream": STREAM}
        p = Program(self.store, compute=self.compute)
        operands = dict(zip("qkv", p.split(t["qkv"], self.widths), strict=True))
        if self.work.role == "forward":
            op = p.apply(ops.Attention, **operands, **attrs)
            for name, out in op.outputs.items():
                p.output(name, out)
            return p
        dqkv = p.output("dqkv", p.activation("dqkv", t["qkv"].shape, self.compute))
        into = {f"d{n}": (view, "store") for n, view in zip("qkv", p.split(dqkv, self.widths), strict=True)}
        operands |= {name: t[name] for name in ("out", "dout", "lse")}
        p.apply(ops.AttentionBackward, into=into, **operands, **attrs)
        return p

    def rows(self, output: str, sizes: Sizes) -> int:
        return sizes.tokens * (self.work.heads if output == "lse" else 1)

    def hold(self, read: Read, sizes: Sizes) -> None:
        """The first head of the first sequence, the last of the last."""
        for sequence, head in {(0, 0), (sizes.batch - 1, self.work.heads - 1)}:
            self._hold_head(read, sizes, sequence, head)

    def _hold_head(self, read: Read, sizes: Sizes, sequence: int, head: int) -> None:
        T, D, C, H = sizes.seq, self.work.head, self.C, self.work.heads
        share = H // self.kv_heads
        picked = sample_indices(T)
        own, group = np.arange(D) + head * D, np.arange(D) + head // share * D

        def of(name: str, columns: int) -> np.ndarray:
            """(T, columns) of this sequence, as a run of these sizes finds it."""
            flat = self.given[name].reshape(-1)
            return flat[sequence * T * columns : (sequence + 1) * T * columns].reshape(T, columns).astype(np.float64)

        qkv = of("qkv", sum(self.widths))
        q, k, v = qkv[:, :C], qkv[:, C + group], qkv[:, C + self.widths[1] + group]
        relative = ATTENTION[self.work.dtype]

        def compare(name: str, values: np.ndarray, want: np.ndarray, size: np.ndarray) -> None:
            self.compare(name, values, want, relative * size + EPS, (picked, own), sizes)

        if self.work.role == "keys":
            queries, keys = np.arange(T), picked
        else:
            queries, keys = picked, np.arange(T)
        tokens = sequence * T + picked

        def scores(head: int) -> tuple[np.ndarray, np.ndarray | float]:
            """The scores of a head that shares these keys, and which of their probabilities dropout keeps."""
            s = q[:, head * D : (head + 1) * D][queries] @ k[keys].T / sqrt(D)
            return np.where(keys[None, :] <= queries[:, None], s, -np.inf), self._kept(queries, keys, sequence, head)

        if self.work.role == "forward":
            s, dropped = scores(head)
            top = s.max(1, keepdims=True)
            lse = top + np.log(np.exp(s - top).sum(1, keepdims=True))
            p = np.exp(s - lse) * dropped
            compare("out", read("out", tokens)[:, own], p @ v, p @ np.abs(v))
            found = read("lse", (sequence * H + head) * T + picked)
            self.compare("lse", found, lse, 2.0**-16 * (1 + np.abs(lse)), (picked, own), sizes)
            return

        def slopes(head: int) -> tuple[np.ndarray, ...]:
            """One head's q, dout, probabilities after dropout, the gradient of its scores, and the size of what that is made of."""
            s, dropped = scores(head)
            columns = np.arange(D) + head * D
            lse = self.given["lse"].reshape(-1)[(sequence * H + head) * T :][:T].astype(np.float64)
            p = np.exp(s - lse[queries][:, None])
            do, out = (of(name, C)[:, columns] for name in ("dout", "out"))
            dp, delta = dropped * (do[queries] @ v[keys].T), (do * out).sum(1)[queries][:, None]
            size = p * (np.abs(dp) + np.abs(do * out).sum(1)[queries][:, None])
            return q[:, columns], do, p * dropped, p * (dp - delta), size

        rows = read("dqkv", tokens)
        if self.work.role == "queries":
            *_, ds, size = slopes(head)
            compare("dq", rows[:, own], ds @ k / sqrt(D), size @ np.abs(k) / sqrt(D))
            return
        served = [slopes(group[0] // D * share + i) for i in range(share)]
        dk, dk_size, dv, dv_size = (np.zeros((len(picked), D)) for _ in range(4))
        for q_head, do, p, ds, size in served:
            dk, dk_size = dk + ds.T @ q_head / sqrt(D), dk_size + size.T @ np.abs(q_head) / sqrt(D)
            dv, dv_size = dv + p.T @ do, dv_size + p.T @ np.abs(do)
        compare("dk", rows[:, C + group], dk, dk_size)
        compare("dv", rows[:, C + self.widths[1] + group], dv, dv_size)

    def _kept(self, queries: np.ndarray, keys: np.ndarray, sequence: int, head: int) -> np.ndarray | float:
        if not self.work.dropout:
            return 1.0
        rows, scalars = queries * self.work.heads + head, self.scalars
        factor = keep(
            scalars["seed"], scalars["step"], scalars["sample"] + sequence, STREAM, rows, int(keys[-1]) + 1, RATE
        )
        return factor[:, keys]


def case_of(work: Problem) -> Case:
    return GemmCase(work) if isinstance(work, GemmProblem) else AttentionCase(work)
