"""Collectives between ranks: reduce-scatter, all-gather and all-reduce. Messages are sent by an external call of the step, on one
thread; received gradients are added by a kernel. A step is compiled once and run many times: a call's `prepare` gets the arrays of
its operands and returns the function that each run calls."""

import ctypes
from collections.abc import Callable
from functools import reduce
from operator import add

import numpy as np

from barellm.cpu.kernel import PLANES, Lowering, Op, Pointer, Region, Tensor, lowering, part, plane
from barellm.cpu.kernels import loops, reductions
from barellm.program.ops.optim.optimizer import CHUNK

Arrays = list[tuple[int, np.ndarray]]  # with their destination or source rank


def sum_over_ranks(k, y, own, others, n, *, rank, count) -> None:
    """The kernel of a reduce-scatter: y (n) = the sum of all ranks' gradients, own (n) and others (count - 1, n), in rank order."""
    for i, mask, put in loops.elementwise(k, n, y):
        terms = [others.load(n * j + i, mask) for j in range(count - 1)]
        terms.insert(rank, own.load(i, mask))
        put(reduce(add, terms))


@lowering("sum_over_ranks", floats="fp32 bf16", spans="own y")
def lower_sum_over_ranks(op: Op, c: Lowering) -> None:
    operands = {"y": op.y, "own": op.own, "others": op.others, "n": op.own.size}
    c.call(sum_over_ranks, operands, {"rank": op.rank, "count": op.others.shape[0] + 1}, writes="y")


@lowering("all_to_all", floats="fp32 bf16", spans="*")
def lower_exchange(op: Op, c: Lowering) -> None:
    _transfer(op, c, lambda t: [part(t)])


@lowering("start_all_to_all", floats="fp32 bf16", spans="*")
def lower_start_all_to_all(op: Op, c: Lowering) -> None:
    def begin(sends: Arrays, receives: Arrays) -> Callable[[], None]:
        return op.ranks.beginning(op.number, sends, receives)

    _transfer(op, c, lambda t: [part(t)], begin, scalar="last")


@lowering("wait_all_to_all", floats="fp32 bf16")
def lower_wait_all_to_all(op: Op, c: Lowering) -> None:
    c.extern(lambda arrays: op.ranks.ending(op.number), [], [part(t) for t in op.outputs.values()])


@lowering("all_gather", floats=f"fp32 bf16 {PLANES}", spans="*")
def lower_gather(op: Op, c: Lowering) -> None:
    _transfer(op, c, lambda t: [plane(t, number)[0] for number in op.planes(t)] or [part(t)])


def _transfer(op: Op, c: Lowering, regions: Callable[[Tensor], list[Region]],
        transfer: Callable[[Arrays, Arrays], Callable[[], None]] | None = None, *, scalar: str = "") -> None:  # fmt: skip
    """Append an external call that exchanges messages between ranks, from and to the arena. regions(t): the bytes of a tensor that
    are sent or received. transfer(sends, receives) gives the function that a run calls; None: the ranks' `prepared`, which sends
    and waits. `scalar`: the name of the run-time scalar that it depends on."""
    transfer = transfer or op.ranks.prepared
    regions_of = {name: regions(t) for name, t in (op.inputs | op.outputs).items()}
    reads = [region for name in op.inputs for region in regions_of[name]]
    writes = [region for name in op.outputs for region in regions_of[name]]

    def prepare(arrays: list[np.ndarray]):
        flat = iter(arrays)  # in the order of `reads` and `writes`
        arrays_of = {name: [next(flat) for _ in parts] for name, parts in regions_of.items()}
        return transfer(op.departing(arrays_of), op.arriving(arrays_of))

    c.extern(prepare, reads, writes, scalar=scalar)


# --- all-reduce by reading other ranks' memory (one node) ---

# Indices in a table of i64: the address of process_vm_readv, whether a read has failed, the others' process ids, and then for each
# shard the addresses of their gradients.
FUNCTION, FAILED, PROCESSES = 0, 1, 2


