from __future__ import annotations

from types import SimpleNamespace

import pytest

from barellm.cpu.isa import cross
from barellm.cpu.kernel import Lowering
from barellm.cpu.kernels.conv import conv_tiled
from barellm.cpu.kernels.conv.winograd import transform_vectors
from barellm.cpu.step import lower_and_plan
from barellm.program.builder import Program, Store
from barellm.program.ops.convolution import Conv2dDx
from barellm.program.winograd import input_matrix
from barellm.tools.inspect.kernels import X86_TRIPLE
from tests.conv_cases import DEPTHWISE, FORMS, LARGE, WINOGRAD, case, winograd_case
from tests.cpu.check import ISAS, check_op, isa_named

# Tiles of 10 x 10 outputs: 2 x 5 x 7, more than two blocks of them on every machine.
TURNS = {"in many turns": ((2, 2, 47, 66), (3, 7, 7), {"padding": (3, 3), "reflect": True})}
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
OPS = ("conv2d", "conv2d_dx", "conv2d_dw")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.extended
def test_a_direct_convolution_of_every_form(form, name):
    check_op(isa=isa_named(""), **case(name, FORMS[form]))


@each_isa
@pytest.mark.parametrize("name", OPS)
def test_a_direct_convolution_in_half_the_bits_is_added(isa, name):
    check_op(isa=isa, **case(name, FORMS["dilated"], "bf16", "add"))
    check_op(isa=isa, **case(name, FORMS["grouped"], "fp16"))


@pytest.mark.parametrize("form", DEPTHWISE)
@each_isa
@pytest.mark.parametrize("name", OPS)
@pytest.mark.extended
def test_a_convolution_of_each_channel_by_itself(isa, form, name):
    check_op(isa=isa, **case(name, DEPTHWISE[form]))


@each_isa
@pytest.mark.parametrize("name", OPS)
def test_a_convolution_of_each_channel_in_half_the_bits_is_added(isa, name):
    check_op(isa=isa, **case(name, DEPTHWISE["padded"], "bf16", "add"))
    check_op(isa=isa, **case(name, DEPTHWISE["strided"], "fp16", "add"))


@pytest.mark.parametrize("form", WINOGRAD)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.extended
def test_winograds_algorithm_of_every_form(form, name):
    for algorithm in ("winograd2", "winograd4"):
        check_op(isa=isa_named(""), **winograd_case(name, WINOGRAD[form], algorithm))


@each_isa
@pytest.mark.parametrize("name", OPS)
def test_winograds_algorithm_in_half_the_bits_is_added(isa, name):
    check_op(isa=isa, **winograd_case(name, WINOGRAD["groups"], "winograd4", "bf16", "add"))


@pytest.mark.parametrize("form", LARGE)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.extended
def test_large_filters_by_fourier_transforms(form, name):
    check_op(isa=isa_named(""), **winograd_case(name, LARGE[form], "fft"))


@each_isa
@pytest.mark.parametrize("name", OPS)
def test_fourier_transforms_in_half_the_bits_are_added(isa, name):
    check_op(isa=isa, **winograd_case(name, LARGE["seven by five"], "fft", "bf16", "add"))


@pytest.mark.parametrize("form", ["seven by five", "in many turns"])
def test_the_gradient_of_filters_by_fourier_transforms_in_turns(form, monkeypatch):
    """A turn has one block of tiles, and the sums of the turns before are added."""
    monkeypatch.setattr(conv_tiled, "V_BYTES", 0)
    check_op(isa=isa_named(""), **winograd_case("conv2d_dw", (LARGE | TURNS)[form], "fft"))


