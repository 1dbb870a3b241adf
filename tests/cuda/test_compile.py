"""Cubins and what is kept beside them: the parameters that ptxas sees, a cache that survives other processes and folders."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from barellm.cuda import compile as cuda_compile
from barellm.cuda import driver
from barellm.cuda.compile import Code, compiled
from barellm.cuda.kernel import Lowering, Sizes, Specialisation, Target, TensorMap
from barellm.cuda.lang import device, tl
from barellm.cuda.launch import BoundLaunch, Kernel
from barellm.errors import UserError
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part
from tests.cuda import cubin
from tests.cuda.specs import SCALED
from tests.simulators.mock import Gpu


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@device
def moved(y, x, first, out):
    """Through tensor maps: y gets the box of x at row `first`, and out its first element."""
    box = x.load([first, 64])
    y.store([0, 0], box)
    tl.store(out + first, tl.sum(tl.sum(box.to(tl.float32), 1), 0))


def maps() -> tuple[Lowering, dict[str, Tensor]]:
    t = {n: Tensor(n, s, d, "input") for n, s, d in [("x", (40, 256), "bf16"), ("y", (16, 64), "bf16"), ("o", (40,), "fp32")]}
    c = Lowering(Op(dict(t), {}), Target(90))
    x = TensorMap(part(t["x"]), "bf16", lambda s: s.seq, 192, (16, 64), 256)
    y = TensorMap(part(t["y"]), "bf16", 16, 64, (16, 64), 64)
    c.launch(moved, {"y": y, "x": x, "first": 8, "out": t["o"]}, grid=lambda s: (1,), writes="y out")
    return c, t


def test_parameters_lie_as_ptxas_lays_them_out(cache):
    specs = [SCALED, maps()[0].launches[0].spec]
    for spec, code in compiled(specs, 90, processes=1).items():
        cubin.hold(spec, code)
        assert code.cubin[:4] == b"\x7fELF" and code.threads == 128


def test_code_that_differs_from_its_cubin_is_noticed(cache):
    """An offset, a size, an order, a box that the launcher would have wrong."""
    spec = maps()[0].launches[0].spec
    ((_, code),) = compiled([spec], 90, processes=1).items()
    params, (first, *others) = list(code.params), code.descriptors
    wrong = [
        replace(code, params=(*params[:1], (8, 8), *params[2:])),
        replace(code, params=(*params[:-1], (16, 8))),
        replace(code, params=tuple(params[:-1])),
        replace(code, arguments=code.arguments[::-1]),
        replace(code, descriptors=(replace(first, box=(8, 64)), *others)),
        replace(code, threads=96),
    ]
    for each in wrong:
        with pytest.raises(AssertionError):
            cubin.hold(spec, each)


def test_a_launch_packs_what_tritons_own_launcher_packs(cache, monkeypatch):
    """Triton builds the source of its launcher from the signature: the types and the order of the parameters stand there."""
    from triton.backends.nvidia.driver import make_launcher

    c, tensors = maps()
    (launch,) = c.launches
    kernel = cuda_compile.triton_compile(launch.spec, 90)
    named = dict(launch.spec.signature)
    signature = {n: named[n].replace("tensormap", "tensordesc") for n in launch.spec.function.parameters}
    source = make_launcher({}, signature, [dict(d) for d in kernel.metadata.tensordesc_meta])
    head = source[source.index("static void _launch(") : source.index("void *params[]")]
    types = {name: kind for kind, name in re.findall(r"(\w+) (arg\d+)[,)]", head)}
    order = re.findall(r"&(\w+)", re.search(r"void \*params\[\] = \{ (.*) \};", source)[1])
    sizes = {"CUdeviceptr": 8, "CUtensorMap": 128, "int32_t": 4, "int64_t": 8}
    want = [8 if name.endswith("scratch") else sizes[types[name]] for name in order]

    code = cuda_compile.code_of(launch.spec, kernel, 90)
    assert [nbytes for nbytes, _ in code.params] == want
    gpu = Gpu(arch=90)
    gpu.install(monkeypatch)
    gpu.know(launch.spec, code)
    at = {t: 4096 * (i + 1) for i, t in enumerate(tensors.values())}
    driver.Context(driver.device())
    bound = BoundLaunch(launch, Kernel(code, driver.device()), Sizes(1, 37), lambda region: at[region.tensor], 64)
    values = [ctypes.string_at(p, n) for p, n in zip(bound.pointers, want, strict=True)]
    y, x = values[0], values[5]
    assert y != x and len(y) == len(x) == 128
    numbers = [int.from_bytes(v, "little") for v in values]
    assert numbers[1:5] == [16, 64, 64, 1] and numbers[6:10] == [37, 192, 256, 1]
    assert numbers[10:] == [8, at[tensors["o"]], 0, 0]


def test_the_mock_runs_compiled_code_with_tensor_maps(cache, monkeypatch):
    """The same launch, done: what the GPU would read from the block of parameters is what the interpreter gets."""
    c, tensors = maps()
    (launch,) = c.launches
    gpu = Gpu(arch=90)
    gpu.install(monkeypatch)
    ((_, code),) = compiled([launch.spec], 90, processes=1).items()
    gpu.know(launch.spec, code)
    gpu.memory = 1 << 20
    found = driver.device()
    context = driver.Context(found)
    memory = {t: driver.DeviceMemory(t.nbytes + 64) for t in tensors.values()}

    def address(region):
        return -(-memory[region.tensor].address // 64) * 64

    x = np.arange(40 * 256, dtype=np.float32).reshape(40, 256) % 251
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    skip = {t: address(part(t)) - memory[t].address for t in memory}
    memory[tensors["x"]].write(skip[tensors["x"]], bits, context.stream)
    BoundLaunch(launch, Kernel(code, found), Sizes(1, 20), address, memory[tensors["o"]].address).run(context.stream)
    y = tensors["y"]
    got = memory[y].read(skip[y], skip[y] + y.nbytes, context.stream).view(np.uint16).reshape(16, 64)
    want = np.zeros((16, 64), np.uint16)
    want[:12] = bits[8:20, 64:128]  # x has 20 rows in this run
    assert np.array_equal(got, want)


# --- the cache ---


def no_compiler(monkeypatch) -> None:
    monkeypatch.setattr(cuda_compile, "compile_all", lambda *_, **__: pytest.fail("compiled again"))


def test_what_is_kept_is_found_again_also_in_another_folder(cache, tmp_path, monkeypatch):
    first = compiled([SCALED], 90, processes=1)
    no_compiler(monkeypatch)
    assert compiled([SCALED], 90, processes=1) == first
    shutil.move(cache, tmp_path / "elsewhere")
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "elsewhere"))
    assert compiled([SCALED], 90, processes=1) == first
    assert Code.unpacked(first[SCALED].packed()) == first[SCALED]


def test_a_torn_file_is_compiled_again_to_the_same_bytes(cache):
    first = compiled([SCALED], 90, processes=1)
    (path,) = (cache / "cubins").glob("*.cubin")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert compiled([SCALED], 90, processes=1) == first and path.read_bytes() == whole


def test_the_key_has_everything_that_decides_the_code(monkeypatch):
    def keys() -> list[Path]:
        warps = Specialisation(
            SCALED.function, SCALED.signature, SCALED.constants, (("num_stages", 3), ("num_warps", 8)), SCALED.aligned
        )
        loose = Specialisation(SCALED.function, SCALED.signature, SCALED.constants, SCALED.options, ())
        block = Specialisation(SCALED.function, SCALED.signature, (("BLOCK", 512), ("FACTOR", 2)), SCALED.options, SCALED.aligned)
        return [cuda_compile._path(SCALED, 80), *(cuda_compile._path(s, 90) for s in (SCALED, warps, loose, block))]

    before = keys()
    assert len(set(before)) == len(before)
    for arch, name in ((90, "TRITON_PTXAS_PATH"), (100, "TRITON_PTXAS_BLACKWELL_PATH")):
        known = {at: cuda_compile._path(SCALED, at) for at in (90, 100)}
        with monkeypatch.context() as patch:
            patch.setenv(name, "/opt/ptxas")
            assert [at for at in known if cuda_compile._path(SCALED, at) != known[at]] == [arch]
    monkeypatch.setattr(cuda_compile, "_digest", lambda module: b"edited")
    assert not set(before) & set(keys())
    monkeypatch.setattr(cuda_compile, "TRITON", "3.7.0")
    assert not set(before) & set(keys())


def test_a_constant_from_another_module_is_part_of_the_key(monkeypatch):
    from barellm.cuda.kernels import common
    from barellm.cuda.lang import constant

    before = cuda_compile._digest.__wrapped__("barellm.cuda.kernels.common")
    monkeypatch.setattr(common, "STEP", constant(77))
    assert cuda_compile._digest.__wrapped__("barellm.cuda.kernels.common") != before


LOAD = """
import sys
from tests.cuda.specs import SCALED
from barellm.cuda.compile import compiled
(code,) = compiled([SCALED], 90, processes=1).values()
print(len(code.cubin), sorted({m.split(".")[0] for m in sys.modules} & {"triton", "torch", "cuda", "llvmlite"}))
"""


def in_process(code: str, **env: str) -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | env | {"PYTHONPATH": root}
    )


def test_processes_may_compile_the_same_at_once_and_loading_needs_no_compiler(cache):
    first = [in_process(LOAD) for _ in range(2)]
    sizes = {p.communicate(timeout=120)[0].split()[0] for p in first}
    assert len(sizes) == 1 and len(list((cache / "cubins").glob("*"))) == 2  # the code, and the mark of pruning
    out = in_process(LOAD).communicate(timeout=60)[0]
    assert out == f"{sizes.pop()} []\n"


def test_helpers_compile_the_same_bytes(cache):
    blocks = [
        Specialisation(SCALED.function, SCALED.signature, (("BLOCK", n), ("FACTOR", 2)), SCALED.options, SCALED.aligned)
        for n in (64, 128, 256, 512)
    ]
    apart = compiled(blocks, 90, processes=3)
    shutil.rmtree(cache)
    assert compiled(blocks, 90, processes=1) == apart
    job = json.loads(cuda_compile._job(SCALED, 90))
    assert job[:2] == ["tests.cuda.specs", "scaled"]


@pytest.mark.parametrize("found, text", [(None, "needs triton 3.6.0: pip install"), ("3.7.1", "triton 3.7.1 is installed")])
def test_another_compiler_or_none_is_refused_where_one_is_needed(cache, monkeypatch, found, text):
    def version(name: str) -> str:
        if found is None:
            raise cuda_compile.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(cuda_compile, "version", version)
    with pytest.raises(UserError, match=text):
        compiled([SCALED], 90, processes=1)


def test_what_cp_async_brings_is_fenced_for_wgmma():
    """In every other kernel the text stays as it is."""
    loop = "cp.async.wait_group \t0;\n\tbar.sync \t0;\n\t"
    assert cuda_compile.with_proxy_fences(loop + "mma.sync.aligned") == loop + "mma.sync.aligned"
    fenced = cuda_compile.with_proxy_fences(loop + "wgmma.mma_async.sync.aligned")
    assert fenced.index("wait_group") < fenced.index("fence.proxy.async.shared::cta;") < fenced.index("bar.sync")


def test_two_groups_of_products_do_not_outlast_a_turn_of_a_loop():
    """Which ptxas would serialize all products for; one group may."""
    commit, wait = "\twgmma.commit_group.sync.aligned;", "\twgmma.wait_group.sync.aligned 0;"
    branch = "\t@%p43 bra \t$L__BB0_3;"

    def loop(*lines: str) -> str:
        return "\n".join(["\tbra.uni \t$L__BB0_3;", "$L__BB0_3:  // a loop", *lines, branch, "\tret;"])

    for unchanged in (loop(commit), loop(commit, wait, commit), loop(commit, commit, wait)):
        assert cuda_compile.with_wgmma_waits(unchanged) == unchanged
    assert cuda_compile.with_wgmma_waits(loop(wait, commit, commit)) == loop(wait, commit, commit, wait)
