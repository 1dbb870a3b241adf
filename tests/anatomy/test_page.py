"""docs/anatomy.md says what the results and the rungs' files say; the models behind the booklet's figures are right."""

from __future__ import annotations

import re

import pytest

from anatomy import draw, models, page
from anatomy.gpu_rung import GPU_RUNGS
from anatomy.rung import RUNGS


def test_the_ladder_is_made_of_the_results_and_the_files():
    text = page.PAGE.read_text()
    assert page.filled(page.PAGE) == text, "python -m anatomy.page brings it up to date"
    assert re.findall(r"<!-- cpu (\d+) -->", text) == [str(r.number) for r in RUNGS]
    assert re.findall(r"<!-- gpu (\d+) -->", text) == [str(r.number) for r in GPU_RUNGS]


@pytest.mark.extended
def test_the_staircase_is_of_the_results_that_the_page_names(tmp_path):
    name = "anatomy-staircase.svg"
    draw.staircase(page.result("anatomy-1000"), tmp_path / name)
    assert name in page.PAGE.read_text()
    words = [re.findall(r"<!-- (.*?) -->", (folder / name).read_text()) for folder in (tmp_path, page.PICTURES)]
    assert words[0] == words[1], "python -m anatomy.page draws it again"


def test_a_swizzle_moves_chunks_within_a_row_and_spreads_a_column_over_all_banks():
    for row in range(16):
        places = [models.swizzled(row, chunk) for chunk in range(8)]
        assert sorted(places) == list(range(8))
        address = [128 * row + 16 * chunk for chunk in range(8)]  # bits 4 to 6 xored with bits 7 to 9
        assert [128 * row + 16 * p for p in places] == [a ^ (a >> 7 & 7) << 4 for a in address]
    for chunk in range(8):
        assert models.conflicts([chunk] * 8) == 8
        assert models.conflicts([models.swizzled(row, chunk) for row in range(8)]) == 1
        assert models.conflicts([models.swizzled(row, chunk) for row in range(16)]) == 2


def test_reuse_and_intensity():
    assert models.reuse(6, 16) == pytest.approx(192 / 22)
    assert models.intensity(64, 64) == 32 and models.intensity(128, 128) == 64
    assert models.intensity(128, 256) == pytest.approx(85.3, abs=0.05)


@pytest.mark.parametrize("tiles, processors, share", [(115, 114, 0.504), (132, 132, 1), (133, 132, 0.504), (18, 132, 0.136)])
def test_waves(tiles, processors, share):
    assert models.wave_efficiency(tiles, processors) == pytest.approx(share, abs=5e-4)


def test_edges_and_waves_multiply():
    assert models.efficiency(128 * 11, 256 * 12, (128, 256), 132) == 1
    assert models.efficiency(128 * 11 + 1, 256 * 12, (128, 256), 132) == pytest.approx(1409 / 1536 * 144 / 264)
    assert models.efficiency(1, 1, (128, 256), 132) == pytest.approx(1 / 128 / 256 / 132)


def test_banks_and_sectors():
    assert [models.cycles([4 * k * lane for lane in range(32)]) for k in (0, 1, 2, 31, 32, 33)] == [1, 1, 2, 1, 32, 1]
    assert models.cycles([4 * 33 * row for row in range(32)]) == 1
    assert [models.sectors([4 * k * lane for lane in range(32)]) for k in (0, 1, 2, 8, 100)] == [1, 4, 8, 32, 32]


def test_narrow_swizzles_spread_a_column_of_chunks_and_lose_none():
    for width in (32, 64, 128):
        chunks = [(row, c) for row in range(8) for c in range(width // 16)]
        places = [models.swizzled_in(width, *chunk) for chunk in chunks]
        assert sorted(places) == [(line, at) for line in range(width // 16) for at in range(8)]
        assert len({at for (_, c), (_, at) in zip(chunks, places, strict=True) if c == 1}) == 8
    assert [models.swizzled_in(128, r, c) for r in range(8) for c in range(8)] == [
        (r, models.swizzled(r, c)) for r in range(8) for c in range(8)
    ]


def test_sets_of_a_cache():
    assert {models.cache_set(i * 4096, 32 << 10, 8) for i in range(64)} == {0}
    assert len({models.cache_set(i * 64, 32 << 10, 8) for i in range(64)}) == 64


def test_a_ring_waits_for_buffers_and_for_copies():
    assert models.ring(1, 3, 4, 3) == [(0, 3, 3, 7), (7, 10, 10, 14), (14, 17, 17, 21)]
    assert [t[3] for t in models.ring(4, 3, 4, 3)] == [7, 11, 15]
    for buffers in (1, 2, 3):
        times = models.ring(buffers, 2, 5, 12)
        assert all(times[i][0] >= times[i - buffers][3] for i in range(buffers, 12)), "a buffer is filled while it is read"


def test_warps_issue_one_instruction_a_cycle():
    for warps, share in ((1, 0.25), (2, 0.5), (4, 1), (6, 1)):
        issued = sorted(t for cycles in models.issue(warps, 4, 12, 160) for t in cycles)
        assert len(issued) == len(set(issued)) == share * 160


def test_dynamic_scheduling_does_every_item_once_and_ends_earlier():
    for dynamic in (False, True):
        assert sum(map(len, models.dealt([10] * 16, 2, {1: 1.8}, dynamic=dynamic))) == 16
    ends = [max(line[-1][1] for line in models.dealt([10] * 16, 2, {1: 1.8}, dynamic=d)) for d in (False, True)]
    assert ends == [144, 108]


def test_littles_law():
    assert [models.chains(n, 4, 2) for n in (1, 4, 8, 12)] == [0.125, 0.5, 1, 1]
    assert models.in_flight(100e-9, 64e9) == pytest.approx(6400)


def parities(stages: int, steps: int, arrivals: int = 2) -> set[bool]:
    """Whether each answer of an mbarrier to a parity is that of its count of phases, in every order in which a producer, the copies
    that it has started (each lands when it likes) and two consumers can go on. `arrivals`: of a phase of empty[s]."""
    found, seen, ahead = set(), set(), [(0, frozenset(), (0, 0))]  # copies started, copies under way, steps that each consumer did

    def before(step: int, s: int) -> int:
        """Steps below `step` that use buffer s."""
        return (step - s + stages - 1) // stages

    while ahead:
        state = ahead.pop()
        if state in seen:
            continue
        seen.add(state)
        started, flying, done = state

        def full(s: int, started: int = started, flying: frozenset[int] = flying) -> int:
            return before(started, s) - sum(i % stages == s for i in flying)

        def passes(completed: int, phase: int) -> bool:
            found.add((completed & 1 != phase & 1) == (completed > phase))
            return completed > phase

        if started < steps:
            s, r = started % stages, started // stages
            if passes(sum(before(n, s) for n in done) // arrivals, r - 1):
                ahead.append((started + 1, flying | {started}, done))
        ahead += [(started, flying - {i}, done) for i in flying]
        for c, n in enumerate(done):
            if n < steps and passes(full(n % stages), n // stages):
                ahead.append((started, flying, (done[0] + (c == 0), done[1] + (c == 1))))
    assert (steps, frozenset(), (steps, steps)) in seen, "nobody gets stuck"
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_one_bit_of_a_phase_is_enough_for_a_ring(stages):
    assert parities(stages, 3 * stages + 1) == {True}
    assert parities(stages, 3 * stages + 1, arrivals=1) == {True, False}, "who does not wait for both consumers, is misled"
