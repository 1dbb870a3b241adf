"""What "auto" takes for 3 x 3 filters, beside the times that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from barellm.cpu.kernels.conv_choice import COSTS, tile_for
from barellm.cpu.kernels.conv_fft import fft_pays
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.step import lower_and_plan
from barellm.program.builder import Program, Store
from barellm.program.ops.convolution import Conv2dDw, Conv2dDx
from benchmarks.convolution import EVERY
from tests.cpu.check import isa_named

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xeon-amx"
NAMES = {0: "direct", 2: "winograd2", 4: "winograd4"}
SPAN = 32  # tiles of a block where they were measured


def rows_of(file: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / file).read_text())["rows"]
    return [row for row in rows if "winograd4" in row["samples_s"] and EVERY[row["layer"]].groups == 1]


def lost(row: dict[str, Any], span: int = SPAN) -> float:
    """The time of the algorithm that is taken, over that of the best one."""
    layer, which = EVERY[row["layer"]], row.get("pass", "forward")
    C, K = (layer.K, layer.C) if which == "dx" else (layer.C, layer.K)
    times = {m: median(row["samples_s"][name]) for m, name in NAMES.items()}
    return times[tile_for(which, C, K, row["batch"], (layer.outputs, layer.outputs), span)] / min(times.values())


@pytest.mark.parametrize("which", COSTS)
@pytest.mark.parametrize(
    "file, most, mean", [("convolution-fp32.json", 1.25, 1.01), ("convolution-unseen.json", 1.25, 1.03)]
)
def test_what_is_taken_loses_little(file, which, most, mean):
    """On the layers that the costs were fitted to, and on others."""
    found = [lost(row) for row in rows_of(file) if row["pass"] == which]
    assert len(found) >= 20
    assert max(found) <= most and sum(found) / len(found) <= mean


def test_what_is_taken_loses_little_on_zen_3():
    """The costs are another machine's, and blocks have half as many tiles."""
    found = [lost(row, 16) for row in json.loads((RESULTS.parent / "convolution-zen3.json").read_text())["rows"]]
    assert len(found) == 18 and max(found) <= 1.25 and sum(found) / len(found) <= 1.02


@pytest.mark.parametrize("which, made", [("forward", "images"), ("dw", "filters")])
def test_large_filters_lose_little(which, made):
    rows = json.loads((RESULTS / "convolution-large.json").read_text())["rows"]
    found = []
    for row in rows:
        if row["pass"] == which:
            layer, half = EVERY[row["layer"]], EVERY[row["layer"]].size // 2
            offsets = tuple(range(-half, half + 1))
            grid = Grid((layer.side,) * 2, layer.C, (layer.side,) * 2, (1, 1), offsets, offsets)
            fft, direct = (median(row["samples_s"][name]) for name in ("fft", "direct"))
            pays = fft_pays(isa_named("avx512"), made, grid, layer.K, row["batch"], 1)
            found.append((fft if pays else direct) / min(fft, direct))
    assert len(found) >= 12 and max(found) <= 1.2 and sum(found) / len(found) <= 1.02


@pytest.mark.parametrize(
    "which, C, K, images, side, m",
    [
        ("forward", 512, 512, 1, 14, 2),
        ("forward", 256, 256, 1, 14, 2),
        ("forward", 512, 512, 16, 14, 4),
        ("forward", 256, 256, 1, 56, 4),
        ("forward", 512, 512, 1, 28, 4),
        ("forward", 512, 512, 1, 7, 0),
        ("forward", 3, 64, 1, 224, 0),
        ("forward", 1, 1, 16, 28, 0),
        ("dx", 1, 1, 16, 28, 0),
        ("dw", 1, 1, 16, 28, 0),
        ("dw", 512, 512, 1, 28, 2),
        ("dw", 64, 64, 1, 224, 4),
    ],
)
def test_layers_have_the_algorithm_that_was_the_fastest(which, C, K, images, side, m):
    assert tile_for(which, C, K, images, (side, side), SPAN) == m


@pytest.mark.parametrize(
    "channels, pixels, filters, images, names",
    [
        (512, 14, 3, 1, ("winograd_product 2", "winograd_product 2", "winograd_gradient_output 2")),
        (256, 56, 3, 1, ("winograd_product 4", "winograd_product 4", "winograd_gradient_output 4")),
        (8, 14, 3, 1, ("conv_product", "conv_product", "conv_weight_gradient")),
        (128, 56, 9, 1, ("fft_product", "fft_product", "fft_gradient_output")),
        (128, 56, 5, 1, ("conv_product", "conv_product", "conv_weight_gradient")),
        (128, 56, 7, 1, ("conv_product", "conv_product", "fft_gradient_output")),
    ],
)
def test_kernels_of_each_pass(channels, pixels, filters, images, names):
    p = Program(Store())
    x, w = (
        p.parameter("x", (images, channels, pixels, pixels)),
        p.parameter("w", (channels, channels, filters, filters)),
    )
    y = p.output("y", p.conv2d(x, w, padding=filters // 2))
    how = p.ops[-1].attrs
    p.output("dx", p.apply(Conv2dDx, dy=y, w=w, size=(pixels, pixels), **how).dx)
    p.output("dw", p.apply(Conv2dDw, dy=y, x=x, size=(filters, filters), **how).dw)
    found: dict[str, str] = {}
    for call in lower_and_plan({"op": p}, isa=isa_named("avx512"), threads=2).calls["op"]:
        constants = dict(call.spec.constants)
        if call.spec.name == "winograd_product":
            found[call.op.name] = f"winograd_product {constants['form'].m}"
        elif call.spec.name == "winograd_gradient_output":
            found[call.op.name] = f"winograd_gradient_output {constants['m']}"
        elif call.spec.name in names:
            found[call.op.name] = call.spec.name
    assert tuple(found.values()) == names
