"""The bound: what an op moves, by kind, and that a bandwidth is that of its mix."""

from __future__ import annotations

import pytest

from barellm.cpu.backend import Bench
from barellm.program.builder import Program, Store
from barellm.program.ops.norm.layernorm import LayerNorm, LayerNormDx
from barellm.program.ops.optim.optimizer import SumSquares
from barellm.program.ops.pointwise.elementwise import Add, Cast
from barellm.runtime import rates
from barellm.tools.plan.roofline import Ceiling, mix_of
from tests.profiling.conftest import ADAMW, COPY, READ, made_up


def program() -> Program:
    return Program(Store(), compute="bf16")


def test_mix_counts_bytes_by_what_happens_to_them():
    p = program()
    x, y = p.input("x", (4, 4096), "fp32"), p.input("y", (4, 4096), "fp32")
    weight = p.parameter("w", (4096,), value=1.0)
    assert mix_of(p.apply(Cast, x=x, dtype="bf16")) == (5, 3, 0)  # 4 bytes in, 2 out
    assert mix_of(p.apply(Add, a=x, b=y)) == (5, 3, 0)
    assert mix_of(p.apply(SumSquares, x=x)) == (8, 0, 0)
    norm = p.apply(LayerNorm, x=x, weight=weight, dtype="fp32", eps=1e-5)
    into = {"dx": (y, "add")}
    dx = p.apply(LayerNormDx, dy=x, x=y, weight=weight, mean=norm.mean, rstd=norm.rstd, into=into)
    assert mix_of(dx)[1] == 0 and mix_of(dx)[2] >= 3
    assert mix_of(norm) == (4, 4, 0)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    """What these tests measure is made up, and kept nowhere."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "_process", {})


def test_the_bound_is_the_larger_part():
    p, ceiling = program(), made_up()
    x = p.input("x", (1, 1 << 20), "fp32")
    norm = p.apply(SumSquares, x=x)
    assert ceiling.seconds(norm) == ceiling.traffic(norm) == norm.bytes() / READ
    slow = Ceiling({"fp32": 1.0, "bf16": 1.0}, ceiling.bandwidth)
    assert slow.seconds(norm) == norm.flops()
    assert ADAMW != COPY != READ


def test_a_mix_that_is_missing_is_measured_once(monkeypatch):
    asked = []
    monkeypatch.setattr(Bench, "bandwidth", lambda self, mix: asked.append(mix) or 1e9)
    p, ceiling = program(), Ceiling({"fp32": 1e18, "bf16": 1e18}, {})
    op = p.apply(Cast, x=p.input("x", (1, 4096), "fp32"), dtype="bf16")
    for _ in range(2):
        assert ceiling.seconds(op) == pytest.approx(op.bytes() / 1e9)
    assert asked == [(5, 3, 0)] * rates.REPEATS
    assert ceiling.to_json()["mixes"] == [{"read": 5, "write": 3, "update": 0, "rate": 1e9}]


@pytest.mark.parametrize("dtype, asked", [("fp32", []), ("bf16", []), ("fp16", ["fp16"])])
def test_products_run_at_the_peak_of_their_operands(monkeypatch, dtype, asked):
    """The rest of the program, a sum here, at fp32's. A peak that is not there yet is measured once."""
    found = []
    monkeypatch.setattr(Bench, "peak", lambda self, name: found.append(name) or 4e9)
    rate = {"fp32": 1e9, "bf16": 2e9, "fp16": 4e9}
    p, ceiling = Program(Store(), compute=dtype), Ceiling({"fp32": 1e9, "bf16": 2e9}, {})
    x = p.input("x", (64, 64), dtype)
    y = p.linear(x, p.parameter("w", (64, 64), std=1.0))
    p.apply(Add, a=x, b=y)
    product, plus = p.ops
    for _ in range(2):
        assert ceiling.operations(product) == product.flops() / rate[dtype]
        assert ceiling.operations(plus) == plus.flops() / 1e9
    assert found == asked * rates.REPEATS


def test_measured_again_the_better_rates_stay(monkeypatch):
    monkeypatch.setattr(Bench, "bandwidth", lambda self, mix: 2e9)
    monkeypatch.setattr(Bench, "peak", lambda self, dtype: {"fp32": 5e9, "bf16": 6e9}[dtype])
    ceiling = Ceiling({"fp32": 4e9, "bf16": 8e9}, {(8, 0, 0): 3e9, (4, 4, 0): 1e9})
    ceiling.again()
    assert ceiling.flops == {"fp32": 5e9, "bf16": 8e9}
    assert ceiling.bandwidth == {(8, 0, 0): 3e9, (4, 4, 0): 2e9}


@pytest.mark.parametrize("mix", [(8, 0, 0), (4, 4, 0), (0, 0, 8), (2, 0, 6), (5, 2, 1)])
def test_every_mix_runs(mix):
    bench = Bench(threads=2)
    try:
        assert 1e8 < bench.bandwidth(mix, nbytes=1 << 22) < 1e13
    finally:
        bench.close()
