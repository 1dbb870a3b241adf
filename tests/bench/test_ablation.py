"""The statistics of benchmarks/ablation.py."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ablation(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import ablation

    yield ablation
    sys.modules.pop("ablation", None)


def test_p_values_are_those_of_welch(ablation):
    """Against scipy.stats.ttest_ind(equal_var=False)."""
    assert ablation.p_value([1, 2, 3.5], [2, 2.5, 4]) == pytest.approx(0.5198053648, rel=1e-5)
    assert ablation.p_value([4.667, 4.674, 4.682], [4.463, 4.398, 4.443]) == pytest.approx(0.0046212947, rel=1e-5)
    assert ablation.p_value([1.0, 1.0], [1.0, 1.0]) == 1.0


def test_what_is_lost_at_equal_steps_and_at_equal_seconds(ablation):
    rows = [
        {"part": part, "steps": 10, "seed": s, "loss": loss + s}
        for part, loss in (("the whole", 4.0), ("lanes", 4.5))
        for s in (1, 2)
    ]
    rows += [{"part": "lanes", "steps": 5, "seed": s, "loss": 5.0 + s} for s in (1, 2)]
    (row,) = ablation.summary(rows, {"the whole": [1.0, 1.0, 3.0], "lanes": [2.0, 2.0, 1.0]}, 10)
    assert (row["part"], row["time"], row["steps"], row["seconds"]) == ("lanes", 2.0, 0.5, 1.0)
