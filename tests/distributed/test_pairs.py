"""Checkpoints written by any number of ranks and read by any other: the weights are the same, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from barellm import models
from barellm.assembly.build import open_model, resolved, shards_of
from barellm.checkpoint import checkpoint
from barellm.checkpoint.shards import ShardedState
from tests.distributed.threads import ThreadRanks, each_rank

COUNTS = (1, 2, 3, 4)
BATCH, SEQ, BEFORE = 12, 8, 2
Values = dict[str, np.ndarray]


def config_of(**optim):
    """Of all tensors some are cut, inside a chunk too, and those of Muon dealt whole."""
    preset = models.preset("shakespeare-char")
    model = replace(preset.model, layers=1, d_model=160, heads=2, max_seq=SEQ)
    train = replace(preset.train, micro_batch_size=BATCH, seq=SEQ, dtype="bf16")
    return resolved(replace(preset, model=model, optim=replace(preset.optim, **optim), train=train), "cpu")


class Rank:
    """One of several, with its session."""

    def __init__(self, config, compiled, ranks: ThreadRanks) -> None:
        self.config, self.session, self.ranks = config, compiled.session, ranks
        self.shares = ShardedState(compiled.session, *shards_of(config, ranks), ranks)

    def step(self, step: int, before: Callable[[str], None] = lambda program: None) -> None:
        session, rows = self.session, BATCH // self.ranks.count
        first, shape = self.ranks.rank * rows, (2, BATCH, SEQ)
        drawn = np.random.default_rng(step).integers(0, self.config.model.vocab_size, shape).astype(np.int32)
        for name, values in zip(("tokens", "targets"), drawn[:, first : first + rows], strict=True):
            session.write(name, values)
        counts = {"batch": rows, "seq": SEQ, "inv_targets": 1.0 / (BATCH * SEQ), "accumulate": 0}
        before("forward_backward")
        session.run("forward_backward", **counts, seed=3, step=step + 1, sample=step * BATCH + first)
        if self.config.optim.skips:
            before("grad_norm")
            session.run("grad_norm")
        before("optimizer_step")
        session.run("optimizer_step", lr=1e-2, muon_lr=2e-2, step=step + 1, seed=3, momentum=0.9)

    def whole(self) -> Values:
        """All that a checkpoint has; on rank 0."""
        if self.ranks.rank:
            self.shares.serve()
            return {}
        with self.shares.served():
            return {n: self.shares.read_rows(n, 0, int(t.shape[0])).copy() for n, t in self.shares.tensors.items()}

    def save(self, folder: Path) -> None:
        if self.ranks.rank:
            self.shares.serve()
            return
        with self.shares.served():
            checkpoint.save(folder, self.shares, step=BEFORE, meta={"config": {}}, tokenizer={}, keep=1)

    def load(self, folder: Path) -> None:
        checkpoint.load(checkpoint.step_folder(folder, BEFORE), self.shares)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("optim", [{}, {"name": "muon", "normuon": 0.9, "moments": "16bit"}], ids=["adamw", "muon"])
@pytest.mark.extended
def test_any_number_of_ranks_goes_on_with_what_any_other_has_saved(optim, tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "1")
    config = config_of(**optim)

    def writes(ranks: ThreadRanks) -> tuple[Values, Values]:
        """What is saved, and what it is a step later."""
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            rank = Rank(config, compiled, ranks)
            compiled.initialize(7)
            for step in range(BEFORE):
                rank.step(step)
            rank.save(tmp_path / str(ranks.count))
            saved = rank.whole()
            rank.step(BEFORE)
            return saved, rank.whole()

    def reads(ranks: ThreadRanks) -> list[tuple[Values, Values]]:
        """The same of what each number of ranks has saved."""
        found = []
        with open_model(config, device="cpu", ranks=ranks) as compiled:
            rank = Rank(config, compiled, ranks)
            for count in COUNTS:
                rank.load(tmp_path / str(count))
                loaded = rank.whole()
                rank.step(BEFORE)
                found.append((loaded, rank.whole()))
        return found

    written = [each_rank(count, writes)[0] for count in COUNTS]
    for count in COUNTS:
        read = each_rank(count, reads)[0]
        for there, (saved, after), (loaded, later) in zip(COUNTS, written, read, strict=True):
            pair = f"{there} to {count}"
            assert list(loaded) == list(saved)
            assert all(np.array_equal(loaded[name], values) for name, values in saved.items()), pair
            changed = [name for name, values in saved.items() if not np.array_equal(later[name], values)]
            assert len(changed) > len(saved) / 2, pair
            for name, values in after.items():
                if count == there:
                    assert np.array_equal(later[name], values), (pair, name)
                else:  # the sums of gradients are rounded otherwise
                    scale = np.abs(values).max() + 1e-12
                    assert np.abs(later[name] - values).max() / scale < 0.1, (pair, name)
