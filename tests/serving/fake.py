"""A small stand-in for `barellm serve`'s chat, at the speed of a model: what the page asks for, and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

HTML = "<img src=x onerror=\"document.title='broken'\"> & <script>document.title='broken'</script>"
CODE = "Here it is:\n```py\nprint('<b>')\n```\nDone."


class FakeChat:
    """Answers the last message: `slow` with words until the client is gone, `html` with HTML, `code`, `fail` (after a word),
    `refuse`, `cut` (no end), else with words and its number. `asked` are the bodies of all requests; so many requests for the
    models come while they are `loading`."""

    def __init__(self, *, key: str = "", pause: float = 0.01, loading: int = 0) -> None:
        self.key, self.pause, self.loading = key, pause, loading
        self.asked: list[dict[str, Any]] = []
        self.gone = 0

    def routes(self) -> list[Route]:
        return [Route("/v1/models", self.models), Route("/v1/chat/completions", self.chat, methods=["POST"])]

    def _refused(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "no valid API key", "type": "authentication_error"}}, 401)

    async def models(self, request: Request) -> Response:
        self.loading -= 1
        if self.loading >= 0:
            return JSONResponse({"error": {"message": "the model is being loaded", "code": "not_ready"}}, 503)
        return self._refused(request) or JSONResponse({"object": "list", "data": [{"id": "tiny"}, {"id": "tiny-adapter"}]})

    async def chat(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        self.asked.append(body)
        wanted = body["messages"][-1]["content"]
        if wanted == "refuse":
            return JSONResponse({"error": {"message": "temperature is 9, expected 0 to 2", "param": "temperature"}}, 400)
        return StreamingResponse(self._events(wanted), media_type="text/event-stream")

    def _words(self, wanted: str) -> list[str]:
        if wanted == "slow":
            return [f"word{i} " for i in range(1000)]
        given = {"html": HTML, "code": CODE}.get(wanted, f"Answer {len(self.asked)}: straße 日本 🙂 to {wanted}")
        return [given[i : i + 3] for i in range(0, len(given), 3)]

    async def _events(self, wanted: str) -> AsyncIterator[bytes]:
        def chunk(**fields: Any) -> bytes:
            return f"data: {json.dumps({'object': 'chat.completion.chunk', **fields}, ensure_ascii=False)}\n\n".encode()

        def choice(delta: dict[str, str], reason: str | None = None) -> list[dict[str, Any]]:
            return [{"index": 0, "delta": delta, "finish_reason": reason}]

        try:
            yield chunk(choices=choice({"role": "assistant", "content": ""}), usage=None)
            words = self._words(wanted)
            for i, word in enumerate(words):
                whole = chunk(choices=choice({"content": word}), usage=None)
                cut = len(whole) - 5 if i % 2 else whole.find(b"content") + 12  # inside a character, sometimes
                yield b": still there\n\n" + whole[:cut]
                await asyncio.sleep(self.pause)
                yield whole[cut:]
                if wanted == "fail":
                    yield chunk(error={"message": "the model failed", "type": "server_error"})
                    return
            if wanted == "cut":
                return
            yield chunk(choices=choice({}, "length" if wanted == "long" else "stop"), usage=None)
            yield chunk(choices=[], usage={"prompt_tokens": 5, "completion_tokens": len(words), "total_tokens": 5 + len(words)})
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.gone += 1
            raise


@contextmanager
def served(routes: Sequence[Route]) -> Iterator[str]:
    """A server with these routes, in a thread. Gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as at:
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([at],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{at.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
