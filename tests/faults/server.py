"""A process that has imported barellm and runs commands in forks of itself: `python -m tests.faults.server`. A line of JSON on its
input is a command, {argv, env, stdout, stderr}; the answer is its exit status, negative where a signal ended it."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

COMMANDS = ("train", "import", "quantize", "prepare", "export", "build")


def serve() -> None:
    from barellm.cli.main import main
    from barellm.data import writing

    for name in (*(f"barellm.cli.{name}" for name in COMMANDS), "barellm.training.run", "barellm.native.build"):
        import_module(name)
    writing.SYNC_S = 0.0  # prepare notes how far it is behind every group of documents
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if not pid:
            os.environ.update(task["env"])
            for number, name in enumerate((os.devnull, task["stdout"], task["stderr"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
            try:
                status = main(task["argv"])
                sys.stdout.flush()
            except BaseException:
                import traceback

                traceback.print_exc()
                status = 1
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
