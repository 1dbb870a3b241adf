"""Hashed bigram ids, and where documents begin. Shapes: tokens, ids, starts (batch, seq), cu_seqlens (batch, SLOTS), all i32:
cu_seqlens has the first position of each document of a row, then seq in the slots that are left."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, flat_indices, kernel
from barellm.cuda.lang import constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.documents import HASH

TOKEN_FACTOR, BEFORE_FACTOR = (constant(factor) for factor in HASH)


@kernel(
    "bigram_ids", also=dict.fromkeys(("ids", "tokens"), "i32"),
    constants=lambda op: {"MODULUS": op.buckets - 1, "RESERVED": op.reserved},
)  # fmt: skip
def bigram_ids(ids, tokens, units, seq, MODULUS, RESERVED, UNIT, BLOCK):
    """Hashed bigrams: ids (batch, seq) i32 = (token * TOKEN_FACTOR xor previous token * BEFORE_FACTOR) mod MODULUS, in i32 with
    wrap-around; MODULUS, the last bucket, at the first position of a row. RESERVED: at position 1 the previous one is MODULUS."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    inner = mask & (i % seq != 0)
    current = tl.load(tokens + i, mask=mask, other=0) * TOKEN_FACTOR
    before = tl.load(tokens + i - 1, mask=inner, other=0)
    if RESERVED:
        before = tl.where(i % seq == 1, MODULUS, before)
    hashed = (current ^ (before * BEFORE_FACTOR)) % MODULUS
    hashed = tl.where(hashed < 0, hashed + MODULUS, hashed)  # % has the sign of the dividend
    tl.store(ids + i, tl.where(inner, hashed, MODULUS), mask=mask)


@device
def cu_seqlens(cu_seqlens, tokens, seq, SEPARATOR, SLOTS, BLOCK):
    """cu_seqlens (batch, SLOTS) i32 of one row of tokens (batch, seq) i32, a program each: the first positions of its documents.
    One begins at position 0 and at each later SEPARATOR; slots that are left get seq. A program goes through its row BLOCK tokens
    at a time, because a document's slot is the number of those that begin before it. SLOTS must hold all documents of a row."""
    row = tl.program_id(0).to(tl.int64)
    row_tokens, boundaries = tokens + row * seq, cu_seqlens + row * SLOTS
    count = 1  # the document at position 0
    for begin in range(0, seq, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        begins = (tl.load(row_tokens + t, mask=t < seq, other=0) == SEPARATOR) & (t > 0) & (t < seq)
        slots = count + tl.cumsum(begins.to(tl.int32), 0) - 1  # of the documents that begin here
        tl.store(boundaries + slots, t, mask=begins)
        count += tl.sum(begins.to(tl.int32), 0)
    for begin in range(0, SLOTS, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        tl.store(boundaries + slot, slot * 0 + seq, mask=(slot >= count) & (slot < SLOTS))
    tl.store(boundaries, 0)


@lowering("cu_seqlens", also=dict.fromkeys(("cu_seqlens", "tokens"), "i32"))
def lower_cu_seqlens(op: Any, c: Lowering) -> None:
    constants = {"SEPARATOR": op.separator, "SLOTS": int(op.cu_seqlens.shape[1]), "BLOCK": BLOCK}
    c.launch(cu_seqlens, {}, constants, grid=lambda s: (s.batch,))


@device
def document_starts(starts, cu_seqlens, seq, parts, SLOTS, BITS, BLOCK):
    """starts (batch, seq) i32, for attention's document mask: the first position of each position's document, the last entry of the
    row's cu_seqlens (SLOTS) that is not beyond the position, by binary search over BITS bits of the slot. `parts`: of a row."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    t = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    boundaries = cu_seqlens + row * SLOTS
    slot = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(BITS):
        next_slot = slot + (1 << (BITS - 1 - bit))  # from the highest bit down
        inside = next_slot < SLOTS
        begun = inside & (tl.load(boundaries + next_slot, mask=inside, other=0) <= t)
        slot = tl.where(begun, next_slot, slot)
    tl.store(starts + row * seq + t, tl.load(boundaries + slot), mask=t < seq)


@lowering("document_starts", also=dict.fromkeys(("starts", "cu_seqlens", "tokens"), "i32"))
def lower_document_starts(op: Any, c: Lowering) -> None:
    """One program for each block of positions of each row."""
    slots = int(op.cu_seqlens.shape[1])
    constants = {"SLOTS": slots, "BITS": (slots - 1).bit_length(), "BLOCK": BLOCK}
    operands = {"parts": lambda s: ceil_div(s.seq, BLOCK)}
    c.launch(document_starts, operands, constants, grid=lambda s: (s.batch * ceil_div(s.seq, BLOCK),))
