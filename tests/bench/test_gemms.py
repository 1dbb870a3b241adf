"""The bench of matrix products: every product of a model is there, in its own bytes, and its share of the peak is one."""

import contextlib
import ctypes
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from barellm.cli import bench, main
from barellm.config.overrides import changed
from barellm.cpu.isa import host
from barellm.cpu.lang.sync import BARRIER, RECORD_NBYTES
from barellm.cpu.step import Lowered
from barellm.models import preset
from barellm.program.builder import Program, Store
from barellm.tools.bench import gemms
from benchmarks import baseline_process, baselines
from tests.profiling.conftest import small


def test_products_are_those_of_the_training_program():
    """Three of each layer's weight, and the weight gradients a second time, where they accumulate."""
    model = preset("gpt2-124m").model
    found = gemms.gemms_of(model, 4096)
    block = {"attn.c_attn": (2304, 768), "attn.c_proj": (768, 768), "mlp.c_fc": (3072, 768), "mlp.c_proj": (768, 3072)}
    assert {p.layer: (p.N, p.K) for p in found} == block | {"head": (50304, 768)}
    assert len(found) == 20 and {p.layer for p in found if p.bias} == set(block)
    assert [(p.op, p.mode) for p in found if p.layer == "head"] == [
        ("matmul", "store"),
        ("matmul_dx", "store"),
        ("matmul_dw", "store"),
        ("matmul_dw", "add"),
    ]
    assert [p.op for p in found if p.layer == "mlp.c_proj"] == ["linear_residual", "matmul_dx_gelu", "matmul_dw", "matmul_dw"]
    assert {p.tokens for p in found if p.layer == "head"} == {1024}


def test_products_of_another_architecture_are_its_own():
    model = preset("llama-15m").model
    found = gemms.gemms_of(model, 300)  # more tokens than the model has positions
    shapes = {"attn.qkv": (768, 384), "attn.proj": (384, 384), "mlp.gate_up": (2048, 384), "mlp.down": (384, 1024)}
    assert {p.layer: (p.N, p.K) for p in found} == shapes | {"head": (4096, 384)}
    assert [p.op for p in found if p.layer in ("attn.qkv", "mlp.down") and p.mode == "store"] == [
        *("matmul", "matmul_dx", "matmul_dw"),
        *("linear_residual", "matmul_dx", "matmul_dw"),
    ]
    assert not any(p.bias for p in found) and {p.tokens for p in found} == {300}


def test_a_gpu_does_the_head_in_longer_chunks():
    found = gemms.gemms_of(preset("gpt2-124m").model, 40_000, "cuda")
    assert {p.tokens for p in found if p.layer == "head"} == {32_768}
    assert {p.tokens for p in found if p.layer != "head"} == {40_000}


WITHOUT_BIAS = gemms.Gemm("mlp.down", "linear_residual", 24, 40, 9)
TRANSPOSED = gemms.Gemm("mlp.down", "matmul_relu2_backward", 24, 40, 9)


@pytest.mark.parametrize(
    "product", [*gemms.gemms_of(small().model, 48), WITHOUT_BIAS, TRANSPOSED], ids=lambda p: f"{p.layer} {p.op} {p.mode}"
)
@pytest.mark.extended
def test_copies_are_apart_and_outlast_the_caches(product):
    timed = gemms.Timed(product, "bf16")
    try:
        tensors = [t for op in timed.ops for t in (*op.inputs.values(), *op.outputs.values())]
        assert all(timed.session.plan.offsets[t] >= 0 for t in tensors)
        spans = sorted((timed.session.plan.offsets[t], t.nbytes) for t in set(tensors))
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert len(timed.ops) == gemms.MOST_COPIES or len(timed.ops) * timed.nbytes >= gemms.COLD_BYTES["cpu"]
        assert timed.warm() > 0 and timed.cold() > 0
    finally:
        timed.close()


