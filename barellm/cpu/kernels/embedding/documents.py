"""Bigram hash ids, and document boundaries of packed sequences. Shapes: tokens, ids, starts (batch, seq), cu_seqlens (batch,
slots), all i32."""

from __future__ import annotations

from barellm.cpu.kernel import KernelBuilder, kernel
from barellm.cpu.kernels.loops import GRAIN, foreach_vector
from barellm.program.ops.documents import HASH

INTEGERS = dict.fromkeys(("tokens", "ids", "cu_seqlens", "starts"), "i32")


@kernel("bigram_ids", constants=lambda op: {"buckets": op.buckets, "reserved": op.reserved}, also=INTEGERS)
def bigram_ids(k: KernelBuilder, ids, tokens, *, buckets, reserved) -> None:
    """A thread's elements may cover several rows; each row's first two are set after the others."""
    seq, modulus = k.scalar("seq"), buckets - 1

    def hashed(i, mask, before):
        own, before = (
            v * k.const(factor, k.ivec) for v, factor in zip((tokens.load(i, mask), before), HASH, strict=True)
        )
        left = (own ^ before) % modulus
        ids.store(k.select(left < 0, left + modulus, left), i, mask)

    def body(i, mask, j):
        hashed(i, mask, tokens.load(i - 1, mask))

    with k.parallel_range(k.scalar("batch") * seq, GRAIN) as (begin, end):
        # The very first token has none before it in memory.
        foreach_vector(k, k.max(begin, 1), end, body)
        if reserved:  # in a row of one token this is overwritten below
            second = (begin + seq - 2) // seq * seq + 1
            with k.loop(second, end, seq) as i:
                hashed(i, k.mask_first(1), k.const(modulus, k.ivec))
        first = (begin + seq - 1) // seq * seq
        with k.loop(first, end, seq) as i:
            ids.put(k.int(modulus), i)


@kernel("document_starts", constants=lambda op: {"slots": int(op.cu_seqlens.shape[1])}, also=INTEGERS)
def document_starts(k: KernelBuilder, starts, cu_seqlens, *, slots) -> None:
    """A work item is a chunk of one row: a binary search for the document of its first position, then one document after the
    other."""
    seq = k.scalar("seq")
    chunks = k.ceil_div(seq, GRAIN)
    with k.parallel_for(k.scalar("batch") * chunks) as item:
        row, begin = item // chunks, item % chunks * GRAIN
        end = k.min(begin + GRAIN, seq)
        src, dst = cu_seqlens.at(row * slots), starts.at(row * seq)
        slot, beyond = k.var(0), k.var(slots)
        with k.while_(lambda: beyond.value - slot.value > 1):
            middle = (slot.value + beyond.value) // 2
            has_begun = src.get(middle) <= begin
            slot.value = k.select(has_begun, middle, slot.value)
            beyond.value = k.select(has_begun, beyond.value, middle)
        at = k.var(begin)
        with k.while_(lambda: at.value < end):
            following = slot.value + 1
            stop = k.var(end)
            with k.when(following < slots):
                stop.value = k.min(end, src.get(following))
            start = k.splat(src.get(slot.value))
            foreach_vector(k, at.value, stop.value, lambda i, mask, j, start=start: dst.store(start, i, mask))
            at.value = k.max(at.value, stop.value)
            slot.value = following


@kernel(
    "cu_seqlens",
    constants=lambda op: {"separator": op.separator, "slots": int(op.cu_seqlens.shape[1])},
    also=INTEGERS,
)
def cu_seqlens(k: KernelBuilder, cu_seqlens, tokens, *, separator, slots) -> None:
    """A work item is a row: a document's slot depends on how many are before it."""
    seq = k.scalar("seq")
    with k.parallel_for(k.scalar("batch")) as row:
        src, dst = tokens.at(row * seq), cu_seqlens.at(row * slots)
        dst.put(k.int(0), 0)
        slot = k.var(1)
        with k.loop(1, seq) as t, k.when(src.get(t).equals(separator)):
            dst.put(t, slot.value)
            slot.value = slot.value + 1
        length = k.splat(seq)
        foreach_vector(k, slot.value, k.int(slots), lambda i, mask, j: dst.store(length, i, mask))
