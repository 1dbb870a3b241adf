"""The page of runs behind a server, and as a file: what it may read, what a damaged run does to it, what it costs."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("httpx")
applications = pytest.importorskip("starlette.applications")
testclient = pytest.importorskip("starlette.testclient")

from barellm.cli.main import main  # noqa: E402
from barellm.errors import UserError  # noqa: E402
from barellm.serving import live  # noqa: E402
from tests.cli.conftest import TINY  # noqa: E402

TRAIN = {"kind": "train", "step": 1, "loss": 5.5, "lr": 0.1, "grad_norm": 1.0, "tokens": 16, "tokens_per_s": 10.0, "seconds": 0.5}


def make_run(folder: Path, *rows: object, config: object = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(config or {"preset": "default", "train": {"steps": 10, "minutes": 0.0}}))
    return folder


@pytest.fixture
def runs(tmp_path) -> Path:
    make_run(tmp_path / "runs" / "first", TRAIN, {"kind": "eval", "step": 1, "val_nats": 5.25})
    return tmp_path / "runs"


@pytest.fixture
def client(runs):
    return testclient.TestClient(applications.Starlette(routes=live.routes(runs)), raise_server_exceptions=True)


def metrics(client, run: str = "first", **query: object) -> tuple[list[str], dict[str, str]]:
    response = client.get("/live/metrics", params={"run": run, **query})
    assert response.status_code == 200
    return response.text.splitlines(), response.headers


def test_the_list_has_the_last_numbers_of_each_run_the_newest_first(client, runs):
    make_run(runs / "second", TRAIN, {**TRAIN, "step": 2, "loss": 4.0}, {"kind": "result", "step": 2})
    os.utime(runs / "first" / "metrics.jsonl", (1, 1))
    (runs / "nothing").mkdir()
    (runs / "a file").write_text("")
    second, first = client.get("/live/runs").json()["runs"]
    assert (second["name"], second["step"], second["loss"], second["finished"], second["steps"]) == ("second", 2, 4.0, True, 10)
    assert (first["name"], first["val_nats"], first["finished"], first["preset"]) == ("first", 5.25, False, "default")
    assert second["age"] < 60 < first["age"]


def test_rows_come_from_a_byte_on_and_each_whole_line_once(client, runs):
    file = runs / "first" / "metrics.jsonl"
    rows, about = metrics(client)
    assert [json.loads(row)["kind"] for row in rows] == ["train", "eval"] and about["X-More"] == "0"
    with file.open("a") as more:
        more.write('{"kind": "train", ')
    how = {"since": about["X-Next"], "file": about["X-File"]}
    half, after = metrics(client, **how)
    assert (half, after["X-Next"], after["X-More"]) == ([], about["X-Next"], "0")
    with file.open("a") as more:
        more.write('"step": 2}\n')
    rest, after = metrics(client, **how)
    assert [json.loads(row)["step"] for row in rest] == [2] and after["X-Next"] == str(file.stat().st_size)


def test_a_run_that_was_resumed_begins_again(client, runs):
    """Its file is another one, or shorter than what the reader has seen."""
    _, about = metrics(client)
    file = runs / "first" / "metrics.jsonl"
    other = runs / "first" / "new"
    other.write_text(json.dumps(TRAIN) + "\n" + json.dumps({**TRAIN, "step": 2}) + "\n" * 500)
    os.replace(other, file)
    rows, after = metrics(client, since=about["X-Next"], file=about["X-File"])
    assert (len([row for row in rows if row]), after["X-Start"]) == (2, "0") and after["X-File"] != about["X-File"]
    file.write_text(json.dumps(TRAIN) + "\n")
    rows, again = metrics(client, since=after["X-Next"], file=after["X-File"])
    assert (len(rows), again["X-Start"]) == (1, "0")


def test_long_files_come_in_pieces_and_a_line_longer_than_a_piece_is_left_out(client, runs, monkeypatch):
    monkeypatch.setattr(live, "PIECE", 4096)
    file = runs / "first" / "metrics.jsonl"
    with file.open("a") as more:
        more.write("x" * 10_000 + "\n")
        for step in range(2, 200):
            more.write(json.dumps({**TRAIN, "step": step}) + "\n")
    start, expected, found = "0", "", []
    for _ in range(100):
        rows, about = metrics(client, since=start, file=expected)
        found += rows
        start, expected = about["X-Next"], about["X-File"]
        if about["X-More"] == "0":
            break
    whole = [json.loads(row) for row in found if row.startswith('{"kind"')]
    assert [row["step"] for row in whole if row["kind"] == "train"] == [1, *range(2, 200)]
    assert start == str(file.stat().st_size) and max(map(len, found)) < 4096


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../runs/first", "first/../first", "/etc", "first\0", "first/", "%2e%2e", "no", "\udc80", "x" * 5000]
)
def test_a_name_never_leaves_the_folder(client, runs, name):
    make_run(runs.parent / "secret", TRAIN)
    (runs.parent / "metrics.jsonl").write_text("secret")
    with pytest.raises(OSError):
        live.open_file(runs, name, "metrics.jsonl")
    for path in ("/live/metrics", "/live/config"):
        response = client.get(path, params={"run": name.encode("utf-8", "replace").decode()})
        assert response.status_code == 404 and "secret" not in response.text and str(runs) not in response.text


def test_links_pipes_and_folders_are_no_runs(client, runs, tmp_path):
    outside = make_run(tmp_path / "outside", TRAIN)
    (runs / "linked").symlink_to(outside)
    (runs / "inner").mkdir()
    (runs / "inner" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (runs / "pipe").mkdir()
    os.mkfifo(runs / "pipe" / "metrics.jsonl")
    (runs / "deep" / "metrics.jsonl").mkdir(parents=True)
    assert [row["name"] for row in client.get("/live/runs").json()["runs"]] == ["first"]
    for name in ("linked", "inner", "pipe", "deep"):
        assert client.get("/live/metrics", params={"run": name}).status_code == 404


DAMAGED = [
    '{"kind": "train", "step": 1, "loss": NaN, "lr": Infinity}', '{"kind": "train", "step": 1e400, "loss": ' + "9" * 400 + "}",
    '{"kind": ["train"]}', '{"kind": "eval", "val_nats": "\\ud800"}', "[" * 100_000, "\0\0", '{"kind": "train"', '"train"', "",
    '{"kind": "train", "step": {"a": 1}, "loss": []}',
]  # fmt: skip


@pytest.mark.parametrize("row", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_rows_and_configurations_do_not_hurt(client, runs, row):
    folder = make_run(runs / "damaged", row)
    for config in ("", "[1]", "[" * 100_000, '{"preset": 3, "train": 4}', '{"train": {"steps": "many", "minutes": NaN}}', "\xff"):
        (folder / "config.json").write_bytes(config.encode("latin-1"))
        live._last.cache_clear()
        found = {one["name"]: one for one in client.get("/live/runs").json()["runs"]}
        assert found["damaged"]["preset"] == "" and {found["damaged"][key] for key in ("steps", "minutes")} == {None}
        assert client.get("/live/config", params={"run": "damaged"}).status_code == 200
    assert metrics(client, "damaged")[0] == [row]


@pytest.mark.parametrize("since", ["-1", "x", "1e9", "9" * 300, "²", "99999999"])
def test_a_byte_that_is_none_begins_at_the_first(client, since):
    _, about = metrics(client)
    rows, again = metrics(client, since=since, file=about["X-File"])
    assert (len(rows), again["X-Start"]) == (2, "0")


def test_a_huge_file_costs_its_last_bytes_and_one_read(client, runs, monkeypatch):
    file = runs / "first" / "metrics.jsonl"
    with file.open("r+b") as hole:
        hole.truncate(1 << 40)
    with file.open("ab") as more:
        more.write(b"\n" + json.dumps({**TRAIN, "step": 7}).encode() + b"\n")
    reads = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: reads.append(size) or real(fd, size, at))
    for _ in range(3):
        assert client.get("/live/runs").json()["runs"][0]["step"] == 7
    assert reads == [live.TAIL]


def test_a_folder_that_is_not_there_has_no_runs(tmp_path):
    client = testclient.TestClient(applications.Starlette(routes=live.routes(tmp_path / "later")))
    assert client.get("/live/runs").json() == {"runs": []}


def test_the_page_fetches_nothing_from_elsewhere_and_runs_its_own_script_alone(client):
    response = client.get("/")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']+)""", response.text)
    assert {link for link in links if not link.startswith(("#", "data:"))} == set()
    assert "innerHTML" not in response.text and "insertAdjacent" not in response.text and "eval(" not in response.text
    assert response.text.count("<script>") == response.text.count("<style>") == 1


