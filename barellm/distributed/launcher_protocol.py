"""The protocol of ranks with their launcher, `barellm train --ranks`: lines on stdout with a prefix.

A rank that fails says why, announces its exit status and waits: `launch` reads both in this order and ends all ranks. It must not
end them itself, as elsewhere: MPICH's proxy then drops what it has not read, and on a busy machine the run ended without a word."""

import os
import sys

PREFIX = b"\x1ebarellm rank "  # begins the lines by which they do


def announce_rank(rank: int) -> None:
    """Tell the launcher which rank this process is, for its last line: on stdout, in a line that it keeps to itself. No file is
    needed, which would stay where all are killed."""
    if os.environ.get("BARELLM_RANKS"):
        os.write(1, b"%s%d %d\n" % (PREFIX, rank, os.getpid()))


def say(words: str) -> None:
    """Print an error's line or lines on stderr; our launcher does it for a rank."""
    if not os.environ.get("BARELLM_RANKS"):
        print(words, file=sys.stderr, flush=True)
        return
    for line in words.splitlines():
        os.write(1, b"%ssay %s\n" % (PREFIX, line.encode(errors="replace")))


def announce_exit(status: int) -> None:
    """Tell our launcher the status of the run: when all ranks have done their work, or when this one has failed, and has said
    why: then it ends them all. What happens to a rank after that changes nothing."""
    if os.environ.get("BARELLM_RANKS"):
        sys.stdout.flush()
        os.write(1, b"%send %d\n" % (PREFIX, status))
