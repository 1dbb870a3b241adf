"""A program in a process for each call of the driver that may go wrong: the call fails, or the context is lost with it. Started by
test_libcuda.py on the library in C; a line of JSON: what each of them printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import barellm.cuda.kernels  # noqa: F401  (imported once, for all processes)

FAILURES = {"LIBCUDA_FAIL": 1, "LIBCUDA_LOSE": 700}  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_ILLEGAL_ADDRESS


def said(program: str, folder: str, **environment: str) -> str:
    """What it prints in a process of its own, with what went wrong there."""
    path = Path(folder, "said")
    pid = os.fork()
    if not pid:
        os.environ |= environment
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                exec(compile(program, "program", "exec"), {"__name__": "program"})
            except BaseException:
                traceback.print_exc()
        path.write_text(out.getvalue())
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return path.read_text() if status == 0 else f"it ended with status {status}\n\n"


def main() -> None:
    program, found = sys.argv[1], {}
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder, "log"))
        assert said(program, folder, LIBCUDA_LOG=log) == "it ran\n"
        calls = Counter(Path(log).read_text().split())
        for name, count in calls.items():
            for number in sorted({1, count}):
                for variable, status in FAILURES.items():
                    fault = f"{name}:{status}:{number}"
                    found[fault] = said(program, folder, **{variable: fault})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
