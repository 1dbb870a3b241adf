"""The dispatcher: a static table of commands, so that `--help` imports none of them."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING

from barellm import __version__

if TYPE_CHECKING:
    import argparse

    from barellm.cli.parsing.options import Parser

COMMANDS: dict[str, str] = {
    "train": "train; without arguments a small model on Python source", "prepare": "tokenize a dataset into shards",
    "presets": "models and runs by name; one's values", "runs": "list and compare the runs of a folder",
    "plot": "loss curves of runs, also of those that still train", "sample": "generate text from a checkpoint",
    "chat": "talk with a model, by its chat template",
    "serve": "serve models over HTTP by OpenAI's protocol; a page to chat",
    "eval": "loss and perplexity of a checkpoint; HellaSwag",
    "quantize": "weight quantization (GPTQ): int8, int4 or NF4 weights",
    "import": "make a checkpoint of a Hugging Face folder or llm.c file",
    "export": "write weights for transformers, llm.c or llama.cpp",
    "build": "make a program that trains without Python: library, header",
    "plan": "memory plan and roofline: bytes, FLOPs, traffic by op",
    "compare": "whether losses differ by rounding or by a fault: seeds, p-value",
    "verify": "replay a step bit for bit, or name the op that differs",
    "profile": "where a step's time goes, by op and thread; a timeline", "bench": "benchmark kernels and training steps",
    "tune": "autotune the GEMM configurations of a preset", "inspect": "show a kernel's IR, assembly and registers",
    "doctor": "what this machine has and what barellm will use",
}  # fmt: skip
# Commands that take a model of one's own, --model FILE.py.
WITH_MODELS = COMMANDS.keys() - {"prepare", "runs", "plot", "verify", "import", "export", "doctor"}
SECTIONS = {"train": "train", "sample": "use a model", "plan": "examine"}  # from this command on


def help_text() -> str:
    lines = ["usage: barellm COMMAND [options]", "", "GPT training from Python: hand-written kernels, compiled for this machine."]
    for name, text in COMMANDS.items():
        lines += ["", f"{SECTIONS[name]}:"] if name in SECTIONS else []
        lines.append(f"  {name:<11} {text}")
    lines += ["", "barellm COMMAND --help shows a command's options, barellm --version the version,"]
    return "\n".join([*lines, "barellm --completion bash prints a shell's completion (zsh, fish, tcsh)."])


def run_command(argv: Sequence[str]) -> int:
    """Import the command's module, parse its options, run it. UserError for whatever the user can mend."""
    from barellm.errors import UserError, check_known

    if sys.platform == "win32":
        raise UserError("Windows is not supported: use Linux, macOS, or Linux inside WSL 2")
    name = argv[0]
    check_known("command", name, COMMANDS)
    from barellm import environment

    environment.check()
    return import_module(f"barellm.cli.{name}").run(parsed(argv))


def parsed(argv: Sequence[str]) -> "argparse.Namespace":
    """The options of a command line, which names a command that there is."""
    return parser_of(argv[0], argv[1:]).parse(argv[1:])


def parser_of(name: str, words: Sequence[str]) -> "Parser":
    """The parser of a command, whose options depend on the models and the preset that `words` name."""
    from barellm import models
    from barellm.cli.parsing.options import Parser, add_own_models

    module = import_module(f"barellm.cli.{name}")
    parser = Parser(prog=f"barellm {name}", description=module.__doc__)
    if name in WITH_MODELS:
        add_own_models(parser, words)
    parser.preset = models.named(words)
    module.configure(parser)
    return parser


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """While entered, Ctrl-C is `interrupt`'s, unless the process already has a handler of its own."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler: KeyboardInterrupt, but the end of the process while a module is imported. There the exception can be lost in
    a weak reference's callback of importlib, so that the command went on, or become an ImportError of NumPy's C code. Python's own
    start, before `main`, has that hole too."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            with contextlib.suppress(RuntimeError, OSError):  # RuntimeError: the signal came inside a write to the same stream
                sys.stdout.flush()
                os.write(2, b"barellm: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


@interrupts()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Exit status: 0 done, 2 user error (one line on stderr), 130 interrupted, 141 output closed."""
    argv = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample that the terminal's encoding lacks must not end a run
    try:
        status = help_or_command(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("barellm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `barellm sample ... | head`
        drop_output()
        return 141
    except ModuleNotFoundError as error:  # a Python into which nothing was installed, where another has it
        if (error.name or "barellm").startswith("barellm"):
            raise
        return fail(f"{sys.executable} lacks the package {error.name}: pip install -e . where barellm's pyproject.toml is")
    except OSError as error:
        where = error.filename
        try:
            sys.stdout.flush()
        except OSError:  # what it holds cannot be written: this is the error, and it would be raised at exit again
            drop_output()
            where = "standard output" if where is None else where
        return fail(f"{f'{where}: ' if where is not None else ''}{error.strerror or error}")
    except ValueError as error:
        from barellm.errors import UserError

        if not isinstance(error, UserError):
            raise
        return fail(str(error))


def help_or_command(argv: Sequence[str]) -> int:
    """Answer --help (status 2 if no command was given, as for other mistakes), --version or --completion, else run the command.
    Imports are lazy, so that these answers come at once."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"barellm {__version__}")
        return 0
    if argv[0] == "--completion":
        from barellm.cli.parsing.help import completion

        print(completion(argv[1] if argv[1:] else "", {name: parser_of(name, []) for name in COMMANDS}))
        return 0
    return run_command(argv)


def open_closed_streams() -> None:
    """A standard stream that the caller closed (`>&-`, some daemons) becomes /dev/null. Else the next file that is opened, a
    checkpoint say, gets its number, and whatever a library writes to standard error."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, so this one, or it is somebody's
            setattr(sys, name, open(null, mode, closefd=False))  # noqa: SIM115


def drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> int:
    for stream, text in ((sys.stdout, ""), (sys.stderr, "barellm: error: " + " ".join(message.split()) + "\n")):
        with contextlib.suppress(OSError):  # `2>/dev/full`: the exit status tells
            stream.write(text)
            stream.flush()
    return 2
