"""Muon's orthogonalization (Newton-Schulz, Polar Express): GEMMs with symmetric results (SYRK), and x times them. One launch does
all matrices of one shape, by a table of their addresses (multi_tensor.py): axis 0 of the grid is the tile, axis 1 the matrix.

Shapes: a, b (N, N); x, y (M, N) tall or (N, M) wide. Of a symmetric result only tiles that reach below the diagonal are computed;
each is stored as it is and transposed, so both triangles are bitwise equal. ENTRIES: matrices of the table. HALF, FP16: the
matrices' dtype (`matrix_constants`). TF32: fp32 inputs are rounded to TF32 for the tensor cores."""

from typing import Any

from barellm.cuda.kernel import Lowering, Table, lowering
from barellm.cuda.kernels.optim.multi_tensor import floats_of, matrix_constants, matrix_pointer, number, of_matrices
from barellm.cuda.lang import constant, device, tl
from barellm.program.grouping import members
from barellm.program.integers import ceil_div

OUT, X, LINEAR, SQUARE = (constant(field) for field in range(4))  # fields of symmetric_product's table
APPLY_Y, APPLY_A, APPLY_B, APPLY_X, APPLY_SCALE = (constant(field) for field in range(5))  # and of gram_apply's


@device
def multiply_tiles(a_ptrs, b_ptrs, m_in, n_in, K, A_STRIDE, B_STRIDE, TF32, BM, BN, BK):
    """a (BM, K) b (K, BN) in fp32, of the rows m_in and the columns n_in, BK of the depth K at a time. a_ptrs (BM, BK), b_ptrs (BK,
    BN): the first of them; NAME_STRIDE: elements from one depth to the next."""
    acc = tl.zeros((BM, BN), tl.float32)
    k = tl.arange(0, BK)
    for k0 in range(0, K, BK):
        k_in = k < K - k0
        a = tl.load(a_ptrs, mask=m_in[:, None] & k_in[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=k_in[:, None] & n_in[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")
        a_ptrs += BK * A_STRIDE
        b_ptrs += BK * B_STRIDE
    return acc


@device
def symmetric_product(table, ENTRIES, N, DEPTH, COLUMNS, POLYNOMIAL, HALF, FP16, TF32, B, BK):
    """out (N, N) = x x^T of x (N, DEPTH), or x^T x of x (DEPTH, N) where COLUMNS (the Gram matrix); or, where POLYNOMIAL, linear x
    + square x x of a symmetric x (N, N), with fp64 factors from the table. One B x B tile of the lower triangle a program, stored
    as it is and transposed; programs of tiles above the diagonal return at once. Grid: tiles, entries (matrices) of the table.

    x: Muon's momentum (muon_normalize), a result of gram_apply, or a Gram matrix; dtype as HALF, FP16 say. B, BK: powers of two."""
    TILES: tl.constexpr = (N + B - 1) // B  # in a row of out
    m0 = tl.program_id(0) // TILES * B
    n0 = tl.program_id(0) % TILES * B
    entry = tl.program_id(1)
    if n0 <= m0:  # the tile reaches below the diagonal
        out = matrix_pointer(table, entry, OUT, ENTRIES, N, HALF, FP16)
        x = matrix_pointer(table, entry, X, ENTRIES, N if COLUMNS else DEPTH, HALF, FP16)
        m, n, k = m0 + tl.arange(0, B), n0 + tl.arange(0, B), tl.arange(0, BK)  # rows, columns, depth
        m_in, n_in = m < N, n < N
        if COLUMNS:
            a_ptrs = x + m[:, None] + k[None, :] * N
            b_ptrs = x + n[None, :] + k[:, None] * N
        else:
            a_ptrs = x + m.to(tl.int64)[:, None] * DEPTH + k[None, :]
            b_ptrs = x + n.to(tl.int64)[None, :] * DEPTH + k[:, None]
        K_STRIDE: tl.constexpr = N if COLUMNS else 1
        acc = multiply_tiles(a_ptrs, b_ptrs, m_in, n_in, DEPTH, K_STRIDE, K_STRIDE, TF32, B, B, BK)
        lower = m.to(tl.int64)[:, None] * N + n[None, :]  # offsets of the tile
        inside = m_in[:, None] & n_in[None, :]
        if POLYNOMIAL:
            linear = number(table, entry, LINEAR, ENTRIES)
            square = number(table, entry, SQUARE, ENTRIES)
            before = tl.load(x + lower, mask=inside, other=0.0).to(tl.float32)
            acc = acc * square.to(tl.float32) + before * linear.to(tl.float32)
        # The tile and its mirror image; of a tile on the diagonal, the lower triangle and what is above it.
        transposed = n.to(tl.int64)[:, None] * N + m[None, :]
        transposed_inside = n_in[:, None] & m_in[None, :]
        if m0 == n0:
            tl.store(out + lower, acc, mask=inside & (m[:, None] >= n[None, :]))
            tl.store(out + transposed, tl.trans(acc), mask=transposed_inside & (m[None, :] > n[:, None]))
        else:  # without a mask by element both stores are as wide as can be
            tl.store(out + lower, acc, mask=inside)
            tl.store(out + transposed, tl.trans(acc), mask=transposed_inside)


@device
def gram_apply(table, ENTRIES, M, N, K, HALF, FP16, TF32, BM, BN, BK):
    """y (M, N) = scale x + a (M, K) b (K, N), the last GEMM of a Newton-Schulz step: a and b are x and a symmetric polynomial of
    its Gram matrix (of symmetric_product) if x is tall, the polynomial and x if it is wide. One BM x BN tile a program, in steps of
    BK; grid: tiles, entries (matrices) of the table. dtype as HALF, FP16 say; BM, BN, BK: powers of two, 16 at least."""
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    m0 = tl.program_id(0) // n_tiles * BM
    n0 = tl.program_id(0) % n_tiles * BN
    entry = tl.program_id(1)
    y = matrix_pointer(table, entry, APPLY_Y, ENTRIES, N, HALF, FP16)
    a = matrix_pointer(table, entry, APPLY_A, ENTRIES, K, HALF, FP16)
    b = matrix_pointer(table, entry, APPLY_B, ENTRIES, N, HALF, FP16)
    x = matrix_pointer(table, entry, APPLY_X, ENTRIES, N, HALF, FP16)
    m, n, k = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    m_in, n_in = m < M, n < N
    a_ptrs = a + m.to(tl.int64)[:, None] * K + k[None, :]
    b_ptrs = b + n[None, :] + k[:, None] * N
    acc = multiply_tiles(a_ptrs, b_ptrs, m_in, n_in, K, 1, N, TF32, BM, BN, BK)
    offset = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = m_in[:, None] & n_in[None, :]
    scale = number(table, entry, APPLY_SCALE, ENTRIES).to(tl.float32)
    tl.store(y + offset, acc + scale * tl.load(x + offset, mask=inside, other=0.0).to(tl.float32), mask=inside)


def side_of(n: int, dtype: str) -> int:
    """Rows and columns of the square tile of an (n, n) result: a few large ones leave multiprocessors idle."""
    return 128 if dtype != "fp32" and n >= 512 else 64 if n > 32 else 32


def tile_constants(c: Lowering, n: int, dtype: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(compile-time constants, compiler options) of a GEMM whose square tiles have the side of `side_of`."""
    side = side_of(n, dtype)
    tf32 = c.target.tf32 if dtype == "fp32" else None
    constants = {**matrix_constants(dtype), "TF32": tf32 or None, "BK": 32 if dtype == "fp32" else 64}
    return constants, {"warps": 8 if side == 128 else 4, "stages": 3}


def _symmetric(
    c: Lowering, group: list[Any], outs: list[Any], xs: list[Any], *, depth: int, columns: bool, factors: dict[str, Any]
) -> None:
    """Plan one launch of symmetric_product for a group of ops, from tensors `xs` into `outs` (one of each for an op), a table entry
    for each matrix. `factors`: the table's fields linear and square of a polynomial, or {}."""
    n, dtype = int(outs[0].shape[1]), xs[0].dtype
    constants, options = tile_constants(c, n, dtype)
    side, entries = side_of(n, dtype), sum(o.matrices for o in group)
    constants |= {"ENTRIES": entries, "N": n, "DEPTH": depth, "COLUMNS": columns, "B": side, "POLYNOMIAL": bool(factors)}
    table = Table({"out": of_matrices(group, outs), "x": of_matrices(group, xs), **factors}, writes=("out",))
    tiles = ceil_div(n, side) ** 2
    c.launch(symmetric_product, {"table": table}, constants, grid=lambda s: (tiles, entries), writes="", **options)


@lowering("gram")
def lower_gram(op: Any, c: Lowering) -> None:
    group: list[Any] = members(op)
    x = group[0].x
    depth, tall = max(group[0].one(x)), group[0].is_tall(x)
    _symmetric(c, group, [o.a for o in group], [o.x for o in group], depth=depth, columns=tall, factors={})


@lowering("gram_polynomial")
def lower_polynomial(op: Any, c: Lowering) -> None:
    """b = linear a + square a a, with fp64 factors in the table, so that Newton-Schulz steps share the code."""
    group: list[Any] = members(op)
    factors = {name: floats_of(group, name) for name in ("linear", "square")}
    n = int(group[0].a.shape[1])
    _symmetric(c, group, [o.b for o in group], [o.a for o in group], depth=n, columns=False, factors=factors)


@lowering("gram_apply")
def lower_apply(op: Any, c: Lowering) -> None:
    """Plan one launch of gram_apply: y = scale x + x b for tall, scale x + b x for wide x, b being the symmetric polynomial."""
    group: list[Any] = members(op)
    x, entries = group[0].x, sum(o.matrices for o in group)
    (rows, cols), tall = group[0].one(x), group[0].is_tall(x)
    xs, bs = [o.x for o in group], [o.b for o in group]
    side = side_of(min(rows, cols), x.dtype)
    constants, options = tile_constants(c, min(rows, cols), x.dtype)
    constants |= {"ENTRIES": entries, "M": rows, "N": cols, "K": min(rows, cols), "BM": side, "BN": side}
    operands = {"y": [o.y for o in group], "a": xs if tall else bs, "b": bs if tall else xs, "x": xs}
    fields: dict[str, Any] = {name: of_matrices(group, tensors) for name, tensors in operands.items()}
    fields["scale"] = floats_of(group, "scale")
    tiles = ceil_div(rows, side) * ceil_div(cols, side)
    table = Table(fields, writes=("y",))
    c.launch(gram_apply, {"table": table}, constants, grid=lambda s: (tiles, entries), writes="", **options)
