"""The launchers of MPI libraries: how each is asked for ranks of this machine, and which of the words on stderr are its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from barellm.distributed.supervisor import FAILED_S

RULE = b"-" * 74  # above and below what Open MPI's launcher says
OURS, MPICHS = b"barellm: ", (b"[mpiexec@", b"[proxy:")  # beginnings of lines


@dataclass(frozen=True)
class Launcher:
    """The program mpiexec of one MPI library. `alone`: our guard ends all ranks where one is killed or fails, `failed_s` seconds
    after one that has ended by itself. `passes_signals`: those that it gets reach the ranks, and it goes on until they end."""

    program: str
    options: tuple[str, ...] = ()
    alone: bool = False
    failed_s: float = FAILED_S
    passes_signals: bool = True

    def command(self, count: int, *arguments: str) -> list[str]:
        return [self.program, *self.options, "-n", str(count), *arguments]


def known(program: str) -> Launcher:
    """The launcher at `program`, recognized by its version text.
    MPICH's kills all ranks when one closes a socket, so the first to fail would be unknown: that is disabled where the system can
    report exits (pidfd). Open MPI's needs options to run as root, to oversubscribe cores, and not to bind ranks to one core. It
    kills all ranks half a second after Ctrl-C or a failure, before they have saved."""
    version = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True).stdout
    follows = sys.platform == "linux" and hasattr(os, "pidfd_open")
    if b"Open MPI" in version:
        root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
        options = (*root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
        return Launcher(program, options, alone=follows, failed_s=0.0, passes_signals=False)
    if b"HYDRA" in version and follows:
        return Launcher(program, ("-disable-auto-cleanup",), alone=True)
    return Launcher(program)


def pass_on_errors(lines: Iterable[bytes], write: Callable[[bytes], object]) -> str:
    """Forward the stderr lines of a run with `write`; returns the launcher's own messages."""
    launcher_lines: list[bytes] = []
    banner: list[bytes] | None = None  # of Open MPI, as far as it has come
    for line in lines:
        line = line.removeprefix(b"\0")  # which Open MPI writes behind a banner
        rule = line.strip() == RULE
        if rule and banner is None:
            banner = [line]
        elif rule:
            launcher_lines += [*(banner or []), line]
            banner = None
        elif banner is not None and not line.startswith(OURS):
            banner.append(line)
        elif line.startswith(MPICHS):
            launcher_lines.append(line)
        elif line:
            write(line)
    for line in banner or []:  # it was no banner
        write(line)
    return b"".join(launcher_lines).decode(errors="replace")
