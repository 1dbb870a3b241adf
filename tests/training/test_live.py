"""`barellm train --live`: a run that is looked at while it trains."""

from __future__ import annotations

import re
import threading

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from barellm.cli.main import main  # noqa: E402
from barellm.training.loop import Loop  # noqa: E402


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_it_answers_while_it_trains_and_no_other_name_is_served(fake, command, capsys, monkeypatch, more):
    seen = []
    real = Loop.record

    def record(loop: Loop, row: dict) -> None:
        real(loop, row)
        if row["kind"] == "train" and row["step"] == 2:
            said = capsys.readouterr()
            address = re.search(r"live +(http://127\.0\.0\.1:\d+/)#runs=run\n", said.err if more else said.out)[1]
            found = httpx.get(f"{address}live/runs").json()["runs"]
            rows = httpx.get(f"{address}live/metrics", params={"run": "run"}).text.splitlines()
            other = httpx.get(f"{address}live/runs", headers={"Host": "evil.example"}).status_code
            seen.append((found[0]["name"], found[0]["step"], len(rows), other, address))

    monkeypatch.setattr(Loop, "record", record)
    assert main(command("run", "--live", *more)) == 0
    ((name, step, rows, other, address),) = seen
    assert (name, step, rows, other) == ("run", 2, 3, 400)  # an evaluation, two steps
    assert not [thread for thread in threading.enumerate() if thread.name == "live"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


def test_without_it_no_server_is_imported(fake, command, monkeypatch):
    monkeypatch.setattr("barellm.serving.live.serving", None)
    assert main(command("run")) == 0
