"""GPT-3's ramp: more micro-batches with every token, and the same samples in the same order."""

from __future__ import annotations

from fractions import Fraction

import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.config import TrainConfig
from barellm.training import metrics
from barellm.training.batch_rampup import BatchRampup
from tests.training.conftest import whole_and_resumed


def train(**more) -> TrainConfig:
    return TrainConfig(**({"micro_batch_size": 3, "seq": 7, "gradient_accumulation_steps": 9, "steps": 100} | more))


@pytest.mark.parametrize("first, tokens", [(1, 1), (1, 2000), (4, 500), (9, 10), (8, 5000)])
def test_the_micro_batches_are_the_line_rounded_down(first, tokens):
    batch_rampup, seen = BatchRampup(train(batch_rampup_from=first, batch_rampup_tokens=tokens)), 0
    for step in range(60):
        line = min(Fraction(9), first + Fraction((9 - first) * seen, tokens))
        assert batch_rampup.count(step) == int(line)
        assert batch_rampup.tokens(step) == seen
        seen += batch_rampup.count(step) * 21
    assert batch_rampup.count(59) == 9


def test_a_ramp_that_no_run_ends_is_found_no_further_than_it_is_asked_for():
    batch_rampup = BatchRampup(train(batch_rampup_from=1, batch_rampup_tokens=10**15))
    assert (batch_rampup.count(99), batch_rampup.tokens(100)) == (1, 2100)


def test_without_a_ramp_every_step_is_full():
    batch_rampup = BatchRampup(train())
    assert [batch_rampup.count(step) for step in (0, 1, 1 << 31)] == [9, 9, 9]
    assert batch_rampup.before(1 << 31) == 9 << 31


# Micro-batches have 16 tokens: steps of 1, 1, 2, 3, 4, 5, 5 and so on.
RAMP = ("--train.gradient_accumulation_steps", "5", "--train.batch_rampup_from", "1", "--train.batch_rampup_tokens", "190")


def test_a_run_sees_every_sample_once_and_the_loss_is_a_mean(fake, command, tmp_path):
    assert main(command("run", *RAMP)) == 0
    micros = [s for entry, s in fake.runs if entry == "forward_backward"]
    counts = [sum(s["step"] == step for s in micros) for step in range(1, 13)]
    assert counts[:6] == [1, 1, 1, 2, 2, 3] and counts[-1] == 5 and counts == sorted(counts)
    assert [s["sample"] for s in micros] == [2 * i for i in range(len(micros))]
    assert [s["inv_targets"] for s in micros] == [1 / (16 * counts[s["step"] - 1]) for s in micros]
    rows = [row for row in metrics.read(tmp_path / "run/metrics.jsonl") if row["kind"] == "train"]
    assert [row["tokens"] for row in rows] == [16 * sum(counts[: i + 1]) for i in range(12)]
    meta = checkpoint.read_meta(checkpoint.find(tmp_path / "run")[0])
    assert (meta["samples"], meta["tokens"]) == (2 * sum(counts), 16 * sum(counts))


@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_resumed_run_ends_with_the_same_bits(fake, command, tmp_path, at):
    whole_and_resumed(fake, command, tmp_path, *RAMP, entry="optimizer_step", at=at)
    tokens = [
        [row.get("tokens") for row in metrics.read(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"]
        for name in ("whole", "run")
    ]
    assert tokens[0] == tokens[1]


def test_what_cannot_be_a_ramp_is_refused(refused):
    run = ("train", "shakespeare-char", "--data", "x")
    assert "train.batch_rampup_from is 2 and train.batch_rampup_tokens 0, expected both" in refused(
        *run, "--train.batch_rampup_from", "2"
    )
    rising = ("--train.batch_rampup_tokens", "9", "--train.batch_rampup_from")
    assert "train.batch_rampup_from 2 is above train.gradient_accumulation_steps 1" in refused(*run, *rising, "2")
    assert "expected train.minutes 0" in refused(*run, *rising, "1", "--minutes", "1")
    assert "train.batch_rampup_from is 1, and the runs of speedrun" in refused("train", "speedrun-small", *rising, "1")
