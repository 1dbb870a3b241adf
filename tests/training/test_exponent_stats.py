"""Runs with --train.exponent_stats: bitwise the same training, rows of the right steps, and one file of a run that was resumed."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.training import exponent_stats, metrics

SIZES = (
    *("--model.layers", "1", "--model.heads", "2", "--model.d_model", "16", "--model.max_seq", "16", "--seq", "8"),
    *("--batch", "2", "--train.gradient_accumulation_steps", "2", "--train.eval_every", "0", "--train.eval_tokens", "64"),
    *("--model.dropout", "0.1", "--model.bias", "true"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def train(text, tmp_path):
    def run(name: str, *more: str) -> list[tuple]:
        """The losses and norms of a run."""
        start = ["train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / name), *SIZES, *more]
        assert main(start) == 0
        rows = metrics.read(tmp_path / name / "metrics.jsonl")
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "train"]

    return run


@pytest.mark.extended
def test_a_run_is_the_same_to_the_bit_and_resumed_has_each_step_once(train, tmp_path, monkeypatch):
    totals = {}
    real = exponent_stats.ExponentStats.record

    def record(self, step):
        """What the rows say of gradients must be of the whole step: of both micro-batches."""
        real(self, step)
        totals[step] = float(np.abs(self.session.read("wte.grad")).max())

    monkeypatch.setattr(exponent_stats.ExponentStats, "record", record)
    plain = train("plain", "--steps", "9")
    assert train("watched", "--steps", "9", "--train.exponent_stats", "4", "--train.checkpoint_every", "5") == plain
    rows = exponent_stats.steps(tmp_path / "watched")
    assert [row["step"] for row in rows] == [1, 4, 8]
    check_row(rows[-1])
    for row in rows:
        (largest,) = [t["max"] for t in row["tensors"] if (t["name"], t["what"]) == ("wte", "weight gradient")]
        assert largest == pytest.approx(totals[row["step"]], rel=1e-5)
    # As if it had been killed behind the checkpoint of step 5, in the middle of a line.
    file = tmp_path / "watched" / exponent_stats.FILE
    whole = file.read_bytes()
    for path in (tmp_path / "watched" / "checkpoints").glob("step-000009"):
        path.rename(tmp_path / "gone")
    file.write_bytes(whole[:-40])
    again = ["train", "--out", str(tmp_path / "watched"), "--resume"]
    assert main(again) == 0
    assert file.read_bytes() == whole
    # It may be looked at more often, or no longer.
    assert main([*again, "--steps", "12", "--train.exponent_stats", "0"]) == 0
    assert file.read_bytes() == whole


def check_row(row: dict) -> None:
    """A row gives back what was counted."""
    kinds = {}
    for t in row["tensors"]:
        m = exponent_stats.tensor_stats_of(t)
        assert m.size == t["size"] and m.rms == pytest.approx(t["rms"]) and m.largest == t["max"]
        above = t["first"] + len(t["counts"])
        assert not t["counts"] or 2.0 ** (above - 1) <= m.largest < 2.0**above
        kinds.setdefault(t["what"], []).append(t["name"])
    assert list(kinds) == ["activation", "gradient", "weight", "weight gradient"]
    assert kinds["activation"] == [
        "embedding", "dropout", "h.0.ln_1", "h.0.attn.c_attn", "h.0.attention", "h.0.attn.c_proj", "h.0.dropout",
        "h.0.add", "h.0.ln_2", "h.0.mlp.c_fc", "h.0.gelu", "h.0.mlp.c_proj", "h.0.dropout.2", "h.0.add.2", "ln_f",
    ]  # fmt: skip
    assert kinds["weight"] == kinds["weight gradient"]


def test_the_table_shows_how_sparse_relu2_makes_activations_and_gradients(train, tmp_path, capsys):
    """The gradient of the matmul before it is zero exactly where the activation is: its slope is."""
    train("sparse", "--steps", "1", "--train.exponent_stats", "1", "--model.activation", "relu2")
    (row,) = exponent_stats.steps(tmp_path / "sparse")
    zeros = {(t["name"], t["what"]): t["zeros"] / t["size"] for t in row["tensors"]}
    share = zeros["h.0.relu2", "activation"]
    assert 0.3 < share < 0.7 and zeros["h.0.mlp.c_fc", "gradient"] == share and zeros["h.0.mlp.c_fc", "activation"] == 0
    capsys.readouterr()
    assert main(["plot", str(tmp_path / "sparse"), "--exponent-stats"]) == 0
    table = capsys.readouterr().out
    assert "   max  zeros   e4m3   e5m2" in table and f"{share:6.1%}" in next(x for x in table.splitlines() if "h.0.relu2" in x)
