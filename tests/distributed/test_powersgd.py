"""Compressed gradients of several ranks: what they become, what stays, and what a checkpoint gives to other numbers of ranks."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from barellm import models
from barellm.assembly.build import open_model, resolved, shards_of
from barellm.checkpoint import tensorfile
from barellm.checkpoint.error_feedback_state import ErrorFeedbackState
from barellm.checkpoint.shards import ShardedState
from barellm.cli.main import main
from barellm.errors import UserError
from barellm.optim import powersgd
from barellm.optim.powersgd import Compression
from barellm.program.builder import Program, Store
from barellm.program.dtypes import decode, encode
from barellm.runtime.ranks import ALONE, Planned
from barellm.tools.plan import plan
from barellm.training import agreement
from tests.distributed.test_steps import BATCH, STEPS, config_of, micro, update
from tests.distributed.threads import each_rank

RANK = 3


def small(**optim):
    return resolved(config_of(powersgd=RANK, **({"dtype": "fp32"} | optim)), "cpu")


def rounded(values: np.ndarray) -> np.ndarray:
    return decode(encode(values, "bf16"), "bf16").astype(np.float64).reshape(values.shape)


def stepped(config, ranks, *, spoil: int | None = None):
    """Gradients and states of a rank before and after each update."""
    with open_model(config, device="cpu", ranks=ranks) as compiled:
        session, rows = compiled.session, BATCH // ranks.count
        compiled.initialize(7)

        def seen(role: str) -> dict[str, np.ndarray]:
            return {name: session.read(name) for name, t in session.tensors.items() if t.role == role}

        found = []
        for step in range(STEPS):
            for number in range(config.train.gradient_accumulation_steps):
                micro(session, config, step, number, first=ranks.rank * rows, rows=rows)
            if spoil == step and ranks.rank == 0:
                gradient = session.read("h.0.mlp.c_fc.weight.grad")
                gradient[3, 3] = np.inf
                session.write("h.0.mlp.c_fc.weight.grad", gradient)
            before = seen("gradient") | seen("state") | seen("parameter")
            update(session, config, step)
            after = seen("gradient") | seen("state") | seen("parameter")
            found.append((before, after, session.read("clip")))
        return found


def oracle(ms: list[np.ndarray], q: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """A step over the matrices of all ranks in float64, with LAPACK's basis: the gradient, the errors, and the next Q."""
    if tall := ms[0].shape[0] > ms[0].shape[1]:
        ms = [m.T for m in ms]
    p = rounded(sum(rounded(m @ q.T) for m in ms))
    basis = np.linalg.qr(p)[0] if p.any() else np.eye(*p.shape)
    own = [rounded(m.T @ basis) for m in ms]
    total = rounded(sum(own))
    found = basis @ total.T, [m - basis @ x.T for m, x in zip(ms, own, strict=True)]
    gradient, errors = (found[0].T, [e.T for e in found[1]]) if tall else found
    return gradient, errors, total.T


@pytest.mark.parametrize("count, how", [(1, {}), (3, {}), (2, {"name": "muon"}), (2, {"accumulate": 2, "skip_norm_z": 9.0})],
                         ids=["alone", "three", "muon", "accumulated, may skip"])  # fmt: skip
@pytest.mark.extended
def test_a_step_is_that_of_the_paper_and_all_ranks_have_the_same_bits(count, how, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "1")
    ranks = each_rank(count, lambda ranks: stepped(small(**how), ranks))
    kept = {name for name in ranks[0][0][0] if name.endswith(".error")}
    assert {"wte.error", "wpe.error", "h.0.mlp.c_fc.weight.error"} <= kept and len(kept) == 6
    for step in range(STEPS):
        before, after = ([rank[step][i] for rank in ranks] for i in (0, 1))
        gradients = [name for name in before[0] if name.endswith(".grad")]
        squares = 0.0
        for name in gradients:
            param = name.removesuffix(".grad")
            got = after[0][name]
            assert all(np.array_equal(got, other[name]) for other in after), name
            squares += (got.astype(np.float64) ** 2).sum()
            if f"{param}.error" not in kept:
                total = before[0][name]
                for other in before[1:]:
                    total = total + other[name]
                assert np.array_equal(got, total), name
                continue
            ms = [b[name].astype(np.float64) + b[f"{param}.error"] for b in before]
            size = np.abs(sum(ms)).max()
            left = sum(a[f"{param}.error"].astype(np.float64) for a in after)
            np.testing.assert_allclose(got + left, sum(ms), atol=0.01 * size, err_msg=name)
            gradient, errors, q = oracle(ms, before[0][f"{param}.factor"])
            np.testing.assert_allclose(got, gradient, atol=0.01 * size, err_msg=name)
            for a, error in zip(after, errors, strict=True):
                np.testing.assert_allclose(a[f"{param}.error"], error, atol=0.01 * size, err_msg=name)
            np.testing.assert_allclose(np.abs(after[0][f"{param}.factor"]), np.abs(q), atol=0.02 * np.abs(q).max())
        assert ranks[0][step][2][0] == pytest.approx(np.sqrt(squares), rel=2e-3), "the norm"
        for name, values in after[0].items():
            if not name.endswith((".error", ".grad")):
                assert all(np.array_equal(values, other[name]) for other in after), name
    moved = ranks[0][-1][1]["h.0.mlp.c_fc.weight"] - ranks[0][0][0]["h.0.mlp.c_fc.weight"]
    assert np.abs(moved).min() >= 0 and np.abs(moved).max() > 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_bits_do_not_depend_on_threads(dtype, monkeypatch):
    found = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("BARELLM_THREADS", threads)
        found.append(each_rank(2, lambda ranks: stepped(small(dtype=dtype), ranks))[1][-1][1])
    for name, values in found[0].items():
        assert all(np.array_equal(values, other[name]) for other in found[1:]), name


