"""The benchmark of a whole run: its parts add up to the command's wall time."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
def test_the_parts_add_up_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import table
    import whole_run

    text, out = tmp_path / "text.txt", tmp_path / "run.json"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    small = ["--steps", "6", "--batch", "2", "--seq", "8", "--model.layers", "1", "--train.eval_every", "2"]
    monkeypatch.setattr(sys, "argv", ["whole_run.py", "--data", str(text), "--out", str(out), *small])
    assert whole_run.main() == 0
    found = json.loads(out.read_text())
    cold, warm = found["runs"]
    for run in (cold, warm):
        assert sum(run[key] for key in table.PARTS) == pytest.approx(run["wall_s"], abs=0.02)
        assert run["steps"] == 6 and min(run[key] for key in table.PARTS) >= 0
    assert cold["val_nats"] == warm["val_nats"] and (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert cold["to_first_step_s"] > warm["to_first_step_s"]
    lines = table.facts({"run.json": found})
    assert len(lines) == 2 and f"{cold['wall_s']:.1f} s for 6 steps" in lines[0]
