"""The PTX machine: what warps do to each other, faults, copies, counts, on kernels that are written here."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.simulators.interpreter import OutOfBounds
from tests.simulators.ptx.launch import RUNS
from tests.simulators.ptx.machine import Counts, Deadlock, Fault
from tests.simulators.ptx.memory import passes
from tests.simulators.ptx.snippet import run, run_on


def test_masked_lanes_keep_what_they_had():
    body = "mov.b32 %r2, 7; setp.lt.u32 %p1, %r0, 5; @%p1 mov.b32 %r2, 9; @!%p1 add.s32 %r2, %r2, 1; st.global.b32 [%rd4], %r2;"
    assert run(body, np.zeros(1, "u4"), "u4").tolist() == [9] * 5 + [8] * 27


def test_what_nobody_wrote_differs_between_the_runs():
    body = "setp.lt.u32 %p1, %r0, 5; @%p1 mov.b32 %r2, 1; st.global.b32 [%rd4], %r2;"
    first, second = (run(body, np.zeros(1, "u4"), "f4", how=how) for how in RUNS.values())
    assert np.isnan(first[5:]).all() and (second[5:] > 3e38).all()
    body = "mov.b32 %r1, global_smem; ld.shared.b32 %r2, [%r1+16]; st.global.b32 [%rd4], %r2;"
    first, second = (run(body, np.zeros(1, "u4"), "f4", how=how) for how in RUNS.values())
    assert np.isnan(first).all() and (second > 3e38).all()


def test_a_packed_compare_sets_one_predicate_for_each_half():
    low, high = (int(np.float32(v).view("u4") >> 16) for v in (-2.0, 3.0))  # as bf16
    for word, wanted in ((high << 16 | low, 1), (low << 16 | high, 2), (low << 16 | low, 3), (high << 16 | high, 0)):
        body = (
            f"mov.b32 %r1, {word}; mov.b32 %r2, 0; setp.lt.bf16x2 %p1|%p2, %r1, %r2;"
            "selp.b32 %r3, 1, 0, %p1; selp.b32 %r4, 2, 0, %p2; add.s32 %r3, %r3, %r4; st.global.b32 [%rd4], %r3;"
        )
        assert run(body, np.zeros(1, "u4"), "u4").tolist() == [wanted] * 32


# Every thread leaves a word for the thread at the other end of the block.
EXCHANGE = """
    mov.b32 %r1, global_smem;
    shl.b32 %r2, %r0, 2;
    add.s32 %r3, %r1, %r2;
    sub.s32 %r4, 508, %r2;
    add.s32 %r4, %r1, %r4;
    st.shared.b32 [%r3], %r0;
    bar.sync 0;
    ld.shared.b32 %r5, [%r4];
    st.global.b32 [%rd4], %r5;
"""


def test_barrier_orders_what_warps_exchange():
    for how in RUNS.values():
        assert run(EXCHANGE, np.zeros(1, "u4"), "u4", threads=128, how=how).tolist() == list(range(127, -1, -1))


def found_wrong(body: str, want: list[int], threads: int = 128) -> bool:
    """Whether one of the runs fails, or gives something else."""
    try:
        return any(run(body, np.arange(128, dtype="u4"), "u4", threads=threads, how=how).tolist() != want for how in RUNS.values())
    except Fault:
        return True


def test_missing_barrier_shows():
    assert found_wrong(EXCHANGE.replace("bar.sync 0;", ""), list(range(127, -1, -1)))


def test_barrier_that_some_warps_never_reach():
    body = "setp.lt.u32 %p1, %r0, 96; @%p1 bra there; bra.uni out; there: bar.sync 0; out: mov.b32 %r1, 1;"
    with pytest.raises(Deadlock, match=r"bar\.sync 0"):
        run(body, np.zeros(1, "u4"), "u4", threads=128)


def test_named_barrier_of_some_warps():
    """Warps 0 and 1 meet at a barrier of 64 threads, and 2 and 3 arrive at one without waiting, for which the first two wait."""
    body = """
    mov.b32 %r1, global_smem;
    setp.lt.u32 %p1, %r0, 64;
    @%p1 bra consumer;
    mov.b32 %r2, 5;
    st.shared.b32 [%r1], %r2;
    bar.arrive 3, 128;
    bra.uni out;
consumer:
    bar.sync 2, 64;
    bar.sync 3, 128;
    ld.shared.b32 %r3, [%r1];
    st.global.b32 [%rd4], %r3;
out:
"""
    for how in RUNS.values():
        assert run(body, np.zeros(1, "u4"), "u4", threads=128, how=how).tolist() == [5] * 64 + [0] * 64


def test_loop_with_a_block_of_its_own_names():
    body = """
    mov.b32 %r1, 0;
    {
    .reg .pred done;
    again:
    add.s32 %r1, %r1, 3;
    setp.ge.s32 done, %r1, 30;
    @!done bra.uni again;
    }
    {
    .reg .pred done;
    again:
    add.s32 %r1, %r1, 5;
    setp.ge.s32 done, %r1, 50;
    @!done bra.uni again;
    }
    st.global.b32 [%rd4], %r1;
"""
    assert run(body, np.zeros(1, "u4"), "u4").tolist() == [50] * 32


APART = """
    mov.b32 %r1, 0;
    setp.lt.u32 %p1, %r0, 5;
    @%p1 bra left;
