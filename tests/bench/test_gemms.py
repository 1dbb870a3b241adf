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
    block = {"attn.c_attn": (2304, 768), "attn.c_proj": (768, 768), "mlp.c_fc": (3072, 768), "mlp.c_proj": (768, 3072)}
    assert {p.layer: (p.N, p.K) for p in found} == block | {"head": (50304, 768)}
    assert len(found) == 20 and {p.layer for p in found if p.bias} == set(block)
    assert [(p.op, p.mode) for p in found if p.layer == "head"] == [
        ("matmul", "store"),
        ("matmul_dx", "store"),
        ("matmul_dw", "store"),
        ("matmul_dw", "add"),
    ]
    assert [p.op for p in found if p.layer == "mlp.c_proj"] == [
        "linear_residual",
        "matmul_dx_gelu",
        "matmul_dw",
        "matmul_dw",
    ]
    assert {p.tokens for p in found if p.layer == "head"} == {1024}


def test_products_of_another_architecture_are_its_own():
    model = preset("llama-15m").model
    found = gemms.products(model, 300)  # more tokens than the model has positions
    shapes = {"attn.qkv": (768, 384), "attn.proj": (384, 384), "mlp.gate_up": (2048, 384), "mlp.down": (384, 1024)}
    assert {p.layer: (p.N, p.K) for p in found} == shapes | {"head": (4096, 384)}
    assert [p.op for p in found if p.layer in ("attn.qkv", "mlp.down") and p.mode == "store"] == [
        *("matmul", "matmul_dx", "matmul_dw"),
        *("linear_residual", "matmul_dx", "matmul_dw"),
    ]
    assert not any(p.bias for p in found) and {p.tokens for p in found} == {300}


WITHOUT_BIAS = gemms.Product("mlp.down", "linear_residual", 24, 40, 9)
TRANSPOSED = gemms.Product("mlp.down", "matmul_relu2_backward", 24, 40, 9)


@pytest.mark.parametrize(
    "product",
    [*gemms.products(small().model, 48), WITHOUT_BIAS, TRANSPOSED],
    ids=lambda p: f"{p.layer} {p.op} {p.mode}",
)
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
