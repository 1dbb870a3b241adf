"""The process of a server: it answers while models are still loaded, and finishes its answers before it ends."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from barellm.api import Model, load
from barellm.data.tokenizers import Ids
from barellm.errors import UserError
from barellm.generation.samplers import sampling
from barellm.serving.app import State, application
from barellm.serving.engine import Engine
from barellm.serving.protocol import Served

HEADER_SECONDS = 20.0
LIMITS = {"limit_concurrency": 512, "h11_max_incomplete_event_size": 1 << 16, "timeout_keep_alive": 15}
PLAIN: dict[str, Any] = {"ws": "none", "loop": "asyncio", "lifespan": "off", "proxy_headers": False, "server_header": False}
QUIET: dict[str, Any] = {"log_config": None, "log_level": "critical", "access_log": False}


class Connection(H11Protocol):
    """A connection that has to bring a request in time, and that can be dropped where nobody reads."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.app_state = {**self.app_state, "abort": transport.abort}
        super().connection_made(transport)
        self._watch(waiting=True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(waiting=self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch(waiting=False)

    def _watch(self, *, waiting: bool) -> None:
        if waiting and self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        elif not waiting and self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """It ends with the first signal, once the answers are finished, and with the second one at once."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        if not self.should_exit:
            self.should_exit = True
            self.stop()


def opened(runs: Sequence[str], adapters: Sequence[str], **how: Any) -> dict[str, Model]:
    """Load the models of `runs` (PATH or NAME=PATH), and the first one with each of `adapters` (NAME=PATH), by served name. Weights
    are only mapped. UserError for paths without a model and for duplicate names."""
    models: dict[str, Model] = {}
    named = [(*_named(run), "") for run in runs]
    named += [(name, named[0][1], adapter) for name, adapter in map(_named, adapters)]
    for name, path, adapter in named:
        if name in models:
            raise UserError(f"two models have the name {name!r}: give one another, as NAME=PATH")
        models[name] = load(path, adapters={name: adapter} if adapter else None, **how)
        if adapter:
            models[name].use(name)
        tokenizer = models[name].tokenizer
        if isinstance(tokenizer, Ids):
            raise UserError(f"{path} has no tokenizer, so there is no text to serve")
        # What cannot be, a chat template that fails or a default of sampling, is said now.
        _ = tokenizer.turn_ends, sampling(tokenizer.conventions.sampling)
    return models


def _named(run: str) -> tuple[str, str]:
    """NAME=PATH; of a path alone the name of the run, of the hub's model or of the file."""
    name, equals, path = run.partition("=")
    if equals and name and not Path(run).exists():
        return name, path
    at = Path(run).resolve()
    folder = next(one.name for one in (at, *at.parents) if not one.name.startswith("step-") and one.name != "checkpoints")
    return run.removeprefix("hf:") if run.startswith("hf:") else at.stem if at.is_file() else folder, run


def serve(
    models: Mapping[str, Model], at: socket.socket, *, grace: float, seconds: float, engine: Mapping[str, Any],
    ready: Callable[[State], None], **access: Any,
) -> None:  # fmt: skip
    """Serve `models` (by the name that requests give) on the listening socket `at` until a signal. `grace`: seconds that answers in
    progress have after it; `seconds`: an answer may take; `engine`: options of each `Engine`; `access`: options of `application`
    (key, hosts, origins, routes). Models are loaded by a thread while the socket already answers; `ready(state)` is called, in that
    thread, when all are. If one cannot be, the server stops, and the thread's exception is raised here: UserError, as a rule."""
    state, failed = State(seconds), []  # `failed`: the exception of `begin`, at most one

    def begin() -> None:  # the thread "loading"
        try:
            found = {name: Served(name, model, Engine(model, **engine), int(time.time())) for name, model in models.items()}
            state.models.update(found)
            ready(state)
        except BaseException as error:
            failed.append(error)
            server.should_exit = True

    def stop() -> None:  # at the first signal, in its handler: so engines are closed by threads, each within `grace`
        state.closing = True
        print(f"stopping: answers are finished first, {grace:g} s at most; Ctrl-C stops at once", file=sys.stderr, flush=True)
        for served in state.models.values():
            threading.Thread(target=served.engine.close, args=(grace,), daemon=True).start()

    config = uvicorn.Config(
        application(state, **access), http=Connection, timeout_graceful_shutdown=int(grace) + 5, **LIMITS, **PLAIN, **QUIET
    )
    server = Server(config, stop)
    threading.Thread(target=begin, name="loading", daemon=True).start()
    server.run(sockets=[at])  # returns after a signal, or when `begin` has failed
    for served in state.models.values():
        served.engine.close()
    if failed:
        raise failed[0]
