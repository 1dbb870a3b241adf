"""Microbenchmarks of the roofline: peak FLOP/s and bandwidth (the result depends on every operation, and nobody reads it)."""

from barellm.cuda.lang import device, tl


@device
def peak(out, a, b, iterations, ROWS, COLS, DEPTH):
    """Peak FLOP/s: each thread block does the same matmul a (ROWS, DEPTH) b (DEPTH, COLS) `iterations` times, from shared memory
    and registers. out (blocks): a number that depends on all of them."""
    m, n, k = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, DEPTH)
    x = tl.load(a + m[:, None] * DEPTH + k[None, :])
    y = tl.load(b + k[:, None] * COLS + n[None, :])
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(iterations):
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(acc, 1), 0))


@device
def move(a, b, c, n, READ, WRITE, UPDATE, BLOCK):
    """Memory bandwidth: reads READ streams of n floats of a (READ, n), writes WRITE of them to b, updates UPDATE of them in c, each
    of which depends on all reads. n is a multiple of BLOCK (a power of two), a program's elements of each stream."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(READ):
        total += tl.load(a + s * n.to(tl.int64) + i)
    for s in tl.static_range(WRITE):
        tl.store(b + s * n.to(tl.int64) + i, total + s)
    for s in tl.static_range(UPDATE):
        at = c + s * n.to(tl.int64) + i
        tl.store(at, tl.load(at) * 0.5 + total)
    if WRITE + UPDATE == 0:  # never true, but the compiler must keep the reads
        tl.store(b + i, total, mask=total == 1e30)


@device
def differences(found, a, b, n, blocks, BLOCK):
    """found (programs): how many of the numbers a (n) and b (n) differ, of the `blocks` times BLOCK that each program compares."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * blocks * BLOCK
    for block in range(blocks):
        at = first + block * BLOCK + i
        live = at < n.to(tl.int64)
        total += (tl.load(a + at, mask=live, other=0) != tl.load(b + at, mask=live, other=0)).to(tl.int32)
    tl.store(found + tl.program_id(0), tl.sum(total, 0))
