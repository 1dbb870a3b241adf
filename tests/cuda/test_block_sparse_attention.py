"""Block-sparse attention, interpreted with small blocks, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernels.attention import relative_position_bias_backward
from tests.cuda import check
from tests.cuda.check import PLAIN
from tests.layout_cases import BACKWARD, FORWARD, backward_case, forward_case, made, static

# (batch, length, heads, head size), the layout's length, block, text, heads of keys: tiles as large as blocks, and smaller
CAUSAL = [
    ((2, 35, 2, 5), 67, 16, "local:21, strided:5", 2, "fp32"),
    ((1, 131, 2, 20), 131, 64, "fixed:20:3+banded:1, watts-strogatz:2:0.5:1", 1, "bf16"),
    ((1, 97, 1, 16), 97, 48, "local:50", 1, "fp32"),
]


check_op = partial(check.check_op, target=replace(PLAIN, config=AttentionConfig(64, 32, 4, 1)))


@pytest.mark.parametrize("shape, length, block, text, groups, dtype", CAUSAL, ids=str)
@pytest.mark.extended
def test_causal_layouts(shape, length, block, text, groups, dtype):
    planned, layout = (made(text, shape, length=n, block=block) for n in (length, shape[1]))
    check_op(FORWARD, **forward_case(shape, dtype, planned, groups=groups, packed=block == 64))
    check_op(BACKWARD, **backward_case(shape, dtype, layout, groups=groups, packed=block == 64))


def test_a_layout_that_looks_ahead():
    shape = (1, 83, 2, 20)
    layout = made("local:9+spread:1:2, all", shape, block=32, causal=False)
    check_op(FORWARD, **static(forward_case(shape, "bf16", layout, packed=False)))
    modes = dict.fromkeys(("dq", "dk", "dv"), "add")
    check_op(BACKWARD, **static(backward_case(shape, "bf16", layout, packed=False)), modes=modes)


# With the number of distances that have a relative term; blocks of 48 are three tiles.
RELATIVE = [
    ((2, 35, 2, 5), 67, 16, "local:21, strided:5", 2, 9, "fp32"),
    ((1, 131, 2, 20), 131, 64, "fixed:20:3+banded:1, watts-strogatz:2:0.5:1", 1, 90, "bf16"),
    ((2, 97, 1, 16), 97, 48, "strided:50+local:2", 1, 60, "fp32"),
]


@pytest.mark.parametrize("shape, length, block, text, groups, distances, dtype", RELATIVE, ids=str)
@pytest.mark.extended
def test_relative_terms(shape, length, block, text, groups, distances, dtype, monkeypatch):
    """Also in more parts than one."""
    monkeypatch.setattr(relative_position_bias_backward, "MIN_TILES", 2)
    planned, layout = (made(text, shape, length=n, block=block) for n in (length, shape[1]))
    of = {"groups": groups, "packed": block == 64, "distances": distances}
    check_op(FORWARD, **forward_case(shape, dtype, planned, **of))
    check_op(BACKWARD, **backward_case(shape, dtype, layout, **of), modes={"drelative": "start"})


def test_relative_terms_of_a_layout_that_looks_ahead():
    shape, of = (1, 83, 2, 20), {"packed": False, "distances": 41}
    layout = made("local:9+spread:1:2, all", shape, block=32, causal=False)
    check_op(FORWARD, **static(forward_case(shape, "bf16", layout, **of)))
    modes = dict.fromkeys(("dq", "dk", "dv", "drelative"), "add")
    check_op(BACKWARD, **static(backward_case(shape, "bf16", layout, **of)), modes=modes)
