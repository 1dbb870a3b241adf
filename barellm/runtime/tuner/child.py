"""The tuner's child process: `python -m barellm.runtime.tuner.child FD MODULE`, where MODULE.Harness opens a problem.

Requests are pickles on the connection FD, answers JSON. A candidate is checked here, then timed. The parent survives it."""

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from barellm.runtime.tuner.harness import Harness, Wrong


def serve(connection: Connection, make_harness: Callable[..., Harness]) -> None:
    """Answer the requests of `Worker` endlessly: (name, arguments, options), where `open` makes the `Harness` of a problem and any
    other name is a method of it, `check` or `time`. Answers are JSON objects. `ratios`: what the method returned, for `time` the
    time over the default's by candidate and round; `default_s`: seconds of one call of the default. Or `rejected`: the reason, and
    `poisoned`: whether the CUDA context is lost (`DriverError.lost`), so that this process can do nothing more. Never returns."""
    requests: queue.SimpleQueue[tuple[str, tuple[Any, ...], dict[str, Any]]] = queue.SimpleQueue()

    def listen() -> None:
        # In a thread of its own: when the parent is gone this process ends, whatever its candidate is doing.
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    harness: Harness | None = None
    while True:
        name, arguments, options = requests.get()
        try:
            if name == "open":
                if harness is not None:
                    harness.close()
                harness, ratios = None, None  # first: if the next line fails, no closed harness stays
                harness = make_harness(*arguments, **options)
            else:
                ratios = getattr(harness, name)(*arguments)
            answer = {"ratios": ratios, "default_s": harness and harness.seconds}
        except Wrong as why:
            answer = {"rejected": str(why)}
        except Exception as error:  # of whatever kind: it cannot be emitted, compiled, loaded or launched
            traceback.print_exc()
            answer = {"rejected": f"{type(error).__name__}: {error}", "poisoned": getattr(error, "lost", False)}
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    serve(Connection(int(sys.argv[1])), import_module(sys.argv[2]).Harness)
