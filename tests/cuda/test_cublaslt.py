"""Products by cuBLASLt, on a library in Python: ops against float64, models against the references, what a machine may lack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from barellm.cli import main
from barellm.cuda import cublaslt
from barellm.cuda.cublaslt import WORKSPACE_ALIGN
from barellm.cuda.kernel import LibraryGemm, Target
from barellm.cuda.kernels import gemm
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.errors import UserError
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, View
from barellm.runtime.reference import ReferenceSession
from barellm.tools.bench import gemms
from tests.cases import as_operand, assert_like_the_reference, chain_bound, normal, operands
from tests.check import EPS, ROUNDING, Case, check_case
from tests.cuda import check
from tests.cuda.check import DeviceSession
from tests.cuda.test_matmul import FUSED
from tests.cuda.test_models import train_beside_the_references
from tests.simulators.mock import LAUNCH_MS, Gpu
from tests.simulators.mock_cublas import WORKSPACE, MockCublas

MODEL = ModelConfig(layers=1, heads=2, d_model=16, vocab_size=37, padded_vocab=40, max_seq=9)


class LibrarySession(DeviceSession):
    def __init__(self, programs) -> None:
        super().__init__(programs, matmul="cublaslt")


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


@pytest.fixture
def library(request, monkeypatch):
    """In the library's place; on a GPU None: NVIDIA's own."""
    if check.DEVICE == "cuda":
        try:
            cublaslt.find()
        except UserError as error:
            pytest.skip(str(error))
        yield None
        return
    made = MockCublas(request.getfixturevalue("gpu"))
    made.install(monkeypatch)
    monkeypatch.setattr(gemm.cublaslt, "WORKSPACE_BYTES", WORKSPACE + WORKSPACE_ALIGN)
    yield made
    assert not made.failures, made.failures[0]


def check_op(op_type, given, bounds, modes=None, scalars=None):
    case = Case(op_type, given, {}, bounds, modes or {}, scalars or {}, None)
    return check_case(case, {"the first run": LibrarySession, "the second": LibrarySession})


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [(1, 9, 8, 8), (2, 17, 24, 40), (3, 5, 64, 8)], ids=str)
def test_all_three_roles(library, dtype, shape):
    x, dy, weight = operands(shape, dtype)
    check_op(ops.Matmul, {"x": x, "weight": weight}, {"y": chain_bound(x.values, as_operand(weight, dtype).T)})
    bounds = {"dx": chain_bound(dy.values, as_operand(weight, dtype)) + 2 * EPS}
    for mode in ("store", "add"):
        if mode == "add" and library is None and dtype != "fp32":  # cuBLASLt 13 rounds the product first, an H200 showed
            bounds = {"dx": bounds["dx"] + ROUNDING[dtype] * np.abs(dy.values @ as_operand(weight, dtype))}
        check_op(ops.MatmulDx, {"dy": dy, "weight": weight}, bounds, {"dx": mode})
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    bounds = {"dweight": chain_bound(flat[0].T, flat[1]) + 2 * EPS}
    for mode, accumulate in (("store", 0), ("start", 0), ("start", 1), ("add", 0)):
        check_op(ops.MatmulDw, {"dy": dy, "x": x}, bounds, {"dweight": mode}, {"accumulate": accumulate})
    assert library is None or (len(library.done) == 2 * 7 and {"fp32 none float32", "fp32 none float32 adds"} <= set(library.done))


@pytest.mark.parametrize("build", FUSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 8e-3), ("fp16", 1e-3)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_is_fused_means_its_sequence(library, build, compute, limit, bias):
    """GELU in fp32 is not the library's, and it has no other activation."""
    C, F = 40, 72
    p = Program(Store(), compute=compute)
    build(p, p.input("x", (Dim("batch", 3), Dim("seq", 11), C), compute), bias, C, F)
    session, oracle = CudaSession({"op": p}, matmul="cublaslt"), ReferenceSession({"op": p})
    for batch, seq in ((3, 11), (1, 1), (3, 11)):
        assert_like_the_reference(p, session, oracle, batch=batch, seq=seq, seed=batch, limit=limit)
    activation = next((name for name in ops.ACTIVATIONS if name in build.__name__), "")
    own = activation in ops.ACTIVATIONS and (compute == "fp32" or activation != "gelu")
    assert len(library.done) == (0 if own else 3)
    assert len(library.asked) == (0 if own else 2)  # once for each number of tokens


def test_what_it_does_not_have_stays_ours():
    """Rows of other than multiples of 16 bytes."""
    for N, K, dtype, library in ((24, 16, "bf16", True), (20, 16, "bf16", False), (20, 16, "fp32", True), (24, 17, "fp32", False)):
        program = Program(Store(), compute=dtype)
        gemms.append(program, gemms.Gemm("", "matmul", N, K, 9), 0)
        (call,) = lower_and_plan({"p": program}, Target(80, matmul="cublaslt")).calls["p"]
        assert isinstance(call, LibraryGemm) == library, (N, K, dtype)


@pytest.mark.parametrize("first, width", [(0, 16), (8, 16), (0, 24)])
def test_columns_of_a_wider_tensor_stay_ours(first, width):
    program = Program(Store(), compute="bf16")
    program.linear(View(program.input("x", (24, 24), "bf16"), first, width), program.parameter("w", (24, width)))
    (call,) = lower_and_plan({"p": program}, Target(80, matmul="cublaslt")).calls["p"]
    assert isinstance(call, LibraryGemm) == (width == 24)


