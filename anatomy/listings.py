"""Annotated listings: the inner loops of the shipped matmul as compilers make them, a sentence for each instruction.

x86-64: a sentence follows from what the loop's registers hold, so no code can appear that it does not explain. PTX and SASS: a list
of (mnemonic, sentence); a compiler that gives other instructions, or another order, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from anatomy import kernel_facts as facts
from barellm.errors import UserError

Row = tuple[str, str]  # instruction, sentence


# --- x86-64 ---


def x86(name: str, isa: str) -> list[Row]:
    """The inner loop of a step of the CPU's ladder for an instruction set, with sentences."""
    rows, holds, lanes = [], dict[str, str](), 8 if isa == "avx2" else 16
    loop, pitch = facts.inner_loop(name, isa), facts.SIZE * (2 if "16 bits" in name else 4)
    pair = "pair" if "16 bits" in name else "number"
    vectors = 0
    pointers: dict[str, str] = {}
    for line in loop:
        mnemonic, _, operands = line.partition(" ")
        registers = re.findall(r"%([xyz]mm\d+)", operands)
        memory = re.search(r"(-?\d*)\(%(\w+)", operands)
        if mnemonic == "vbroadcastss" and memory:
            row = int(memory[1] or 0) // pitch
            holds[registers[0]] = f"row {row}"
            pointers[memory[2]] = f"the {pair}s of A"
            words = f"Loads the {pair} of row {row} of A and copies it into all {lanes} lanes. Rows lie {pitch} bytes apart."
        elif mnemonic == "vmovups" and memory and operands.endswith(f"%{registers[0]}"):
            holds[registers[0]] = f"vector {vectors}"
            pointers[memory[2]] = "the panel of B"
            words = (
                f"Loads vector {vectors} of the packed panel of B: {lanes} columns, "
                f"{'a pair of k each' if pair == 'pair' else 'one k'}."
            )
            vectors += 1
        elif mnemonic in ("vfmadd231ps", "vdpbf16ps"):
            row, vector = sorted(holds[r] for r in registers[:2])
            what = "multiply-adds" if mnemonic == "vfmadd231ps" else "pairs of products, added in fp32"
            words = f"{row.capitalize()} x {vector}: {lanes} {what}. The sums stay in {registers[2]}."
        elif mnemonic == "incq":
            pointers[operands.strip("%")] = "the count of steps"
            words = "Counts the steps of the depth."
        elif mnemonic == "addq":
            amount, register = re.findall(r"\$(-?\d+), %(\w+)", operands)[0]
            words = f"Moves the pointer to {pointers[register]} to the next step: {amount} bytes."
        elif mnemonic == "cmpq":
            words = "Compares the count with the end of this block of the depth."
        elif mnemonic in ("jl", "jle"):
            words = "Back to the first instruction, until the block is done."
        else:
            raise UserError(f"the inner loop of {name} for {isa} has {line!r}, expected an instruction that a listing explains")
        rows.append((line, words))
    return rows


AMX: list[Row] = [
    ("leaq", "The address of the upper 16 rows of A: 16 x 192 bytes before the lower ones."),
    ("movl", "The pitch of A, 192 bytes: AMX takes it in a register. It never changes, and could stay where it was."),
    ("tileloadd", "Loads tile A0: 16 rows of 64 bytes, a row every 192 bytes."),
    ("movl", "The pitch of the packed panel, 128 bytes: two tiles of 64 bytes side by side."),
    ("tileloadd", "Loads tile B0 of the panel: 16 pairs of k for 16 columns."),
    ("tdpbf16ps", "C00 += A0 x B0: 16 x 16 x 32 multiply-adds, sums in fp32."),
    ("leaq", "The address of the panel's second tile, 64 bytes further."),
    ("tileloadd", "Loads tile B1: the next 16 columns."),
    ("tdpbf16ps", "C01 += A0 x B1. Tile A0 is used for the second time."),
    ("tileloadd", "Loads tile A1: the lower 16 rows of A."),
    ("tdpbf16ps", "C10 += A1 x B0. Tile B0 is used for the second time."),
    ("tdpbf16ps", "C11 += A1 x B1. Four products, four loads."),
    ("incq", "Counts the steps: each is 32 of the depth."),
    ("addq", "The panel's pointer: 16 pairs of k, 128 bytes each."),
    ("addq", "The pointer to A: 32 numbers of bf16."),
    ("cmpq", "Compares the count with the last step."),
    ("jle", "Back to the first instruction."),
]


# --- PTX and SASS of the shipped kernel's consumer ---

