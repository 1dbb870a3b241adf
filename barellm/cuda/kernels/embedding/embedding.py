"""Token and position embedding. Shapes: tokens (batch, seq) i32, wte (V, C), wpe (maxT, C) or none, y and dy (batch, seq, C).

The gradient of the token embedding needs every token's row in the order of the tokens, without atomics on floats. So the device
sorts (id, position) pairs, all different, as int64 keys = id * 2^32 + position: blocks by a sorting network, then runs by merging,
where each key finds its place by counting the keys below it in the other run. Then programs walk STEPS sorted keys each, whatever
their ids: a frequent token is spread over as many programs as it needs. What is complete within a program's keys is written at
once; of a token that spans programs each keeps a partial sum, added in order (segmented reduction)."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import POS, pow2, rowwise, store_or_add, tile_indices
from barellm.cuda.kernels.storage import load_weight, weight_operands
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.runtime.lowering import part

SORTED = 1024  # keys that one program sorts
STEPS = 32  # sorted keys whose rows of dy one program adds up
COLUMNS = 256  # of dy, for each program


@device
def embedding(y, tokens, wte, wte_lo, wpe, wpe_lo, scalars, rows, seq, C, BR, BC):
    """y = wte[token], plus wpe[pos + t] if there are position embeddings; a block (BR, BC) for each program."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    token = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)
    value = load_weight(wte, wte_lo, token[:, None] * C + column[None, :], mask)
    if wpe is not None:
        position = tl.load(scalars + POS) + row % seq
        value += load_weight(wpe, wpe_lo, position[:, None] * C + column[None, :], mask)
    tl.store(y + row[:, None] * C + column[None, :], value, mask=mask)


@lowering("embedding", also={"tokens": "i32", "wte": PLANES, "wpe": PLANES})
def lower_embedding(op: Any, c: Lowering) -> None:
    operands = weight_operands("wte", op.wte)
    operands |= {"wpe": None, "wpe_lo": None} if op.wpe is None else weight_operands("wpe", op.wpe)
    rowwise(c, embedding, op.y, operands)


@device
def embedding_dwpe(dweight, dy, scalars, rows, batch, seq, C, BR, BC, MODE):
    """The gradient of position embeddings: dweight[t] = sum of dy[:, t] over the batch in order; zero beyond it."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    live = mask & (row < seq)[:, None]
    i = row[:, None] * C + column[None, :]
    total = tl.zeros((BR, BC), tl.float32)
    for b in tl.range(0, batch, loop_unroll_factor=4):
        total += tl.load(dy + (b * seq).to(tl.int64) * C + i, mask=live, other=0.0).to(tl.float32)
    store_or_add(dweight + i, mask, total, scalars, MODE)


@lowering("embedding_dwpe", starts="dweight")
def lower_embedding_dwpe(op: Any, c: Lowering) -> None:
    rowwise(c, embedding_dwpe, op.dweight, {"batch": lambda s: s.batch})


@device
def sort_blocks(keys, tokens, n, BLOCK):
    """keys (n) i64 = token * 2^32 + position, each BLOCK of them sorted; what is beyond n sorts last."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + i, mask=i < n, other=0x7FFFFFFF).to(tl.int64)  # 0x7FFFFFFF: above every token
    tl.store(keys + i, tl.sort((token << 32) | i), mask=i < n)


@device
def count_below(keys, key, first, last, steps):
    """How many of the sorted keys [first, last) are less than each `key`, by binary search in `steps`: 2^steps > last - first."""
    low, high = first, last
    for _ in range(0, steps):
        middle = (low + high) // 2
        unfinished = low < high
        is_below = tl.load(keys + middle, mask=unfinished, other=0) < key
        low = tl.where(unfinished & is_below, middle + 1, low)
        high = tl.where(unfinished & (is_below == 0), middle, high)
    return low - first


