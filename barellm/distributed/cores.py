"""The cores of a machine, dealt to the ranks on it."""

import os
from collections.abc import Sequence


def share(cores: Sequence[int], number: int, count: int) -> list[int]:
    """The cores of rank `number` of the `count` on this machine: a part that no other has, as even as can be. Where there are more
    ranks than cores, some share one."""
    if count > len(cores):
        return [cores[number % len(cores)]]
    return list(cores[number * len(cores) // count : (number + 1) * len(cores) // count])


def usable() -> list[int]:
    """The processors that this process may use; nothing where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def settle(masks: Sequence[Sequence[int]], number: int, cores: Sequence[int]) -> None:
    """Keep this process, and all threads that it will start, on its share of `cores`, which all ranks of this machine know as the
    same. `masks`: the processors that each of them may use. Where the launcher has given each its own already, they stay. Where
    threads are not pinned, the share decides their number only."""
    together = [cpu for mask in masks for cpu in mask]
    if len(masks) == 1 or (together and len(together) == len(set(together))):
        return
    own = share(cores, number, len(masks))
    os.environ.setdefault("BARELLM_THREADS", str(len(own)))
    if together and os.environ.get("BARELLM_PIN", "1") != "0":
        os.sched_setaffinity(0, own)
