"""Slots, the rows of the KV caches: which are free, and which beginnings of prompts they hold.

What prompts share is copied instead of computed, in whole pieces: they are cut at the same positions whatever the load, so the
bits of a piece's keys and values are a function of the ids up to its end. Those of drawn tokens, made one by one, are not."""

from typing import Any


class Slots:
    """`count` slots of a session's caches, and pieces of `piece` tokens."""

    def __init__(self, session: Any, count: int, piece: int) -> None:
        self.piece = piece
        self.free = list(range(count))  # the least recently used first
        self.held: list[tuple[int, ...]] = [()] * count  # the ids of each slot's whole pieces
        caches = [t for t in session.tensors.values() if t.role == "cache" and t.name.endswith("_cache")]
        self.nbytes = sum(t.nbytes for t in caches)
        self.caches = [session.stored(t) for t in caches]  # (slots, positions, C) each, the memory itself

    def take(self, prompt: tuple[int, ...], *, share: bool) -> tuple[int, int]:
        """A free slot, and how many tokens of the prompt it holds then, fewer than all: with `share` those that any slot holds."""
        shared = [self._shared(held, prompt) if share else 0 for held in self.held]
        donor = max(range(len(shared)), key=lambda slot: (shared[slot], slot in self.free, -len(self.held[slot])))
        count = shared[donor]
        slot = next((slot for slot in self.free if not self.held[slot]), self.free[0])
        if count and donor in self.free and len(self.held[donor]) == count:  # nothing else is lost
            slot = donor
        for rows in self.caches if slot != donor else ():
            rows[slot, :count] = rows[donor, :count]
        self.free.remove(slot)
        self.held[slot] = prompt[:count]
        return slot, count

    def _shared(self, held: tuple[int, ...], prompt: tuple[int, ...]) -> int:
        n, piece = 0, self.piece
        while n + piece < len(prompt) and held[n : n + piece] == prompt[n : n + piece]:
            n += piece
        return n
