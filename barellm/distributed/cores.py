"""The cores of a machine, dealt to the ranks on it."""

import os
from collections.abc import Sequence


def share(cores: Sequence[int], number: int, count: int) -> list[int]:
    """The cores of rank `number` of the `count` on this machine: a part of its own, as even as can be; shared if ranks are more."""
    if count > len(cores):
        return [cores[number % len(cores)]]
    return list(cores[number * len(cores) // count : (number + 1) * len(cores) // count])


def usable() -> list[int]:
    """The processors that this process may use; nothing where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def settle(masks: Sequence[Sequence[int]], number: int, cores: Sequence[int]) -> None:
    """Restrict this process and its future threads to its share of `cores` (equal on all ranks of the machine). `masks`: each
    rank's allowed CPUs; disjoint ones, given by the launcher, are kept. Without pinning, only the thread count follows."""
    all_allowed = [cpu for mask in masks for cpu in mask]
    if len(masks) == 1 or (all_allowed and len(all_allowed) == len(set(all_allowed))):
        return
    mine = share(cores, number, len(masks))
    os.environ.setdefault("BARELLM_THREADS", str(len(mine)))
    if all_allowed and os.environ.get("BARELLM_PIN", "1") != "0":
        os.sched_setaffinity(0, mine)
