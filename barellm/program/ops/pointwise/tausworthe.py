"""Combined Tausworthe generators on 32-bit words: taus88 (L'Ecuyer 1996) and LFSR113 (L'Ecuyer 1999).

A generator has three or four components. Each is a word s that moves on by shifts alone,

    s' = ((s & mask) << c) ^ (((s << a) ^ s) >> b)

and a draw is the xor of all components. That takes a third of Threefry's operations, but a draw needs the one before it. So
streams are short, and each begins at a place that follows from counters, as Threefry's words do:

    key'   = threefry(key=(seed, step), counter=(sample, stream))                once per sample and stream
    column c of a row is number (c % 512) // 16 of the stream of (row, c // 512, lane c % 16)
    seeds of that stream = the words of threefry(key=key', counter=(i, row)) for i = 32 (c // 512) + lane, then i + 16

16 lanes are 16 streams side by side: 16 columns take one draw of each. The four words seed the components in their order; taus88
leaves the last one out. A word whose bits inside the mask are all zero would stay there for ever, so it gets the lowest of them.
The first draw is discarded: it takes the bits outside the mask, which belong to no cycle, out of the state."""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from barellm.program.ops.pointwise.random import HALF, keep_scale, threefry, threshold

DRAWS = 32  # of a stream, before the next block of columns begins another
BLOCK = HALF * DRAWS  # columns
ALL = 0xFFFFFFFF


@dataclass(frozen=True)
class Component:
    """One linear feedback shift register of `32 - log2(-mask)` bits, which are the upper ones of a word."""

    a: int
    b: int
    c: int
    mask: int

    @property
    def least(self) -> int:
        """The lowest bit of the mask. Seeds below it would stay zero."""
        return (self.mask ^ ALL) + 1

    def begin(self, word: np.ndarray) -> np.ndarray:
        """A seed from a random word (uint32)."""
        return np.where(word & np.uint32(self.mask), word, word | np.uint32(self.least))

    def advance(self, s: np.ndarray) -> np.ndarray:
        a, b, c = (np.uint32(n) for n in (self.a, self.b, self.c))
        return ((s & np.uint32(self.mask)) << c) ^ (((s << a) ^ s) >> b)


Generator = tuple[Component, ...]

GENERATORS: dict[str, Generator] = {
    # Periods 2^31 - 1, 2^29 - 1 and 2^28 - 1. Kernels are in circulation whose third c is 11, which has no such period.
    "taus88": (Component(13, 19, 12, 0xFFFFFFFE), Component(2, 25, 4, 0xFFFFFFF8), Component(3, 11, 17, 0xFFFFFFF0)),
    # Periods 2^31 - 1, 2^29 - 1, 2^28 - 1 and 2^25 - 1.
    "lfsr113": (Component(6, 13, 18, 0xFFFFFFFE), Component(2, 27, 2, 0xFFFFFFF8), Component(13, 21, 7, 0xFFFFFFF0),
                Component(3, 12, 13, 0xFFFFFF80)),
}  # fmt: skip


def draws(generator: Generator, states: list[np.ndarray], count: int) -> np.ndarray:
    """The next `count` draws of streams in these states (one uint32 array for each component): (count, ...)."""
    found = []
    for _ in range(count):
        states = [component.advance(s) for component, s in zip(generator, states, strict=True)]
        found.append(reduce(np.bitwise_xor, states))
    return np.stack(found)


def stream_words(
    generator: Generator, seed: int, step: int, sample: int, stream: int, rows: np.ndarray, columns: int
) -> np.ndarray:
    """Uint32 draws for the given rows, (R, columns): one per column, from the stream that the module's docstring assigns to it."""
    key = threefry(seed & ALL, step & ALL, sample & ALL, stream)
    blocks = -(-columns // BLOCK)
    first = (2 * HALF * np.arange(blocks)[:, None] + np.arange(HALF))[None]  # (1, blocks, HALF)
    row = np.asarray(rows, np.uint32)[:, None, None]
    words = [word for i in (first, first + HALF) for word in threefry(*key, i.astype(np.uint32), row)]
    states = [component.begin(word) for component, word in zip(generator, words, strict=False)]
    words_of = draws(generator, states, 1 + DRAWS)[1:]  # (DRAWS, R, blocks, HALF)
    return words_of.transpose(1, 2, 0, 3).reshape(len(rows), -1)[:, :columns]


def keep_stream(
    generator: Generator, shape: tuple[int, ...], rate: float, stream: int, seed: int, step: int, sample: int
) -> np.ndarray:
    """The factors that the elements of x (B, T, C) are multiplied with: 0 where dropped, 1 / (1 - rate) where kept; float64."""
    B, T, C = shape
    words = [stream_words(generator, seed, step, sample + b, stream, np.arange(T), C) for b in range(B)]
    return (np.stack(words) >= np.uint32(threshold(rate))) * keep_scale(rate)
