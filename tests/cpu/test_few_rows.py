"""Products of a few rows on the CPU: against float64, at every number of rows, inside models, machine code."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from barellm.assembly.build import build_programs
from barellm.config.overrides import changed as changed_config
from barellm.cpu import jit, step
from barellm.cpu.backend import Bench
from barellm.cpu.gemm_config import SkinnyGemmConfig
from barellm.cpu.isa import ISA, cross
from barellm.cpu.kernel import KernelBuilder, Specialisation
from barellm.cpu.kernels.gemm import skinny_gemm, skinny_gemm_amx
from barellm.cpu.lang import Pointer
from barellm.cpu.lang.vector import sums_of_lanes
from barellm.cpu.step import CpuSession, Lowered
from barellm.generation.decode import MOST_TOGETHER
from barellm.models import preset
from barellm.program import ops, scalars
from barellm.program.builder import Program, Store
from barellm.program.dtypes import itemsize
from barellm.program.tensor import Dim
from barellm.runtime.arena import ScalarBlock
from barellm.runtime.lowering import decodes
from barellm.tools.inspect import machine_code
from barellm.tools.inspect.kernels import ARM_TRIPLE, X86_TRIPLE
from tests.cases import VIEWED, as_operand, chain_bound, check_network, normal, operands, viewed_case
from tests.cpu.check import ISAS, changed, check_op, isa_named
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_tiled = pytest.mark.parametrize(
    "isa", [*(isa_named(n) for n in ISAS), *EMULATED], ids=[*ISAS, *("amx emulated" for _ in EMULATED)]
)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
# (batch, seq, N, K): one, primes, one more and one less than tiles, claims, vectors and pairs of rows; 66 rows are not few.
SHAPES = [(1, 1, 1, 1), (1, 1, 65, 31), (1, 2, 23, 33), (1, 5, 50, 129), (7, 9, 47, 64), (2, 32, 49, 17), (2, 33, 9, 5)]


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Every program may have few rows."""
    monkeypatch.setattr(step, "decodes", lambda program: True)


@pytest.fixture
def emulated(monkeypatch):
    """Kernels of the emulated ISA get functions for their tile instructions."""
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)


def check_matmul(isa: ISA, dtype: str, shape: tuple[int, int, int, int]) -> None:
    x, _, weight = operands(shape, dtype)
    bounds = {"y": chain_bound(x.values, as_operand(weight, dtype).T)}
    check_op(ops.Matmul, isa, {"x": x, "weight": weight}, bounds=bounds, plan=(7, 33), threads=(1, 3))


@each_isa
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.extended
def test_matmul(isa, dtype, shape):
    check_matmul(isa, dtype, shape)


@each_tiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("shape", [(1, 1, 64, 32), (1, 16, 100, 96), (1, 17, 129, 64), (1, 33, 64, 32), (7, 9, 191, 32)], ids=str)
def test_shapes_that_tiles_take(isa, shape):
    """Columns that hang over a claim, and numbers of rows on either side of the widths that x is packed to."""
    assert skinny_gemm_amx.fits(isa, "bf16", *shape[2:]) == isa.tiles
    check_matmul(isa, "bf16", shape)


@each_isa
@each_dtype
def test_depth_in_parts(isa, dtype, monkeypatch):
    """Sums of pairs of rows are kept between the parts; the last part is shorter, and a last row has no pair."""
    changed(monkeypatch, skinny_gemm, KC_BYTES=512)
    check_matmul(isa, dtype, (1, 7, 31, 213))


@each_isa
@each_dtype
def test_columns_of_wider_tensors(isa, dtype):
    for viewed in VIEWED:
        check_op(ops.Matmul, isa, **viewed_case(ops.Matmul, viewed, dtype, "add" if viewed[1] else "store"))


@each_tiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype, cols, depth", [("fp32", 37, 101), ("bf16", 37, 101), ("bf16", 101, 64)])
def test_a_row_has_the_same_bits_in_any_company(isa, dtype, cols, depth, monkeypatch):
    """Text that is written alone is the text that is written in a batch."""
    changed(monkeypatch, skinny_gemm, KC_BYTES=768)
    found = products(isa, dtype, cols, depth, (64, 63, 17, 5, 2, 1))
    assert np.isfinite(found[0]).all()
    for some in found:
        assert np.array_equal(some, found[0][: len(some)]), len(some)


