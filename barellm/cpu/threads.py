"""The threads that run a step: as many as the machine really gives, pinned, waiting in native code between steps.

The step never runs on Python's main thread, which stays free for signals: SIGINT would otherwise be handled only when the step
ends. Every thread of the pool blocks signals, so the kernel delivers them to the main one."""

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np

from barellm.cpu import processor, sources, specialisation
from barellm.cpu.isa import ISA, arm
from barellm.cpu.jit import Library, cached_object
from barellm.cpu.lang import sync
from barellm.errors import UserError
from barellm.runtime import cgroup


def record_table(count: int) -> np.ndarray:
    """Zeros (count, 8) of i64 for the records of so many calls, aligned as the threads read them."""
    words = sync.RECORD_NBYTES // 8
    block = np.zeros((count + 1) * words, np.int64)
    skip = -block.ctypes.data % sync.RECORD_NBYTES // 8
    return block[skip : skip + count * words].reshape(count, words)


def logical_cpus() -> list[int]:
    """Logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def allowed_cpus() -> list[int]:
    """The processors that this process may use, one for each physical core. On a Mac they are as many as it has performance cores:
    threads meet at barriers, and one on an efficiency core is late at each."""
    cpus = logical_cpus()
    if cores := processor.sysctl_number("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        return cpus[:cores]
    seen: set[str] = set()
    first, siblings = [], []
    for cpu in cpus:
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = str(cpu)
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    return first


def thread_count() -> int:
    """`BARELLM_THREADS`, else min(affinity, control group's quota, physical cores)."""
    requested = os.environ.get("BARELLM_THREADS")
    if requested:
        most = max(16, 4 * len(allowed_cpus()))  # more only wait for each other: a step of 1000 takes minutes
        if not requested.isdigit() or not 1 <= int(requested) <= most:
            raise UserError(f"BARELLM_THREADS is {requested!r}, expected a number from 1 to {most} on this machine")
        return int(requested)
    return len(cores())


def cores() -> list[int]:
    """The processors on which threads run at the same time: as many of `allowed_cpus` as the control group's quota grants."""
    quota, allowed = cgroup.cpu_limit(), allowed_cpus()
    return allowed[: max(1, int(quota))] if quota else allowed


@cache
def _loaded(isa: ISA, futex: bool) -> Library:
    """The loaded code, once for all pools of a process: loading it costs more than starting two threads."""
    code = cached_object(f"sync|{sources.digest(sync.__name__)}|{arm()}|{futex}", isa, lambda: sync.ir(arm=arm(), futex=futex))
    return Library([code], isa)


class Pool:
    """A pool of `threads` threads. run(table, entries) executes a table of calls on all of them and returns when all are done.

    now() is the processor's steady counter, in its own unit, which threads write to the stamps of a traced run."""

    def __init__(self, threads: int, isa: ISA) -> None:
        """Load the native code, initialise the shared block and each thread's own, and start the threads, pinned one to a core."""
        self.threads = threads
        self.code = _loaded(isa, futex=sys.platform == "linux" and os.environ.get("BARELLM_WAIT") != "condition")
        self.pid = os.getpid()
        one = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        self._worker = one(self.code.address("worker"))
        self._lead = one(self.code.address("lead"))
        self.now = ctypes.CFUNCTYPE(ctypes.c_int64)(self.code.address("now"))
        self._stop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.code.address("stop"))
        nbytes = sync.SHARED_NBYTES + threads * specialisation.RT_NBYTES
        self._block = ctypes.create_string_buffer(nbytes + 64)
        self.shared = (ctypes.addressof(self._block) + 63) & ~63  # a cache line's boundary; the 64 bytes more are for this
        self._init_condition()
        for i in range(threads):
            self._set(self.rt(i) + specialisation.RT_THREAD, i)
            self._set(self.rt(i) + specialisation.RT_THREADS, threads)
            groups = min(threads, sync.GROUPS)
            self._set(self.rt(i) + specialisation.RT_GROUP, i * groups // threads)
            self._set(self.rt(i) + specialisation.RT_GROUPS, groups)
        self._memory: object = None
        self._closed = False
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        cpus = allowed_cpus()
        pin = os.environ.get("BARELLM_PIN", "1") != "0" and hasattr(os, "sched_setaffinity")
        masks = [{cpus[i % len(cpus)]} if pin else None for i in range(threads)]
        self._workers = [threading.Thread(target=self._work, args=(i, masks[i]), daemon=True) for i in range(1, threads)]
        self._leader = threading.Thread(target=self._serve, args=(masks[0],), daemon=True)
        try:
            for t in [*self._workers, self._leader]:
                t.start()
        except RuntimeError as error:  # a limit on processes or memory
            self._stop(self.shared)
            raise UserError(f"this machine starts no {threads} threads ({error}): set a lower BARELLM_THREADS") from error

    def rt(self, thread: int) -> int:
        """Address of a thread's block."""
        return self.shared + sync.SHARED_NBYTES + thread * specialisation.RT_NBYTES

    def bind(self, scalars: int, thread_scratch: int, thread_scratch_bytes: int, *, memory: object = None) -> None:
        """Set the addresses of the run-time scalars and of each thread's scratch. `memory` owns the code and the bytes of the runs.
        The threads keep a reference to it, because a run that Ctrl-C left behind may outlive everything else."""
        self._memory = memory
        for i in range(self.threads):
            self._set(self.rt(i) + specialisation.RT_SCALARS, scalars)
            self._set(self.rt(i) + specialisation.RT_PRIVATE, thread_scratch + i * thread_scratch_bytes)

    def run(self, table: int, entries: int, stamps: int = 0) -> None:
        """Run a table, and wait; signal handlers of the main thread still run at once. `stamps`: the address of the trace, or 0."""
        if os.getpid() != self.pid:
            raise RuntimeError("this process was forked from one with a running backend: open a new session in it")
        if self._closed:
            raise RuntimeError("the session is closed")
        done = threading.Lock()
        done.acquire()
        self._jobs.put((table, entries, stamps, done))
        done.acquire()

    def run_here(self, table: int, entries: int) -> None:
        """The same on the calling thread, for a pool of one thread: to hand a table over takes some 30 us. Signals wait."""
        assert self.threads == 1, "the other threads of a pool expect its own leader"
        (ctypes.c_int64 * 3).from_address(self.shared + sync.TABLE)[:] = (table, entries, 0)
        self._lead(self.rt(0), self.shared)

    def release(self) -> None:
        """Let the threads end after the run they are in, without waiting for it."""
        self._closed = True
        self._jobs.put(None)

    def close(self) -> None:
        """Stop the threads. Safe to call twice."""
        if os.getpid() == self.pid and self._leader.is_alive():
            self.release()
            self._leader.join()
            for t in self._workers:
                t.join()

    def _serve(self, mask: set[int] | None) -> None:
        self._settle(mask)
        rt, slots = self.rt(0), (ctypes.c_int64 * 3).from_address(self.shared + sync.TABLE)
        while (job := self._jobs.get()) is not None:
            slots[0], slots[1], slots[2], done = job
            self._lead(rt, self.shared)
            done.release()
        self._stop(self.shared)

    def _work(self, thread: int, mask: set[int] | None) -> None:
        self._settle(mask)
        self._worker(self.rt(thread), self.shared)

    @staticmethod
    def _settle(mask: set[int] | None) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if mask is not None:
            # Of this thread alone, inside the mask that the process was given. Where that is refused it runs unpinned: if it
            # died here, the others would wait for it for ever.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, mask)

    @staticmethod
    def _set(address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def _init_condition(self) -> None:
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_init(ctypes.c_void_p(self.shared + sync.MUTEX), None)
        libc.pthread_cond_init(ctypes.c_void_p(self.shared + sync.CONDITION), None)
