"""Bigram hash ids, and document boundaries of packed sequences. Shapes: tokens, ids, starts (batch, seq), cu_seqlens (batch,
slots), all i32."""

from barellm.cpu.kernel import batch_and_seq, kernel
from barellm.cpu.kernels.loops import GRAIN, vectors
from barellm.program.ops.documents import HASH

INTEGERS = dict.fromkeys(("tokens", "ids", "cu_seqlens", "starts"), "i32")


@kernel("bigram_ids", constants=lambda op: {"buckets": op.buckets, "reserved": op.reserved, **batch_and_seq(op.ids)}, also=INTEGERS)
def bigram_ids(k, ids, tokens, *, buckets, reserved, batch, seq) -> None:
    """ids[b, t] = a hash of the tokens at t and t - 1, in [0, buckets - 1); the id of a row's first token is buckets - 1.
    `reserved`: the predecessor of the second token counts as buckets - 1. A thread's elements may cover several rows; the first two
    of each row are overwritten after the others."""
    seq, modulus = k.size(seq), buckets - 1

    def store_hash(i, mask, before):
        factors = zip((tokens.load(i, mask), before), HASH, strict=True)
        token_hash, before_hash = (v * k.const(factor, k.ivec) for v, factor in factors)
        rest = (token_hash ^ before_hash) % modulus  # srem: it has the sign of the dividend
        ids.store(k.select(rest < 0, rest + modulus, rest), i, mask)

    with k.parallel_range(k.size(batch) * seq, GRAIN) as (begin, end):
        # The very first token has none before it in memory.
        for i, mask, _ in vectors(k, k.max(begin, 1), end):
            store_hash(i, mask, tokens.load(i - 1, mask))
        if reserved:  # in a row of one token this is overwritten below
            second = (begin + seq - 2) // seq * seq + 1  # the first position 1 of a row from `begin` on
            with k.loop(second, end, seq) as i:
                store_hash(i, k.mask_first(1), k.const(modulus, k.ivec))
        first = (begin + seq - 1) // seq * seq  # and the first position 0
        with k.loop(first, end, seq) as i:
            ids.put(k.int(modulus), i)


@kernel("document_starts", constants=lambda op: {"slots": int(op.cu_seqlens.shape[1]), **batch_and_seq(op.starts)}, also=INTEGERS)
def document_starts(k, starts, cu_seqlens, *, slots, batch, seq) -> None:
    """starts[b, t] = the first position of the document of position t, from the `slots` document boundaries cu_seqlens[b]
    (ascending, the first 0). A work item is a chunk of a row: a binary search for its first position, then document by document."""
    seq = k.size(seq)
    chunks = k.ceil_div(seq, GRAIN)
    with k.parallel_for(k.size(batch) * chunks) as item:
        row, begin = item // chunks, item % chunks * GRAIN
        end = k.min(begin + GRAIN, seq)
        src, dst = cu_seqlens.at(row * slots), starts.at(row * seq)
        slot, slot_end = k.var(0), k.var(slots)  # the document is in slots [slot, slot_end)
        with k.while_(lambda: slot_end.value - slot.value > 1):
            middle = (slot.value + slot_end.value) // 2
            has_begun = src.get(middle) <= begin
            slot.value = k.select(has_begun, middle, slot.value)
            slot_end.value = k.select(has_begun, slot_end.value, middle)
        position = k.var(begin)
        with k.while_(lambda: position.value < end):
            following = slot.value + 1
            stop = k.var(end)
            with k.when(following < slots):
                stop.value = k.min(end, src.get(following))
            start = k.splat(src.get(slot.value))
            for i, mask, _ in vectors(k, position.value, stop.value):
                dst.store(start, i, mask)
            position.value = k.max(position.value, stop.value)
            slot.value = following


@kernel(
    "cu_seqlens",
    constants=lambda op: {"separator": op.separator, "slots": int(op.cu_seqlens.shape[1]), **batch_and_seq(op.tokens)},
    also=INTEGERS,
)
def cu_seqlens(k, cu_seqlens, tokens, *, separator, slots, batch, seq) -> None:
    """cu_seqlens[b] = [0, the positions of the separator tokens, seq in the slots that are left]. A work item is a row: a
    document's slot depends on how many are before it."""
    seq = k.size(seq)
    with k.parallel_for(k.size(batch)) as row:
        src, dst = tokens.at(row * seq), cu_seqlens.at(row * slots)
        dst.put(k.int(0), 0)
        slot = k.var(1)
        with k.loop(1, seq) as t, k.when(src.get(t).equals(separator)):
            dst.put(t, slot.value)
            slot.value = slot.value + 1
        length = k.splat(seq)
        for i, mask, _ in vectors(k, slot.value, k.int(slots)):
            dst.store(length, i, mask)
