"""Recipes have the values of the runs that they follow, as docs/recipes.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from barellm.models import preset

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ROWS = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.read_text().splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_the_table_is_what_a_preset_says(row):
    name, model, tokens, steps, rates, _ = row
    config = preset(name.strip("`"))
    train, optim, sizes = config.train, config.optim, config.model
    shape, _, dropout = model.partition("; dropout ")
    assert [sizes.layers, sizes.heads, sizes.d_model, sizes.max_seq] == [int(n) for n in shape.split(",")]
    assert sizes.dropout == float(dropout or 0) and train.seq == sizes.max_seq
    assert train.micro_batch_size * train.gradient_accumulation_steps * train.seq == int(tokens.replace(",", ""))
    assert train.steps == int(steps.replace(",", ""))
    lr, last, warmup = (float(n) for n in rates.split(","))
    assert (optim.lr, optim.warmup, optim.schedule, optim.clip) == (lr, warmup, "cosine", 1.0)
    assert optim.min_lr == pytest.approx(last) and optim.weight_decay == 0.1


def test_gpt3_has_the_limits_and_checkpoints_of_its_script():
    config = preset("gpt3-125m")
    assert (config.optim.skip_loss_z, config.optim.skip_norm_z) == (7.0, 7.0)
    train = config.train
    assert (train.checkpoint_every, train.save_total_limit, train.keep_every, train.eval_every) == (10000, 5, 50000, 250)
    assert preset("build-nanogpt").train.keep_every == preset("llmc-124m").train.keep_every == 5000
    assert not preset("gpt2-124m").optim.skips and not preset("gpt2-124m").train.keep_every


def test_the_page_says_what_is_done_with_the_rates():
    from barellm.training import find_lr

    text = " ".join(PAGE.read_text().split())
    for words in (f"trains {find_lr.STEPS} steps", f"from 1e-6 to {find_lr.HIGHEST:g}", f"divided by {find_lr.BELOW_LEAST:g}"):
        assert words in text
    assert re.search(rf"is {find_lr.DIVERGED:g} times that of the first step", text) and find_lr.LOWEST == 1e-6
