"""Threefry2x32-20 (Salmon et al. 2011), a counter-based generator, bitwise as `program/ops/pointwise/random.py`."""

from barellm.cuda.kernels.common import SEED, STEP
from barellm.cuda.lang import constant, device, tl
from barellm.program.ops.pointwise.random import PARITY as PARITY_WORD
from barellm.program.ops.pointwise.random import ROTATIONS

PARITY = constant(PARITY_WORD)
A0, A1, A2, A3, B0, B1, B2, B3 = (constant(r) for group in ROTATIONS for r in group)


@device
def mix(x, y, R):
    """One round: y rotated left by R bits, xored with the sum."""
    x = x + y
    return x, ((y << R) | (y >> (32 - R))) ^ x


@device
def mix_four(x, y, R0, R1, R2, R3):
    x, y = mix(x, y, R0)
    x, y = mix(x, y, R1)
    x, y = mix(x, y, R2)
    return mix(x, y, R3)


@device
def threefry(k0, k1, c0, c1):
    """The two output words of Threefry2x32-20 for key (k0, k1) and counter (c0, c1), all uint32, broadcast: 20 rounds."""
    k2 = k0 ^ k1 ^ PARITY
    x, y = mix_four(c0 + k0, c1 + k1, A0, A1, A2, A3)
    x, y = mix_four(x + k1, y + k2 + 1, B0, B1, B2, B3)
    x, y = mix_four(x + k2, y + k0 + 2, A0, A1, A2, A3)
    x, y = mix_four(x + k0, y + k1 + 3, B0, B1, B2, B3)
    x, y = mix_four(x + k1, y + k2 + 4, A0, A1, A2, A3)
    return x + k2, y + k0 + 5


@device
def sample_key(scalars, sample, stream):
    """The key (two uint32) of a random stream for samples (i64, any shape) in this run's step."""
    seed, step = tl.load(scalars + SEED).to(tl.uint32), tl.load(scalars + STEP).to(tl.uint32)
    return threefry(seed, step, sample.to(tl.uint32), stream.to(tl.uint32))


@device
def calls(k0, k1, row, first, ROWS, CALLS):
    """Both words (ROWS, CALLS) of the generator's calls from `first` on, for keys and rows (ROWS,); the counter is (call, row)."""
    i = (first + tl.arange(0, CALLS)).to(tl.uint32)
    return threefry(k0[:, None], k1[:, None], i[None, :], row.to(tl.uint32)[:, None])


@device
def to_columns(first, second, ROWS, COLUMNS):
    """The two words of each call, (ROWS, COLUMNS / 2) each, in their columns' order: 16 of the first, 16 of the second."""
    shape: tl.constexpr = (ROWS, COLUMNS // 32, 16)
    pairs = tl.join(tl.reshape(first, shape), tl.reshape(second, shape))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, COLUMNS))


@device
def words(k0, k1, row, column, ROWS, COLUMNS):
    """One random word for each of COLUMNS columns from `column` on, both multiples of 32; keys and rows (ROWS,)."""
    first, second = calls(k0, k1, row, column // 2, ROWS, COLUMNS // 2)
    return to_columns(first, second, ROWS, COLUMNS)


@device
def four_rotations(word):
    """A word of each call (blocks, 16), rotated right by 0, 8, 16 and 24 bits: (blocks, 16, 2, 2)."""
    by_8, by_16, by_24 = (word >> 8) | (word << 24), (word >> 16) | (word << 16), (word >> 24) | (word << 8)
    return tl.join(tl.join(word, by_16), tl.join(by_8, by_24))


@device
def shared_words(k0, k1, column, COLUMNS):
    """A shared word, uint32 (COLUMNS,), for each column of row 0 from `column` on, both multiples of 128."""
    i = (column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)
    first, second = threefry(k0, k1, i, tl.zeros((COLUMNS // 8,), tl.uint32))
    shape: tl.constexpr = (COLUMNS // 128, 16)
    both = tl.join(four_rotations(tl.reshape(first, shape)), four_rotations(tl.reshape(second, shape)))
    return tl.reshape(tl.permute(both, (0, 4, 2, 3, 1)), (COLUMNS,))
