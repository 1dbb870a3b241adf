"""Token and position embedding (a gather), and its gradient (a deterministic scatter-add). Shapes: tokens (batch, seq) i32, wte
(V, C), wpe (maxT, C) or none, positions (batch, seq) i32 or none, y and dy (batch, seq, C)."""

from barellm.cpu.kernel import PLANES, Lowering, Op, Pointer, Value, batch_and_seq, lowering
from barellm.cpu.kernels import loops, storage

ID_RANGES = 64  # work items: each scans all tokens for its ids
GROUP_BYTES = 65536  # of the sums over the batch of a work item
UNROLL = 4  # rows that are added at a time
PREFETCH_ROWS = 4  # of the token table, into L2


def embedding(k, y, tokens, wte, wte_lo, wpe, wpe_lo, positions, *, batch, seq, C) -> None:
    """The kernel: y[b, t] (C) = wte[tokens[b, t]] + wpe[pos + t], or wpe[positions[b, t]], or nothing where `wpe` is None. wte (V,
    C), wpe (maxT, C) of any storage format (`_lo`: their low planes). Hardware cannot predict a row of wte, so later rows are
    prefetched."""
    seq, pos = k.size(seq), None if wpe is None or positions is not None else k.scalar("pos")
    token_rows, position_rows = storage.Weight(k, wte, wte_lo), storage.Weight(k, wpe, wpe_lo)
    rows = k.size(batch) * seq
    nontemporal = loops.exceeds_caches(k, rows, C, y)
    with k.parallel_range(rows, loops.row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        src, at = tokens.get(row) * C, None if pos is None else (pos + row % seq) * C
        at = positions.get(row) * C if positions is not None else at
        following = tokens.get(k.min(row + PREFETCH_ROWS, rows - 1)) * C  # row of wte to prefetch
        for table in (wte,) if wte_lo is None else (wte, wte_lo):
            with k.loop(0, C, loops.LINE // table.itemsize) as c:
                k.prefetch(table.at(following + c), near=False)
        for c, mask, put in loops.write_row(k, y.at(row * C), C, nontemporal=nontemporal):
            token = token_rows.load(src + c, mask)
            put(token if wpe is None else token + position_rows.load(at + c, mask))


@lowering("embedding", also={"tokens": "i32", "positions": "i32", "wte": PLANES, "wpe": PLANES})
def lower_embedding(op: Op, c: Lowering) -> None:
    operands = {"y": op.y, "tokens": op.tokens, "positions": op.positions, **storage.weight_operands("wte", op.wte)}
    operands |= {"wpe": None, "wpe_lo": None} if op.wpe is None else storage.weight_operands("wpe", op.wpe)
    c.call(embedding, operands, {"C": int(op.y.shape[-1]), **batch_and_seq(op.y)}, writes="y")


def clear(k, out, *, size, mode) -> None:
    """Clear out (size), unless this run accumulates (`mode`)."""
    keep = k.keep(mode)
    n = k.int(size) if keep is None else k.select(keep, 0, k.int(size))
    for _, _, put in loops.elementwise(k, n, out):
        put(k.to(0.0, k.vec))


def sort_by_id(k, tokens, rows, low, high, *, ids_per_item: int) -> tuple[Pointer, Pointer]:
    """A stable counting sort of the rows [0, rows) whose token ids are in [low, high), at most `ids_per_item` ids. Returns (ends,
    sorted) in this thread's scratch: rows of an id are adjacent, in their order, and end before sorted[ends[id - low]]."""
    ends = k.thread_scratch("i32")
    matches = ends.at(ids_per_item)  # rows whose ids are in range, in order
    sorted_rows = matches.at(rows)
    lowest, id_end, count = k.splat(low), k.splat(high), k.var(k.int(0))
    with k.loop(0, ids_per_item) as i:
        ends.put(k.int(0), i)

    def in_range(first, mask) -> Value:
        """The mask of the tokens first, first + 1, ... whose ids are in [low, high)."""
        ids = tokens.load(first, mask)
        matching = (ids >= lowest) & (ids < id_end)
        return matching if mask is None else matching & mask

    def append_matches(first, mask) -> None:
        """Append the rows first + lane of the mask's set lanes to `matches`, and count their ids."""
        with k.set_lanes(mask) as lane:
            row = first + lane
            matches.put(row, count.value)
            count.value = count.value + 1
            id_index = tokens.get(row) - low
            ends.put(ends.get(id_index) + 1, id_index)

    step = 4 * k.lanes
    full = rows & -step
    with k.loop(0, full, step) as first:
        append_matches(first, k.concat([in_range(first + j * k.lanes, None) for j in range(4)]))
    with k.loop(full, rows, k.lanes) as first:
        append_matches(first, in_range(first, k.mask_first(rows - first)))

    total = k.var(k.int(0))
    with k.loop(0, ids_per_item) as i:  # exclusive prefix sum: counts become starts,
        number = ends.get(i)
        ends.put(total.value, i)
        total.value = total.value + number
    with k.loop(0, count.value) as i:  # and, while the rows are placed, starts become ends
        row = matches.get(i)
        id_index = tokens.get(row) - low
        dst = ends.get(id_index)
        sorted_rows.put(row, dst)
        ends.put(dst + 1, id_index)
    return ends, sorted_rows


def add_token_rows(k, dweight, tokens, dy, *, batch, seq, C, V) -> None:
    """dweight[id] += the sum of dy[row] over the rows whose token is id, in order (scatter-add). A work item is a range of ids,
    which finds its rows among all tokens: no atomics, the same bits for any thread count. UNROLL rows of an id are added at a time:
    so many DRAM streams, and the sum is read from L2 once. The next rows, which hardware cannot predict, are prefetched."""
    rows, ids_per_item = k.size(batch) * k.size(seq), -(-V // ID_RANGES)

    with k.parallel_for(-(-V // ids_per_item)) as chunk:
        low = chunk * ids_per_item
        high = k.min(low + ids_per_item, V)
        ends, sorted_rows = sort_by_id(k, tokens, rows, low, high, ids_per_item=ids_per_item)
        last = ends.get(high - low - 1) - 1  # of the sorted rows
        begin = k.var(k.int(0))
        with k.loop(0, high - low) as i:
            dst, first, end = dweight.at((low + i) * C), begin.value, ends.get(i)
            for entry, count in loops.groups(k, first, end, UNROLL):
                src = [dy.at(sorted_rows.get(entry + t) * C) for t in range(count)]
                following = [sorted_rows.get(k.min(entry + t + UNROLL, last)) for t in range(count)]
                prefetched = [dweight.at(tokens.get(following[0]) * C), *(dy.at(row * C) for row in following)]
                for c, mask, _ in loops.columns(k, C, unroll=2):
                    total = dst.load(c, mask)
                    for p in src:
                        total = total + p.load(c, mask)
                    dst.store(total, c, mask)
                    for p in prefetched:
                        k.prefetch(p.at(c), near=False)
            begin.value = end


@lowering("embedding_dwte", starts="dweight", also={"tokens": "i32"})
def lower_embedding_dwte(op: Op, c: Lowering) -> None:
    mode = op.modes["dweight"]
    if mode != "add":
        c.call(clear, {"out": op.dweight}, {"size": op.dweight.size, "mode": mode}, writes="out")
    operands = {"dweight": op.dweight, "tokens": op.tokens, "dy": op.dy}
    c.thread_scratch(4 * (-(-int(op.rows) // ID_RANGES) + 2 * op.tokens.size))
    c.call(add_token_rows, operands, {"C": int(op.dy.shape[-1]), "V": int(op.rows), **batch_and_seq(op.dy)}, writes="dweight")


def embedding_dwpe(k, dweight, dy, *, batch, seq, C, positions, mode_dweight) -> None:
    """dweight[t] = sum of dy[:, t] over the batch in order, stored or added; zero beyond the sequence. A work item is a group of
    positions whose sums stay in L2, so that memory is read in runs of GROUP_BYTES bytes, of UNROLL samples at a time."""
    batch, seq = k.size(batch), k.size(seq)
    sums = k.thread_scratch()
    with k.parallel_range(positions, _positions_per_group(C, positions)) as (begin, end):
        n, inside = (end - begin) * C, k.max(k.min(end, seq) - begin, 0) * C  # elements; those that the run has
        for i, mask, _ in loops.vectors(k, 0, n):
            sums.store(0.0, i, mask)
        for first, count in loops.groups(k, 0, batch, UNROLL):
            src = [dy.at(((first + b) * seq + begin) * C) for b in range(count)]
            for i, mask, _ in loops.vectors(k, 0, inside, unroll=4):
                total = sums.load(i, mask)
                for p in src:
                    total = total + p.load(i, mask)
                sums.store(total, i, mask)
        dst = dweight.at(begin * C)
        for i, mask, _ in loops.vectors(k, 0, n):
            dst.store(loops.accumulate(k, dst, i, mask, sums.load(i, mask), mode_dweight), i, mask)


def _positions_per_group(C: int, positions: int) -> int:
    """Positions of a work item: GROUP_BYTES of sums, but at least 16 items, for load balance."""
    return max(1, min(GROUP_BYTES // (4 * C), positions // 16))


@lowering("embedding_dwpe", starts="dweight")
def lower_embedding_dwpe(op: Op, c: Lowering) -> None:
    C, positions = int(op.dy.shape[-1]), int(op.rows)
    c.thread_scratch(_positions_per_group(C, positions) * C * 4)
    constants = {"C": C, "positions": positions, "mode_dweight": op.modes["dweight"], **batch_and_seq(op.dy)}
    c.call(embedding_dwpe, {"dweight": op.dweight, "dy": op.dy}, constants, writes="dweight")
