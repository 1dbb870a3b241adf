"""Dropout with random bits of three kinds. Shapes: x (B, T, C).

`dropout` takes Threefry's words, which each element can find by itself (`ops/random.py`). `tausworthe_dropout` takes the draws of a
cheaper generator, whose streams restart at each row and every 512 columns (`ops/tausworthe.py`)."""

from typing import Any

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor
from barellm.program.ops.pointwise import random, tausworthe


class Dropout(Op):
    """y = x * keep / (1 - rate), x (B, T, C) (Srivastava et al. 2014)."""

    name = "dropout"
    scalars = ("seed", "step", "sample")
    flops_per_element = (1, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if len(x.shape) != 3 or not 0 < self.rate < 1:
            raise ValueError(f"{self.name} expects x (B, T, C) and 0 < rate < 1: x {tuple(x.shape)}, rate {self.rate}")
        return {"y": (x.shape, x.dtype)}

    def reference(self, x, seed, step, sample):
        return {"y": x * random.keep_batch(x.shape, self.rate, self.stream, seed, step, sample)}

    def gradient(self, g, y):
        g.write(DropoutBackward, {"dx": self.x}, dy=y, rate=self.rate, stream=self.stream, dtype=self.x.dtype)


class DropoutBackward(Op):
    """dx = dy * keep / (1 - rate), with the bits of the forward op."""

    name = "dropout_backward"
    scalars = ("seed", "step", "sample")
    flops_per_element = (1, "dy")

    def infer(self, dy: Tensor) -> dict[str, Spec]:
        return {"dx": (dy.shape, self.attrs["dtype"])}

    def reference(self, dy, seed, step, sample):
        return {"dx": dy * random.keep_batch(dy.shape, self.rate, self.stream, seed, step, sample)}


def generator_of(op: Any) -> tausworthe.Generator:
    """The generator that an op's attribute `bits` names."""
    if op.bits not in tausworthe.GENERATORS:
        raise ValueError(f"{op.name} has bits {op.bits!r}, expected one of {', '.join(tausworthe.GENERATORS)}")
    return tausworthe.GENERATORS[op.bits]


class TauswortheDropout(Dropout):
    """y = x * keep / (1 - rate), x (B, T, C), with the draws of the generator `bits`."""

    name = "tausworthe_dropout"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        generator_of(self)
        return super().infer(x)

    def reference(self, x, seed, step, sample):
        return {"y": x * tausworthe.keep_stream(generator_of(self), x.shape, self.rate, self.stream, seed, step, sample)}

    def gradient(self, g, y):
        same = {"rate": self.rate, "stream": self.stream, "bits": self.bits, "dtype": self.x.dtype}
        g.write(TauswortheDropoutBackward, {"dx": self.x}, dy=y, **same)


class TauswortheDropoutBackward(DropoutBackward):
    """dx = dy * keep / (1 - rate), with the draws of the forward op."""

    name = "tausworthe_dropout_backward"

    def reference(self, dy, seed, step, sample):
        return {"dx": dy * tausworthe.keep_stream(generator_of(self), dy.shape, self.rate, self.stream, seed, step, sample)}


class Calls(Graph):
    def dropout(self, x: Tensor, rate: float, bits: str = "threefry") -> Tensor:
        """x (B, T, C). Rate 0 adds no op. `bits` names the generator: threefry, taus88 or lfsr113."""
        if rate == 0:
            return x
        stream = self.random_stream(rate)
        if bits == "threefry":
            return self.apply(Dropout, x=x, rate=rate, stream=stream).y
        return self.apply(TauswortheDropout, x=x, rate=rate, stream=stream, bits=bits).y
