"""Counter-based random bits: Threefry2x32-20 (Salmon et al. 2011, Random123). All arithmetic is uint32, modulo 2^32.

One definition for every backend, for any split into micro-batches and for any sequence length:

    key'  = threefry(key=(seed, step), counter=(sample, stream))      once per sample and stream
    words = threefry(key=key', counter=(i, row))                      two words per call
    column c of a row uses word (c // 16) % 2 of the call i = 16 * (c // 32) + c % 16

so 16 lanes with consecutive i give columns 32b .. 32b+15 from the first words and 32b+16 .. 32b+31 from the second: no
shuffles on 4, 8 or 16 lanes. Where some 16 bits are enough a word serves four columns, each of which begins at another byte:
column c has word (c // 64) % 2 of the call i = 16 * (c // 128) + c % 16, rotated right by 8 ((c // 16) % 4) bits.

`sample` is the sample's index in the data order (scalar `sample` + row of the batch), `stream` the number of the random op in the
program, `row` the position t (attention: t * heads + head), `column` the channel (attention: the key's position). Initialisation
uses step 0 and sample 0; training steps count from 1. Streams from STATE_STREAMS on round the moments."""

from math import pi
from typing import ClassVar

import numpy as np

from barellm.program.dtypes import round_to_bf16
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor

PARITY = 0x1BD11BDA  # Threefish's constant for 32-bit words, of which the third word of the key is made
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of four rounds, and of the next four, in turn
HALF = 16  # columns that the first words of 16 consecutive calls serve; the second words serve the next 16
SHARED = 4  # columns that a shared word serves
STATE_STREAMS = 1 << 16


