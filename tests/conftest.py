"""For all tests."""

import signal


def pytest_configure() -> None:
    """A process started in the background of a script ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
