"""Messages that travel while the ranks compute.

MPI moves what is large only while somebody asks it. So a thread asks, as long as anything is on its way: a thousand times a
second, which is often enough for what a socket holds to last from one time to the next, and takes a few percent of a core."""

import threading
import time
from collections.abc import Callable
from typing import Any

NAP_S = 0.001


class Transfers:
    """Transfers by their numbers, each a list of requests. `test` says whether all requests of a list are done."""

    def __init__(self, test: Callable[[list[Any]], bool]) -> None:
        self._test = test
        self._going: dict[int, list[Any]] = {}
        self._lock = threading.Lock()  # MPI wants each request to be tested by one thread at a time
        self._some = threading.Event()
        threading.Thread(target=self._ask, name="transfers", daemon=True).start()

    def begin(self, number: int, requests: list[Any]) -> None:
        with self._lock:
            assert number not in self._going, f"transfer {number} has not ended yet"
            self._going[number] = requests
        self._some.set()

    def over(self, number: int) -> bool:
        """Whether the transfer has ended, or never begun."""
        with self._lock:
            return number not in self._going or self._ended(number)

    def _ended(self, number: int) -> bool:
        if not self._test(self._going[number]):
            return False
        del self._going[number]
        return True

    def _ask(self) -> None:
        while self._some.wait():
            with self._lock:
                for number in list(self._going):
                    self._ended(number)
                if not self._going:
                    self._some.clear()
            time.sleep(NAP_S)
