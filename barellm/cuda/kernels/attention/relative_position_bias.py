"""Relative position terms of block-sparse attention (Shaw et al. 2018): q_i r_(i-j), which depends on the key's distance only.
Shapes as in block_sparse_attention.py; relative (M, H * D), row m being the vector of the distance TERMS[0] + m; C = H * D.

A tile of BT queries from m0 on and BT keys from n0 on has 2 BT - 1 distances. The matmul of the queries with the vectors of
distances, (BT, 2 BT), has the term of query a and key b in column a - b + BT, and the gradient goes back so."""

from barellm.cuda.kernels.attention.attention_tiles import row_pointers
from barellm.cuda.lang import device, tl


@device
def has_terms(m0, n0, BT, TERMS):
    """Whether any pair of a tile's queries and keys is at a distance that has a term."""
    return (m0 - n0 + BT > TERMS[0]) & (m0 - n0 - BT < TERMS[0] + TERMS[1] - 1)


@device
def vectors_of(relative, gap, BT, TERMS, C, D, DP):
    """The vectors (2 BT, DP) of the distances from gap - BT on, gap = m0 - n0; zeros without a term. `relative`: of the head."""
    w, d = tl.arange(0, 2 * BT), tl.arange(0, DP)
    row = gap - BT - TERMS[0] + w  # of `relative`; outside: no term
    pointers = row_pointers(relative, gap - BT - TERMS[0], w, d, C, 0)
    return tl.load(pointers, mask=((row >= 0) & (row < TERMS[1]))[:, None] & (d < D)[None, :], other=0.0)


@device
def to_keys(terms, BT):
    """Terms by distance (BT queries, 2 BT) as terms by key (BT queries, BT keys)."""
    return tl.gather(terms, tl.arange(0, BT)[:, None] - tl.arange(0, BT)[None, :] + BT, 1)


@device
def to_keys_transposed(terms, BT):
    """Terms by distance (2 BT, BT queries) as terms by key (BT keys, BT queries)."""
    return tl.gather(terms, tl.arange(0, BT)[None, :] - tl.arange(0, BT)[:, None] + BT, 0)


@device
def to_distances(ds, BT):
    """Gradients by key (BT queries, BT keys) as gradients by distance (BT queries, 2 BT), 0 where the tile has no such key."""
    key = tl.arange(0, BT)[:, None] + BT - tl.arange(0, 2 * BT)[None, :]  # in the tile, of each distance
    in_tile = (key >= 0) & (key < BT)
    return tl.where(in_tile, tl.gather(ds, tl.where(in_tile, key, 0), 1), 0.0)


@device
def add_terms(s, queries, relative, m0, n0, TRANSPOSED, BT, TERMS, C, D, DP):
    """Scores s (BT queries, BT keys), or TRANSPOSED, plus their relative terms; `queries` (BT, DP). Tiles without terms skip it."""
    if has_terms(m0, n0, BT, TERMS):
        vectors = vectors_of(relative, m0 - n0, BT, TERMS, C, D, DP)
        if TRANSPOSED:
            s += to_keys_transposed(tl.dot(vectors, tl.trans(queries), input_precision="ieee"), BT)
        else:
            s += to_keys(tl.dot(queries, tl.trans(vectors), input_precision="ieee"), BT)
    return s


@device
def add_terms_dq(dq, ds, relative, m0, n0, BT, TERMS, C, D, DP):
    """dq (BT, DP) plus the relative terms' part: the scores' gradient ds (BT, BT) times the vectors of the distances."""
    if has_terms(m0, n0, BT, TERMS):
        vectors = vectors_of(relative, m0 - n0, BT, TERMS, C, D, DP)
        dq = tl.dot(to_distances(ds, BT).to(vectors.dtype), vectors, dq, input_precision="ieee")
    return dq
