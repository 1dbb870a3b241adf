"""docs/anatomy.md says what the results and the rungs' files say; the models behind its pictures are right."""

from __future__ import annotations

import re

import pytest

from anatomy import models, page
from anatomy.gpu_rung import GPU_RUNGS
from anatomy.rung import RUNGS


def test_the_page_is_made_of_the_results_and_the_files():
    text = page.PAGE.read_text()
    assert page.filled(text) == text, "python -m anatomy.page brings it up to date"
    assert re.findall(r"<!-- cpu (\d+) -->", text) == [str(r.number) for r in RUNGS]
    assert re.findall(r"<!-- gpu (\d+) -->", text) == [str(r.number) for r in GPU_RUNGS]


@pytest.mark.extended
def test_the_pictures_are_of_the_results_that_the_page_names(tmp_path):
    page.pictures(tmp_path)
    for made in tmp_path.iterdir():
        assert made.name in page.PAGE.read_text()
        words = [re.findall(r"<!-- (.*?) -->", (folder / made.name).read_text()) for folder in (tmp_path, page.PICTURES)]
        assert words[0] == words[1], f"python -m anatomy.page draws {made.name} again"


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
