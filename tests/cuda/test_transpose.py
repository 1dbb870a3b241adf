from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.cuda.kernel import Launch, Sizes, Target
from barellm.cuda.kernels.pointwise import transpose
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.runtime.lowering import Region
from tests.cases import normal
from tests.cuda.check import EPS, check_op, persistent
from tests.simulators import interpreter

SHAPES = [(1, 7), (65, 1), (64, 128), (131, 97)]
FORMATS = ["fp32", "bf16", "fp16", "split", "half", "truncated", "e6m9", "ue6m10"]


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_copy_keeps_every_bit(dtype):
    for shape in SHAPES:
        check_op(ops.Transpose, {"x": persistent(normal(*shape), dtype)}, modes={"y": "store"}, bounds={"y": 0.0})


@pytest.mark.parametrize("dtype", FORMATS[:6])
def test_a_sum_is_added_to_what_is_there(dtype):
    for shape in SHAPES[1:]:
        given = {"x": persistent(normal(*shape), dtype)}
        check_op(ops.Transpose, given, modes={"y": "add"}, bounds={"y": 2 * EPS * 12})


@pytest.mark.parametrize("shape", [(46401, 46400), (3, 800_000_000)], ids=str)
def test_a_matrix_of_more_than_2_to_the_31_elements(shape, tmp_path):
    """The last tile, and one of those that begin beyond 2^31 elements of x or y, by the interpreter, which holds every address
    against the operands. They lie in sparse files, of which only what is touched exists. Of the wide matrix there are more tiles
    than a grid's second axis may have."""
    p = Program(Store())
    x, y = p.state("x", shape, "bf16"), p.state("y", shape[::-1], "bf16")
    p.transpose_copy(x, y)
    (launch,) = lower_and_plan({"op": p}, Target(80)).lowered["op"].launches
    assert isinstance(launch, Launch)
    held = {t: np.memmap(tmp_path / t.name, np.int16, "w+", shape=tuple(t.shape)) for t in (x, y)}
    down, across = (-(-n // transpose.TILE) for n in shape)
    assert launch.grid(Sizes()) == (down * across,)
    tiles = [(down - 1, across - 1), (down - 1, across - 2)]
    places = [tuple(slice(at * transpose.TILE, (at + 1) * transpose.TILE) for at in tile) for tile in tiles]
    for number, at in enumerate(places):
        held[x][at] = np.random.default_rng(number).integers(1, 2**15, held[x][at].shape)

    def address(region: Region) -> tuple[int, int]:
        values = held[region.tensor]
        return values.ctypes.data, values.ctypes.data + values.nbytes

    only = partial(interpreter.execute, blocks=[(row * across + column, 0, 0) for row, column in tiles])
    interpreter.run(launch, Sizes(), address, (0, 0), only)
    for rows, columns in places:
        assert rows.start * shape[1] + columns.start > 2**31 or columns.start * shape[0] + rows.start > 2**31
        assert held[x][rows, columns].size and (held[y][columns, rows] == held[x][rows, columns].T).all()
