"""The words of a program that belong to no op: formats, views, constants, sizes of any name, scalars, precisions."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from barellm.cpu.isa import host
from barellm.cpu.step import CpuSession
from barellm.program import loss_scale, scalars
from barellm.program.builder import Program, Store
from barellm.program.dtypes import FORMATS, PRECISIONS, Precision, decode, encode, format_of, numpy_dtype
from barellm.program.tensor import Dim, Tensor, View
from barellm.runtime.reference import ReferenceSession
from tests.program.graphs import Weigh


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_holds_what_it_says(name):
    """Values come back within its half ulp, and twice is as good as once; its planes have the bytes that it says."""
    f, r = FORMATS[name], np.random.default_rng(0)
    integers = f.kind == "integer" or f.bits == 4
    values = r.integers(0, 2 ** min(f.bits, 6), 1024) if integers else np.abs(r.standard_normal(1024)) + 1e-3
    planes = encode(values, name)
    assert len(planes) == max(1, len(f.planes))
    assert sum(p.nbytes for p in planes) == f.nbytes(1024)
    once = decode(planes, name)
    np.testing.assert_allclose(once, values, rtol=f.half_ulp, atol=f.half_least)
    np.testing.assert_array_equal(decode(encode(once, name), name), once)
    for i, plane in enumerate(f.planes):
        assert planes[i].dtype == numpy_dtype(plane)
        assert f.start_of(i, 1024) == sum(p.nbytes for p in planes[:i])
    if name == "bf16_u16":  # what products read is the next number towards zero, less than a unit away
        away = (values - planes[0].astype(np.float64)) / values
        assert away.min() >= 0 and 1.9 < away.max() / FORMATS["bf16"].half_ulp < 2
    elif f.planes:  # the nearest number of the first plane's format
        np.testing.assert_array_equal(planes[0], decode(encode(values, f.operand), f.operand))


@pytest.mark.parametrize("name", ["bf16_i16", "bf16_u16"])
def test_numbers_of_16_bits_are_taken_as_they_are(name):
    """All 65,536 of them, NaN with their payloads, infinities and zeros of both signs among them."""
    values = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype("bf16"))
    planes = encode(values, name)
    assert [p.dtype.itemsize for p in planes] == [2, 2] and np.array_equal(planes[0].view(np.uint16), values.view(np.uint16))
    assert not planes[1].any()
    finite = np.isfinite(values.astype(np.float32))
    for fast, usual in zip(planes, encode(values[finite].astype(np.float32), name), strict=True):
        assert np.array_equal(fast[finite].view(np.uint16), usual.view(np.uint16))


@pytest.mark.parametrize("name", ["bf16_i16", "bf16_u16"])
def test_two_planes_of_16_bits_have_every_bit_of_fp32(name):
    low = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0x0000, 0x3F80, 0xBF7F, 0x7F7E, 0x8000):
        values = (low + (upper << 16)).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(decode(encode(values, name), name).view(np.uint32), values.view(np.uint32))


def test_the_loss_scale_begins_as_the_docs_say():
    assert loss_scale.scale_of(np.zeros(2, np.int32)) == 65_536 and loss_scale.GROWTH_STEPS == 2000


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match="unknown dtype 'fp33', expected one of fp64, fp32"):
        format_of("fp33")


def test_precisions_are_rows():
    p = Program(Store(), compute="fp16")
    assert (p.compute, p.precision.scaled) == ("fp16", True)
    assert p.parameter("w", (3, 4)).dtype == "fp16_fp32"
    assert p.parameter("b", (3,)).dtype == "fp32"
    mine = Program(Store(), compute=Precision("bf16", "fp32"))
    assert mine.parameter("w", (3, 4)).dtype == "fp32"
    with pytest.raises(ValueError, match="compute dtype is 'fp8', expected 'fp32', 'bf16', 'fp16'"):
        Program(Store(), compute="fp8")
    assert {p.weights for p in PRECISIONS.values()} <= set(FORMATS)


def test_views_are_columns_of_their_base():
    p = Program(Store())
    x = p.input("x", (Dim("batch", 2), 12), "fp32")
    a, b, c = p.split(x, (2, 4, 6))
    assert [(v.base, v.first_column, v.row_stride, v.nbytes) for v in (a, b, c)] == [(x, 0, 12, 16), (x, 2, 12, 32), (x, 6, 12, 48)]
    assert [t.shape[-1] for t in p.split(x, 3)] == [4, 4, 4]
    with pytest.raises(ValueError, match=r"split expects columns that 5 divides.*12"):
        p.split(x, 5)
    with pytest.raises(ValueError, match=r"add up to 12 columns: \(2, 4\)"):
        p.split(x, (2, 4))
    with pytest.raises(ValueError, match=r"columns 10 to 14 are not in"):
        View(x, 10, 4)
    with pytest.raises(ValueError, match="is a view, which has no bytes of its own"):
        p.output("a", a)


def gradients_of(read) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of w (12, 4), and differences of the loss, where read(p, y) makes a tensor (2, 3, 4) of y = x w^T."""
    p = Program(Store())
    dims = Dim("batch", 2), Dim("seq", 3)
    y = p.linear(p.input("x", (*dims, 4), "fp32"), p.parameter("w", (12, 4), std=1.0))
    p.output("loss", p.classifier(read(p, y), p.parameter("head", (5, 4)), p.input("targets", dims), valid_vocab=5))
    p.backward(p.named["loss"])
    session, r = ReferenceSession({"p": p}), np.random.default_rng(0)
    values = {"x": r.normal(size=(2, 3, 4)), "head": r.normal(size=(5, 4)), "targets": r.integers(0, 5, (2, 3))}
    w, numeric = r.normal(size=(12, 4)), np.zeros((12, 4))
    for name, value in values.items():
        session.write(name, value)

    def loss(value: np.ndarray) -> float:
        session.write("w", value)
        session.run("p", inv_targets=1.0)
        return session.read("loss")[0]

    for at in np.ndindex(12, 4):
        step = np.zeros((12, 4))
        step[at] = 1e-6
        numeric[at] = (loss(w + step) - loss(w - step)) / 2e-6
    loss(w)
    return session.read("w.grad"), numeric


