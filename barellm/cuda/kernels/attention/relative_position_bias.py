"""Relative position terms of block-sparse attention (Shaw et al. 2018): q_i r_(i-j), which depends on the key's distance only.
Shapes as in block_sparse_attention.py; relative (M, H * D), row m being the distance FIRST + m.

A tile of BT queries and BT keys has 2 BT - 1 distances. The product of the queries with their vectors, (BT, 2 BT), has the term of
query a and key b in column a - b + BT, and the gradient goes the same way back; column 0 is nobody's. Both are gathers along a row.
"""

from __future__ import annotations

from barellm.cuda.kernels.attention.attention_tiles import row_pointers
from barellm.cuda.lang import device, tl


@device
def has_terms(m0, n0, BT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Whether some pair of a tile of queries from m0 on and of keys from n0 on has a term."""
    return (m0 - n0 + BT > FIRST) & (m0 - n0 - BT < FIRST + COUNT - 1)


@device
def vectors_of(
    relative, gap, BT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """(2 BT, DP): the vectors of the distances from gap - BT on, zeros where there is none."""
    w, d = tl.arange(0, 2 * BT), tl.arange(0, DP)
    row = gap - BT - FIRST + w
    at = row_pointers(relative, gap - BT - FIRST, w, d, C, 0)
    return tl.load(at, mask=((row >= 0) & (row < COUNT))[:, None] & (d < D)[None, :], other=0.0)


@device
def to_keys(terms, BT: tl.constexpr):
    """(BT, 2 BT) of distances -> (BT, BT) of keys."""
    return tl.gather(terms, tl.arange(0, BT)[:, None] - tl.arange(0, BT)[None, :] + BT, 1)


@device
def to_keys_transposed(terms, BT: tl.constexpr):
    """(2 BT, BT) of distances -> (BT, BT), keys being rows."""
    return tl.gather(terms, tl.arange(0, BT)[None, :] - tl.arange(0, BT)[:, None] + BT, 0)


@device
def to_distances(ds, BT: tl.constexpr):
    """(BT, BT) of keys -> (BT, 2 BT) of distances, 0 where there is no such key."""
    key = tl.arange(0, BT)[:, None] + BT - tl.arange(0, 2 * BT)[None, :]
    there = (key >= 0) & (key < BT)
    return tl.where(there, tl.gather(ds, tl.where(there, key, 0), 1), 0.0)


@device
def add_terms(
    s, queries, relative, m0, n0, TRANSPOSED: tl.constexpr, BT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Scores (BT, BT), keys being rows where they are transposed, and their terms."""
    if has_terms(m0, n0, BT, FIRST, COUNT):
        vectors = vectors_of(relative, m0 - n0, BT, FIRST, COUNT, C, D, DP)
        if TRANSPOSED:
            s += to_keys_transposed(tl.dot(vectors, tl.trans(queries), input_precision="ieee"), BT)
        else:
            s += to_keys(tl.dot(queries, tl.trans(vectors), input_precision="ieee"), BT)
    return s


@device
def add_terms_dq(
    dq, ds, relative, m0, n0, BT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """dq (BT, DP) and what their terms, whose scores have the gradient ds (BT, BT), give the queries."""
    if has_terms(m0, n0, BT, FIRST, COUNT):
        vectors = vectors_of(relative, m0 - n0, BT, FIRST, COUNT, C, D, DP)
        dq = tl.dot(to_distances(ds, BT).to(vectors.dtype), vectors, dq, input_precision="ieee")
    return dq
