"""Products with weights, their gradients and every row of the fusion table, against the float64 references."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from barellm.cpu import gemm_config
from barellm.cpu import isa as isas
from barellm.cpu.fuse import FUSIONS
from barellm.cpu.gemm_config import GemmConfig
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.gemm import gemm
from barellm.cpu.kernels.loss import classifier
from barellm.cpu.step import CpuSession
from barellm.program import ops
from tests.cases import (
    VIEWED,
    as_operand,
    chain_bound,
    check_classifier_of_inner_axes,
    check_model,
    check_network,
    check_products_of_views,
    check_products_that_add,
    each_leading,
    expected_rows,
    leading_case,
    network_of_views,
    operands,
    viewed_case,
)
from tests.cpu.check import EPS, ISAS, changed, check_op, configs_of, isa_named
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED

each_isa = pytest.mark.parametrize(
    "isa", [*(isa_named(n) for n in ISAS), *EMULATED], ids=[*ISAS, *("amx emulated" for _ in EMULATED)]
)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
# (batch, seq, N, K): ones, primes, one more and one less than tiles, panels, blocks and pairs.
SHAPES = [(1, 1, 1, 1), (1, 3, 7, 5), (2, 5, 65, 33), (1, 25, 97, 128), (3, 43, 47, 31), (1, 385, 50, 19)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Kernels of the emulated ISA get functions for their tile instructions."""
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)


@each_isa
@each_dtype
@each_shape
def test_matmul(isa, dtype, shape):
    x, _, weight = operands(shape, dtype)
    check_op(ops.Matmul, isa, {"x": x, "weight": weight}, bounds={"y": chain_bound(x.values, as_operand(weight, dtype).T)})


@each_isa
@each_dtype
@each_shape
@pytest.mark.parametrize("mode", ["store", "add"])
def test_matmul_dx(isa, dtype, shape, mode):
    _, dy, weight = operands(shape, dtype)
    bound = chain_bound(dy.values, as_operand(weight, dtype)) + 2 * EPS
    check_op(ops.MatmulDx, isa, {"dy": dy, "weight": weight}, modes={"dx": mode}, bounds={"dx": bound})


@each_isa
@each_dtype
@each_leading
@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
def test_axes_of_any_kind(isa, dtype, leading, op_type):
    check_op(op_type, isa, **leading_case(op_type, leading, dtype))


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
@pytest.mark.extended
def test_columns_of_wider_tensors(isa, dtype, op_type, monkeypatch):
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={16: 16, 32: 16})
    for viewed in VIEWED:
        check_op(op_type, isa, **viewed_case(op_type, viewed, dtype, "add" if viewed[1] else "store"))


def in_parts(monkeypatch) -> None:
    """The depth of products goes in parts of 32."""
    changed(monkeypatch, gemm_config, ONE_BLOCK_BYTES=64, KC_BYTES=64, NARROW_KC_BYTES=64)


@each_isa
@each_dtype
@pytest.mark.parametrize("panels", [1, 3])
def test_depth_in_parts(isa, dtype, panels, monkeypatch):
    """Sums of one panel or of several are kept between the parts; the last part is shorter."""
    in_parts(monkeypatch)
    shape = (1, 29, 213, 139)
    usual = configs_of(isa, shape, dtype)
    config = {kind: replace(c, nc=panels * c.tile.nr(isa)) for kind, c in usual.items()}
    x, dy, weight = operands(shape, dtype)
    values = as_operand(weight, dtype)
    bounds = {"y": chain_bound(x.values, values.T), "dx": chain_bound(dy.values, values)}
    check_op(ops.Matmul, isa, {"x": x, "weight": weight}, bounds=bounds, config=config)
    check_op(ops.MatmulDx, isa, {"dy": dy, "weight": weight}, bounds=bounds, config=config)


# A start is both at run time, in every shape; the code of the others has one of the two, at the same edges.
STARTS = [(shape, "start", accumulate) for shape in SHAPES for accumulate in (0, 1)]


