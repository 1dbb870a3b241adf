"""The repaired interpreter computes what a GPU does, and the harness reports each kind of wrong kernel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm.cuda.kernel import REGISTRY, Lowering, Sizes, Specialisation, TensorMap
from barellm.cuda.lang import constant, device, tl
from barellm.program import ops
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part
from tests.cuda.check import EPS, PLAIN, check_op, tokens
from tests.simulators import interpreter

BF16 = ml_dtypes.bfloat16
HALF = constant(0.5)
R = np.random.default_rng(3)


def call(function, arrays, *, grid=(1,), **constants):
    """Run a kernel on NumPy arrays (bf16 ones as ml_dtypes'), in the parameters' order; integers stay."""
    names = [n for n in function.parameters if n not in constants]
    types = [f"*{'bf16' if a.dtype == BF16 else tl_name(a)}" if isinstance(a, np.ndarray) else "i32" for a in arrays]
    spec = Specialisation(function, tuple(zip(names, types, strict=True)), tuple(constants.items()), (), ())
    values = [pointer(a) if isinstance(a, np.ndarray) else a for a in arrays]
    interpreter.execute(spec, values, grid)


def pointer(array):
    start = array.ctypes.data
    return interpreter.Pointer(start, start, start + array.nbytes, True)


def tl_name(a):
    return {"float32": "fp32", "float64": "fp64", "int32": "i32"}[a.dtype.name]


@device
def products(c, a, b, S):
    i = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i)))


def test_products_of_bf16_multiply_numbers_and_not_bits():
    a, b = (R.normal(size=(16, 16)).astype(BF16) for _ in range(2))
    c = np.empty((16, 16), np.float32)
    call(products, [c, a, b], S=16)
    np.testing.assert_allclose(c, a.astype(float) @ b.astype(float), rtol=1e-5, atol=1e-5)


@device
def masked(y, x, S, OTHER):
    i = tl.arange(0, S)
    tl.store(y + i, tl.load(x + i, mask=i < 0, other=OTHER))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("other", [None, 0.0, 2.0])
def test_lanes_off_the_mask_hold_what_is_said_or_nobody_knows_what(size, other):
    x, y = np.ones(size, np.float32), np.ones(size, np.float32)
    call(masked, [y, x], S=size, OTHER=other)
    assert np.array_equal(y, np.full(size, np.nan if other is None else other), equal_nan=True)


@device
def arithmetic(y, x, S):
    i = tl.arange(0, S)
    v = tl.load(x + i)
    tl.store(y + i, tl.where(v > 0, v * v + v, -v))


def test_bf16_arithmetic_rounds_after_each_operation():
    x = R.normal(size=64).astype(BF16)
    y = np.empty(64, BF16)
    call(arithmetic, [y, x], S=64)
    assert np.array_equal(y, np.where(x > 0, x * x + x, -x))


@device
def converted(y, z, x, S):
    i = tl.arange(0, S)
    v = tl.load(x + i).to(tl.bfloat16)
    tl.store(y + i, v)
    tl.store(z + i, v.to(tl.float64))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_conversions_to_bf16_round_to_nearest_even(dtype):
    x = np.concatenate([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9], 300 * R.normal(size=61)]).astype(dtype)
    y, z = np.empty(64, BF16), np.empty(64)
    call(converted, [y, z, x], S=64)
    assert np.array_equal(y, x.astype(np.float32).astype(BF16)) and np.array_equal(z, y.astype(float))


@device
def halved_sums(y, x, n, S):
    total = tl.zeros((S,), tl.float32)
    for k in range(tl.cdiv(n, S)):
        i = k * S + tl.arange(0, S)
        total += tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y, half_of(tl.sum(total, 0)))


@device
def half_of(x):
    return x * HALF


def test_loops_over_run_time_sizes_and_calls_of_device_functions():
    x, y = R.normal(size=37).astype(np.float32), np.zeros(1, np.float32)
    call(halved_sums, [y, x, 37], S=16)
    assert abs(y[0] - x.sum(dtype=float) / 2) <= 1e-6 * np.abs(x).sum()


@device
def boxed(y, x):
    y.store([0, 8], x.load([3, 0]))


def test_tensor_maps_read_zeros_outside_and_write_nothing_there():
    xs, ys = (Tensor(name, (6, 16), "bf16", "input") for name in "xy")
    arrays = {t: np.zeros((6, 16), BF16) for t in (xs, ys)}
    arrays[xs][:5, :12] = np.arange(60).reshape(5, 12)
    c = Lowering(Op({"x": xs}, {}), PLAIN)
    maps = {"x": TensorMap(part(xs), "bf16", 5, 12, (8, 8), 16), "y": TensorMap(part(ys), "bf16", lambda s: s.seq, 12, (8, 8), 16)}
    c.launch(boxed, maps, grid=lambda s: (1,), writes="y")

    def address(region):
        start = arrays[region.tensor].ctypes.data
        return start + region.start, start + region.stop

    interpreter.run(c.launches[0], Sizes(1, 4), address, (0, 0), interpreter.execute)
    want = np.zeros((6, 16))
    want[:2, 8:12] = np.arange(60).reshape(5, 12)[3:, :4]  # x has 5 x 12 elements, y 4 x 12
    assert np.array_equal(arrays[ys].astype(float), want)


@device
def unmasked_lanes(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < n - 1) + tl.load(b + i, mask=i < n), mask=i < n)


@device
def slightly_wrong(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, (tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n)) * (1 + 2**-18), mask=i < n)


@device
def beyond_the_end(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=(i < n) | (i == 585))


@device
def beyond_the_size(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i <= n)


@device
def reads_too_far(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < 586) + tl.load(b + i, mask=i < n), mask=i < n)


@device
def into_an_input(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n)
    tl.store(b + 3, 0.0)


@device
def not_everything(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n - 1)


@device
def racing(y, a, b, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tiny = 1e-7 * tl.program_id(0).to(tl.float32)
    tl.store(y + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n) + tiny, mask=i < n)


WRONG = [
    (unmasked_lanes, "is nan, expected"),
    (slightly_wrong, "expected"),
    (beyond_the_size, "outside its tensors"),
    (beyond_the_end, "writes element 585 of the 585 of operand 0"),
    (reads_too_far, "reads element 585 of the 585 of operand 1"),
    (into_an_input, "writes operand 2 .* which it should only read"),
    (not_everything, "is nan, expected"),
    (racing, "different bits with blocks backward"),
]


@pytest.mark.parametrize("kernel, message", WRONG, ids=[f.name for f, _ in WRONG])
def test_a_wrong_kernel_is_reported(kernel, message, monkeypatch):
    def lower(c: Lowering) -> None:
        op = c.op
        operands = {"y": op.y, "a": op.a, "b": op.b, "n": c.elements(op.y)}
        c.launch(kernel, operands, {"BLOCK": 1024}, grid=lambda s: (3,), writes="y")

    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    REGISTRY.add("add", lower)
    given = {"a": tokens(R.standard_normal((5, 7, 13))), "b": tokens(1e-3 * R.standard_normal((5, 7, 13)))}
    with pytest.raises(AssertionError, match=message):
        check_op(ops.Add, given, plan=(5, 9), bounds={"y": 1e-6})


@device
def added(y, a, b, n, BLOCK):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n)


def test_a_right_kernel_passes(monkeypatch):
    def lower(c: Lowering) -> None:
        n = c.elements(c.op.y)
        operands = {"y": c.op.y, "a": c.op.a, "b": c.op.b, "n": n}
        c.launch(added, operands, {"BLOCK": 64}, grid=lambda s: (ceil_div(n(s), 64),), writes="y")

    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    REGISTRY.add("add", lower)
    given = {"a": tokens(R.standard_normal((5, 7, 13))), "b": tokens(R.standard_normal((5, 7, 13)))}
    check_op(ops.Add, given, plan=(5, 9), bounds={"y": EPS})


@pytest.mark.parametrize("source, target", [("fp32", "bf16"), ("bf16", "fp32")])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 13), (2, 257, 5)])
def test_cast(source, target, shape):
    check_op(ops.Cast, {"x": tokens(R.standard_normal(shape), source)}, dtype=target, plan=(shape[0], shape[1] + 2))
