"""What a profile of several ranks says of their communication."""

from __future__ import annotations

import json

import pytest

from barellm.cli.profile import lines
from barellm.tools.profile import profile
from tests.distributed.threads import each_rank
from tests.profiling.conftest import CEILING, small


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Those of two ranks that are threads, and the folder in which the first has left its files."""
    monkeypatch.setenv("BARELLM_THREADS", "1")
    monkeypatch.setattr(profile, "measured_ceiling", lambda device: CEILING)
    config = small()
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    measure = profile.measure
    return each_rank(2, lambda ranks: measure(config, steps=2, folder=tmp_path / str(ranks.rank), ranks=ranks)), tmp_path


@pytest.mark.extended
def test_every_rank_sees_what_all_spend_on_each_exchange(results):
    (ours, theirs), folder = results
    rows = ours["between_ranks"]
    assert [row["s"] for row in rows] == [row["s"] for row in theirs["between_ranks"]]
    kinds = [
        ("forward_backward", "start_all_to_all"),
        ("optimizer_step", "wait_all_to_all"),
        ("optimizer_step", "sum_over_ranks"),
        ("optimizer_step", "all_gather"),
    ]
    assert list(dict.fromkeys((row["program"], row["op"]) for row in rows)) == kinds
    assert rows[-1]["count"] == 2, "of partial sums and of weights"
    for kind in kinds[:3]:
        of_kind = [row for row in rows if (row["program"], row["op"]) == kind]
        assert len({row["segment"] for row in of_kind}) == len(of_kind), "a row for each part of the model"
        total = sum(r["s"] for r in ours["ops"] if r["op"] == kind[1])
        assert sum(row["s"][0] for row in of_kind) == pytest.approx(total)
        assert all(len(row["s"]) == 2 and min(row["s"]) > 0 for row in of_kind)
    assert sorted(p.name for p in (folder / "0").iterdir()) == sorted(profile.FILES.values())
    assert not list((folder / "1").iterdir()), "one rank writes"
    assert json.loads((folder / "0" / "profile.json").read_text())["ranks"] == 2


def test_the_table_says_what_is_exposed(results):
    (ours, _), _ = results
    ours["between_ranks"] = [
        {"program": "forward_backward", "segment": "block 1", "op": "all_to_all", "count": 1, "s": [0.25, 0.75]},
        {"program": "optimizer_step", "segment": None, "op": "all_gather", "count": 1, "s": [0.5, 0.125]},
    ]
    ours["step_s"] = 3.0
    said = lines(ours)[-4:]
    assert [line.split() for line in said[:3]] == [
        ["between", "ranks", "segment", "rank", "0", "ms", "rank", "1", "ms"],
        ["forward_backward", "all_to_all", "block", "1", "250.000", "750.000"],
        ["optimizer_step", "all_gather", "behind", "all", "500.000", "125.000"],
    ]
    assert said[3] == "exposed: 375.000 ms, 12.5 % of the step; with waiting for others up to 875.000 ms"