@each_isa
@each_dtype
@pytest.mark.parametrize(
    "shape, mode, accumulate", [*STARTS, *((shape, mode, 0) for shape in SHAPES[1::3] for mode in ("store", "add"))], ids=str
)
@pytest.mark.extended
def test_matmul_dw(isa, dtype, shape, mode, accumulate):
    x, dy, _ = operands(shape, dtype)
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    bound = chain_bound(flat[0].T, flat[1]) + 2 * EPS
    check_op(
        ops.MatmulDw,
        isa,
        {"dy": dy, "x": x},
        modes={"dweight": mode},
        bounds={"dweight": bound},
        scalars={"accumulate": accumulate},
    )


@each_isa
@each_dtype
def test_weight_gradient_over_several_chunks_of_tokens(isa, dtype, monkeypatch):
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={16: 16, 32: 16})
    x, dy, _ = operands((3, 43, 20, 33), dtype)
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    check_op(ops.MatmulDw, isa, {"dy": dy, "x": x}, modes={"dweight": "start"}, bounds={"dweight": chain_bound(flat[0].T, flat[1])})


@each_isa
@each_dtype
def test_large_weight_gradient_with_nontemporal_stores(isa, dtype):
    x, dy, _ = operands((1, 9, 384, 768), dtype)
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    bounds = {"dweight": chain_bound(flat[0].T, flat[1])}
    for accumulate in (0, 1):
        scalars = {"accumulate": accumulate}
        check_op(ops.MatmulDw, isa, {"dy": dy, "x": x}, modes={"dweight": "start"}, bounds=bounds, scalars=scalars, threads=(2,))


@each_isa
@each_dtype
@pytest.mark.parametrize("actual", [(1, 1), (2, 5), (3, 7)])
def test_fewer_tokens_than_planned(isa, dtype, actual):
    x, dy, weight = operands((*actual, 40, 24), dtype)
    check_op(
        ops.Matmul, isa, {"x": x, "weight": weight}, plan=(3, 7), bounds={"y": chain_bound(x.values, as_operand(weight, dtype).T)}
    )
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    bounds = {"dweight": chain_bound(flat[0].T, flat[1])}
    check_op(ops.MatmulDw, isa, {"dy": dy, "x": x}, plan=(3, 7), modes={"dweight": "start"}, bounds=bounds)


@each_isa
@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes, activation", [((24, 40, 53), "gelu"), ((7, 5, 131), "gelu"), ((24, 41, 53), "relu2")], ids=str)
@pytest.mark.extended
def test_fused_ops_mean_their_sequence(isa: ISA, compute, limit, bias, sizes, activation, monkeypatch):
    monkeypatch.setattr(classifier, "CHUNK", 8)  # 33 tokens: several chunks, the last not full
    found = check_network(
        lambda programs: CpuSession(programs, isa=isa, threads=2), compute=compute, limit=limit, bias=bias, sizes=sizes,
        activation=activation,
    )  # fmt: skip
    assert found >= expected_rows(FUSIONS, activation) - (set() if bias else {"linear"})


@each_isa
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 8e-3)])
@pytest.mark.extended
def test_fused_products_that_add(isa, compute, limit):
    check_products_that_add(lambda programs: CpuSession(programs, isa=isa, threads=2), compute=compute, limit=limit)


@each_isa
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-6), ("bf16", 8e-3)])
@pytest.mark.parametrize("sizes, parts", [((19, 35), False), ((70, 64), True)], ids=str)
@pytest.mark.extended
def test_fused_products_of_columns(isa, compute, limit, sizes, parts, monkeypatch):
    changed(monkeypatch, gemm, DEFER_DEPTH=1)
    if parts:
        in_parts(monkeypatch)
    C, F = sizes
    check_products_of_views(lambda programs: CpuSession(programs, isa=isa, threads=2), compute=compute, limit=limit, C=C, F=F)


def test_a_network_of_columns():
    """Its classifier is not fused, for the chunks of one are rows of a whole tensor."""
    network = partial(network_of_views, C=24, V=53)
    check_model(lambda programs: CpuSession(programs, threads=2), network, compute="bf16", limit=2e-2, ids=51)


