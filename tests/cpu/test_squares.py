"""Sums of squares of blocks of a matrix, alone and beside the product that stores it, and what sessions do with them."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu import gemm_config, step
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.loss import classifier
from barellm.cpu.step import CpuSession, Lowered
from barellm.optim.adamw import AdamW
from barellm.optim.rules import Rule, update
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.gemm.block_squares import BLOCK
from barellm.program.tensor import Dim
from tests.cases import normal
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, persistent, run_fused, stored
from tests.cpu.test_gemm import every_choice
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED

TILES = [isa_named(name) for name in ISAS if name == "amx_bf16"] or EMULATED  # of both only the real one: time
each_tiles = pytest.mark.parametrize("isa", TILES, ids=lambda isa: isa.name)
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)


def sums(x: np.ndarray, isa=None) -> np.ndarray:
    """What the kernel finds of a matrix in memory."""
    given = {"x": persistent(x, "fp32", "gradient")}
    squares = np.add.reduceat(
        np.add.reduceat(x.astype(np.float64) ** 2, range(0, x.shape[0], 32)), range(0, x.shape[1], 32), axis=1
    )
    return check_op(ops.BlockSquares, isa or isa_named(ISAS[0]), given, bounds={"partials": 40 * EPS * squares})["partials"]


@pytest.mark.parametrize("isa", [isa_named(name) for name in ISAS], ids=ISAS)
@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (31, 33), (33, 31), (65, 64), (64, 97), (7, 200), (130, 3)], ids=str)
def test_of_a_matrix_in_memory(isa, shape):
    sums(normal(*shape).astype(np.float32), isa)


def test_a_block_with_an_infinity_is_not_finite_and_no_other_is():
    x = normal(70, 70).astype(np.float32)
    x[40, 69] = np.inf
    found = check_op(ops.BlockSquares, isa_named(ISAS[0]), {"x": persistent(x, "fp32", "gradient")}, bounds={"partials": None})
    assert np.argwhere(~np.isfinite(found["partials"])).tolist() == [[1, 2]]


def gradient(N: int, K: int, mode: str) -> Program:
    """A weight gradient and the squares of what it stores."""
    p = Program(Store(), compute="bf16")
    shape = (Dim("batch", 2), Dim("seq", 60))
    weight = p.parameter("w", (N, K))
    dy, x = p.input("dy", (*shape, N), "bf16"), p.input("x", (*shape, K), "bf16")
    grad = p.gradient_of(weight)
    p.apply(ops.MatmulDw, into={"dweight": (grad, mode)}, dy=dy, x=x)
    p.apply(ops.BlockSquares, into={"partials": (p.cache("squares", (-(-N // 32), -(-K // 32)), "fp32"), "store")}, x=grad)
    return p


def with_squares(isa, N: int, K: int, mode: str, scalars, before=None, config=None) -> dict[str, np.ndarray]:
    batch, seq = scalars["batch"], scalars["seq"]
    arrays = {"dy": normal(batch, seq, N, seed=5), "x": normal(batch, seq, K, seed=6)}
    arrays = {name: rounded(values) for name, values in arrays.items()}
    if before is not None:
        arrays["w.grad"] = before
    op, found = run_fused(lambda: gradient(N, K, mode), isa, arrays, scalars, name="matmul_dw_squares", config=config)
    given = {"dy": arrays["dy"].astype(np.float64), "x": arrays["x"].astype(np.float64)}
    want = op.run(
        given, scalars, {"dweight": before.astype(np.float64)} if before is not None and op.adds("dweight", scalars) else {}
    )
    np.testing.assert_allclose(found["dweight"], want["dweight"], rtol=0, atol=2e-5 * np.abs(want["dweight"]).max())
    np.testing.assert_allclose(found["squares"], want["squares"], rtol=2e-5)
    return found


def rounded(values: np.ndarray) -> np.ndarray:
    return stored(values, "bf16").astype(np.float32)


@each_tiles
@pytest.mark.parametrize("N, K", [(1, 1), (32, 64), (33, 31), (70, 100), (31, 130)])
@pytest.mark.parametrize("mode, accumulate", [("start", 0), ("start", 1), ("store", 0), ("add", 0)])
def test_beside_a_product_they_are_those_of_what_it_stores(isa, N, K, mode, accumulate):
    """To the bit what the kernel that reads the gradient finds, in the first micro-batch and in a later one."""
    scalars = {"batch": 2, "seq": 29, "accumulate": accumulate}
    before = normal(N, K, seed=9).astype(np.float32)
    found = with_squares(isa, N, K, mode, scalars, before)
    assert np.array_equal(found["squares"], sums(found["dweight"].astype(np.float32), isa))


@each_tiles
@pytest.mark.parametrize("part, chunk", [(32, 2048), (32, 64), (64, 50), (256, 16)])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_beside_a_product_in_chunks_and_parts_of_tokens_the_last_counts(isa, part, chunk, accumulate, monkeypatch):
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={32: chunk})
    changed(monkeypatch, amx, KC=part)
    for seq in (59, 5):
        scalars = {"batch": 2, "seq": seq, "accumulate": accumulate}
        found = with_squares(isa, 67, 40, "start", scalars, normal(67, 40, seed=9).astype(np.float32))
        assert np.array_equal(found["squares"], sums(found["dweight"].astype(np.float32), isa))


@each_tiles
def test_no_choice_changes_a_bit(isa):
    scalars = {"batch": 2, "seq": 29, "accumulate": 0}
    first = None
    for config in every_choice(isa):
        found = with_squares(isa, 131, 70, "start", scalars, config=config)["squares"]
        assert first is None or np.array_equal(found, first), config
        first = found


@pytest.mark.parametrize("isa", [isa_named(name) for name in ISAS if name != "amx_bf16"], ids=[n for n in ISAS if n != "amx_bf16"])
def test_vector_registers_leave_them_to_a_kernel_of_their_own(isa):
    assert [op.name for op in Lowered(gradient(40, 40, "start"), isa, 2).ops] == ["matmul_dw", "block_squares"]
    session = CpuSession(model(), isa=isa, threads=2)
    session.close()
    assert "block_squares" not in names(session, "forward_backward") and names(session, "optimizer_step").count("sum_squares") == 4


# --- sessions ---

SHAPE = (Dim("batch", 3), Dim("seq", 11))
RULES = [Rule("*", optimizer=AdamW(0.9, 0.99, 0.1, 1e-8))]


def model(compute: str = "bf16", *, softcap: bool = False) -> dict[str, Program]:
    """An embedding, a matrix with a bias, and a head of its own."""
    store = Store()
    made = {name: Program(store, compute=compute) for name in ("forward_backward", "optimizer_step")}
    p = made["forward_backward"]
    tokens, targets = p.input("tokens", SHAPE), p.input("targets", SHAPE)
    x = p.embedding(tokens, p.parameter("wte", (53, 40), std=0.5))
    x = p.linear(x, p.parameter("w", (40, 40), std=0.3), p.parameter("b", (40,)))
    if softcap:
        head = p.parameter("head", (40, 70), std=0.3)
        loss = p.softcapped_classifier(x, head, targets, valid_vocab=53)
    else:
        loss = p.classifier(x, p.parameter("head", (70, 40), std=0.3), targets, valid_vocab=53)
    p.output("loss", loss)
    p.backward(loss)
    update(made["optimizer_step"], RULES, clip=0.1)
    return made


def names(session, program: str) -> list[str]:
    return [op.name for op in session.lowered[program].ops]


def fill(session) -> None:
    for t in list(session.tensors.values()):
        if t.role == "parameter":
            session.write(t.name, 0.3 * normal(*t.shape, seed=len(t.name)))


def micro(session, number: int, *, batch: int = 3, seq: int = 11) -> None:
    ids = np.random.default_rng(number).integers(0, 53, (2, batch, seq)).astype(np.int32)
    session.write("tokens", ids[0])
    session.write("targets", ids[1])
    session.run("forward_backward", batch=batch, seq=seq, accumulate=int(number > 0), inv_targets=1 / 40)


def norm(session) -> float:
    found = [session.read(t.name).astype(np.float64) for t in session.tensors.values() if t.role == "gradient"]
    return float(np.sqrt(sum((g**2).sum() for g in found)))


@each_tiles
@pytest.mark.parametrize("softcap", [False, True], ids=["plain", "softcapped"])
def test_a_head_sums_its_squares_behind_its_chunks_of_tokens(isa, softcap, monkeypatch):
    """33 tokens in chunks of 8; a run with fewer has fewer chunks."""
    monkeypatch.setattr(classifier, "CHUNK", 8)
    session = CpuSession(model(softcap=softcap), isa=isa, threads=2)
    try:
        kind = "softcapped_classifier_squares" if softcap else "classifier_squares"
        assert {kind, "matmul_dw_squares"} <= set(names(session, "forward_backward"))
        assert names(session, "optimizer_step").count("sum_squares") == 2  # of the embedding and the bias
        fill(session)
        for number, sizes in enumerate(((3, 11), (1, 5))):
            micro(session, number, batch=sizes[0], seq=sizes[1])
            for name in ("head.grad", "w.grad"):
                assert np.array_equal(session.read(f"{name}.squares"), sums(session.read(name), isa))
        session.run("optimizer_step", lr=1e-3, step=1)
        clip = session.read("clip")
        assert clip[0] == pytest.approx(norm(session), rel=1e-6) and clip[1] == pytest.approx(0.1 / clip[0], rel=1e-6)
    finally:
        session.close()


def test_a_session_in_fp32_has_none():
    session = CpuSession(model("fp32"), threads=2)
    session.close()
    assert "matmul_dw" in names(session, "forward_backward") and names(session, "optimizer_step").count("sum_squares") == 4


@each_tiles
def test_a_gradient_that_is_written_by_hand_is_what_the_norm_is_of(isa):
    session = CpuSession(model(), isa=isa, threads=2)
    try:
        fill(session)
        micro(session, 0)
        session.write("w.grad", 3 * session.read("w.grad"))
        want = norm(session)
        session.run("optimizer_step", lr=0.0, step=1)
        assert session.read("clip")[0] == pytest.approx(want, rel=1e-6)
        session.write_rows("head.grad", 5, np.full((2, 40), np.inf, np.float32))
        session.run("optimizer_step", lr=0.0, step=2)
        assert not np.isfinite(session.read("clip")[0]) and session.read("skipped")[0] == 1
        micro(session, 0)
        session.run("optimizer_step", lr=0.0, step=2)
        assert np.isfinite(session.read("clip")).all() and session.read("skipped")[0] == 1
    finally:
        session.close()


@each_tiles
def test_what_is_not_finite_skips_the_update(isa):
    session = CpuSession(model(), isa=isa, threads=2)
    try:
        fill(session)
        session.write("b", np.full(40, np.inf, np.float32))
        before = session.read("w")
        micro(session, 0)
        session.run("optimizer_step", lr=0.1, step=1)
        assert np.isnan(session.read("clip")[1]) and session.read("skipped")[0] == 1
        assert np.array_equal(session.read("w"), before)
    finally:
        session.close()


@each_tiles
def test_steps_are_those_of_sums_from_memory(isa, monkeypatch):
    """The same run without it has the same losses and norms but for rounding; with it the threads change no bit."""

    def run(threads: int):
        session = CpuSession(model(), isa=isa, threads=threads)
        try:
            fill(session)
            found = []
            for at in range(1, 4):
                for number in range(2):
                    micro(session, number)
                session.run("optimizer_step", lr=1e-2, step=at)
                found += [session.read("loss")[0], session.read("clip")[0]]
            return found, session.digest()
        finally:
            session.close()

    runs = [run(threads) for threads in (1, 2, 5)]
    assert runs[0] == runs[1] == runs[2]
    monkeypatch.setattr(step, "fuse_grad_norm", lambda programs, takes: (programs, {}))
    np.testing.assert_allclose(run(2)[0], runs[0][0], rtol=1e-5)


@each_tiles
def test_blocks_are_those_of_the_tiles(isa):
    assert amx.MR == amx.NR == BLOCK
    for rows, cols, tokens in ((131, 70, 58), (2304, 768, 256), (50304, 768, 1024), (3, 5, 4096)):
        config = gemm_config.default(isa, "weight_gradient", "bf16", cols, tokens, rows)
        assert config.mc % BLOCK == 0 and config.nc % BLOCK == 0
