"""Clusters of blocks: addresses in each other's shared memory, the fence for mbarriers, and the barrier of all their threads.

A cluster runs at once, as the blocks of a machine do. In `order.py` its warps are those of one block, so what a block does in
the memory of another must be ordered as at home.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.simulators.ptx.machine import Machine, at_end, op
from tests.simulators.ptx.order import Fault
from tests.simulators.ptx.parse import Instruction


@op("mapa.shared::cluster")
def mapa(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """The same place in the shared memory of the block of a rank."""
    to, own, rank = i.operands
    at = np.broadcast_to(m.read(own, threads, "u32"), threads.shape)
    ranks = np.broadcast_to(m.read(rank, threads, "u32"), threads.shape)
    m.check_shared(at.astype(np.uint64), threads, 1)
    if (ranks >= m.cluster).any():
        raise Fault(f"rank {int(ranks.max())} in a cluster of {m.cluster}")
    m.write(to, threads, m.elsewhere(at, threads, ranks))


@op("fence.mbarrier_init.release.cluster")
def told(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """What a block has made, others of its cluster may use once they have met."""
    blocks = set(m.blocks(threads).tolist())
    for at, barrier in m.state.get("mbarriers", {}).items():
        barrier.told |= m.block_of(at) in blocks


@dataclass
class Meeting:
    """All threads of a cluster: who has arrived in this phase, what those knew, and how many phases have ended."""

    phase: int = 0
    arrived: list[int] = field(default_factory=list)
    known: list[np.ndarray] = field(default_factory=list)
    past: np.ndarray | None = None


def _meeting(m: Machine, warp: int) -> Meeting:
    made = m.state.setdefault("meetings", {})
    return made.setdefault(warp // (m.block_warps * m.cluster), Meeting())


@op("barrier.cluster.arrive")
def arrive(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    waits = m.state.setdefault("cluster phases", {})
    for warp in m.whole(threads).tolist():
        meeting = _meeting(m, warp)
        if warp in waits:
            raise Fault("a warp arrives twice at the cluster's barrier without waiting")
        waits[warp] = meeting.phase
        meeting.arrived.append(warp)
        meeting.known.append(m.order.release(warp))
        if len(meeting.arrived) == m.block_warps * m.cluster:
            meeting.past = np.max(meeting.known, 0)
            meeting.phase, meeting.arrived, meeting.known = meeting.phase + 1, [], []


@op("barrier.cluster.wait")
def wait(m: Machine, i: Instruction, threads: np.ndarray) -> np.ndarray | None:
    waits = m.state.setdefault("cluster phases", {})
    blocked = []
    for warp in m.whole(threads).tolist():
        meeting = _meeting(m, warp)
        if warp not in waits:
            raise Fault("a warp waits at the cluster's barrier and has not arrived")
        if meeting.phase == waits[warp]:
            blocked.append(warp)
            continue
        assert meeting.past is not None
        del waits[warp]
        m.order.acquire(warp, meeting.past)
    return np.array(blocked) if blocked else None


@at_end
def all_have_met(m: Machine) -> None:
    if m.state.get("cluster phases"):
        raise Fault("the kernel ends while warps have arrived at the cluster's barrier")
