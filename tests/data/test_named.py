"""Names of sets, and Tiny Shakespeare from a server in a thread. tests/oracle/test_named.py has the sets of the hub."""

from __future__ import annotations

import hashlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from barellm.data import named
from barellm.errors import UserError


def test_a_name_is_known_and_a_path_or_pattern_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named.is_named("tinyshakespeare") and named.is_named("fineweb-edu:10BT") and named.is_named("tinystories")
    assert not any(map(named.is_named, ("stdlib", "fine*", "./tinystories", "fineweb.txt", "a:10BT")))
    with pytest.raises(UserError, match="no set 'fineweb:10B', did you mean 'fineweb:10BT'"):
        named.is_named("fineweb:10B")
    (tmp_path / "fineweb").mkdir()
    assert not named.is_named("fineweb")


@pytest.mark.parametrize(
    "words, message",
    [
        (["fineweb:10BT", "more.txt"], "the set fineweb:10BT stands alone, found with it: more.txt"),
        (["fineweb:10BT", "--val-fraction", "0.1"], "--val-fraction needs all of a text first"),
        (["tinystories", "--val-tokens", "5"], "the set tinystories has a part for validation of its own"),
        (["tinystories", "--field", "text"], "--field does not go with tinystories, whose documents are known"),
        (["fineweb:10BT", "--format", "text"], "--format does not go with fineweb:10BT"),
        (["stdlib", "--separator", "x"], "--separator does not go with stdlib"),
        (["-", "--field", "body"], "--field does not go with standard input as text: another --format"),
        (["-", "--format", "jsonl", "--separator", "x"], "--separator does not go with standard input as jsonl"),
    ],
)
def test_what_a_set_does_not_allow_is_refused_before_the_network(words, message, refused, tmp_path):
    assert message in refused("prepare", *words, "--tokenizer", "bytes", "--out", tmp_path / "out")


def test_what_lies_here_under_the_name_of_a_set_is_not_passed_over(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "tinystories").mkdir()
    command = ("prepare", "tinystories", "--tokenizer", "bytes", "--out")
    assert refused(*command, "out").startswith("tinystories is the name of a set, and of what lies here")
    assert "needs the package huggingface_hub" in refused(*command, "tinystories")  # the folder that the set goes to


def test_a_missing_library_is_named_with_its_command(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = refused("prepare", "tinystories", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert "needs the package huggingface_hub: pip install huggingface_hub" in message


def test_tiny_shakespeare_is_checked_and_kept(cache, monkeypatch):
    content, sent = b"First Citizen:\n" * 20, []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            body = sent.append(self.path) or (content[:-7] if len(sent) == 1 else b"!" + content if len(sent) == 2 else content)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) if len(sent) == 1 else len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(named, "SHAKESPEARE", f"http://127.0.0.1:{server.server_port}/input.txt")
    monkeypatch.setattr(named, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    for message in ("cannot download .*IncompleteRead", "has sha256 .*301 bytes.*expected"):  # cut, then wrong
        with pytest.raises(UserError, match=message):
            named.tinyshakespeare()
        assert not list(cache.rglob("tinyshakespeare.txt"))
    path = named.tinyshakespeare()
    assert path.read_bytes() == content and named.tinyshakespeare() == path and len(sent) == 3
    path.write_bytes(b"damaged")
    assert named.tinyshakespeare().read_bytes() == content
    server.shutdown()
    server.server_close()
