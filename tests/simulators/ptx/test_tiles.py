"""Bits do not depend on a tile, in compiled code: what the tuner may choose among. On a GPU it asks for the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.cuda import attention_config, gemm_config
from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.gemm_config import GemmConfig
from barellm.cuda.kernel import Target
from barellm.program import ops
from tests.cases import backward_case, forward_case, normal, operands
from tests.check import Case, check_case
from tests.cuda.check import InterpretedSession
from tests.simulators.ptx.launch import RUNS, execute

pytestmark = pytest.mark.extended

T, HEAD = 130, 64  # more than any block has


def outputs(case: Case, target: Target) -> dict[str, np.ndarray]:
    how = partial(execute, arch=target.arch, run=next(iter(RUNS.values())))
    return check_case(case, {"compiled": partial(InterpretedSession, target=target, execute=how)})


def assert_equal(found: list[dict[str, np.ndarray]]) -> None:
    for other in found[1:]:
        for name, values in found[0].items():
            assert np.array_equal(values, other[name]), name


ATTENTION = {
    "forward": [(64, 64, 4, 3, 128), (128, 64, 8, 3, 128), (128, 64, 4, 3, 0)],  # of one block of keys
    "keys": [(64, 128, 8, 2, 0), (64, 64, 4, 2, 0), (32, 128, 8, 3, 128)],
    "queries": [(128, 64, 8, 2, 128), (128, 128, 8, 2, 0), (64, 64, 4, 3, 128), (128, 32, 8, 3, 128)],
}


@pytest.mark.slow
@pytest.mark.parametrize("role", ATTENTION)
@pytest.mark.extended
def test_attention_s_tiles_have_one_result(role):
    op, case = (ops.Attention, forward_case) if role == "forward" else (ops.AttentionBackward, backward_case)
    attrs = case((1, T, 1, HEAD), "bf16")
    given, views, bounds, scalars = (attrs.pop(name) for name in ("given", "views", "bounds", "scalars"))
    found = []
    for t in ATTENTION[role]:
        assert AttentionConfig(*t) in attention_config.attention_configs(role, HEAD, "bf16", 90)
        target = Target(90, config={role: AttentionConfig(*t)})
        found.append(outputs(Case(op, given, attrs, bounds, {}, scalars, None, views), target))
    assert_equal(found)


PRODUCTS = {
    ("bf16", 80): gemm_config.gemm_configs("bf16", 80),
    ("bf16", 90): gemm_config.gemm_configs("bf16", 90),
    ("tf32", 80): gemm_config.gemm_configs("tf32", 80),
    ("fp32", 80): gemm_config.gemm_configs("fp32", 80),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype, arch", PRODUCTS)
def test_tiles_of_triton_s_products_have_one_result(dtype, arch):
    kind, (M, N, K) = "bf16" if dtype == "bf16" else "fp32", (37, 40, 72)
    x, _, weight = operands((1, M, N, K), kind)
    size = np.abs(normal(M, K)) @ np.abs(normal(N, K, seed=3)).T
    found = []
    for t in PRODUCTS[dtype, arch]:
        for choice in gemm_config.rasterizations(t)[: 2 if t == PRODUCTS[dtype, arch][-1] else 1]:
            assert isinstance(choice, GemmConfig)
            case = Case(ops.Matmul, {"x": x, "weight": weight}, {}, {"y": 2.0**-7 * size}, {}, {}, None)
            found.append(outputs(case, Target(arch, tf32=dtype == "tf32", config=choice)))
    assert_equal(found)
