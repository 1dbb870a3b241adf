"""A model that steps in about a millisecond, a machine of round numbers, and the script that makes the README's tables."""

import importlib
from pathlib import Path

import pytest

from barellm.config import Config, preset
from barellm.overrides import changed
from barellm.profiling.roofline import Ceiling
from barellm.training.machine import resolved

SMALL = {"model.layers": 2, "model.heads": 2, "model.channels": 32, "train.batch": 2, "train.seq": 16}

CEILING = Ceiling({"fp32": 2e11, "bf16": 4e11}, {"copy": 5e10, "update": 6e10, "read": 4e10})


def small(**keys) -> Config:
    return resolved(
        changed(preset("shakespeare-char"), SMALL | {k.replace("__", "."): v for k, v in keys.items()}), "cpu"
    )


@pytest.fixture
def table(monkeypatch):
    """benchmarks/table.py."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("table")
