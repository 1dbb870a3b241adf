"""The table of benchmarks/optimizers.py."""

from __future__ import annotations


def run(recipe: str, steps: int, seed: int, loss: float, **options) -> dict:
    return {"recipe": recipe, "steps": steps, "seed": seed, "loss": loss, "options": options}


def test_the_best_rate_of_those_with_most_seeds_is_shown(table):
    runs = [
        run("adamw", 400, 1, 2.5, lr=0.1),
        run("adamw", 400, 1, 3.0, lr=0.2),
        run("adamw", 400, 2, 2.0, lr=0.2),
        run("muon", 400, 1, 1.9, name="muon", lr=0.1, muon_lr=0.03),
        run("muon", 400, 1, 1.8, name="muon", lr=0.1, muon_lr=0.05),
        run("muon", 1000, 1, 1.7, name="muon", lr=0.1, muon_lr=0.02),
    ]
    r = {"kind": "optimizers", "preset": "default", "dtype": "bf16", "runs": runs}
    *_, first, second = table.optimizers_table({"a.json": r, "b.json": {"kind": "run"}})
    adamw, muon = "2.5000 (lr 0.2, the best of 2 rates, 2 seeds)", "1.8000 (muon_lr 0.05, the best of 2 rates, 1 seed)"
    assert first == f"| default, bf16 | 400 | {adamw} | {muon} | a.json |"
    assert second == "| default, bf16 | 1000 |  | 1.7000 (muon_lr 0.02, the best of 1 rate, 1 seed) | a.json |"
    assert table.optimizers_table({"b.json": {"kind": "run"}}) == []
