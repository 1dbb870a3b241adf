"""How a command becomes several processes of one machine: `--ranks`, and torchrun."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from barellm.distributed.guard import Guard
from barellm.errors import UserError

MOST = 1 << 16
SIGN = b"\x1ebarellm rank "  # begins the lines by which ranks tell the launcher who they are
PR_SET_PDEATHSIG = 1


def mpiexec() -> str:
    """The launcher of the MPI that mpi4py uses: the one beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise UserError("--ranks needs an MPI with mpiexec, and there is none: pip install 'barellm[mpi]'")
    return found


def start(count: int, arguments: Sequence[str]) -> int:
    """Run `barellm ARGUMENTS` as `count` processes of this machine, and give the exit status. Signals go on to all of them."""
    if not 1 <= count <= MOST:
        raise UserError(f"--ranks is {count}, expected 1 to {MOST}")
    command = [mpiexec(), "-n", str(count), sys.executable, "-m", "barellm", *arguments]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # A session of its own: Ctrl-C reaches it once, from here.
    process = subprocess.Popen(
        command,
        env=clean | {"BARELLM_RANKS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    before = {}
    for number, passed in ((signal.SIGINT,) * 2, (signal.SIGTERM,) * 2, (signal.SIGHUP, signal.SIGTERM)):
        before[number] = signal.signal(number, lambda n, frame, passed=passed: process.send_signal(passed))
    guard = Guard(process.pid, count)
    guard.start()
    try:
        banner, numbers, told = _pass_on(process)
        status = process.wait()
    finally:
        guard.end()
        for number, handler in before.items():
            signal.signal(number, handler)
    if told is not None:
        return told
    if guard.first and guard.first[1] and os.WIFEXITED(guard.first[1]) and not guard.words:
        return os.WEXITSTATUS(guard.first[1])  # a rank that ends by itself says why
    if words := guard.words or _killed(banner, guard.numbers | numbers, guard.first):
        print(f"barellm: error: {words}", file=sys.stderr)
        return 1
    return status


def sign_in(rank: int) -> None:
    """Tell the launcher which rank this process is, for its last line: on stdout, in a line that it keeps to itself. No file is
    needed, which would stay where all are killed."""
    if os.environ.get("BARELLM_RANKS"):
        os.write(1, b"%s%d %d\n" % (SIGN, rank, os.getpid()))


def tell_end(rank: int, status: int) -> None:
    """When all ranks have done their work, rank 0 tells our launcher the status of the run. What happens to a rank after that
    changes nothing."""
    if rank == 0 and os.environ.get("BARELLM_RANKS"):
        sys.stdout.flush()
        os.write(1, b"%send %d\n" % (SIGN, status))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _pass_on(process: subprocess.Popen[bytes]) -> tuple[str, dict[int, int], int | None]:
    """Write the processes' output to stdout, but for what the launcher itself says: that is given back, with {process: rank} and
    the status that rank 0 has told, if it has."""
    assert process.stdout is not None
    own: list[str] = []
    numbers: dict[int, int] = {}
    told: int | None = None
    held: list[bytes] = []  # blank lines and rules: the launcher's banner begins with them
    reader = True  # of the output: it may go away
    for line in process.stdout:
        if line.startswith(SIGN):
            rank, number = line[len(SIGN) :].split()
            if rank == b"end":
                told = int(number)
            else:
                numbers[int(number)] = int(rank)
            continue
        text = line.decode(errors="replace").rstrip()
        if own or "BAD TERMINATION" in text or text.startswith("YOUR APPLICATION TERMINATED"):
            own.append(text)
            held = []
        elif text.startswith("[mpiexec@"):
            continue
        elif not text or set(text) == {"="}:
            held.append(line)
        else:
            try:
                if reader:
                    sys.stdout.buffer.writelines([*held, line])
                    sys.stdout.buffer.flush()
            except BrokenPipeError:  # the run saves and ends
                reader = False
                process.send_signal(signal.SIGTERM)
            held = []
    return "\n".join(own), numbers, told


def _killed(banner: str, numbers: Mapping[int, int], first: tuple[int, int | None] | None = None) -> str:
    """Which rank was killed by what, from the launcher's words, or better from `first`, the process that has ended before the
    others, and how; "" if none was."""
    told, signalled = re.search(r"PID (\d+) RUNNING AT (\S+)", banner), re.search(r"\(signal (\d+)\)", banner)
    if not signalled:
        return ""
    process, status = first or (int(told[1]) if told else None, None)
    number = os.WTERMSIG(status) if status else int(signalled[1])
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    who = "a rank"
    if process is not None:
        who = f"rank {numbers[process]}" if process in numbers else who
        who += f" (process {process}" + (f" on {told[2]})" if told else ")")
    return f"{who} was ended by {name}: the run is ended; go on from its last checkpoint with --resume"