@device
def merge_runs(merged, keys, n, run, steps, BLOCK):
    """Merge neighbouring runs of `run` sorted keys into `merged`: a key's position is that in its own run plus the number of keys
    below it in the other."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    key = tl.load(keys + i, mask=mask, other=0)
    own_run = i // run * run  # its first key
    pair_start = i // (2 * run) * (2 * run)
    other_run = tl.minimum(2 * pair_start + run - own_run, n)  # the other one of the pair: its first key
    count = count_below(keys, key, other_run, tl.minimum(other_run + run, n), steps)  # keys of the other run that come before
    tl.store(merged + pair_start + (i - own_run) + count, key, mask=mask)


@device
def add_token_rows(dweight, partials, keys, dy, scalars, n, C, STEPS, BC, MODE):
    """The gradient of the token embedding, first step of a segmented sum: dweight[token] = sum of dy's rows of that token, for
    STEPS sorted keys (token << 32 | row, of merge_runs) and BC columns a program. A token all of whose keys are here goes to
    dweight (V, C), stored or added (MODE). partials (programs, 2, C) fp32: the sum of a token that began before the first key, and
    of one that continues after the last; of one that does both only the first. Grid: programs of keys, blocks of columns."""
    begin = tl.program_id(0) * STEPS
    end = tl.minimum(begin + STEPS, n)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < C
    slots = partials + tl.program_id(0).to(tl.int64) * (2 * C) + column  # the program's two
    previous_token = tl.load(keys + begin - 1, mask=begin > 0, other=-1) >> 32  # of the key before this program's
    next_token = tl.load(keys + end, mask=end < n, other=-1) >> 32
    total = tl.zeros((BC,), tl.float32)
    key = tl.load(keys + begin)
    for i in range(begin, end):
        token = key >> 32
        row = key & 0xFFFFFFFF  # of dy
        total += tl.load(dy + row * C + column, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(keys + i + 1, mask=i + 1 < end, other=-1)
        if (key >> 32) != token:  # its last one here
            if token == previous_token:
                tl.store(slots, total, mask=inside)
            elif (i + 1 == end) & (token == next_token):
                tl.store(slots + C, total, mask=inside)
            else:
                store_or_add(dweight + token * C + column, inside, total, scalars, MODE)
            total = tl.zeros((BC,), tl.float32)


@device
def join_token_rows(dweight, partials, keys, scalars, n, steps, C, STEPS, BR, BC, MODE):
    """Second step: dweight[token] of a token whose keys span programs of add_token_rows, by the program in which it began: the
    sum of its partials (programs, 2, C), slot 1 of that program and slot 0 of the following ones, in order, BR at a time."""
    program = tl.program_id(0)
    last = program * STEPS + STEPS - 1  # the program's last key
    token = tl.load(keys + last, mask=last < n, other=-1) >> 32
    next_token = tl.load(keys + last + 1, mask=last + 1 < n, other=-1) >> 32
    previous_token = tl.load(keys + program * STEPS - 1, mask=program > 0, other=-1) >> 32
    if (token == next_token) & (token >= 0) & (token != previous_token):
        column = tl.program_id(1) * BC + tl.arange(0, BC)
        inside = column < C
        count = count_below(keys, (token + 1) << 32, last, n, steps)
        programs = (last + count - 1) // STEPS + 1  # the last program of the token, plus 1
        total = tl.zeros((BR, BC), tl.float32)
        for first in range(program, programs, BR):
            p = first + tl.arange(0, BR)
            slot = 2 * p.to(tl.int64) + tl.where(p == program, 1, 0)  # slot 1 where it began, 0 where it goes on
            i = slot[:, None] * C + column[None, :]
            total += tl.load(partials + i, mask=(p < programs)[:, None] & inside[None, :], other=0.0)
        store_or_add(dweight + token * C + column, inside, tl.sum(total, 0), scalars, MODE)


@device
def clear_absent_tokens(dweight, keys, scalars, rows, n, steps, C, BR, BC, MODE):
    """Store zeros in the rows of dweight (rows, C) of tokens that do not occur, unless the run adds to dweight."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    first = tl.zeros((BR,), tl.int32)
    index = count_below(keys, row << 32, first, first + n, steps)
    token = tl.load(keys + index, mask=index < n, other=-1) >> 32
    zeros = tl.zeros((BR, BC), tl.float32)
    store_or_add(dweight + row[:, None] * C + column[None, :], mask & (token != row)[:, None], zeros, scalars, MODE)


@lowering("embedding_dwte", starts="dweight", also={"tokens": "i32"})
def lower_embedding_dwte(op: Any, c: Lowering) -> None:
    """Plan the launches: sort the keys in blocks, merge them into one run (a launch for each doubling, between two scratch
    buffers), clear the rows of absent tokens unless they are added to, sum by token in two steps."""
    tokens, C, dweight_mode = op.tokens, int(op.dy.shape[-1]), mode(op, "dweight")
    max_tokens, n = tokens.size, c.elements(tokens)
    steps = max_tokens.bit_length() + 1
    block = max(2, min(SORTED, pow2(max_tokens)))
    keys, merged = (c.scratch(name, (max_tokens,), "fp64") for name in ("keys", "merged"))

    def i64(t: Any) -> Any:  # scratch of 8-byte elements is declared as fp64
        return part(t), "i64"

    c.launch(
        sort_blocks, {"keys": i64(keys), "tokens": tokens, "n": n}, {"BLOCK": block},
        grid=lambda s: (ceil_div(n(s), block),), writes="keys", warps=4 if block >= 512 else 1,
    )  # fmt: skip
    run = block
    while run < max_tokens:
        c.launch(
            merge_runs, {"merged": i64(merged), "keys": i64(keys), "n": n, "run": run, "steps": run.bit_length() + 1},
            {"BLOCK": 256}, grid=lambda s: (ceil_div(n(s), 256),), writes="merged",
        )  # fmt: skip
        keys, merged, run = merged, keys, 2 * run
    BC = min(COLUMNS, pow2(C))
    partials = c.scratch("partials", (ceil_div(max_tokens, STEPS), 2, C))
    operands: dict[str, Any] = {"dweight": op.dweight, "keys": i64(keys), "n": n}
    constants: dict[str, Any] = {"C": C, "MODE": dweight_mode}
    if op.modes["dweight"] != "add":
        clear = operands | {"steps": steps}
        rowwise(c, clear_absent_tokens, op.dweight, clear, writes="dweight", MODE=dweight_mode)
    sums = constants | {"STEPS": STEPS, "BC": BC}
    c.launch(
        add_token_rows, operands | {"partials": partials, "dy": op.dy}, sums,
        grid=lambda s: (ceil_div(n(s), STEPS), ceil_div(C, BC)), writes="dweight partials", warps=2,
    )  # fmt: skip
    c.launch(
        join_token_rows, operands | {"partials": partials, "steps": steps}, sums | {"BR": 8},
        grid=lambda s: (ceil_div(n(s), STEPS), ceil_div(C, BC)), writes="dweight",
    )  # fmt: skip
