"""Clients that are slow, cut or gone, on real sockets: each costs a connection for a while, and the engine nothing."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from barellm.serving import app, server
from barellm.serving.app import State, application
from tests.serving.scripted import served, token, tokens

OPEN: list[server.Server] = []
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return served(tmp_path_factory.mktemp("served") / "hf")


@pytest.fixture
def port(tiny) -> Iterator[int]:
    """Of a server in a thread, whose engine draws one token and then nothing more."""
    tiny.engine.requests, tiny.engine.cancelled = [], []
    tiny.engine.script = lambda request: [token(65, request)]
    with serving(State(models={"tiny": tiny})) as found:
        yield found


@contextmanager
def serving(state: State, **access) -> Iterator[int]:
    plain = {**server.LIMITS, **server.PLAIN, **server.QUIET}
    config = uvicorn.Config(application(state, **access), http=server.Connection, timeout_graceful_shutdown=1, **plain)
    one = server.Server(config, lambda: None)
    OPEN.append(one)
    with socket.create_server(("127.0.0.1", 0)) as at:
        thread = threading.Thread(target=one.run, args=([at],))
        thread.start()
        try:
            yield at.getsockname()[1]
        finally:
            one.should_exit = True
            thread.join()


def request(body: bytes, *, path: str = "/v1/chat/completions", length: int | None = None, more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def connected(port: int, content: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=10)
    one.sendall(content)
    return one


def rest(one: socket.socket) -> bytes:
    """Everything that comes until the other side closes."""
    found = b""
    try:
        while piece := one.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def whole(one: socket.socket) -> bytes:
    """The next answer of a connection that stays open."""
    found = b""
    while b"}" not in found:
        found += one.recv(1 << 16)
    return found


def wait(true: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_left_by_the_engine_at_once(tiny, port, stream):
    with connected(port, request(json.dumps({**BODY, "stream": stream, "n": 2}).encode())) as one:
        wait(lambda: len(tiny.engine.requests) == 2)
        if stream:
            while b'"content":' not in one.recv(1 << 16):
                pass
        assert tiny.engine.cancelled == []
    began = time.monotonic()
    wait(lambda: tiny.engine.cancelled == [0, 1])
    assert time.monotonic() - began < 1.0


def test_a_client_that_goes_away_while_it_sends_asks_nothing(tiny, port, capsys):
    for content in (b"POST /v1/cha", request(b'{"messages"', length=100), request(b"")[:-2]):
        connected(port, content).close()
    with connected(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as one:
        assert b"200 OK" in rest(one)
    assert tiny.engine.requests == [] and capsys.readouterr().err == ""


def test_a_request_that_is_not_there_in_time_ends(tiny, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    tiny.engine.script = lambda request: tokens([65], request)
    with serving(State(models={"tiny": tiny})) as port:
        for content in (b"", b"GET", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "):
            began = time.monotonic()
            with connected(port, content) as one:
                for _ in range(5):
                    time.sleep(0.04)
                    one.sendall(b"a" * bool(content))
                assert rest(one) == b"" and 0.2 < time.monotonic() - began < 5
        with connected(port, request(b'{"', length=50)) as one:
            assert b" 408 " in (answer := whole(one)) and b'"code":"timeout"' in answer
        # One that is in time is not cut, nor is the second one of a connection that was idle in between.
        with connected(port, request(json.dumps(BODY).encode())) as one:
            assert b" 200 OK" in whole(one)
            time.sleep(0.2)
            one.sendall(request(json.dumps(BODY).encode()))
            assert b" 200 OK" in whole(one)


def test_a_client_that_never_reads_is_dropped(tiny, monkeypatch):
    monkeypatch.setattr(app, "ALIVE_SECONDS", 0.2)
    tiny.engine.requests, tiny.engine.cancelled = [], []
    tiny.engine.positions = 1 << 21
    tiny.engine.script = lambda request: tokens([65] * 5000, request)
    try:
        state = State(seconds=2.0, models={"tiny": tiny})
        with serving(state) as port, socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(20)
            one.connect(("127.0.0.1", port))
            one.sendall(request(json.dumps({**BODY, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()))
            wait(lambda: tiny.engine.cancelled, 15)
            wait(lambda: not OPEN[-1].server_state.connections)  # it is not kept until somebody reads
    finally:
        tiny.engine.positions = 128


def test_a_stream_to_a_client_that_reset_its_connection_prints_nothing(tiny, caplog):
    tiny.engine.positions = 1 << 21
    tiny.engine.script = lambda request: tokens([65] * 3000, request)
    try:
        with serving(State(models={"tiny": tiny})) as port:
            for _ in range(5):
                tiny.engine.requests.clear()
                one = connected(port, request(json.dumps({**BODY, "stream": True}).encode()))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it closes by a reset
                wait(lambda: tiny.engine.requests)
                one.close()
                wait(lambda: not OPEN[-1].server_state.connections)
        assert [record.getMessage() for record in caplog.records] == []
    finally:
        tiny.engine.positions = 128


def test_what_is_no_http_is_refused(port):
    for content in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"x" * 100_000,
    ):
        with connected(port, content) as one:
            one.shutdown(socket.SHUT_WR)
            assert b" 40" in (answer := rest(one))[:12] or answer == b""
    two = request(b"{}", more="Content-Length: 5\r\n")  # two lengths: smuggling
    with connected(port, two) as one:
        assert b"400" in rest(one)


def test_headers_are_bounded(port):
    with connected(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"a" * (1 << 17)) as one:
        assert b"400" in (answer := rest(one)) or answer == b""


def test_a_large_body_is_refused_and_not_read_for_ever(tiny, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(app, "MOST_BODY", 1 << 16)
    with serving(State(models={"tiny": tiny})) as port, connected(port, request(b"", length=1 << 40)) as one:
        one.sendall(b"a" * (5 << 20))
        assert b" 413 " in whole(one)
        began = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() - began < 10:
                one.sendall(b"a" * 1000)
                time.sleep(0.01)


def test_paths_with_dots_are_no_way_around_the_key(tiny):
    with serving(State(models={"tiny": tiny}), key="a-key-of-some-length") as port:
        for path in (
            "/health/../v1/models",
            "/v1/../v1/models",
            "//v1/models",
            "/%2e/v1/models",
            "/v1/models?/health",
            "http://x/health",
        ):
            with connected(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()) as one:
                assert b"401 " in rest(one).split(b"\r\n")[0], path
