"""Which algorithm does a convolution with 3 x 3 filters where nobody asks for one: the one that a model says is the fastest.

A pass sums over C channels and makes K. What each algorithm does is counted, and every count has a cost in direct multiply-adds at
the processor's peak: that of the forward pass, of the input's gradient, whose filters lie the other way round, and of the filters'
gradient. With the pixels of the result, T tiles of m x m of them, both in whole vectors, and n = m + 2:

    direct      9 C K pixels products; 9 C K of the filters, or of their gradient; K pixels results; 9 C pixels columns, which cost
                more where a line of the image is shorter than a vector
    Winograd    n^2 C K T products; n^2 C K of the filters; n^2 C T of what tiles see; n^2 K T of results, or of dy's tiles

The costs are fitted to the 3 x 3 layers of VGG-16 and ResNet-50 with 1 and 16 images on an Intel Xeon with AMX
(benchmarks/results/xeon-amx/convolution-fp32.json), by least squares of the relative error. docs/convolution.md says how the choice
does on layers that it was not fitted to.

Where the processor multiplies pairs of bf16 and has no AMX, direct sums of bf16 images are twice as fast as those of fp32, and
Winograd's algorithm in fp32 is still the faster one with many channels and pixels. Those costs are fitted to the same layers on
Zen 4 (benchmarks/results/zen4/convolution-bf16.json). There, tiles of 2 x 2 pixels were the fastest nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

from barellm.program.integers import ceil_div, round_up

LANES = 16  # pixels of a line, from which on columns are whole vectors


class Costs(NamedTuple):
    products: float
    filters: float
    results: float
    inputs: float


# By pass: "forward", "dx", "dw"; by m, 0 for the direct algorithm. Of products in fp32:
COSTS: dict[str, dict[int, Costs]] = {
    "forward": {
        0: Costs(products=1.33, filters=23.6, results=18.0, inputs=9.24),
        2: Costs(products=2.17, filters=26.5, results=36.1, inputs=47.8),
        4: Costs(products=2.33, filters=34.6, results=33.3, inputs=120.0),
    },
    "dx": {
        0: Costs(products=1.22, filters=154.0, results=0.0, inputs=15.9),
        2: Costs(products=2.19, filters=74.1, results=0.0, inputs=79.2),
        4: Costs(products=2.11, filters=59.7, results=58.7, inputs=118.0),
    },
    "dw": {
        0: Costs(products=1.96, filters=351.0, results=31.3, inputs=19.0),
        2: Costs(products=1.96, filters=182.0, results=55.0, inputs=57.5),
        4: Costs(products=2.29, filters=160.0, results=75.7, inputs=102.0),
    },
}


# Where direct products are of pairs of bf16, in multiply-adds at the peak of those:
PAIRS: dict[str, dict[int, Costs]] = {
    "forward": {
        0: Costs(products=1.11, filters=14.9, results=0.0, inputs=3.02),
        4: Costs(products=2.69, filters=48.4, results=46.3, inputs=92.8),
    },
    "dx": {
        0: Costs(products=1.13, filters=25.3, results=0.0, inputs=0.0),
        4: Costs(products=2.42, filters=61.7, results=116.0, inputs=48.9),
    },
    "dw": {
        0: Costs(products=1.06, filters=32.5, results=0.0, inputs=17.8),
        4: Costs(products=2.56, filters=172.0, results=92.5, inputs=102.0),
    },
}


def tile_for(costs: dict[int, Costs], C: int, K: int, images: int, outputs: tuple[int, int], span: int) -> int:
    """The m of Winograd's m x m tiles that is the fastest, 0 for the direct algorithm, by the `costs` of a pass. `span`: tiles of
    whole vectors."""
    P, Q = outputs

    def time(m: int) -> float:
        cost = costs[m]
        if m == 0:
            pixels = images * P * Q
            columns = cost.inputs * C * pixels * (1 + LANES / Q)
            work = cost.products * C * K * round_up(pixels, span) + cost.filters * C * K + columns
            return 9 * work + cost.results * K * pixels
        tiles = images * ceil_div(P, m) * ceil_div(Q, m)
        whole = round_up(tiles, span)
        work = cost.products * C * K * whole + cost.filters * C * K + cost.inputs * C * whole + cost.results * K * tiles
        return (m + 2) ** 2 * work

    return min(costs, key=time)
