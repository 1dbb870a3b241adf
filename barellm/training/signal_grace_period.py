"""Preemption: saving within the grace period that Slurm or Kubernetes leaves between SIGTERM and SIGKILL."""

import os
import threading
import time
from types import TracebackType

from barellm.checkpoint import checkpoint
from barellm.training.console import Console
from barellm.training.loop import Loop
from barellm.training.stopping import Stopping

POLL_S = 0.05


class SignalGracePeriod:
    """While entered, a thread waits for SIGTERM. The loop gets half of the time to end its micro-batch and to begin the last save.
    If it has not, the thread saves the last complete step itself: forward and backward change neither weights nor the optimizer's
    state, so their bytes are those of that step even while a micro-batch runs. At the end of the time the process ends in any case:
    whoever enters it leaves it last, for what is closed at a run's end may hang too.

    The thread cannot save where the session belongs to one thread, as that of a GPU does, or where a step adds to the gradients of
    the one before; there the micro-batch must end in time."""

    def __init__(self, seconds: float, *, loop: Loop, stop: Stopping, console: Console) -> None:
        self._seconds, self._loop, self._stop, self._console = seconds, loop, stop, console
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signal-grace-period", daemon=True)

    def __enter__(self) -> "SignalGracePeriod":
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()

    def _watch(self) -> None:
        """Thread: after SIGTERM, save the last complete step if the loop has not begun its last save within half the period."""
        while self._stop.terminated is None:
            if self._over.wait(POLL_S):
                return
        half, end = self._stop.terminated + self._seconds / 2, self._stop.terminated + self._seconds
        # A thread of its own, for a disk may be too slow for the save below.
        threading.Thread(target=self._end, args=(end,), name="signal-grace-period-end", daemon=True).start()
        while time.monotonic() < half:
            if self._over.wait(POLL_S):
                return
        if not self._loop.saving.last_began:
            self._save()

    def _end(self, end: float) -> None:
        """Thread: end the process when the period is over, saying which checkpoint is the newest."""
        if not self._over.wait(max(0.0, end - time.monotonic())):
            step, saved = self._loop.progress.step, self._loop.saving.saved
            if saved is None:
                held = "no checkpoint was saved"
            elif checkpoint.step_of(saved) == step:
                held = f"{saved} holds its last step"
            else:
                held = f"step {step} was not saved, {saved} is the newest checkpoint"
            self._exit(f"the grace period of {self._seconds:g} s is over, and the run is ended: {held}")

    def _save(self) -> None:
        """Save the last complete step while the micro-batch runs, and end the process. Return if that cannot be done."""
        saving = self._loop.saving
        with saving.changing:  # to the end of the process, so that neither an update nor another save begins
            point = self._loop.point()
            if saving.last_began or not saving.still("forward_backward", point) or not saving.now_or_warn(point):
                return
            self._exit(f"stopped inside step {point.step + 1}: a run resumed from {saving.saved} repeats it")

    def _exit(self, words: str) -> None:
        self._console.line(words)
        os._exit(self._stop.status)
