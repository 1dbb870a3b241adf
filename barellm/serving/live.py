"""The page of runs in a browser: `barellm train --live`, `barellm serve`, and as a file `barellm plot --out page.html`.

The page is static (page.html). A server gives it whole lines of a run's files as they are, and the browser parses them: here the
processors train. Nothing outside the folder of runs is read: a run is an entry of it, and neither it nor its files are links."""

import base64
import hashlib
import json
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from barellm.errors import UserError
from barellm.jsontext import loads

PORT = 8265  # that --live takes where it is free
PIECE, TAIL = 1 << 20, 1 << 16  # bytes of an answer; at the end of a run's rows, that the list of runs looks at
MOST_RUNS, MOST_STEPS = 1000, 20_000  # of the list, the newest; of a run in a file: of a longer one each n-th
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def html(runs: Sequence[dict[str, Any]] = ()) -> tuple[str, str]:
    """(the page, its Content-Security-Policy): only its own script and style run. With `runs` (`archived`) it fetches nothing."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    found = re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    digests = {tag: base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for tag, body in found}
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    policy += "; connect-src 'none'" if runs else "; connect-src 'self'"
    policy += "".join(f"; {tag}-src 'sha256-{digest}'" for tag, digest in digests.items())
    text = text.replace("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    data = json.dumps({"runs": runs} if runs else None, allow_nan=False)
    for letter in "<>&":  # no text may end the element that holds it, or begin a comment
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return text.replace('id="data">null<', f'id="data">{data}<', 1), policy


def archived(name: str, rows: Sequence[dict[str, Any]], saved: Path) -> dict[str, Any]:
    """A run for `html`: its rows, thinned to MOST_STEPS training steps, and its config.json."""
    config = saved.read_bytes() if saved.is_file() else b""
    remaining, found = sum(row["kind"] == "train" for row in rows), []
    nth = max(1, -(-remaining // MOST_STEPS))
    for row in rows:
        remaining -= row["kind"] == "train"
        if row["kind"] != "train" or remaining % nth == 0:  # the last one too
            found.append({key: value if isinstance(value, str) else _number(value) for key, value in row.items()})
    return {"name": name, "facts": _facts(_object(config), found), "config": config.decode(errors="replace"), "rows": found}


def _number(value: Any) -> float | None:
    """A number as JavaScript has it: None for what is none, not finite, or so large that Python alone has it."""
    return value if isinstance(value, int | float) and abs(value) < 1e300 else None


def _object(content: bytes) -> dict[str, Any]:
    """The object that a piece of JSON holds, empty where it holds none."""
    with suppress(ValueError):
        return found if isinstance(found := loads(content), dict) else {}
    return {}


def _facts(config: dict[str, Any], rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the list says of a run: its preset, how many steps or minutes it has, and the last numbers of its rows."""
    last = {row["kind"]: row for row in rows}
    preset, limits = config.get("preset"), config.get("train")
    named = {"steps": limits, "minutes": limits, "step": last.get("train"), "loss": last.get("train"), "val_nats": last.get("eval")}
    numbers = {key: _number(found.get(key)) if isinstance(found, dict) else None for key, found in named.items()}
    return {"preset": preset if isinstance(preset, str) else "", "finished": "result" in last, **numbers}