def threefry(k0, k1, c0, c1) -> tuple[np.ndarray, np.ndarray]:
    """Both words of Threefry2x32-20 of the key (k0, k1) and the counter (c0, c1); operands are broadcast. 20 rounds in groups of
    four, after each of which the next two of the three key words and the group's number are added (key injection)."""
    keys = [np.asarray(k, dtype=np.uint32) for k in (k0, k1)]
    keys.append(keys[0] ^ keys[1] ^ np.uint32(PARITY))
    with np.errstate(over="ignore"):
        x = np.asarray(c0, dtype=np.uint32) + keys[0]
        y = np.asarray(c1, dtype=np.uint32) + keys[1]
        x, y = np.broadcast_arrays(x, y)
        for group in range(5):
            for r in ROTATIONS[group % 2]:
                x = x + y
                y = ((y << np.uint32(r)) | (y >> np.uint32(32 - r))) ^ x
            x = x + keys[(group + 1) % 3]
            y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def calls(seed: int, step: int, sample: int, stream: int, rows: np.ndarray, columns: int):
    """The first and the second words of the generator's calls for `rows` (R) of so many columns: two uint32 arrays
    (R, ceil(columns / 32) * 16), [row, i]."""
    k0, k1 = threefry(seed & 0xFFFFFFFF, step & 0xFFFFFFFF, sample & 0xFFFFFFFF, stream)
    i = np.arange(-(-columns // (2 * HALF)) * HALF, dtype=np.uint32)
    return threefry(k0, k1, i[None, :], np.asarray(rows, dtype=np.uint32)[:, None])


def to_columns(first: np.ndarray, second: np.ndarray, columns: int) -> np.ndarray:
    """Values made of the first and second words of `calls`, (R, I) each, in the order of the columns: (R, columns), 16 of the
    first, then 16 of the second, and so on."""
    rows = first.shape[0]
    return np.stack([first.reshape(rows, -1, HALF), second.reshape(rows, -1, HALF)], axis=2).reshape(rows, -1)[:, :columns]


def words(seed: int, step: int, sample: int, stream: int, rows: np.ndarray, columns: int) -> np.ndarray:
    """One uint32 word per (row, column): (R, columns)."""
    return to_columns(*calls(seed, step, sample, stream, rows, columns), columns)


def shared_words(seed: int, step: int, sample: int, stream: int, columns: int) -> np.ndarray:
    """Words for columns of row 0 that need 16 random bits each, (columns,) uint32: each word serves SHARED columns, of which the
    i-th has it rotated right by 8 i bits."""
    both = calls(seed, step, sample, stream, np.zeros(1), -(-columns // SHARED))
    rotations = [(word, np.uint32(8 * i)) for word in both for i in range(SHARED)]
    rotated = [(word >> r) | (word << (np.uint32(32) - r) if r else np.uint32(0)) for word, r in rotations]
    return np.stack([word.reshape(-1, HALF) for word in rotated], axis=1).reshape(-1)[:columns]


def threshold(rate: float) -> int:
    """An element is kept if its word is at least this."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep_scale(rate: float) -> float:
    return 1.0 / (1.0 - rate)


def keep(seed: int, step: int, sample: int, stream: int, rows: np.ndarray, columns: int, rate: float) -> np.ndarray:
    """The factors of dropout: 0 where an element is dropped, 1 / (1 - rate) where it is kept; (R, columns) float64."""
    kept = words(seed, step, sample, stream, rows, columns) >= np.uint32(threshold(rate))
    return kept * keep_scale(rate)


def keep_batch(shape: tuple[int, ...], rate: float, stream: int, seed: int, step: int, sample: int) -> np.ndarray:
    B, T, C = shape
    return np.stack([keep(seed, step, sample + b, stream, np.arange(T), C, rate) for b in range(B)])


class Init(Op):
    """The ops below: a parameter is overwritten, and its rows from `valid_rows` on become zero."""

    optional = ("bf16",)
    inplace: ClassVar[dict[str, str]] = {"param": "param"}

    def infer(self, param: Tensor) -> dict[str, Spec]:
        return {"param": (param.shape, param.dtype)}

    def filled(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """What the parameter becomes, from a value for each of its elements."""
        y = values.reshape(self.param.shape)
        y[self.valid_rows :] = 0
        return {"param": round_to_bf16(y) if self.bf16 else y}

    def bytes(self) -> int:
        return self.param.nbytes


class NormalInit(Init):
    """param = std * normal, rows from `valid_rows` on zero. Box-Muller on the two words of a call, 24 bits of each:

    radius = sqrt(-2 ln((first // 256 + 1) / 2^24)), angle = 2 pi (second // 256) / 2^24;
    the first word's column gets radius * cos(angle), the second's radius * sin(angle). A vector is one row. With `bf16` the
    numbers are rounded to the nearest bf16."""

    name = "normal_init"
    scalars = ("seed",)
    flops_per_element = (60, "param")

    def reference(self, param, seed):
        flat = param.reshape(-1, param.shape[-1])
        first, second = calls(seed, 0, 0, self.stream, np.arange(flat.shape[0]), flat.shape[1])
        radius = np.sqrt(-2 * np.log(((first >> np.uint32(8)) + 1.0) / 2**24))
        angle = 2 * pi / 2**24 * (second >> np.uint32(8))
        return self.filled(self.std * to_columns(radius * np.cos(angle), radius * np.sin(angle), flat.shape[1]))


class UniformInit(Init):
    """param = bound * (2 u - 1) with u = (word // 256 + 1/2) / 2^24 of an element's word; rows from `valid_rows` on zero. As in
    `NormalInit` the first word of a call is one column's, the second another's."""

    name = "uniform_init"
    scalars = ("seed",)
    flops_per_element = (30, "param")

    def reference(self, param, seed):
        flat = param.reshape(-1, param.shape[-1])
        words = calls(seed, 0, 0, self.stream, np.arange(flat.shape[0]), flat.shape[1])
        first, second = (((word >> np.uint32(8)) + 0.5) / 2**23 - 1 for word in words)
        return self.filled(self.bound * to_columns(first, second, flat.shape[1]))


class ConstantInit(Init):
    """param = value, rows from `valid_rows` on zero."""

    name = "constant_init"

    def reference(self, param):
        return self.filled(np.full(param.shape, float(self.value)))


class Calls(Graph):
    """The method of Program that appends the last of these ops."""

    def fill(self, t: Tensor, value: float) -> None:
        """Every element of a tensor that the program keeps becomes `value`."""
        self.apply(ConstantInit, param=t, value=value, valid_rows=int(t.shape[0]))
