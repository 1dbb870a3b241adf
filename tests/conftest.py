"""For all tests."""

import signal


def pytest_configure() -> None:
    """A process started by nohup or in the background of a script ignores signals, and so would every process that a test
    starts."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
