"""Operands and error bounds of gates and mixes: what the tests of every backend share. Each case is what `check_op` takes."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS
from barellm.program.ops.pointwise.elementwise import sigmoid
from barellm.program.tensor import Dim, View
from barellm.runtime.reference import ReferenceSession
from tests.cases import chain_bound, normal
from tests.check import EPS, persistent, stored, tokens

# batch, length, gates, columns that are read of x and of extra (0: there is none)
LOGITS = [(1, 1, 1, 1, 0), (2, 35, 6, 12, 0), (2, 5, 6, 6, 6), (1, 70, 3, 37, 0), (3, 37, 1, 5, 4), (1, 33, 40, 9, 17)]
# batch, length, columns, groups, shift, what there is besides x and z
GATED = [
    (1, 1, 1, 1, 0, ""),
    (2, 5, 12, 3, 0, "base"),
    (2, 37, 65, 5, 1, "base factor"),
    (1, 70, 256, 2, 0, "base factor squash"),
    (3, 4, 33, 1, 6, "base factor"),
    (2, 3, 384, 6, 2, "factor squash"),
    (1, 5, 600, 2, 1, "base"),
    (1, 7, 70, 70, 0, "base"),
]
# batch, length, columns, and the coefficients: numbers, or None for tensors
MIXES = [
    ((1, 1, 1), (None,)),
    ((2, 3, 7), (1.0, None)),
    ((2, 37, 65), (None, 1.0, None, -0.5)),
    ((1, 70, 128), (None, None, None, None)),
    ((2, 5, 33), (0.5, 2.0, 1.0)),
]


def turns(shapes):
    """Each shape once in each of fp32 and bf16, the modes in turn; the last in fp16 too."""
    cases = [(shape, dtype) for shape in shapes for dtype in ("fp32", "bf16")] + [(shapes[-1], "fp16")]
    modes = [("store", "add", "start")[(i + i // 3) % 3] for i in range(len(cases))]
    found = [(*case, mode) for case, mode in zip(cases, modes, strict=True)]
    return pytest.mark.parametrize("shape, dtype, mode", found, ids=str)


def by_mode(case: dict) -> dict:
    """The case as `check_op` takes it; what starts is added to in this run."""
    modes = {name: mode for name, mode in case.get("modes", {}).items() if mode != "store"}
    scalars = {"accumulate": 1} if "start" in modes.values() else {}
    return case | {"modes": modes, "scalars": scalars}


def logits_operands(shape, dtype, mode: str = "store"):
    """x and extra as columns of wider tensors, the weights as products read them, and the case without them."""
    B, T, N, k, e = shape
    weight = persistent(normal(N, k + e, seed=2), PRECISIONS[dtype].weights)
    given = {"wide": tokens(normal(B, T, k + 5), dtype), "weight": weight}
    views, read = {"x": ("wide", 2, k)}, [given["wide"].values[..., 2 : 2 + k]]
    if e:
        given["more"] = tokens(normal(B, T, e + 1, seed=3), dtype)
        views["extra"] = ("more", 0, e)
        read.append(given["more"].values[..., :e])
    w = stored(weight.values, dtype)
    return given, views, np.concatenate(read, axis=-1), w


def logits_case(shape, dtype) -> dict:
    given, views, read, w = logits_operands(shape, dtype)
    return {"given": given, "views": views, "bounds": {"z": chain_bound(read, w.T)}}


def logits_backward_case(shape, dtype, mode) -> dict:
    B, T, N, k, e = shape
    given, views, read, w = logits_operands(shape, dtype)
    dz = tokens(normal(B, T, N, seed=4))
    given["dz"] = dz
    views["dx"] = ("dwide", 3, k)
    size = chain_bound(dz.values, w) + 4 * EPS
    flat = dz.values.reshape(-1, N).T
    bounds = {"dx": size[..., :k], "dweight": chain_bound(flat, read.reshape(-1, k + e)) + 4 * EPS}
    modes = {"dx": mode, "dweight": mode}
    if e:
        views["dextra"], bounds["dextra"], modes["dextra"] = ("dmore", 0, e), size[..., k:], mode
    return {"given": given, "views": views, "bounds": bounds, "modes": modes}


def gated_operands(shape, dtype):
    B, T, C, N, shift, words = shape
    given = {"x": tokens(normal(B, T, C), dtype), "z": tokens(3 * normal(B, T, N, seed=2))}
    if "factor" in words:
        given["factor"] = persistent(np.array([-1.3]))
    attrs = {"scale": 2.0, "squash": "squash" in words, "shift": shift}
    return given, attrs


def gated_case(shape, dtype, mode="store", stream=None) -> dict:
    B, T, C, _, _, words = shape
    given, attrs = gated_operands(shape, dtype)
    size, views = np.abs(given["x"].values).max(), {}
    if "base" in words:
        given["wide"] = tokens(normal(B, T, C + 7, seed=5), stream or dtype)
        views["base"] = ("wide", 4, C)
    return {"given": given, "views": views, "bounds": {"y": 30 * EPS * (size + 1)}, "modes": {"y": mode}, **attrs}


def gated_backward_case(shape, dtype, mode="store") -> dict:
    B, T, C, N, shift, words = shape
    given, attrs = gated_operands(shape, dtype)
    given["dy"] = dy = tokens(normal(B, T, C, seed=6), dtype)
    moved = np.zeros((B, T, C))
    moved[:, shift:] = given["x"].values[:, : max(T - shift, 0)]
    groups = (B, T, N, C // N)
    of_group = chain_bound(dy.values.reshape(groups)[..., None, :], moved.reshape(groups)[..., None])[..., 0, 0]
    sums = np.abs(dy.values * moved).reshape(groups).sum(3)
    bounds = {"dx": 30 * EPS * (np.abs(dy.values).max() + 1), "dz": 4 * of_group + 30 * EPS * (sums + 1)}
    modes = {"dx": mode, "dz": mode}
    if "factor" in words:
        s = sigmoid(given["z"].values)
        modes["dfactor"], bounds["dfactor"] = mode, 2 * (s * of_group).sum() + 30 * EPS * ((s * sums).sum() + 1)
    return {"given": given, "views": {}, "bounds": bounds, "modes": modes, **attrs}


def mix_operands(case, dtype):
    """Terms in turn of the stream's dtype and of the activations'; coefficients (1,)."""
    shape, numbers = case
    dtypes = tuple(("fp32", dtype)[i % 2] for i in range(len(numbers)))
    terms = {f"x{i}": tokens(normal(*shape, seed=i), d) for i, d in enumerate(dtypes)}
    learned = {f"k{i}": persistent(normal(1, seed=9 + i)) for i, number in enumerate(numbers) if number is None}
    return terms, learned, dtypes


def mix_case(case, dtype, mode="store", stream="fp32") -> dict:
    terms, learned, _ = mix_operands(case, dtype)
    size = sum(np.abs(x.values) for x in terms.values())
    factor = 1 + max([abs(k.values.item()) for k in learned.values()], default=1.0) + 2
    given = terms | learned
    return {
        "given": given, "bounds": {"y": 5 * EPS * factor * (size + 1)}, "modes": {"y": mode},
        "numbers": case[1], "dtype": stream,
    }  # fmt: skip


def mix_backward_case(case, dtype, mode="store", stream="fp32") -> dict:
    shape, numbers = case
    terms, learned, dtypes = mix_operands(case, dtype)
    dy = tokens(normal(*shape, seed=20), stream)
    given, bounds, modes = {"dy": dy} | learned, {}, {}
    dtypes = tuple("" if n == 1.0 and d == stream else d for n, d in zip(numbers, dtypes, strict=True))
    for i, number in enumerate(numbers):
        if dtypes[i]:
            bounds[f"dx{i}"], modes[f"dx{i}"] = 8 * EPS * (np.abs(dy.values) + 1), mode
        if number is None:
            x = given[f"x{i}"] = terms[f"x{i}"]
            n = dy.values.size
            bounds[f"dk{i}"] = chain_bound(dy.values.reshape(1, n), x.values.reshape(n, 1)).item() + 4 * EPS
            modes[f"dk{i}"] = mode
    return {"given": given, "bounds": bounds, "modes": modes, "numbers": numbers, "dtypes": dtypes}


def small_model(compute: str, dims: tuple[int, int] = (2, 7), C: int = 16, heads: int = 2) -> Program:
    """Gates and mixes as a model calls them: a smear, a value embedding, gated heads, a skip lane, learned numbers of one vector,
    and columns of a product and elements of the vector that nobody reads."""
    p = Program(Store(), compute=compute)
    rows = Dim("batch", dims[0]), Dim("seq", dims[1])
    tokens = p.input("tokens", rows)
    r = p.parameter("r", (6,))
    e = p.embedding(tokens, p.parameter("wte", (11, C)))
    z = p.gate_logits(e, p.parameter("smear", (1, 12)))
    x0 = p.gated(e, z, base=e, factor=p.element(r, 1), shift=1)
    h = p.rmsnorm(x0)
    ve = p.embedding(tokens, p.parameter("values", (11, C)), dtype=p.compute)
    z_values = p.gate_logits(h, p.parameter("value_gates", (heads, 12)), extra=ve)
    packed = p.linear(h, p.parameter("qkv", (4 * C, C)))
    q, k, v = (View(packed, i * C, C) for i in range(3))
    a = p.attention(q, k, p.gated(ve, z_values, base=v, scale=2.0), heads=heads)
    a = p.gated(a, p.gate_logits(h, p.parameter("gates", (heads, 12))))
    x = p.mix((x0, p.element(r, 2)), (p.linear(a, p.parameter("out", (C, C))), 1.0), (h, p.element(r, 4)), (e, -0.5))
    x = p.gated(e, p.gate_logits(x0, p.parameter("skip", (1, 5))), base=x, scale=2.0, factor=p.element(r, 0), squash=True)
    targets = p.input("targets", rows)
    p.output("loss", p.classifier(p.rmsnorm(x), p.parameter("head", (11, C)), targets, valid_vocab=11))
    p.backward(p.named["loss"])
    assert {"zeros", "cast"} <= {op.name for op in p.ops}
    return p


def check_small_model(open_session, compute: str) -> None:
    """Loss and gradients of two micro-batches of another length than planned, against the reference backend."""
    p = small_model(compute)
    sessions = [ReferenceSession({"p": p}), open_session({"p": p})]
    r = np.random.default_rng(0)
    for t in p.store.of_role("parameter"):
        value = stored(r.normal(size=t.shape), t.dtype)
        for session in sessions:
            session.write(t.name, value)
    for accumulate in (0, 1):
        data = {name: r.integers(0, 11, (2, 5)) for name in ("tokens", "targets")}
        for session in sessions:
            for name, values in data.items():
                session.write(name, values)
            session.run("p", batch=2, seq=5, accumulate=accumulate, inv_targets=0.1)
    near = 1e-5 if compute == "fp32" else 0.03
    for name in ("loss", *(t.name for t in p.store.of_role("gradient"))):
        want, found = (session.read(name) for session in sessions)
        np.testing.assert_allclose(found, want, rtol=near, atol=near * np.abs(want).max(), err_msg=name)
    assert not sessions[1].read("r.grad")[[3, 5]].any() and not sessions[1].read("qkv.grad")[3 * 16 :].any()
    sessions[1].close()
