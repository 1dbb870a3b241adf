"""What "auto" takes for 3 x 3 filters, beside the times that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from barellm import kernels
from barellm.cpu.isa import ISA, cross, host
from barellm.cpu.kernels.conv.conv_algorithm import BF16_COSTS, FP32_COSTS, Costs, select_winograd_tile
from barellm.cpu.kernels.conv.conv_fft import fft_is_faster
from barellm.cpu.kernels.conv.im2col import ConvGeometry
from barellm.cpu.step import lower_and_plan
from barellm.program.builder import Program, Store
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx
from barellm.tools.inspect.kernels import X86_TRIPLE
from benchmarks.convolution import EVERY

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xeon-amx"  # other machines' lie beside
NAMES = {0: "direct", 2: "winograd2", 4: "winograd4"}
TILE_N = 32  # tiles of a block where they were measured


def rows_of(file: str, machine: str = RESULTS.name) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS.parent / machine / file).read_text())["rows"]
    return [row for row in rows if "winograd4" in row["samples_s"] and EVERY[row["layer"]].groups == 1]


def lost(row: dict[str, Any], tile_n: int = TILE_N, costs: dict[str, dict[int, Costs]] = FP32_COSTS) -> float:
    """The time of the algorithm that is taken, over that of the best one."""
    layer, which = EVERY[row["layer"]], row.get("pass", "forward")
    C, K = (layer.K, layer.C) if which == "dx" else (layer.C, layer.K)
    times = {m: median(row["samples_s"][name]) for m, name in NAMES.items() if name in row["samples_s"]}
    m = select_winograd_tile(costs[which], C, K, row["batch"], (layer.outputs, layer.outputs), tile_n)
    return times[m] / min(times.values())


@pytest.mark.parametrize("which", FP32_COSTS)
@pytest.mark.parametrize("file, most, mean", [("convolution-fp32.json", 1.25, 1.01), ("convolution-unseen.json", 1.25, 1.03)])
def test_what_is_taken_loses_little(file, which, most, mean):
    """On the layers that the costs were fitted to, and on others."""
    found = [lost(row) for row in rows_of(file) if row["pass"] == which]
    assert len(found) >= 20
    assert max(found) <= most and sum(found) / len(found) <= mean


def test_what_is_taken_loses_little_on_zen_3():
    """The costs are another machine's, and blocks have half as many tiles."""
    found = [lost(row, 16) for row in json.loads((RESULTS.parent / "convolution-zen3.json").read_text())["rows"]]
    assert len(found) == 18 and max(found) <= 1.25 and sum(found) / len(found) <= 1.02


@pytest.mark.parametrize("which", BF16_COSTS)
@pytest.mark.parametrize(
    "file, count, most, mean", [("convolution-bf16.json", 24, 1.15, 1.02), ("convolution-bf16-unseen.json", 20, 1.26, 1.03)]
)
def test_what_images_of_bf16_take_without_amx_loses_little(which, file, count, most, mean):
    """On the layers that the costs were fitted to, and on others: less than pairs alone lose."""
    rows = [row for row in rows_of(file, "zen4") if row["pass"] == which]
    found = [lost(row, costs=BF16_COSTS) for row in rows]
    pairs = [lost(row, costs={which: {0: BF16_COSTS[which][0]}}) for row in rows]
    assert len(found) == count
    assert max(found) <= most and max(found) < max(pairs)
    assert sum(found) / count <= mean < sum(pairs) / count


@pytest.mark.parametrize("which, result", [("forward", "images"), ("dw", "filters")])
def test_large_filters_lose_little(which, result):
    rows = json.loads((RESULTS / "convolution-large.json").read_text())["rows"]
    found = []
    for row in rows:
        if row["pass"] == which:
            layer, half = EVERY[row["layer"]], EVERY[row["layer"]].size // 2
            offsets = tuple(range(-half, half + 1))
            geometry = ConvGeometry((layer.side,) * 2, layer.C, (layer.side,) * 2, (1, 1), offsets, offsets, rows=layer.K)
            fft, direct = (median(row["samples_s"][name]) for name in ("fft", "direct"))
            use_fft = fft_is_faster(cross("avx512", X86_TRIPLE), result, geometry, row["batch"])
            found.append((fft if use_fft else direct) / min(fft, direct))
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
    assert select_winograd_tile(FP32_COSTS[which], C, K, images, (side, side), TILE_N) == m


@pytest.mark.parametrize(
    "channels, pixels, filters, images, names",
    [
        (512, 14, 3, 1, ("winograd_gemm 2", "winograd_gemm 2", "winograd_wgrad_output 2")),
        (256, 56, 3, 1, ("winograd_gemm 4", "winograd_gemm 4", "winograd_wgrad_output 4")),
        (8, 14, 3, 1, ("conv_implicit_gemm", "conv_implicit_gemm", "conv_wgrad")),
        (128, 56, 9, 1, ("fft_gemm", "fft_gemm", "fft_wgrad_output")),
        (128, 56, 5, 1, ("conv_implicit_gemm", "conv_implicit_gemm", "conv_wgrad")),
        (128, 56, 7, 1, ("conv_implicit_gemm", "conv_implicit_gemm", "fft_wgrad_output")),
    ],
)
def test_kernels_of_each_pass(channels, pixels, filters, images, names):
    found = kernels_of(channels, pixels, filters, images, "fp32", cross("avx512", X86_TRIPLE))
    assert found == names


