"""Threefry2x32-20 on i32 lanes or scalars, bit for bit what `program/ops/pointwise/random.py` defines."""

from collections.abc import Iterator
from typing import Any

from barellm.cpu.lang.emit import Builder
from barellm.cpu.lang.values import Value
from barellm.program.ops.pointwise.random import HALF, PARITY, ROTATIONS, SHARED, keep_scale, threshold

SIGN = 1 << 31
GROUPS = 5  # of four rounds
SHARED_WIDTH = 2 * SHARED * HALF  # columns that the shared words of HALF calls serve


def signed(word: int) -> int:
    """The i32 with the bits of a uint32."""
    return (word + SIGN) % (2 * SIGN) - SIGN


def rounds(k: Builder, k0: Any, k1: Any, c0: Any, c1: Any) -> Iterator[tuple[Value, Value]]:
    """Threefry2x32-20 (Salmon et al. 2011) of key (k0, k1) and counter (c0, c1): yields both words after each of the GROUPS groups
    of four rounds; the last are the result. So a caller can emit other work between the groups: a word is a long chain."""
    keys = [k0, k1, k0 ^ k1 ^ signed(PARITY)]
    x, y = c0 + keys[0], c1 + keys[1]
    for group in range(GROUPS):
        for r in ROTATIONS[group % 2]:
            x = x + y
            y = ((y << r) | (y >> (32 - r))) ^ x  # rotate left by r
        # Key injection: the key words in turn, and the number of the injection.
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + (group + 1))
        yield x, y


def threefry(k: Builder, k0: Any, k1: Any, c0: Any, c1: Any) -> tuple[Value, Value]:
    """Both words of Threefry2x32-20; scalars (i32) stand for equal lanes where any operand is a vector."""
    *_, result = rounds(k, k0, k1, c0, c1)
    return result


def sample_key(k: Builder, seed: Any, step: Any, sample: Any, stream: Any) -> tuple[Value, Value]:
    """The key (two i32) of a sample and stream, derived from i64 values: once for all its rows."""
    seed, step, sample, stream = (k.to(k.int(v), "i32") for v in (seed, step, sample, stream))
    return threefry(k, seed, step, sample, stream)


def _call(k: Builder, key: tuple[Value, Value], row: Any, block: Any, part: int) -> tuple[Value, Value, Value, Value]:
    """Operands of the calls of a block of HALF, `lanes` of them from number part * lanes on."""
    first = k.to(k.int(block) * HALF + part * k.lanes, "i32")
    return k.splat(key[0]), k.splat(key[1]), k.splat(first) + k.iota(), k.splat(k.to(k.int(row), "i32"))


def words(k: Builder, key: tuple[Value, Value], row: Any, block: Any, part: int = 0) -> tuple[Value, Value]:
    """Random words (i32 lanes) of `row`: of columns 2 HALF block + part * lanes..., and those HALF further; part < HALF / lanes."""
    return threefry(k, *_call(k, key, row, block, part))


def shared_words(k: Builder, key: tuple[Value, Value], block: Any) -> Iterator[list[Value]]:
    """The words of row 0's block of SHARED_WIDTH columns, all first words, then all second ones: yielded after each group of
    rounds, as by `rounds`; the last are the result."""
    parts = [rounds(k, *_call(k, key, 0, block, part)) for part in range(HALF // k.lanes)]
    for after_group in zip(*parts, strict=True):
        yield [x for x, _ in after_group] + [y for _, y in after_group]


def shared_word(k: Builder, words: list[Value], column: int) -> Value:
    """The word (i32 lanes) for `column` of the block and the next lanes: one of the `words` of `shared_words`, rotated by 0, 8, 16
    or 24 bits, so that SHARED columns share it."""
    word = words[column // (SHARED * HALF) * (HALF // k.lanes) + column % HALF // k.lanes]
    bits = 8 * (column // HALF % SHARED)
    return (word >> bits) | (word << (32 - bits)) if bits else word


def keep(k: Builder, word: Value, rate: float) -> Value:
    """The factor of an element: 0, or 1 / (1 - rate)."""
    # Unsigned order is signed order with the top bit flipped.
    kept = (word ^ -SIGN) >= signed(threshold(rate) ^ SIGN)
    return k.select(kept, k.to(keep_scale(rate), k.vec), 0.0)


def column_blocks(lanes: int) -> Iterator[tuple[int, int]]:
    """(part, offset in the block) of the first words' vectors of 32 columns; the second words lie HALF further."""
    yield from ((part, part * lanes) for part in range(HALF // lanes))