@pytest.mark.slow
@pytest.mark.parametrize("compute, limit", [("fp32", 5e-5), ("bf16", 0.15)])
@pytest.mark.extended
def test_a_model_trains_like_the_references(gpu, library, monkeypatch, compute, limit):
    """With accumulation, clipping and poison."""
    monkeypatch.setenv("BARELLM_POISON", "1")
    train_beside_the_references(MODEL, compute, limit, matmul="cublaslt").synchronize()
    # Of four micro-batches: four products of a block and the classifier's, in three roles; in fp32 two with GELU are ours.
    assert len(library.done) == 4 * (15 if compute == "bf16" else 13)


def test_graphs_are_captured_after_the_first_run_one_for_each_accumulate(gpu, library):
    """The library loads its code when it is first called, which a capture would not allow."""
    store = Store()
    p = Program(store)
    dims = Dim("batch", 1), Dim("seq", 4)
    into = {"dweight": (store.get("dw", (8, 4), "fp32", "gradient"), "start")}
    p.apply(ops.MatmulDw, into=into, dy=p.input("dy", (*dims, 8), "fp32"), x=p.input("x", (*dims, 4), "fp32"))
    session = CudaSession({"p": p}, matmul="cublaslt")
    dy, x = normal(1, 4, 8, seed=1), normal(1, 4, 4, seed=2)
    session.write("dy", dy)
    session.write("x", x)
    want, total = dy[0].T @ x[0], 0.0
    graphs = []
    for accumulate in (0, 1, 0, 1, 1, 0):
        session.run("p", batch=1, seq=4, accumulate=accumulate)
        total = want + (total if accumulate else 0)
        assert np.allclose(session.read("dw"), total, rtol=1e-5, atol=1e-6)
        graphs.append(len(session._graphs))
    assert graphs == [0, 0, 1, 2, 2, 2] and len(library.asked) == 1
    session.replay("p", batch=1, seq=4)
    assert np.allclose(session.read("dw"), want, rtol=1e-5, atol=1e-6)
    fresh = CudaSession({"p": p}, matmul="cublaslt")
    fresh.write("dy", dy)
    fresh.write("x", x)
    assert [ms for _, ms in fresh.timed("p", batch=1, seq=4)] == [LAUNCH_MS]
    assert [ms for _, ms in fresh.timed("p", batch=1, seq=4)] == [LAUNCH_MS]


def test_a_product_that_it_cannot_do_is_one_line(gpu, monkeypatch):
    MockCublas(gpu, unsupported=("gelu bias",)).install(monkeypatch)
    program = Program(Store(), compute="bf16")
    gemms.append(program, gemms.Gemm("", "linear_gelu", 16, 8, 9, bias=True), 0)
    session = CudaSession({"p": program}, matmul="cublaslt")
    with pytest.raises(UserError, match="no way to do cublaslt_nt_16x8_bf16_bf16_gelu_store of 9 tokens on this GPU"):
        session.run("p", batch=1, seq=9)


def test_without_the_library(gpu, monkeypatch):
    """This machine has none: the finder is NVIDIA's own."""

    def nothing(name):
        raise RuntimeError(f"Failure finding {name}")

    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", nothing)
    cublaslt.functions.cache_clear()
    with pytest.raises(UserError, match=r"needs NVIDIA's libcublasLt, and none was found here: pip install nvidia-cublas$"):
        CudaSession(gemm_program(), matmul="cublaslt")
    assert "cuMemAlloc" not in gpu.calls


PREFERENCE = {"reduction": 2, "workspace": WORKSPACE, "align": 16}


def gemm_program() -> dict[str, Program]:
    program = Program(Store(), compute="bf16")
    gemms.append(program, gemms.Gemm("", "matmul", 16, 8, 9), 0)
    return {"p": program}


def test_objects_are_given_back(gpu, library):
    session = CudaSession(gemm_program(), matmul="cublaslt")
    for seq in (1, 4, 1, 4):
        session.run("p", batch=1, seq=seq)
    session.synchronize()
    assert sorted(map(str, library.objects.values())) == ["handle", str(PREFERENCE)]  # a graph needs no descriptors
    session.close()
    assert "handle" not in library.objects.values()


@pytest.mark.extended
def test_products_are_measured_beside_it(gpu, library, monkeypatch):
    monkeypatch.setattr(gemms, "MOST_COPIES", 2)
    monkeypatch.setattr(gemms, "TABLE_SECONDS", 0.0)
    monkeypatch.setattr(gemms, "open_bench", lambda device: FakeBench())
    config = preset("gpt2-124m")
    config = replace(config, model=MODEL, train=replace(config.train, dtype="bf16"))
    rows = gemms.measure(config, tokens=[9], rounds=1, report=lambda row: None, device="cuda", baseline="cublaslt")
    assert rows["peer"] == "cuBLASLt" and rows["matmul"] == "barellm"
    assert len(rows["products"]) == 20 and all(row["times_peer_cold"] > 0 for row in rows["products"])
    assert {line.split()[1] for line in library.done} == {"none"}


class FakeBench:
    def peak(self, dtype: str) -> float:
        return 1e12

    def close(self) -> None:
        pass


def test_a_mistake_is_one_line(capsys):
    assert main.main(["train", "--matmul", "mkl", "--steps", "1"]) == 2
    assert "train.gemm_backend is 'mkl', expected barellm, triton or cublaslt" in capsys.readouterr().err
    assert main.main(["bench", "gemm", "--baselines", "cublaslt"]) == 2
    assert "--baselines cublaslt is for bench gemm --device cuda" in capsys.readouterr().err
