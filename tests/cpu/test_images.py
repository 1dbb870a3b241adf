from __future__ import annotations

import pytest

from tests.conv_cases import NORMS, mean_case, norm_case
from tests.cpu.check import ISAS, check_op, isa_named

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@each_isa
@pytest.mark.parametrize("form", NORMS)
def test_norms_by_groups_and_their_gradients(isa, form):
    for dtype in ("fp32", "bf16"):
        check_op(isa=isa, **norm_case("group_norm", NORMS[form], dtype))
    check_op(isa=isa, **norm_case("group_norm_dx", NORMS[form], "bf16", "add"))
    check_op(isa=isa, **norm_case("group_norm_dx", NORMS[form]))
    for mode in ("store", "add"):
        check_op(isa=isa, **norm_case("group_norm_dparams", NORMS[form], mode=mode))


@each_isa
def test_the_mean_over_pixels_and_its_gradient(isa):
    for shape in ((1, 1, 1, 1), (3, 5, 7, 3), (2, 3, 13, 17)):
        for backward in (False, True):
            check_op(isa=isa, **mean_case(shape, backward=backward))
            check_op(isa=isa, **mean_case(shape, "bf16", "add", backward=backward))
