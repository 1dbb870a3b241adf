"""The cases of the tuner's harness: a program of one op, its operands, and the float64 reference of its result, on sampled rows and
columns. Operands and results are persistent tensors, so that they are written once."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np

from barellm.cuda.kernel import Sizes
from barellm.cuda.tuning import AttentionProblem, GemmProblem, Problem
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, SLOPES
from barellm.program.ops.pointwise.random import keep
from barellm.program.tensor import Dim
from barellm.runtime.tuner import harness
from barellm.runtime.tuner.harness import EPS, random_normal

# Of the sums of magnitudes of attention: operands of 16 bits round probabilities, then results.
ATTENTION = {"fp32": 2.0**-16, "bf16": 2.0**-7, "fp16": 2.0**-10}
SAMPLE = 256  # rows and columns that are held against float64; bits are compared everywhere
CUT_DEPTH = 16  # of K that an instruction of 16-bit tensor cores multiplies
SLOPE_ERROR = 1e-5  # of an activation's slope, where it is near 0
SCALARS = {"seed": 5, "step": 2, "sample": 9}  # of attention with dropout
RATE, STREAM = 0.2, 3

Read = Callable[[str, np.ndarray], np.ndarray]  # (output, numbers of rows) -> those rows as they lie in memory


class Case(ABC):
    """One op to run and to verify. `outputs`: name -> columns of its rows. `runs`: the sizes that are tried, the full size last."""

    outputs: dict[str, int]
    runs: list[Sizes]

    def __init__(self, compute: str) -> None:
        self.compute, self.store = compute, Store()
        self.scalars: dict[str, int] = {}
        self.worst = 0.0  # error over its bound, of all values looked at

    def give(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Declare a persistent tensor, which `given` fills before a run."""
        self.store.get(name, shape, dtype, "state")

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        """The values of every persistent tensor before a run."""
        return {name: random_normal(t.shape, t.dtype, seed) for seed, (name, t) in enumerate(self.store.tensors.items())}

    @abstractmethod
    def program(self) -> Program:
        """A program of one op. Every call returns another program over the same tensors."""

    @abstractmethod
    def rows(self, output: str, sizes: Sizes) -> int:
        """How many rows an output has in a run of these sizes."""

    @abstractmethod
    def hold(self, read: Read, sizes: Sizes) -> None:
        """Raise harness.Wrong if a value of a run of these sizes is off. read(output, rows) loads rows of an output."""

    def compare(self, name: str, found: np.ndarray, want: np.ndarray, bound: np.ndarray, at: tuple[Any, Any], sizes: Sizes) -> None:
        """Compare values at these (rows, columns) with float64 `want`, and remember the worst error relative to its bound."""
        self.worst = max(self.worst, harness.compare(name, found, want, bound, at, sizes))


