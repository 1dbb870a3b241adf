"""Which accesses to shared memory are ordered, whatever the warps' speeds: vector clocks, as race detectors have them.

Actors of a block are its warps, and its mbarriers for the bytes that arrive at them. An actor's clock counts its releases: arrivals
at barriers. A warp knows of each actor the count that it has seen by waiting for barriers. An access is ordered behind another's
if its warp knows the count that the other had then. So a missing barrier is found in every schedule, also where the result would
be right by luck.

What works on shared memory beside the warps (the tensor memory accelerator, wgmma, cp.async) holds its bytes from its start until
it is waited for. The first two see memory through the async proxy: what warps wrote must have been fenced for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
MOST_BARRIERS = 64
WORD = 2  # bytes: what one thread of a warp writes may be so small
WINDOW = 18  # bits of an address in a block's shared memory; above them stands which block, from 1 on


class Fault(AssertionError):
    """What a kernel must not do."""


class Deadlock(Fault):
    """Warps wait and nobody can go on, or they go on for ever."""


@dataclass(frozen=True)
class Held:
    """Words that something beside the warps reads, or writes, on behalf of warps."""

    order: Order
    warps: Array
    words: Array

    def read(self) -> None:
        """They have been read, as these warps know now."""
        o, local = self.order, self.warps % self.order.block_warps
        o.leaving[self.words] -= 1
        o.reads[local[:, None], self.words] = o.seen[self.warps, local][:, None]

    def written(self, actor: int, count: int, *, proxy: bool) -> None:
        """They are there, as the count of an actor of the block tells. `proxy`: through the async proxy."""
        o = self.order
        o.arriving[self.words] = False
        o.writer[self.words], o.written[self.words], o.unfenced[self.words] = actor, count, not proxy


class Order:
    """Of the accesses of some blocks, in words of `WORD` bytes. Warps are numbered over all blocks. Those of a `cluster` of blocks
    work on each other's memory, as warps of one block do; below, a block with its warps is the whole cluster, if there is one."""

    def __init__(self, blocks: int, block_warps: int, nbytes: int, cluster: int = 1) -> None:
        self.windows, self.words = cluster, -(-nbytes // WORD)
        self.block_warps = block_warps = block_warps * cluster
        local = np.tile(np.arange(block_warps), blocks // cluster)
        self.seen = np.zeros((len(local), block_warps + MOST_BARRIERS), np.int32)
        self.seen[np.arange(len(local)), local] = 1
        self.actors = np.full(blocks // cluster, block_warps)
        count = blocks * self.words
        self.writer, self.written = np.full(count, -1, np.int16), np.zeros(count, np.int32)
        self.reads = np.zeros((block_warps, count), np.int32)
        self.arriving, self.leaving, self.unfenced = (np.zeros(count, bool), np.zeros(count, np.int16), np.zeros(count, bool))

    def actor(self, warp: int) -> int:
        """A number for a new mbarrier of a warp's block."""
        block = warp // self.block_warps
        self.actors[block] += 1
        assert self.actors[block] <= self.seen.shape[1], "more mbarriers than expected"
        return int(self.actors[block]) - 1

    def at(self, addresses: Array, nbytes: int) -> Array:
        """The words of `nbytes` from each address on, on a new last axis."""
        addresses = addresses.astype(np.int64)
        first = ((addresses >> WINDOW) - 1) * self.words + ((addresses & (1 << WINDOW) - 1) // WORD)
        return first[..., None] + np.arange(max(nbytes // WORD, 1))

    # --- what warps do ---

    def release(self, warp: int) -> Array:
        """What a warp that waits for this arrival will know."""
        known = self.seen[warp].copy()
        self.seen[warp, warp % self.block_warps] += 1
        return known

    def acquire(self, warp: int, known: Array) -> None:
        np.maximum(self.seen[warp], known, out=self.seen[warp])

    def meet(self, warps: Array, others: list[Array]) -> None:
        """A barrier of warps of one block, all of which are there. `others`: what those released that arrived without waiting."""
        self.seen[warps] = np.max([*self.seen[warps], *others], 0)
        self.seen[warps, warps % self.block_warps] += 1

    def read(self, warps: Array, words: Array) -> None:
        """Of each warp (n,) the words (n, k)."""
        self._check_read(warps, words)
        local = warps % self.block_warps
        self.reads[local[:, None], words] = self.seen[warps, local][:, None]

    def write(self, warps: Array, words: Array, same: Array) -> None:
        """`same`: what is written is there already, by another warp that does the same."""
        self._check_write(warps, words, ~same)
        local = warps % self.block_warps
        self.writer[words], self.written[words] = local[:, None], self.seen[warps, local][:, None]
        self.unfenced[words] = True

    def fence(self, warps: Array) -> None:
        """What a warp wrote, or knows that others wrote, is there for the async proxy."""
        found = np.flatnonzero(self.unfenced)
        block = found // (self.words * self.windows)
        for warp in warps[np.isin(warps // self.block_warps, block)]:
            mine = found[block == warp // self.block_warps]
            self.unfenced[mine[self.seen[warp, self.writer[mine]] >= self.written[mine]]] = False

    # --- what goes on beside them ---

    def start_reading(self, warps: Array, words: Array) -> Held:
        """Through the async proxy, the same words for all of the warps."""
        for warp in warps:
            self._check_read(np.array([warp]), words[None])
        if self.unfenced[words].any():
            raise Fault("the async proxy reads what was written without a fence")
        self.leaving[words] += 1
        return Held(self, warps, words)

    def start_writing(self, warps: Array, words: Array) -> Held:
        """Of each warp (n,) the words (n, k)."""
        self._check_write(warps, words, np.array(True))
        self.arriving[words] = True
        return Held(self, warps, words)

    def came(self, warps: Array, words: Array) -> None:
        """What each of these warps started to write is there, for that warp, which has waited for it."""
        local = warps % self.block_warps
        self.arriving[words] = False
        self.writer[words], self.written[words] = local[:, None], self.seen[warps, local][:, None]
        self.unfenced[words] = True

    # --- checks ---

    def _unknown(self, warps: Array, words: Array) -> Array:
        """Which words another wrote, of whom the warp does not know it."""
        writer = self.writer[words]
        return (writer >= 0) & (self.seen[warps[:, None], writer] < self.written[words])

    def _check_read(self, warps: Array, words: Array) -> None:
        if self.arriving[words].any():
            raise Fault(f"{self._at(self.arriving[words], words)} is read while it is still arriving")
        if (unknown := self._unknown(warps, words)).any():
            raise Fault(f"{self._at(unknown, words)} is read with no barrier behind {self._writer(unknown, words)}")

    def _check_write(self, warps: Array, words: Array, changes: Array) -> None:
        if self.arriving[words].any() or self.leaving[words].any():
            busy = self.arriving[words] | (self.leaving[words] > 0)
            raise Fault(f"{self._at(busy, words)} is overwritten while a copy or a product is under way")
        if (unknown := self._unknown(warps, words) & changes).any():
            raise Fault(f"{self._at(unknown, words)} is overwritten with no barrier behind {self._writer(unknown, words)}")
        known = self.seen[warps, : self.block_warps].T[:, :, None].copy()
        known[warps % self.block_warps, np.arange(len(warps))] = np.iinfo(np.int32).max
        if (late := (self.reads[:, words] > known).any(0) & changes).any():
            raise Fault(f"{self._at(late, words)} is overwritten with no barrier behind a warp that reads it")

    def _at(self, wrong: Array, words: Array) -> str:
        return f"byte {WORD * (int(words[np.broadcast_to(wrong, words.shape)][0]) % self.words)} of shared memory"

    def _writer(self, wrong: Array, words: Array) -> str:
        actor = int(self.writer[words][wrong][0])
        return f"warp {actor}, which wrote it" if actor < self.block_warps else "its mbarrier"
