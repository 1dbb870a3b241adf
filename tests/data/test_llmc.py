"""llm.c's order, beside numbers that its rule gave in C: a program with its generator, whose first numbers are those that llm.c's
rand.h lists, shuffled three shards of 50, 31 and 97 tokens for micro-batches of six tokens, over three epochs."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data.llmc import LlmcOrder
from barellm.data.shards import TokenStream, write_shard
from barellm.errors import UserError
from barellm.training import metrics

LENGTHS = (50, 31, 97)
FIRST = [(2, 54), (2, 36), (2, 6), (2, 18), (2, 90), (2, 42), (2, 30), (2, 48), (2, 12), (2, 60), (2, 0), (2, 78), (2, 66), (2, 84)]
FIRST += [(2, 24), (2, 72), (1, 24), (1, 12), (1, 6), (1, 18), (1, 0), (0, 36), (0, 18), (0, 12), (0, 6), (0, 42), (0, 30), (0, 0)]
SECOND = [(0, 24), (2, 90), (2, 60), (2, 78), (2, 36), (2, 48), (2, 12)]
THIRD = [(1, 6), (1, 24), (1, 12), (1, 0), (1, 18), (2, 30), (2, 48), (2, 12), (2, 0), (2, 66)]


def order(batch: int = 2, seq: int = 3) -> LlmcOrder:
    """Token i of shard k is 100 k + i."""
    parts = [np.arange(length, dtype=np.uint16) + 100 * k for k, length in enumerate(LENGTHS)]
    return LlmcOrder(TokenStream(parts, name="training shards of x"), batch=batch, seq=seq)


def test_shards_and_samples_come_as_llmc_shuffles_them():
    found = order()
    assert [found.start(i) for i in range(35)] == FIRST + SECOND
    assert [found.start(i) for i in range(58, 68)] == THIRD


def test_a_run_that_goes_on_anywhere_sees_the_same():
    whole = order()
    wanted = [whole.start(i) for i in range(90)]
    for begin in (0, 1, 16, 20, 29, 58, 74, 89):  # a fresh loader each time: nothing is remembered
        assert order().start(begin) == wanted[begin]
        assert whole.start(begin) == wanted[begin]  # and back


def test_rows_follow_each_other_in_a_micro_batch():
    inputs, targets = order().batch(4, 2, seq=3, document=0)  # the third micro-batch
    assert inputs.tolist() == [[206, 207, 208], [209, 210, 211]] and (targets == inputs + 1).all()
    assert inputs.dtype == targets.dtype == np.int32


def test_what_llmc_refuses_is_refused():
    order(batch=1, seq=30)
    with pytest.raises(UserError, match=r"has a shard of 31 tokens, .* train.micro_batch_size x train.seq \+ 1 = 32 in each"):
        order(batch=1, seq=31)
    with pytest.raises(UserError, match="shuffles micro-batches of 2 x 3 tokens, asked for 2 x 4"):
        order().batch(0, 2, seq=4, document=0)


def test_a_run_resumed_in_llmcs_order_ends_as_one_that_went_through(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    r = np.random.default_rng(0)
    for name, count in (("val_000000", 300), ("train_000001", 90), ("train_000002", 140)):
        write_shard(shards / f"x_{name}.bin", [r.integers(0, 256, count)], magic=20240520)
    sizes = ["--model.layers", "1", "--model.d_model", "16", "--model.heads", "2", "--batch", "2", "--seq", "8"]
    more = ["--data", str(shards), "--data.tokenizer", "bytes", "--data.order", "llmc", "--device", "reference"]

    def losses(folder) -> list[float]:
        return [row["loss"] for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "train"]

    for name, steps in (("whole", 17), ("cut", 9)):  # an epoch has 5 + 8 micro-batches
        words = ["--steps", str(steps), "--optim.schedule", "constant", "--train.eval_tokens", "64"]
        assert main(["train", "shakespeare-char", *sizes, *more, *words, "--out", str(tmp_path / name)]) == 0
    assert main(["train", "--out", str(tmp_path / "cut"), "--resume", "--steps", "17", "--device", "reference"]) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and len(losses(tmp_path / "cut")) == 17
