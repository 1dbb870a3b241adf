"""How a process learns that it is one of several, and the cores that it gets."""

from __future__ import annotations

import os

import pytest

from barellm.distributed import cores, world
from barellm.errors import UserError


@pytest.mark.parametrize(
    "environment, count",
    [
        ({}, 1),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "0"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "some"}, 1),
        ({"SLURM_NTASKS": "8"}, 1),  # a batch script, which runs once
        ({"WORLD_SIZE": "4", "RANK": "0"}, 1),
    ],
)
def test_launchers_are_known_by_their_variables(environment, count):
    assert world.started_as_one_of(environment) == count


def test_a_rank_knows_its_number_before_mpi_starts():
    assert world.rank_from_environment({"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "1"}) == 3
    assert world.rank_from_environment({"OMPI_COMM_WORLD_RANK": "2"}) == 2
    assert world.rank_from_environment({"SLURM_PROCID": "1"}) == 1
    assert world.rank_from_environment({"PMI_RANK": "none"}) == world.rank_from_environment({}) == 0


def test_tasks_of_srun_that_do_not_know_of_each_other_are_refused():
    with pytest.raises(UserError, match=r"^srun has started 4 processes .* add --mpi=pmi2 to srun, or --mpi=pmix for Open MPI$"):
        world.started_as_one_of({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    with pytest.raises(SystemExit) as others:  # one line is enough
        world.started_as_one_of({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"})
    assert others.value.code == 2


def test_torchrun_is_known_by_its_variables():
    here = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert world.torchrun(here) == (1, 2)
    assert world.torchrun(here | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert world.torchrun({"RANK": "1", "WORLD_SIZE": "2"}) is None
    with pytest.raises(UserError, match="torchrun has started 4 processes on several machines, 2 on this one"):
        world.torchrun(here | {"WORLD_SIZE": "4"})


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_cores_are_dealt_whole_and_even(count):
    machine = [0, 2, 4, 6, 8, 10, 12, 14]
    shares = [cores.share(machine, number, count) for number in range(count)]
    assert sorted(core for own in shares for core in own) == machine
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_cores_share_them():
    assert [cores.share([3, 5], number, 5) for number in range(5)] == [[3], [5], [3], [5], [3]]


@pytest.fixture
def settled(monkeypatch):
    """What `settle` does to this process: the processors that it keeps, and its number of threads."""
    found: list = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: found.append(list(own)), raising=False)
    monkeypatch.delenv("BARELLM_THREADS", raising=False)
    monkeypatch.delenv("BARELLM_PIN", raising=False)

    def settle(masks, number):
        cores.settle(masks, number, [0, 1, 2, 3])
        return found, os.environ.pop("BARELLM_THREADS", None)

    return settle


def test_ranks_of_one_machine_get_cores_of_their_own(settled):
    assert settled([[0, 1, 2, 3]] * 2, 1) == ([[2, 3]], "2")


def test_cores_that_the_launcher_has_dealt_stay(settled):
    assert settled([[0, 1], [2, 3]], 1) == ([], None)


def test_a_rank_that_is_alone_on_its_machine_keeps_all(settled):
    assert settled([[0, 1, 2, 3]], 0) == ([], None)


def test_without_pins_or_where_no_system_says_only_the_number_of_threads_is_dealt(settled, monkeypatch):
    assert settled([[], []], 0) == ([], "2")
    monkeypatch.setenv("BARELLM_PIN", "0")
    assert settled([[0, 1, 2, 3]] * 2, 0) == ([], "2")