@pytest.mark.extended
def test_a_step_that_is_not_finite_changes_nothing_on_all_ranks(monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "1")
    for rank in each_rank(2, lambda ranks: stepped(small(), ranks, spoil=1)):
        before, after, clip = rank[1]
        assert np.isnan(clip[1]) and after["skipped"][0] == 1
        assert all(np.array_equal(before[name], after[name]) for name in before if not name.endswith(".grad") and name != "skipped")
        assert after["h.0.mlp.c_fc.weight.error"].any() and np.isfinite(rank[2][2]).all()


# --- checkpoints ---


def saved(config, count: int):
    """What ranks hold after training, and what rank 0 writes."""

    def work(ranks):
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            session, rows = compiled.session, BATCH // ranks.count
            compiled.initialize(7)
            for step in range(2):
                micro(session, config, step, 0, first=ranks.rank * rows, rows=rows)
                update(session, config, step)
            errors = {n: session.read(n) for n in session.tensors if n.endswith(".error")}
            shares = ShardedState(session, *shards_of(compiled.config, ranks), ranks)
            if ranks.rank:
                shares.serve()
                return errors, {}
            with shares.served():
                states = {n: t for n, t in shares.tensors.items() if t.role == "state"}
                return errors, {n: shares.read_rows(n, 0, int(t.shape[0])) for n, t in states.items()}

    return each_rank(count, work)


class Rows:
    """A file's tensors, as `tensorfile.write` wants them."""

    def __init__(self, arrays):
        self.arrays = arrays

    def read_rows(self, name, lo, hi):
        return self.arrays[name][lo:hi]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_checkpoint_gives_each_rank_its_error_and_other_numbers_of_ranks_their_sums(count, tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "1")
    monkeypatch.setattr(tensorfile, "NEAR", 5000)  # rows come in pieces
    config = small()
    before = saved(config, 3)
    tensors, _ = shards_of(config, Planned(0, 3))
    states = {n: t for n, t in tensors.items() if t.role == "state"}
    path = tmp_path / "optimizer.safetensors"
    tensorfile.write(path, Rows(before[0][1]), states)
    assert tensorfile.read_header(path)[0]["h.0.mlp.c_fc.weight.error"]["shape"] == [3 * 640, 160]

    def loaded(ranks):
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            stored = compiled.session
            if ranks.count > 1:
                stored = ShardedState(compiled.session, *shards_of(compiled.config, ranks), ranks)
            source = ErrorFeedbackState(stored, compiled.session, ranks, path, suffix=f".{powersgd.ERROR}")
            assert source.blocks == 3
            tensorfile.read(path, source, {n: t for n, t in source.tensors.items() if t.role == "state"})
            return {n: compiled.session.read(n) for n, t in compiled.session.tensors.items() if t.role == "state"}

    after = each_rank(count, loaded)
    for name in before[0][0]:
        for rank in range(count):
            expected = before[rank][0][name]
            for other in range(rank + count, 3, count):
                expected = expected + before[other][0][name]
            assert np.array_equal(after[rank][name], expected), (name, rank)
    for name in ("wte.factor", "wte.m", "skipped"):
        assert all(np.array_equal(theirs[name].reshape(-1), before[0][1][name].reshape(-1)) for theirs in after), name