@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
@pytest.mark.extended
def test_a_classifier_of_inner_axes(compute, limit, monkeypatch):
    monkeypatch.setattr(classifier, "CHUNK", 8)
    check_classifier_of_inner_axes(lambda programs: CpuSession(programs, threads=2), compute=compute, limit=limit)


@each_isa
@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.extended
def test_tiles_finished_beside_the_next(isa: ISA, compute, limit, parts, monkeypatch):
    """As deep products have it: a tile of 33 tokens is finished while the next one is multiplied, the last whole one behind."""
    changed(monkeypatch, gemm, DEFER_DEPTH=1)
    if parts:
        in_parts(monkeypatch)
    sizes = (70, 40, 53)
    check_network(lambda programs: CpuSession(programs, isa=isa, threads=2), compute=compute, limit=limit, bias=True, sizes=sizes)


def every_choice(isa: ISA) -> list[GemmConfig]:
    """Of each tile both orders with claims of one panel and of two, and blocks of one tile, of a few, and the default."""
    made = []
    first, second = gemm_config.ORDERS
    for tile in gemm_config.tiles(isa, "bf16"):
        one, few, span = tile.mr, 3 * tile.mr, tile.nr(isa)
        for rows, panels, order in ((one, 1, first), (few, 2, first), (one, 2, second), (384, 1, second)):
            made.append(GemmConfig(tile, rows, rows, panels * span, order))
    return made


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op_type, output, parts", [
    (ops.Matmul, "y", False), (ops.Matmul, "y", True), (ops.MatmulDx, "dx", False), (ops.MatmulDx, "dx", True),
    (ops.MatmulDw, "dweight", False),
])  # fmt: skip
@pytest.mark.extended
def test_every_choice_gives_equal_bits(op_type, output, parts, dtype, monkeypatch):
    """A tuner may choose any tile, block and order: the bits of a product do not depend on it."""
    if parts:
        in_parts(monkeypatch)
    isa = isa_named(ISAS[0])
    x, dy, weight = operands((1, 37, 51, 50), dtype)
    given = {"y": {"x": x, "weight": weight}, "dx": {"dy": dy, "weight": weight}, "dweight": {"dy": dy, "x": x}}[output]
    first = None
    for config in every_choice(isa):
        got = check_op(op_type, isa, given, bounds={output: 1e-2}, threads=(2,), config=config)[output]
        assert first is None or np.array_equal(got, first), config
        first = got


@each_isa
@each_dtype
@pytest.mark.parametrize("op_type", [ops.Matmul, ops.MatmulDx, ops.MatmulDw], ids=lambda op: op.name)
@pytest.mark.extended
def test_parts_of_a_choice_and_work_ahead_change_no_bit(isa, dtype, op_type):
    """Parts of 32 and of 64, of which the last is shorter and odd, and the whole depth; of weight gradients there is one."""
    shape = (1, 61, 107, 131)
    x, dy, weight = operands(shape, dtype)
    values = as_operand(weight, dtype)
    given, output, depth, bound = {
        ops.Matmul: ({"x": x, "weight": weight}, "y", 131, lambda: chain_bound(x.values, values.T)),
        ops.MatmulDx: ({"dy": dy, "weight": weight}, "dx", 107, lambda: chain_bound(dy.values, values)),
        ops.MatmulDw: ({"dy": dy, "x": x}, "dweight", None, lambda: 1e-2),
    }[op_type]
    usual, first = configs_of(isa, shape, dtype), None
    for kc in (None,) if depth is None else (32, 64, depth):
        for overlap in gemm_config.OVERLAPS:
            config = {k: replace(c, kc=kc, overlap=overlap, nc=2 * c.tile.nr(isa)) for k, c in usual.items()}
            got = check_op(op_type, isa, given, bounds={output: bound()}, threads=(1, 2), config=config)[output]
            assert first is None or np.array_equal(got, first), (kc, overlap)
            first = got