PTX: list[Row] = [
    (
        "shr.s32",
        "The sign of i, the number of buffers read so far, in all 32 bits. i is never negative; the compiler does not know.",
    ),
    ("shr.u32", "3 if i were negative, else 0."),
    ("add.s32", "What a division of a signed number by 4 adds so that it rounds towards zero."),
    ("shr.s32", "i / 4: how often the ring of four buffers has gone round."),
    ("shl.b32", "32 (i / 4): an mbarrier has 8 bytes, so a round of four moves on by 32."),
    ("sub.s32", "A pointer that moves on by 8 in each step, less 32 for each round: 8 (i % 4), the offset of full[i % 4]."),
    ("add.s32", "The address of that mbarrier in shared memory."),
    ("bfe.u32", "The lowest bit of i / 4: the phase that this round waits for."),
    ("bar.sync", "All 128 threads of this warpgroup meet (named barrier 2). Triton puts it before each wait."),
    ("mbarrier.try_wait.parity.shared.b64", "Has the phase of full[s] completed: have all bytes of buffer s arrived?"),
    ("@!complete", "If not, ask again. The instruction before waits a while by itself."),
    ("add.s32", "The offset of A's buffers, moved on with each step."),
    ("shl.b32", "64 KiB, the bytes of the ring of A, for each round."),
    ("sub.s32", "Less them: the offset of buffer i % 4."),
    ("add.s32", "The address of this consumer's half of A."),
    ("bfe.u32", "A matrix descriptor holds an address in units of 16 bytes, in 14 bits."),
    ("cvt.u64.u32", "Made 64 bits wide: a descriptor's size."),
    ("add.s32", "The same for B: its offset, moved on with each step."),
    ("shl.b32", "128 KiB, the bytes of the ring of B, for each round."),
    ("sub.s32", "The address of buffer i % 4 of B."),
    ("bfe.u32", "In units of 16 bytes."),
    ("cvt.u64.u32", "As a 64-bit number."),
    ("wgmma.fence.sync.aligned", "Registers of sums that were written before are seen by the tensor cores."),
    ("or.b64", "A's descriptor: address, strides, and the 128-byte swizzle."),
    ("or.b64", "B's descriptor. It has a leading stride of 8 KiB: B lies in pieces of 64 columns."),
    ("mov.pred", "True: add to the sums that are there."),
    (
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        "k 0 to 15 of the step: 64 x 256 sums in 128 registers of 128 threads. It only starts here.",
    ),
    ("add.s64", "A's descriptor, 16 numbers along its row: 32 bytes, 2 units."),
    ("add.s64", "B's descriptor, 16 rows of 128 bytes: 128 units."),
    ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "k 16 to 31."),
    ("add.s64", "A, another 32 bytes."),
    ("add.s64", "B, another 16 rows."),
    ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "k 32 to 47."),
    ("add.s64", "A, another 32 bytes."),
    ("add.s64", "B, another 16 rows."),
    ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "k 48 to 63: the step of 64 is complete."),
    ("wgmma.commit_group.sync.aligned", "The four products are one group."),
    ("wgmma.wait_group.sync.aligned", "Waits until at most one group is under way: the one of the step before is done."),
    ("setp.gt.s32", "Is this not the first step of the tile?"),
    ("add.s32", "i + 3: the buffer of the step before is (i + 3) % 4."),
    ("shr.s32", "Its sign, for a signed division once more."),
    ("shr.u32", "3 if it were negative, else 0."),
    ("add.s32", "Rounded towards zero."),
    ("and.b32", "The largest multiple of 4 below."),
    ("sub.s32", "(i + 3) % 4."),
    ("shl.b32", "8 bytes for an mbarrier."),
    ("add.s32", "As an offset into shared memory."),
    ("add.s32", "The address of empty[(i + 3) % 4]."),
    ("bar.sync", "The warpgroup meets again, before one thread speaks for all."),
    ("and.pred", "One thread only, and not in the first step."),
    ("@%p14", "Arrives at empty[s]: this consumer has read the buffer. The producer may fill it when both have."),
    ("add.s32", "i moves on."),
    ("add.s32", "k moves on by 64."),
    ("add.s32", "A's pointer: 16 KiB, both halves of a buffer."),
    ("add.s32", "B's pointer: 32 KiB."),
    ("add.s32", "The pointer to mbarriers: 8 bytes."),
    ("setp.lt.s32", "Is there more of the depth?"),
    ("@%p17", "Back to the first instruction."),
]