def open_file(folder: Path, run: str, name: str) -> BinaryIO:
    """A file of a run in `folder`. OSError where there is none, or one of the two is a link, a pipe or the like."""
    if run in ("", ".", "..") or not run.isprintable() or "/" in run:
        raise FileNotFoundError(run)
    inside = os.open(folder / run, FILE | os.O_DIRECTORY)
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            raise FileNotFoundError(name)
        return os.fdopen(os.open(name, FILE, dir_fd=inside), "rb", buffering=0)
    finally:
        os.close(inside)


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Of each run in `folder`, the newest first: its name, how many seconds ago it wrote, and `_facts`."""
    rows = []
    for entry in os.scandir(folder) if folder.is_dir() else ():
        with suppress(OSError):
            status = os.stat(f"{entry.path}/metrics.jsonl", follow_symlinks=False)  # opened where it has changed alone
            facts = _last(folder, entry.name, status.st_ino, status.st_size, status.st_mtime_ns)
            rows.append({"name": entry.name, "age": round(max(0.0, time.time() - status.st_mtime), 1), **facts})
    return sorted(rows, key=lambda row: row["age"])[:MOST_RUNS]


@lru_cache(maxsize=2 * MOST_RUNS)
def _last(folder: Path, name: str, *version: int) -> dict[str, Any]:
    """`_facts` of a run, of the end of its rows. `version`: of the file, which is read once as long as it does not change."""
    config: dict[str, Any] = {}
    with open_file(folder, name, "metrics.jsonl") as file:
        rows = map(_object, os.pread(file.fileno(), TAIL, max(0, os.fstat(file.fileno()).st_size - TAIL)).splitlines())
        known = [row for row in rows if row.get("kind") in ("train", "eval", "result")]
    with suppress(OSError), open_file(folder, name, "config.json") as file:
        config = _object(file.read(PIECE))
    return _facts(config, known)


def routes(folder: Path) -> list[Any]:
    """Starlette routes of the page: `/`, `/live/runs`, `/live/metrics?run=NAME&since=BYTE&file=ID`, `/live/config?run=NAME`, for
    the runs in `folder`. Metrics are raw bytes: X-Next is the byte to ask for next, X-More is 1 if there is more, X-Start is 0 if
    the file is not `file` any more (resumed run). UserError without Starlette."""
    try:
        from starlette.exceptions import HTTPException
        from starlette.responses import HTMLResponse, JSONResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError:
        raise UserError('the live page needs the packages starlette and uvicorn: pip install "barellm[serve]"') from None
    page, policy = html()
    plain = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    safe = plain | {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'", "Referrer-Policy": "no-referrer"}

    def opened(query: Any, name: str) -> BinaryIO:
        try:
            return open_file(folder, query.get("run", ""), name)
        except OSError:
            raise HTTPException(404, "no such run") from None

    def metrics(request: Any) -> Response:
        # From byte `since`, if the file is still `file` (its inode) and not shorter; else from the beginning. Whole lines only.
        since, expected = (request.query_params.get(name, "") for name in ("since", "file"))
        with opened(request.query_params, "metrics.jsonl") as file:
            status = os.fstat(file.fileno())
            start = int(since) if re.fullmatch("[0-9]{1,15}", since) and expected == str(status.st_ino) else 0
            start = start if start <= status.st_size else 0
            content = os.pread(file.fileno(), PIECE, start)
        end = content.rfind(b"\n") + 1
        following = start + (end or (PIECE if len(content) == PIECE else 0))  # a line longer than that is left out
        more = int(start < following < status.st_size)  # of an unfinished line alone 0: it would be asked for in a loop
        position_headers = {"X-Start": start, "X-Next": following, "X-More": more, "X-File": status.st_ino}
        headers = plain | {name: str(value) for name, value in position_headers.items()}
        return Response(content[:end], headers=headers, media_type="application/x-ndjson")

    def config(request: Any) -> Response:
        with opened(request.query_params, "config.json") as file:
            return Response(file.read(PIECE), headers=plain, media_type="application/json")

    start = Route("/", lambda request: HTMLResponse(page, headers=safe))
    runs = Route("/live/runs", lambda request: JSONResponse({"runs": list_runs(folder)}, headers=plain))
    return [start, runs, Route("/live/metrics", metrics), Route("/live/config", config)]


@contextmanager
def serving(run: Path, port: int) -> Iterator[str]:
    """Context manager: serve the page of `run` and its sibling runs on localhost from a thread; gives its address. `port` -1: PORT,
    or any free one. UserError for a taken port."""
    run, found, listener = run.resolve(), routes(run.resolve().parent), None
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    for number in (PORT, 0) if port == -1 else (port,):
        with suppress(OSError, OverflowError):
            listener = listener or socket.create_server(("127.0.0.1", number))
    if listener is None:
        raise UserError(f"--live is {port}, which is no port that is free: leave the number out, and one is chosen")
    app = Starlette(routes=found)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])  # no page of another name may read it
    options: dict[str, Any] = {"log_config": None, "log_level": 60, "limit_concurrency": 64, "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, args=([listener],), name="live", daemon=True)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/#runs={quote(run.name, safe='')}"
    finally:
        server.should_exit = True
        thread.join(3.0)
