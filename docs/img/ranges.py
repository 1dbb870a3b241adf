"""The picture of docs/exponent_stats.md: what a step of a plain run and one with unit scaling look like.

python benchmarks/unit_scaling.py --data tinyshakespeare.txt --steps 2000 --out benchmarks/results/unit-scaling.json \
    --folder benchmarks/results/unit-scaling
python docs/img/ranges.py
"""

from __future__ import annotations

from pathlib import Path

from barellm.training import exponent_stats, exponent_stats_chart
from barellm.training.curve import save

ROOT = Path(__file__).parents[2]
RUNS = {"plain": "the plain model", "unit": "unit scaling"}


def main() -> None:
    rows = []
    for name, words in RUNS.items():
        last = exponent_stats.steps(ROOT / "benchmarks" / "results" / "unit-scaling" / f"{name}.jsonl")[-1]
        rows.append({**last, "step": f"{last['step']}, {words}"})
    save(exponent_stats_chart.picture(rows, title="shakespeare-char"), ROOT / "docs" / "img" / "ranges.svg")


if __name__ == "__main__":
    main()
