from __future__ import annotations

import pytest

from barellm.cuda.kernels.conv import conv_transform_domain
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program, Store
from tests.conv_cases import FORMS, WINOGRAD, case, mean_case, winograd_case
from tests.cuda.check import PLAIN, check_op


@pytest.mark.parametrize("form", ["padded", "strided past the filter", "flip_kernel", "reflected", "grouped"])
@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_a_direct_convolution_of_every_form(form, name):
    check_op(**case(name, FORMS[form]))


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_a_convolution_in_half_the_bits_is_added(name):
    check_op(**case(name, FORMS["strided"], "bf16", "add"))


@pytest.mark.parametrize(
    "name, form, algorithm",
    [
        ("conv2d", "some tiles of several images", "winograd4"),
        ("conv2d", "groups", "winograd2"),
        ("conv2d_dx", "some tiles of several images", "winograd2"),
        ("conv2d_dx", "groups", "winograd4"),
        ("conv2d_dx", "long lines", "winograd2"),
        ("conv2d_dw", "one tile", "winograd4"),
        ("conv2d_dw", "groups", "winograd2"),
        ("conv2d_dw", "long lines", "winograd4"),
    ],
)
@pytest.mark.extended
def test_winograds_algorithm_of_every_form(name, form, algorithm):
    check_op(**winograd_case(name, WINOGRAD[form], algorithm))


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_winograds_algorithm_in_half_the_bits_is_added(name):
    check_op(**winograd_case(name, WINOGRAD["one tile"], "winograd4", "bf16", "add"))


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dw"])
@pytest.mark.extended
def test_tiles_that_more_than_one_pass_does_and_a_pass_without_any(name, monkeypatch):
    """Passes of 512 tiles, in two parts for the gradient of the filters: one image has 520 tiles, the two that are planned 1040."""
    monkeypatch.setattr(conv_transform_domain, "PASS", 512 * 16 * 2)
    check_op(**winograd_case(name, ((1, 1, 54, 42), (1, 3, 3), {}), "winograd2"))


@pytest.mark.parametrize(
    "algorithm, kernels",
    [
        ("auto", "conv_implicit_gemm conv_wgrad split_k_reduce"),
        ("winograd2", "winograd_filters winograd_tiles batched_gemm winograd_images winograd_wgrad"),
        ("winograd4", "winograd_filters winograd_tiles batched_gemm winograd_images winograd_wgrad"),
    ],
)
def test_the_kernels_of_each_algorithm(algorithm, kernels):
    p = Program(Store())
    x = p.input("x", (2, 3, 9, 9), "fp32")
    for _ in range(2):
        x = p.conv2d(x, p.parameter(f"w{x.shape[2]}", (3, 3, 3, 3)), algorithm=algorithm)
    head = p.parameter("head", (16, 3))
    labels = p.input("labels", (2,))
    p.backward(p.output("loss", p.classifier(p.mean_pixels(x), head, labels, valid_vocab=10)))
    launches = lower_and_plan({"p": p}, PLAIN).lowered["p"].launches
    assert {a.spec.name for a in launches if a.op.name.startswith("conv2d")} == set(kernels.split())
    if algorithm.startswith("winograd"):
        squares = {len(dict(a.spec.constants)["MATRIX"]) for a in launches if a.spec.name == "winograd_images"}
        assert squares == {int(algorithm[-1])}


def test_the_mean_over_pixels_and_its_gradient():
    for backward in (False, True):
        check_op(**mean_case((3, 5, 7, 3), backward=backward))
        check_op(**mean_case((2, 3, 13, 17), "bf16", "add", backward=backward))