def test_columns_that_no_gradient_reaches_are_zero():
    found, numeric = gradients_of(lambda p, y: p.swiglu(View(y, 5, 4), View(y, 1, 4)))
    np.testing.assert_allclose(found, numeric, atol=1e-8)
    assert not found[[0, 9, 10, 11]].any() and found[1:9].any()


def test_columns_side_by_side_are_stored_and_nothing_is_zeroed():
    p = Program(Store())
    y = p.linear(p.input("x", (Dim("batch", 2), 4), "fp32"), p.parameter("w", (12, 4)))
    a, b, c = p.split(y, 3)
    p.output("loss", p.apply(Weigh, x=p.swiglu(p.swiglu(c, a), b), seed=1).loss)
    p.backward(p.named["loss"])
    writers = [(name, op.modes[name]) for op in p.ops for name, t in op.outputs.items() if t.base.name == f"{y.name}.grad"]
    assert writers == [("dup", "store"), ("dgate", "store"), ("dup", "store")]
    assert "zeros" not in [op.name for op in p.ops]


@pytest.mark.parametrize("first", [0, 2, 3])
def test_views_may_overlap(first):
    def read(p, y):
        inner = p.swiglu(View(y, first, 6), View(y, 5, 6))
        return p.swiglu(View(inner, 0, 4), View(y, first, 4))

    np.testing.assert_allclose(*gradients_of(read), atol=1e-8)


def test_an_element_of_a_vector_has_its_own_gradient():
    """Elements that no op uses have none; a second micro-batch is added."""
    p = Program(Store())
    x, k = p.input("x", (Dim("batch", 2), Dim("seq", 3), 4), "fp32"), p.parameter("k", (5,))
    y = p.mix((x, p.element(k, 3)), (x, p.element(k, 1)), (x, p.element(k, 3)))
    p.output("loss", p.apply(Weigh, x=p.mix((y, p.element(k, 1))), seed=2).loss)
    p.backward(p.named["loss"])
    session, r = ReferenceSession({"p": p}), np.random.default_rng(0)
    x, k = r.normal(size=(2, 3, 4)), r.normal(size=5)
    session.write("x", x)
    session.write("k", k)
    for accumulate in (0, 1):
        session.run("p", accumulate=accumulate)
    dot = (x * np.random.default_rng(2).normal(size=x.shape)).sum()
    expected = 2 * dot * np.array([0, 2 * k[3] + 2 * k[1], 0, 2 * k[1], 0])
    np.testing.assert_allclose(session.read("k.grad"), expected)


