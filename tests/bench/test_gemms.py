"""The bench of matrix products: every product of a model is there, in its own bytes, and its share of the peak is one."""

from itertools import pairwise

import pytest

from barellm.bench import gemms
from barellm.cli import main
from barellm.models import preset
from tests.profiling.conftest import small


def test_products_are_those_of_the_training_program():
    """Three of each layer's weight, and the weight gradients a second time, where they accumulate."""
    model = preset("gpt2-124m").model
    found = gemms.products(model, 4096)
    shapes = {"qkv": (2304, 768), "proj": (768, 768), "fc": (3072, 768), "fcproj": (768, 3072), "head": (50304, 768)}
    assert {p.layer: (p.N, p.K) for p in found} == shapes
    assert [p.op for p in found if p.layer == "fcproj"] == [
        "linear_residual",
        "matmul_dx_gelu",
        "matmul_dw",
        "matmul_dw",
    ]
    assert {p.tokens for p in found if p.layer == "head"} == {1024}


@pytest.mark.parametrize("product", gemms.products(small().model, 48), ids=lambda p: f"{p.layer} {p.op} {p.mode}")
def test_copies_are_apart_and_outlast_the_caches(product):
    timed = gemms.Timed(product, "bf16")
    try:
        tensors = [t for op in timed.ops for t in (*op.inputs.values(), *op.outputs.values())]
        assert all(timed.session.plan.offsets[t] >= 0 for t in tensors)
        spans = sorted((timed.session.plan.offsets[t], t.nbytes) for t in set(tensors))
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert len(timed.ops) == gemms.MOST_COPIES or len(timed.ops) * timed.nbytes >= gemms.COLD_BYTES["cpu"]
        assert timed.warm() > 0 and timed.cold() > 0
    finally:
        timed.close()


def test_a_mistake_is_one_line(capsys):
    assert main.main(["bench", "gemm", "shakespeare-char", "--tokens", "many"]) == 2
    assert "--tokens is 'many'" in capsys.readouterr().err
    assert main.main(["bench", "ops", "shakespeare-char", "--tokens", "64"]) == 2
