"""How a process learns from its environment that it is one of several."""

import os
from collections.abc import Mapping

from barellm.errors import UserError

# The size of the world by the launchers that MPI libraries know.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
NUMBERS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def started_as_one_of(environment: Mapping[str, str] = os.environ) -> int:
    """Number of processes that an MPI launcher started; 1 without a launcher. If srun started several that cannot find each other:
    UserError in the first process, SystemExit in the others."""
    sizes = [int(environment[name]) for name in SIZES if environment.get(name, "").isdigit()]
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    tasks = int(tasks) if tasks.isdigit() else 1
    found = max(sizes, default=1)
    if tasks > 1 and found == 1 and not any(name.startswith(("PMI", "PMIX")) for name in environment):
        if rank_from_environment(environment):
            raise SystemExit(2)  # the first process says it
        advice = "add --mpi=pmi2 to srun, or --mpi=pmix for Open MPI"
        raise UserError(f"srun has started {tasks} processes that do not know of each other: {advice}")
    return max(found, tasks)


def rank_from_environment(environment: Mapping[str, str] = os.environ) -> int:
    """The rank of this process as its launcher says, which is known before MPI has started; 0 where none says."""
    return next((int(environment[name]) for name in NUMBERS if environment.get(name, "").isdigit()), 0)


def torchrun(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, count) of torchrun's processes; None without it or for one process. UserError for several machines."""
    numbers = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if not all(n.isdigit() for n in numbers):
        return None
    rank, count, near = (int(n) for n in numbers)
    if count == 1:
        return None
    if count != near:
        found = f"torchrun has started {count} processes on several machines, {near} on this one"
        raise UserError(f"{found}: start barellm by mpirun or srun there")
    return rank, count
