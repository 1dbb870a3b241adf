"""The script that makes the tables of docs/speed.md."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def table(monkeypatch):
    """benchmarks/table.py."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("table")
