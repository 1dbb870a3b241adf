"""Hopper's products: their own functions over a model of the machine, small rings in every order, larger ones in drawn orders."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from barellm.cuda import gemm_config
from barellm.cuda.gemm_config import hopper_config, select_tile_n
from barellm.cuda.kernel import Target
from barellm.cuda.kernels.gemm.hopper import hopper_gemm
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, SLOPES
from barellm.program.scalars import MOST, SCALARS
from barellm.program.tensor import Dim, View
from barellm.runtime.reference import ReferenceSession
from tests.cases import COMMON, VIEWED, check_products_of_views, viewed_case
from tests.check import Case, check_case
from tests.cuda.check import EPS, InterpretedSession, check_op, persistent, stored, tokens
from tests.simulators.gluon_machine import explore, run
from tests.simulators.gluon_stub import Fault, Map, Pointer, materialised, trace

pytestmark = pytest.mark.extended

BF16 = np.dtype(ml_dtypes.bfloat16)
LOADS_C = {*SLOPES, "residual", "add", "start"}


def launch(
    role,
    M,
    N,
    K,
    *,
    epilogue="",
    cols,
    stages,
    slots,
    chunk=None,
    bias=False,
    accumulate=0,
    wide=False,
    seed=1,
    group=16,
    sums=False,
):
    """Arguments of the kernel, and what its tensor maps should hold afterwards as (map, float64 result)."""
    draw = np.random.default_rng(seed).standard_normal
    a, b = draw((M, K)).astype(BF16), draw((K, N)).astype(BF16)
    dtype = np.dtype(np.float32) if wide else BF16
    box = [64, 128 // dtype.itemsize]
    parts = -(-K // (chunk or K))
    other = draw((M, N)).astype(dtype)
    out = other.copy() if epilogue in ("add", "start") else np.full((parts * M, N), np.nan, dtype)
    pre = np.full((M, N), np.nan, dtype)
    vector = draw(N).astype(np.float32) if bias else None
    scalars = np.zeros(MOST, np.int64)
    scalars[SCALARS["accumulate"].index] = accumulate
    maps = {
        "out_map": Map(out, box),
        "pre_map": Map(pre, box) if epilogue in ACTIVATIONS else None,
        "a_map": Map(np.ascontiguousarray(a.T) if role == "tn" else a, [64, 64]),
        "b_map": Map(np.ascontiguousarray(b.T), [cols, 64]) if role == "nt" else Map(b, [64, cols]),
        "c_map": Map(out if epilogue in ("add", "start") else other, box) if epilogue in LOADS_C else None,
    }
    args = maps | {
        "bias": Pointer(vector) if bias else None, "sums": Pointer(np.full(parts * M, np.nan, np.float32)) if sums else None,
        "scalars": Pointer(scalars), "M": M, "N": N, "K": K, "k_per_split": chunk or K,
        "group": group,
        "A_TRANSPOSED": role == "tn", "B_TRANSPOSED": role == "nt", "EPILOGUE": epilogue,
        "TILE_N": cols, "STAGES": stages, "EPI_STAGES": slots,
    }  # fmt: skip
    x, y, before = a.astype(np.float64), b.astype(np.float64), other.astype(np.float64)
    result = np.concatenate([x[:, k : k + (chunk or K)] @ y[k : k + (chunk or K)] for k in range(0, K, chunk or K)])
    if bias:
        result = result + vector
    wanted = [(maps["pre_map"], result)] if epilogue in ACTIVATIONS else []
    if epilogue in ACTIVATIONS:
        result = ACTIVATIONS[epilogue].value(result)
    elif epilogue in SLOPES:
        result = result * SLOPES[epilogue].slope(before)
    elif epilogue in ("residual", "add") or accumulate:
        result = result + before
    if sums:
        rows = [x[:, k : k + (chunk or K)].sum(1) for k in range(0, K, chunk or K)]
        wanted.append((args["sums"], np.concatenate(rows)))
    return args, [*wanted, (maps["out_map"], result)]


def check(wanted) -> None:
    for to, result in wanted:
        limit = 2.0**-8 if to.array.dtype == BF16 else 1e-5
        np.testing.assert_allclose(to.array.astype(np.float64), result, rtol=limit, atol=limit)


# Two tiles of few columns, a ring of two or three stages, two or three steps of depth: small enough for every order.
SMALL = {
    "one product": dict(role="nt", M=128, N=64, K=64, cols=64, stages=2, slots=2),
    "nt": dict(role="nt", M=256, N=64, K=192, cols=64, stages=2, slots=2),
    "nt, three stages": dict(role="nt", M=256, N=64, K=128, cols=64, stages=3, slots=2, bias=True),
    "nn, two blocks of columns": dict(role="nn", M=130, N=128, K=100, cols=128, stages=2, slots=2),
    "tn in two parts": dict(role="tn", M=64, N=64, K=200, cols=64, stages=2, slots=2, chunk=128, wide=True),
    "gelu": dict(role="nt", M=256, N=64, K=128, cols=64, stages=2, slots=2, bias=True, epilogue="gelu"),
    "gelu_backward": dict(role="nn", M=128, N=64, K=64, cols=64, stages=2, slots=2, epilogue="gelu_backward"),
    "relu2": dict(role="nt", M=128, N=64, K=64, cols=64, stages=2, slots=2, epilogue="relu2"),
    "relu2_backward": dict(role="nn", M=128, N=64, K=64, cols=64, stages=2, slots=2, epilogue="relu2_backward"),
    "residual": dict(role="nt", M=64, N=256, K=64, cols=128, stages=2, slots=2, epilogue="residual"),
    "start": dict(role="tn", M=256, N=64, K=64, cols=64, stages=2, slots=2, epilogue="start", wide=True),
    "start, adding": dict(role="tn", M=128, N=64, K=64, cols=64, stages=2, slots=2, epilogue="start", wide=True, accumulate=1),
    "sums, two blocks of columns": dict(role="tn", M=64, N=128, K=128, cols=64, stages=2, slots=2, wide=True, sums=True),
    "sums in two parts": dict(role="tn", M=130, N=64, K=100, cols=64, stages=2, slots=2, chunk=64, wide=True, sums=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_a_small_ring(name):
    kernel = materialised(hopper_gemm)
    args, _ = launch(**SMALL[name])
    explore(trace(kernel, args))
    for seed in range(5):
        args, wanted = launch(**SMALL[name], seed=seed)
        run(trace(kernel, args), seed)
        check(wanted)


SUMS = "sums, two blocks of columns"
PRODUCER, CONSUMER = "gemm_producer_warp", "gemm_consumer_warpgroup"
MUTANTS = {
    "the loader's phase flipped": ("nt", PRODUCER, "producer_acquire(empty, i)", "consumer_wait(empty, i)"),
    "no wait for room": ("nt", PRODUCER, "producer_acquire(empty, i)", "pass"),
    "too few bytes expected": ("nt", PRODUCER, "2 * a_map.block_type.nbytes +", "a_map.block_type.nbytes +"),
    "too many bytes expected": ("nt", PRODUCER, "2 * a_map.block_type.nbytes +", "3 * a_map.block_type.nbytes +"),
    "one half's arrival is enough": ("nt", "hopper_gemm", "empty.index(s), count=2", "empty.index(s), count=1"),
    "a third arrival is missing": ("nt", "hopper_gemm", "empty.index(s), count=2", "empty.index(s), count=3"),
    "the lower half waits for ever": ("one product", CONSUMER, "pred=i <= lead(STAGES)", "pred=False"),
    "barriers are not fenced": ("nt", "hopper_gemm", "hopper.fence_async_shared()", "pass"),
    "the products' phase flipped": ("nt", "wgmma_mainloop", "consumer_wait(pipeline[2], i)", "producer_acquire(pipeline[2], i)"),
    "no wait for operands": (
        "nt", "wgmma_mainloop", "consumer_wait(pipeline[2], i)", "pass"
    ),
    "no wait for the product before": ("nt", "wgmma_mainloop", "hopper.warpgroup_mma_wait(1, deps=(acc,))", "acc"),
    "a stage released too early": ("nt", "wgmma_mainloop", "mma_wait(1, deps=(acc,))", "mma_wait(2, deps=(acc,))"),
    "no wait for the last product": ("nt", "wgmma_mainloop", "hopper.warpgroup_mma_wait(0, deps=(acc,))", "acc"),
    "the wrong stage released": (
        "nt, three stages", "release_previous_stage", "(i + STAGES - 1) % STAGES), pred=another", "i % STAGES), pred=another"
    ),
    "the first step releases a stage": ("nt", "wgmma_mainloop", "k > start", "True"),
    "a tile's last stage is kept": (
        "nt", CONSUMER, "hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))", "pass"
    ),
    "with sums: no wait for operands": (
        SUMS, "wgmma_mainloop", "consumer_wait(pipeline[2], i)", "pass"
    ),
    "with sums: the phase flipped": (SUMS, "wgmma_mainloop", "consumer_wait(pipeline[2], i)", "producer_acquire(pipeline[2], i)"),
    "with sums: a stage released too early": (
        SUMS, "wgmma_mainloop", "mma_wait(1, deps=(acc, column))", "mma_wait(3, deps=(acc, column))"
    ),
    "with sums: no wait for the last products": (
        SUMS, "wgmma_mainloop", "hopper.warpgroup_mma_wait(0, deps=(acc, column))", "acc, column"
    ),
    "with sums: the first step releases a stage": (SUMS, "wgmma_mainloop", "k > start", "True"),
    "ones are not fenced": (SUMS, "hopper_gemm", "hopper.fence_async_shared()", "pass"),
    "no fence before a copy out": ("nt", "tma_store", "hopper.fence_async_shared()", "pass"),
    "a slot reused too early": (
        "nn, two blocks of columns", "epilogue_and_store",
        "else:\n            hopper.tma.store_wait(EPI_STAGES - 1)", "else:\n            hopper.tma.store_wait(EPI_STAGES)",
    ),
    "gelu reuses a slot too early": (
        "gelu", "epilogue_and_store", 'None:\n            hopper.tma.store_wait(EPI_STAGES - 1)', 'None:\n            pass'
    ),
    "the end waits for no copy out": ("nt", CONSUMER, "\n    hopper.tma.store_wait(0)", "\n    pass"),
    "no wait for what is fetched": (
        "residual", "epilogue_and_store",
        "hopper.mbarrier.wait(c_full.index(WG * EPI_STAGES + stored % EPI_STAGES), stored // EPI_STAGES & 1)", "pass",
    ),
    "no wait for a free slot": ("residual", "load_c",
        "hopper.mbarrier.wait(c_empty.index(s), (i // EPI_STAGES & 1) ^ 1)", "pass"),
    "a slot freed while it goes out": ("residual", "epilogue_and_store", "hopper.tma.store_wait(1)", "hopper.tma.store_wait(2)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    config, function, old, new = MUTANTS[name]
    args, _ = launch(**SMALL[config])
    with pytest.raises(Fault):
        explore(trace(materialised(hopper_gemm, {function: (old, new)}), args))


# Rings as they are on the card, ragged edges, more tiles than blocks, groups of rows that are walked together.
LARGE = {
    "nt": dict(role="nt", M=300, N=328, K=200, cols=128, bias=True),
    "nn": dict(role="nn", M=2200, N=136, K=136, cols=64),
    "nn, other groups": dict(role="nn", M=1300, N=136, K=72, cols=64, group=4),
    "tn in parts": dict(role="tn", M=192, N=264, K=1000, cols=256, chunk=384, wide=True),
    "gelu": dict(role="nt", M=200, N=600, K=72, cols=256, epilogue="gelu", bias=True),
    "gelu_backward": dict(role="nn", M=129, N=520, K=72, cols=256, epilogue="gelu_backward"),
    "residual": dict(role="nt", M=300, N=264, K=136, cols=128, epilogue="residual", bias=True, wide=True),
    "add": dict(role="tn", M=320, N=264, K=130, cols=256, epilogue="add", wide=True),
    "sums in parts": dict(role="tn", M=320, N=264, K=500, cols=128, chunk=192, wide=True, sums=True),
    "sums, adding": dict(role="tn", M=192, N=264, K=130, cols=256, epilogue="add", wide=True, sums=True),
    "start": dict(role="tn", M=320, N=264, K=130, cols=256, epilogue="start", wide=True),
    "start, adding": dict(role="tn", M=320, N=264, K=130, cols=128, epilogue="start", wide=True, accumulate=1),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.extended
def test_drawn_orders_of_a_whole_launch(name, seed):
    config = LARGE[name]
    f = hopper_config(config["cols"], loads_c=config.get("epilogue") in LOADS_C)
    args, wanted = launch(**config, stages=f.num_stages, slots=f.epilogue_stages, seed=seed)
    kernel = materialised(hopper_gemm)
    for program in range(3):
        run(trace(kernel, args, program, 3), seed * 3 + program)
    check(wanted)


@pytest.fixture
def small_waves(monkeypatch):
    """Small products are worth Hopper's kernel, on a card of few multiprocessors."""
    monkeypatch.setattr(gemm_config, "WAVE", 1)
    return Target(arch=90, sms=3)


