"""Slots, the rows of the KV caches: which are free, and which ids they hold keys and values of.

What a prompt shares with a text that a slot holds, drawn tokens included, is copied instead of computed: the bits of a token's keys
and values are a function of the ids up to it, however they were fed (docs/generation.md). With quantized weights they depend on how
the prompt was cut, so there whole pieces of prompts are shared alone."""

from typing import Any


class Slots:
    """`count` slots of a session's caches; multiples of `grain` tokens are shared."""

    def __init__(self, session: Any, count: int, grain: int) -> None:
        self.grain = grain
        self.free = list(range(count))  # the least recently used first
        self.held: list[list[int]] = [[] for _ in range(count)]  # the ids of what each may share
        caches = [t for t in session.tensors.values() if t.role == "cache" and t.name.endswith("_cache")]
        self.nbytes = sum(t.nbytes for t in caches)
        self.caches = [session.stored(t) for t in caches]  # (slots, positions, C) each, the memory itself

    def take(self, prompt: tuple[int, ...], *, share: bool) -> tuple[int, int]:
        """Allocate a slot for a prompt; returns (slot, number of prompt tokens already in its cache, fewer than all). With `share`,
        the longest common prefix with any slot's text is copied (prefix caching)."""
        shared = [self._shared(held, prompt) if share else 0 for held in self.held]
        donor = max(range(len(shared)), key=lambda slot: (shared[slot], slot in self.free, -len(self.held[slot])))
        common = shared[donor]
        slot = next((slot for slot in self.free if not self.held[slot]), self.free[0])
        if common and donor in self.free and len(self.held[donor]) == common:  # nothing else is lost
            slot = donor
        for rows in self.caches if slot != donor else ():
            rows[slot, :common] = rows[donor, :common]
        self.free.remove(slot)
        self.held[slot] = [*prompt[:common]]
        return slot, common

    def _shared(self, held: list[int], prompt: tuple[int, ...]) -> int:
        pairs = zip(held, prompt[:-1], strict=False)
        n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(prompt) - 1))
        return n - n % self.grain
