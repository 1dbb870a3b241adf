"""Message passing between ranks by MPI, through mpi4py. Nothing blocks inside MPI: every wait polls (`distributed.heartbeat`)."""

import contextlib
import ctypes
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from barellm.distributed import cores as cores_module
from barellm.distributed import memory, supervisor, transfers
from barellm.distributed.heartbeat import Heartbeat, end_all, limit_seconds
from barellm.errors import UserError

ARRAYS, VALUES, EARLY, BESIDE = 1, 2, 3, 4  # tags
BESIDE_NAP_S = 0.001  # in which the run has the processor
LOST = 2.0  # times the watch's limit
MOST_BYTES = 1 << 30  # of one message: MPI counts in 32 bits
Arrays = Sequence[tuple[int, np.ndarray]]  # and the ranks that they go to, or come from


class MpiRanks:
    """A `runtime.ranks.Ranks` over all processes that an MPI launcher has started."""

    def __init__(self) -> None:
        """Initialize MPI, the heartbeat and, on one machine, direct reads of other ranks' memory. UserError without MPI."""
        try:
            import mpi4py  # pyright: ignore[reportMissingImports]

            mpi4py.rc.initialize = False  # see _call
            mpi4py.rc.finalize = False  # a process that fails must not wait for the others at its end: `close` does
            from mpi4py import MPI  # pyright: ignore[reportMissingImports]
        except ImportError as error:  # RuntimeError: mpi4py is here, and no MPI
            raise UserError(f"several processes need mpi4py ({error}): pip install 'barellm[mpi]'") from None
        except RuntimeError as error:
            raise UserError(f"mpi4py finds no MPI ({error}): pip install 'barellm[mpi]'") from None
        with supervisor.peer_supervisor():
            _call(MPI, "MPI_Init_thread", None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
            if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise UserError("this MPI was built without MPI_THREAD_MULTIPLE, which barellm needs")
            self._mpi, self._world = MPI, MPI.COMM_WORLD
            for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # errors become exceptions: else MPI ends this process
                comm.Set_errhandler(MPI.ERRORS_RETURN)
            self.rank, self.count = self._world.Get_rank(), self._world.Get_size()
            self._watch = Heartbeat(MPI, self._world.Dup())
            self._early = transfers.Transfers(self._done)
            self._readable = self._try_reading()
        _forget_files()

    def prepared(self, sends: Arrays, receives: Arrays) -> Callable[[], None]:
        """A function that does these transfers; between ranks that can read each other's memory, by reads between two barriers."""
        readings = self._readings(sends, receives)
        sends = [(rank, array) for rank, array in sends if rank not in self._readable]
        receives = [(rank, array) for rank, array in receives if rank not in self._readable]

        def transfer() -> None:
            # Between the two barriers ranks read each other's memory, where they may; a failed read is told at the second one.
            if self._readable:
                self.barrier()  # all have what is read now
            self._wait(self._requests(sends, receives, ARRAYS))
            all_read = True
            try:
                for read in readings:
                    read()
            except OSError:
                all_read = False
            if self._readable:
                self.barrier(complete=all_read)  # nobody reads any more

        return transfer

    def beginning(self, number: int, sends: Arrays, receives: Arrays) -> Callable[[], None]:
        return lambda: self._early.begin(number, self._requests(sends, receives, EARLY))

    def ending(self, number: int) -> Callable[[], None]:
        def end() -> None:
            with self._watch.waiting() as look:
                while not self._early.over(number):
                    look()

        return end

    @property
    def direct(self) -> bool:
        return bool(self._readable)

    def peer_addresses(self, sends: Arrays) -> list[tuple[int, list[int]]]:
        found = self._places(sends)
        return [(process, [address for address, _ in found[rank]]) for rank, process in self._readable.items()]

    def barrier(self, *, complete: bool = True) -> None:
        if complete:
            self._wait([self._world.Ibarrier()])
            return
        # Its process is gone: the launcher, or the watch, is about to end this one too.
        with self._watch.waiting() as look:
            while True:
                look()

    def _readings(self, sends: Arrays, receives: Arrays) -> list[memory.Reading]:
        """What is read of the memory of each rank that can be read."""
        found, places = [], self._places(sends)
        for rank, process in self._readable.items():
            found.append(memory.Reading(process, [array for source, array in receives if source == rank], places[rank]))
        return found

    def _places(self, sends: Arrays) -> dict[int, list[memory.Place]]:
        """Where each rank that can be read has what it sends to this one."""
        for rank in self._readable:
            self.send(rank, [(array.ctypes.data, array.nbytes) for to, array in sends if to == rank])
        return {rank: self.receive(rank) for rank in self._readable}

    def _try_reading(self) -> dict[int, int]:
        """{rank: process id} of the other ranks if all are on this machine, may read each other's memory and want to; else {}.
        Sets `number`, this rank's place among those of its machine, and gives the heartbeat their processes. Collective."""
        memory.allow_reading()
        # The test: each rank offers 8 random bytes, which the others read from its memory and compare with the message's.
        word = np.frombuffer(os.urandom(8), np.uint8)
        own_facts = (self._mpi.Get_processor_name(), os.getpid(), (word.ctypes.data, word.nbytes), word.tobytes())
        everybody = self.gather(own_facts, no_timeout=True)
        here = {rank: process for rank, (name, process, *_) in enumerate(everybody) if name == own_facts[0]}
        self.number = list(here).index(self.rank)
        self._watch.look_at({rank: process for rank, process in here.items() if rank != self.rank})
        same_machine = len(here) == self.count and os.environ.get("BARELLM_MESSAGES") != "1"
        able = same_machine and all(memory.can_read(process, place, found) for _, process, place, found in everybody)
        if not all(self.gather(able)):
            return {}
        return {rank: process for rank, (_, process, *_) in enumerate(everybody) if rank != self.rank}

    def _requests(self, sends: Arrays, receives: Arrays, tag: int) -> list[Any]:
        return [
            *(self._world.Irecv(piece, rank, tag) for rank, array in receives for piece in _pieces(array)),
            *(self._world.Isend(piece, rank, tag) for rank, array in sends for piece in _pieces(array)),
        ]

    def gather(self, value: Any, *, no_timeout: bool = False) -> list[Any]:
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.count, np.int64)
        self._wait([self._world.Iallgather(np.array([own.size], np.int64), sizes)], no_timeout=no_timeout)
        found = np.empty(int(sizes.sum()), np.uint8)
        self._wait([self._world.Iallgatherv(own, [found, sizes.tolist()])])
        return [pickle.loads(found[end - n : end].tobytes()) for end, n in zip(np.cumsum(sizes), sizes, strict=True)]

    def send(self, rank: int, value: Any, *, background: bool = False) -> None:
        if background:
            request = self._world.isend(value, rank, BESIDE)
            while not self._done([request]):
                time.sleep(BESIDE_NAP_S)
            return
        self._wait([self._world.isend(value, rank, VALUES)], one=rank, no_timeout=True)

    def receive(self, rank: int, *, no_timeout: bool = False, background: bool = False) -> Any:
        """The next object that `rank` sends. `background`: for threads besides the run, without fault detection."""
        message = None
        if background:  # the watch is about what the run waits for
            while (message := self._world.improbe(rank, BESIDE)) is None:
                time.sleep(BESIDE_NAP_S)
            return message.recv()
        with self._watch.waiting(one=rank, no_timeout=no_timeout) as look:
            while (message := self._world.improbe(rank, VALUES)) is None:
                look()
        return message.recv()

    def settle(self, cores: Sequence[int]) -> None:
        """Deal the processor's `cores` to the ranks of this machine."""
        name = self._mpi.Get_processor_name()
        found = self.gather((name, cores_module.usable()))
        cores_module.settle([mask for other, mask in found if other == name], self.number, cores)

    def close(self) -> None:
        """Wait for all others, then leave them."""
        self.gather(None, no_timeout=True)
        with supervisor.peer_supervisor():
            self._watch.close()
            _call(self._mpi, "MPI_Finalize")

    def abort(self, status: int) -> NoReturn:
        end_all(self._world, status)

    def _wait(self, requests: list[Any], *, one: int | None = None, no_timeout: bool = False) -> None:
        with self._watch.waiting(one=one, no_timeout=no_timeout) as look:
            while not self._done(requests):
                look()

    def _done(self, requests: list[Any]) -> bool:
        """Whether all are. Where MPI fails, the process of another rank is gone: the guard, the launcher or the watch is about to
        end this one too, and says which. So nothing happens here until they have had time to."""
        try:
            return self._mpi.Request.Testall(requests)
        except self._mpi.Exception:
            time.sleep(LOST * limit_seconds())
            raise


def _call(mpi: Any, name: str, *arguments: Any) -> None:
    """Call an MPI function that waits for other ranks, without holding the interpreter lock as mpi4py would."""
    getattr(ctypes.CDLL(mpi.__file__), name)(*arguments)


def _forget_files() -> None:
    """Unlink the shared-memory files of this machine's ranks and Open MPI's folder, which all have opened by now: otherwise each
    killed run leaves some MB behind."""
    maps = Path("/proc/self/maps").read_text() if os.path.exists("/proc/self/maps") else ""
    for name in set(re.findall(r"/dev/shm/(?:mpich_shm_|sm_segment)\S+$", maps, re.MULTILINE)):
        with contextlib.suppress(OSError):
            os.unlink(name)
    folder = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
    if re.fullmatch(r"ompi\.\d+", folder.name):
        shutil.rmtree(folder, ignore_errors=True)


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of a contiguous array, in messages that MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[lo : lo + MOST_BYTES] for lo in range(0, flat.size, MOST_BYTES)]