def operand(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("batch, seq, N, K", [(1, 1, 8, 8), (2, 67, 72, 136), (1, 257, 264, 40)])
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.extended
def test_ops_take_the_kernel(small_waves, batch, seq, N, K, accumulate, dtype):
    x, dy = tokens(operand(batch, seq, K, seed=1), dtype), tokens(operand(batch, seq, N, seed=2), dtype)
    weight = persistent(operand(N, K, seed=3), PRECISIONS[dtype].weights)
    bound = 8 * EPS * max(N, K, batch * seq)
    options = {"target": small_waves, "plan": (batch, seq + 30), "scalars": {"accumulate": accumulate}}
    check_op(ops.Matmul, {"x": x, "weight": weight}, bounds={"y": bound}, **options)
    for mode in ("store", "add", "start"):
        check_op(ops.MatmulDx, {"dy": dy, "weight": weight}, modes={"dx": mode}, bounds={"dx": bound}, **options)


@pytest.mark.parametrize("mode, accumulate", [("store", 0), ("start", 0), ("start", 1), ("add", 0)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weight_gradients_in_parts(small_waves, mode, accumulate, parts, dtype, monkeypatch):
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: parts)
    x, dy = tokens(operand(1, 300, 72, seed=1), dtype), tokens(operand(1, 300, 192, seed=2), dtype)
    check_op(
        ops.MatmulDw, {"dy": dy, "x": x}, modes={"dweight": mode}, scalars={"accumulate": accumulate},
        bounds={"dweight": 8 * EPS * 300}, plan=(1, 400), target=small_waves,
    )  # fmt: skip


@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_columns_of_wider_tensors(small_waves, op_type, dtype, monkeypatch):
    """TMA maps have the stride of a view; where its rows are no multiples of 16 bytes the product is Triton's."""
    launched: list[str] = []

    class Session(InterpretedSession):
        def __init__(self, programs):
            super().__init__(programs, target=small_waves)
            launched.append(self.lowered["op"].launches[0].spec.name)

    case, other = viewed_case(op_type, ((2, 67), False, 128, 72), dtype, unit=8), viewed_case(op_type, VIEWED[1], dtype)
    for given in (case, other):
        check_case(Case(op_type, attrs={}, modes=given.pop("modes", {}), **given), {"": Session})
    assert launched == ["hopper_gemm", "gemm"]


@pytest.mark.parametrize("first, whole, kernel", [(8, 88, "hopper_gemm"), (8, 84, "gemm"), (4, 88, "gemm")])
def test_views_whose_rows_begin_elsewhere_than_at_16_bytes_are_tritons(small_waves, first, whole, kernel):
    p = Program(Store(), compute="bf16")
    p.linear(View(p.input("x", (Dim("batch", 2), Dim("seq", 90), whole), "bf16"), first, 72), p.parameter("w", (128, 72)))
    assert [call.spec.name for call in lower_and_plan({"op": p}, small_waves).calls["op"]] == [kernel]


@pytest.mark.parametrize("F, kernel", [(264, "hopper_gemm"), (257, "gemm")])
def test_fused_products_of_columns(small_waves, F, kernel):
    made = check_products_of_views(
        lambda programs: InterpretedSession(programs, target=small_waves), compute="bf16", limit=8e-3, C=136, F=F,
        mode="store",
    )  # fmt: skip
    assert {c.launches[0].spec.name for c in made} == {kernel}


def test_bits_do_not_depend_on_the_card_or_the_tile(small_waves, monkeypatch):
    """One multiprocessor or seven, tiles of 128 or 256 columns: an element is the same chain, a sum of parts has the same order."""
    x, dy = tokens(operand(1, 200, 264, seed=1), "bf16"), tokens(operand(1, 200, 320, seed=2), "bf16")
    weight = persistent(operand(320, 264, seed=3), "bf16_i16")
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: 2)
    cases = [
        (ops.Matmul, {"x": x, "weight": weight}, "y"),
        (ops.MatmulDx, {"dy": dy, "weight": weight}, "dx"),
        (ops.MatmulDw, {"dy": dy, "x": x}, "dweight"),
    ]
    for op_type, given, name in cases:
        got = []
        for sms, cols in ((1, 128), (7, 256)):
            monkeypatch.setattr(gemm_config, "select_tile_n", lambda *shape, cols=cols: cols)
            got.append(check_op(op_type, given, bounds={name: 8 * EPS * 320}, target=Target(arch=90, sms=sms))[name])
        assert np.array_equal(*got)


@pytest.mark.parametrize("parts, mode, N, kernels", [
    (1, "store", 128, ["hopper_gemm", "split_k_reduce"]),
    (3, "start", 192, ["hopper_gemm", "split_k_reduce", "split_k_reduce"]),
    (3, "add", 130, ["gemm", "split_k_reduce", "bias_grad_partials", "combine_partials"]),  # rows that TMA does not take
])  # fmt: skip
def test_a_bias_s_gradient_comes_with_its_weight_s(small_waves, monkeypatch, parts, mode, N, kernels):
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: parts)
    monkeypatch.setattr(gemm_config, "max_splits", lambda tiles, rows: parts)
    p = Program(Store(), compute="bf16")
    x, dy = (p.input(name, (Dim("batch", 2), Dim("seq", 150), n), "bf16") for name, n in (("x", 72), ("dy", N)))
    into = {name: p.store.get(name, shape, "fp32", "state") for name, shape in (("dweight", (N, 72)), ("dbias", (N,)))}
    p.apply(ops.BiasGrad, into={"dbias": (into["dbias"], mode)}, dy=dy)
    p.apply(ops.MatmulDw, into={"dweight": (into["dweight"], mode)}, dy=dy, x=x)
    session, oracle = InterpretedSession({"op": p}, target=small_waves), ReferenceSession({"op": p})
    assert [launch.spec.name for launch in session.lowered["op"].launches] == kernels
    for i, (name, shape) in enumerate({"x": (2, 133, 72), "dy": (2, 133, N), "dweight": (N, 72), "dbias": (N,)}.items()):
        for s in (session, oracle):
            s.write(name, stored(operand(*shape, seed=i + 1), "bf16" if len(shape) == 3 else "fp32"))
    for s in (session, oracle):
        s.run("op", batch=2, seq=133, accumulate=1)
    for name in into:
        np.testing.assert_allclose(session.read(name), oracle.read(name), atol=1e-3, rtol=1e-5)


