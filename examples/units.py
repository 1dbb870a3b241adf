"""Conversion of units, as examples for fine-tuning, and how many of the held-back ones a model gets right.

    python examples/units.py data units.jsonl              # 6,000 different ones: {"prompt": "3.2 km in m:", "completion": " 3200"}
    python examples/units.py accuracy units.jsonl base tuned    # of the base alone, and with the adapter that `tuned` trained

docs/finetuning.md trains the adapter in minutes. The last tenth of the file is for validation, so no adapter has seen it."""

from __future__ import annotations

import json
import random
import sys
from decimal import Decimal
from pathlib import Path

import barellm

UNITS = {"mm": -3, "cm": -2, "m": 0, "km": 3}, {"mg": -3, "g": 0, "kg": 3}, {"ml": -3, "cl": -2, "l": 0}  # powers of ten
USAGE = "usage: python examples/units.py data FILE | accuracy FILE BASE [ADAPTER ...]"
COUNT, HELD_BACK = 6000, 0.1


def conversion(rng: random.Random) -> tuple[str, str]:
    """A question and its answer, exact."""
    units = rng.choice(UNITS)
    (given, power), (wanted, other) = rng.sample(list(units.items()), 2)
    number = Decimal(rng.randrange(1, 1000)).scaleb(rng.choice((0, 0, -1)))
    answer = number.scaleb(power - other)
    return f"{number:f} {given} in {wanted}:", f" {answer.normalize():f}"


def write(path: Path) -> None:
    rng, found = random.Random(1), {}
    while len(found) < COUNT:
        found.update([conversion(rng)])
    rows = list(found.items())
    rng.shuffle(rows)
    path.write_text("".join(json.dumps({"prompt": question, "completion": answer}) + "\n" for question, answer in rows))


def held_back(path: Path) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows[len(rows) - round(len(rows) * HELD_BACK) :]


def accuracy(model: barellm.Model, rows: list[dict[str, str]]) -> float:
    """The share of prompts that the model completes to the letter, each token the most likely one."""
    return sum(model.generate(row["prompt"], max_new_tokens=12, temperature=0) == row["completion"] for row in rows) / len(rows)


def main() -> None:
    match sys.argv[1:]:
        case ["data", path]:
            write(Path(path))
            return
        case ["accuracy", path, base, *adapters]:
            if not Path(path).is_file():
                sys.exit(f"{path} is no file, expected the one that `data` wrote: {USAGE}")
        case ["-h" | "--help"]:
            print(USAGE)
            return
        case _:
            sys.exit(USAGE)
    model = barellm.load(base, adapters={name: name for name in adapters})
    rows = held_back(Path(path))
    for name in (None, *adapters):
        model.use(name)
        print(f"{name or base}: {accuracy(model, rows):.1%} of {len(rows)} conversions right")


if __name__ == "__main__":
    main()
