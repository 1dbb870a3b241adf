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
    """A GEMM with a weight (N, K), by its transposes, with the problem's epilogue.

    The result is (tokens, N) for "nt", (tokens, K) for "nn", (N, K) for "tn"; the depth is what is left of the three. `added`:
    whether the result is added to what `out` holds before the run."""

    def __init__(self, problem: GemmProblem) -> None:
        """Declare the operands and the results. The sizes tried include one token and partial tiles."""
        super().__init__("fp32" if problem.dtype == "tf32" else problem.dtype)
        self.problem = problem
        self.added = problem.epilogue in ("add", "start")
        self.scalars = {"accumulate": int(self.added)}
        self._declare_operands()
        self.outputs = dict.fromkeys(("pre", "out") if problem.epilogue in ACTIVATIONS else ("out",), problem.cols)
        tokens = problem.tokens
        self.runs = [Sizes(1, count) for count in sorted({1, min(37, tokens), max(1, tokens - 1), tokens})]

    def _declare_operands(self) -> None:
        """Declare the tensors that this operation and this epilogue read, and dweight, which "tn" adds to."""
        problem, operation, epilogue = self.problem, self.problem.operation, self.problem.epilogue
        tokens = (Dim("batch", 1), Dim("seq", problem.tokens))
        weights = {"nt": (problem.cols, problem.depth), "nn": (problem.depth, problem.cols), "tn": (problem.rows, problem.cols)}
        N, K = weights[operation]
        if operation != "nt":
            self.give("dy", (*tokens, N), self.compute)
        if operation != "nn":
            self.give("x", (*tokens, K), self.compute)
        if operation != "tn":
            self.give("weight", (N, K), self.compute)
        if epilogue in (*ACTIVATIONS, "residual"):
            self.give("bias", (N,), "fp32")
        if epilogue == "residual":
            self.give("residual", (*tokens, N), "fp32")
        if epilogue in SLOPES:
            self.give("pre", (*tokens, problem.cols), self.compute)
        if operation == "tn":
            self.give("out", (N, K), "fp32")

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
        if "bias" in t:
            out = p.apply(ops.Bias, x=out, bias=t["bias"]).y
        if problem.epilogue in ACTIVATIONS:
            p.output("pre", out)
            out = p.activate(out, problem.epilogue)
        elif problem.epilogue == "residual":
            out = p.apply(ops.Add, a=t["residual"], b=out).y
        elif problem.epilogue in SLOPES:
            out = p.apply(SLOPES[problem.epilogue].backward, dy=out, x=t["pre"]).dx
        p.output("out", out)
        return p

    def rows(self, output: str, sizes: Sizes) -> int:
        return self.problem.rows if self.problem.operation == "tn" else sizes.tokens

    def hold(self, read: Read, sizes: Sizes) -> None:
        """Compare sampled rows and columns with the float64 GEMM and its epilogue."""
        problem = self.problem
        rows = harness.sample_indices(self.rows("out", sizes), SAMPLE)
        cols = harness.sample_indices(problem.cols, SAMPLE)
        left, right = self._factors(rows, cols, sizes)

        def epilogue_operand(epilogue: str) -> np.ndarray:
            """The sampled elements of what an epilogue reads."""
            if epilogue == "bias":
                return self.given["bias"][cols]
            name = "pre" if epilogue in SLOPES else "out" if self.added else epilogue
            return self._of_run(name, sizes)[np.ix_(rows, cols)]

        epilogues = ["bias"] if "bias" in self.given else []
        if problem.epilogue:
            epilogues.append(problem.epilogue)
        results = harness.gemm_reference(left, right, epilogues, epilogue_operand, SLOPE_ERROR)
        allowance = self._tensor_core_error(left, right)
        for name, (want, bound) in results.items():
            self.compare(name, read(name, rows)[:, cols], want, bound + allowance, (rows, cols), sizes)

    def _of_run(self, name: str, sizes: Sizes) -> np.ndarray:
        """A given tensor as a matrix: of an activation (1, tokens, columns) the tokens of a run of these sizes."""
        return self.given[name][0, : sizes.seq] if self.given[name].ndim == 3 else self.given[name]

    def _factors(self, rows: np.ndarray, cols: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        """The factors (rows, depth) and (depth, cols) whose product is the result at these rows and columns."""
        if self.problem.operation == "nt":
            return self._of_run("x", sizes)[rows], self.given["weight"][cols].T
        dy = self._of_run("dy", sizes)
        if self.problem.operation == "nn":
            return dy[rows], self.given["weight"][:, cols]
        return dy[:, rows].T, self._of_run("x", sizes)[:, cols]

    def _tensor_core_error(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """How far tensor cores may be from the float64 product, besides what `harness.gemm_reference` allows: by the rounding of
        operands to TF32, and because they cut a sum off after each CUT_DEPTH of K, towards zero (Fasi et al. 2021): of 32,767
        products an H200's sums are 1e-4 short."""
        a, b = left.astype(np.float64), right.astype(np.float64)
        rounding = 2.0**-9 if self.problem.dtype == "tf32" else 0.0
        cuts = 0.0 if self.problem.dtype == "fp32" else ceil_div(left.shape[1], CUT_DEPTH) * EPS
        return rounding * (np.abs(a) @ np.abs(b)) + cuts * (np.abs(a @ b) + np.sqrt(a**2 @ b**2))


class SequenceReference:
    """Causal attention of one sequence of a run in float64, forward and backward, a head at a time.

    H query heads share G key heads, of D columns each; `length` T tokens. q (T, H, D), k, v (T, G, D) are what the run reads, and
    for the backward pass dout, out (T, H, D) and the saved lse (H, T). Each result comes with its `size`, the sum of its terms'
    magnitudes, which error bounds are relative to. `queries`, `keys`: positions in the sequence."""

    def __init__(self, problem: AttentionProblem, given: dict[str, np.ndarray], sequence: int, length: int) -> None:
        """`given`: the values of all sequences; a run whose sequences are shorter finds them packed at the start of the memory."""
        self.problem, self.sequence, self.length = problem, sequence, length
        self.heads, self.kv_heads = problem.heads, problem.kv_heads or problem.heads
        self.group_size = self.heads // self.kv_heads
        self.scale = 1 / sqrt(problem.head)

        def of_sequence(name: str) -> np.ndarray:
            """(T, heads, D)"""
            elements = length * given[name].shape[-1]
            flat = given[name].reshape(-1)[sequence * elements : (sequence + 1) * elements]
            return flat.reshape(length, -1, problem.head).astype(np.float64)

        self.q, self.k, self.v = np.split(of_sequence("qkv"), [self.heads, self.heads + self.kv_heads], axis=1)
        if "dout" in given:
            self.dout, self.out = of_sequence("dout"), of_sequence("out")
            lse = given["lse"].reshape(-1)[sequence * self.heads * length :]
            self.lse = lse[: self.heads * length].reshape(self.heads, length).astype(np.float64)

    def masked_scores(self, head: int, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Scaled scores (queries, keys) of a query head, -inf where a key is after its query."""
        k = self.k[keys, head // self.group_size]
        return np.where(keys <= queries[:, None], self.q[queries, head] @ k.T * self.scale, -np.inf)

    def dropout_multipliers(self, head: int, queries: np.ndarray, keys: np.ndarray) -> np.ndarray | float:
        """What dropout multiplies the probabilities (queries, keys) of a query head by; 1 without it."""
        if not self.problem.dropout:
            return 1.0
        rows, sample = queries * self.heads + head, SCALARS["sample"] + self.sequence
        return keep(SCALARS["seed"], SCALARS["step"], sample, STREAM, rows, int(keys[-1]) + 1, RATE)[:, keys]

    def forward(self, head: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(out (queries, D), its size, lse (queries, 1)) of a query head."""
        keys = np.arange(self.length)
        v = self.v[:, head // self.group_size]
        s = self.masked_scores(head, queries, keys)
        top = s.max(1, keepdims=True)
        lse = top + np.log(np.exp(s - top).sum(1, keepdims=True))
        p = np.exp(s - lse) * self.dropout_multipliers(head, queries, keys)
        return p @ v, p @ np.abs(v), lse

    def score_gradients(self, head: int, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ds, its size, the probabilities after dropout), each (queries, keys), of a query head; ds is of the unscaled scores."""
        p = np.exp(self.masked_scores(head, queries, keys) - self.lse[head, queries, None])
        kept = self.dropout_multipliers(head, queries, keys)
        dp = kept * (self.dout[queries, head] @ self.v[keys, head // self.group_size].T)
        delta_terms = (self.dout * self.out)[queries, head]
        ds = p * (dp - delta_terms.sum(1, keepdims=True)) * self.scale
        size = p * (np.abs(dp) + np.abs(delta_terms).sum(1, keepdims=True)) * self.scale
        return ds, size, p * kept

    def dq(self, head: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dq (queries, D), its size) of a query head."""
        k = self.k[:, head // self.group_size]
        ds, size, _ = self.score_gradients(head, queries, np.arange(self.length))
        return ds @ k, size @ np.abs(k)

    def dkv(self, kv_head: int, keys: np.ndarray) -> dict[str, np.ndarray]:
        """dk and dv (keys, D) of a key head with their sizes: sums over the query heads that share it."""
        queries = np.arange(self.length)
        sums = {name: np.zeros((len(keys), self.problem.head)) for name in ("dk", "dk size", "dv", "dv size")}
        for head in range(kv_head * self.group_size, (kv_head + 1) * self.group_size):
            q, dout = self.q[:, head], self.dout[:, head]
            ds, size, p = self.score_gradients(head, queries, keys)
            sums["dk"] += ds.T @ q
            sums["dk size"] += size.T @ np.abs(q)
            sums["dv"] += p.T @ dout
            sums["dv size"] += p.T @ np.abs(dout)
        return sums


class AttentionCase(Case):
    """Attention forward, or backward from nearly the `out` and `lse` of the forward pass, because dqkv is a function of both."""

    def __init__(self, problem: AttentionProblem) -> None:
        """Declare qkv, and for the backward pass out, dout and lse. The sizes tried include one token and partial blocks."""
        super().__init__(problem.dtype)
        self.problem = problem
        self.forward = problem.operation == "forward"
        self.kv_heads = problem.kv_heads or problem.heads
        batch, seq = Dim("batch", problem.batch), Dim("seq", problem.seq)
        width, kv_width = problem.heads * problem.head, self.kv_heads * problem.head
        self.widths = width, kv_width, kv_width  # of q, k, v, side by side
        self.give("qkv", (batch, seq, sum(self.widths)), self.compute)
        if not self.forward:
            self.give("out", (batch, seq, width), self.compute)
            self.give("dout", (batch, seq, width), self.compute)
            self.give("lse", (batch, problem.heads, seq), "fp32")
        self.scalars = SCALARS if problem.dropout else {}
        self.outputs = {"out": width, "lse": 1} if self.forward else {"dqkv": sum(self.widths)}
        sizes = {(1, 1), (1, min(37, problem.seq)), (problem.batch, max(1, problem.seq - 1)), (problem.batch, problem.seq)}
        self.runs = [Sizes(*pair) for pair in sorted(sizes)]

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
        """Compare the first head of the first sequence and the last head of the last one, at sampled queries (or keys, for dk and
        dv), with float64 attention."""
        heads = self.problem.heads
        sampled = harness.sample_indices(sizes.seq, SAMPLE)
        for sequence, head in {(0, 0), (sizes.batch - 1, heads - 1)}:
            reference = SequenceReference(self.problem, self.given, sequence, sizes.seq)

            def compare(output: str, name: str, head_column: int, want: np.ndarray, size: np.ndarray, sequence=sequence) -> None:
                """`name`: what it is called in a message; head_column: which D columns of the output's rows it is."""
                columns = np.arange(self.problem.head) + head_column * self.problem.head
                found = read(output, sequence * sizes.seq + sampled)[:, columns]
                self.compare(name, found, want, ATTENTION[self.problem.dtype] * size + EPS, (sampled, columns), sizes)

            if self.forward:
                out, size, lse = reference.forward(head, sampled)
                compare("out", "out", head, out, size)
                found = read("lse", (sequence * heads + head) * sizes.seq + sampled)
                self.compare("lse", found, lse, 2.0**-16 * (1 + np.abs(lse)), (sampled, [head]), sizes)
            elif self.problem.operation == "queries":
                compare("dqkv", "dq", head, *reference.dq(head, sampled))
            else:
                kv_head = head // reference.group_size
                sums = reference.dkv(kv_head, sampled)
                compare("dqkv", "dk", heads + kv_head, sums["dk"], sums["dk size"])
                compare("dqkv", "dv", heads + self.kv_heads + kv_head, sums["dv"], sums["dv size"])


def case_of(problem: Problem) -> Case:
    return GemmCase(problem) if isinstance(problem, GemmProblem) else AttentionCase(problem)
