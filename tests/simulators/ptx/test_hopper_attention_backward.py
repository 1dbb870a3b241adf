"""Attention's gradients by warps with roles, as they are compiled for sm_90a."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from barellm.cuda import attention_config
from barellm.cuda.kernels.attention.hopper_attention_backward import hopper_attention_backward
from barellm.cuda.tuner import harness
from barellm.cuda.tuning import AttentionProblem
from barellm.runtime.tuner.problem import Candidate
from tests.cuda import test_hopper_attention_backward
from tests.simulators.mock import Gpu
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run
from tests.simulators.ptx.test_hopper_products import execute, nth

pytestmark = pytest.mark.extended

# Tiles of one to three turns of each half, the last one partial; keys that serve two heads.
FORMS: dict[str, dict[str, Any]] = {
    "keys of 64": dict(keys=True, batch=2, seq=140, heads=2, D=64, share=2),
    "queries of 64": dict(keys=False, batch=2, seq=140, heads=2, D=64, share=2),
    "keys of 128": dict(keys=True, batch=1, seq=257, heads=1, D=128),
    "queries of 128": dict(keys=False, batch=1, seq=257, heads=1, D=128),
}


def run(name: str, blocks: int, how: Run, mutate: Any = None) -> list[np.ndarray]:
    """Results of one launch, which must be right."""
    config = FORMS[name]
    tile = attention_config.WARP_SPECIALIZED_BACKWARD["keys" if config["keys"] else "queries", config["D"]]
    args, wanted = test_hopper_attention_backward.launch(**config, stages=tile.num_stages)
    execute(hopper_attention_backward, args, "dx dy", blocks, how, mutate)
    test_hopper_attention_backward.check(wanted)
    return [got.copy() for got, _, _ in wanted]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.extended
def test_a_form(name):
    """In drawn orders of the warps, one block or two, copies arriving at once or as late as they may: the same bits."""
    first = run(name, 1, Run(seed=1, poison=0xFF, late=True))
    second = run(name, 2, Run(seed=2, poison=0x7F, late=False))
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("role, D, kv_heads", [("keys", 64, 1), ("queries", 64, 0), ("keys", 128, 0), ("queries", 128, 0)])
@pytest.mark.extended
def test_the_bits_are_those_of_the_default(role, D, kv_heads, monkeypatch):
    """Both as they are compiled for sm_90a; tensor cores add in fp32 here. Every byte of the arena, at four sizes."""
    Gpu(arch=90, execute=partial(launch.execute, arch=90)).install(monkeypatch)
    both = harness.Harness(AttentionProblem(role, "bf16", 1, 70, 1 + kv_heads, D, kv_heads=kv_heads), calls=1)
    both.check(Candidate(attention_config.WARP_SPECIALIZED_BACKWARD[role, D]))
    both.close()


WAIT = r"wgmma\.wait_group\.sync\.aligned \t?"
MUTANTS: dict[str, tuple[str, Any, str]] = {
    "scores are read too early": ("keys of 64", nth(rf"{WAIT}1;", "wgmma.wait_group.sync.aligned 2;"), "nan|under way"),
    "g is read too early": ("keys of 64", nth(rf"{WAIT}1;", "wgmma.wait_group.sync.aligned 2;", 1), "nan|under way"),
    "sums are read too early": ("keys of 64", nth(rf"{WAIT}0;", "wgmma.wait_group.sync.aligned 1;"), "under way"),
    "dq is read too early": ("queries of 64", nth(rf"{WAIT}0;", "wgmma.wait_group.sync.aligned 1;", 1), "under way"),
    "bytes of the stream": ("keys of 64", nth(r"(expect_tx[^;]*), 17408;", r"\1, 16384;"), "arriv|overwritten|one arrival"),
    "arrivals expected": ("keys of 64", nth(r"(mbarrier\.init[^;]*), 2;", r"\1, 1;", 2), "overwritten|arriv|nobody can go on"),
    "mbarriers are not fenced": ("queries of 64", nth(r"fence\.proxy\.async\.shared::cta;", ""), "made without a fence"),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.extended
def test_a_mutant_fails(name):
    form, mutate, message = MUTANTS[name]
    with pytest.raises(AssertionError, match=message):
        run(form, 1, Run(seed=3), mutate)