class GemmCase(Case):
    """A GEMM with a weight (N, K), by its transposes, with the problem's epilogue."""

    def __init__(self, problem: GemmProblem) -> None:
        """Declare the operands that this problem's operation and epilogue need."""
        super().__init__("fp32" if problem.dtype == "tf32" else problem.dtype)
        self.problem, kind, tokens = problem, self.compute, problem.tokens
        seq, operation, epilogue = (Dim("batch", 1), Dim("seq", tokens)), problem.operation, problem.epilogue
        # The result is (tokens, N), (tokens, K) or (N, K), and the depth is what is left of the three.
        columns = {"nt": (problem.cols, problem.depth), "nn": (problem.depth, problem.cols)}
        N, K = columns.get(operation, (problem.rows, problem.cols))
        given = {
            "dy": ((*seq, N), kind, operation != "nt"), "x": ((*seq, K), kind, operation != "nn"),
            "weight": ((N, K), kind, operation != "tn"), "bias": ((N,), "fp32", epilogue in (*ACTIVATIONS, "residual")),
            "residual": ((*seq, N), "fp32", epilogue == "residual"), "pre": ((*seq, problem.cols), kind, epilogue in SLOPES),
            "out": ((N, K), "fp32", operation == "tn"),
        }  # fmt: skip
        for name, (shape, dtype, needed) in given.items():
            if needed:
                self.give(name, shape, dtype)
        self.added = epilogue in ("add", "start")
        self.scalars = {"accumulate": int(self.added)}
        self.outputs = ({"pre": N} if epilogue in ACTIVATIONS else {}) | {"out": problem.cols}
        self.runs = [Sizes(1, count) for count in sorted({1, min(37, tokens), max(1, tokens - 1), tokens})]

    def program(self) -> Program:
        """The op and what its epilogue fuses, as primitive ops; "tn" writes `out` directly."""
        problem, t = self.problem, self.store.tensors
        p = Program(self.store, compute=self.compute)
        if problem.operation == "tn":
            p.apply(ops.MatmulDw, into={"dweight": (t["out"], problem.epilogue or "store")}, dy=t["dy"], x=t["x"])
            return p
        if problem.operation == "nn":
            out = p.apply(ops.MatmulDx, dy=t["dy"], weight=t["weight"]).dx
        else:
            out = p.apply(ops.Matmul, x=t["x"], weight=t["weight"]).y
            out = p.apply(ops.Bias, x=out, bias=t["bias"]).y if "bias" in t else out
            if problem.epilogue in ACTIVATIONS:
                p.output("pre", out)
                out = p.activate(out, problem.epilogue)
            out = p.apply(ops.Add, a=t["residual"], b=out).y if "residual" in t else out
        if problem.epilogue in SLOPES:
            out = p.apply(SLOPES[problem.epilogue].backward, dy=out, x=t["pre"]).dx
        p.output("out", out)
        return p

    def rows(self, output: str, sizes: Sizes) -> int:
        return self.problem.rows if self.problem.operation == "tn" else sizes.tokens

    def hold(self, read: Read, sizes: Sizes) -> None:
        """Compare with the float64 GEMM and its epilogue; bounds allow for TF32's rounding and tensor cores' truncated sums."""
        problem = self.problem
        rows, cols = at = _sampled(self.rows("out", sizes)), _sampled(problem.cols)

        def tensor_of(name: str) -> np.ndarray:
            a = self.given[name]
            return a[0, : sizes.seq] if a.ndim == 3 else a

        def operand(epilogue: str) -> np.ndarray:
            if epilogue == "bias":
                return tensor_of("bias")[cols]
            return tensor_of("pre" if epilogue in SLOPES else "out" if self.added else epilogue)[np.ix_(*at)]

        if problem.operation == "nt":
            left, right = tensor_of("x")[rows], tensor_of("weight")[cols].T
        elif problem.operation == "nn":
            left, right = tensor_of("dy")[rows], tensor_of("weight")[:, cols]
        else:
            left, right = tensor_of("dy")[:, rows].T, tensor_of("x")[:, cols]
        epilogues = ["bias"] * ("bias" in self.given) + [problem.epilogue] * bool(problem.epilogue)
        results = harness.gemm_reference(left, right, epilogues, operand, SLOPE_ERROR)
        rounded = 2.0**-9 if problem.dtype == "tf32" else 0.0  # of the operands
        left, right = (a.astype(np.float64) for a in (left, right))
        # Tensor cores cut a sum off after each CUT_DEPTH of K, towards zero (Fasi et al. 2021): of 32,767 products an H200's sums
        # are 1e-4 short.
        cuts = 0.0 if problem.dtype == "fp32" else ceil_div(left.shape[1], CUT_DEPTH) * EPS
        more = rounded * (np.abs(left) @ np.abs(right)) + cuts * (np.abs(left @ right) + np.sqrt(left**2 @ right**2))
        for name, (want, bound) in results.items():
            self.compare(name, read(name, rows)[:, cols], want, bound + more, at, sizes)


