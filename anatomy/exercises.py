"""The booklet's exercises: `python -m anatomy.exercises` lists them, `python -m anatomy.exercises 3 ANSWER` checks an answer.

No answer is stored: each is computed when it is asked for, by the functions that the figures and the kernels use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from anatomy import kernel_facts as facts
from anatomy import models, timelines
from barellm.cpu import gemm_config
from barellm.cpu.isa import X86
from barellm.errors import UserError
from barellm.program.integers import ceil_div
from barellm.tools.plan.devices import CARDS
from barellm.tools.plan.waves import MULTIPROCESSORS

HOPPER, H100 = MULTIPROCESSORS[90], CARDS["h100"]


@dataclass(frozen=True)
class Exercise:
    """`answer()`: a number, or a word of `words`. `within`: how far a number may be off, as a part of it."""

    chapter: str
    question: str
    answer: Callable[[], float | str]
    within: float = 0.0
    words: tuple[str, ...] = ()

    def check(self, given: str) -> bool:
        """Whether an answer is right; a UserError if it is none."""
        wanted = self.answer()
        if isinstance(wanted, str):
            if given.strip().lower() not in self.words:
                raise UserError(f"the answer is {given!r}, expected one of {', '.join(self.words)}")
            return given.strip().lower() == wanted
        try:
            number = float(given.replace(",", "").removesuffix("%"))
        except ValueError:
            raise UserError(f"the answer is {given!r}, expected a number") from None
        return abs(number - wanted) <= self.within * abs(wanted) + 1e-9


def level(name: str) -> dict[str, float]:
    return facts.recorded("anatomy-1000")["levels"][name]


def peak() -> float:
    """FLOP/s of one thread in fp32, as measured."""
    return median(next(p["flops"] for p in facts.recorded("anatomy-1000")["peaks"] if (p["threads"], p["dtype"]) == (1, "fp32")))


def of_resources(name: str) -> dict[str, int]:
    row = facts.resources()[name]
    return {"threads": row["threads"], "registers": row["registers"], "shared": row["shared"]}


def loads(rows: int, vectors: int) -> float:
    """Load instructions for one multiply-add of a register tile."""
    return (rows + vectors) / (rows * vectors)


def finishes(dynamic: bool) -> float:
    return max(line[-1][1] for line in models.dealt([10] * 12, 3, {2: 3.0}, dynamic=dynamic))


EXERCISES = [
    Exercise(
        "memory",
        "A column of a row-major fp32 matrix with rows of 1000 numbers is summed up. Of each cache line of 64 bytes that is moved, "
        "what percentage is used?",
        lambda: 100 * 4 / 64,
        0.01,
    ),
    Exercise(
        "memory",
        "An L1 of 32 KiB has 8 ways and lines of 64 bytes. How many lines of a column fit into it at once if rows are 2048 "
        "bytes long?",
        lambda: 8 * len({models.cache_set(i * 2048, 32 << 10, 8) for i in range(64)}),
    ),
    Exercise(
        "memory",
        "A panel of B has KC = 300 rows of 16 fp32 numbers, packed from the beginning of a page. How many pages of 4 KiB does "
        "it touch?",
        lambda: ceil_div(300 * 16 * 4, 4096),
    ),
    Exercise(
        "speed_of_light",
        "M = N = K = 512 in fp32, each matrix moved once. How many FLOP are there for each byte?",
        lambda: 2 * 512**3 / (4 * 3 * 512**2),
        0.01,
    ),
    Exercise(
        "speed_of_light",
        "What is the ridge point of the measured core, in FLOP/byte, for a kernel that streams from L2 instead of memory? (Peak: "
        "the roofline "
        "figure; bandwidth: the hierarchy figure.)",
        lambda: peak() / level("L2")["bytes_per_s"],
        0.06,
    ),
    Exercise(
        "speed_of_light",
        "An H100 decodes one text with a model of 7 billion parameters in bf16, and must read each weight once for a token. How "
        "many milliseconds "
        "does a token take at least, by the data sheet?",
        lambda: 7e9 * 2 / H100.memory * 1e3,
        0.03,
    ),
    Exercise(
        "cuda_model",
        "A kernel has blocks of 192 threads with 80 registers each and no shared memory. How many blocks fit on a multiprocessor "
        "of Hopper?",
        lambda: HOPPER.occupancy(threads=192, registers=80, shared=0),
    ),
    Exercise(
        "cuda_model",
        'Which resource limits the step "wgmma and TMA" of the GPU\'s ladder: threads, registers or shared?',
        lambda: min(("threads", "registers", "shared"), key=lambda n: limits("wgmma and TMA")[n]),
        words=("threads", "registers", "shared"),
    ),
    Exercise(
        "cuda_model",
        "A warp issues 3 instructions and then waits 21 cycles. How many such warps are needed so that an instruction is issued "
        "in every cycle?",
        lambda: next(
            n for n in range(1, 64) if all(sum(t in c for c in map(set, models.issue(n, 3, 21, 240))) for t in range(48, 240))
        ),
    ),
    Exercise(
        "tiles",
        "A register tile has 8 rows and 3 vectors of 16 lanes. How many load instructions does it need for one multiply-add "
        "instruction?",
        lambda: loads(8, 3),
        0.01,
    ),
    Exercise(
        "tiles",
        "A block's tile is 128 x 128 with bf16 operands. How many FLOP does it do for each byte of A and B that it loads?",
        lambda: models.intensity(128, 128),
        0.01,
    ),
    Exercise(
        "tiles",
        "36 sums, arranged in a rectangle of whole rows and columns: which number of rows loads least?",
        lambda: max((r for r in range(1, 37) if 36 % r == 0), key=lambda r: models.reuse(r, 36 // r)),
    ),
    Exercise(
        "cpu_core",
        "A core starts two multiply-adds a cycle, each of 5 cycles' latency. How many independent sums does a loop need at least "
        "to reach the peak?",
        lambda: next(n for n in range(1, 99) if models.chains(n, 5, 2) == 1),
    ),
    Exercise(
        "cpu_core",
        "How many cache lines of 64 bytes must be under way to read 40 GB/s from a memory whose latency is 96 ns?",
        lambda: models.in_flight(96e-9, 40e9) / 64,
        0.02,
    ),
    Exercise(
        "cpu_core",
        "How many vector registers does the tile of the shipped kernel leave unused on AVX-512?",
        lambda: X86["avx512"].registers - len(vector_registers()),
    ),
    Exercise(
        "cpu_core",
        "12 equal work items, 3 threads, one of which takes three times as long for each item. An item takes 10. When are all "
        "done if items are taken from a "
        "shared counter?",
        lambda: finishes(True),
    ),
    Exercise(
        "shared_memory",
        "The 32 lanes of a warp read fp32 numbers of global memory with a stride of 5 numbers, from an address that is a "
        "multiple of 32 bytes. How many "
        "sectors are moved?",
        lambda: models.sectors([20 * lane for lane in range(32)]),
    ),
    Exercise(
        "shared_memory",
        "The lanes read words of shared memory with a stride of 12 words. How many cycles does it take?",
        lambda: models.cycles([48 * lane for lane in range(32)]),
    ),
    Exercise(
        "shared_memory", "In the 128-byte swizzle, at which place of its row is chunk 5 of row 14?", lambda: models.swizzled(14, 5)
    ),
    Exercise(
        "tensor_cores",
        "A consumer reads buffer number i = 13 (counted from 0) of a ring of 4. For which parity of full[s] does it wait?",
        lambda: 13 // 4 & 1,
    ),
    Exercise(
        "tensor_cores",
        "A copy takes 5, a product 4, in a ring of 3 buffers. How long do 10 steps take?",
        lambda: models.ring(3, 5, 4, 10)[-1][3],
    ),
    Exercise(
        "tensor_cores", "In the sums of a wgmma, which thread holds row 11, column 5?", lambda: facts.fragments(16, 16)[11, 5]
    ),
    Exercise(
        "scheduling",
        "A C of 2000 x 3000 in tiles of 128 x 256 on 132 multiprocessors: how many waves?",
        lambda: ceil_div(ceil_div(2000, 128) * ceil_div(3000, 256), 132),
    ),
    Exercise(
        "scheduling",
        "The same C: what percentage of the work of all waves belongs to C?",
        lambda: 100 * models.efficiency(2000, 3000, (128, 256), 132),
        0.02,
    ),
    Exercise(
        "scheduling",
        "A weight gradient of 768 x 768 has 18 tiles. Which split-K from 1 to 8 keeps 132 multiprocessors busiest?",
        lambda: max(range(1, 9), key=lambda n: models.wave_efficiency(18 * n, 132)),
    ),
    Exercise(
        "listings_cpu",
        "How many multiply-add instructions does the inner loop of the shipped kernel have on AVX2, for each load?",
        lambda: multiply_adds_per_load(),
        0.01,
    ),
    Exercise(
        "listings_gpu",
        "How many multiply-adds does one step of the consumer's loop do, in one warpgroup?",
        lambda: 64 * 256 * 16 * sum(line.startswith("HGMMA") for line in facts.sass_loop("shipped", "HGMMA")),
    ),
    *(
        Exercise(
            "traces",
            f"traces/slow-{i}.json: what makes this step slow?",
            lambda i=i: timelines.diagnosis(f"slow-{i}")[0],
            words=tuple(timelines.CAUSES),
        )
        for i in range(1, 6)
    ),
]


def limits(name: str) -> dict[str, int]:
    from anatomy.figures.cuda import limits

    return limits(of_resources(name))


def vector_registers() -> dict[int, str]:
    from anatomy.figures.cpu import register_roles

    return register_roles("shipped", "avx512")


def multiply_adds_per_load() -> float:
    loop = facts.inner_loop("shipped", "avx2")
    count = {kind: sum(line.startswith(kind) for line in loop) for kind in ("vfmadd", "vbroadcast", "vmovups")}
    assert gemm_config.default_tile(X86["avx2"], "fp32", facts.SIZE).mr * 2 == count["vfmadd"]
    return count["vfmadd"] / (count["vbroadcast"] + count["vmovups"])


def part(chapter: str) -> str:
    """The exercises of a chapter, for its page."""
    lines = [
        f"{i}. {e.question}" + (f" ({', '.join(e.words)})" if e.words else "")
        for i, e in enumerate(EXERCISES, 1)
        if e.chapter == chapter
    ]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m anatomy.exercises", description="Check an answer to an exercise of docs/book.")
    parser.add_argument("number", nargs="?", help=f"1 to {len(EXERCISES)} (none: list all)")
    parser.add_argument("answer", nargs="?", help="a number, or one of the words that the exercise names (none: show the exercise)")
    options = parser.parse_args(words)
    try:
        if options.number is None:
            print("\n".join(f"{i:2}  {e.chapter:14}  {e.question}" for i, e in enumerate(EXERCISES, 1)))
            return 0
        if not (options.number.isdigit() and 1 <= int(options.number) <= len(EXERCISES)):
            raise UserError(f"the exercise is {options.number!r}, expected a number from 1 to {len(EXERCISES)}")
        exercise = EXERCISES[int(options.number) - 1]
        if options.answer is None:
            print(exercise.question)
            return 0
        right = exercise.check(options.answer)
    except UserError as error:
        print(f"anatomy.exercises: error: {error}", file=sys.stderr)
        return 2
    print("right" if right else f"not right; the chapter is docs/book/{exercise.chapter}.md")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
