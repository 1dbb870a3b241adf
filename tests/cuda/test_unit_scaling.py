from __future__ import annotations

from functools import partial

import pytest

from tests.cases import check_model, scaled_network
from tests.cuda.check import InterpretedSession


@pytest.mark.extended
def test_scaled_products_are_products_and_numbers():
    """Nothing is fused to a factor here; all that follows it is as on the CPU."""
    network = partial(scaled_network, C=8, F=13, V=19, activation="gelu")
    found = check_model(InterpretedSession, network, compute="fp32", limit=3e-6, ids=17)
    assert {"matmul", "matmul_dx", "matmul_dw", "rescale", "gelu", "gelu_backward"} <= found
