"""The rates of a machine are measured once and kept; a noisy one is measured again, and the better one stays."""

from __future__ import annotations

import pytest

from barellm.runtime import rates


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """A function that gives what is to be measured, one after the other."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "_process", {})
    monkeypatch.setattr(rates, "_databases", {})
    samples: list[float] = []

    def rate(*values: float, process: bool = True, **how: bool) -> rates.Rate:
        if process:  # another one
            rates._process.clear()
            rates._databases.clear()
        samples[:] = values
        return rates.rate("cpu 2 threads", "bf16", lambda: samples.pop(0), **how)

    return rate


def test_a_rate_is_measured_once_a_machine(measure):
    assert measure(95.0, 100.0, 97.0) == rates.Rate(100.0, pytest.approx(0.05))
    assert measure().value == 100.0 and list(rates.kept_rates("cpu 2 threads")) == ["bf16"]
    assert measure(50.0, 50.0, 50.0, renew=True).value == 50.0 and measure().value == 50.0
    assert rates.kept_rates("another") == {}


def test_a_noisy_rate_is_measured_again_by_the_next_process(measure):
    assert measure(60.0, 100.0, 80.0).noisy
    assert measure(process=False).value == 100.0, "once a process"
    assert measure(90.0, 91.0, 92.0) == rates.Rate(100.0, pytest.approx(2 / 92)), "the better one stays"
    assert not measure().noisy


def test_a_damaged_entry_counts_as_none(measure, tmp_path):
    measure(1.0, 1.0, 1.0)
    path = tmp_path / "rates" / "rates-1.json"
    path.write_text(path.read_text().replace("1.0", '"fast"', 1))
    assert measure(2.0, 2.0, 2.0).value == 2.0
