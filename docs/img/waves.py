"""Draws docs/img/waves.svg, how much of an H100 a product can use: `python docs/img/waves.py` from the repository's root."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from barellm.cuda.kernel import Sizes, Target
from barellm.program.integers import ceil_div
from barellm.tools.plan import devices, waves

HERE = Path(__file__).parent
INK, SOFT, OURS, FIXED, SPLIT = "#1f2933", "#52606d", "#5b8def", "#9aa5b1", "#3fa66b"
SMS = 132


def by_us(M: int, N: int, K: int) -> dict[str, waves.Tiling]:
    """The tilings of the GEMM and its gradients, by transpose mode."""
    built = devices.lower({"gemm": waves.one_gemm(M, N, K, "bf16")}, Target())
    return {tiling.transpose_mode: tiling for tiling in waves.gemms(built, ["gemm"], Sizes(batch=M))}


def fixed(M: int, N: int) -> float:
    """What tiles of 128 x 256 without split-K would leave of the card."""
    tiles = ceil_div(M, 128) * ceil_div(N, 256)
    return M * N / (128 * 256) / (SMS * ceil_div(tiles, SMS))


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "barellm", "font.size": 9, "text.color": INK, "axes.edgecolor": FIXED})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.2), gridspec_kw={"wspace": 0.2}, sharey=True)
    sizes = range(256, 8193, 64)
    left.plot(sizes, [100 * fixed(n, n) for n in sizes], color=FIXED, linewidth=1, label="always 128 x 256")
    left.plot(sizes, [100 * by_us(n, n, n)["nt"].efficiency for n in sizes], color=OURS, linewidth=1.2, label="tiling chosen here")
    left.set(title="square GEMMs on an H100", xlabel="M = N = K", ylabel="% of the card (estimate)", ylim=(0, 103))
    tokens = [2**i * 256 for i in range(10)]
    cuts = [by_us(t, 2304, 768) for t in tokens]
    right.plot(tokens, [100 * fixed(2304, 768)] * len(tokens), color=FIXED, marker=".", label="wgrad without split-K")
    right.plot(tokens, [100 * c["tn"].efficiency for c in cuts], color=SPLIT, marker="s", markersize=4, label="wgrad")
    right.plot(tokens, [100 * c["nt"].efficiency for c in cuts], color=OURS, marker="o", markersize=4, label="fprop")
    right.set(title="gpt2-124m's qkv: N = 2304, K = 768", xlabel="tokens", xscale="log")
    right.set_xticks(tokens[::2], [f"{t:,}" for t in tokens[::2]])
    right.minorticks_off()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=SOFT)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(HERE / "waves.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