SASS: list[Row] = [
    ("USHF.R.S32.HI", "The sign of i. Names that begin with U use one register for the whole warp (uniform registers)."),
    ("BAR.SYNC.DEFER_BLOCKING", "The 128 threads of the warpgroup meet: PTX's bar.sync."),
    ("ULEA.HI", "i plus 3 if it were negative: a signed division by 4 begins."),
    ("UMOV", "The upper half of A's descriptor: the 128-byte swizzle and a stride of 1 KiB."),
    ("USHF.R.U32.HI", "The quotient's bits, for the parity."),
    ("USHF.R.S32.HI", "i / 4, the round of the ring."),
    ("USGXT.U32", "Its lowest bit: the phase."),
    ("UIMAD", "The offset of full[i % 4]: a pointer less 32 bytes for each round."),
    ("USHF.L.U32", "The phase goes to bit 31, where SYNCS wants it."),
    ("UIADD3", "The address of B's buffers, moved on with each step."),
    ("UMOV", "The upper half of B's descriptor."),
    ("IMAD.U32", "The phase, copied from a uniform register: SYNCS takes it from an ordinary one."),
    ("UIADD3", "The address of A's buffers."),
    ("UIMAD", "B: less 128 KiB for each round."),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "PTX's mbarrier.try_wait: has this phase of full[s] completed?"),
    ("UIMAD", "A: less 64 KiB for each round. Address arithmetic goes on while the answer is under way."),
    ("USHF.R.U32.HI", "B's address in units of 16 bytes."),
    ("UIADD3", "A's half of this consumer begins at 0x22000."),
    ("USGXT.U32", "14 bits of B's address, as the descriptor wants."),
    ("USHF.R.U32.HI", "A's address in units of 16 bytes."),
    ("ULOP3.LUT", "B's lower half: the address, and the leading stride above it."),
    ("USGXT.U32", "14 bits of A's address. Its leading stride is not used with this swizzle."),
    ("@!P0", "If the buffer has not come: to a short loop outside that asks again."),
    ("WARPGROUP.ARRIVE", "PTX's wgmma.fence: the four warps are about to use the tensor cores."),
    ("UMOV", "Zero, for a carry below."),
    ("ISETP.GT.AND", "Whether this thread is the one that releases buffers, and this not the tile's first step."),
    ("VIADD", "k moves on by 64."),
    ("UIADD3", "A's pointer moves on by 16 KiB."),
    (
        "HGMMA.64x256x16.F32.BF16",
        "k 0 to 15. gdesc: four uniform registers, two descriptors; tnspB: B is stored along its columns; R24 is the first of "
        "128 registers of sums.",
    ),
    ("UIADD3", "B's descriptor, 16 rows on."),
    ("UIADD3", "A's descriptor, 32 bytes on."),
    ("UMOV", "Zero, for a carry."),
    ("UIADD3", "B's pointer moves on by 32 KiB."),
    ("UIADD3.X", "The upper half of B's descriptor, with the carry."),
    ("UIADD3.X", "The upper half of A's, with the carry."),
    ("UIADD3.64", "B's descriptor of the third product, already."),
    ("UIADD3.64", "A's descriptor of the third product."),
    ("UIADD3", "i + 3, for the buffer of the step before."),
    ("UIADD3", "i moves on."),
    ("USHF.R.S32.HI", "The sign of i + 3: the second signed division."),
    ("UIADD3", "The pointer to mbarriers moves on by 8 bytes."),
    ("ULEA.HI", "Plus 3 if negative."),
    ("ULOP3.LUT", "The multiple of 4 below."),
    ("UIADD3", "(i + 3) % 4."),
    ("ULEA", "8 bytes each: the offset of empty[(i + 3) % 4]."),
    ("HGMMA.64x256x16.F32.BF16", "k 16 to 31."),
    ("UIADD3.64", "B's descriptor of the fourth product."),
    ("UIADD3.64", "A's descriptor of the fourth product."),
    ("NOP", "Nothing, for one issue slot."),
    ("HGMMA.64x256x16.F32.BF16", "k 32 to 47, with the descriptors of UR16 to UR19."),
    ("NOP", "Nothing again."),
    ("HGMMA.64x256x16.F32.BF16", "k 48 to 63. gsb0: the group ends here, and its end can be waited for."),
    ("WARPGROUP.DEPBAR.LE", "PTX's wait_group 1: at most one group is still under way."),
    ("BAR.SYNC.DEFER_BLOCKING", "The warpgroup meets again."),
    ("@P0", "One thread arrives at empty[s] of the step before: its buffer has been read."),
    ("ISETP.GE.AND", "Was this the last step of the depth?"),
    ("@!P0", "If not, back to the first instruction."),
]


