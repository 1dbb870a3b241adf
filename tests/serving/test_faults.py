"""A storm of requests, a fifth of them from bad clients: the others get the answers that they get alone, and nothing stays behind.

`python -m tests.serving.test_faults 10000` sends as many, and prints what came of them."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chat.test_models import source
from tests.serving.processes import Process, process

pytestmark = pytest.mark.extended
DIFFERENT, CLIENTS = 24, 12
BAD = ("cut in the stream", "cut in the body", "gone before the answer", "slow", "huge", "malformed")


def body_of(number: int) -> dict[str, Any]:
    """One of DIFFERENT requests, of every kind."""
    i = number % DIFFERENT
    how = {"seed": i, "temperature": 0.3 + i / 20, "max_tokens": 5 + i, "top_p": 0.95, "frequency_penalty": (i % 3) / 2}
    if i % 3 == 0:
        return {"prompt": [i + j for j in range(1 + 2 * i)], "logprobs": 2, "echo": i % 2 == 0, **how}
    return {"messages": [{"role": "user", "content": f"Hello {'there ' * i}"}], "stop": "e" if i % 4 == 0 else None, **how}


def request(body: bytes, chat: bool, length: int | None = None) -> bytes:
    head = f"POST /v1/{'chat/' * chat}completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
    )


async def send(port: int, number: int, bad: str = "") -> Any:
    """The choices of a request's answer, or its status; None where the client goes away."""
    fields = body_of(number)
    body = json.dumps({**fields, "stream": bad == "cut in the stream"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        content = request(body, chat := "messages" in fields)
        if bad == "cut in the body":
            writer.write(content[: len(content) - 9])
            await writer.drain()
            return None
        if bad == "malformed":
            content = request(body[:-1] + b",", chat)
        if bad == "huge":
            content = request(b"[" + b"1," * (5 << 19), chat)
        for piece in [content[:70], content[70:-5], content[-5:]] if bad == "slow" else [content]:
            writer.write(piece)
            await asyncio.sleep(0.1 * (bad == "slow"))
        await writer.drain()
        if bad in ("gone before the answer", "cut in the stream"):
            await (reader.readuntil(b"data: ") if bad == "cut in the stream" else asyncio.sleep(0.005))
            return None
        answer = await reader.read()
        status = int(answer.split(b" ", 2)[1])
        return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"] if status == 200 else status
    finally:
        writer.close()


def resident(one: Process) -> int:
    """Bytes of memory that the server has."""
    lines = Path(f"/proc/{one.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


async def storm(one: Process, count: int) -> dict[str, Any]:
    """What came of `count` requests: how many of each kind, answers that differ, memory after a fifth of them and at the end."""
    port = int(one.url.rpartition(":")[2])
    alone = [await send(port, i) for i in range(DIFFERENT)]
    assert all(isinstance(choices, list) for choices in alone), alone
    numbers, found, differ = iter(range(count)), Counter[str](), []
    memory: list[int] = []

    async def client() -> None:
        for number in numbers:
            bad = BAD[number // 5 % len(BAD)] if number % 5 == 0 else ""
            answer = await send(port, number, bad)
            found[f"{bad or 'good'}: {answer if isinstance(answer, int) else 'answered' if answer else 'gone'}"] += 1
            if isinstance(answer, list) and answer != alone[number % DIFFERENT]:
                differ.append(number)
            if number == count // 5:
                memory.append(resident(one))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    for _ in range(200):
        if (health := one.ask("/health").json()) == {"status": "ok", "running": 0, "waiting": 0, "slots": health["slots"]}:
            break
        await asyncio.sleep(0.05)
    return {"found": dict(found), "differ": differ, "memory": [*memory, resident(one)], "health": health}


def run(folder: Path, count: int) -> dict[str, Any]:
    source(folder / "tiny")
    with process(folder, folder / "tiny", "--port", 0, "--slots", 8) as one:
        result = asyncio.run(storm(one, count))
        assert one.stop() == 0
        return result | {"printed": one.text.splitlines()}


def test_bad_clients_cost_the_others_nothing(tmp_path):
    count = 600
    result = run(tmp_path, count)
    found = result["found"]
    assert sum(found.values()) == count and found.pop("good: answered") == count * 4 // 5
    expected = dict(zip(BAD, ("gone", "gone", "gone", "answered", "413", "400"), strict=True))
    assert found == {f"{bad}: {what}": count // 5 // len(BAD) for bad, what in expected.items()}
    assert result["differ"] == [] and result["health"]["running"] == result["health"]["waiting"] == 0
    before, after = result["memory"]
    assert after < 1.03 * before
    assert len(result["printed"]) == 6, result[
        "printed"
    ]  # that it loads, two addresses, the model, how it ends, that it ends: no traceback


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(run(Path(made), int(sys.argv[1])), indent=1))
