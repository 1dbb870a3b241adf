"""Attention whose warps have roles, as it is compiled for sm_90a."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from barellm.cuda import attention_config
from barellm.cuda.kernels.attention.hopper_attention import hopper_attention
from tests.cuda import test_hopper_attention
from tests.simulators.ptx.machine import Run
from tests.simulators.ptx.test_hopper_products import execute, nth

pytestmark = pytest.mark.extended

# Tiles of one block of keys, two and three, the last one partial; keys that serve two heads.
FORMS: dict[str, dict[str, Any]] = {
    "heads of 64": dict(batch=2, seq=140, heads=2, D=64, share=2),
    "heads of 128": dict(batch=1, seq=257, heads=1, D=128),
}


def run(name: str, blocks: int, how: Run, mutate: Any = None) -> list[np.ndarray]:
    """Results of one launch, which must be right."""
    config = FORMS[name]
    args, wanted = test_hopper_attention.launch(**config, stages=attention_config.WARP_SPECIALIZED[config["D"]].num_stages)
    execute(hopper_attention, args, "out lse", blocks, how, mutate)
    test_hopper_attention.check(wanted)
    return [got.copy() for got, _, _ in wanted]


@pytest.mark.parametrize("name", FORMS)
def test_a_form(name):
    """In drawn orders of the warps, one block or two, copies arriving at once or as late as they may: the same bits."""
    first = run(name, 1, Run(seed=1, poison=0xFF, late=True))
    second = run(name, 2, Run(seed=2, poison=0x7F, late=False))
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(first, second, strict=True))


WAIT = r"wgmma\.wait_group\.sync\.aligned \t?"
PRODUCT = r"wgmma\.mma_async\.sync\.aligned\.m64n64k16[^;]*"
MUTANTS: dict[str, tuple[Any, str]] = {
    "scores are read too early": (nth(rf"{WAIT}1;", "wgmma.wait_group.sync.aligned 2;"), "nan location"),
    "sums are read too early": (nth(rf"{WAIT}0;", "wgmma.wait_group.sync.aligned 1;", 1), "under way"),
    "the last sums are read too early": (nth(rf"{WAIT}0;", "wgmma.wait_group.sync.aligned 1;", 2), "under way"),
    "registers of probabilities are not fenced": (nth(r"wgmma\.fence[^;]*;", "", 3), "no wgmma.fence"),
    "values are read untransposed": (nth(rf"({PRODUCT}), 1;", r"\1, 0;"), "Not equal"),
    "bytes expected": (nth(r"(expect_tx[^;]*), 16384;", r"\1, 16256;"), "nobody can go on"),
    "arrivals expected": (nth(r"(mbarrier\.init[^;]*), 2;", r"\1, 1;"), "overwritten|arriv"),
    "mbarriers are not fenced": (nth(r"fence\.proxy\.async\.shared::cta;", ""), "made without a fence"),
    "registers that nobody has": (nth(r"(setmaxnreg\.inc\S*) \t?240;", r"\1 248;"), "nobody can go on"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.extended
def test_a_mutant_fails(name):
    mutate, message = MUTANTS[name]
    with pytest.raises(AssertionError, match=message):
        run("heads of 64", 1, Run(seed=3), mutate)
