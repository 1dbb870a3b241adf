"""Products of signs: packing, exactness, and the gradient that goes straight through."""

from __future__ import annotations

import re

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise.binary import MOST, pack, unpack
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.reference import ReferenceSession
from tests.binary_cases import ENDS, signs


def sign(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1.0, -1.0)


@pytest.mark.parametrize("K", [1, 31, 32, 33, 77])
def test_signs_survive_packing(K):
    x = signs(3, 2, K)
    words = pack(x)
    assert words.dtype == np.int32 and words.shape == (3, 2, -(-K // 32))
    np.testing.assert_array_equal(unpack(words, K), sign(x))


def test_the_bit_of_a_column_is_where_the_definition_says():
    x = -np.ones(70)
    x[[0, 5, 33, 69]] = 1
    assert pack(x).tolist() == [1 | 1 << 5, 1 << 1, 1 << 5]
    x[31] = 1
    assert pack(x)[0] == (1 | 1 << 5) - (1 << 31)


def test_both_zeros_are_positive_and_nan_is_not():
    assert unpack(pack(np.array(ENDS)), len(ENDS)).tolist() == [1, 1, -1, 1, -1, 1, -1, 1]


@pytest.mark.parametrize("K", [1, 32, 45])
def test_a_product_is_that_of_the_signs(K):
    a, b = signs(5, K), signs(7, K, seed=2)
    differ = np.bitwise_count((pack(a)[:, None] ^ pack(b)[None]).view(np.uint32)).sum(-1).astype(int)
    np.testing.assert_array_equal(K - 2 * differ, sign(a) @ sign(b).T)


def test_the_gradient_is_that_of_signs_that_are_clipped_identities():
    """d/dx and d/dw of sum(c (x w^T)) at the signs, where |x| and |w| are at most 1; zero elsewhere."""
    B, T, K, N = 2, 3, 37, 5
    r = np.random.default_rng(0)
    p = Program(Store())
    x = p.parameter("before", (K, K))
    given = p.input("x", (Dim("batch", B), Dim("seq", T), K), "fp64")
    h = p.linear(given, x)
    y = p.binary_linear(h, p.parameter("w", (N, K)))
    head, targets = p.parameter("head", (11, N)), p.input("targets", (Dim("batch", B), Dim("seq", T)))
    logits = p.linear(y, head)
    p.output("loss", p.apply(ops.CrossEntropy, logits=logits, targets=targets, valid_vocab=11).loss)
    p.backward(p.named["loss"])
    values = {"x": r.normal(size=(B, T, K)), "before": np.eye(K), "w": r.normal(size=(N, K)), "head": r.normal(size=(11, N))}
    values |= {"targets": r.integers(0, 11, (B, T))}
    session = ReferenceSession({"forward_backward": p})
    for name, value in values.items():
        session.write(name, value)
    session.run("forward_backward", batch=B, seq=T, accumulate=0, inv_targets=1.0)
    rows = values["x"].reshape(-1, K)  # which the first product does not change
    flat = sign(rows) @ sign(values["w"]).T @ values["head"].T
    chosen = np.exp(flat - flat.max(1, keepdims=True))
    dlogits = chosen / chosen.sum(1, keepdims=True) - np.eye(11)[values["targets"].reshape(-1)]
    dy = dlogits @ values["head"]
    dw = (dy.T @ sign(rows)) * (abs(values["w"]) <= 1)
    dx = (dy @ sign(values["w"])) * (abs(rows) <= 1)
    np.testing.assert_allclose(session.read("w.grad"), dw, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(session.read("before.grad"), dx.T @ rows, rtol=1e-9, atol=1e-12)
    assert (dw == 0).any() and (dx == 0).any()


@pytest.mark.parametrize("call, message", [
    (lambda p, x, w: p.binary_linear(x, w), "(N, K): x (3, 40) fp32, weight (5, 41)"),
    (lambda p, x, w: p.apply(ops.BinaryMatmul, a=x, b=w, columns=40, dtype="fp32"), "b (N, 2) of i32 words"),
    (lambda p, x, w: p.apply(ops.UnpackSigns, words=x, columns=40, dtype="fp32"), "words (..., 2) i32: words (3, 40)"),
    (lambda p, x, w: p.apply(ops.StraightThrough, dy=x, x=w), "expects equal shapes: dy (3, 40)"),
])  # fmt: skip
def test_wrong_shapes_are_refused_in_a_line(call, message):
    x, w = (Tensor(name, shape, "fp32", "input") for name, shape in (("x", (3, 40)), ("w", (5, 41))))
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Program(Store()), x, w)


def test_more_signs_than_fp32_counts_are_refused():
    a, b = (Tensor(n, (1, MOST // 32 + 1), "i32", "input") for n in "ab")
    with pytest.raises(ValueError, match="adds 16777217 signs, expected at most 16777216"):
        Program(Store()).apply(ops.BinaryMatmul, a=a, b=b, columns=MOST + 1, dtype="fp32")


def test_a_pair_of_words_is_three_operations():
    a, b = (Tensor(n, (rows, 2), "i32", "input") for n, rows in (("a", 5), ("b", 7)))
    assert Program(Store()).apply(ops.BinaryMatmul, a=a, b=b, columns=40, dtype="fp32").flops() == 3 * 5 * 7 * 2
