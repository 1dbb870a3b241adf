"""TF32, an option of fp32 programs: its error is the one that the page names, and tensor cores do it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from barellm.cli import main
from barellm.cuda.cublaslt import WORKSPACE_ALIGN
from barellm.cuda.gemm_config import GemmConfig
from barellm.cuda.kernel import Target
from barellm.cuda.kernels.gemm import cublaslt
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from tests.cases import chain_bound, operands
from tests.cuda import check
from tests.cuda.check import EPS, check_op
from tests.cuda.sass import rows
from tests.cuda.test_golden import SMALL, one_of_each, specs
from tests.cuda.test_models import train_beside_the_references
from tests.simulators.interpreter import tf32
from tests.simulators.mock import Gpu
from tests.simulators.mock_cublas import WORKSPACE, MockCublas

BOUND = 2.0**-9  # of the sum of |a b|: each operand loses less than 2^-10 of itself
TF32 = Target(80, tf32=True)
MODEL = ModelConfig(layers=1, heads=2, d_model=16, vocab_size=37, padded_vocab=40, max_seq=9)


@pytest.mark.parametrize("shape", [(1, 17, 7, 5), (2, 17, 65, 33), (1, 31, 129, 300)], ids=str)
def test_the_error_of_each_role_is_within_the_bound(shape):
    """Against float64 of the operands as they are; and, interpreted, as closely as fp32 sums allow, as tensor cores see them."""
    x, dy, weight = operands(shape, "fp32")
    X, DY = (v.values.reshape(-1, v.values.shape[-1]) for v in (x, dy))
    W = weight.values
    cases = [
        (ops.Matmul, {"x": x, "weight": weight}, "y", X, W.T),
        (ops.MatmulDx, {"dy": dy, "weight": weight}, "dx", DY, W),
        (ops.MatmulDw, {"dy": dy, "x": x}, "dweight", DY.T, X),
    ]
    target = replace(TF32, config=GemmConfig(32, 64, 16, 4, 2))
    for op_type, given, name, a, b in cases:
        bound = BOUND * (np.abs(a) @ np.abs(b)) + chain_bound(a, b) + 2 * EPS
        form = bound.shape if name == "dweight" else (*shape[:2], -1)
        got = check_op(op_type, given, bounds={name: bound.reshape(form)}, target=target, plan=(3, 40))
        seen_a, seen_b = (tf32(v.astype(np.float32)).astype(np.float64) for v in (a, b))
        got = np.asarray(got[name], np.float64).reshape(bound.shape)
        assert check.DEVICE == "cuda" or np.all(np.abs(got - seen_a @ seen_b) <= chain_bound(a, b) + 2 * EPS)
        assert np.abs(got - a @ b).max() > 10 * chain_bound(a, b).max()  # it is not fp32


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["own", "cublaslt"])
@pytest.mark.extended
def test_a_model_trains_like_the_references(gpu, monkeypatch, matmul):
    cublas = MockCublas(gpu)
    cublas.install(monkeypatch)
    monkeypatch.setattr(cublaslt, "WORKSPACE_BYTES", WORKSPACE + WORKSPACE_ALIGN)
    train_beside_the_references(MODEL, "fp32", 1e-2, matmul=matmul, tf32=True).synchronize()
    assert not cublas.failures and {line.split()[0] for line in cublas.done} == ({"tf32"} if matmul != "own" else set())


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.extended
def test_tensor_cores_do_it_and_nothing_spills(arch):
    products = {s: op for s, op in specs(SMALL, 2, "fp32", arch, tf32=True).items() if s.name == "gemm"}
    for label, row in rows(one_of_each(products), arch).items():
        assert not row["spills"] and (row.get("HMMA") or row.get("HGMMA") or row.get("UTCHMMA")), (label, row)


def test_it_is_off_unless_asked_for_and_never_without_fp32(gpu, capsys):
    assert all(dict(s.constants).get("TF32") is None for s in specs(SMALL, 2, "fp32", 80) if s.name == "gemm")
    assert all(dict(s.constants)["TF32"] for s in specs(SMALL, 2, "fp32", 80, tf32=True) if s.name == "gemm")
    assert main.main(["bench", "step", "shakespeare-char", "--device", "cuda", "--train.tf32"]) == 2
    assert capsys.readouterr().err == (
        "barellm: error: train.tf32 is about products of fp32, and train.dtype is bf16: add --dtype fp32\n"
    )