class AttentionCase(Case):
    """Attention forward, or backward from nearly the `out` and `lse` of the forward pass, because dqkv is a function of both."""

    def __init__(self, problem: AttentionProblem) -> None:
        """Declare qkv, and for the backward pass out, dout and lse. The sizes tried include one token and partial blocks."""
        super().__init__(problem.dtype)
        self.problem, B, T = problem, Dim("batch", problem.batch), Dim("seq", problem.seq)
        H, D, kind, self.forward = problem.heads, problem.head, problem.dtype, problem.operation == "forward"
        self.kv_heads = problem.kv_heads or H
        self.widths = H * D, self.kv_heads * D, self.kv_heads * D  # of q, k, v, side by side
        self.give("qkv", (B, T, sum(self.widths)), kind)
        if not self.forward:
            self.give("out", (B, T, H * D), kind)
            self.give("dout", (B, T, H * D), kind)
            self.give("lse", (B, H, T), "fp32")
        self.scalars = SCALARS if problem.dropout else {}
        self.outputs = {"out": H * D, "lse": 1} if self.forward else {"dqkv": sum(self.widths)}
        sizes = {(1, 1), (1, min(37, problem.seq)), (problem.batch, max(1, problem.seq - 1))}
        self.runs = [Sizes(*pair) for pair in sorted(sizes | {(problem.batch, problem.seq)})]

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        found = super().given
        if "lse" in found:
            found["lse"] = (0.1 * found["lse"] + 0.5 + np.log1p(np.arange(self.problem.seq))).astype(np.float32)
        return found

    def program(self) -> Program:
        """Attention forward, or its gradient with dq, dk and dv as columns of one tensor, as models have it."""
        t = self.store.tensors
        attrs: dict[str, Any] = {"heads": self.problem.heads, "kv_heads": self.kv_heads}
        attrs |= {"rate": RATE if self.problem.dropout else 0.0, "stream": STREAM}
        p = Program(self.store, compute=self.compute)
        operands = dict(zip("qkv", p.split(t["qkv"], self.widths), strict=True))
        if self.forward:
            for name, out in p.apply(ops.Attention, **operands, **attrs).outputs.items():
                p.output(name, out)
            return p
        dqkv = p.output("dqkv", p.activation("dqkv", t["qkv"].shape, self.compute))
        into = {f"d{n}": (view, "store") for n, view in zip("qkv", p.split(dqkv, self.widths), strict=True)}
        operands |= {name: t[name] for name in ("out", "dout", "lse")}
        p.apply(ops.AttentionBackward, into=into, **operands, **attrs)
        return p

    def rows(self, output: str, sizes: Sizes) -> int:
        return sizes.tokens * (self.problem.heads if output == "lse" else 1)

    def hold(self, read: Read, sizes: Sizes) -> None:
        """The first head of the first sequence, the last of the last."""
        for sequence, head in {(0, 0), (sizes.batch - 1, self.problem.heads - 1)}:
            self._hold_head(read, sizes, sequence, head)

    def _hold_head(self, read: Read, sizes: Sizes, sequence: int, head: int) -> None:
        """Compare one head of one sequence with float64 attention, on sampled queries (or keys, for dk and dv): for the forward
        pass out and lse, else the gradients. Error bounds are relative to the sums of the terms' magnitudes. `read(name, rows)`:
        rows of a result; `head`: a query head, whose group shares a key head. Wrong where a value is off."""
        T, D, H, G = sizes.seq, self.problem.head, self.problem.heads, self.kv_heads
        group, sampled = head // (H // G), _sampled(T)
        queries, keys = (np.arange(T), sampled) if self.problem.operation == "keys" else (sampled, np.arange(T))

        def tensor_of(name: str) -> np.ndarray:
            """(T, heads, D) of this sequence, as a run of these sizes finds it."""
            flat, columns = self.given[name].reshape(-1), self.given[name].shape[-1]
            return flat[sequence * T * columns :][: T * columns].reshape(T, -1, D).astype(np.float64)

        qkv, scale = tensor_of("qkv"), 1 / sqrt(D)
        k, v = qkv[:, H + group], qkv[:, H + G + group]

        def probabilities(h: int, lse: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
            """(probabilities, log-sum-exp of each row, multipliers of dropout) of head h; `lse`: the saved one, None: computed."""
            s = np.where(keys <= queries[:, None], qkv[queries, h] @ k[keys].T * scale, -np.inf)
            top = s.max(1, keepdims=True)
            logs = top + np.log(np.exp(s - top).sum(1, keepdims=True)) if lse is None else lse
            return np.exp(s - logs), logs, self._kept(queries, keys, sequence, h)

        def compare(name: str, output: str, at: int, want: np.ndarray, size: np.ndarray) -> None:
            """`at`: which D columns of the output's rows."""
            columns = np.arange(D) + at * D
            got = read(output, sequence * T + sampled)[:, columns]
            self.compare(name, got, want, ATTENTION[self.problem.dtype] * size + EPS, (sampled, columns), sizes)

        if self.forward:
            p, lse, kept = probabilities(head)
            compare("out", "out", head, p * kept @ v, p * kept @ np.abs(v))
            got = read("lse", (sequence * H + head) * T + sampled)
            self.compare("lse", got, lse, 2.0**-16 * (1 + np.abs(lse)), (sampled, [head]), sizes)
            return
        dout, out, lse = tensor_of("dout"), tensor_of("out"), self.given["lse"].reshape(-1)[sequence * H * T :][: H * T]
        dk, dk_size, dv, dv_size = np.zeros((4, len(sampled), D))
        for h in range(group * (H // G), (group + 1) * (H // G)) if self.problem.operation == "keys" else (head,):
            p, _, kept = probabilities(h, lse.reshape(H, T)[h, queries, None].astype(np.float64))
            q, do, delta = qkv[queries, h], dout[queries, h], (dout * out)[queries, h]
            dp = kept * (do @ v[keys].T)
            ds = p * (dp - delta.sum(1, keepdims=True)) * scale
            size = p * (np.abs(dp) + np.abs(delta).sum(1, keepdims=True)) * scale
            if self.problem.operation == "queries":
                compare("dq", "dqkv", head, ds @ k, size @ np.abs(k))
                return
            dk, dk_size = dk + ds.T @ q, dk_size + size.T @ np.abs(q)
            dv, dv_size = dv + (p * kept).T @ do, dv_size + (p * kept).T @ np.abs(do)
        compare("dk", "dqkv", H + group, dk, dk_size)
        compare("dv", "dqkv", H + G + group, dv, dv_size)

    def _kept(self, queries: np.ndarray, keys: np.ndarray, sequence: int, head: int) -> np.ndarray | float:
        """The multipliers of dropout, 1 without it."""
        if not self.problem.dropout:
            return 1.0
        rows, sample = queries * self.problem.heads + head, SCALARS["sample"] + sequence
        return keep(SCALARS["seed"], SCALARS["step"], sample, STREAM, rows, int(keys[-1]) + 1, RATE)[:, keys]


def _sampled(count: int) -> np.ndarray:
    return harness.sample_indices(count, SAMPLE)


def case_of(problem: Problem) -> Case:
    return GemmCase(problem) if isinstance(problem, GemmProblem) else AttentionCase(problem)