def test_words_about_elements_and_mixes():
    p = Program(Store())
    x, k = p.input("x", (Dim("batch", 2), 4), "fp32"), p.parameter("k", (5,))
    for i in (-1, 5):
        with pytest.raises(ValueError, match=rf"element expects a vector \(L,\) and 0 <= i < L: i {i}, vector \(5,\)"):
            p.element(k, i)
    with pytest.raises(ValueError, match="mix expects 1 to 4 terms, found 5"):
        p.mix(*[(x, 1.0)] * 5)
    with pytest.raises(ValueError, match=r"terms of one shape and coefficients \(1,\): .*k0 \(5,\)"):
        p.mix((x, k))


def test_a_constant_holds_its_value_on_every_backend():
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    store = Store()
    p = Program(store)
    p.constant("table", value)
    p.output("y", p.add(p.input("x", (3, 4), "fp32"), p.constant("table", value)))
    for session in (ReferenceSession({"p": p}), ReferenceSession({"p": p}, storage=True), CpuSession({"p": p})):
        session.write("x", np.ones((3, 4)))
        session.run("p")
        np.testing.assert_array_equal(session.read("y"), value + 1)
    with pytest.raises(ValueError, match="constant table is declared twice, with different values"):
        p.constant("table", value + 1)


def test_a_size_may_have_any_name():
    store = Store()
    p = Program(store)
    x = p.input("x", (Dim("images", 5), Dim("height", 7), 3), "fp32")
    p.output("y", p.gelu(p.linear(x, p.parameter("w", (4, 3), std=1.0))))
    reference, cpu = ReferenceSession({"p": p}), CpuSession({"p": p}, isa=host(), threads=2)
    r = np.random.default_rng(0)
    w = r.standard_normal((4, 3)).astype(np.float32)
    for images, height in ((5, 7), (2, 3), (1, 1)):
        values = r.standard_normal((images, height, 3)).astype(np.float32)
        for s in (reference, cpu):
            s.write("w", w)
            s.write("x", values)
            s.run("p", images=images, height=height)
        assert cpu.read("y").shape == (images, height, 4)
        np.testing.assert_allclose(cpu.read("y"), reference.read("y"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="height is 8, planned for 1 to 7"):
        cpu.run("p", images=1, height=8)
    assert scalars.layout((("dims", ("images",)),)).strip() == f"images@{scalars.SCALARS['images'].index}"
    assert scalars.layout((("dims", ("batch", "seq")),)) == ""


def test_scalars_have_a_limit(monkeypatch):
    monkeypatch.setattr(scalars, "SCALARS", dict(scalars.SCALARS))
    for i in range(scalars.MOST - len(scalars.SCALARS)):
        scalars.declare(f"size{i}")
    scalars.declare("size0")
    with pytest.raises(ValueError, match="one_more would be run-time scalar number 65, there is room for 64"):
        scalars.declare("one_more")


def test_tensors_know_their_bytes():
    assert Tensor("w", (3, 5), "fp16_fp32", "parameter").nbytes == 92  # 15 fp16, two bytes that align what follows, 15 fp32
    assert Tensor("w", (3, 5), "bf16_i16", "parameter").nbytes == 60


def test_threads_that_declare_scalars_at_once_give_each_a_row_of_its_own(monkeypatch):
    """A dictionary in which another thread comes between the look and the entry."""

    class Slow(dict):
        def __len__(self):
            found = super().__len__()
            time.sleep(0.01)
            return found

    monkeypatch.setattr(scalars, "SCALARS", Slow(scalars.SCALARS))
    before = [row.index for row in scalars.SCALARS.values()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(scalars.declare, ["one", "two", "one", "three"]))
    added = sorted(scalars.SCALARS[name].index for name in ("one", "two", "three"))
    assert added == [len(before), len(before) + 1, len(before) + 2]
