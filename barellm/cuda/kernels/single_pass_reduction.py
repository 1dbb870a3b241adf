"""Single-pass reduction over all programs of a launch: the last program to arrive adds up all partial sums (threadFenceReduction).

Each program stores its partial sum, then increments the counter. The program that finds all others counted adds the partial sums in
order, so the bits do not depend on which one it is. It also resets the counter to zero for the next launch. It pays where the
partial sums are few, because one program adds them while the other multiprocessors are idle."""

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.lang import device, tl


@device
def is_last_program(counter):
    """Whether this program is the last of the launch to come here. It then sees what all others stored before they came.

    The barrier puts every thread's stores before the count, which releases them to the other programs and acquires theirs. The
    count reaches all threads through shared memory, behind a barrier of its own."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@device
def store_total(out, partials, n, scalars, BLOCK, MODE):
    """out (1) = the sum of partials (n), in order, stored or added as MODE says. For the last program of a launch."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(partials + i, mask=i < n, other=0.0)
    one = tl.arange(0, 2)
    store_or_add(out + one, one < 1, tl.sum(total, 0) + tl.zeros((2,), tl.float32), scalars, MODE)