def linear(p: Program, x, w, b):
    p.output("y", p.linear(x, w, b))


def activated(name: str) -> Callable[..., None]:
    def build(p: Program, x, w, b):
        y = p.linear(x, w, b)
        p.output("y", p.activate(y, name))
        p.output("pre", y)

    build.__name__ = f"linear_{name}"
    return build


def linear_residual(p: Program, x, w, b):
    residual = p.input("residual", (*x.shape[:-1], w.shape[0]), "fp32")
    p.output("y", p.add(residual, p.linear(x, w, b)))


def sloped(name: str) -> Callable[..., None]:
    def build(p: Program, x, w, b):
        dx = p.apply(ops.MatmulDx, dy=p.input("dy", (*x.shape[:-1], w.shape[0]), "bf16"), weight=w).dx
        p.output("dx", p.apply(ACTIVATIONS[name].backward, dy=dx, x=x).dx)

    build.__name__ = f"matmul_dx_{name}"
    return build


def sloped_transposed(p: Program, x, w, b):
    y = p.apply(ops.Matmul, x=x, weight=w).y
    p.output("y", p.apply(ACTIVATIONS["relu2"].backward, dy=y, x=p.input("pre", (*x.shape[:-1], w.shape[0]), "bf16")).dx)


FUSED = [linear, linear_residual, *map(activated, COMMON), *map(sloped, COMMON), sloped_transposed]