again:
    add.s32 %r1, %r1, 2;
    setp.lt.u32 %p2, %r1, %r0;
    @%p2 bra again;
    bra.uni meet;
left:
    setp.eq.u32 %p3, %r0, 3;
    @%p3 bra meet;
    add.s32 %r1, %r1, 100;
meet:
    shfl.sync.idx.b32 %r2, %r1, 31, 31, -1;
    add.s32 %r1, %r1, %r2;
    st.global.b32 [%rd4], %r1;
"""


def test_lanes_part_and_meet():
    """A loop that lanes leave at different times, a branch in a branch, then a word from another lane."""
    want = [32 + (100 * (k != 3) if k < 5 else k + k % 2) for k in range(32)]
    assert run(APART, np.zeros(1, "u4"), "u4", threads=64).tolist()[:32] == want


def test_lanes_that_are_apart_cannot_exchange_words():
    body = "setp.lt.u32 %p1, %r0, 5; @%p1 bra out; shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; out: mov.b32 %r1, 1;"
    with pytest.raises(Fault, match="only some threads of a warp"):
        run(body, np.zeros(1, "u4"), "u4")


@pytest.mark.parametrize(
    "body, message",
    [
        ("ld.global.b32 %r1, [%rd3+256];", "reads element"),
        ("st.global.b32 [%rd3], %r0;", "should only read"),
        ("add.s64 %rd5, %rd3, 2; ld.global.b32 %r1, [%rd5];", "off a multiple of 4"),
        ("mov.b32 %r1, global_smem; ld.shared.b32 %r2, [%r1+1024];", "4 bytes at 1024 of 1024"),
        ("mov.b32 %r1, global_smem; ld.shared.v2.b32 {%r2, %r3}, [%r1+4];", "off a multiple of 8"),
        ("st.global.b32 [%rd1], %r0;", "different bytes to one address"),
        ("mov.b32 %r1, %clock;", "%clock"),
        ("lop9.b32 %r1, %r2, %r3;", "no machine knows lop9.b32"),
    ],
)
def test_fault(body, message):
    with pytest.raises((Fault, OutOfBounds), match=re.escape(message)):
        run(body, np.zeros(1, "u4"), "u4")


COPY = """
    mov.b32 %r1, global_smem;
    shl.b32 %r2, %r0, 3;
    add.s32 %r3, %r1, %r2;
    cp.async.ca.shared.global [%r3 + 0], [%rd3 + 0], 0x8, 8;
    cp.async.commit_group;
    add.s32 %r4, %r3, 256;
    setp.lt.u32 %p1, %r0, 3;
    selp.b32 %r5, 8, 0, %p1;
    cp.async.ca.shared.global [%r4 + 0], [%rd3 + 0], 0x8, %r5;
    cp.async.commit_group;
    cp.async.wait_group WAIT;
    ld.shared.b64 %rd5, [%r3+SECOND];
    st.global.b64 [%rd4], %rd5;
    cp.async.wait_group 0;
"""


@pytest.mark.parametrize("second, wait", [(0, 1), (0, 0), (256, 0)])
def test_asynchronous_copy_is_there_when_its_group_was_awaited(second, wait):
    given = np.arange(1, 33, dtype="u8")
    want = np.where(np.arange(32) < 3, given, 0) if second else given
    for how in RUNS.values():
        got = run(COPY.replace("WAIT", str(wait)).replace("SECOND", str(second)), given, "u8", how=how)
        assert got.tolist() == want.tolist()


def test_asynchronous_copy_that_is_read_too_early_shows():
    bodies = [COPY.replace("WAIT", "1").replace("SECOND", "256"), COPY.replace("WAIT", "2").replace("SECOND", "0")]
    for body in bodies:
        assert found_wrong(body, [*range(1, 33)], threads=32)


def test_copy_that_nobody_awaits_is_a_fault():
    with pytest.raises(Fault, match="while a copy is under way"):
        run(
            COPY.replace("WAIT", "2").replace("ld.shared.b64 %rd5, [%r3+SECOND];", "").replace("cp.async.wait_group 0;", ""),
            np.zeros(32, "u8"),
            "u8",
        )


def test_sectors_of_a_warp_are_counted():
    """Words one after the other: 4 sectors; each in its own: 32; one for all: 1."""
    for stride, want in ((4, 4), (32, 32), (0, 1)):
        memory = np.zeros(2048, "u1")
        counts = Counts()
        body = f"mul.wide.u32 %rd5, %r0, {stride}; add.s64 %rd6, %rd0, %rd5; ld.global.b32 %r1, [%rd6];"
        skip = -memory.ctypes.data % 32
        run_on(body, memory[skip : skip + 1024], memory[:8], counts=counts)
        assert sum(counts.sectors.values()) == want


@pytest.mark.parametrize(
    "nbytes, stride, want",
    [(4, 4, 1), (4, 8, 2), (4, 128, 32), (4, 0, 1), (4, 132, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 128, 8), (16, 144, 1)],
)
def test_passes_over_the_banks(nbytes, stride, want):
    lanes = min(32, 128 // nbytes)
    rows = (np.arange(lanes, dtype=np.uint64) * np.uint64(stride))[None]
    assert passes(rows, nbytes).tolist() == [want]
