"""What arithmetic alone decides about tiles: what one reuses, where a swizzle puts it, what edges and waves waste."""

from __future__ import annotations

from barellm.program.integers import ceil_div

CHUNKS = 8  # of 16 bytes, that lie in all 32 banks of shared memory: a row of 128 bytes


def reuse(rows: int, columns: int) -> float:
    """Operations for each number loaded, of a tile of sums in registers."""
    return 2 * rows * columns / (rows + columns)


def intensity(rows: int, columns: int, itemsize: int = 2) -> float:
    """Operations for each byte loaded, of a block's tile whose operands have numbers of `itemsize` bytes."""
    return reuse(rows, columns) / itemsize


def swizzled(row: int, chunk: int) -> int:
    """The place of chunk `chunk` within its row of 128 bytes, in the swizzle of 128 bytes: address bits 4 to 6 are xored with
    bits 7 to 9, which number the row."""
    return chunk ^ row % CHUNKS


def conflicts(places: list[int]) -> int:
    """How often the busiest banks are asked when chunks at these places, one a row, are read together: 1 is free of
    conflicts."""
    return max(places.count(place) for place in places)


def wave_efficiency(tiles: int, processors: int) -> float:
    """The share of processors that have a tile to do, on average over the waves."""
    return tiles / (processors * ceil_div(tiles, processors))


def efficiency(M: int, N: int, tile: tuple[int, int], processors: int) -> float:
    """The share of the work of all waves that belongs to C: the rest are processors without a tile and parts of tiles beyond
    C's edge."""
    rows, columns = ceil_div(M, tile[0]), ceil_div(N, tile[1])
    inside = M * N / (rows * tile[0] * columns * tile[1])
    return inside * wave_efficiency(rows * columns, processors)


BANKS, SECTOR, LINE = 32, 32, 128  # banks of 4 bytes; bytes of a sector and of a cache line of a GPU


def bank(address: int) -> int:
    """The bank of shared memory that holds the four bytes at a byte address."""
    return address // 4 % BANKS


def cycles(addresses: list[int]) -> int:
    """How many cycles the 32 reads of 4 bytes of a warp take: the most different words that one bank is asked for. Threads that
    want the same word get it together."""
    words = {address // 4 for address in addresses}
    return max(sum(word % BANKS == b for word in words) for b in range(BANKS))


def sectors(addresses: list[int]) -> int:
    """Different sectors of 32 bytes that a warp's reads of global memory touch: so much is moved."""
    return len({address // SECTOR for address in addresses})


def swizzled_in(width: int, row: int, chunk: int) -> tuple[int, int]:
    """(line of 128 bytes, place in it) of 16-byte chunk `chunk` of row `row`, of a tile whose rows have `width` bytes: 32, 64,
    128. Address bits from 7 on are xored into those from 4 on: three bits for 128 bytes, two for 64, one for 32."""
    address = width * row + 16 * chunk
    address ^= (address >> 7 & width // 16 - 1) << 4
    return address // LINE, address % LINE // 16


def cache_set(address: int, nbytes: int, ways: int, line: int = 64) -> int:
    """The set of a cache in which a line may lie."""
    return address // line % (nbytes // (line * ways))


def chains(accumulators: int, latency: int, per_cycle: int) -> float:
    """The share of the peak that so many independent chains of multiply-adds reach (Little's law): latency x rate must be under
    way."""
    return min(1.0, accumulators / (latency * per_cycle))


def in_flight(latency_s: float, bytes_per_s: float) -> float:
    """Bytes that must be on their way at once for a memory to give all it can (Little's law)."""
    return latency_s * bytes_per_s


def ring(buffers: int, load: int, multiply: int, steps: int) -> list[tuple[int, int, int, int]]:
    """(load begins, ends, multiplication begins, ends) of each step, where a load needs a free buffer and one load runs at a
    time."""
    found: list[tuple[int, int, int, int]] = []
    for i in range(steps):
        free = found[i - buffers][3] if i >= buffers else 0
        begin = max(free, found[-1][1] if found else 0)
        start = max(begin + load, found[-1][3] if found else 0)
        found.append((begin, begin + load, start, start + multiply))
    return found


def dealt(costs: list[int], threads: int, slow: dict[int, float], *, dynamic: bool) -> list[list[tuple[float, float]]]:
    """For each thread the (begin, end) of its work items. `slow`: thread -> how many times longer its items take. `dynamic`:
    whoever is free takes the next item; otherwise each has an equal run of them beforehand."""
    spans: list[list[tuple[float, float]]] = [[] for _ in range(threads)]
    now = [0.0] * threads
    for i, cost in enumerate(costs):
        t = min(range(threads), key=now.__getitem__) if dynamic else i * threads // len(costs)
        spans[t].append((now[t], now[t] + cost * slow.get(t, 1)))
        now[t] = spans[t][-1][1]
    return spans


def issue(warps: int, busy: int, wait: int, until: int) -> list[list[int]]:
    """The cycles in which each warp issues an instruction: one in a cycle, the first warp that is ready. A warp issues `busy`
    of them and then waits `wait` cycles for memory."""
    ready, done = [0] * warps, [0] * warps
    found: list[list[int]] = [[] for _ in range(warps)]
    for now in range(until):
        for w in range(warps):
            if ready[w] <= now:
                found[w].append(now)
                done[w] += 1
                ready[w] = now + 1 + (wait if done[w] % busy == 0 else 0)
                break
    return found
