"""Ranks on GPUs: steps over a mock of NCCL that checks every call, to the bit those of one process; and what can go wrong."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from barellm.assembly.build import open_model, resolved
from barellm.config import Config
from barellm.cuda import bench, driver, nccl, step
from barellm.cuda.kernels.optim import optimizer as cuda_optimizer
from barellm.errors import UserError
from barellm.optim import sharding
from barellm.program.ops import collectives as program_collectives
from barellm.program.ops.optim import optimizer as program_optimizer
from barellm.tools.profile import profile
from tests.distributed import test_steps
from tests.distributed.test_steps import RECIPES, config_of, oracle, trained
from tests.distributed.threads import ThreadRanks, each_rank
from tests.profiling.conftest import CEILING
from tests.simulators import interpreter, mock, mock_nccl
from tests.simulators.mock import Gpu
from tests.simulators.mock_nccl import Nccl

TURN = threading.Lock()  # one launch at a time: the interpreter replaces parts of Triton


def execute(*launch: Any) -> None:
    with TURN:
        interpreter.execute(*launch)


class CompiledModel:
    """GPUs of ranks that are threads: each has its own, and a driver that knows no other."""

    def __init__(self, *, late: bool = True) -> None:
        self._local, self._late = threading.local(), late
        self.gpus: list[Gpu] = []
        self.nccl = Nccl(self.gpu)

    def gpu(self) -> Gpu:
        if not hasattr(self._local, "gpu"):
            self._local.gpu = Gpu(late=self._late, execute=execute)
            self._local.gpu.uuid = len(self.gpus).to_bytes(16, "little")
            self.gpus.append(self._local.gpu)
        return self._local.gpu

    def install(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(driver, "bindings", self.gpu)
        monkeypatch.setattr(driver, "libcuda", self.gpu)
        for module in (step, bench):
            monkeypatch.setattr(module, "compiled", lambda *args, **named: self.gpu().compiled(*args, **named))
        monkeypatch.setattr(nccl, "bindings", lambda: self.nccl)
        get = ThreadRanks._get

        def working(ranks: ThreadRanks, kind: str, rank: int) -> Any:
            """A GPU goes on while its host waits."""
            self.gpu()._drain()
            return get(ranks, kind, rank)

        monkeypatch.setattr(ThreadRanks, "_get", working)


def small(monkeypatch: Any, **options: Any) -> Config:
    """A model of which a matrix is cut: the interpreter takes seconds for it."""
    for module in (program_optimizer, program_collectives, sharding, cuda_optimizer):
        monkeypatch.setattr(module, "CHUNK", 8192)
    config = config_of(**options)
    return resolved(replace(config, model=replace(config.model, d_model=48)), "cuda")


@pytest.mark.extended
@pytest.mark.parametrize(
    "recipe, late, overlap",
    [
        ("adamw", True, True),
        ("adamw", False, True),
        ("adamw, three ranks", True, False),
        ("fp32, accumulated", True, True),
        ("stochastic 16-bit moments", False, False),
        ("normuon that may skip", True, True),
    ],
)
def test_ranks_train_as_one_process_that_adds_in_their_order(recipe, late, overlap, monkeypatch):
    """What travels while a graph's other work goes on does so as early, or as late, as the graph allows."""
    options, count, _ = RECIPES[recipe]
    monkeypatch.setattr(test_steps, "STEPS", 2)
    machine = CompiledModel(late=late)
    machine.install(monkeypatch)
    config = small(monkeypatch, **options, overlap=overlap)
    whole, read, clip, nbytes = oracle(config, count, "cuda")
    results = each_rank(count, lambda ranks: trained(config, ranks, "cuda"))
    assert clip[1] < 1.0, "the norm must clip"
    saved = results[0][0]
    assert list(saved) == list(whole)
    for name, values in whole.items():
        assert np.array_equal(saved[name], values), name
    for rank, (_, theirs, their_clip, held) in enumerate(results):
        assert np.array_equal(their_clip, clip), rank
        assert held < 0.7 * nbytes
        for name, values in read.items():
            assert np.array_equal(theirs[name].view(np.uint8), values.view(np.uint8)), (rank, name)
    assert len(machine.nccl.comms) == count and machine.nccl.left() == []
    assert not any(comm.aborted for comm in machine.nccl.comms)


@pytest.mark.extended
def test_a_profile_says_what_ranks_spend_on_each_exchange(monkeypatch, tmp_path):
    machine = CompiledModel()
    machine.install(monkeypatch)
    monkeypatch.setattr(profile, "measured_ceiling", lambda device: CEILING)
    config = small(monkeypatch, **RECIPES["adamw"][0])
    ours, theirs = each_rank(2, lambda ranks: profile.measure(config, steps=1, folder=tmp_path, device="cuda", ranks=ranks))
    rows = ours["between_ranks"]
    assert [row["s"] for row in rows] == [row["s"] for row in theirs["between_ranks"]]
    seconds: dict[tuple[str, str], np.ndarray] = {}
    for row in rows:
        key = (row["program"], row["op"])
        seconds[key] = seconds.get(key, np.zeros(2)) + row["s"]
    assert not seconds.pop(("optimizer_step", "wait_all_to_all")).any(), "the graph of the backward pass has waited"
    assert list(seconds) == [
        ("forward_backward", "start_all_to_all"),
        ("optimizer_step", "sum_over_ranks"),
        ("optimizer_step", "all_gather"),
    ]
    assert all(s.min() > 0 for s in seconds.values())
    begun = [row["s"] for row in rows if row["op"] == "start_all_to_all"]
    assert not any(map(sum, begun[:-1])) and min(begun[-1]) > 0, "the wait at a pass's end is that of what began last"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(profile.FILES.values())


