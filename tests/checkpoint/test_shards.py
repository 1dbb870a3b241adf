"""A run's tensors where each rank has a share of some: pieces of any size, shares that are cut inside rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from barellm.checkpoint.shards import ShardedState
from barellm.program.tensor import Tensor
from tests.distributed.threads import each_rank

ROWS, WIDTH = 11, 6
VALUES = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
# Elements of each rank: cut between rows, and inside of them; with nothing for one; with one part of a row.
PARTS = [[(0, 30), (30, 66)], [(0, 20), (20, 27), (27, 66)], [(0, 0), (0, 66)], [(0, 63), (63, 65), (65, 66)]]


class Session:
    """What a rank has: of the moment its share, flat; of the weight all, but right in its own part only."""

    def __init__(self, part: tuple[int, int]) -> None:
        size = part[1] - part[0]
        self.arrays = {"moment": np.full(max(size, 1), -1.0, np.float32), "weight": np.full((ROWS, WIDTH), -1.0, np.float32)}
        shapes = {"moment": (max(size, 1),), "weight": (ROWS, WIDTH)}
        roles = {"moment": "state", "weight": "parameter"}
        self.tensors = {name: Tensor(name, shape, "fp32", roles[name]) for name, shape in shapes.items()}

    def write_rows(self, name: str, lo: int, values: np.ndarray) -> None:
        array = self.arrays[name]
        assert values.shape[1:] == array.shape[1:] and 0 <= lo < lo + len(values) <= len(array)
        array[lo : lo + len(values)] = values

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        assert 0 <= lo < hi <= len(self.arrays[name])
        return self.arrays[name][lo:hi].copy()


def shards_of(ranks: Any, parts: list[tuple[int, int]]) -> tuple[ShardedState, Session]:
    session = Session(parts[ranks.rank])
    whole = {name: Tensor(name, (ROWS, WIDTH), "fp32", role) for name, role in (("moment", "state"), ("weight", "parameter"))}
    return ShardedState(session, whole, {"moment": parts, "weight": parts}, ranks), session  # pyright: ignore


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("piece", [1, 2, 4, ROWS])
def test_whatever_piece_of_rows_comes_a_rank_keeps_its_elements(parts, piece):
    for rank, (first, end) in enumerate(parts):
        shares, session = shards_of(SimpleNamespace(rank=rank, count=len(parts)), parts)
        for lo in range(0, ROWS, piece):
            shares.write_rows("moment", lo, VALUES[lo : lo + piece])
            shares.write_rows("weight", lo, VALUES[lo : lo + piece])
        assert np.array_equal(session.arrays["weight"], VALUES)
        if first < end:
            assert np.array_equal(session.arrays["moment"], VALUES.reshape(-1)[first:end])
        else:
            assert (session.arrays["moment"] == -1).all()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("piece", [1, 3, ROWS])
def test_rank_0_reads_every_element_of_the_rank_that_has_it(parts, piece):
    def work(ranks: Any) -> Any:
        shares, session = shards_of(ranks, parts)
        first, end = parts[ranks.rank]
        if first < end:
            session.arrays["moment"][:] = VALUES.reshape(-1)[first:end]
            session.arrays["weight"].reshape(-1)[first:end] = VALUES.reshape(-1)[first:end]
        if ranks.rank:
            return shares.serve()
        with shares.served():
            return [
                np.concatenate([shares.read_rows(name, lo, min(ROWS, lo + piece)) for lo in range(0, ROWS, piece)])
                for name in ("moment", "weight")
            ]

    for found in each_rank(len(parts), work)[0]:
        assert np.array_equal(found, VALUES)
