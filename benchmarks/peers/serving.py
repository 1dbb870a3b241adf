"""What a peer's process does whose calls are timed in turns with ours: prints a JSON line about itself, then answers each line
{"case", "what", "calls"} of standard input with the seconds of that many calls, or the error of one that failed.

On a GPU the calls of a turn are queued one behind the other and each gets the mean, by the GPU's own clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]


def serve(cases: list[dict[str, Any]], make: Callable[..., dict[str, Call]], device: str) -> None:
    """`make(device=..., **case)`: calls by name. One case's tensors are there at a time."""
    torch.manual_seed(0)
    facts = {"version": torch.__version__, "threads": torch.get_num_threads()}
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    print(json.dumps(facts), flush=True)
    at, made = -1, {}
    for line in sys.stdin:
        requested = json.loads(line)
        try:
            if requested["case"] != at:
                at, made = -1, {}
                at, made = requested["case"], make(device=device, **cases[requested["case"]])
            answer: dict[str, Any] = {"s": seconds(made[requested["what"]], requested["calls"], device)}
        except RuntimeError as error:  # it has no kernel for this case, say
            answer = {"error": str(error).strip().partition("\n")[0]}
        print(json.dumps(answer), flush=True)


def seconds(call: Call, calls: int, device: str) -> list[float]:
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return [begin.elapsed_time(end) / 1e3 / calls] * calls
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found