def pair(machine: CompiledModel, work: Any, count: int = 2) -> list[Any]:
    """What `work(communicator, memory)` gives for each rank, which has 256 bytes of its GPU, all with its number."""

    def one(ranks: ThreadRanks) -> Any:
        context = driver.Context(driver.device(ranks.number))
        memory = driver.DeviceMemory(256)
        memory.fill(ranks.rank, 0, 256, context.stream)
        found = nccl.Communicator(ranks, context.device)
        try:
            return work(found, memory, context)
        finally:
            found._over.set()
            found._thread.join()

    return each_rank(count, one)


@pytest.fixture
def machine(monkeypatch):
    made = CompiledModel()
    made.install(monkeypatch)
    return made


def test_bytes_travel_between_three_gpus_also_when_a_graph_is_replayed(machine):
    def work(found, memory, context):
        rank, here = found.ranks.rank, memory.address
        others = [r for r in range(3) if r != rank]
        sends = [(r, here + 16 * r, 16) for r in others]
        receives = [(r, here + 64 + 16 * r, 16) for r in others]

        def travel() -> None:
            found.exchange(sends, receives, context.stream)
            found.join(context.stream)

        travel()
        first = memory.read(64, 112, context.stream).reshape(3, 16)
        graph = driver.Graph(context.stream, travel)
        for _ in range(2):
            memory.fill(rank + 10, 0, 64, context.stream)
            graph.launch(context.stream)
        again = memory.read(64, 112, context.stream).reshape(3, 16)
        graph.free()
        found.close()
        return first, again

    for rank, (first, again) in enumerate(pair(machine, work, 3)):
        for other in range(3):
            if other != rank:
                assert (first[other] == other).all() and (again[other] == other + 10).all()
    assert machine.nccl.left() == []


def piece(found: nccl.Communicator, memory: driver.DeviceMemory, at: int = 0) -> tuple[Any, ...]:
    """The arguments of a send or a receive with the other rank."""
    return memory.address + at, 16, nccl.BYTES, 1 - found.ranks.rank, found.handle, int(found.stream)


def grouped(*calls: tuple[str, tuple[Any, ...]]) -> None:
    nccl.call("group_start")
    for name, arguments in calls:
        nccl.call(name, *arguments)
    nccl.call("group_end")


def in_a_group_twice(found, memory, context):
    nccl.call("group_start")
    nccl.call("group_start")


def of_two_streams(found, memory, context):
    own = piece(found, memory)
    grouped(("send", own), ("recv", (memory.address + 32, *own[1:-1], int(context.stream))))


def destroyed_with_a_graph(found, memory, context):
    both = ("send", piece(found, memory)), ("recv", piece(found, memory, 32))

    def travel() -> None:
        found._fork.record(context.stream)
        found._fork.hold(found.stream)
        grouped(*both)
        found.join(context.stream)

    kept = driver.Graph(context.stream, travel)
    nccl.call("comm_destroy", found.handle)
    kept.free()


def beside_a_graph(found, memory, context):
    driver.Graph(context.stream, lambda: grouped(("send", piece(found, memory))))


def used_when_gone(found, memory, context):
    nccl.call("comm_destroy", found.handle)
    grouped(("send", piece(found, memory)))


def of_another_size(found, memory, context):
    own = piece(found, memory)
    grouped(("send", own), ("recv", (memory.address + 32, 16 + found.ranks.rank, *own[2:])))
    context.synchronize()


def of_another_type(found, memory, context):
    own = piece(found, memory)
    count, kind = [(16, 1), (4, 7)][found.ranks.rank]
    grouped(("send", (own[0], count, kind, *own[3:])), ("recv", piece(found, memory, 32)))
    context.synchronize()


def waited_for_in_vain(found, memory, context):
    grouped(("recv", piece(found, memory)))
    context.synchronize()


