"""Small programs for tests: ops that start and end a graph anywhere, and random graphs of real ops."""

from __future__ import annotations

import numpy as np

from barellm.program.builder import Program, Store
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.reference import ReferenceSession


class Leaf(Op):
    """y = x: makes an activation of a parameter."""

    name = "leaf"

    def infer(self, x):
        return {"y": (x.shape, x.dtype)}

    def reference(self, x):
        return {"y": x}

    def gradient(self, g, y):
        g.write(Leaf, {"y": self.x}, x=y)


class Weigh(Op):
    """loss = sum(x * weights) with fixed random weights: any tensor becomes a loss."""

    name = "weigh"

    def infer(self, x):
        return {"loss": ((1,), "fp32")}

    def weights(self, shape):
        return np.random.default_rng(self.seed).normal(size=shape)

    def reference(self, x):
        return {"loss": (x * self.weights(x.shape)).sum().reshape(1)}

    def gradient(self, g, loss):
        g.write(WeighBackward, {"dx": self.x}, shape=self.x.shape, seed=self.seed)


class WeighBackward(Weigh):
    """dx = weights. It reads no tensor: every tensor of a graph that is read matters for its results."""

    name = "weigh_backward"

    def infer(self):
        return {"dx": (self.attrs["shape"], "fp32")}

    def reference(self):
        return {"dx": self.weights(tuple(int(n) for n in self.attrs["shape"]))}


def random_graph(seed: int, *, length: int, batch: int = 2, seq: int = 3, width: int = 4) -> Program:
    """`length` random ops, each on any earlier value, so values fan out, meet again and pass gradients through; some in
    segments. The last ones are added up to the loss. Rows are (batch, seq, width)."""
    rng = np.random.default_rng(seed)
    p = Program(Store())
    shape = (Dim("batch", batch), Dim("seq", seq))

    def parameter(*shape: int) -> Tensor:
        return p.parameter(f"w{len(p.store.tensors)}", shape, std=0.5)

    values = [p.embedding(p.input("tokens", shape), parameter(5, width), parameter(seq, width))]

    tables = p.rope_tables(seq, width, theta=10.0)

    def one() -> Tensor:
        x, y = (values[i] for i in rng.integers(max(0, len(values) - 4), len(values), 2))
        kind = rng.integers(0, 14)
        if kind == 0:
            return p.linear(x, parameter(width, width), parameter(width))
        if kind == 1:
            return p.gelu(p.linear(x, parameter(width, width)))
        if kind == 2:
            return p.layernorm(x, parameter(width), parameter(width) if rng.integers(2) else None)
        if kind == 3:
            return p.attention(*p.split(p.linear(x, parameter(3 * width, width)), 3), heads=2, dropout=0.3 * rng.integers(2))
        if kind == 4:
            return p.dropout(x, 0.25)
        if kind == 5:
            return p.rope(p.rmsnorm(x, parameter(width) if rng.integers(2) else None), tables, heads=1)
        if kind == 6:  # views of a tensor that others use too, as a whole or the same columns again
            packed = p.linear(x, parameter(2 * width, width))
            gate, up = p.split(packed, 2)
            y = p.swiglu(gate, gate if rng.integers(2) else up)
            z = p.linear(p.gelu(packed), parameter(width, 2 * width))
            return p.add(p.add(y, z), p.swiglu(up, gate)) if rng.integers(2) else p.add(z, p.add(y, p.swiglu(up, gate)))
        if kind == 7:
            return p.linear(p.swiglu(*p.split(x, 2)), parameter(width, width // 2))
        if kind == 8:
            left, right = p.split(x, 2)
            return p.linear(p.add(right, left), parameter(width, width // 2))
        if kind == 9:  # elements of one vector: some several times, some never
            k = parameter(5)
            element = lambda: p.element(k, int(rng.integers(4)))  # noqa: E731
            return p.mix((x, element()), (y, float(rng.integers(2))), (x, element()))
        if kind == 10:  # the first columns of values that others read as a whole
            z = p.gate_logits(x, parameter(2, 2), extra=y)
            return p.gated(y, z, base=x, factor=p.element(parameter(2), 1), shift=int(rng.integers(2)))
        if kind == 11:
            z = p.gate_logits(y, parameter(1, 3))
            return p.gated(x, z, base=p.gated(y, p.gate_logits(x, parameter(2, 4))), factor=parameter(1), squash=True)
        if kind == 12:  # products of columns, of which some are read twice
            left, right = p.split(x, 2)
            z = p.add(p.linear(left, parameter(width, width // 2)), p.linear(right, parameter(width, width // 2)))
            return p.add(z, p.linear(left, parameter(width, width // 2)))
        return p.add(x, y)

    for i in range(length):
        # A segment is a run of consecutive ops, as in a model.
        with p.segment(f"s{i // 3}" if seed % 2 else None):
            values.append(one())
    x = p.add(values[-1], values[-2])
    p.output("loss", p.apply(Weigh, x=x, seed=seed).loss)
    return p


def run_graph(p: Program, *, seed: int = 0, **options) -> dict[str, np.ndarray]:
    """Loss and all gradients after one run from seeded weights."""
    session = ReferenceSession({"forward_backward": p}, **options)
    rng = np.random.default_rng(seed)
    for t in p.store.of_role("parameter"):
        session.write(t.name, rng.normal(size=t.shape) * 0.5)
    shape = tuple(int(n) for n in p.named["tokens"].shape)
    session.write("tokens", rng.integers(0, 5, shape))
    session.run("forward_backward", seed=7, step=3, sample=11)
    gradients = {t.name: session.read(t.name) for t in p.store.of_role("gradient")}
    return {"loss": session.read("loss"), **gradients}
