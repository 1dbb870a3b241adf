from __future__ import annotations

import pytest

from tests.conv_cases import FORMS, NORMS, case, mean_case, norm_case
from tests.cuda.check import check_op


@pytest.mark.parametrize("form", ["padded", "strided past the filter", "mirrored", "reflected", "grouped"])
@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_a_direct_convolution_of_every_form(form, name):
    check_op(**case(name, FORMS[form]))


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dx", "conv2d_dw"])
def test_a_convolution_in_half_the_bits_is_added(name):
    check_op(**case(name, FORMS["strided"], "bf16", "add"))


@pytest.mark.parametrize("form", NORMS)
def test_norms_by_groups_and_their_gradients(form):
    check_op(**norm_case("group_norm", NORMS[form], "bf16"))
    check_op(**norm_case("group_norm_dx", NORMS[form], mode="add"))
    check_op(**norm_case("group_norm_dparams", NORMS[form], mode="add"))


def test_the_mean_over_pixels_and_its_gradient():
    for backward in (False, True):
        check_op(**mean_case((3, 5, 7, 3), backward=backward))
        check_op(**mean_case((2, 3, 13, 17), "bf16", "add", backward=backward))
