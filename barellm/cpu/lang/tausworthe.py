"""Combined Tausworthe generators on i32 lanes, bit for bit what `program/ops/pointwise/tausworthe.py` defines."""

from functools import reduce
from typing import Any

from barellm.cpu.lang.emit import Builder
from barellm.cpu.lang.random import signed, threefry
from barellm.cpu.lang.values import Value, Var
from barellm.program.ops.pointwise import random, tausworthe


def seed_state(k: Builder, component: tausworthe.Component, word: Value) -> Value:
    """The initial state of a component from a random word: one whose upper bits (`mask`) are not all zero."""
    return k.select((word & signed(component.mask)).equals(0), word | component.least, word)


def advance(component: tausworthe.Component, s: Value) -> Value:
    """The state after `s` of one component (L'Ecuyer 1996), which is also its output."""
    return ((s & signed(component.mask)) << component.c) ^ (((s << component.a) ^ s) >> component.b)


class Streams:
    """The HALF streams of one block of columns of one row, in as many vectors as that takes."""

    def __init__(self, k: Builder, bits: str, key: tuple[Value, Value], row: Any, block: Any) -> None:
        """Seed the streams of block `block` of columns of `row`. `key` is `random.sample_key`'s, `bits` the generator's name in
        GENERATORS. `parts`: the states of the components, for each vector of streams."""
        self.generator = tausworthe.GENERATORS[bits]
        k0, k1, rows = k.splat(key[0]), k.splat(key[1]), k.splat(k.to(k.int(row), "i32"))
        self.parts: list[list[Var]] = []
        for part in range(random.HALF // k.lanes):
            i = k.splat(k.to(k.int(block) * (2 * random.HALF) + part * k.lanes, "i32")) + k.iota()
            words = [word for call in (i, i + random.HALF) for word in threefry(k, k0, k1, call, rows)]
            seeds = [seed_state(k, c, word) for c, word in zip(self.generator, words, strict=False)]
            self.parts.append([k.var(advance(c, s)) for c, s in zip(self.generator, seeds, strict=True)])

    def draw(self) -> list[Value]:
        """The next word of every stream, HALF / lanes vectors: the components' states are advanced and combined by xor."""
        drawn = []
        for states in self.parts:
            words = [advance(c, s.value) for c, s in zip(self.generator, states, strict=True)]
            for state, word in zip(states, words, strict=True):
                state.value = word
            drawn.append(reduce(lambda a, b: a ^ b, words))
        return drawn
