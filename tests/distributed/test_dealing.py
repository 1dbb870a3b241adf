"""Which rank updates what: every element once, cut where the norm's partial sums are."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.optim.dealing import _cost, deal
from barellm.program.ops.optim.optimizer import CHUNK
from barellm.program.tensor import Span, Tensor
from tests.distributed.threads import ThreadRanks


def parameter(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape, "fp32", "parameter")


CUT = [parameter(f"p{i}", n) for i, n in enumerate((1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK, 12 * CHUNK + 5, 3))]
WHOLE = [parameter(f"m{i}", rows, cols) for i, (rows, cols) in enumerate([(4, 4), (40, 4), (9, 9), (20, 20), (1, 50)])]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_every_element_has_one_rank_and_a_chunk_is_never_cut(count):
    dealing = deal(ThreadRanks(0, count, {}), whole=WHOLE, cut=CUT)
    for t in CUT + WHOLE:
        parts = dealing.parts[t.name]
        assert len(parts) == count
        elements = np.concatenate([np.arange(*part) for part in parts])
        assert np.array_equal(elements, np.arange(t.size))
    for t in CUT:
        assert all(end % CHUNK == 0 or end == t.size for _, end in dealing.parts[t.name])
    for t in WHOLE:
        assert sorted(end - first for first, end in dealing.parts[t.name])[:-1] == [0] * (count - 1)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_shares_are_even(count):
    held = np.zeros(count)
    dealing = deal(ThreadRanks(0, count, {}), whole=[], cut=CUT)
    for parts in dealing.parts.values():
        held += [end - first for first, end in parts]
    assert held.max() - held.min() <= 2 * CHUNK


def test_matrices_that_cost_most_are_dealt_first():
    """(20, 20) costs 8000, (9, 9) 729, (40, 4) 640, (4, 4) 64 and (1, 50) 50: the rank of the first gets nothing more."""
    dealing = deal(ThreadRanks(0, 2, {}), whole=WHOLE, cut=[])
    owners = {name: [end > first for first, end in parts].index(True) for name, parts in dealing.parts.items()}
    assert owners == {"m3": 0, "m2": 1, "m1": 1, "m0": 1, "m4": 1}


def test_what_costs_most_is_an_iteration_and_not_the_size():
    """An iteration over (n, m) multiplies n x m x min(n, m) times; what is no matrix counts as often as it has elements."""
    shapes = {"flat": (2, 300), "square": (16, 16), "cube": (10, 10, 10), "other": (12, 15)}
    dealing = deal(ThreadRanks(0, 2, {}), whole=[parameter(name, *shape) for name, shape in shapes.items()], cut=[])
    owners = {name: [end > first for first, end in parts].index(True) for name, parts in dealing.parts.items()}
    assert owners == {"square": 0, "other": 1, "flat": 1, "cube": 1}
    assert [_cost(parameter("p", *shape)) for shape in shapes.values()] == [1200, 4096, 1000, 2160]


def test_a_rank_holds_a_span_the_whole_or_nothing():
    dealings = [deal(ThreadRanks(rank, 2, {}), whole=[], cut=CUT) for rank in range(2)]
    long, short = CUT[4], CUT[0]
    spans = [d.own(long) for d in dealings]
    assert all(isinstance(t, Span) and t.base is long for t in spans)
    assert sum(t.size for t in spans if t is not None) == long.size
    assert sorted(d.own(short) is None for d in dealings) == [False, True]
    assert short in [d.own(short) for d in dealings]


def test_each_part_of_the_model_that_all_ranks_share_is_summed_by_itself():
    """One of which a rank has nothing is summed with the next, and at the end with the one before."""
    sizes = {"h.0.a": 4 * CHUNK, "h.0.b": 3, "h.1.a": 1, "h.2.a": 4 * CHUNK, "h.3.a": 2 * CHUNK, "ln.b": 1}
    params = [parameter(name, n) for name, n in sizes.items()]
    for rank in range(2):
        found = deal(ThreadRanks(rank, 2, {}), whole=[], cut=params)._groups([(t, t) for t in params])
        names = [[t.name for t, _ in group] for group in found]
        assert names == [["h.0.a", "h.0.b"], ["h.1.a", "h.2.a"], ["h.3.a", "ln.b"]]
    (only,) = deal(ThreadRanks(0, 2, {}), whole=[], cut=params[1:3])._groups([(t, t) for t in params[1:3]])
    assert [t.name for t, _ in only] == ["h.0.b", "h.1.a"]