def test_scratch_holds_what_a_choice_needs():
    """Two panels as deep as a part, and the sums of a claim only where there are several parts."""
    isa, config = isas.X86["avx512"], GemmConfig(gemm_config.Tile(8, 3), 16, 24, 96)
    panels = {kc: 2 * kc * 48 * 4 for kc in (64, 384, 1000)}
    sums = 4 * 24 * 96
    assert gemm.gemm_scratch_bytes(isa, "fp32", 1000, replace(config, kc=64)) == panels[64] + sums
    assert gemm.gemm_scratch_bytes(isa, "fp32", 1000, replace(config, kc=1000)) == panels[1000]
    assert gemm.gemm_scratch_bytes(isa, "fp32", 768, config) == panels[384] + sums


@pytest.mark.parametrize("isa, cols, tile", [
    ("avx2", 768, (6, 2)),
    ("avx2", 1000, (6, 2)),  # one vector would pad nothing, and load more often than it multiplies
    ("avx2", 65, (4, 3)),
    ("avx2", 8, (12, 1)),
    ("generic", 65, (4, 2)),
    ("avx512", 768, (8, 3)),
    ("avx512", 65, (24, 1)),
])  # fmt: skip
def test_the_default_tile_is_the_one_that_takes_least_time(isa, cols, tile):
    found = gemm_config.default_tile(isas.X86[isa], "fp32", cols)
    assert (found.mr, found.vectors) == tile


@pytest.mark.parametrize("depth, itemsize, nbytes, kc", [
    (40, 4, 1536, 40),  # no part is deeper than the depth
    (768, 4, 1536, 384),
    (1000, 4, 1536, 352),  # 352, 352, 296
    (1000, 2, 3072, 1000),
    (3072, 2, 768, 384),
])  # fmt: skip
def test_parts_are_as_deep_as_each_other(depth, itemsize, nbytes, kc):
    assert gemm_config.even_kc(depth, itemsize, nbytes) == kc


@pytest.mark.parametrize("level1, depth, dtype, role, tile", [
    (32 << 10, 1024, "fp32", "forward", (6, 4)),  # eight places for twelve rows
    (32 << 10, 1024, "bf16", "forward", (12, 2)),  # rows are in two sets
    (32 << 10, 2048, "bf16", "input_gradient", (6, 4)),
    (32 << 10, 1000, "fp32", "forward", (12, 2)),  # rows are all over the cache
    (32 << 10, 1024, "fp32", "weight_gradient", (12, 2)),  # rows are packed
    (48 << 10, 1024, "fp32", "forward", (12, 2)),  # twelve places
])  # fmt: skip
def test_the_default_tile_has_rows_that_the_first_cache_holds(level1, depth, dtype, role, tile, monkeypatch):
    monkeypatch.setattr(gemm_config.processor, "caches", lambda: {1: level1})
    found = gemm_config.default(isas.X86["avx512_bf16"], role, dtype, 1024, depth, 256).tile
    assert (found.mr, found.vectors) == tile


@pytest.mark.parametrize("isa", [*isas.X86.values(), *isas.ARM.values()], ids=[*isas.X86, *isas.ARM])
@pytest.mark.parametrize("tokens", [256, 1024, 4096])
@pytest.mark.parametrize("rows, cols", [(2304, 768), (768, 3072), (50304, 768), (1600, 1600), (1600, 6400), (384, 128)])
def test_weight_gradients_of_two_threads_are_as_long(isa, tokens, rows, cols):
    """On every processor that there is a default for, whichever runs this."""
    config = gemm_config.default(isa, "weight_gradient", "bf16", cols, tokens, rows)
    heights = [min(config.mc, rows - n) for n in range(0, rows, config.mc)]
    widths = [min(config.nc, cols - n) for n in range(0, cols, config.nc)]
    claims = [height * width for height in heights for width in widths]
    half = len(claims) // 2
    assert len(claims) % 2 == 0 and half >= gemm_config.MIN_ITEMS // 4
    assert abs(sum(claims[:half]) - sum(claims[half:])) <= 0.06 * sum(claims)
    assert config.mc * min(tokens, gemm_config.token_chunk(isa)) * (2 if isa.dot else 4) <= gemm_config.PACKED_A_BYTES
