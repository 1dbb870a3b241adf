"""The pool: every thread walks the table, barriers hold, waits sleep, forks are refused, signals are not held up."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from barellm.cpu import jit
from barellm.cpu.isa import host
from barellm.cpu.kernel import Specialisation
from barellm.cpu.lang.sync import RECORD_NBYTES, STAMPS
from barellm.cpu.threads import Pool, thread_count
from barellm.errors import UserError
from barellm.program import scalars


def relay(k, cells, turn) -> None:
    """Every thread adds up all cells, then the sum (equal for all) goes to its own cell of the next row."""
    total = k.var(0)
    with k.loop(0, k.threads) as i:
        total.value = total.value + cells.get(turn * 64 + i)
    cells.put(total.value + 1, (turn + 1) * 64 + k.thread)


class Table:
    def __init__(self, turns: int) -> None:
        spec = Specialisation(relay, ("i64", "int"), ())
        self.code = jit.Library([jit.compile_object(spec.ir(host()), host())], host())
        self.cells = np.zeros((turns + 1) * 64, np.int64)
        self.args = np.array([[self.cells.ctypes.data, t] for t in range(turns)], np.int64)
        self.block = ctypes.create_string_buffer((turns + 1) * RECORD_NBYTES)
        self.address = (ctypes.addressof(self.block) + RECORD_NBYTES - 1) & -RECORD_NBYTES
        self.entries = turns
        for t in range(turns):
            record = (ctypes.c_int64 * 3).from_address(self.address + t * RECORD_NBYTES)
            record[:] = (self.code.address(spec.symbol()), self.args[t].ctypes.data, 1)


def expected(threads: int, turns: int) -> int:
    value = 0
    for _ in range(turns):
        value = (threads * value + 1) % (1 << 64)
    return value - (1 << 64) if value >= 1 << 63 else value


@pytest.mark.parametrize("wait", ["futex", "condition"])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_barriers_hold_for_any_thread_count(monkeypatch, threads, wait):
    monkeypatch.setenv("BARELLM_WAIT", wait)
    table = Table(40)
    pool = Pool(threads, host())
    pool.bind(np.zeros(scalars.NBYTES, np.uint8).ctypes.data, 0, 0)
    for _ in range(20):
        table.cells[64:] = -1
        pool.run(table.address, table.entries)
        assert (table.cells[-64 : -64 + threads] == expected(threads, 40)).all()
        if threads == 3:
            time.sleep(0.002)  # long enough for the workers to fall asleep
    pool.close()


@pytest.mark.parametrize("wait", ["futex", "condition"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_traced_walk_is_stamped_by_every_thread_in_order(monkeypatch, threads, wait):
    monkeypatch.setenv("BARELLM_WAIT", wait)
    table = Table(40)
    pool = Pool(threads, host())
    pool.bind(np.zeros(scalars.NBYTES, np.uint8).ctypes.data, 0, 0)
    stamps = np.full((threads + 1, 40, STAMPS), -1, np.int64)  # one row more than there are threads
    for _ in range(5):
        before = pool.now()
        pool.run(table.address, table.entries, stamps.ctypes.data)
        after = pool.now()
        assert (table.cells[-64 : -64 + threads] == expected(threads, 40)).all()
        lines = stamps[:threads].reshape(threads, -1)
        assert (np.diff(lines) >= 0).all() and (lines[:, 0] >= before).all() and (lines[:, -1] <= after).all()
        done, left = stamps[:threads, :, 1], stamps[:threads, :, 2]
        assert (left >= done.max(axis=0)).all(), "nobody leaves a barrier before the last one has come"
        kept = stamps.copy()
        pool.run(table.address, table.entries)
        assert (stamps == kept).all() and (stamps[threads] == -1).all()
    pool.close()


@pytest.mark.alone
def test_idle_threads_sleep():
    pool = Pool(2, host())
    pool.run(Table(2).address, 0)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    pool.close()


def test_a_fork_is_refused():
    pool = Pool(2, host())
    table = Table(1)
    child = os.fork()
    if child == 0:
        try:
            pool.run(table.address, 1)
        except RuntimeError as e:
            os._exit(0 if "forked" in str(e) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


def share(k, units) -> None:
    """`units` pieces of some 20 us, that whoever is free claims."""
    with k.parallel_for(units):
        x = k.var(1)
        with k.loop(0, 40_000) as i:
            x.value = x.value * 3 + i
        with k.when(x.value.equals(0)):
            k.line('call void asm sideeffect "", ""()')


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_two_threads_on_one_core_lose_little_to_their_barriers():
    """A wait that only spins loses a time slice of milliseconds at each of the 100 barriers."""
    table = shared_table(100)
    mask = os.sched_getaffinity(0)
    seconds = {}
    os.sched_setaffinity(0, {min(mask)})
    try:
        pools = {n: Pool(n, host()) for n in (1, 2)}
    finally:
        os.sched_setaffinity(0, mask)
    for threads, pool in [*pools.items()] * 5:
        begin = time.perf_counter()
        pool.run(table.address, table.entries)
        seconds.setdefault(threads, []).append(time.perf_counter() - begin)
    for pool in pools.values():
        pool.close()
    assert min(seconds[2]) < 2.3 * min(seconds[1]), seconds


def shared_table(turns: int) -> Table:
    table = Table(turns)
    spec = Specialisation(share, ("int",), ())
    table.code = jit.Library([jit.compile_object(spec.ir(host()), host())], host())
    table.args[:, 0] = 8
    for t in range(turns):
        ctypes.c_int64.from_address(table.address + t * RECORD_NBYTES).value = table.code.address(spec.symbol())
    return table


def test_threads_that_cannot_start_are_one_line_and_leave_none_behind(monkeypatch):
    started, start = [], threading.Thread.start

    def limited(thread):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(UserError, match=r"this machine starts no 5 threads .*BARELLM_THREADS"):
        Pool(5, host())
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


def test_a_closed_pool_refuses_to_run():
    pool = Pool(2, host())
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(Table(1).address, 1)


def test_a_machine_that_refuses_to_pin_runs_all_the_same(monkeypatch):
    """A processor taken away since the mask was read, or a sandbox: a thread that died of it left the others waiting."""

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    pool, table = Pool(3, host()), Table(2)
    runner = threading.Thread(target=pool.run, args=(table.address, table.entries), daemon=True)
    runner.start()
    runner.join(10)
    assert not runner.is_alive()
    pool.close()


def test_thread_count_from_the_environment(monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "5")
    assert thread_count() == 5
    monkeypatch.setenv("BARELLM_THREADS", "none")
    with pytest.raises(UserError, match="BARELLM_THREADS is 'none'"):
        thread_count()


LONG_STEP = """
import signal, threading, time, os, sys
sys.path.insert(0, {tests!r})
from test_threads import spin_table
from barellm.cpu.isa import host
from barellm.cpu.threads import Pool
pool = Pool(2, host())
table = spin_table()
def stop(*_):
    print(f"handled {{time.monotonic() - sent:.3f}}", flush=True)
    os._exit(0)
signal.signal(signal.SIGINT, stop)
def send():
    global sent
    time.sleep(0.3)
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
pool.run(table.address, 1)
print("the step ended first")
"""


def spin(k, turns) -> None:
    """About `turns` cycles of nothing."""
    x = k.var(1)
    with k.loop(0, turns) as i:
        x.value = x.value * 3 + i
    with k.when(x.value.equals(0)):
        k.line('call void asm sideeffect "", ""()')


def spin_table() -> Table:
    table = Table(1)
    spec = Specialisation(spin, ("int",), ())
    table.code = jit.Library([jit.compile_object(spec.ir(host()), host())], host())
    table.args[0, 0] = 20_000_000_000
    record = (ctypes.c_int64 * 4).from_address(table.address)
    record[0] = table.code.address(spec.symbol())
    return table


@pytest.mark.alone
def test_a_signal_is_handled_in_the_middle_of_a_long_step():
    code = LONG_STEP.format(tests=os.path.dirname(__file__))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.startswith("handled"), out
    assert float(out.stdout.split()[1]) < 0.3