def explained(loop: list[str], sentences: list[Row], what: str) -> list[Row]:
    """The loop's instructions with their sentences; a UserError where a mnemonic or the order is another."""
    found, wanted = [line.split()[0].rstrip(";") for line in loop], [m for m, _ in sentences]
    if found != wanted:
        at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
        a, b = (x[at] if at < len(x) else "the end" for x in (found, wanted))
        raise UserError(f"{what}: instruction {at + 1} is {a}, the listing has {b}")
    return [(line, words) for line, (_, words) in zip(loop, sentences, strict=True)]


def shortened(line: str) -> str:
    """Without the list of 128 registers of a wgmma."""
    return re.sub(r"\{(%r\d+),.*,(%r\d+)\}", r"{\1, ..., \2}", " ".join(line.split()))


def amx() -> list[Row]:
    return explained(facts.inner_loop("shipped, 16 bits", "amx_bf16"), AMX, "the inner loop for AMX")


def ptx() -> list[Row]:
    return explained([shortened(x) for x in facts.ptx_loop("shipped", "wgmma")], PTX, "the consumer's loop in PTX")


def sass() -> list[Row]:
    return explained(facts.sass_loop("shipped", "HGMMA"), SASS, "the consumer's loop in SASS")


LISTINGS: dict[str, Callable[[], list[Row]]] = {
    "avx2": lambda: x86("shipped", "avx2"),
    "avx512": lambda: x86("shipped", "avx512"),
    "avx512_bf16": lambda: x86("shipped, 16 bits", "avx512_bf16"),
    "amx_bf16": amx,
    "ptx": ptx,
    "sass": sass,
}


def table(name: str) -> str:
    """A listing as a table of a page."""
    rows = [f"| {i} | `{line}` | {words} |" for i, (line, words) in enumerate(LISTINGS[name](), 1)]
    return "\n".join(["| | instruction | what it does |", "|---|---|---|", *rows])


# --- what compilers do badly ---


def evidence() -> Iterator[tuple[str, str, str]]:
    """(what, where, count) of each finding, counted in the code that the compilers make."""

    def count(loop: list[str], pattern: str) -> int:
        return sum(bool(re.match(pattern, line)) for line in loop)

    consumer = facts.sass_loop("shipped", "HGMMA")
    amx_loop = facts.inner_loop("shipped, 16 bits", "amx_bf16")
    avx2 = facts.inner_loop("shipped", "avx2")
    vector = facts.inner_loop("vector", "avx2")
    uniform = sum(line.split()[0].startswith("U") for line in consumer)
    products = count(consumer, "HGMMA")
    yield (
        "signed division by 4 of a number that is never negative",
        "SASS, consumer's loop of the shipped kernel",
        (
            f"{count(consumer, r'USHF.R.S32.HI [^,]*, URZ, 0x1f|ULEA.HI')} instructions that only round negative numbers, for 2 "
            f"divisions"
        ),
    )
    yield (
        "addresses and descriptors computed anew in each step",
        "the same loop",
        (f"{uniform} uniform instructions for {products} products"),
    )
    yield (
        "barriers of the whole warpgroup around an mbarrier",
        "the same loop",
        (f"{count(consumer, 'BAR.SYNC')} BAR.SYNC of 128 threads in a step"),
    )
    yield "instructions that do nothing", "the same loop", f"{count(consumer, 'NOP')} NOP between products"
    yield (
        "constants and addresses made again in every step",
        "AMX, inner loop of the shipped kernel",
        (
            f"{count(amx_loop, 'movl')} movl of pitches and {count(amx_loop, 'leaq')} leaq for {count(amx_loop, 'tdpbf16ps')} "
            f"products"
        ),
    )
    yield (
        "a counter beside two pointers that move with it",
        "AVX2, inner loop of the shipped kernel",
        (f"{count(avx2, 'incq|addq|cmpq|j')} of {len(avx2)} instructions of a step"),
    )
    yield (
        "a loop with its test at the top",
        'AVX2, step "vector"',
        (
            f'{count(vector, "j")} jumps in a step of {len(vector)} instructions; the loop of step "naive" has '
            f"{count(facts.inner_loop('naive', 'avx2'), 'j')}"
        ),
    )
    unmasked = facts.sass_loop("naive", "FFMA")
    yield (
        "the test of a mask that does not change",
        'SASS, loop of step "naive"',
        (f"{count(unmasked, r'ISETP.GE')} ISETP of the row's bound in each of {facts.GPU_SIZE:,} steps"),
    )


def evidence_table() -> str:
    rows = [f"| {what} | {where} | {count} |" for what, where, count in evidence()]
    return "\n".join(["| what | where | evidence |", "|---|---|---|", *rows])
