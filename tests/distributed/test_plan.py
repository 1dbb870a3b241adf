"""What a plan says of one of several ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from barellm import models
from barellm.assembly.build import resolved
from barellm.cli.main import main
from barellm.runtime.ranks import Planned
from barellm.tools.plan import plan


def small():
    preset = models.preset("shakespeare-char")
    model = replace(preset.model, layers=2, d_model=256, heads=2)
    return resolved(replace(preset, model=model, train=replace(preset.train, micro_batch_size=6)), "cpu")


@pytest.mark.parametrize("count", [2, 3])
def test_the_optimizers_state_is_divided(count):
    """But for two tensors of one number, which all ranks have."""
    alone, _ = plan.report(small())
    each = plan.of_each_rank(small(), count)
    whole, parts = alone["memory"]["optimizer_state"], [row["optimizer_state"] for row in each]
    assert whole <= sum(parts) <= whole + 8 * count
    assert max(parts) < 1.25 * whole / count
    numbers, _ = plan.report(small(), ranks=Planned(1, count))
    assert (numbers["rank"], numbers["ranks"], numbers["batch"]) == (1, count, 6 // count)
    assert numbers["tokens"] * count == alone["tokens"]
    assert numbers["arena_bytes"] == each[1]["arena_bytes"] < alone["arena_bytes"]
    names = {row["op"] for row in numbers["ops"]}
    assert {"start_all_to_all", "wait_all_to_all", "sum_over_ranks", "all_gather"} <= names and not names & {"reduce"}
    exchanged = next(row["bytes"] for row in numbers["ops"] if row["op"] == "start_all_to_all")
    total = 4 * alone["parameters"]
    assert exchanged == pytest.approx(2 * total * (count - 1) / count, rel=0.25)


def test_the_command_shows_each_rank(capsys):
    sizes = ("--model.layers", "1", "--model.d_model", "64", "--model.heads", "2", "--batch", "4", "--seq", "16")
    assert main(["plan", "shakespeare-char", *sizes, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "micro-batch 2 x 16 of rank 0 of 2" in out
    assert out.count("  rank 0: optimizer state ") == out.count("  rank 1: optimizer state ") == 1
    assert main(["plan", "shakespeare-char", *sizes, "--ranks", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["of_each_rank"]) == 4


@pytest.mark.parametrize(
    "ranks, words", [("0", "--ranks is 0, expected at least 1"), ("3", "train.micro_batch_size is 4, and the run has 3 ranks")]
)
def test_ranks_that_cannot_be_are_refused(ranks, words, capsys):
    assert main(["plan", "shakespeare-char", "--batch", "4", "--ranks", ranks]) == 2
    assert words in capsys.readouterr().err
