from __future__ import annotations

import pytest

from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program, Store
from tests.conv_cases import FORMS, case, mean_case
from tests.cuda.check import PLAIN, check_op


@pytest.mark.parametrize("form", ["padded", "strided past the filter", "flip_kernel", "reflected", "grouped"])
@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_a_direct_convolution_of_every_form(form, name):
    check_op(**case(name, FORMS[form]))


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_a_convolution_in_half_the_bits_is_added(name):
    check_op(**case(name, FORMS["strided"], "bf16", "add"))


def lowered(algorithm: str):
    p = Program(Store())
    x = p.input("x", (2, 3, 9, 9), "fp32")
    for _ in range(2):
        x = p.conv2d(x, p.parameter(f"w{x.shape[2]}", (3, 3, 3, 3)), algorithm=algorithm)
    head = p.parameter("head", (16, 3))
    labels = p.input("labels", (2,))
    p.backward(p.output("loss", p.classifier(p.mean_pixels(x), head, labels, valid_vocab=10)))
    return lower_and_plan({"p": p}, PLAIN).lowered["p"].launches


@pytest.mark.parametrize("algorithm", ["auto", "direct"])
def test_the_kernels_of_each_algorithm(algorithm):
    kernels = {a.spec.name for a in lowered(algorithm) if a.op.name.startswith("conv2d")}
    assert kernels == {"conv_implicit_gemm", "conv_wgrad", "split_k_reduce"}


@pytest.mark.parametrize("algorithm", ["winograd2", "winograd4", "fft"])
def test_an_algorithm_of_the_cpu_is_refused_in_one_line(algorithm):
    with pytest.raises(ValueError, match=f"algorithm is '{algorithm}', on cuda expected auto or direct"):
        lowered(algorithm)


def test_the_mean_over_pixels_and_its_gradient():
    for backward in (False, True):
        check_op(**mean_case((3, 5, 7, 3), backward=backward))
        check_op(**mean_case((2, 3, 13, 17), "bf16", "add", backward=backward))
