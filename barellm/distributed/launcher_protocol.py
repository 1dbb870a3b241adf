"""The protocol of ranks with their launcher, `barellm train --ranks`: lines on stdout with a prefix."""

import os
import sys

PREFIX = b"\x1ebarellm rank "  # begins the lines by which they do


def announce_rank(rank: int) -> None:
    """Tell the launcher which rank this process is, for its last line: on stdout, in a line that it keeps to itself. No file is
    needed, which would stay where all are killed."""
    if os.environ.get("BARELLM_RANKS"):
        os.write(1, b"%s%d %d\n" % (PREFIX, rank, os.getpid()))


def announce_exit(status: int) -> None:
    """Tell our launcher the status of the run: when all ranks have done their work, or when this one ends them all, and has said
    why. What happens to a rank after that changes nothing."""
    if os.environ.get("BARELLM_RANKS"):
        sys.stdout.flush()
        os.write(1, b"%send %d\n" % (PREFIX, status))
