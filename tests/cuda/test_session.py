"""A session on the mock driver: results, graphs, buffers in turn, and one line for each thing that a user's machine may lack."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import barellm
from barellm.cuda import driver, launch, step
from barellm.cuda.step import CudaSession
from barellm.data.tokenizers import Bytes
from barellm.errors import UserError
from barellm.models import gpt2
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.interop.models import checkpoint_of, random_arrays
from tests.simulators.mock import LAUNCH_MS, Gpu, memory_of

R = np.random.default_rng(5)
C = 40


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


def programs() -> dict[str, Program]:
    """y = x rounded to bf16, total += row; and the rounding alone, for another shape of x."""
    store = Store()
    dims = Dim("batch", 3), Dim("seq", 8)
    p = Program(store)
    x = p.input("x", (*dims, C), "fp32")
    rounded = p.apply(ops.Cast, x=x, dtype="bf16")
    into = {"dx": (store.get("total", (C,), "fp32", "state"), "add")}
    p.apply(ops.ACTIVATIONS["gelu"].backward, into=into, dy=p.input("row", (C,), "fp32"), x=p.input("far", (C,), "fp32"))  # slope 1
    p.output("y", p.apply(ops.Cast, x=rounded.y, dtype="fp32").y)
    q = Program(store)
    q.output("z", q.apply(ops.Cast, x=q.input("x", (*dims, 3), "fp32"), dtype="bf16").y)
    return {"p": p, "q": q}


def opened() -> CudaSession:
    session = CudaSession(programs())
    session.write("row", np.zeros(C))
    session.write("far", np.full(C, 30.0))
    return session


def rounded(x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_runs_of_several_sizes_and_programs(gpu):
    session = opened()
    for batch, seq in ((3, 8), (1, 1), (2, 5), (3, 8)):
        x = R.normal(size=(batch, seq, C))
        session.write("x", x)
        session.run("p", batch=batch, seq=seq)
        assert np.array_equal(session.read("y"), rounded(x))
        z = R.normal(size=(batch, seq, 3))
        session.write("x", z)
        session.run("q", batch=batch, seq=seq)
        assert np.array_equal(session.read("z").astype(np.float32), rounded(z))
    session.close()
    session.close()
    assert not gpu.allocated and not gpu.pinned
    assert gpu.functions and all(f.spec is None for f in gpu.functions)  # no code stays loaded


def test_inputs_of_queued_runs_are_each_their_own(gpu):
    """The mock copies from pinned memory as late as a GPU might: a buffer that is filled again too early would count twice."""
    session = opened()
    session.write("x", np.ones((1, 1, C)))
    total = np.zeros(C, np.float32)
    for _ in range(7):
        row = R.integers(-8, 8, C)
        session.write("row", row)
        session.run("p", batch=1, seq=1)
        total += row
    assert any(stream.queue for stream in gpu.streams)  # nobody has waited for the last runs
    assert np.array_equal(session.read("total"), total)


def test_a_graph_is_captured_once_for_its_sizes_and_few_are_kept(gpu, monkeypatch):
    monkeypatch.setattr(step, "GRAPHS", 2)
    session = opened()

    def run(seq: int) -> int:
        before = gpu.calls.count("cuLaunchKernelEx")
        session.write("x", np.ones((1, seq, C)))
        session.run("p", batch=1, seq=seq)
        return gpu.calls.count("cuLaunchKernelEx") - before

    assert [run(seq) for seq in (1, 2, 1, 2, 3, 2, 1)] == [3, 3, 0, 0, 3, 0, 3]
    assert np.array_equal(session.read("y"), np.ones((1, 1, C)))


def test_code_is_on_the_gpu_before_anything_is_launched(gpu):
    """The mock refuses a launch of a function that was not loaded, and loading while a graph is captured."""
    session = opened()
    assert len(gpu.functions) == len(session.kernels) == gpu.calls.count("cuFuncLoad")
    assert all(f.loaded for f in gpu.functions) and "cuLaunchKernelEx" not in gpu.calls
    gpu.functions[0].loaded = False
    session.write("x", np.ones((1, 1, C)))
    with pytest.raises(AssertionError, match="is not loaded before its first launch"):
        session.run("p", batch=1, seq=1)
        session.run("q", batch=1, seq=1)


def test_a_profiler_sees_what_is_meant_for_it(gpu):
    session = opened()
    names = [spec.name for spec in session.kernels]
    assert names and not gpu.profiled
    session.write("x", np.ones((1, 1, C)))
    with pytest.raises(KeyError), driver.profiled():
        session.run_unrolled("p", batch=1, seq=1)
        seen = [spec.name for spec in gpu.profiled]
        raise KeyError
    session.run_unrolled("p", batch=1, seq=1)
    assert seen and [spec.name for spec in gpu.profiled] == seen


def test_memory_may_be_given_back_while_a_graph_is_captured(gpu):
    """Python collects what it likes when it likes."""
    session = opened()
    session.write("x", np.ones((1, 1, C)))
    lost, bound = [driver.DeviceMemory(64), driver.PinnedMemory(64)], session._bound

    def collecting(*run):
        launches = bound(*run)
        launches[0].run = lambda stream, run=launches[0].run: (run(stream), lost.clear())
        return launches

    session._bound = collecting
    session.run("p", batch=1, seq=1)
    assert np.array_equal(session.read("y"), np.ones((1, 1, C))) and not lost
    assert len(gpu.allocated) == 1 and len(gpu.pinned) == 2  # the session's own


def test_what_outlives_a_session_has_a_context_to_go_back_to(gpu):
    """An event is given back when nobody has it; its context must still be there (the mock has no function that releases it)."""
    session = opened()
    turns = session._staging_buffers
    session.close()
    gpu.calls.clear()
    del session, turns
    gc.collect()
    assert set(gpu.calls) <= {"cuEventDestroy"}


def test_a_loaded_model_is_asked_in_the_context_of_whichever_thread_asks(gpu, tmp_path, own_cache):
    model = gpt2.Config(layers=1, heads=2, d_model=32, vocab_size=256, max_seq=16)
    with barellm.load(checkpoint_of(tmp_path / "run", model, random_arrays(model), Bytes()), device="cuda") as opened:
        opened.logits([[1, 2, 3]])
        gpu.calls.clear()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(opened.logits, [[1, 2, 3]]).result()
        assert gpu.calls[0] == "cuCtxSetCurrent"


def test_errors_have_names_and_say_whether_the_gpu_is_lost(gpu):
    gpu.errors["cuMemAlloc"] = 700
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it") as error:
        driver.DeviceMemory(1)
    assert error.value.lost
    gpu.errors["cuMemAlloc"] = 2
    with pytest.raises(driver.DriverError, match=r"cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY$") as error:
        driver.DeviceMemory(1)
    assert not error.value.lost
    assert driver._name(driver.bindings(), 123456) == "status 123456"  # of a driver newer than the bindings


def test_a_hang_is_told_once_and_ends_with_ctrl_c(gpu, monkeypatch, capsys):
    """Python is back between two looks, so it sees the signal. The session is left as it is: whatever gives memory back waits for
    the GPU."""
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    session.run("p", batch=2, seq=8)
    now, naps = iter(range(0, 10**6, 20)), []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=nap))
    gpu.hangs = True
    with pytest.raises(KeyboardInterrupt):
        try:
            session.synchronize()
        finally:
            session.close()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "for 80 s (the latest: program 'p', batch 2, seq 8); Ctrl-C stops waiting" in told
    gpu.calls.clear()
    session.close()
    del session
    gc.collect()
    assert set(gpu.calls) <= {"cuEventDestroy"} and gpu.allocated


def test_a_short_wait_does_not_sleep(gpu, monkeypatch, capsys):
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda s: pytest.fail("it sleeps")))
    session.run("p", batch=2, seq=8)
    session.synchronize()
    assert not gpu.streams[0].queue and capsys.readouterr().err == ""


def test_every_wait_for_the_gpu_can_be_interrupted(gpu):
    """None is the driver's own, which stays in C: neither for a result, nor for room for inputs, nor for a time."""
    session = opened()
    for _ in range(3):
        session.write("x", np.ones((2, 8, C)))
        session.run("p", batch=2, seq=8)
        session.read("y")
    session.timed("p", batch=2, seq=8)
    session.close()
    assert not {name for name in gpu.calls if name.endswith("Synchronize")}