FAULTS = {
    "a group in a group": in_a_group_twice,
    "the end of no group": lambda found, memory, context: nccl.call("group_end"),
    "a send in no group": lambda found, memory, context: nccl.call("send", *piece(found, memory)),
    "are not the device's": lambda found, memory, context: grouped(("send", piece(found, memory, 250))),
    "has a recv with": lambda found, memory, context: grouped(
        ("recv", (memory.address, 16, 1, found.ranks.rank, found.handle, int(found.stream)))
    ),
    "two receives into the same bytes": lambda found, memory, context: grouped(
        ("recv", piece(found, memory)), ("recv", piece(found, memory, 8))
    ),
    "sent and received at once": lambda found, memory, context: grouped(
        ("send", piece(found, memory)), ("recv", piece(found, memory, 8))
    ),
    "on two streams": of_two_streams,
    "destroyed while a graph has its calls": destroyed_with_a_graph,
    "a call beside the graph": beside_a_graph,
    "a communicator that is gone": used_when_gone,
    "expects": of_another_size,
    "of kind": of_another_type,
    "for ever": waited_for_in_vain,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_mock_notices_what_nccl_forbids(machine, fault, monkeypatch):
    if fault == "for ever":
        monkeypatch.setattr(mock_nccl, "IDLE_S", 0.2)
    with pytest.raises(AssertionError, match=fault):
        pair(machine, FAULTS[fault])


def test_a_graph_whose_transfer_nobody_waits_for_is_refused(machine):
    def work(found, memory, context):
        both = [(1 - found.ranks.rank, memory.address, 16)], [(1 - found.ranks.rank, memory.address + 32, 16)]
        with pytest.raises(driver.DriverError, match="UNJOINED"):
            driver.Graph(context.stream, lambda: found.exchange(*both, context.stream))

    pair(machine, work)


def test_two_ranks_with_one_gpu_are_refused_on_both(machine, monkeypatch):
    monkeypatch.setattr(Gpu, "cuDeviceGetUuid", lambda gpu, device: (mock.OK, SimpleNamespace(bytes=b"\1" * 16)))
    with pytest.raises(UserError, match=f"^ranks 0 and 1 have the same GPU .UUID {'01' * 16}., expected one for each"):
        pair(machine, lambda *given: None)


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch):
    gpu = Gpu(count=3)
    gpu.install(monkeypatch)
    found = [driver.device(number) for number in range(3)]
    assert [device.handle for device in found] == [0, 1, 2] and len({device.uuid for device in found}) == 3
    with pytest.raises(UserError, match=r"^this machine has 3 GPUs, and rank number 3 on it \(from 0\) has none"):
        driver.device(3)
    gpu.count = 1
    assert driver.device(3).handle == 0, "its launcher has left it one"


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^several ranks on GPUs need the package nccl4py, which is not installed: pip"):
        nccl.bindings()


@pytest.mark.parametrize("function", ["get_unique_id", "comm_init_rank"])
def test_what_nccl_refuses_is_one_line_on_all_ranks(machine, function):
    machine.nccl.errors[function] = 2
    said: list[str] = []

    def work(ranks):
        with pytest.raises(UserError) as caught:
            nccl.Communicator(ranks, driver.device())
        said.append(str(caught.value))

    each_rank(2, work)
    line = f"NCCL's {function} failed: SystemError (2): unhandled system error (run with NCCL_DEBUG=INFO for details)"
    assert said == [line] * 2


def test_a_library_that_is_not_there_is_named(machine, monkeypatch):
    def missing() -> None:
        raise RuntimeError('Failure finding "libnccl.so.2"\nin 3 places')

    monkeypatch.setattr(machine.nccl, "get_unique_id", missing, raising=False)
    with pytest.raises(UserError, match=r'^several ranks on GPUs need NVIDIA\'s NCCL .Failure finding "libnccl.so.2" in 3'):
        nccl.call("get_unique_id")


def test_a_link_that_fails_ends_the_run_in_one_line(machine, monkeypatch, capfd):
    """The host waits for its GPU, which waits for the other rank."""
    monkeypatch.setattr(nccl, "POLL_S", 0.02)
    ended = []
    monkeypatch.setattr(ThreadRanks, "abort", lambda ranks, status: ended.append((ranks.rank, status)))

    def work(found, memory, context):
        time.sleep(0.1)
        assert found._thread.is_alive()
        found.ranks.gather(None)
        machine.nccl.asynchronous = 6
        found._thread.join(10)
        assert not found._thread.is_alive()

    pair(machine, work)
    assert sorted(ended) == [(0, 1), (1, 1)]
    line = r"barellm: error: rank [01]: NCCL cannot go on .ncclRemoteError: a remote process exited or there was .*"
    assert len(re.findall(line + r": the run is ended\n", capfd.readouterr().err)) == 2


def test_a_session_that_fails_waits_for_nobody(machine, monkeypatch):
    """It ends what its GPU waits for, and gives its memory back."""
    config = small(monkeypatch)

    def work(ranks):
        with open_model(config, device="cuda", ranks=ranks) as opened:
            opened.session.communicator()
            if ranks.rank:
                return
            raise RuntimeError("something else")

    monkeypatch.setattr(Nccl, "comm_destroy", lambda made, comm: setattr(comm, "alive", False))
    with pytest.raises(RuntimeError, match="something else"):
        each_rank(2, work)
    first, second = sorted(machine.nccl.comms, key=lambda comm: comm.rank)
    assert (first.aborted, second.aborted) == (True, False)
    assert machine.nccl.left() == [] and not first.gpu.allocated
