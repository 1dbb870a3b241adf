"""Sets of the hub, from a server in a thread that speaks its protocol, and that breaks, cuts and changes what it sends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import pytest

from barellm.cli.main import main
from barellm.data import named
from barellm.data.shards import open_shard

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("huggingface_hub")

pytestmark = pytest.mark.oracle
REVISION = "0123456789abcdef0123456789abcdef01234567"
REPO = "HuggingFaceFW/fineweb"


def packed(texts: list[str]) -> bytes:
    out = BytesIO()
    parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), out, row_group_size=7)
    return out.getvalue()


class Hub:
    """Files of one repository. `harm(path, count, body)`: what is sent the count-th time that a file is asked for; where that is
    shorter than what was promised, the connection then breaks."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.harm, self.requested = files, lambda path, count, body: body, Counter()
        self.listed = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
        self.ranges: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.file(send=False)

            def do_GET(self):
                if tree := re.match(f"/api/(?:datasets|models)/{REPO}/tree/(?:main|{REVISION})/?([^?]*)", self.path):
                    folder = tree[1].replace("%2F", "/")
                    self.json([hub.entry(path) for path in hub.files if path.startswith(folder)])
                elif self.path.startswith(f"/api/models/{REPO}"):
                    files = [{"rfilename": path} for path in hub.files]
                    self.json({"id": REPO, "sha": REVISION, "private": False, "tags": [], "downloads": 0, "siblings": files})
                elif self.path.startswith(f"/api/datasets/{REPO}"):
                    self.json({"id": REPO, "sha": REVISION, "private": False, "tags": [], "downloads": 0, "likes": 0})
                else:
                    self.file(send=True)

            def json(self, content):
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def file(self, *, send: bool):
                path = re.split(f"/resolve/(?:main|{REVISION})/", self.path)[-1].partition("?")[0].replace("%2F", "/")
                if path not in hub.files:
                    return self.send_error(404)
                body, first = hub.files[path], 0
                if send and (requested := self.headers.get("Range")):
                    first = int(requested.removeprefix("bytes=").partition("-")[0])
                    hub.ranges.append(requested)
                if send:
                    hub.requested[path] += 1
                self.send_response(206 if first else 200)
                self.send_header("ETag", f'"{hub.listed[path]}"')
                self.send_header("X-Repo-Commit", REVISION)
                self.send_header("X-Linked-Size", str(len(body)))
                self.send_header("X-Linked-ETag", f'"{hub.listed[path]}"')
                self.send_header("Accept-Ranges", "bytes")
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
                self.send_header("Content-Length", str(len(body) - first))
                if send:  # told: a client that does not know may ask on a connection that is about to close
                    self.send_header("Connection", "close")
                self.end_headers()
                if send:
                    self.wfile.write(hub.harm(path, hub.requested[path], body)[first:])

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def entry(self, path: str) -> dict:
        lfs = {"oid": self.listed[path], "size": len(self.files[path]), "pointerSize": 134}
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": "0" * 40, "lfs": lfs}


@pytest.fixture
def hub(monkeypatch, own_cache):
    texts = [[f"file {k}, story {i}: " + "words of it " * (i % 9) for i in range(30)] for k in range(4)]
    files = {f"sample/10BT/{k:03}_00000.parquet": packed(texts[k]) for k in range(4)}
    found = Hub(files | {"sample/10BT/README.md": b"no data"})
    found.texts = [text for part in texts for text in part]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{found.server.server_port}")
    monkeypatch.setattr("time.sleep", lambda s: None)  # the library's, between its tries
    source = named.HubSet(REPO, "sample/10BT/", val_tokens=500)
    monkeypatch.setattr(named, "hub_sets", lambda: {"fineweb:10BT": source})
    yield found
    found.server.shutdown()
    found.server.server_close()


OPTIONS = ["--tokenizer", "bytes", "--shard-tokens", "2000"]


def prepared(out) -> int:
    return main(["prepare", "fineweb:10BT", "--out", str(out), *OPTIONS])


def read(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_the_tokens_of_a_set_are_those_of_its_documents_in_order(hub, tmp_path):
    assert prepared(tmp_path / "out") == 0
    shards = sorted((tmp_path / "out").glob("*_val_*.bin")) + sorted((tmp_path / "out").glob("*_train_*.bin"))
    assert b"".join(open_shard(path).astype("u1").tobytes() for path in shards) == "".join(hub.texts).encode()
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    assert manifest["tokens"]["val"] == 500 and manifest["documents"] == 120
    path = "sample/10BT/000_00000.parquet"
    first = {"path": f"{REPO}@{REVISION}/{path}", "bytes": len(hub.files[path]), "sha256": hub.listed[path]}
    assert manifest["inputs"][0] == first and len(manifest["inputs"]) == 4
    assert not (tmp_path / "out.part").exists()  # nor the files that came


def test_cut_connections_go_on_where_they_were(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)  # what of a broken download is kept
    assert prepared(tmp_path / "whole") == 0
    hub.requested.clear()
    hub.harm = lambda path, count, body: body[: 300 * count] if count < 4 else body
    assert prepared(tmp_path / "out") == 0
    assert {name.removeprefix("out"): part for name, part in read(tmp_path / "out").items() if ".bin" in name} == {
        name.removeprefix("whole"): part for name, part in read(tmp_path / "whole").items() if ".bin" in name
    }
    assert "bytes=300-" in hub.ranges and max(hub.requested.values()) == 4


def test_a_wrong_byte_is_fetched_again_and_refused_the_second_time(hub, tmp_path, capsys):
    path = "sample/10BT/002_00000.parquet"

    def wrong(times):
        return lambda requested, count, body: body[:50] + b"!" + body[51:] if requested == path and count <= times else body

    hub.harm = wrong(1)
    assert prepared(tmp_path / "out") == 0 and hub.requested[path] == 2
    hub.requested.clear()
    hub.harm = wrong(9)
    assert prepared(tmp_path / "two") == 2
    assert f"{path} of {REPO} came twice with sha256" in capsys.readouterr().err and not (tmp_path / "two").exists()
    hub.harm = lambda requested, count, body: body
    before = Counter(hub.requested)
    assert prepared(tmp_path / "two") == 0  # goes on: what was tokenized is not fetched again
    assert hub.requested["sample/10BT/000_00000.parquet"] == before["sample/10BT/000_00000.parquet"]
    assert {n.removeprefix("two"): p for n, p in read(tmp_path / "two").items() if ".bin" in n} == {
        n.removeprefix("out"): p for n, p in read(tmp_path / "out").items() if ".bin" in n
    }


def test_a_file_that_stays_short_and_a_hub_that_is_not_there_are_one_line(hub, tmp_path, capsys, monkeypatch):
    hub.harm = lambda path, count, body: body[:200]
    assert prepared(tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "cannot fetch sample/10BT/000_00000.parquet of HuggingFaceFW/fineweb" in error and error.count("\n") == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert prepared(tmp_path / "out") == 2
    assert "cannot list HuggingFaceFW/fineweb on the hub" in capsys.readouterr().err
    assert os.listdir(tmp_path) in ([], ["out.part"])
