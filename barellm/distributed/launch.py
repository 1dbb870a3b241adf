"""How a command becomes several processes of one machine: `--ranks`, and torchrun."""

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from barellm.distributed import launcher_protocol, launchers
from barellm.distributed.supervisor import Supervisor, below
from barellm.errors import UserError

MOST = 1 << 16
LAST_WORDS_S = 5.0  # for what a rank has said to arrive after all have ended
PR_SET_PDEATHSIG = 1
STOPPING = b"barellm: stopping after this step"  # what training.stopping says to a first signal, behind a blank line


def mpiexec() -> str:
    """The launcher of the MPI that mpi4py uses: the one beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise UserError("several processes need an MPI with mpiexec, and there is none: pip install 'barellm[mpi]'")
    return found


def start(count: int, arguments: Sequence[str]) -> int:
    """Run `barellm ARGUMENTS` as `count` processes of this machine and return the exit status: that of the user's signal before all
    ranks were up, else what a rank has announced, else that of the first rank to fail, else 1 or the launcher's. Signals are
    forwarded to all ranks. Prints the one line that names a killed rank. UserError for a bad `count`, or without an MPI."""
    if not 1 <= count <= MOST:
        raise UserError(f"--ranks is {count}, expected 1 to {MOST}")
    launcher = launchers.known(mpiexec())
    command = launcher.command(count, sys.executable, "-m", "barellm", *arguments)
    # Without torchrun's variables: a rank would take itself for one of torchrun's processes (`world`).
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # A session of its own: Ctrl-C reaches it once, from here.
    process = subprocess.Popen(
        command, env=clean | {"BARELLM_RANKS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=_end_with_parent,
    )  # fmt: skip
    errors = _Errors(process, stops=launcher.passes_signals)
    numbers: dict[int, int] = {}  # process -> rank, of all that have announced themselves
    ended = 0  # the exit status after a signal that came before that

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        if len(numbers) == count:
            errors.stops = True
            number = signal.SIGTERM if number == signal.SIGHUP else number  # a closed terminal: save and stop
            for other in (process.pid,) if launcher.passes_signals else numbers:
                with suppress(ProcessLookupError):
                    os.kill(other, number)
            return
        ended = 128 + number  # a rank that still imports modules would answer with a traceback, and has nothing to save
        for other in [*below(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)

    old_handlers = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    supervisor = Supervisor(process.pid, count, launcher.alone, launcher.failed_s)
    supervisor.start()
    errors.start()
    try:
        banner, reported = _pass_on(process, numbers)
        status = process.wait()
        errors.join(LAST_WORDS_S)
    finally:
        supervisor.end()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    if ended:
        print("barellm: interrupted", file=sys.stderr)
        return ended
    if reported is not None:
        return reported
    if supervisor.first and supervisor.first[1] and os.WIFEXITED(supervisor.first[1]) and not supervisor.words:
        return os.WEXITSTATUS(supervisor.first[1])  # a rank that ends by itself says why
    if words := supervisor.words or _killed(banner + errors.own, supervisor.numbers | numbers, supervisor.first, count):
        print(f"barellm: error: {words}", file=sys.stderr)
        return 1
    if status and not errors.others:  # nobody else says why
        sys.stderr.write(errors.own)
    return status


class _Errors(threading.Thread):
    """Passes on what the ranks say on stderr. `own`: what their launcher has said there, and `others`: whether anybody else has.

    `stops`: whether a rank may say that it stops. Open MPI's launcher ends the ranks of a run that has failed by SIGTERM, and lets
    those that were stopped go on for that: what they say to it would stand beside the line that names the one at fault. So there
    it counts only after a signal of the user's."""

    def __init__(self, process: subprocess.Popen[bytes], stops: bool) -> None:
        super().__init__(name="errors", daemon=True)
        assert process.stderr is not None
        self.own, self.others, self.stops = "", False, stops
        self._lines, self._blank = process.stderr, b""

    def run(self) -> None:
        self.own = launchers.pass_on_errors(self._lines, self._write)

    def _write(self, line: bytes) -> None:
        """Forward a line of the ranks' stderr, without the stopping messages that Open MPI's own SIGTERM causes."""
        blank, self._blank = self._blank, b""
        if not self.stops and line == b"\n":
            self._blank = blank + line  # it may belong to the next line
            return
        if not self.stops and line.startswith(STOPPING):
            return
        self.others = True
        with suppress(OSError):  # nobody reads any more
            os.write(2, blank + line)


def end_behind_parent() -> None:
    """Send SIGTERM to this process, once, when its parent exits (if the system has pidfd). PR_SET_PDEATHSIG would come once per
    thread of the parent, and a second signal aborts a run."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:  # Linux before 5.3
        return

    def wait() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _pass_on(process: subprocess.Popen[bytes], numbers: dict[int, int]) -> tuple[str, int | None]:
    """Forward the processes' stdout; returns (the launcher's messages, the reported status or None). Fills `numbers`.
    Prints what a rank says of its failure; when it has announced its status too, kills all ranks."""
    assert process.stdout is not None
    launcher_lines: list[str] = []
    reported: int | None = None
    pending: list[bytes] = []  # blank lines and rules: the launcher's banner begins with them
    reader, failed = True, False  # of the output, which may go away; whether a rank has said why it failed
    for line in process.stdout:
        if line.startswith(launcher_protocol.PREFIX):
            kind, _, value = line[len(launcher_protocol.PREFIX) :].partition(b" ")
            if kind == b"say":
                failed = True
                with suppress(OSError):  # nobody reads any more
                    os.write(2, value)
            elif kind != b"end":
                numbers[int(value)] = int(kind)
            elif reported is None:
                reported = int(value)
                for other in numbers if failed else ():  # it waits for that; the supervisor ends those not yet read of
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
            continue
        text = line.decode(errors="replace").rstrip()
        if launcher_lines or "BAD TERMINATION" in text or text.startswith("YOUR APPLICATION TERMINATED"):
            launcher_lines.append(text)
            pending = []
        elif text.startswith("[mpiexec@"):
            continue
        elif not text or set(text) == {"="}:
            pending.append(line)
        else:
            try:
                if reader:
                    sys.stdout.buffer.writelines([*pending, line])
                    sys.stdout.buffer.flush()
            except BrokenPipeError:  # the run saves and ends
                reader = False
                process.send_signal(signal.SIGTERM)
            pending = []
    return "\n".join(launcher_lines), reported


def _killed(banner: str, numbers: Mapping[int, int], first: tuple[int, int | None] | None = None, count: int = 0) -> str:
    """A line that says which rank was killed by which signal; "" if none was. From `first`, (process, wait status) of the first to
    exit, else from the launcher's banner. `numbers`: process -> rank; `count`: of ranks, all of which must be known to name one."""
    # MPICH's banner has "PID 7 RUNNING AT host" and "(signal 9)", Open MPI's "PID 7 on node host" and "signal 9 (Killed)".
    reported = re.search(r"PID (\d+) (?:RUNNING AT|on node)", banner)
    signalled = re.search(r"\bsignal (\d+) ?[()]", banner)
    process, status = first or (int(reported[1]) if reported else -1, None)
    in_banner = int(signalled[1]) if signalled else 0
    number = os.WTERMSIG(status) if status else in_banner
    if not number:
        return ""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    # What the launcher says of a process that nobody knows may be about another one.
    is_known = process in numbers and (first is None or len(numbers) >= count)
    culprit = f"rank {numbers[process]} (process {process})" if is_known else "a rank"
    return f"{culprit} was ended by {name}: the run is ended; resume from its last checkpoint with --resume"