def test_more_ranks_than_before_begin_with_nothing_left_out(tmp_path):
    store = Store()
    t = store.get("w.error", (4, 2), "fp32", "state")
    path = tmp_path / "optimizer.safetensors"
    tensorfile.write(path, Rows({"w.error": np.arange(8, dtype=np.float32).reshape(4, 2)}), {"w.error": t})

    class Session:
        tensors = store.tensors

        def __init__(self):
            self.written = []

        def write_rows(self, name, lo, values):
            self.written.append((name, lo, values.tolist()))

    for rank, expected in ((0, [("w.error", 0, [[0, 1], [2, 3], [4, 5], [6, 7]])]), (1, [])):
        session: Any = Session()
        source = ErrorFeedbackState(session, session, Planned(rank, 2), path, suffix=".error")
        assert source.blocks == 1
        tensorfile.read(path, source, source.tensors)
        assert session.written == expected


@pytest.mark.parametrize("shape", [(5, 2), (8, 3), (8, 2, 1)], ids=str)
def test_an_error_of_another_shape_is_refused(shape, tmp_path):
    other = Store().get("w.error", shape, "fp32", "state")
    path = tmp_path / "optimizer.safetensors"
    tensorfile.write(path, Rows({"w.error": np.zeros(shape, np.float32)}), {"w.error": other})

    class Session:
        def __init__(self):
            self.tensors = {"w.error": Store().get("w.error", (4, 2), "fp32", "state")}

    session: Any = Session()
    source = ErrorFeedbackState(session, session, ALONE, path, suffix=".error")
    found = re.escape(f"w.error is F32 {shape}, expected F32 (4, 2)")
    with pytest.raises(UserError, match=found):
        tensorfile.read(path, source, source.tensors)


# --- plans and refusals ---


def test_the_plan_shows_fewer_bytes_between_ranks_and_a_whole_state(capsys):
    def numbers(rank: int):
        config = resolved(config_of(powersgd=rank), "cpu")
        found, _ = plan.report(config, ranks=Planned(0, 2))
        return found, sum(row["bytes"] for row in found["ops"] if row["op"] in ("all_to_all", "all_gather"))

    (_, many), (compressed, few) = numbers(0), numbers(RANK)
    assert few < many / 10
    matrices = sum(t for t in (65 * 160, 16 * 160, 3 * 160 * 160, 160 * 160, 2 * 4 * 160 * 160))
    dealt = sum(row["optimizer_state"] for row in plan.of_each_rank(resolved(config_of(), "cpu"), 2))
    extra = compressed["memory"]["optimizer_state"] - dealt
    assert extra == pytest.approx(4 * matrices, rel=0.05), "an error for each element of a matrix, and no shares"
    names = {row["op"] for row in compressed["ops"]}
    assert {"factor", "householder", "feedback", "all_to_all", "sum_over_ranks", "all_gather"} <= names
    sizes = ("--model.layers", "1", "--model.d_model", "64", "--model.heads", "2", "--batch", "4", "--seq", "16")
    assert main(["plan", "shakespeare-char", *sizes, "--ranks", "2", "--optim.powersgd", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["of_each_rank"]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "shape, rank, expected",
    [((8, 9), 4, True), ((8, 9), 5, False), ((8,), 1, False), ((2, 99), 3, False), ((2, 2), 1, False), ((2, 3), 1, True)],
)
def test_matrices_are_compressed_where_factors_are_smaller(shape, rank, expected):
    t = Store().get("w", shape, "fp32", "parameter")
    assert Compression(rank, None).compresses(t) is expected


def test_what_cannot_be_compressed_is_refused():
    from dataclasses import replace

    from barellm.optim.recipes import updates

    config = config_of(powersgd=2)
    with pytest.raises(UserError, match=r"^optim.powersgd is 2, and --device is cuda: expected 0, for now$"):
        agreement.check(config, device="cuda", ranks=ALONE)
    with pytest.raises(UserError, match=r"^optim.powersgd is 2 and train.dtype fp16, whose loss scale .*expected fp32"):
        replace(config, train=replace(config.train, dtype="fp16")).check()
    with pytest.raises(UserError, match=r"^optim.powersgd is 2 and optim.name 'speedrun', expected adamw or muon$"):
        replace(config.optim, name="speedrun")
    large = replace(config.optim, powersgd=100000)
    p = Program(Store())
    p.parameter("w", (4, 4))
    with pytest.raises(UserError, match=r"^optim.powersgd is 100000: factors would be no smaller than any matrix"):
        updates(large, models.hidden(config.model))["optimizer_step"](p)