@each_tiled
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype, cols, depth", [("fp32", 37, 1024), ("bf16", 37, 101), ("bf16", 101, 64)])
def test_every_way_to_walk_a_weight_has_the_same_bits(isa, dtype, cols, depth):
    ways = skinny_gemm.skinny_configs(isa, dtype, cols, depth)
    assert len(set(ways)) == len(ways) >= 6
    found = []
    for way in ways:
        found.append(products(isa, dtype, cols, depth, (1, 33), config=way))
    for some in found:
        assert all(np.array_equal(a, b) for a, b in zip(some, found[0], strict=True))


def products(
    isa: ISA, dtype: str, cols: int, depth: int, rows: tuple[int, ...], config: SkinnyGemmConfig | None = None
) -> list[np.ndarray]:
    """The first n rows of one x times one weight, for each n of `rows`."""
    p = Program(Store(), compute=dtype)
    x = p.input("x", (Dim("batch", 64), depth), dtype)
    weight = p.parameter("weight", (cols, depth))
    p.output("y", p.linear(x, weight))
    session = CpuSession({"op": p}, isa=isa, threads=2, config=config)
    values = normal(64, depth)
    session.write("weight", normal(cols, depth, seed=3))
    found = []
    for n in rows:
        session.write("x", values[:n])
        session.run("op", batch=n)
        found.append(session.read("y").copy())
    session.close()
    return found


def test_only_decoding_may_have_few_rows(monkeypatch):
    """Not the programs that end a step, though one leaves the gradient's norm for another in a cache."""
    monkeypatch.setattr(step, "decodes", decodes)
    small = {"model.layers": 1, "model.heads": 2, "model.d_model": 16, "train.seq": 8, "model.max_seq": 8}
    config = changed_config(preset("shakespeare-char"), small | {"train.dtype": "fp32", "optim.skip_norm_z": 3.0})
    programs = build_programs(config)
    calls = {name: Lowered(p, isa_named(""), 1).calls for name, p in programs.items()}
    assert {"forward_backward", "grad_norm", "optimizer_step", "eval", "decode"} <= set(calls)
    assert {name for name, found in calls.items() if any(c.spec.name == "skinny_gemm" for c in found)} == {"decode"}
    assert {name for name, p in programs.items() if decodes(p)} == {"decode"}


@pytest.mark.parametrize("rows, writer", [(1, "skinny_gemm"), (64, "skinny_gemm"), (65, "gemm")])
def test_64_rows_are_few_and_65_are_not(rows, writer):
    """A program has both kernels, and of a run's only one does anything."""
    p = Program(Store())
    p.output("y", p.linear(p.input("x", (Dim("batch", 70), 5), "fp32"), p.parameter("weight", (3, 5))))
    session = CpuSession({"op": p}, isa=isa_named(""), threads=1)
    session.write("weight", normal(3, 5))
    session.write("x", normal(rows, 5))
    session.run("op", batch=rows)
    wrote = {}
    for call, record in zip(session.calls["op"], session.records["op"], strict=True):
        session.stored(p.named["y"])[:] = np.nan
        session.pool.run(record.ctypes.data, 1)
        wrote[call.spec.name] = bool(np.isfinite(session.read("y")).all())
    session.close()
    assert wrote == {name: name == writer for name in ("skinny_gemm", "gemm")}


@each_isa
@pytest.mark.parametrize("compute, limit", [("fp32", 2e-5), ("bf16", 2e-2)])
@pytest.mark.extended
def test_what_follows_a_product(isa, compute, limit):
    """A network of 1 to 33 rows whose products have biases, activations and residuals behind them."""
    ran = check_network(
        lambda programs: CpuSession(programs, threads=2, isa=isa), compute=compute, limit=limit, bias=True,
        sizes=(24, 40, 53),
    )  # fmt: skip
    assert {"linear", "linear_gelu", "linear_residual"} <= ran


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_the_sum_of_each_vectors_lanes(lanes):
    """By NumPy in place of shuffles, for widths that this machine does not have too."""

    class Shuffles:
        def __init__(self) -> None:
            self.lanes = lanes

        def shuffle(self, a, b, order):
            assert len(order) == lanes
            return np.concatenate([a, b])[order]

    vectors = np.arange(lanes * lanes).reshape(lanes, lanes) ** 2
    assert np.array_equal(sums_of_lanes(Shuffles(), list(vectors)), vectors.sum(1))  # pyright: ignore


