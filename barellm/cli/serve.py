"""Serve models over HTTP by OpenAI's protocol, with a page to chat. RUN is a run, a checkpoint, a folder of Hugging Face, a GGUF
file or a model of the hub; requests know it by the name of its folder, or by NAME of NAME=RUN.

Requests of many clients are computed together (continuous batching), and each gets the answer that it would get alone. The page
also shows the curves of the runs in --runs. Any other address than this machine's own needs an API key."""

import argparse
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from barellm.cli.parsing import help, options
from barellm.errors import UserError

if TYPE_CHECKING:
    from barellm.serving.app import State

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LEAST = {"slots": 1, "queue": 1, "context": 0, "port": 0, "timeout": 1, "grace": 0}


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options. Each default stands twice, as a value and in the text for --help; `run` checks the ranges in LEAST."""
    parser.add_argument("run", metavar="RUN", nargs="+")
    options.add(parser, "--host ADDRESS", "address to listen at (default: 127.0.0.1)", LOOPBACK[0])
    options.add(parser, "--port N", "port; 0 is a free one (default: 8000)", 8000)
    options.add(parser, "--api-key-env NAME", "a key that requests must bring, in a variable of the environment")
    options.add(parser, "--api-key-file FILE", "such a key in the first line of a file")
    said = "the first RUN with an adapter (LoRA), under this name; may be given several times"
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=DIR", help=said)
    options.add(parser, "--slots N", "texts that are computed together (default: 16)", 16)
    options.add(parser, "--queue N", "texts that may wait; more get 429 (default: 64)", 64)
    options.add_context(parser)
    options.add(parser, "--runs DIR", "runs whose curves the page shows (default: runs)", "runs")
    options.add_device(parser, "cpu or reference; GPUs do not serve yet")
    options.add_dtype(parser)
    options.add_weights(parser)
    for name, metavar, said in (
        ("--allow-origin", "URL", "a page's origin that may ask, as https://chat.example.org (CORS); may be given several times"),
        ("--allow-host", "NAME", "a name by which a proxy calls the server; may be given several times"),
    ):
        help.Rare(parser).add_argument(name, action="append", default=[], metavar=metavar, help=said)
    for name, default, said in (("--timeout", 600.0, "an answer may take"), ("--grace", 30.0, "answers have when it is stopped")):
        options.add(help.Rare(parser), f"{name} S", f"seconds that {said} (default: {default:g})", default)


def run(args: argparse.Namespace) -> int:
    """Load the models and serve until a signal. Addresses beyond this machine need an API key."""
    for name, least in LEAST.items():
        if not least <= getattr(args, name) < 1 << 31:
            raise UserError(f"--{name} is {getattr(args, name)}, expected at least {least}")
    key, local = _key(args), args.host in LOOPBACK
    if not key and not local:
        raise UserError(f"--host {args.host} lets others ask, expected a key that they need: --api-key-env or --api-key-file")
    for origin in args.allow_origin:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise UserError(f"--allow-origin is {origin!r}, expected an origin without a path, as https://chat.example.org")
    try:
        from barellm.serving import live, server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UserError('barellm serve needs the packages starlette and uvicorn: pip install "barellm[serve]"') from None
    models = server.opened(args.run, args.adapter, device=args.device, dtype=args.dtype)
    options.context_of(args.context, min(model.config.model.max_seq for model in models.values()))
    hosts = [*LOOPBACK[:2], "[::1]", *args.allow_host] if local or args.allow_host else ["*"]  # elsewhere the key is the guard
    with _listening(args.host, args.port) as at:
        print(f"loading {', '.join(models)}", flush=True)
        server.serve(
            models, at, grace=args.grace, seconds=args.timeout, ready=lambda state: _banner(at, state, bool(key)),
            engine={"slots": args.slots, "positions": args.context, "queue": args.queue, "weights": args.weights or ""},
            key=key, hosts=hosts, origins=args.allow_origin, routes=live.routes(Path(args.runs)),
        )  # fmt: skip
    return 0


def _key(args: argparse.Namespace) -> str:
    """The API key from a variable or a file, "" for none; never from the command line, which other users could read."""
    if args.api_key_env and args.api_key_file:
        raise UserError("--api-key-env and --api-key-file are both given, expected one of them")
    if not args.api_key_env and not args.api_key_file:
        return ""
    text = os.environ.get(args.api_key_env, "") if args.api_key_env else Path(args.api_key_file).read_text(errors="replace")
    if len(key := text.strip().partition("\n")[0].strip()) < 8:
        raise UserError(f"{args.api_key_env or args.api_key_file} has a key of {len(key)} characters, expected 8 or more")
    return key


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from None


def _banner(at: socket.socket, state: "State", key: bool) -> None:
    """Print addresses and models once the server is ready: called by the loading thread. `key`: whether requests need one."""
    from barellm.training.console import show

    host, port = at.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    show(f"{where}/v1  OpenAI's protocol{', with an API key' if key else ''}\n{where}/    a page to chat, and runs")
    for name, served in state.models.items():
        stats = served.engine.stats()
        texts = f"{stats['slots']} texts of {stats['positions']} tokens ({stats['kv_bytes'] / 2**20:,.0f} MiB of KV cache)"
        show(f"{name}: {served.model.parameters:,} parameters, {texts}")
    show("Ctrl-C ends it.")
