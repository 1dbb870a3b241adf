"""A traced step as a timeline that https://ui.perfetto.dev opens: Chrome's trace format, JSON, times in microseconds.

(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: "X" are slices, "M" names of tracks.)"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from barellm.cpu.lang.sync import BARRIER
from barellm.cpu.step import CpuSession
from barellm.tools.plan.rows import place, shape, spans
from barellm.tools.profile.device_trace import DeviceStep
from barellm.tools.profile.trace import BEGIN, DONE, LEFT, TracedStep

PROCESS = 1
PYTHON = 0  # the track of the main thread, or of programs; thread i has track i + 1, a GPU's kernels have track 1

Clock = Callable[[int], int]  # ticks to nanoseconds


def events(session: CpuSession, step: TracedStep, *, title: str) -> dict[str, Any]:
    """Perfetto JSON for a CPU: Python's main thread with step and programs, and worker threads with calls and barriers."""

    def clock(tick: int) -> int:
        return round((tick - step.begin) * step.tick_s * 1e9)

    made = [_name("process_name", PYTHON, title), *_named(PYTHON, "python")]
    made.append(_slice(PYTHON, "step", "python", clock(step.begin), clock(step.end), {}))
    for program, stamps in step.runs:
        begin, end = clock(int(stamps[:, 0, BEGIN].min())), clock(int(stamps[:, -1, LEFT].max()))
        made.append(_slice(PYTHON, program, "python", begin, end, {"calls": stamps.shape[1]}))
    for thread in range(step.threads):
        made += _named(thread + 1, f"thread {thread}")
        for program, stamps in step.runs:
            made += _thread(session, stamps[thread], program, thread, clock)
    return {"traceEvents": made, "displayTimeUnit": "ms"}


def device_events(session: Any, step: DeviceStep, *, title: str) -> dict[str, Any]:
    """Perfetto JSON for a GPU: a track of programs and one with a slice per launch."""
    made = [_name("process_name", PYTHON, title), *_named(PYTHON, "programs"), *_named(PYTHON + 1, "GPU")]
    start = 0
    for program, seconds in step.launches_s:
        edges = [start, *accumulate((round(s * 1e9) for s in seconds), initial=start)][1:]
        made.append(_slice(PYTHON, program, "python", start, edges[-1], {"launches": len(edges) - 1}))
        for at, (label, name, about) in enumerate(_labels(session, program)):
            made.append(_slice(PYTHON + 1, label, name, edges[at], edges[at + 1], about))
        start = edges[-1]
    return {"traceEvents": made, "displayTimeUnit": "ms"}


def _labels(session: Any, program: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Of each call of a program, in order: (label of op, place and shape, the op's name, arguments that the viewer shows)."""
    labels, calls = [], session.calls[program]
    for op, first, stop in spans(session, program):
        several = len({call.spec for call in calls[first:stop]}) > 1
        for call in calls[first:stop]:
            part = call.spec.name if several else ""
            label = " ".join(word for word in (op.name, place(op), shape(op), part) if word)
            about = {"program": program, "layer": op.segment or "", "shape": shape(op), "kernel": call.spec.symbol()}
            labels.append((label, op.name, about))
    return labels


def _thread(session: CpuSession, stamps: np.ndarray, program: str, thread: int, clock: Clock) -> list[dict[str, Any]]:
    """Slices of one thread in a program's run: each call from BEGIN to DONE, and its barrier from DONE to LEFT."""
    made, track = [], thread + 1
    for at, (label, name, about) in enumerate(_labels(session, program)):
        begin, done, left = (clock(int(stamps[at, i])) for i in (BEGIN, DONE, LEFT))
        made.append(_slice(track, label, name, begin, done, about))
        if session.records[program][at, BARRIER // 8]:
            made.append(_slice(track, "barrier", "barrier", done, left, {"after": label}))
    return made


def _slice(track: int, name: str, category: str, begin: int, end: int, about: dict[str, Any]) -> dict[str, Any]:
    """A slice of the timeline. Times are in nanoseconds, so that slices that touch also touch in the file."""
    return {
        "ph": "X", "name": name, "cat": category, "ts": begin / 1000, "dur": (end - begin) / 1000, "pid": PROCESS,
        "tid": track, "args": about,
    }  # fmt: skip


def _named(track: int, name: str) -> list[dict[str, Any]]:
    order = {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": track, "args": {"sort_index": track}}
    return [_name("thread_name", track, name), order]


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}