@pytest.mark.parametrize("name", ["avx2", "avx512_bf16"])
def test_loads_claim_the_alignment_of_one_bf16(name):
    """A row of an odd depth begins at an odd element."""
    isa = cross(name, X86_TRIPLE)
    loads = re.findall(r"load <\d+ x i\d+>, ptr \S+ align (\d+)", spec_of("bf16", isa, depth=769).ir(isa))
    assert set(loads) == {"2"}, loads


def spec_of(dtype: str, isa: ISA, depth: int = 768, **choice: int) -> Specialisation:
    constants = {"cols": 768, "depth": depth, "dims": ("batch",), "inner": 1, "epilogues": (), "mode": "store"}
    constants |= {"config": replace(skinny_gemm.skinny_configs(isa, dtype, 768, depth)[0], **choice)}
    return Specialisation(skinny_gemm.skinny_gemm, ("fp32", None, dtype, dtype, None, None), tuple(sorted(constants.items())))


def loops_of(isa: ISA, dtype: str) -> list[machine_code.Loop]:
    code = machine_code.read(jit.assembly(spec_of(dtype, isa).ir(isa), isa))
    return [loop for loop in code.loops if loop.products]


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_loops_of_one_row_and_of_tiles_keep_their_sums_in_registers(name, dtype):
    isa = cross(name, ARM_TRIPLE if "neon" in name else X86_TRIPLE)
    loops, cut = loops_of(isa, dtype), skinny_gemm.Tiling.of(isa, dtype)
    links = 2 if dtype == "bf16" and not isa.dot else 1
    tiles = [links * rows * cut.wide for rows in {cut.rows, skinny_gemm.LOW}]
    assert sorted(loop.products for loop in loops) == sorted([links * cut.columns, *tiles])
    assert not any(loop.vector_spills for loop in loops), loops


@each_isa
@pytest.mark.parametrize("rows", [5, 8, 9, 32])
@pytest.mark.parametrize("dtype, depth", [("fp32", 1024), ("bf16", 2048), ("fp16", 2048), ("fp32", 2048)])
@pytest.mark.extended
def test_columns_a_multiple_of_a_page_apart(isa, dtype, depth, rows, monkeypatch):
    """From nine rows on they are copied, in every part of the depth."""
    assert depth * itemsize(dtype) % skinny_gemm.PAGE == 0
    changed(monkeypatch, skinny_gemm, KC_BYTES=5000)
    check_matmul(isa, dtype, (1, rows, 50, depth))


