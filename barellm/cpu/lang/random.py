"""Threefry2x32-20 on i32 lanes or scalars, bit for bit what `program/ops/random.py` defines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from barellm.cpu.lang.emit import Builder
from barellm.cpu.lang.values import Value
from barellm.program.ops.random import HALF, PARITY, ROTATIONS, keep_scale, threshold

SIGN = 1 << 31


def signed(word: int) -> int:
    """The i32 with the bits of a uint32."""
    return (word + SIGN) % (2 * SIGN) - SIGN


def threefry(k: Builder, k0: Any, k1: Any, c0: Any, c1: Any) -> tuple[Value, Value]:
    """Both words; scalars (i32) stand for equal lanes where any operand is a vector."""
    keys = [k0, k1, k0 ^ k1 ^ signed(PARITY)]
    x, y = c0 + keys[0], c1 + keys[1]
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x = x + y
            y = ((y << r) | (y >> (32 - r))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + (group + 1))
    return x, y


def sample_key(k: Builder, seed: Any, step: Any, sample: Any, stream: Any) -> tuple[Value, Value]:
    """key' of a sample and stream, from i64 values: once for all its rows."""
    seed, step, sample, stream = (k.to(k.int(v), "i32") for v in (seed, step, sample, stream))
    return threefry(k, seed, step, sample, stream)


def words(k: Builder, key: tuple[Value, Value], row: Any, block: Any, part: int = 0) -> tuple[Value, Value]:
    """Words of columns 32 * block + part * lanes... and of the columns 16 further, one per lane; part < 16 / lanes."""
    first = k.to(k.int(block) * HALF + part * k.lanes, "i32")
    return threefry(k, k.splat(key[0]), k.splat(key[1]), k.splat(first) + k.iota(), k.splat(k.to(k.int(row), "i32")))


def halves(k: Builder, key: tuple[Value, Value], block: Any) -> list[Value]:
    """16 random bits for every column of row 0's block of 64, in the order of the columns, one vector after another."""
    pairs = [words(k, key, 0, block, part) for part in range(HALF // k.lanes)]
    found = []
    for of_part in zip(*pairs, strict=True):
        found += [word & 0xFFFF for word in of_part] + [word >> 16 for word in of_part]
    return found


def keep(k: Builder, word: Value, rate: float) -> Value:
    """What an element is multiplied with: 0, or 1 / (1 - rate)."""
    # Unsigned order is signed order with the top bit flipped.
    kept = (word ^ -SIGN) >= signed(threshold(rate) ^ SIGN)
    return k.select(kept, k.to(keep_scale(rate), k.vec), 0.0)


def column_blocks(lanes: int) -> Iterator[tuple[int, int]]:
    """(part, offset in the block) of the first words' vectors of 32 columns; the second words lie HALF further."""
    yield from ((part, part * lanes) for part in range(HALF // lanes))