def sum_share(k, y, partials, own, table, number, n, *, rank, count) -> None:
    """The kernel: y (n) = the sum of all ranks' gradients of shard `number`, in rank order, and partials (chunks) = sums of its
    squares. `own` (n): this rank's gradient; the other ranks' are read a chunk at a time into this thread's scratch, [rank][CHUNK]
    (L2): DRAM is read once and not written. `table`: see FUNCTION, FAILED, PROCESSES."""
    others, received = count - 1, k.thread_scratch()
    with k.parallel_for((n + CHUNK - 1) // CHUNK) as chunk:
        begin, end = chunk * CHUNK, k.min((chunk + 1) * CHUNK, n)
        for j in range(others):
            remote = table.get(number * others + (PROCESSES + others + j)) + begin * own.itemsize  # address of rank j's chunk
            read_process(k, table, table.get(PROCESSES + j), remote, received.at(j * CHUNK), (end - begin) * own.itemsize)
        sums = loops.new_accumulators(k, reductions.CHAINS)
        for i, mask, chain in loops.vectors(k, begin, end, unroll=reductions.CHAINS):
            terms = [received.load(i - begin + j * CHUNK, mask) for j in range(others)]
            terms.insert(rank, own.load(i, mask))
            total = reduce(add, terms)
            y.store(total, i, mask)
            sums[chain].value = k.fma(total, total, sums[chain].value)
        partials.put(k.sum(loops.tree_reduce(sums, add)), chunk)


def read_process(k, table, process, remote, received, nbytes) -> None:
    """Copy `nbytes` bytes from address `remote` of another `process` (its id) to `received`, by Linux's process_vm_readv with one
    iovec on each side. A short read sets FAILED in the table."""
    iovecs = []
    for address in (k.op("i64", f"ptrtoint ptr {received.ref} to i64"), remote):
        iovec = Pointer(k, k.alloca("i64", 2), "i64")
        iovec.put(address, 0)
        iovec.put(nbytes, 1)
        iovecs.append(f"ptr {iovec.ref}, i64 1")
    function = k.op("ptr", f"inttoptr i64 {table.get(FUNCTION).ref} to ptr")
    number = k.op("i32", f"trunc i64 {process.ref} to i32")
    copied = k.op("i64", f"call i64 {function.ref}(i32 {number.ref}, {', '.join(iovecs)}, i64 0)")
    with k.when(copied.differs(nbytes)):
        table.put(k.int(1), FAILED)


@lowering("reduce_scatter", floats="fp32", spans="*")
def lower_reduce_scatter(op: Op, c: Lowering) -> None:
    """Three steps: all ranks exchange the addresses of their gradients and wait until these are complete; the kernels read and add
    them, a shard each; all ranks wait until none reads any more, and exchange whether a read failed."""
    ranks, shares = op.ranks, op.shares
    others = ranks.count - 1
    table = c.workspace("places", 8 * (PROCESSES + others * (1 + len(shares))))
    reads = [part(t) for t in op.inputs.values()]

    def begin(arrays: list[np.ndarray]):
        """Prepare the first call: exchange addresses, build the table, and at each run copy it to the arena and wait."""
        inputs = dict(zip(op.inputs, arrays, strict=False))
        peers = ranks.peer_addresses(op.departing({name: [array] for name, array in inputs.items()}))  # (process, addresses)
        addresses = np.array([addresses for _, addresses in peers], np.int64).reshape(others, len(shares)).T
        processes = [process for process, _ in peers]
        entries = np.array([process_vm_readv(), 0, *processes, *addresses.reshape(-1)], np.int64).view(np.uint8)

        def call() -> None:
            arrays[-1][: entries.size] = entries
            if op.meets[0]:
                ranks.barrier()

        return call

    def end(arrays: list[np.ndarray]):
        """Prepare the last call: a barrier, which reports whether a read failed."""

        def call() -> None:
            failed = bool(arrays[-1].view(np.int64)[FAILED])
            if failed or op.meets[1]:
                ranks.barrier(complete=not failed)

        return call

    c.extern(begin, reads, [part(table)])
    c.thread_scratch(4 * CHUNK * others)
    for i, own in enumerate(shares):
        y, partials = op.outputs[f"y{i}"], op.outputs[f"p{i}"]
        operands = {"y": y, "partials": partials, "own": own, "table": (part(table), "i64"), "number": i, "n": own.size}
        c.call(sum_share, operands, {"rank": ranks.rank, "count": ranks.count}, writes="y partials")
    c.extern(end, [part(t) for t in op.outputs.values()], [part(table)])


def process_vm_readv() -> int:
    """The address of Linux's process_vm_readv."""
    address = ctypes.cast(ctypes.CDLL(None).process_vm_readv, ctypes.c_void_p).value
    assert address is not None
    return address