@pytest.mark.parametrize("name", ["generic", "avx2", "avx512_bf16", "neon"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("part", [512, skinny_gemm.KC_BYTES])
def test_what_waits_in_a_threads_scratch_has_its_place_there(name, dtype, part, monkeypatch):
    """Sums of a claim, sums between parts and copies lie behind each other, for every depth whose columns are copied."""
    monkeypatch.setattr(skinny_gemm, "KC_BYTES", part)
    isa = cross(name, ARM_TRIPLE if name == "neon" else X86_TRIPLE)
    for depth in range(skinny_gemm.PAGE // itemsize(dtype), 1 << 15, skinny_gemm.PAGE // itemsize(dtype)):
        choice = skinny_gemm.skinny_configs(isa, dtype, 768, depth)[0]
        k = KernelBuilder(isa)
        made = skinny_gemm.SkinnyGemm(
            k, Pointer(k, "%a", dtype), Pointer(k, "%weight", dtype), k.int(9), cols=768, depth=depth, stride=depth, config=choice
        )
        assert made.k_blocks * made.kc >= depth > (made.k_blocks - 1) * made.kc and len(made.copies) == made.tiling.wide
        assert made.pitch >= made.kc * itemsize(dtype) and made.pitch % skinny_gemm.PAGE
        kept = 4 * skinny_gemm.FEW * made.tiling.nr * k.lanes
        sums = 4 * ((skinny_gemm.FEW - 1) * made.width + made.nr + k.lanes)
        assert sums + kept + made.tiling.wide * made.pitch <= skinny_gemm.ScratchLayout(isa, depth).nbytes


@pytest.mark.parametrize("fetch, asked", [(0, set()), (1, {"3"}), (2, {"2"})])
def test_what_comes_next_is_asked_into_the_cache_of_the_choice(fetch, asked):
    spec = spec_of("fp32", cross("avx2", X86_TRIPLE), prefetch=fetch)
    ir = spec.ir(cross("avx2", X86_TRIPLE))
    assert set(re.findall(r"prefetch.p0\(ptr %\w+, i32 0, i32 (\d), i32 1\)", ir)) == asked


@each_isa
@pytest.mark.parametrize("dtype, depth, part", [("fp32", 768, 30 << 10), ("bf16", 192, 30 << 10), ("fp32", 1024, 6000)])
@pytest.mark.parametrize("rows", [1, 2, 8, 23, 64])
def test_what_comes_next_is_asked_for(isa, dtype, depth, part, rows, monkeypatch):
    """Every line of the weight behind the first block, in one part of the depth or in several. Each request leaves a mark beside
    the weight, as far from its beginning as what it asks for."""
    monkeypatch.setattr(skinny_gemm, "KC_BYTES", part)
    cols = 3 * skinny_gemm.Tiling.of(isa, dtype).nr
    nbytes = cols * depth * itemsize(dtype)
    memory = np.zeros(2 * nbytes + (1 << 20), np.uint8)  # a weight, and marks; the last block asks for what lies behind it
    behind = 64 * (nbytes // 64 + 4096)

    def mark(k, p, near):
        k.line(f"store i8 1, ptr {p.bytes(behind).ref}, align 1")

    monkeypatch.setattr(KernelBuilder, "prefetch", mark)
    if skinny_gemm.skinny_gemm_amx.fits(isa, dtype, cols, depth):
        pytest.skip("tiles fetch in another order")
    weight = (memory.ctypes.data + 63) & ~63
    x, out, scalar = np.zeros((rows, depth), np.float32), np.zeros((rows, cols), np.float32), ScalarBlock()
    thread_scratch = np.zeros(skinny_gemm.ScratchLayout(isa, depth).nbytes + 64, np.uint8)
    choice = replace(skinny_gemm.skinny_configs(isa, dtype, cols, depth)[0], prefetch=1)
    constants = {"cols": cols, "depth": depth, "dims": ("batch",), "inner": 1, "epilogues": (), "mode": "store"}
    constants |= {"config": choice}
    spec = Specialisation(skinny_gemm.skinny_gemm, ("fp32", None, dtype, dtype, None, None), tuple(sorted(constants.items())))
    scalar.ints[scalars.SCALARS["batch"].index] = rows
    monkeypatch.setattr(jit, "cached_object", lambda key, isa, ir: jit.compile_object(ir(), isa))
    with closing(Bench(1, isa)) as bench:
        bench.pool.bind(
            scalar.address, (thread_scratch.ctypes.data + 63) & ~63, thread_scratch.nbytes - 64, memory=(thread_scratch, scalar)
        )
        bench.timed(spec, [out.ctypes.data, x.ctypes.data, weight], repeats=1)
    marks = memory[weight - memory.ctypes.data + behind :][:nbytes].reshape(-1, 64).any(1).reshape(cols, -1)
    k = KernelBuilder(isa)
    a, w = (Pointer(k, name, dtype) for name in ("%a", "%weight"))
    made = skinny_gemm.SkinnyGemm(k, a, w, k.int(rows), cols=cols, depth=depth, stride=depth, config=choice)
    first = made.tiling.columns if rows == 1 else made.tiling.wide
    marks[:first, : -(-made.kc * itemsize(dtype) // 64) if rows > 1 else None] = True
    assert marks.mean() > 0.9  # where a column ends, up to a turn of the loop is left out


def test_texts_side_by_side_are_no_more_than_have_the_bits_of_one():
    assert MOST_TOGETHER == skinny_gemm.FEW
