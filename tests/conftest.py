"""For all tests."""

import os
import signal

import pytest

from barellm.cpu.threads import thread_count
from barellm.runtime.memory import memory_limit

WORKER_BYTES = 2 << 30  # of memory, that a process of tests may need


def pytest_configure() -> None:
    """A process started by nohup or in the background of a script ignores signals, and so would every process that a test
    starts. Tests that run side by side leave it to the system on which processor: each would pin its first thread to the first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ |= {"BARELLM_PIN": "0", "OPENBLAS_NUM_THREADS": "1"}
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A control group may allow fewer processors than pytest-xdist counts, and less memory than they would fill."""
    return max(1, min(thread_count(), memory_limit()[0] // WORKER_BYTES))
