"""What measures the GPU: its kernels do the work that is counted, and the rates are of the clock that events have."""

import numpy as np
import pytest

from barellm.cuda import bench, driver
from barellm.cuda.bench import BLOCK, Bench
from barellm.cuda.kernel import Launch, Sizes, Specialisation
from barellm.cuda.kernels import microbenchmarks
from barellm.cuda.launch import BoundLaunch, Kernel
from tests.simulators.mock import LAUNCH_MS, Gpu

R = np.random.default_rng(3)


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


def run(gpu, function, kinds, arguments, constants, blocks):
    """One launch on arrays, which are written back."""
    context = driver.Context(driver.device())
    memory = {name: driver.DeviceMemory(a.nbytes) for name, a in arguments.items() if isinstance(a, np.ndarray)}
    for name, m in memory.items():
        m.write(0, arguments[name].reshape(-1).view(np.uint8), context.stream)
    options = (("num_stages", 1), ("num_warps", 4))
    spec = Specialisation(function, tuple(kinds.items()), tuple(constants.items()), options, tuple(memory))
    code = gpu.compiled([spec], gpu.arch, processes=1)[spec]
    values = [memory[name].address if name in memory else arguments[name] for name in kinds]
    launch = Launch(spec, values, lambda sizes: (blocks,), [], [], None)
    BoundLaunch(launch, Kernel(code, driver.device()), Sizes(), lambda region: 0, 0).run(context.stream)
    for name, m in memory.items():
        arguments[name] = m.read(0, m.nbytes, context.stream).view(arguments[name].dtype).reshape(arguments[name].shape)
    return arguments


def test_the_product_of_the_peak_is_done_in_every_turn(gpu):
    a, b = R.integers(-3, 4, (32, 16)).astype(np.float32), R.integers(-3, 4, (16, 16)).astype(np.float32)
    kinds = {"out": "*fp32", "a": "*fp32", "b": "*fp32", "iterations": "i32"}
    constants = {"ROWS": 32, "COLS": 16, "DEPTH": 16}
    got = run(gpu, microbenchmarks.peak, kinds, {"out": np.zeros(3, np.float32), "a": a, "b": b, "iterations": 5}, constants, 3)
    assert np.array_equal(got["out"], [5 * (a @ b).sum()] * 3)


@pytest.mark.parametrize("mix", [(8, 0, 0), (4, 4, 0), (0, 0, 8), (2, 1, 5)])
def test_every_stream_of_a_mix_is_moved(gpu, mix):
    n = 2 * BLOCK
    arrays = [R.integers(-4, 5, (max(count, 1), n)).astype(np.float32) for count in mix]
    kinds = dict.fromkeys(("a", "b", "c"), "*fp32") | {"n": "i32"}
    constants = dict(zip(("READ", "WRITE", "UPDATE"), mix, strict=True)) | {"BLOCK": BLOCK}
    given = {name: a.copy() for name, a in zip("abc", arrays, strict=True)}
    got = run(gpu, microbenchmarks.move, kinds, given | {"n": n}, constants, n // BLOCK)
    total = arrays[0][: mix[0]].sum(axis=0)
    assert np.array_equal(got["a"], arrays[0])
    written = total + np.arange(mix[1])[:, None] if mix[1] else arrays[1]
    assert np.array_equal(got["b"], written)
    assert np.array_equal(got["c"], arrays[2] / 2 + total if mix[2] else arrays[2])


def test_rates_are_work_over_the_time_of_events(gpu, monkeypatch):
    monkeypatch.setattr(bench, "TRIALS", 2)
    monkeypatch.setattr(bench, "REPEATS", 2)
    assert bench.TILES["fp16"] == bench.TILES["bf16"]  # tensor cores multiply both at one rate
    monkeypatch.setattr(bench, "TILES", {"fp32": (32, 16, 16, 4), "fp16": (16, 16, 16, 4)})
    monkeypatch.setattr(bench, "BANDWIDTH_BYTES", 8 * 4 * BLOCK)
    monkeypatch.setattr(bench, "ITERATIONS", 3)
    small = Bench()
    assert small.bandwidth((4, 4, 0)) == pytest.approx(8 * 4 * BLOCK / (LAUNCH_MS / 1e3))
    assert small.bandwidth((0, 0, 8)) == pytest.approx(2 * 8 * 4 * BLOCK / (LAUNCH_MS / 1e3))
    assert small.peak("fp32") == pytest.approx(2 * 32 * 16 * 16 * 3 * 2 * gpu.sms / (LAUNCH_MS / 1e3))
    assert small.peak("fp16") == pytest.approx(2 * 16 * 16 * 16 * 3 * 2 * gpu.sms / (LAUNCH_MS / 1e3))
    small.close()
    assert not gpu.allocated


@pytest.mark.parametrize("most", [1 << 31, 20_000])
def test_the_first_byte_that_differs_is_found_wherever_it_is(gpu, most, monkeypatch):
    monkeypatch.setattr(bench.MemoryComparison, "MOST", most)
    monkeypatch.setattr(bench.MemoryComparison, "PROGRAMS", 3)
    device = driver.device()
    stream, nbytes = driver.Context(device).stream, 50_002
    a, b = driver.DeviceMemory(nbytes + 64), driver.DeviceMemory(nbytes)
    data = R.integers(0, 256, nbytes, dtype=np.uint8)
    same = bench.MemoryComparison(device)
    for at in (None, 0, 1, 8191, 8192, 24_575, 49_999, 50_001):
        a.write(64, data, stream)
        b.write(0, data, stream)
        if at is not None:
            a.write(64 + at, data[at : at + 1] ^ 1, stream)
        assert same.first(a, b, 0, nbytes, 64, stream) == at
        assert same.first(a, b, 2, nbytes, 64, stream) == (at if at is None or at > 1 else None)
    same.close()
