"""Program: the list of ops, and the methods that a model calls. Each call appends; nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from barellm.program import ops
from barellm.program.ops.base import Op
from barellm.program.tensor import PERSISTENT, Role, Tensor


class Store:
    """Persistent tensors by name, shared by the programs of one arena: parameters, gradients, states, caches."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: str, role: Role, **more: Any) -> Tensor:
        have = self.tensors.get(name)
        if have is None:
            have = self.tensors[name] = Tensor(name, shape, dtype, role, **more)
        elif (tuple(have.shape), have.dtype, have.role) != (tuple(shape), dtype, role):
            raise ValueError(f"{name} is declared twice: {have} {have.role} and {shape} {dtype} {role}")
        return have

    def of_role(self, role: Role) -> list[Tensor]:
        return [t for t in self.tensors.values() if t.role == role]


class Program:
    """A list of primitive ops over named tensors.

    `compute` is the dtype of matmul operands and of the activations between them: "fp32" or "bf16". The residual
    stream, statistics and gradients of parameters are fp32 in both.
    """

    def __init__(self, store: Store, *, compute: str = "fp32") -> None:
        if compute not in ("fp32", "bf16"):
            raise ValueError(f"compute dtype is {compute!r}, expected 'fp32' or 'bf16'")
        self.store = store
        self.compute = compute
        self.ops: list[Op] = []
        self.named: dict[str, Tensor] = {}  # inputs and outputs, which a session reads and writes by name
        self._names: dict[str, int] = {}
        self._segment: str | None = None
        self._streams = 0  # random ops so far: each draws from its own stream

    # --- tensors ---

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "i32") -> Tensor:
        self.named[name] = t = Tensor(name, shape, dtype, "input")
        return t

    def output(self, name: str, t: Tensor) -> Tensor:
        """Keep `t` until the program's end, readable as `name`."""
        t.role = "output"
        self.named[name] = t
        return t

    def parameter(
        self, name: str, shape: tuple[int, ...], *, std: float | None = None, value: float = 0.0, valid_rows: int = 0
    ) -> Tensor:
        """Initialised with normals of deviation `std`, or with `value`. A matrix of a bf16 program is stored split."""
        dtype = "split" if len(shape) == 2 and self.compute == "bf16" else "fp32"
        init = ("normal", std) if std is not None else ("constant", value)
        return self.store.get(name, shape, dtype, "parameter", init=init, valid_rows=valid_rows or int(shape[0]))

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Its gradient, fp32, which lives in the store under `NAME.grad`."""
        return self.store.get(f"{parameter.name}.grad", parameter.shape, "fp32", "gradient")

    def state(self, name: str, shape: tuple[int, ...], dtype: str = "fp32") -> Tensor:
        return self.store.get(name, shape, dtype, "state")

    def cache(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self.store.get(name, shape, dtype, "cache")

    # --- the list ---

    @contextmanager
    def segment(self, name: str | None) -> Iterator[None]:
        """Ops appended inside belong to the segment `name`: a unit for recompute, profiling and sharding."""
        before, self._segment = self._segment, name
        try:
            yield
        finally:
            self._segment = before

    def apply(self, op_type: type[Op], *, into: dict[str, tuple[Tensor, str]] | None = None, **operands: Any) -> Op:
        """Append one op. `into` names outputs that go to existing tensors, with their mode: "store", "add", "start"."""
        into = into or {}
        inputs = {k: v for k, v in operands.items() if v is None or isinstance(v, Tensor)}
        op = op_type(inputs, {k: v for k, v in operands.items() if k not in inputs})
        op.segment = self._segment
        for name, (shape, dtype) in op.infer(**op.inputs).items():
            if name in into:
                target, mode = into[name]
                assert target.size == Tensor("", shape, dtype, "scratch").size, (op_type.name, name, target, shape)
            elif name in op.inplace:
                target, mode = op.inputs[op.inplace[name]], "store"
            else:
                target, mode = Tensor(self._unique(f"{op.name}.{name}"), shape, dtype, "activation"), "store"
            op.outputs[name] = target
            op.modes[name] = mode
        self.ops.append(op)
        return op

    def _unique(self, name: str) -> str:
        full = f"{self._segment}.{name}" if self._segment else name
        count = self._names[full] = self._names.get(full, 0) + 1
        return full if count == 1 else f"{full}.{count}"

    def eliminate_dead(self) -> None:
        """Drop ops whose outputs nobody reads: the last add of a recomputed segment, say."""
        live: set[Tensor] = set()
        kept: list[Op] = []
        for op in reversed(self.ops):
            if any(t in live or t.role in PERSISTENT or t.role == "output" for t in op.outputs.values()):
                kept.append(op)
                live |= set(op.inputs.values())
        self.ops = kept[::-1]

    def backward(self, loss: Tensor, *, recompute: bool = False) -> None:
        """Append the backward ops of `loss` (1,): each parameter that leads to it gets a gradient, `NAME.grad` in the store.
        `recompute` drops the activations of segments and computes them again: less memory, more work."""
        from barellm.program.backward import backward

        backward(self, loss, recompute=recompute)

    @property
    def flops(self) -> int:
        """Model FLOPs at the planned maximum sizes: products with weights, causal attention, no recompute."""
        return sum(op.flops() for op in self.ops if op.counted and not op.recomputed)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the run-time scalars that a run is given, sorted."""
        names = {name for op in self.ops for name in op.scalars}
        names |= {"accumulate" for op in self.ops if "start" in op.modes.values()}
        tensors = {t for op in self.ops for t in (*op.inputs.values(), *op.outputs.values())}
        return tuple(sorted(names | {dim.name for t in tensors for dim in t.dims}))

    # --- what a model calls ---

    def embedding(self, tokens: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
        """tokens (B, T) i32 -> (B, T, C) fp32, the residual stream."""
        return self.apply(ops.Embedding, tokens=tokens, wte=wte, wpe=wpe).y

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K), weight (N, K), bias (N) -> (..., N)."""
        y = self.apply(ops.Matmul, x=self._operand(x), weight=weight).y
        return y if bias is None else self.apply(ops.Bias, x=y, bias=bias).y

    def layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
        """x (..., C) fp32, weight and bias (C) -> (..., C) in the compute dtype, normalised over the last axis (Ba et al. 2016)."""
        return self.apply(ops.LayerNorm, x=x, weight=weight, bias=bias, eps=eps, dtype=self.compute).y

    def attention(self, qkv: Tensor, *, heads: int, dropout: float = 0.0) -> Tensor:
        """Causal self-attention, qkv (B, T, 3C) -> (B, T, C)."""
        return self.apply(ops.Attention, qkv=qkv, heads=heads, rate=dropout, stream=self._stream(dropout)).out

    def attention_cached(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, *, heads: int) -> Tensor:
        """Decoding: qkv (B, T, 3C) of positions pos .. pos + T, caches (B, maxT, C) -> (B, T, C)."""
        return self.apply(ops.AttentionCached, qkv=qkv, k_cache=k_cache, v_cache=v_cache, heads=heads).out

    def gelu(self, x: Tensor) -> Tensor:
        """GELU in its tanh form, as GPT-2 has it (Hendrycks and Gimpel 2016). Any shape."""
        return self.apply(ops.Gelu, x=x).y

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b of equal shapes: the residual stream, fp32, and what a block adds to it."""
        return self.apply(ops.Add, a=a, b=b).y

    def dropout(self, x: Tensor, rate: float) -> Tensor:
        """x (B, T, C). Rate 0 adds no op."""
        return x if rate == 0 else self.apply(ops.Dropout, x=x, rate=rate, stream=self._stream(rate)).y

    def classifier(self, x: Tensor, weight: Tensor, targets: Tensor, *, valid_vocab: int) -> Tensor:
        """x (B, T, C), weight (Vp, C), targets (B, T) i32, -1 ignored -> loss (1,), times the scalar inv_targets."""
        logits = self.apply(ops.Matmul, x=self._operand(x), weight=weight).y
        return self.apply(ops.CrossEntropy, logits=logits, targets=targets, valid_vocab=valid_vocab).loss

    def last_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """fp32 logits (B, 1, Vp) of the last position of x (B, T, C)."""
        last = self.apply(ops.LastRow, x=x).y
        return self.apply(ops.Matmul, x=last, weight=weight, dtype="fp32").y

    def _operand(self, x: Tensor) -> Tensor:
        """x in the dtype that products take."""
        return x if x.dtype == self.compute else self.apply(ops.Cast, x=x, dtype=self.compute).y

    def _stream(self, rate: float) -> int:
        self._streams += rate > 0
        return self._streams