@pytest.mark.parametrize(
    "images, channels, pixels, filters, faster, how",
    [
        # Measured (benchmarks/results/xeon-amx/convolution-large.json, docs/convolution.md).
        (1, 32, 112, 7, True, {}),
        (1, 32, 112, 21, True, {}),
        (1, 128, 56, 9, True, {}),
        (1, 128, 56, 5, False, {}),
        (1, 128, 56, 11, False, {}),
        (1, 128, 56, 15, True, {}),
        (1, 64, 28, 7, False, {}),
        (2, 64, 56, 11, True, {}),
        # What transforms do not do, or with too much memory.
        (1, 32, 112, 21, False, {"stride": 2}),
        (1, 32, 112, 7, False, {"dilation": 2}),
        (1, 32, 112, 25, False, {}),
        (4, 512, 224, 21, False, {}),
        (4, 512, 224, 21, True, {"groups": 16}),
    ],
)
def test_large_filters_are_transformed_unasked_where_that_is_faster(images, channels, pixels, filters, faster, how):
    p = Program(Store())
    x = p.parameter("x", (images, channels, pixels, pixels))
    w = p.parameter("w", (channels, channels // how.get("groups", 1), filters, filters))
    y = p.output("y", p.conv2d(x, w, padding=filters // 2, **how))
    p.output("dx", p.apply(Conv2dDx, dy=y, w=w, size=(pixels, pixels), **p.ops[-1].attrs).dx)
    calls = lower_and_plan({"op": p}, isa=cross("avx512", X86_TRIPLE), threads=2).calls["op"]
    transformed = dict.fromkeys(call.op.name for call in calls if call.spec.name == "fft_input")
    assert list(transformed) == ["conv2d", "conv2d_dx"] * faster


def test_scratch_that_is_too_small_shows(monkeypatch):
    """Of a thread's own scratch, the last byte less than the direct convolution takes."""
    thread_scratch = Lowering.thread_scratch
    monkeypatch.setattr(Lowering, "thread_scratch", lambda self, nbytes: thread_scratch(self, nbytes - 1))
    with pytest.raises(AssertionError, match="writes up to 1 bytes behind its private scratch"):
        check_op(isa=isa_named(""), **case("conv2d", FORMS["of many channels"]))


def test_the_errors_of_winograds_algorithm_are_those_of_its_points():
    """Relative to the result's RMS, the largest of 60 tiles: a third of what 0, 1, -1, 2, -2 give."""
    from benchmarks.convolution import errors

    for C, limits in ((64, (1.5e-6, 2.0e-6, 4.5e-6)), (512, (2.0e-6, 5.7e-6, 1.1e-5))):
        found = errors(C)
        assert list(found) == ["direct", "winograd2", "winograd4"]
        assert all(error <= limit for error, limit in zip(found.values(), limits, strict=True)), found


@pytest.mark.parametrize(
    "how, message",
    [
        ({"groups": 2}, r"^conv2d expects groups that divide C and K, and w \(K, C / groups, R, S\): 2, x \(2, 3, 5, 7\) fp32"),
        ({"padding": (5, 0), "reflect": True}, r"^conv2d expects a reflected padding below H and W: \(5, 0\)"),
        ({"dilation": 4}, r"^conv2d expects a dilated filter that is not larger than the padded image"),
        ({"stride": 0}, r"^conv2d expects a stride and a dilation of 1 or more and a padding of 0 or more"),
        ({"algorithm": "fast"}, r"^conv2d expects an algorithm among auto, direct, winograd2, winograd4, fft: 'fast'"),
        ({"algorithm": "fft", "dilation": 2}, r"^conv2d by fft expects filters of at most 24 x 24, a stride and a dilation of 1"),
        ({"algorithm": "winograd4", "stride": 2}, r"^conv2d by winograd4 expects filters of 3 x 3, a stride and a dilation of 1"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_a_convolution_that_cannot_be_is_refused_in_a_line(how, message):
    p = Program(Store())
    with pytest.raises(ValueError, match=message):
        p.conv2d(p.input("x", (2, 3, 5, 7), "fp32"), p.parameter("w", (4, 3, 3, 3)), **how)


def test_winograds_transforms_share_their_sums():
    """A transform of six numbers takes 14 operations: rows that differ in signs share their sums. Each row for itself takes 16."""

    class Number:
        count = 0

        def __add__(self, _):
            Number.count += 1
            return self

        __sub__ = __mul__ = __add__

    k = SimpleNamespace(vec="", to=lambda c, _: c, fma=lambda x, c, total: total + x)
    transform_vectors(k, input_matrix(6), [Number() for _ in range(6)])
    assert Number.count == 14