def test_a_fault_of_a_kernel_is_one_line_and_closing_adds_none(gpu):
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    session.run("p", batch=2, seq=8)
    gpu.errors |= dict.fromkeys(("cuStreamQuery", "cuGraphExecDestroy", "cuLibraryUnload", "cuMemFree"), 700)
    with pytest.raises(UserError) as error:
        try:
            session.synchronize()
        finally:
            session.close()
    assert error.value.lost and error.value.__context__ is None
    assert str(error.value) == (
        "cuStreamQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it went wrong (the latest: program 'p', batch 2, "
        "seq 8), and this process cannot use the GPU any more; CUDA_LAUNCH_BLOCKING=1 launches one kernel at a time and names it"
    )
    assert "cuLibraryUnload" not in gpu.calls


def test_an_error_that_is_not_the_gpus_gives_its_memory_back(gpu):
    session = opened()
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            session.close()
    assert not gpu.allocated


def test_launched_one_by_one_an_error_names_its_kernel(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    run = gpu.execute

    def faulty(spec, values, grid):
        run(spec, values, grid)
        if spec.name == "activation_backward":
            gpu.errors["cuStreamQuery"] = 719

    gpu.execute = faulty
    with pytest.raises(driver.DriverError) as error:
        session.run("p", batch=2, seq=8)
    assert (
        "LAUNCH_FAILED: a kernel before it went wrong (the latest: kernel activation_backward of op gelu_backward, grid ("
        in str(error.value)
    )
    assert "LAUNCH_BLOCKING" not in str(error.value)
    assert [name for name, _ in gpu.launched] == ["cast", "activation_backward"] and "cuGraphLaunch" not in gpu.calls
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert not driver.blocking()


def test_a_session_runs_in_any_thread(gpu):
    """In which the driver has no context before: as the threads of a notebook."""
    session = opened()
    found: list[object] = []

    def work() -> None:
        try:
            session.write("x", np.full((2, 8, C), 3.0))
            session.run("p", batch=2, seq=8)
            found.append(session.read("y"))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert np.array_equal(found[0], np.full((2, 8, C), 3.0))
    assert gpu.calls.count("cuCtxSetCurrent") == 2


def test_a_grid_that_no_gpu_has_is_one_line(gpu, monkeypatch):
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    monkeypatch.setattr(launch, "MOST_GRID", (2**31 - 1, 0, 65535))
    with pytest.raises(UserError, match=r"kernel cast of op cast, grid \(\d+, 1, 1\): a GPU runs at most .* than 2 of 8 tokens"):
        session.run("p", batch=2, seq=8)


def test_a_warm_run_makes_few_driver_calls_and_never_waits(gpu):
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    for _ in range(3):
        session.run("p", batch=2, seq=8)
    session.synchronize()
    gpu.calls.clear()
    session.run("p", batch=2, seq=8)
    assert gpu.calls == ["cuEventQuery", *["cuMemcpyHtoDAsync"] * 4, "cuEventRecord", "cuGraphLaunch"]


def test_times_of_ops_are_the_times_of_their_launches(gpu):
    session = opened()
    session.write("row", np.ones(C))
    session.write("x", np.ones((2, 8, C)))
    times = session.timed("p", batch=2, seq=8)
    assert [op.name for op, _ in times] == ["cast", "gelu_backward", "cast"] and {ms for _, ms in times} == {LAUNCH_MS}
    assert np.array_equal(session.read("total"), np.ones(C))  # it was a run like any other


def test_sizes_beyond_the_plan_and_inputs_of_other_sizes_are_refused(gpu):
    session = opened()
    session.write("x", np.ones((2, 8, C)))
    with pytest.raises(ValueError, match="batch is 4, planned for 1 to 3"):
        session.run("p", batch=4, seq=8)
    with pytest.raises(ValueError, match="x has shape"):
        session.run("p", batch=1, seq=8)
    session.run("p", batch=2, seq=8)
    assert session.read("y").shape == (2, 8, C)


def test_a_forked_child_is_told_to_open_its_own(gpu, monkeypatch):
    session = opened()
    monkeypatch.setattr(step.os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="forked"):
        session.run("p", batch=1, seq=1)


def test_persistent_tensors_start_as_zeros_and_are_read_and_written_in_rows(gpu):
    store = Store()
    w = store.get("w", (5, 3), "bf16_i16", "parameter")
    p = Program(store)
    p.output("y", p.apply(ops.Cast, x=p.input("x", (4,), "fp32"), dtype="bf16").y)
    session = CudaSession({"p": p})
    assert not session.read("w").any()
    values = R.normal(size=(5, 3)).astype(np.float32)
    session.write("w", values)
    session.write_rows("w", 1, 2 * values[1:3])
    values[1:3] *= 2
    assert np.array_equal(session.read("w"), values) and np.array_equal(session.read_rows("w", 2, 4), values[2:4])
    start = session.plan.offsets[w]
    assert np.array_equal(session.stored(w).reshape(-1).view(np.uint8), memory_of(gpu, session)[start : start + 60])
    with pytest.raises(ValueError, match="w has shape"):
        session.write("w", values[:, :2])


# --- what a machine may lack ---


def message(found: Gpu, monkeypatch) -> str:
    found.install(monkeypatch)
    with pytest.raises(UserError) as error:
        CudaSession(programs())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_a_driver(monkeypatch):
    def nothing(*_):
        raise RuntimeError('"cuda" is an NVIDIA driver library')

    gpu = Gpu()
    gpu.cuInit = nothing
    assert "needs an NVIDIA driver" in message(gpu, monkeypatch)


def test_without_the_bindings(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"cuda-bindings, which is not installed: pip install -e '.\[cuda\]'"):
        driver.bindings()


@pytest.mark.parametrize("status, text", [(100, "sees none"), (999, "CUDA_ERROR_UNKNOWN")])
def test_a_driver_that_does_not_start(monkeypatch, status, text):
    gpu = Gpu()
    gpu.errors["cuInit"] = status
    assert text in message(gpu, monkeypatch)


def test_a_driver_that_is_too_old(monkeypatch):
    """Cards before Blackwell take one of CUDA 12.4."""
    assert "knows CUDA 12.2, barellm's kernels need 12.4 on Mock GPU: update" in message(Gpu(version=12020), monkeypatch)
    assert "knows CUDA 12.4, barellm's kernels need 12.8 on Mock" in message(Gpu(arch=100, version=12040), monkeypatch)
    Gpu(version=12040).install(monkeypatch)
    opened().close()


def test_a_gpu_that_is_too_old(monkeypatch):
    assert "Mock GPU has compute capability 7.5, barellm needs 8.0" in message(Gpu(arch=75), monkeypatch)


def test_too_little_memory_is_refused_before_any_is_taken(monkeypatch):
    gpu = Gpu(memory=(64 << 20) + 1000)
    text = message(gpu, monkeypatch)
    assert "free memory of Mock GPU" in text and "batch 3 x seq 8 needs" in text
    assert "cuMemAlloc" not in gpu.calls


def test_memory_that_the_driver_refuses(monkeypatch):
    gpu = Gpu()
    gpu.errors["cuMemAlloc"] = 2
    assert "refuses an arena" in message(gpu, monkeypatch) and "cuMemAlloc" in gpu.calls
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message(gpu, monkeypatch)
