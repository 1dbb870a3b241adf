"""A run on llm.c's shards: several files, accumulation, and a machine that does not have GPT-2's vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.data import gpt2
from barellm.data.shards import write_shard
from barellm.errors import UserError
from barellm.training import metrics


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    r = np.random.default_rng(0)
    for name, count in (("val_000000", 300), ("train_000001", 500), ("train_000002", 17)):
        write_shard(folder / f"fineweb_{name}.bin", [r.integers(0, 50257, count)], magic=20240520)
    return folder


def test_without_the_vocabulary_a_run_ends_with_its_result_and_no_samples(fake, shards, tmp_path, monkeypatch, capsys):
    """It failed where the first sample was due: in the middle, or after the last step, before the result."""

    def offline(folder):
        raise UserError("no network")

    monkeypatch.delenv("BARELLM_GPT2_VOCAB", raising=False)
    monkeypatch.setattr(gpt2, "_download", offline)
    out = tmp_path / "run"
    sizes = ["--batch", "2", "--seq", "8", "--steps", "4", "--train.gradient_accumulation_steps", "3"]
    looks = ["--train.sample_every", "2", "--train.eval_every", "2", "--train.eval_tokens", "64"]
    status = main(["train", "gpt2-124m", "--data", str(shards), "--out", str(out), *sizes, *looks])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert said.out.count("no samples") == 1 and "gzip" not in said.out
    result = metrics.read(out / "metrics.jsonl")[-1]
    assert result["kind"] == "result" and result["steps"] == 4 and result["val_bits_per_byte"] is None
    assert checkpoint.step_of(checkpoint.find(out)[0]) == 4
    assert [row["step"] for row in metrics.read(out / "metrics.jsonl") if row["kind"] == "eval"] == [0, 2, 4]
