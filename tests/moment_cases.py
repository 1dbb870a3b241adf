"""What every backend is asked about 16-bit moments: AdamW's kernel against the formats, code by code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.moments import decode, encode
from barellm.program.ops.pointwise import random

STREAM = 1 << 16


class Update:
    """One AdamW op of n elements whose moments are given and read as codes."""

    def __init__(self, open_session: Callable[..., Any], n: int, *, beta1: float, beta2: float, stream: int | None) -> None:
        store = Store()
        p = Program(store)
        tensors = {"param": "fp32", "grad": "fp32", "m": "e6m9", "v": "ue6m10"}
        inputs = {name: store.get(name, (n,), dtype, "state") for name, dtype in tensors.items()}
        attrs = {"beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.0, "stream": stream}
        p.apply(ops.AdamW, **inputs, clip=store.get("clip", (2,), "fp32", "state"), **attrs)
        self.session = open_session({"op": p})
        self.session.write("clip", np.ones(2))

    def codes(self, name: str) -> np.ndarray:
        return self.session.stored(self.session.tensors[name])

    def run(self, *, m, v, grad, step: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        self.codes("m")[:], self.codes("v")[:] = m, v
        self.session.write("grad", grad)
        self.session.run("op", lr=0.0, step=step, seed=seed)
        return self.codes("m").copy(), self.codes("v").copy()

    def close(self) -> None:
        self.session.close()


def check_rounding(open_session: Callable[..., Any], *, stream: int | None, every: int = 1) -> None:
    """Betas of 0: m is the gradient and v its square. At every boundary between two codes of m (or `every` so many), its neighbours
    in fp32, the same for roots of v's boundaries, and what is too large or too small; bit for bit."""
    signed, unsigned = (decode(np.arange(1, 1 << bits), name).astype(np.float64) for name, bits in (("e6m9", 15), ("ue6m10", 16)))
    edges = [((t[:-1] + t[1:]) / 2).astype(np.float32) for t in (signed, unsigned)]
    edges[1] = np.sqrt(edges[1], dtype=np.float32)
    near = [np.nextafter(e, np.float32(to)) for e in edges for to in (0, np.inf)]
    special = [0, -0.0, 1e-45, 1e-38, 2**-60, signed[0], np.nextafter(np.float32(signed[0]), 0, dtype=np.float32), 2**-30,
               np.sqrt(unsigned[0]), 1e-10, 3.9, 4, 15.98, 16, 1e20, np.inf, np.nan]  # fmt: skip
    some = np.exp(np.random.default_rng(0).uniform(np.log(1e-21), np.log(100), 10**5))
    below = np.random.default_rng(1).uniform(0.9, 1, 4000)  # of the least number that has a code
    special = [*special, *(below * signed[0]), *np.sqrt(below * unsigned[0])]
    g = np.concatenate([*(x[::every] for x in (*edges, *near)), np.array(special), some[::every]]).astype(np.float32)
    g = np.concatenate([g, -g, [1.0]]).astype(np.float32)  # an odd number of elements
    update = Update(open_session, g.size, beta1=0.0, beta2=0.0, stream=stream)
    m, v = update.run(m=0, v=0, grad=g, step=7, seed=5)
    update.close()
    bits = None if stream is None else random.shared_words(5, 7, 0, stream, g.size)
    with np.errstate(over="ignore"):
        square = g * g
    for got, x, dtype, dither in (
        (m, g, "e6m9", None if bits is None else bits & 0x3FFF),
        (v, square, "ue6m10", None if bits is None else bits >> np.uint32(19)),
    ):
        want = encode(x, dtype, dither)
        wrong = np.flatnonzero(got != want)
        assert not wrong.size, f"{dtype} of {x[wrong[0]]!r}: {got[wrong[0]]:#x}, expected {want[wrong[0]]:#x} ({wrong.size} wrong)"
