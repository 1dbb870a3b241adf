"""Ranks on GPUs: bytes travel between their memories by NVIDIA's NCCL, through its own Python bindings (nccl4py).

Only sends and receives are used, many at a time: a sum of NCCL's would add in an order of its own. All go to one stream of the
communicator, which the stream that computes waits for at once, or at the end of its program. So they are parts of captured
graphs, and the host waits for none."""

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from barellm.cuda import driver
from barellm.cuda.kernel import CollectiveCall
from barellm.errors import UserError
from barellm.program.ranks import Ranks
from barellm.runtime.lowering import Region
from barellm.runtime.ranks import first

INSTALL = "pip install -e '.[nccl]' where barellm's pyproject.toml is"
BYTES = 1  # ncclUint8: what travels is bytes, whatever they mean
OK_STATUS = (0, 7)  # ncclSuccess, ncclInProgress
POLL_S = 1.0  # between two queries of asynchronous errors
Piece = tuple[int, int, int]  # a rank, an address, and bytes from there


def bindings() -> Any:
    """`nccl.bindings.nccl`."""
    if importlib.util.find_spec("nccl") is None:
        raise UserError(f"several ranks on GPUs need the package nccl4py, which is not installed: {INSTALL}")
    return importlib.import_module("nccl.bindings.nccl")


def call(name: str, *args: Any) -> Any:
    """What a function of NCCL gives. A bad status, or a library that is not there, is a UserError in one line."""
    nccl = bindings()
    try:
        return getattr(nccl, name)(*args)
    except nccl.NCCLError as error:
        raise UserError(f"NCCL's {name} failed: {_line(error)}") from None
    except RuntimeError as error:  # the finder of libraries
        raise UserError(f"several ranks on GPUs need NVIDIA's NCCL ({_line(error)}): {INSTALL}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


class Communicator:
    """All ranks of a run, each with its own GPU, whose context is current."""

    def __init__(self, ranks: Ranks, device: driver.Device) -> None:
        """Create the communicator, all ranks together. UserError on all of them if two share a GPU, or NCCL does not start."""
        self.ranks = ranks
        check_own(ranks, device)
        cu = driver.bindings()
        unique_id: bytes | UserError | None = None  # rank 0 makes it, or says to all why it cannot
        if ranks.rank == 0:
            try:
                unique_id = bytes(memoryview(call("get_unique_id")))
            except UserError as error:
                unique_id = error
        unique_id = first(ranks, unique_id)
        if isinstance(unique_id, UserError):
            raise unique_id
        self.handle = call("comm_init_rank", ranks.count, bindings().UniqueId.from_buffer(unique_id), ranks.rank)
        self.stream = driver.call("cuStreamCreate", int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._fork, self._join = driver.Event(), driver.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch_errors, name="nccl", daemon=True)
        self._thread.start()

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece], stream: Any) -> None:
        """Start these sends and receives, in these orders for each rank, after the work on `stream`. `join` waits for them."""
        self._fork.record(stream)
        self._fork.hold(self.stream)
        call("group_start")
        for name, pieces in (("send", sends), ("recv", receives)):
            for rank, address, nbytes in pieces:
                call(name, address, nbytes, BYTES, rank, self.handle, int(self.stream))
        call("group_end")

    def join(self, stream: Any) -> None:
        """Make later work on `stream` wait for all sends and receives."""
        self._join.record(self.stream)
        self._join.hold(stream)

    def close(self, *, failed: bool = False) -> None:
        """Leave together with the other ranks, when all messages have arrived; `failed`: without waiting for them."""
        self._over.set()
        self._thread.join()
        call("comm_abort" if failed else "comm_destroy", self.handle)
        driver.call("cuStreamDestroy", self.stream)

    def _watch_errors(self) -> None:
        """In a thread: end the run where a link or another rank fails while the GPU waits for it; the host would wait for ever."""
        while not self._over.wait(POLL_S):
            try:
                status = int(call("comm_get_async_error", self.handle))
                why = "" if status in OK_STATUS else call("get_last_error", self.handle) or f"status {status}"
            except UserError as error:
                why = str(error)
            if why:
                self.fail(why)
                return

    def fail(self, why: str) -> None:
        sys.stdout.flush()
        words = f"rank {self.ranks.rank}: NCCL cannot go on ({' '.join(why.split())}): the run is ended"
        os.write(2, f"barellm: error: {words}\n".encode())
        self.ranks.abort(1)


def check_own(ranks: Ranks, device: driver.Device) -> None:
    """Raise a UserError on all ranks where two have one GPU."""
    owners: dict[str, int] = {}
    for rank, uuid in enumerate(ranks.gather(device.uuid, no_timeout=True)):
        if uuid in owners:
            found = f"ranks {owners[uuid]} and {rank} have the same GPU (UUID {uuid})"
            raise UserError(f"{found}, expected one for each: NCCL needs that")
        owners[uuid] = rank


class BoundCollective:
    """A collective of a program, by addresses. An overlapped one starts only in a run of a step's last micro-batch (`last`)."""

    def __init__(self, call: CollectiveCall, communicator: Communicator, address: Callable[[Region], int], *, last: bool) -> None:
        """`address`: the device address of a region. The op decides which bytes of its operands go to and come from which rank, on
        views of device memory."""
        self.op, self._overlapped, self._communicator = call.op, call.overlapped, communicator
        self.begins = call.overlapped and last
        self._idle = call.overlapped and not last
        arrays = {
            name: [driver.device_view(address(region), region.stop - region.start) for region in regions]
            for name, regions in call.regions.items()
        }
        self._sends = _pieces(call.op.departing(arrays))
        self._receives = _pieces(call.op.arriving(arrays))

    def run(self, stream: Any) -> None:
        if self._idle:
            return
        self._communicator.exchange(self._sends, self._receives, stream)
        if not self._overlapped:
            self._communicator.join(stream)


class JoinCollectives:
    """Behind the last call of a program in which transfers have begun that nothing waited for: it waits for them. `op` is that of
    call number `last`, the latest that has begun."""

    def __init__(self, op: Any, last: int, communicator: Communicator) -> None:
        self.op, self.last, self._communicator = op, last, communicator

    def run(self, stream: Any) -> None:
        self._communicator.join(stream)


def _pieces(arrays: Sequence[tuple[int, np.ndarray]]) -> list[Piece]:
    return [(rank, array.ctypes.data, array.nbytes) for rank, array in arrays]
