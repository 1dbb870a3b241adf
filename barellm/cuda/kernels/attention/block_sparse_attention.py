"""Attention over the blocks of keys that a layout lists, forward (`program/layouts.py` has the tables), and what its backward pass
shares with it. Shapes as in attention.py.

A program is BM queries of one row of the layout, and loops over the entries of its list. BM and BN divide the layout's BLOCK, so
a tile lies in one block and has one kind: kind 0 is seen as a whole, and of any other the bits of a mask are looked up. For each
block that is listed it does 4 BLOCK^2 D operations.
"""

from __future__ import annotations

from math import e, log2, sqrt
from typing import Any

from barellm.cuda import choices
from barellm.cuda.choices import AttentionTile, padded
from barellm.cuda.kernel import Count, Lowering, lowering
from barellm.cuda.kernels.attention.attention import LN_2, head_constants, offset_from_q, options
from barellm.cuda.kernels.attention.attention_mask import LOWEST
from barellm.cuda.kernels.attention.attention_tiles import kv_pointer, load_rows, store_rows
from barellm.cuda.kernels.attention.relative_position_bias import add_terms
from barellm.cuda.kernels.common import row_strides
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.lowering import weight_operand


@device
def block_of(table, i, LISTS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Of part i of the entries' blocks, PART positions each: its first position, its place in the block, and the block's kind."""
    entry, place = i // (BLOCK // PART), i % (BLOCK // PART) * PART
    at = table + LISTS + 1 + entry
    return tl.load(at) * BLOCK + place, place, tl.load(at + ENTRIES)


@device
def block_range(table, row, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The parts of the entries of a row of all heads' rows."""
    return tl.load(table + row) * (BLOCK // PART), tl.load(table + row + 1) * (BLOCK // PART)


@device
def seen(masks, kind, query, key, BLOCK: tl.constexpr):
    """Which queries see which keys, for places in a block that broadcast to a tile. Of kind 0 nothing is loaded; a branch would
    have each product of tensor cores wait for the one before."""
    WORDS: tl.constexpr = (BLOCK + 31) // 32
    at = masks + ((kind - 1) * BLOCK + key) * WORDS + query // 32
    return (tl.load(at, mask=(query >= 0) & (key >= 0) & (kind > 0), other=-1) >> (query % 32)) & 1 != 0


@device
def layout_attention_forward(
    out, lse, q, k, v, rows, masks, relative, seq,
    UNIT: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, BLOCK: tl.constexpr,
    LISTS: tl.constexpr, ENTRIES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is BM queries of one head; the last of a sequence, whose lists are the longest if any are, start first."""
    C: tl.constexpr = H * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token, shared = sequence.to(tl.int64) * seq, head // SHARE * D
    k = kv_pointer(q, k, K_AT) + token * K_ROW + shared
    v = kv_pointer(q, v, V_AT) + token * V_ROW + shared
    queries = load_rows(q + token * Q_ROW + head * D, m0, seq, Q_ROW, BM, D, DP)
    acc, total = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), LOWEST, tl.float32)
    query = m0 % BLOCK + tl.arange(0, BM)
    begin, end = block_range(rows, head * (LISTS // H) + m0 // BLOCK, BLOCK, BN)
    for i in range(begin, end):
        n0, place, kind = block_of(rows, i, LISTS, ENTRIES, BLOCK, BN)
        s = tl.dot(queries, tl.trans(load_rows(k, n0, seq, K_ROW, BN, D, DP)), input_precision="ieee")
        if COUNT > 0:
            s = add_terms(s, queries, relative + head * D, m0, n0, False, BN, FIRST, COUNT, C, D, DP)
        sees = seen(masks, kind, query[:, None], (place + tl.arange(0, BN))[None, :], BLOCK)
        s = tl.where(sees, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * UNIT)
        p = tl.math.exp2(s * UNIT - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        values = load_rows(v, n0, seq, V_ROW, BN, D, DP)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = higher
    m = m0 + tl.arange(0, BM)
    tl.store(lse + tl.program_id(1).to(tl.int64) * seq + m, (top + tl.math.log2(total)) * LN_2, mask=m < seq)
    store_rows(out + token * C + head * D, m0, seq, acc / total[:, None], D, None, 0, C, BM, DP)


def constants_of(op: Any) -> dict[str, Any]:
    head, layout = head_constants(op), op.layout
    share = {"SHARE": op.heads // op.kv_heads, "UNIT": log2(e) / sqrt(head["D"])}
    places = {f"{name.upper()}_AT": offset_from_q(op.q, op.inputs[name]) for name in ("k", "v")}
    lists = {"BLOCK": layout.block, "LISTS": layout.heads * layout.rows, "ENTRIES": len(layout.keys)}
    first, last = op.distances
    terms = {"FIRST": first, "COUNT": last + 1 - first}
    return head | share | row_strides(q=op.q, k=op.k, v=op.v) | places | lists | terms


def operands_of(op: Any) -> dict[str, Any]:
    """q, k and v, of which those that lie behind q are absent, the masks, the vectors of relative terms, and the length."""
    relative = None if op.relative is None else weight_operand(op.relative)
    kv = {name: t if offset_from_q(op.q, t) is None else None for name, t in (("k", op.k), ("v", op.v))}
    return kv | {"q": op.q, "masks": op.masks, "relative": relative, "seq": axis_size(op.q, 1)}


def axis_size(t: Tensor, axis: int) -> Count:
    """A run's size of one axis."""
    n = t.shape[axis]
    return Count((n.name,), 1) if isinstance(n, Dim) else Count((), int(n))


def tile_of(op: Any, c: Lowering, role: str) -> AttentionTile:
    """The tile of attention in windows, made smaller until it divides the layout's blocks. With relative terms it is a square of
    32, or of 16 and four warps in fp32: others spill, and ptxas has the wgmmas of 64 wait for one another."""
    t = choices.bounded_tile(role, padded(int(op.out.shape[-1]) // op.heads), op.q.dtype, c.target.arch)
    most, warps = op.layout.block & -op.layout.block, t.warps
    if op.relative is not None:
        size, warps = (16, 4) if op.q.dtype == "fp32" else (32, t.warps)
        most = min(most, t.queries, t.keys, size)
    return AttentionTile(min(t.queries, most), min(t.keys, most), warps, t.stages)


def grid_of(op: Any, heads: int, size: int) -> Any:
    """Blocks of a sequence, heads of all sequences."""
    batch, length = axis_size(op.q, 0), axis_size(op.q, 1)
    return lambda s: (ceil_div(length(s), size), batch(s) * heads)


TABLES = {"rows": "i32", "columns": "i32", "masks": "i32", "relative": PLANES}


@lowering("layout_attention", views="q k v", also=TABLES)
def lower_layout_attention(op: Any, c: Lowering) -> None:
    t = tile_of(op, c, "forward")
    c.launch(
        layout_attention_forward,
        operands_of(op) | {"out": op.out, "lse": op.lse, "rows": op.rows},
        constants_of(op) | {"BM": t.queries, "BN": t.keys},
        grid=grid_of(op, op.heads, t.queries), writes="out lse", **options(t),
    )  # fmt: skip
