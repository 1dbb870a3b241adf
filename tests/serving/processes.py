"""`barellm serve` as a process of its own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


class Process:
    """A server that answers, its base address, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process, self.output, self.url = process, output, ""

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_until_ready(self, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not (found := re.search(r"^(http://\S+)/v1 ", self.text, re.M)):
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.02)
        self.url = found[1]

    def ask(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        how = {"timeout": 60.0, **more}
        return httpx.get(self.url + path, **how) if body is None else httpx.post(self.url + path, json=body, **how)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "barellm", "serve", *map(str, words)]


@contextmanager
def process(folder: Path, *words: object, ready: bool = True, **environment: str) -> Iterator[Process]:
    """A server with these words on its command line; its output is a file in `folder`."""
    output = folder / f"serve-{len([*folder.glob('serve-*')])}.txt"
    with output.open("w") as file:
        started = subprocess.Popen(
            command(*words), stdout=file, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
    one = Process(started, output)
    try:
        if ready:
            one.wait_until_ready()
        yield one
    finally:
        started.kill()
        started.wait()
