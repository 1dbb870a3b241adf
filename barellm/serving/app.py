"""The application: who may ask, limits, paths, and answers that end when their client goes away."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from barellm.errors import UserError, shown
from barellm.jsontext import loads
from barellm.serving.answers import Answer, Choice, Part
from barellm.serving.engine import Full
from barellm.serving.protocol import Call, Refused, Served, parse

MOST_BODY, BODY_SECONDS = 4 << 20, 30.0
ALIVE_SECONDS = 15.0  # between comments of a stream, so that no proxy takes one that waits for dead
OPEN = "/health"  # the path that needs no key
PATHS = {True: "/chat/completions", False: "/completions"}


@dataclass
class State:
    """What the server knows. `models` is empty while they are loaded; an answer takes `seconds` at most."""

    seconds: float = 600.0
    models: dict[str, Served] = field(default_factory=dict)
    closing: bool = False

    def named(self, name: Any = None) -> Served:
        """The served model of that name (None: the first). Refused while models are loading or the server stops."""
        if self.closing or not self.models:
            reason = "the server is stopping" if self.closing else "the model is being loaded"
            raise Refused(reason, code="not_ready", status=503, wait=2)
        name = next(iter(self.models)) if name is None else name
        if not isinstance(name, str) or name not in self.models:
            known = ", ".join(self.models)
            raise Refused(f"there is no model {shown(name)}, expected one of {known}", "model", "model_not_found", 404)
        return self.models[name]


def application(
    state: State, *, key: str = "", hosts: Sequence[str] = ("*",), origins: Sequence[str] = (), routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """The ASGI application. `key`: API key ("": none). `hosts`: accepted Host names. `origins`: for CORS. `routes`: others."""
    answers = [Route(f"/v1{path}", partial(_complete, state, chat), methods=["POST"]) for chat, path in PATHS.items()]
    lists = [Route(path, partial(_models, state)) for path in ("/v1/models", "/v1/models/{name:path}")]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False), Middleware(Guard, key=key)]
    if origins:
        middleware.insert(1, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]))
    handlers: Any = dict.fromkeys((Refused, HTTPException, ClientDisconnect, Exception), _error)
    all_routes = [Route(OPEN, partial(_health, state)), *lists, *answers, *routes]
    return Starlette(routes=all_routes, middleware=middleware, exception_handlers=handlers)


class Guard:
    """Asks for the key, on every path but one."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, hashlib.sha256(key.encode()).digest() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = "/" + "/".join(filter(None, scope["path"].split("/")))  # a base URL may end in a slash
        if path == OPEN or self.key is None or self._knows(dict(scope["headers"]).get(b"authorization", b"")):
            return await self.app({**scope, "path": path}, receive, send)
        said = Refused("the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key", status=401)
        response = _json(said.body, 401, {"WWW-Authenticate": "Bearer"})
        response.headers.append("WWW-Authenticate", 'Basic realm="barellm"')  # Chromium takes one line for one way
        await response(scope, receive, send)

    def _knows(self, header: bytes) -> bool:
        kind, _, given = header.partition(b" ")
        if kind.lower() == b"basic":  # as a browser asks for it: any name, and the key as the password
            with contextlib.suppress(ValueError):
                given = base64.b64decode(given).partition(b":")[2]
        return hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self.key or b"")


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    content = json.dumps(body, separators=(",", ":"))
    return Response(content, status, {"Cache-Control": "no-store", **(headers or {})}, "application/json")


async def _error(request: Request, error: Exception) -> Response:
    """Whatever went wrong, in OpenAI's shape. Clients repeat what failed for a reason of the server's, unless they hear not to."""
    if isinstance(error, HTTPException | ClientDisconnect):  # who went away hears nothing of this
        paths = ", ".join(f"/v1{path}" for path in PATHS.values())
        said = f"{request.method} {shown(request.url.path)} is not there, expected POST of {paths} or GET of /v1/models"
        error = Refused(said, code="not_found", status=getattr(error, "status_code", 400))
    found = _refusal(error)
    return _json(found.body, found.status, {"Retry-After": str(found.wait)} if found.wait else {"x-should-retry": "false"})


def _refusal(error: Exception) -> Refused:
    """The error as an HTTP refusal; unexpected errors are logged by place, without request content."""
    if isinstance(error, Refused):
        return error
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" in {frame.tb_frame.f_code.co_qualname}, line {frame.tb_lineno}" if frame else ""
    print(f"barellm: error: {type(error).__name__}{where}: please report it", file=sys.stderr, flush=True)
    return Refused("the server has made a mistake, which its log names", code="internal_error", status=500)


async def _health(state: State, request: Request) -> Response:
    if state.closing or not state.models:
        return _json({"status": "stopping" if state.closing else "loading"}, 503, {"Retry-After": "2"})
    stats = [served.engine.stats() for served in state.models.values()]
    return _json({"status": "ok", **{name: sum(one[name] for one in stats) for name in ("running", "waiting", "slots")}})