def test_a_table_is_walked_as_often_as_was_said(monkeypatch):
    """Each record has a barrier behind it, and the seconds are those of one."""
    walked: list[tuple[np.ndarray, bool]] = []
    words = RECORD_NBYTES // 8

    def run(table: int, rows: int) -> None:
        found = np.ctypeslib.as_array((ctypes.c_int64 * (rows * words)).from_address(table)).reshape(rows, words)
        walked.append((found.copy(), table % RECORD_NBYTES == 0))

    clock = iter((10.0, 16.0))
    monkeypatch.setattr(gemms.time, "perf_counter", lambda: next(clock))
    timed = object.__new__(gemms.Timed)
    timed.session = SimpleNamespace(pool=SimpleNamespace(run=run))  # pyright: ignore[reportAttributeAccessIssue]
    records = np.arange(2 * words).reshape(2, words)
    records[:, BARRIER // 8] = 0
    assert timed._table(records, 3)() == 6.0 / 6
    ((found, aligned),) = walked
    records[:, BARRIER // 8] = 1
    assert aligned and np.array_equal(found, np.tile(records, (3, 1)))


def test_every_byte_of_the_arena_is_filled_with_normal_numbers():
    arena = np.zeros((5 << 20) + 12, np.uint8)

    def put(start: int, data: np.ndarray) -> None:
        assert not arena[start : start + data.size].any() and start + data.size <= arena.size
        arena[start : start + data.size] = data

    gemms.fill(SimpleNamespace(plan=SimpleNamespace(arena_bytes=arena.size), _set=put))
    for numbers in (arena.view(gemms.numpy_dtype("bf16")), arena.view(np.float32)):
        for part in np.array_split(numbers.astype(np.float64), 5):
            assert abs(part.mean()) < 0.02 and abs(part.std() - 1) < 0.02


@pytest.mark.parametrize("nbytes, copies", [(1, 200), (1 << 20, 96), ((1 << 20) + 1, 96), (1 << 26, 2), (1 << 30, 2)])
def test_copies_are_as_many_as_the_caches_cannot_hold(nbytes, copies):
    assert gemms.copies_of(nbytes, "cpu") == copies
    assert gemms.copies_of(2 * nbytes, "cuda") == (copies if nbytes > 1 else 200)


@pytest.mark.parametrize("dtype, copies", [("bf16", 16), ("fp32", 8)])
def test_a_peer_is_told_of_as_many_copies_as_its_operands_need(dtype, copies):
    told = gemms.case(gemms.Gemm("mlp", "matmul_dx_gelu", 2304, 768, 512, bias=True), dtype, "cpu")
    assert told == {"op": "dgrad", "N": 2304, "K": 768, "tokens": 512, "dtype": dtype, "copies": copies}


WARM, COLD, PEAKS = (3e-3, 1e-3, 2e-3), (6e-3, 7e-3, 5e-3), (2e11, 6e11, 4e11)  # of three rounds


class OnPaper:
    """A product that is lowered and not run, with the seconds that its round has."""

    made: list[gemms.Gemm]
    open: list[gemms.Gemm]

    def __init__(self, product: gemms.Gemm, dtype: str) -> None:
        p = Program(Store(), compute=dtype)
        gemms.append(p, product, 0)
        self.product, self.ops, self.nbytes = product, Lowered(p, host(), 1).ops, 1234
        self.round = self.made.count(product)
        self.made.append(product)
        self.open.append(product)

    def warm(self) -> float:
        return WARM[self.round]

    def cold(self) -> float:
        return COLD[self.round]

    def close(self) -> None:
        self.open.remove(self.product)


class CompiledModel:
    """A bench whose bf16 peak is another one each time."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def peak(self, dtype: str) -> float:
        self.asked.append(dtype)
        return 1e11 if dtype == "fp32" else PEAKS[self.asked.count(dtype) % 3]

    def close(self) -> None:
        self.asked.append("closed")


def test_rows_are_medians_of_rounds_that_go_through_all_products(monkeypatch):
    monkeypatch.setattr(OnPaper, "made", [], raising=False)
    monkeypatch.setattr(OnPaper, "open", [], raising=False)
    machine, asked, told, reported = CompiledModel(), [], [], []

    def run(at: int, what: str, *, calls: int, warm_up: int) -> list[float]:
        asked.append((at, what, calls, warm_up))
        return [1.0, *[{"warm": 4e-3, "cold": 9e-3}[what]] * calls, 0.0]

    @contextlib.contextmanager
    def opened(script, cases, *, device, environment):
        told.append((script, cases, device, environment))
        yield SimpleNamespace(facts={"version": "9.9", "threads": 2}, run=run)

    monkeypatch.setattr(gemms, "Timed", OnPaper)
    monkeypatch.setattr(gemms, "open_bench", lambda device: machine)
    monkeypatch.setattr(baselines, "baseline_script", Path)
    monkeypatch.setattr(baseline_process, "opened", opened)
    config = changed(small(), {"train.dtype": "bf16", "model.bias": True})
    result = gemms.measure(config, tokens=[9, 40], rounds=3, report=reported.append, baseline="torch")
    rows, many = result["products"], len(gemms.gemms_of(config.model, 9))
    assert [result[name] for name in ("kind", "peer", "rounds")] == ["gemm", "PyTorch 9.9", 3]
    assert rows == reported and [row["tokens"] for row in rows] == [9] * many + [40] * many
    assert OnPaper.made[: 2 * many] * 3 == OnPaper.made and not OnPaper.open and machine.asked[-1] == "closed"
    ((script, cases, device, environment),) = told
    assert environment == baselines.environments()["tuned"]["set"] == result["environment"]["set"]
    assert result["peer_threads"] == 2
    assert (script, device) == (Path("torch_gemm.py"), "cpu")
    for at, (row, case, product) in enumerate(zip(rows, cases, OnPaper.made, strict=False)):
        assert {name: row[name] for name in vars(product)} == vars(product)
        N, K, tokens = product.N, product.K, product.tokens
        of_product, flops = 2 * N * K * tokens, row["flops"]
        assert flops == of_product or (flops > of_product and product.op not in ("matmul", "matmul_dx", "matmul_dw"))
        bound = of_product / 4e11 + (flops - of_product) / 1e11
        found = [row[name] for name in ("peak_flops", "warm_s", "cold_s", "nbytes", "dtype")]
        assert found == [4e11, 2e-3, 6e-3, 1234, "bf16"]
        assert [row["warm_percent"], row["cold_percent"]] == pytest.approx([100 * bound / 2e-3, 100 * bound / 6e-3])
        assert [row["peer_warm_s"], row["peer_cold_s"]] == [4e-3, 9e-3]
        assert [row["times_peer_warm"], row["times_peer_cold"]] == pytest.approx([2.0, 1.5])
        nbytes = 2 * (tokens * N + tokens * K + N * K)
        want = {"N": N, "K": K, "tokens": tokens, "dtype": "bf16", "copies": gemms.copies_of(nbytes, "cpu")}
        assert case == {"op": gemms.pass_of(product.op), **want}
        # Three calls say how long one takes; a table of 15 ms has two.
        assert [call[1:] for call in asked if call[0] == at] == [("cold", 3, 1), ("warm", 2, 1), ("cold", 2, 1)] * 3


@pytest.mark.parametrize("product", [*gemms.gemms_of(small().model, 48), WITHOUT_BIAS], ids=str)
def test_a_product_is_what_it_says_and_alone_without_the_rest(product):
    for one in (product, gemms.alone(product)):
        p = Program(Store(), compute="bf16")
        gemms.append(p, one, 3)
        (op,) = Lowered(p, host(), 1).ops
        results = {name: mode for name, mode in op.modes.items() if name != "pre"}
        assert op.name == one.op and list(results.values()) == [one.mode]
        weight = op.outputs["dweight"] if one.op == "matmul_dw" else op.inputs["weight"]
        assert tuple(weight.shape) == (one.N, one.K) and ("bias" in op.inputs) == one.bias
        x = op.inputs.get("x") or op.inputs["dy"]
        assert x.size == one.tokens * (one.K if "x" in op.inputs else one.N)
        assert all(name.rsplit(".", 1)[-1] in ("3", "grad") for name in p.store.tensors)
        residual = op.inputs.get("residual")
        assert residual is None or residual.dtype == op.outputs["y"].dtype == "fp32"
    assert one.mode == "store" and not one.bias
    assert gemms.pass_of(one.op) == gemms.pass_of(product.op) and one.op in ("matmul", "matmul_dx", "matmul_dw")


@pytest.mark.parametrize(
    "name, layer",
    [
        ("h.3.attn.c_attn.weight", "attn.c_attn"), ("h.11.mlp.c_fc.weight.grad", "mlp.c_fc"), ("wte", "wte"),
        ("layers.0.mlp.down", "mlp.down"), ("a.2.b.4.c.grad", "c"), ("7.w", "w"),
    ],
)  # fmt: skip
def test_weights_of_all_blocks_have_one_name(name, layer):
    assert gemms.layer_of(name) == layer


def test_a_mistake_is_one_line(capsys):
    assert main.main(["bench", "gemm", "shakespeare-char", "--tokens", "many"]) == 2
    assert "--tokens is 'many'" in capsys.readouterr().err
    assert main.main(["bench", "ops", "shakespeare-char", "--tokens", "64"]) == 2


@pytest.mark.parametrize("dtype, seconds", [("fp32", 2.0), ("bf16", 0.5), ("fp16", 0.5)])
def test_a_share_of_the_peak_is_that_of_the_dtype(dtype, seconds):
    """2e6 operations at 1e6 in fp32 and 4e6 in 16 bits, in 4 s warm and 8 s cold."""
    p = Program(Store(), compute=dtype)
    p.linear(p.input("x", (100, 100), dtype), p.parameter("w", (100, 100), std=1.0))
    (op,) = p.ops
    peaks = (1e6, 1e6 if dtype == "fp32" else 4e6)
    product = gemms.Gemm("w", "matmul", 100, 100, 100)
    row = gemms._row(product, SimpleNamespace(ops=[op], nbytes=1), [(*peaks, 4.0, 8.0)], dtype)  # pyright: ignore
    assert (row["warm_percent"], row["cold_percent"]) == (25 * seconds, 12.5 * seconds)


def test_times_as_fast_as_the_peer_are_told_by_role():
    def row(op: str, warm: float, cold: float) -> dict:
        shape = {"layer": "mlp", "op": op, "mode": "store", "N": 8, "K": 8, "tokens": 8, "warm_s": 1e-3}
        percents = {"warm_percent": 50.0, "cold_percent": 40.0}
        return {**shape, **percents, "times_peer_warm": warm, "times_peer_cold": cold}

    rows = [row("linear_gelu", 3.0, 0.5), row("matmul_dx", 0.75, 0.25), row("matmul", 1.0, 2.0), row("linear_residual", 2.0, 4.0)]
    told = gemms.speedups_by_pass(rows)
    assert told == {"fprop": {"warm": [1.0, 2.0, 3.0], "cold": [0.5, 2.0, 4.0]}, "dgrad": {"warm": [0.75] * 3, "cold": [0.25] * 3}}
    machine = {"device": "cpu", "isa": "avx2", "threads": 2}
    result = {"preset": "p", "dtype": "fp32", "machine": machine, "products": rows, "peer": "PyTorch 9"}
    first, second, *passes = bench._gemm_summary(result)
    assert "at least 50.0 % warm, 40.0 % cold" in first and "PyTorch 9" in second
    assert [line.split() for line in passes] == [
        ["fprop", "warm", "1.00", "2.00", "3.00", "cold", "0.50", "2.00", "4.00"],
        ["dgrad", "warm", "0.75", "0.75", "0.75", "cold", "0.25", "0.25", "0.25"],
    ]
    line = bench._gemm_line(rows[1])
    assert line.split()[-2:] == ["0.75", "0.25"] and len(line) <= 80
    (*_, head) = bench._gemm_head("PyTorch")
    assert head.index("M x N x K") == line.index("8x8x8") and len(head) <= 80
    del result["peer"]
    assert bench._gemm_summary(result) == [first]


@pytest.mark.parametrize("words, message", [
    ("gemm --baselines cublaslt", "--device cuda"),
    ("gemm --baselines llmc=x", "bench gemm knows PyTorch's ops only: --baselines torch"),
])  # fmt: skip
def test_peers_that_a_measurement_does_not_know_are_refused(words, message, refused, monkeypatch, tmp_path):
    (tmp_path / "x").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    what, *more = words.split()
    assert message in refused("bench", what, "shakespeare-char", *more)
