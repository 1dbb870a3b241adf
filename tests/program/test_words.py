"""The words of a program that belong to no op: formats, views, constants, sizes of any name, scalars, precisions."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.isa import host
from barellm.cpu.step import CpuSession
from barellm.program import scalars
from barellm.program.builder import Program, Store
from barellm.program.dtypes import FORMATS, PRECISIONS, Precision, decode, encode, format_of, numpy_dtype
from barellm.program.tensor import Dim, Tensor, View
from barellm.runtime.reference import ReferenceSession


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_holds_what_it_says(name):
    """Values come back within its half ulp, and twice is as good as once; its planes have the bytes that it says."""
    f, r = FORMATS[name], np.random.default_rng(0)
    values = r.integers(0, 100, 1000) if f.kind == "integer" else np.abs(r.standard_normal(1000)) + 1e-3
    planes = encode(values, name)
    assert len(planes) == max(1, len(f.planes))
    assert sum(p.nbytes for p in planes) == f.nbytes(1000)
    once = decode(planes, name)
    np.testing.assert_allclose(once, values, rtol=f.half_ulp, atol=0)
    np.testing.assert_array_equal(decode(encode(once, name), name), once)
    for i, plane in enumerate(f.planes):
        assert planes[i].dtype == numpy_dtype(plane)
        assert f.start_of(i, 1000) == sum(p.nbytes for p in planes[:i])
    if f.planes:  # what products read is the nearest number of the first plane's format
        np.testing.assert_array_equal(planes[0], decode(encode(values, f.operand), f.operand))


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match="unknown dtype 'fp33', expected one of fp64, fp32"):
        format_of("fp33")


def test_precisions_are_rows():
    p = Program(Store(), compute="fp16")
    assert (p.compute, p.precision.scaled) == ("fp16", True)
    assert p.parameter("w", (3, 4)).dtype == "half"
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
    assert [(v.base, v.first_column, v.row_stride, v.nbytes) for v in (a, b, c)] == [
        (x, 0, 12, 16),
        (x, 2, 12, 32),
        (x, 6, 12, 48),
    ]
    assert [t.shape[-1] for t in p.split(x, 3)] == [4, 4, 4]
    with pytest.raises(ValueError, match=r"split expects columns that 5 divides.*12"):
        p.split(x, 5)
    with pytest.raises(ValueError, match=r"add up to 12 columns: \(2, 4\)"):
        p.split(x, (2, 4))
    with pytest.raises(ValueError, match=r"columns 10 to 14 are not in"):
        View(x, 10, 4)
    with pytest.raises(ValueError, match="is a view, which has no bytes of its own"):
        p.output("a", a)


def test_columns_that_no_gradient_reaches_are_named():
    p = Program(Store())
    w = p.parameter("w", (12, 4), std=1.0)
    gate, up, _ = p.split(p.linear(p.input("x", (Dim("batch", 2), Dim("seq", 3), 4), "fp32"), w), 3)
    loss = p.classifier(
        p.swiglu(gate, up), p.parameter("head", (5, 4), std=1.0), p.input("targets", (Dim("batch", 2), Dim("seq", 3))),
        valid_vocab=5,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no gradient reaches columns from 8 on"):
        p.backward(loss)


def test_views_that_overlap_in_part_have_no_gradient():
    p = Program(Store())
    dims = Dim("batch", 2), Dim("seq", 3)
    y = p.linear(p.input("x", (*dims, 4), "fp32"), p.parameter("w", (12, 4), std=1.0))
    z = p.swiglu(p.swiglu(View(y, 0, 6), View(y, 6, 6)), p.swiglu(View(y, 0, 6), View(y, 3, 6)))
    loss = p.classifier(z, p.parameter("head", (5, 6), std=1.0), p.input("targets", dims), valid_vocab=5)
    with pytest.raises(ValueError, match=r"overlaps columns \d+ to \d+"):
        p.backward(loss)


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
    assert Tensor("w", (3, 5), "half", "parameter").nbytes == 92  # 15 fp16, two bytes that align what follows, 15 fp32
    assert Tensor("w", (3, 5), "split", "parameter").nbytes == 60