async def _models(state: State, request: Request) -> Response:
    first, same = state.named(request.path_params.get("name")), {"object": "model", "owned_by": "barellm"}
    found = [first] if request.path_params else state.models.values()
    shapes = [{"id": one.name, "created": one.created, "max_model_len": one.engine.positions, **same} for one in found]
    return _json(shapes[0] if request.path_params else {"object": "list", "data": shapes})


async def _complete(state: State, chat: bool, request: Request) -> ASGIApp:
    state.named()
    fields = await _body(request)
    served = state.named(fields.get("model") if isinstance(fields, dict) else None)
    call = await asyncio.to_thread(parse, fields, served, chat=chat)
    return Reply(state.named(served.name), call, asyncio.get_running_loop().time() + state.seconds)


async def _body(request: Request) -> Any:
    """The JSON body of a request. Other content types are refused: browsers send those cross-origin without asking (CSRF)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(f"the content type is {shown(kind)}, expected application/json", status=415)
    found, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                found += piece if size <= MOST_BODY else b""
                if size > 16 * MOST_BODY:
                    break  # a client that is not this bad reads why it was refused, once it has sent its body
        if size > MOST_BODY:
            raise Refused(f"the body has more than {MOST_BODY} bytes", code="request_too_large", status=413)
        return loads(bytes(found))
    except TimeoutError:
        raise Refused(f"the body was not there after {BODY_SECONDS:g} seconds", code="timeout", status=408) from None
    except ValueError as error:
        raise error if isinstance(error, Refused) else Refused(f"the body is not JSON: {error}") from None


class Reply:
    """An answer on its way: its texts are in the engine, whose thread tells the loop what comes. Where the client goes away, or
    reads nothing until `end`, the engine leaves them."""

    def __init__(self, served: Served, call: Call, end: float) -> None:
        """Submit all requests of a call to the engine, or none: Refused (429 or 400) if one is not accepted."""
        self.answer, self.end, self.tickets = Answer(call, served), end, []
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]]()
        try:
            for i, request in enumerate(call.requests):
                self.tickets.append(served.engine.submit(request, partial(self._deliver, i)))
        except (Full, UserError) as error:
            cancel(self.tickets)
            full = Refused("too many requests are waiting: try again", code="queue_full", status=429, wait=2)
            raise full if isinstance(error, Full) else Refused(error) from None

    def _deliver(self, index: int, event: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _parts(self) -> AsyncIterator[tuple[Choice, Part]]:
        """Iterate over what each text gains, until all have ended. Refused (504) when the time `end` has passed."""
        choices = self.answer.choices
        while not all(choice.reason for choice in choices):
            try:
                async with asyncio.timeout_at(self.end):
                    i, event = await self._events.get()
            except TimeoutError:
                raise Refused("the answer took too long", code="timeout", status=504) from None
            if not choices[i].reason:
                part = choices[i].feed(event)
                if choices[i].reason:
                    self.tickets[i].cancel()  # a stop text ends it, of which the engine knows nothing
                yield choices[i], part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancel its texts if the client disconnects, or reads nothing until `end`."""
        stream = self.answer.call.stream
        answering = asyncio.create_task(self._stream(send) if stream else self.answer.whole(self._parts()))
        tasks = [answering, asyncio.create_task(_gone(receive)), *([asyncio.create_task(_keep_alive(send))] if stream else [])]
        try:
            timeout = max(0.0, self.end - self._loop.time()) + ALIVE_SECONDS
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answering in done and (whole := answering.result()) is not None:
                await _json(whole)(scope, receive, send)
            elif not done and "abort" in scope.get("state", {}):
                scope["state"]["abort"]()  # else the connection would stay for who never reads what was sent
        finally:
            cancel([*self.tickets, *tasks])
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        """Send server-sent events, "data: " and JSON each; the last is [DONE], or the error, as the status 200 is sent already."""
        kinds = {b"content-type": b"text/event-stream; charset=utf-8", b"cache-control": b"no-store", b"x-accel-buffering": b"no"}
        await send({"type": "http.response.start", "status": 200, "headers": [*kinds.items()]})
        last = "[DONE]"
        try:
            async for chunk in self.answer.chunks(self._parts()):
                await _event(send, f"data: {json.dumps(chunk, separators=(',', ':'))}")
                await asyncio.sleep(0)  # many may be there at once: others have their turn, and a lost connection is noticed
        except Exception as error:
            last = json.dumps(_refusal(error).body)
        await _event(send, f"data: {last}", more=False)


def cancel(running: Sequence[Any]) -> None:
    for one in running:
        one.cancel()


async def _event(send: Send, line: str, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": f"{line}\n\n".encode(), "more_body": more})


async def _keep_alive(send: Send) -> None:
    while True:
        await asyncio.sleep(ALIVE_SECONDS)
        await _event(send, ": waiting")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
