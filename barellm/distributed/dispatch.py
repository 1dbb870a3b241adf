"""A command as one of several processes, from its start to its end."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable

from barellm.distributed import launcher_protocol, world
from barellm.errors import UserError
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE

AFTER_S = 2.0  # after which a rank speaks of a mistake that rank 0 has not made: one line is enough where all have


def dispatched(name: str, args: argparse.Namespace, command: Callable[[argparse.Namespace, Ranks], int]) -> int:
    """Run the command `name`; returns the exit status: here, as one of a launcher's ranks, or in --ranks new processes."""
    from barellm.distributed import launch, world

    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks is {args.ranks}, expected at least 1")
    if (count := world.started_as_one_of()) > 1:
        return run_as_rank(args, count, command)
    torchrun = world.torchrun()
    number, count_wanted = torchrun or (0, args.ranks or 1)
    if count_wanted == 1:
        return command(args, ALONE)
    # The first of torchrun's processes starts them all, for MPI; the others have nothing to do.
    if number:
        return 0
    if torchrun:
        launch.end_behind_parent()  # it ends its processes, unless it is killed itself
    return launch.start(count_wanted, [name, *args.words])


def run_as_rank(args: argparse.Namespace, count: int, command: Callable[[argparse.Namespace, Ranks], int]) -> int:
    """Run this rank's part of a command. On failure the process exits at once and aborts the others, who would wait for it forever.
    Rank 0 reports errors that all ranks share."""
    from barellm.distributed.mpi import MpiRanks
    from barellm.runtime.backend import backend

    rank, ranks = world.rank_from_environment(), None
    launcher_protocol.announce_rank(rank)
    try:
        ranks = MpiRanks()
        rank = ranks.rank
        if args.ranks not in (None, count):
            raise UserError(f"--ranks is {args.ranks}, and {count} processes were started: leave it out")
        if ranks.count != count:
            way = "the mpirun of the MPI that mpi4py uses, or srun --mpi=pmi2 (Open MPI: pmix)"
            raise UserError(f"{count} processes were started, and MPI knows of {ranks.count}: start them with {way}")
        ranks.settle(backend("cpu").cores())  # also where BARELLM_THREADS is less: that is how many each rank has
        status = command(args, ranks)
        ranks.gather(None, no_timeout=True)
        if rank == 0:
            launcher_protocol.announce_exit(status)
        ranks.close()
        return status  # and not os._exit: MPICH takes its leave of the launcher in a handler of the C library's exit
    except UserError as error:
        status = _say(rank, str(error), 2)
    except OSError as error:
        name = f"{error.filename}: " if error.filename is not None else ""
        status = _say(rank, f"{name}{error.strerror or error}", 2)
    except KeyboardInterrupt:
        status = 130
        if rank == 0:
            launcher_protocol.say("barellm: interrupted")
        else:
            time.sleep(AFTER_S)  # all have been: rank 0 says it, before anybody ends the run
    except Exception:
        status = _say(rank, f"\n{traceback.format_exc()}", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    if ranks is not None:
        ranks.abort(status)
    os._exit(status)


def _say(rank: int, words: str, status: int) -> int:
    if rank:
        time.sleep(AFTER_S)
        words = f"rank {rank}: {words}"
    sys.stdout.flush()
    launcher_protocol.say(f"barellm: error: {words if status == 1 else ' '.join(words.split())}")
    return status
