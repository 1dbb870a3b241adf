"""Products and weight gradients on AMX tiles whose depth goes in several parts, turns and chunks, against the float64 references.

Part lengths are those that are shipped, where the depth is long; and short ones, so that small operands have many parts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from barellm.cpu import gemm_config, jit
from barellm.cpu.gemm_config import GemmConfig
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.gemm import amx, gemm, gemm_mainloop
from barellm.cpu.step import CpuSession
from barellm.program import ops
from tests.cases import as_operand, chain_bound, check_network, operands
from tests.cpu.check import EPS, ISAS, changed, check_op, configs_of, isa_named
from tests.cpu.test_gemm import every_choice
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED

TILES = [isa_named(name) for name in ISAS if name == "amx_bf16"] or EMULATED  # of both only the real one: time
each_tiles = pytest.mark.parametrize("isa", TILES, ids=lambda isa: isa.name)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)


def work_items(isa, shape, panels: int, rows: int = 0) -> dict[str, GemmConfig]:
    """Configs with work items of so many panels, and of at most so many rows."""
    usual = configs_of(isa, shape, "bf16", **({"mc": rows, "long_mc": rows} if rows else {}))
    return {kind: replace(c, nc=panels * c.tile.nr(isa)) for kind, c in usual.items()}


def check_products(isa, shape, panels, rows=0, threads=(1, 2)) -> None:
    """Forward, and the gradient of the input, whose depth is the number of rows of the weight."""
    x, dy, weight = operands(shape, "bf16")
    values, config = as_operand(weight, "bf16"), work_items(isa, shape, panels, rows)
    bounds = {"y": chain_bound(x.values, values.T), "dx": chain_bound(dy.values, values)}
    check_op(ops.Matmul, isa, {"x": x, "weight": weight}, bounds=bounds, threads=threads, config=config)
    check_op(ops.MatmulDx, isa, {"dy": dy, "weight": weight}, bounds=bounds, threads=threads, config=config)


@pytest.mark.parametrize("depth, parts", [
    (256, [256]), (257, [160, 97]), (850, [224, 224, 224, 178]), (1600, [256] * 6 + [64]), (3000, [256] * 11 + [184])
], ids=str)  # fmt: skip
def test_parts_are_whole_steps_but_for_the_last(depth, parts):
    part = amx.kc_of(depth)
    assert [min(part, depth - at) for at in range(0, depth, part)] == parts


@each_tiles
@pytest.mark.parametrize("depth", [850, 1600, 3000])
@pytest.mark.parametrize("panels", [1, 12])
def test_long_depths(isa, depth, panels):
    """4, 7 and 12 parts; forward they go in turns of three, and the last turn of the first two is shorter."""
    assert amx.kc_of(depth) * 3 < depth
    check_products(isa, (1, 35, 67, depth), panels)
    check_products(isa, (1, 35, depth, 67), panels)


@each_tiles
@pytest.mark.parametrize("turn", [1, 2, 3, 7])
@pytest.mark.parametrize("panels, rows", [(1, 0), (3, 0), (2, 32)])
@pytest.mark.parametrize("N, K", [(213, 139), (131, 224)])
def test_short_parts_in_turns(isa, turn, panels, rows, N, K, monkeypatch):
    """Parts of 32: five and seven of them in turns of any length; claims of one panel and of several, of one tile and of more."""
    changed(monkeypatch, amx, KC=32)
    changed(monkeypatch, gemm_mainloop, AMX_K_GROUP=turn)
    check_products(isa, (1, 77, N, K), panels, rows, threads=(2,))


@each_tiles
@pytest.mark.parametrize("part", [32, 64, 256])
def test_no_choice_changes_a_bit_of_parts(isa, part, monkeypatch):
    changed(monkeypatch, amx, KC=part)
    x, dy, weight = operands((1, 70, 131, 301), "bf16")
    cases = [
        (ops.Matmul, "y", {"x": x, "weight": weight}), (ops.MatmulDx, "dx", {"dy": dy, "weight": weight}),
        (ops.MatmulDw, "dweight", {"dy": dy, "x": x}),
    ]  # fmt: skip
    for op_type, output, given in cases:
        first = None
        for config in every_choice(isa):
            got = check_op(op_type, isa, given, bounds={output: 1e-2}, threads=(2,), config=config)[output]
            assert first is None or np.array_equal(got, first), (op_type.name, config)
            first = got


@each_tiles
@pytest.mark.parametrize("tokens, chunk", [(850, 2048), (1600, 600), (3000, 2048), (513, 512)])
def test_weight_gradients_of_many_tokens(isa, tokens, chunk, monkeypatch):
    """Parts of 256 tokens; the last part, and the last chunk, are shorter."""
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={32: chunk})
    check_gradient(isa, (1, tokens, 35, 67), {"accumulate": 1}, threads=(2,))


def check_gradient(isa, shape, scalars, threads=(1, 2), plan=None, config=None) -> None:
    x, dy, _ = operands(shape, "bf16")
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    bounds = {"dweight": chain_bound(flat[0].T, flat[1]) + 2 * EPS}
    how = {"modes": {"dweight": "start"}, "scalars": scalars, "threads": threads, "plan": plan, "config": config}
    check_op(ops.MatmulDw, isa, {"dy": dy, "x": x}, bounds=bounds, **how)


@each_tiles
@pytest.mark.parametrize("part, chunk", [(32, 2048), (32, 64), (64, 150), (32, 33), (256, 40)])
@pytest.mark.parametrize("panels, rows", [(1, 32), (2, 64), (4, 96)])
def test_weight_gradients_in_short_parts_and_chunks(isa, part, chunk, panels, rows, monkeypatch):
    """Several chunks of tokens, of several parts each; claims of one tile and of more."""
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={32: chunk})
    changed(monkeypatch, amx, KC=part)
    for tokens, accumulate in ((170, 0), (97, 1)):
        shape = (1, tokens, 131, 100)
        config = work_items(isa, shape, panels, rows)
        check_gradient(isa, shape, {"accumulate": accumulate}, threads=(2,), config=config)


@each_tiles
@pytest.mark.parametrize("actual", [(1, 1), (2, 33), (3, 70)])
def test_weight_gradients_of_fewer_tokens_than_planned(isa, actual, monkeypatch):
    changed(monkeypatch, gemm_config, TOKEN_CHUNKS={32: 100})
    changed(monkeypatch, amx, KC=32)
    check_gradient(isa, (*actual, 40, 70), {"accumulate": 0}, plan=(3, 70))


@each_tiles
@pytest.mark.parametrize("most", [0, 1 << 30], ids=["past the caches", "cached"])
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
@pytest.mark.parametrize("bias", [True, False])
def test_whole_lines_of_results(isa, most, activation, bias, monkeypatch):
    """Columns that panels divide, so that rows of 16 bits and of fp32, of one result and of two, are stored a line at a time."""
    changed(monkeypatch, gemm, NONTEMPORAL_BYTES=most)
    network = {"compute": "bf16", "limit": 2e-2, "bias": bias, "sizes": (64, 96, 53), "activation": activation}
    check_network(lambda programs: CpuSession(programs, isa=isa, threads=2), **network)


@each_tiles
def test_the_same_bits_past_the_caches(isa, monkeypatch):
    x, _, weight = operands((1, 45, 64, 290), "bf16")
    bounds = {"y": chain_bound(x.values, as_operand(weight, "bf16").T)}
    found = []
    for most in (0, 1 << 30):
        changed(monkeypatch, gemm, NONTEMPORAL_BYTES=most)
        found.append(check_op(ops.Matmul, isa, {"x": x, "weight": weight}, bounds=bounds, threads=(1, 2))["y"])
    assert np.array_equal(*found)


@each_tiles
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_goes_past_the_caches_goes_a_line_at_a_time(isa, dtype):
    def stores(cols: int) -> list[str]:
        def emit(k, out, a, weight):
            gemm.gemm(
                k, out, None, a, weight, None, None, k.int(0), k.int(64), cols=cols, depth=64, transposed=True, dims=(),
                inner=64, epilogues=(), mode="store", config=gemm_config.default(isa, "forward", "bf16", cols, 64, 64),
            )  # fmt: skip

        text = jit.assembly(Specialisation(emit, (dtype, "bf16", "bf16"), ()).ir(isa), isa)
        return [line for line in text.splitlines() if "vmovnt" in line]

    assert stores(64) and all("zmm" in line for line in stores(64))
    assert not stores(65), "rows that do not begin with a line"