@pytest.mark.parametrize("build", FUSED, ids=lambda f: f.__name__)
def test_what_is_fused_means_its_sequence(small_waves, build):
    C, F = 136, 264
    p = Program(Store(), compute="bf16")
    x = p.input("x", (Dim("batch", 2), Dim("seq", 90), C), "bf16")
    build(p, x, p.parameter("w", (F, C), std=0.3), p.parameter("b", (F,), value=0.5))
    session, oracle = InterpretedSession({"op": p}, target=small_waves), ReferenceSession({"op": p})
    assert [launch.spec.name for launch in session.lowered["op"].launches] == ["hopper_gemm"]
    for name, t in {**p.named, **p.store.tensors}.items():
        if t.role in ("input", "parameter"):
            shape = tuple({"batch": 2, "seq": 77}[n.name] if isinstance(n, Dim) else n for n in t.shape)
            for s in (session, oracle):
                s.write(name, stored(operand(*shape, seed=len(name)), "bf16"))
    for s in (session, oracle):
        s.run("op", batch=2, seq=77)
    for name, t in p.named.items():
        if t.role == "output":
            got, want = session.read(name).astype(np.float64), oracle.read(name)
            assert np.abs(got - want).max() <= 4e-3 * np.abs(want).max(), name


def test_tiles_of_gpt2_124m():
    """Tall products take the widest tile, and shared memory holds four of its stages, three where the epilogue reads."""
    for N, K in ((768, 768), (2304, 768), (3072, 768), (768, 3072), (50304, 768)):
        assert select_tile_n("nt", 65536, N, K) == 256
    assert (hopper_config(256, loads_c=False).num_stages, hopper_config(256, loads_c=True).num_stages) == (4, 3)