def kernels_of(channels: int, pixels: int, filters: int, images: int, dtype: str, isa: ISA) -> tuple[str, ...]:
    """What does the forward pass, the input's gradient and the filters', with the m of Winograd's tiles."""
    p = Program(Store())
    x = p.parameter("x", (images, channels, pixels, pixels), dtype=dtype)
    w = p.parameter("w", (channels, channels, filters, filters))
    y = p.output("y", p.conv2d(x, w, padding=filters // 2))
    how = p.ops[-1].attrs
    p.output("dx", p.apply(Conv2dDx, dy=y, w=w, size=(pixels, pixels), **how).dx)
    p.output("dw", p.apply(Conv2dDw, dy=y, x=x, size=(filters, filters), **how).dw)
    products = ("conv_implicit_gemm", "conv_wgrad", "conv_implicit_gemm_bf16", "conv_wgrad_bf16", "fft_gemm", "fft_wgrad_output")
    found: dict[str, str] = {}
    for call in lower_and_plan({"op": p}, isa=isa, threads=2).calls["op"]:
        constants = dict(call.spec.constants)
        if call.spec.name == "winograd_gemm":
            found[call.op.name] = f"winograd_gemm {constants['conv'].m}"
        elif call.spec.name == "winograd_wgrad_output":
            found[call.op.name] = f"winograd_wgrad_output {constants['m']}"
        elif call.spec.name in products:
            found[call.op.name] = call.spec.name
    return tuple(found.values())


@pytest.mark.parametrize("isa, channels, pixels, images, names", [
    ("avx512_bf16", 256, 56, 16, ("winograd_gemm 4", "winograd_gemm 4", "winograd_wgrad_output 4")),
    ("avx512_bf16", 512, 14, 1, ("conv_implicit_gemm_bf16", "conv_implicit_gemm_bf16", "conv_wgrad_bf16")),
    ("avx512_bf16", 64, 56, 16, ("conv_implicit_gemm_bf16", "conv_implicit_gemm_bf16", "winograd_wgrad_output 4")),
    ("amx_bf16", 256, 56, 16, ("conv_implicit_gemm_bf16", "conv_implicit_gemm_bf16", "conv_wgrad_bf16")),
    ("avx512", 64, 56, 16, ("winograd_gemm 4", "winograd_gemm 4", "winograd_wgrad_output 4")),
])  # fmt: skip
def test_kernels_of_images_of_bf16(isa, channels, pixels, images, names):
    assert kernels_of(channels, pixels, 3, images, "bf16", cross(isa, X86_TRIPLE)) == names


@pytest.mark.parametrize("rectified, filters_of", [(False, np.float32), (True, np.float32), (True, ml_dtypes.bfloat16)])
@pytest.mark.extended
def test_images_of_bf16_lose_nothing_by_what_is_taken(rectified, filters_of):
    """The error of the result and of both gradients beside float64: not above that of direct sums, which round filters of fp32 to
    bf16 where pairs are multiplied. With them the filters' gradient is in fp32, of products that are exact: there the
    error is some roundings of fp32, a thousandth of bf16's, and the largest one not above that of sums of pairs."""
    r, (N, C, side) = np.random.default_rng(1), (2, 128, 56)
    x, dy = (r.standard_normal((N, C, side, side)) for _ in range(2))
    x = np.maximum(x, 0) if rectified else x
    w = (r.standard_normal((C, C, 3, 3)) / (3 * np.sqrt(C))).astype(filters_of)
    x, dy = x.astype(ml_dtypes.bfloat16), dy.astype(ml_dtypes.bfloat16)
    how = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "reflect": False, "flip_kernel": False}
    images, filters, results = (a.astype(np.float64) for a in (x, w, dy))
    exact = {
        "y": Conv2d({}, how).reference(images, filters)["y"],
        "dx": Conv2dDx({}, how | {"size": (side, side)}).reference(results, filters)["dx"],
        "dw": Conv2dDw({}, how | {"size": (3, 3)}).reference(results, images)["dw"],
    }

    def errors(algorithm: str) -> dict[str, tuple[float, float]]:
        """Root mean square and largest, relative to the root mean square of the result."""
        y, vjp_fn = kernels.vjp(kernels.conv2d, x, w, padding=1, algorithm=algorithm)
        found = {}
        for (name, e), made in zip(exact.items(), (y, *vjp_fn(dy)), strict=True):
            off = (made.astype(np.float64) - e) / np.sqrt((e**2).mean())
            found[name] = float(np.sqrt((off**2).mean())), float(np.abs(off).max())
        return found

    direct, auto = errors("direct"), errors("auto")
    for name in ("y", "dx"):
        assert auto[name][0] <= 1.001 * direct[name][0], (direct, auto)
        assert auto[name][0] < 2**-9 or auto == direct, (direct, auto)  # rounded once, at the end
    if filters_of is np.float32:
        assert auto["dw"][0] < 2**-9 / 1000, auto
        assert auto["dw"][1] <= direct["dw"][1] or host().dot != "x86", (direct, auto)
