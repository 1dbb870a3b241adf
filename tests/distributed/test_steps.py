"""Steps of several ranks, to the bit those of one process that adds their gradients in their order."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from barellm import models
from barellm.assembly.build import open_model, resolved, shards_of
from barellm.checkpoint.shards import ShardedState
from barellm.config import AdapterConfig
from barellm.cpu import step as cpu_step
from barellm.distributed.memory import can_read
from barellm.program.dtypes import FORMATS
from tests.distributed.threads import each_rank

BATCH, SEQ, STEPS = 6, 8, 3


def config_of(*, dtype: str = "bf16", accumulate: int = 1, adapter: AdapterConfig | None = None, clip: float = 0.5, **optim):
    """A model of which some parameters are cut, inside a chunk too, some dealt whole, and whose norm clips. Its dropout depends on
    the sample."""
    preset = models.preset("shakespeare-char")
    model = replace(preset.model, layers=1, d_model=160, heads=2, max_seq=16, dropout=0.1)
    train = replace(preset.train, micro_batch_size=BATCH, seq=SEQ, dtype=dtype, gradient_accumulation_steps=accumulate)
    optimizer = replace(preset.optim, clip=clip, **optim)
    return replace(preset, model=model, optim=optimizer, train=train, adapter=adapter or preset.adapter)


def texts(config) -> np.ndarray:
    """(steps, micro-batches, tokens or targets, BATCH, SEQ)"""
    shape = (STEPS, config.train.gradient_accumulation_steps, 2, BATCH, SEQ)
    return np.random.default_rng(5).integers(0, config.model.vocab_size, shape).astype(np.int32)


def micro(session, config, step: int, number: int, *, first: int, rows: int) -> None:
    """Rows [first, first + rows) of a micro-batch."""
    tokens, targets = texts(config)[step, number, :, first : first + rows]
    session.write("tokens", tokens)
    session.write("targets", targets)
    counts = {"batch": rows, "seq": SEQ, "inv_targets": 1.0 / (config.train.gradient_accumulation_steps * BATCH * SEQ)}
    sample = (step * config.train.gradient_accumulation_steps + number) * BATCH + first
    counts |= {"accumulate": int(number > 0), "last": int(number + 1 == config.train.gradient_accumulation_steps)}
    session.run("forward_backward", **counts, seed=3, step=step + 1, sample=sample)


def update(session, config, step: int, *, lr: float = 1e-2) -> None:
    if config.optim.skips:
        session.run("grad_norm")
    session.run("optimizer_step", lr=lr, muon_lr=3 * lr, step=step + 1, seed=3, momentum=0.9)


def state_of(session, names) -> dict[str, np.ndarray]:
    return {name: session.read_rows(name, 0, int(session.tensors[name].shape[0])) for name in names}


def trained(config, ranks, device: str):
    """What rank 0 would save, or the clipping of another rank; the parameters as products read them; bytes of state."""
    with open_model(config, device=device, ranks=ranks) as compiled:
        session, rows = compiled.session, BATCH // ranks.count
        compiled.initialize(7)
        for step in range(STEPS):
            for number in range(config.train.gradient_accumulation_steps):
                micro(session, config, step, number, first=ranks.rank * rows, rows=rows)
            update(session, config, step)
        shares = ShardedState(session, *shards_of(compiled.config, ranks), ranks)
        if ranks.rank:
            shares.serve()
            whole = {}
        else:
            with shares.served():
                whole = state_of(shares, shares.tensors)
        return whole, read_by_products(session), session.read("clip"), held(session)


def read_by_products(session) -> dict[str, np.ndarray]:
    found = {}
    for name, t in session.tensors.items():
        if t.role == "parameter":
            planes = FORMATS[t.dtype].planes and hasattr(session, "stored")
            found[name] = session.stored(t)[: 2 * t.size].copy() if planes else session.read(name)
    return found


def held(session) -> int:
    return sum(t.nbytes for t in session.tensors.values() if t.role == "state")


def oracle(config, count: int, device: str):
    """One process that adds the gradients of `count` ranks in their order, with NumPy."""
    with open_model(config, device=device) as compiled:
        session, rows = compiled.session, BATCH // count
        compiled.initialize(7)
        gradients = [name for name, t in session.tensors.items() if t.role == "gradient"]
        for step in range(STEPS):
            total: dict[str, np.ndarray] = {}
            for rank in range(count):
                for number in range(config.train.gradient_accumulation_steps):
                    micro(session, config, step, number, first=rank * rows, rows=rows)
                total = {name: total[name] + session.read(name) if rank else session.read(name) for name in gradients}
            for name, values in total.items():
                session.write(name, values)
            update(session, config, step)
        kept = [name for name, t in session.tensors.items() if t.role in ("parameter", "state")]
        return state_of(session, kept), read_by_products(session), session.read("clip"), held(session)


RECIPES = {
    "adamw": ({}, 2, "cpu"),
    "adamw, three ranks": ({}, 3, "cpu"),
    "fp32, accumulated": ({"dtype": "fp32", "accumulate": 2}, 2, "cpu"),
    "stochastic 16-bit moments": ({"moments": "16bit-stochastic"}, 2, "cpu"),
    "muon": ({"name": "muon"}, 2, "cpu"),
    "normuon that may skip": ({"name": "muon", "normuon": 0.9, "skip_norm_z": 9.0}, 3, "cpu"),
    "fp16": ({"dtype": "fp16"}, 2, "cpu"),
    "the references": ({"dtype": "fp32"}, 2, "reference"),
    "adapters": ({"adapter": AdapterConfig("lora:3", targets="all-linear", dropout=0.1), "clip": 0.01}, 2, "cpu"),
    "fewer parameters than ranks": ({"adapter": AdapterConfig(train_only="h.0.ln_*"), "clip": 0.01, "accumulate": 2}, 3, "cpu"),
}


ONE_WAY = ("adamw", "stochastic 16-bit moments", "muon", "fp16")
WORD = np.arange(8, dtype=np.uint8)
readable = can_read(os.getpid(), (WORD.ctypes.data, WORD.nbytes), WORD.tobytes())


# The ways of the gradients: messages while the backward pass goes on, messages behind it, and reading.
WAYS = ("", "behind", "read") if readable else ("", "behind")


@pytest.mark.parametrize(
    "options, count, device, way",
    [
        pytest.param(*recipe, way, id=f"{name}, {way}".removesuffix(", "))
        for name, recipe in RECIPES.items()
        for way in WAYS
        if not way or name not in ONE_WAY
    ],
)
@pytest.mark.extended
def test_ranks_train_as_one_process_that_adds_in_their_order(options, count, device, way, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "1")
    # The norm of the gradients of all ranks is found in memory, as ranks find it.
    monkeypatch.setattr(cpu_step, "fuse_grad_norm", lambda programs, takes: (programs, {}))
    config = resolved(config_of(**options, overlap=way != "behind"), device)
    whole, read, clip, nbytes = oracle(config, count, device)
    results = each_rank(count, lambda ranks: trained(config, ranks, device), direct=way == "read")
    assert clip[1] < 1.0, "the norm must clip"
    saved = results[0][0]
    assert list(saved) == list(whole)
    for name, values in whole.items():
        assert np.array_equal(saved[name], values), name
    for rank, (_, theirs, their_clip, _) in enumerate(results):
        assert np.array_equal(their_clip, clip), rank
        for name, values in read.items():
            assert np.array_equal(theirs[name].view(np.uint8), values.view(np.uint8)), (rank, name)
    assert sum(r[3] for r in results) <= nbytes + 16 * count, "state is dealt, not copied"
    assert max(r[3] for r in results) < 0.7 * nbytes


def test_a_norm_that_is_not_finite_on_one_rank_changes_nothing_on_all(monkeypatch):
    """It is put where it was found before anything is sent."""
    monkeypatch.setenv("BARELLM_THREADS", "1")
    config = resolved(config_of(overlap=False), "cpu")

    def broken(ranks):
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            session = compiled.session
            compiled.initialize(7)
            before = read_by_products(session)
            micro(session, config, 0, 0, first=2 * ranks.rank, rows=2)
            if ranks.rank == 2:
                gradient = session.read("wpe.grad")
                gradient[0, 0] = np.nan
                session.write("wpe.grad", gradient)
            update(session, config, 0)
            after = read_by_products(session)
            return (
                session.read("clip"),
                int(session.read("skipped")[0]),
                all(np.array_equal(before[name], after[name]) for name in before),
            )

    for clip, skipped, same in each_rank(3, broken):
        assert np.isnan(clip).all() and skipped == 1 and same


def test_two_ranks_find_the_gradient_of_the_whole_batch(monkeypatch):
    """Within rounding: the sums over rows are made in two parts."""
    monkeypatch.setenv("BARELLM_THREADS", "1")
    config = resolved(config_of(dtype="fp32"), "cpu")

    def norm(ranks):
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            compiled.initialize(7)
            rows = BATCH // ranks.count
            micro(compiled.session, config, 0, 0, first=ranks.rank * rows, rows=rows)
            update(compiled.session, config, 0)
            return compiled.session.read("clip")[0], compiled.session.read("wpe")

    alone, pair = each_rank(1, norm)[0], each_rank(2, norm)[0]
    assert alone[0] == pytest.approx(pair[0], rel=1e-5)
    np.testing.assert_allclose(alone[1], pair[1], atol=2e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_find_the_gradient_of_the_whole_batch_in_every_tensor(accumulate, monkeypatch):
    """What each ends with for its share, all shares together, and what the ranks would add, beside one process with all rows."""
    monkeypatch.setenv("BARELLM_THREADS", "1")
    config = resolved(config_of(dtype="fp32", accumulate=accumulate, overlap=False), "cpu")

    def gradients(ranks):
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            session, rows = compiled.session, BATCH // ranks.count
            compiled.initialize(7)
            for number in range(accumulate):
                micro(session, config, 0, number, first=ranks.rank * rows, rows=rows)
            return {name: session.read(name) for name, t in session.tensors.items() if t.role == "gradient"}

    (whole,) = each_rank(1, gradients)
    for count in (2, 3):
        parts = each_rank(count, gradients)
        assert all(list(found) == list(whole) for found in parts)
        for name, values in whole.items():
            total = np.sum([found[name].astype(np.float64) for found in parts], axis=0)
            assert np.abs(values).max() > 0, name
            error = np.abs(total - values).max() / np.abs(values).max()
            assert error < 1e-5, (count, name, error)
            assert not np.allclose(parts[0][name] * count, values, rtol=1e-3), "each has rows of its own"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "behind"])
@pytest.mark.parametrize("options", [{}, {"name": "muon"}], ids=["adamw", "muon"])
def test_the_threads_of_a_rank_change_no_bit(options, way, monkeypatch):
    config = resolved(config_of(**options), "cpu")
    found = []
    for threads in (1, 3):
        monkeypatch.setenv("BARELLM_THREADS", str(threads))
        found.append(each_rank(2, lambda ranks: trained(config, ranks, "cpu"), direct=way == "read"))
    one, several = found
    assert one[0][0].keys() == several[0][0].keys()
    assert all(np.array_equal(values, several[0][0][name]) for name, values in one[0][0].items())
    for (_, read, clip, _), (_, their_read, their_clip, _) in zip(one, several, strict=True):
        assert np.array_equal(clip, their_clip)
        assert all(np.array_equal(values.view(np.uint8), their_read[name].view(np.uint8)) for name, values in read.items())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.extended
def test_what_is_loaded_in_pieces_is_what_is_saved(count, monkeypatch):
    """Whatever piece of a tensor comes, a rank keeps its share of it."""
    monkeypatch.setenv("BARELLM_THREADS", "1")
    config = resolved(config_of(name="muon", normuon=0.9), "cpu")
    r = np.random.default_rng(2)

    def loaded(ranks):
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            shares = ShardedState(compiled.session, *shards_of(compiled.config, ranks), ranks)
            for name, t in shares.tensors.items():
                for lo in range(0, int(t.shape[0]), 7):
                    shares.write_rows(name, lo, given[name][lo : lo + 7])
            if ranks.rank:
                return shares.serve()
            with shares.served():
                return state_of(shares, shares.tensors)

    with open_model(config, device="cpu") as compiled:
        kept = {name: t for name, t in compiled.session.tensors.items() if t.role in ("parameter", "state")}
        given = {name: r.standard_normal(t.shape).astype(np.float32) for name, t in kept.items()}
        given["skipped"] = np.array([3], np.int32)
    found = each_rank(count, loaded)[0]
    assert list(found) == list(given)
    for name, values in given.items():
        assert np.array_equal(found[name], values), name
