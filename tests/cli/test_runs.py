"""barellm runs: a line for each run, and which is the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from barellm import models
from barellm.cli.main import main
from barellm.config import overrides


def folder_of_a_run(path: Path, *, nats: float, bits: float | None) -> None:
    path.mkdir(parents=True)
    config = overrides.changed(models.preset("default"), {"model.layers": 2})
    (path / "config.json").write_text(json.dumps(overrides.to_json(config)))
    rows = [
        {"kind": "train", "step": 1, "loss": 5.0, "tokens_per_s": 10.0, "seconds": 1.0},
        {"kind": "eval", "step": 1, "val_nats": nats, "val_bits_per_byte": bits},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("bits, best", [(3.6, "words"), (None, "bytes")])
def test_runs_of_different_tokenizers_are_compared_by_bits_per_byte(bits, best, tmp_path, monkeypatch, capsys):
    """Nats per token of bytes are few, and say nothing beside those of words."""
    folder_of_a_run(tmp_path / "runs" / "bytes", nats=2.5, bits=bits)
    folder_of_a_run(tmp_path / "runs" / "words", nats=4.7, bits=2.9)
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--sort", "loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"*{best}" in lines[1] and sum("*" in line for line in lines[:-1]) == 1
    assert "default: layers 2" in lines[2]
