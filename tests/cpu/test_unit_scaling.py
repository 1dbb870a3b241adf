"""Products times numbers, with all that is fused to them, on every instruction set."""

from __future__ import annotations

from functools import partial

import pytest

from barellm.cpu.kernels.gemm import gemm
from barellm.cpu.step import CpuSession
from tests.cases import check_model, scaled_network
from tests.cpu.check import ISAS, changed, isa_named


@pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
@pytest.mark.parametrize("compute, limit, activation", [("fp32", 3e-6, "relu2"), ("bf16", 2e-2, "gelu")])
@pytest.mark.extended
def test_fused_scaled_products_mean_their_sequence(isa, compute, limit, activation, monkeypatch):
    changed(monkeypatch, gemm, DEFER_DEPTH=1)
    found = check_model(
        lambda programs: CpuSession(programs, isa=isa, threads=2),
        partial(scaled_network, C=24, F=41, V=53, activation=activation),
        compute=compute,
        limit=limit,
        ids=51,
    )
    rows = {f"{product}{then}" for product in ("linear_rescale", "matmul_dx_rescale") for then in ("", f"_{activation}")}
    assert found >= rows and "rescale" not in found
