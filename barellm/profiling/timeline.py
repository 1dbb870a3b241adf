"""A traced step as a timeline that https://ui.perfetto.dev opens: Chrome's trace format, JSON, times in microseconds.

(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: "X" are slices, "M" names of tracks.)
"""

from __future__ import annotations

from typing import Any

from barellm.cpu.lang.sync import BARRIER
from barellm.cpu.step import CpuSession
from barellm.profiling.plan import STEP
from barellm.profiling.trace import BEGIN, DONE, LEFT, TracedStep, place, shape, spans

PROCESS = 1
PYTHON = 0  # the track of the main thread; thread i has track i + 1


def events(session: CpuSession, step: TracedStep, *, title: str) -> dict[str, Any]:
    """The whole file. A track for Python's main thread with the step and its two programs, and one for each thread, with a slice
    for every call, named by op, place and shape, and for every barrier."""
    made = [_name("process_name", PYTHON, title), *_named(PYTHON, "python")]
    made.append(_slice(step, PYTHON, "step", "python", step.begin, step.end, {}))
    for program in STEP:
        stamps = step.stamps[program]
        begin, end = int(stamps[:, 0, BEGIN].min()), int(stamps[:, -1, LEFT].max())
        made.append(_slice(step, PYTHON, program, "python", begin, end, {"calls": stamps.shape[1]}))
    for thread in range(step.threads):
        made += _named(thread + 1, f"thread {thread}")
        for program in STEP:
            made += _calls(session, step, program, thread)
    return {"traceEvents": made, "displayTimeUnit": "ms"}


def _calls(session: CpuSession, step: TracedStep, program: str, thread: int) -> list[dict[str, Any]]:
    made = []
    calls, records, track = session.calls[program], session.records[program], thread + 1
    for op, first, stop in spans(session, program):
        several = len({call.spec for call in calls[first:stop]}) > 1
        for at in range(first, stop):
            part = calls[at].spec.name if several else ""
            label = " ".join(word for word in (op.name, place(op), shape(op), part) if word)
            begin, done, left = (int(step.stamps[program][thread, at, i]) for i in (BEGIN, DONE, LEFT))
            about = {
                "program": program,
                "layer": op.segment or "",
                "shape": shape(op),
                "kernel": calls[at].spec.symbol(),
            }
            made.append(_slice(step, track, label, op.name, begin, done, about))
            if records[at, BARRIER // 8]:
                made.append(_slice(step, track, "barrier", "barrier", done, left, {"after": label}))
    return made


def _slice(
    step: TracedStep, track: int, name: str, category: str, begin: int, end: int, about: dict[str, Any]
) -> dict[str, Any]:
    """Both ends are rounded to nanoseconds by themselves, so what touches in ticks touches here."""
    ts, te = (round((tick - step.begin) * step.tick_s * 1e9) for tick in (begin, end))
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": ts / 1000,
        "dur": (te - ts) / 1000,
        "pid": PROCESS,
        "tid": track,
        "args": about,
    }


def _named(track: int, name: str) -> list[dict[str, Any]]:
    order = {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": track, "args": {"sort_index": track}}
    return [_name("thread_name", track, name), order]


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}
