"""The server as a process: it starts, is stopped, killed and started again; curl speaks with it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest

from tests.chat.test_models import source
from tests.serving.processes import Process, command, process

pytestmark = pytest.mark.extended
HI = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1, "max_tokens": 30}
LONG = {**HI, "max_tokens": 2000, "temperature": 1, "logit_bias": {"394": -100, "396": -100}, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        source(folder / "tiny")
        source(folder / "long", positions=4096)
        yield folder


def test_curl_asks_and_streams(folder):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl on this machine")
    with process(folder, folder / "tiny", "--port", 0) as one:
        words = [curl, "-sS", "-N", f"{one.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
        whole = json.loads(subprocess.run([*words, json.dumps(HI)], capture_output=True, check=True).stdout)
        text = subprocess.run([*words, json.dumps({**HI, "stream": True})], capture_output=True, check=True, text=True).stdout
        lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        streamed = "".join(line["choices"][0]["delta"].get("content", "") for line in lines)
        assert streamed == whole["choices"][0]["message"]["content"] and text.endswith("data: [DONE]\n\n")
        assert one.stop(signal.SIGTERM) == 0
        assert "\ntiny: 10,704 parameters" in one.text and max(map(len, one.text.splitlines())) <= 80
        assert HI["messages"][0]["content"] not in one.text.split() and str(folder) not in one.text


def test_it_is_killed_and_serves_again_at_the_same_port_with_the_same_answers(folder):
    with process(folder, folder / "tiny", "--port", 0) as one:
        before, port = one.ask("/v1/chat/completions", HI).json(), one.url.rpartition(":")[2]
        with socket.create_connection(("127.0.0.1", int(port))):  # a client that is there when it dies
            assert one.stop(signal.SIGKILL) == -signal.SIGKILL
    with process(folder, f"other={folder / 'tiny'}", "--port", port) as one:
        assert one.ask("/v1/chat/completions", HI).json()["choices"] == before["choices"]
        assert [model["id"] for model in one.ask("/v1/models").json()["data"]] == ["other"]


class Stream(threading.Thread):
    """A client of a long answer: the lines that it gets, and whether they came to an end."""

    def __init__(self, one: Process) -> None:
        super().__init__()
        self.one, self.lines, self.begun = one, [], threading.Event()
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self.one.url}/v1/chat/completions", json=LONG, timeout=120) as answer,
        ):
            for line in filter(None, answer.iter_lines()):
                self.lines.append(line)
                if '"content":"' in line and '"role"' not in line:
                    self.begun.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_be_finished_and_takes_no_new_ones(folder, number):
    with process(folder, folder / "long", "--port", 0, "--grace", 60) as one:
        stream = Stream(one)
        one.process.send_signal(number)
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):
            one.ask("/health")
        assert one.process.wait(90) == 0
        stream.join()
        assert stream.lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in stream.lines[-2]
        assert sum('"content":"' in line for line in stream.lines) > 1000


def test_behind_the_grace_period_an_answer_ends_with_an_error(folder):
    with process(folder, folder / "long", "--port", 0, "--grace", 0.2) as one:
        stream = Stream(one)
        assert one.stop(signal.SIGTERM) == 0
        stream.join()
        assert json.loads(stream.lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"


def test_the_second_signal_ends_it_at_once(folder):
    with process(folder, folder / "long", "--port", 0, "--grace", 600) as one:
        stream, began = Stream(one), time.monotonic()
        one.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        one.process.send_signal(signal.SIGINT)
        one.process.wait(60)
        assert time.monotonic() - began < 3.0
        stream.join()


def test_a_signal_ends_it_while_it_loads_and_health_says_what_it_does(folder, tmp_path):
    (port,) = free_ports(1)
    with process(folder, folder / "long", "--port", port, ready=False, BARELLM_CACHE=str(tmp_path)) as one:
        end = time.monotonic() + 60
        while True:  # an empty cache: it compiles for some seconds
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"http://127.0.0.1:{port}/health")
                break
            assert time.monotonic() < end
            time.sleep(0.02)
        assert answer.status_code == 503 and answer.json() == {"status": "loading"}
        began = time.monotonic()
        assert one.stop(signal.SIGTERM) == 0 and time.monotonic() - began < 10.0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def test_two_models_and_a_key(folder):
    with process(
        folder, folder / "tiny", f"other={folder / 'long'}", "--port", 0, "--host", "0.0.0.0", "--api-key-env", "KEY",
        KEY="a-key-of-some-length",
    ) as one:  # fmt: skip
        assert one.ask("/v1/models").status_code == 401 and one.ask("/health").status_code == 200
        named = {"Authorization": "Bearer a-key-of-some-length"}
        assert [model["id"] for model in one.ask("/v1/models", headers=named).json()["data"]] == ["tiny", "other"]
        for name in ("tiny", "other"):
            assert one.ask("/v1/chat/completions", {**HI, "model": name}, headers=named).json()["model"] == name
        for wait in (30, 0.2):  # a client that goes away leaves its slot, long before its text is done; streamed or not
            body = {**LONG, "max_tokens": 4000, "model": "other", "stream": wait == 30}
            with (
                contextlib.suppress(httpx.ReadTimeout),
                httpx.stream("POST", f"{one.url}/v1/chat/completions", json=body, headers=named, timeout=wait) as answer,
            ):
                lines = answer.iter_lines()  # without a name it would end the answer
                while '"content":"' not in (line := next(lines)) or '"role"' in line:
                    pass
                assert one.ask("/health").json()["running"] == 1
            began = time.monotonic()
            while one.ask("/health").json()["running"]:
                assert time.monotonic() - began < 1.0
        assert "a-key-of-some-length" not in one.text


def refusal(*words: object) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_what_cannot_be_served_is_refused_in_one_line(folder):
    tiny = folder / "tiny"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert re.search(r"--port \d+: Address already in use", refusal(tiny, "--port", taken.getsockname()[1]))
    assert "--context is 4097" in refusal(folder / "long", "--context", 4097)
