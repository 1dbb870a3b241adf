"""Bigram ids, and where documents begin. Shapes: tokens, ids, starts (batch, seq), cu_seqlens (batch, SLOTS), all i32."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, flat_indices, launch_elementwise
from barellm.cuda.lang import constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.documents import HASH

OWN, BEFORE = (constant(factor) for factor in HASH)


@device
def bigram_ids(
    ids, tokens, units, seq, MODULUS: tl.constexpr, RESERVED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    i, mask = flat_indices(units, UNIT, BLOCK)
    inner = mask & (i % seq != 0)
    own = tl.load(tokens + i, mask=mask, other=0) * OWN
    before = tl.load(tokens + i - 1, mask=inner, other=0)
    if RESERVED:
        before = tl.where(i % seq == 1, MODULUS, before)
    left = (own ^ (before * BEFORE)) % MODULUS
    left = tl.where(left < 0, left + MODULUS, left)
    tl.store(ids + i, tl.where(inner, left, MODULUS), mask=mask)


@lowering("bigram_ids", also=dict.fromkeys(("ids", "tokens"), "i32"))
def lower_bigram_ids(op: Any, c: Lowering) -> None:
    operands = {"ids": op.ids, "tokens": op.tokens, "seq": lambda s: s.seq}
    launch_elementwise(c, bigram_ids, op.ids, operands, writes="ids", MODULUS=op.buckets - 1, RESERVED=op.reserved)


@device
def cu_seqlens(cu_seqlens, tokens, seq, SEPARATOR: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row: how many documents begin before a block of tokens is known when the block before it is done."""
    row = tl.program_id(0).to(tl.int64)
    of, to = tokens + row * seq, cu_seqlens + row * SLOTS
    found = 1
    for begin in range(0, seq, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        begins = (tl.load(of + t, mask=t < seq, other=0) == SEPARATOR) & (t > 0) & (t < seq)
        place = found + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(to + place, t, mask=begins)
        found += tl.sum(begins.to(tl.int32), 0)
    for begin in range(0, SLOTS, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        tl.store(to + slot, slot * 0 + seq, mask=(slot >= found) & (slot < SLOTS))
    tl.store(to, 0)


@lowering("cu_seqlens", also=dict.fromkeys(("cu_seqlens", "tokens"), "i32"))
def lower_cu_seqlens(op: Any, c: Lowering) -> None:
    c.launch(
        cu_seqlens,
        {"cu_seqlens": op.cu_seqlens, "tokens": op.tokens, "seq": lambda s: s.seq},
        {"SEPARATOR": op.separator, "SLOTS": int(op.cu_seqlens.shape[1]), "BLOCK": BLOCK},
        grid=lambda s: (s.batch,),
        writes="cu_seqlens",
    )


@device
def document_starts(starts, cu_seqlens, seq, parts, SLOTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Each position looks for the last document that begins at or before it, in halves of what is left."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    t = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    of = cu_seqlens + row * SLOTS
    slot = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(BITS):
        further = slot + (1 << (BITS - 1 - bit))
        inside = further < SLOTS
        begun = inside & (tl.load(of + further, mask=inside, other=0) <= t)
        slot = tl.where(begun, further, slot)
    tl.store(starts + row * seq + t, tl.load(of + slot), mask=t < seq)


@lowering("document_starts", also=dict.fromkeys(("starts", "cu_seqlens", "tokens"), "i32"))
def lower_document_starts(op: Any, c: Lowering) -> None:
    slots = int(op.cu_seqlens.shape[1])
    c.launch(
        document_starts,
        {
            "starts": op.starts,
            "cu_seqlens": op.cu_seqlens,
            "seq": lambda s: s.seq,
            "parts": lambda s: ceil_div(s.seq, BLOCK),
        },
        {"SLOTS": slots, "BITS": (slots - 1).bit_length(), "BLOCK": BLOCK},
        grid=lambda s: (s.batch * ceil_div(s.seq, BLOCK),),
        writes="starts",
    )