def test_the_page_is_as_small_as_it_shall_be():
    lines = (Path(live.__file__).with_name("page.html")).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 700 and max(map(len, lines)) <= 120


def test_a_file_holds_its_runs_and_no_text_of_theirs_ends_the_element(runs, tmp_path, capsys):
    evil = "</script><script>alert(1)</script><!-- \u2028 & é"
    make_run(
        runs / "</script>"[2:-1], {"kind": "sample", "step": 1, "text": evil}, {**TRAIN, "loss": None}, config={"preset": evil}
    )
    out = tmp_path / "page.html"
    assert main(["plot", str(runs / "first"), str(runs / "script"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"page {out}\n"
    text = out.read_text()
    assert text.count("</script>") == 2 and "connect-src 'none'" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert [run["name"] for run in data["runs"]] == [str(runs / "first"), str(runs / "script")]
    assert data["runs"][0]["rows"][0] == TRAIN and data["runs"][1]["rows"][0]["text"] == evil


def test_a_long_run_in_a_file_has_each_nth_step_and_the_last_one():
    rows = [{**TRAIN, "step": step} for step in range(1, 70_001)] + [{"kind": "eval", "step": 70_000, "val_nats": float("nan")}]
    found = live.archived("long", rows, Path("nowhere"))["rows"]
    steps = [row["step"] for row in found if row["kind"] == "train"]
    assert steps == list(range(4, 70_001, 4)) and found[-1]["val_nats"] is None


@pytest.mark.parametrize("option", ["x", "y", "log"])
def test_a_page_takes_no_options_of_pictures(runs, refused, option):
    value = {"x": "tokens", "y": "lr", "log": "y"}[option]
    line = refused("plot", runs / "first", "--out", runs / "page.html", f"--{option}", value)
    assert line == f"--{option} is for curves, and in a page they are chosen there: leave one of them out"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    return path


def test_a_port_that_is_taken_is_refused_before_the_run(own_cache, text, tmp_path, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        out = tmp_path / "run"
        line = refused("train", "shakespeare-char", "--data", text, "--out", out, *TINY, "--live", port)
        assert line == f"--live is {port}, which is no port that is free: leave the number out, and one is chosen"
        assert not out.exists()
    assert refused("train", "--live", 70000, "--out", out).startswith("--live is 70000")
    assert "--find-lr" in refused("train", "--find-lr", "--live")


def test_clients_that_are_broken_print_nothing_and_take_nothing_from_others(runs, capfd, caplog):
    from urllib.request import urlopen

    with live.serving(runs / "first", 0) as address:
        port = int(re.search(r":(\d+)/", address)[1])
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        for i, client in enumerate(slow):
            client.sendall(
                [b"GET / HT", b"\0\xff\r\n\r\n", b"GET /live/metrics?run=%ff HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\n", b""][i]
            )
        assert len(json.load(urlopen(f"{address.partition('#')[0]}live/runs"))["runs"]) == 1
    for client in slow:
        client.close()
    assert capfd.readouterr() == ("", "") and caplog.records == []  # which without pytest is printed


def test_without_a_number_another_port_is_taken(runs, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(live, "PORT", taken.getsockname()[1])
        with live.serving(runs / "first", -1) as address:
            assert f":{live.PORT}/" not in address


def test_without_starlette_one_line_says_what_to_install(runs, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "starlette.exceptions", None)
    with pytest.raises(UserError, match=r"starlette and uvicorn: pip install \"barellm\[serve\]\""):
        live.routes(runs)


def test_a_signal_goes_to_the_main_thread(runs):
    """Python runs handlers there, and a thread that takes the signal would not wake it."""
    with live.serving(runs / "first", 0):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "live"]
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(re.search(r"SigBlk:\s+(\w+)", status)[1], 16)
        assert blocked >> 1 & 1 and blocked >> 14 & 1  # SIGINT, SIGTERM


def test_a_look_costs_little_of_the_processors_that_train(runs):
    import time
    from urllib.request import urlopen

    def used() -> float:
        threads = [thread for thread in threading.enumerate() if thread.name == "live" or "AnyIO" in thread.name]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)

    rows = "".join(json.dumps({**TRAIN, "step": step}) + "\n" for step in range(2, 5000))
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write(rows)
    with live.serving(runs / "first", 0) as address:
        base = address.partition("#")[0]
        urlopen(f"{base}live/runs").read()
        before = used()
        time.sleep(1.0)
        assert used() - before < 0.01, "while nobody looks"
        before = used()
        for _ in range(20):
            urlopen(f"{base}live/runs").read()
            urlopen(f"{base}live/metrics?run=first&since=99999999").read()
        assert (used() - before) / 20 < 0.01, "each 2 seconds"
