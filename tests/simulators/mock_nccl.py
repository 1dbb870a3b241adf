"""NCCL in Python, over mock GPUs: the functions of `nccl.bindings.nccl` that barellm calls. Ranks are threads, each with a GPU.

Every call is held against NCCL's manual; what it forbids, or would wait for in vain, is an AssertionError. A group's bytes travel
when the stream comes to it: all that a rank sends is then in its peers' boxes, and it waits for what it expects.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from tests.distributed import waiting
from tests.simulators.mock import LAUNCH_MS, Gpu

IDLE_S = waiting.IDLE_S
ID_BYTES = 128
SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1, 11: 1}  # bytes of ncclDataType_t


class NCCLError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"SystemError ({status}): unhandled system error (run with NCCL_DEBUG=INFO\nfor details)")
        self.status = status


@dataclass
class World:
    """What the ranks of one id share."""

    count: int
    boxes: dict[tuple[str, int, int], queue.Queue] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Comm:
    """A communicator of one rank. `streams`: on which its calls were; `graphs`: that hold some."""

    world: World
    rank: int
    gpu: Gpu
    alive: bool = True
    aborted: bool = False
    streams: set[int] = field(default_factory=set)
    graphs: list[Any] = field(default_factory=list)
    under_way: int = 0  # groups that a stream has not come to yet
    groups: int = 0


@dataclass
class Piece:
    address: int
    nbytes: int
    kind: int
    peer: int


class Nccl:
    """The module. `gpu()` gives the GPU of the calling thread. `errors`: function -> the status with which it fails;
    `asynchronous`: what goes wrong beside the calls."""

    NCCLError = NCCLError

    def __init__(self, gpu: Callable[[], Gpu]) -> None:
        self.gpu = gpu
        self.errors: dict[str, int] = {}
        self.asynchronous = 0
        self.calls: list[tuple[int, str]] = []  # (rank or -1, function)
        self.comms: list[Comm] = []
        self._worlds: dict[bytes, World | None] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self.UniqueId = SimpleNamespace(from_buffer=self._id)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("_") and callable(found) and name not in ("gpu", "NCCLError", "left"):
            self.calls.append((getattr(self._local, "rank", -1), name))
            if name in self.errors:

                def fail(*args: Any) -> None:
                    raise NCCLError(self.errors[name])

                return fail
        return found

    # --- communicators ---

    def get_unique_id(self) -> Any:
        made = bytes([len(self._worlds) + 1] * ID_BYTES)
        self._worlds[made] = None
        return bytearray(made)

    def _id(self, data: bytes) -> Any:
        assert isinstance(data, bytes) and len(data) == ID_BYTES
        return SimpleNamespace(data=data)

    def comm_init_rank(self, nranks: int, comm_id: Any, rank: int) -> Comm:
        assert comm_id.data in self._worlds, "an id that nobody has made"
        assert 0 <= rank < nranks
        gpu = self.gpu()
        assert all(stream.captured is None for stream in gpu.streams), "a communicator is made while a graph is captured"
        with self._lock:
            world = self._worlds[comm_id.data] or World(nranks)
            self._worlds[comm_id.data] = world
            assert world.count == nranks, "ranks that do not agree on how many they are"
            assert rank not in world.ranks, f"two ranks {rank}"
            world.ranks.add(rank)
            assert all(comm.gpu is not gpu for comm in self.comms if comm.world is world), "two ranks on one GPU"
            made = Comm(world, rank, gpu)
            self.comms.append(made)
        self._meet(world, rank)
        self._local.rank, self._local.group = rank, None
        return made

    def comm_get_async_error(self, comm: Comm) -> int:
        assert comm.alive
        return self.asynchronous

    def get_last_error(self, comm: Comm) -> str:
        assert comm.alive
        return "ncclRemoteError: a remote process exited\nor there was a network error"

    def comm_destroy(self, comm: Comm) -> None:
        assert comm.alive and not comm.under_way, "destroyed while bytes travel"
        assert all(graph not in comm.gpu.graphs for graph in comm.graphs), "destroyed while a graph has its calls"
        comm.alive = False
        self._meet(comm.world, comm.rank)  # all ranks leave together

    def comm_abort(self, comm: Comm) -> None:
        assert comm.alive
        comm.alive, comm.aborted = False, True

    def left(self) -> list[int]:
        """The ranks that have not left."""
        return [comm.rank for comm in self.comms if comm.alive]

    # --- groups ---

    def group_start(self) -> None:
        assert self._local.group is None, "a group in a group"
        self._local.group = []

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._add("send", sendbuff, count, datatype, peer, comm, stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._add("recv", recvbuff, count, datatype, peer, comm, stream)

    def _add(self, what: str, address: int, count: int, kind: int, peer: int, comm: Comm, stream: int) -> None:
        assert self._local.group is not None, f"a {what} in no group: two ranks that send first wait for each other"
        assert comm.alive, "a communicator that is gone"
        assert comm.gpu is self.gpu() and comm.rank == self._local.rank
        alone = comm.world.count == 1
        assert 0 <= peer < comm.world.count and (alone or peer != comm.rank), f"rank {comm.rank} has a {what} with {peer}"
        assert all(type(n) is int for n in (address, count, stream)) and count > 0
        nbytes = count * SIZES[kind]
        comm.gpu.span(address, nbytes)
        assert 1 <= stream <= len(comm.gpu.streams)
        comm.streams.add(stream)
        assert len(comm.streams) == 1, "calls of one communicator on two streams"
        capturing = [s for s in comm.gpu.streams if s.captured is not None]
        assert not capturing or comm.gpu.streams[stream - 1] in capturing, "a call beside the graph that is captured"
        self._local.group.append((what, comm, stream, Piece(address, nbytes, kind, peer)))

    def group_end(self) -> None:
        calls, self._local.group = self._local.group, None
        assert calls is not None, "the end of no group"
        if not calls:
            return
        comms = {id(comm): comm for _, comm, *_ in calls}
        assert len(comms) == 1
        comm, stream = calls[0][1], calls[0][2]
        sends, receives = ([piece for what, *_, piece in calls if what == kind] for kind in ("send", "recv"))
        taken = sorted((p.address, p.address + p.nbytes) for p in receives)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken)), "two receives into the same bytes"
        for p in sends:
            assert all(p.address + p.nbytes <= lo or hi <= p.address for lo, hi in taken), "sent and received at once"
        capture = comm.gpu.streams[stream - 1].captured
        if capture is not None:
            comm.graphs.append(capture)
        else:
            comm.under_way += 1
        comm.gpu._put(stream, lambda: self._travel(comm, sends, receives, graph=capture is not None))

    def _travel(self, comm: Comm, sends: list[Piece], receives: list[Piece], *, graph: bool) -> None:
        if comm.aborted:
            return  # what waits for others ends
        assert comm.alive, "bytes travel over a communicator that is gone"
        comm.groups += 1
        comm.gpu.clock += LAUNCH_MS
        for p in sends:
            data = ctypes.string_at(p.address, p.nbytes)
            self._box(comm.world, "bytes", comm.rank, p.peer).put((p.kind, data))
        for p in receives:
            try:
                kind, data = waiting.receive(self._box(comm.world, "bytes", p.peer, comm.rank), idle_s=IDLE_S)
            except queue.Empty:
                raise AssertionError(f"rank {comm.rank} waits for {p.nbytes} bytes of rank {p.peer} for ever") from None
            assert (kind, len(data)) == (p.kind, p.nbytes), (
                f"rank {p.peer} sends {len(data)} bytes of kind {kind}, rank {comm.rank} expects {p.nbytes} of {p.kind}"
            )
            ctypes.memmove(p.address, data, p.nbytes)
        comm.under_way -= not graph

    def _meet(self, world: World, rank: int) -> None:
        """Wait until all ranks have come here."""
        for other in range(world.count):
            self._box(world, "meeting", rank, other).put(None)
        for other in range(world.count):
            waiting.receive(self._box(world, "meeting", other, rank), idle_s=IDLE_S)

    def _box(self, world: World, kind: str, source: int, to: int) -> queue.Queue:
        return world.boxes.setdefault((kind, source, to), queue.Queue())
