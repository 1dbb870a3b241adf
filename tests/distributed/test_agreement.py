"""What a run with several ranks refuses, and what its ranks must agree on."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barellm import models
from barellm.errors import UserError
from barellm.runtime.ranks import ALONE, Planned, first
from barellm.training import agreement, stopping
from barellm.training.loop import Loop
from barellm.training.stopping import Agreed
from tests.distributed.threads import each_rank


def config_of(preset: str = "shakespeare-char", **sections):
    found = models.preset(preset)
    return replace(found, **{name: replace(getattr(found, name), **more) for name, more in sections.items()})


@pytest.mark.parametrize(
    "config, words",
    [
        (config_of(train={"micro_batch_size": 7}), "train.micro_batch_size is 7, and the run has 2 ranks, which do not divide it"),
        (config_of("speedrun", train={"micro_batch_size": 2}), "the runs of speedrun have stages, and the run has 2 ranks"),
        (config_of(train={"exponent_stats": 3}), "train.exponent_stats is 3, and the run has 2 ranks: expected 0"),
        (config_of(train={"signal_grace_period": 2.5}), "train.signal_grace_period is 2.5, and the run has 2 ranks: expected 0"),
        (config_of(data={"order": "llmc"}), "data.order is 'llmc', and the run has 2 ranks"),
    ],
)
def test_what_ranks_cannot_do_is_refused(config, words):
    for device in ("cpu", "cuda"):
        with pytest.raises(UserError) as refused:
            agreement.check(config, device=device, ranks=Planned(0, 2))
        assert str(refused.value).startswith(words)
        agreement.check(config, device=device, ranks=ALONE)


@pytest.mark.parametrize("ranks", [ALONE, Planned(0, 2)])
def test_gradients_are_not_compressed_on_gpus(ranks):
    config = config_of(optim={"powersgd": 4})
    agreement.check(config, device="cpu", ranks=ranks)
    with pytest.raises(UserError, match=r"^optim.powersgd is 4, and --device is cuda: expected 0, for now$"):
        agreement.check(config, device="cuda", ranks=ranks)


def test_the_speedruns_optimizer_is_not_dealt():
    from barellm.optim.recipes import updates

    config = config_of("speedrun")
    with pytest.raises(UserError, match=r"^optim.name is 'speedrun', and the run has 2 ranks: expected adamw or muon$"):
        updates(config.optim, models.hidden(config.model), Planned(0, 2))


def test_the_first_rank_that_differs_is_named_with_what_differs():
    facts = {"barellm": "1", "the configuration": {"train": {"steps": 4, "seq": 8}, "model": {"layers": 1}}}
    said = 'the configuration is {"train": {"steps": 5}} on rank 2, and {"train": {"steps": 4}} on rank 0: all ranks need the same'

    def each(ranks):
        mine = {**facts, "the configuration": {"train": {"steps": 4 + (ranks.rank == 2), "seq": 8}, "model": {"layers": 1}}}
        try:
            agreement.check_consistent_across_ranks(ranks, mine)
        except UserError as error:
            return str(error)

    assert each_rank(3, each) == [said] * 3
    assert each_rank(3, lambda ranks: agreement.check_consistent_across_ranks(ranks, facts)) == [None] * 3


def test_rank_0_goes_first():
    order: list[int] = []

    def goes(ranks):
        with agreement.rank_zero_first(ranks):
            order.append(ranks.rank)

    each_rank(3, goes)
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_what_the_first_rank_says_counts():
    assert each_rank(3, lambda ranks: first(ranks, ranks.rank + 5)) == [5, 5, 5]


def test_a_signal_to_one_rank_counts_when_all_have_agreed():
    def stopped(ranks):
        stop = Agreed(ranks.rank)
        if ranks.rank == 1:
            stop.request(130)
        before = bool(stop)
        stop.agree(ranks.gather(stop.status))
        return before, bool(stop), stop.status

    assert each_rank(2, stopped) == [(False, True, 130)] * 2


def ended(status: int) -> None:
    """Stands for the end of the process."""
    raise SystemExit(status)


@pytest.mark.parametrize("signalled", [{0}, {1}, {0, 1}])
def test_a_signal_that_comes_while_ranks_tell_each_other_counts_in_the_next_step(signalled, monkeypatch):
    """One rank stopped for a signal of which it had not told, and the others waited for it in their next step for ever."""
    monkeypatch.setattr(stopping.os, "_exit", ended)

    def steps(ranks):
        stop, gather = Agreed(ranks.rank), ranks.gather
        stop.tells = False

        def late(value):
            found = gather(value)
            if ranks.rank in signalled and not stop.status:
                stop._receive(signal.SIGINT, None)
            return found

        ranks.gather = late
        loop = cast(Any, SimpleNamespace(ranks=ranks, stop=stop))
        return [(Loop._meet(loop, 1.5), bool(stop)) for _ in range(3)]

    assert each_rank(3, steps) == [[(4.5, False), (4.5, True), (4.5, True)]] * 3


@pytest.mark.parametrize("rank, said", [(0, 1), (1, 0)])
def test_a_rank_that_has_heard_of_a_signal_takes_its_own_for_the_first(rank, said, monkeypatch, capfd):
    """Ctrl-C reaches the ranks one after the other: the last of them ended at once, without a checkpoint."""

    monkeypatch.setattr(stopping.os, "_exit", ended)
    with Agreed(rank) as stop:
        stop.agree([143, 143])
        assert stop and stop.status == 143
        signal.raise_signal(signal.SIGINT)
        assert stop and stop.status == 143
        assert capfd.readouterr().err.count("stopping after this step") == said
        with pytest.raises(SystemExit, match=r"^143$"):
            signal.raise_signal(signal.SIGINT)


def test_the_version_knows_the_sources():
    assert agreement.version() == agreement.version()
    assert agreement.version().startswith("0.") and "(" in agreement.version()
