"""The CPU's rungs: each is right on every instruction set at awkward sizes, and its inner loop is what its file says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from anatomy import __main__ as command
from anatomy import draw, measure, memory
from anatomy.measure import Problem, Timed
from anatomy.rung import RUNGS
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cpu.backend import Bench
from barellm.cpu.specialisation import KernelBuilder, Specialisation
from barellm.tools.inspect import machine_code
from tests.cpu.check import ISAS, isa_named
from tests.simulators import amx_emulator

NAMES = [r.name for r in RUNGS]
SHAPES = [(1, 1, 1), (5, 3, 2), (13, 33, 67), (25, 50, 37)]  # ones, primes, one more and one less than tiles and vectors
LINUX = "x86_64-unknown-linux-gnu"


def rung(name):
    (found,) = [r for r in RUNGS if r.name == name]
    return found


def pairs_in_fp32(k, acc, a, b):
    """`k.dot` where no instruction does it: the upper and the lower halves of 32 bits are numbers of fp32."""
    for shift in (lambda x: x << 16, lambda x: x & -65536):
        acc = k.fma(k.bitcast(shift(a), k.vec), k.bitcast(shift(b), k.vec), acc)
    return acc


def able(r, isa, monkeypatch):
    """The instruction set, or one of the same vectors on which what it lacks is emulated."""
    if r.needs(isa):
        return isa
    if r.name == "bf16 dot":
        monkeypatch.setattr(KernelBuilder, "dot", pairs_in_fp32)
        return replace(isa, dot="emulated")
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)
    wide = amx_emulator.ISA_EMULATED
    return wide if "avx512_bf16" in ISAS else replace(wide, cpu=isa.cpu, features=isa.features)


@pytest.mark.parametrize("name, isa", [(n, isa) for n in NAMES for isa in (ISAS[:1] if n == "AMX tiles" else ISAS)])
@pytest.mark.extended
def test_a_rung_is_right_at_awkward_sizes(name, isa, monkeypatch):
    """Nothing but C is written, and the bits do not depend on the number of threads."""
    r = rung(name)
    isa = able(r, isa_named(isa), monkeypatch)
    benches = [Bench(threads, isa) for threads in ((1, 3) if r.threads else (1,))]
    try:
        for shape in SHAPES:
            problem, results = Problem(*shape), []
            given = {key: x.copy() for key, x in problem.arrays.items() if key[0] != "c"}
            for bench in benches:
                Timed(r, problem, bench)
                results.append(problem.arrays["c", "fp32"].tobytes())
            assert len(set(results)) == 1
            assert all(np.array_equal(problem.arrays[key], x) for key, x in given.items())
            for x in problem.arrays.values():
                x.fill(0)
            assert not problem.room.any(), "bytes between the operands were written"
    finally:
        for bench in benches:
            bench.close()


def test_a_wrong_result_is_refused():
    problem = Problem(3, 5, 7)
    exact = problem.arrays["a", "fp32"].astype(float) @ problem.arrays["b", "fp32"].astype(float)
    c = problem.arrays["c", "fp32"]
    c[:] = exact
    assert problem.check("fp32", "exact") < 0.2
    for wrong in (c[1, 2] * 1.0001, np.nan):
        c[1, 2] = wrong
        with pytest.raises(AssertionError, match="3 x 5 x 7 is wrong by"):
            problem.check("fp32", "wrong")


# Loads and stores of a turn of the inner loop; (rows, vectors) of a tile.
SCALAR = {"naive": (2, 0), "loop order": (2, 1), "blocked": (2, 1), "vector": (2, 1)}
TILES = {"generic": (4, 2), "avx2": (6, 2), "avx512": (12, 2), "avx512_bf16": (12, 2), "neon": (12, 2), "neon_bf16": (12, 2)}
TILED = [n for n in NAMES if n not in SCALAR and n not in ("AMX tiles", "shipped", "shipped, 16 bits")]


def inner_loop(name, isa):
    """The rung's inner loop on an instruction set of another machine, and that."""
    target = isas.cross(isa, "aarch64-unknown-linux-gnu" if isa in isas.ARM and isa != "generic" else LINUX)
    return machine_code.read(jit.assembly(rung(name).specialised(96, 96, 96).ir(target), target)).inner, target


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("name", SCALAR)
def test_a_loop_of_one_multiply_add_moves_what_its_file_says(name, isa):
    inner, target = inner_loop(name, isa)
    assert (inner.loads, inner.stores) == SCALAR[name] and inner.products == 1
    lanes = target.lanes if name == "vector" else 1
    assert rung(name).step(target) == (2 * lanes, 4 * lanes * sum(SCALAR[name]))


@pytest.mark.parametrize("name, isa", [(n, isa) for n in TILED for isa in TILES if n != "bf16 dot" or isa.endswith("bf16")])
def test_a_tile_stays_in_registers_and_loads_what_its_file_says(name, isa):
    """On aarch64 two numbers may come in one load. A pointer that found no register may be loaded, a vector not."""
    inner, target = inner_loop(name, isa)
    rows, vectors = TILES[isa]
    assert (inner.accumulators, inner.products) == (rows * vectors, rows * vectors)
    assert (inner.stores, inner.vector_spills) == (0, 0)
    assert inner.loads - inner.stack_references == rows + vectors or isa.startswith("neon")
    each = 4 if name == "bf16 dot" else 2
    assert rung(name).step(target) == (each * rows * vectors * target.lanes, 4 * (rows + vectors * target.lanes))


def test_amx_multiplies_four_tiles_with_four_loads():
    isa = isas.cross("amx_bf16", LINUX)
    inner = machine_code.read(jit.assembly(rung("AMX tiles").specialised(96, 96, 96).ir(isa), isa)).inner
    assert (inner.multiply_adds, inner.loads, inner.stores) == ({"tdpbf16ps": 4}, 4, 0)
    assert rung("AMX tiles").step(isa) == (4 * 2 * 16 * 16 * 32, 4 * 16 * 64)


@pytest.mark.parametrize("isa, instruction, at_once", [
    ("avx2", "vfmadd231ps", 12), ("avx512_bf16", "vdpbf16ps", 24), ("amx_bf16", "tdpbf16ps", 4)
])  # fmt: skip
def test_the_shipped_kernel_takes_what_the_processor_has_for_16_bits(isa, instruction, at_once):
    inner, target = inner_loop("shipped, 16 bits", isa)
    assert inner.multiply_adds == {instruction: at_once}
    operations = {"vfmadd231ps": 2 * 8, "vdpbf16ps": 4 * 16, "tdpbf16ps": 2 * 16 * 16 * 32}[instruction]
    assert rung("shipped, 16 bits").step(target)[0] == at_once * operations


def test_rungs_that_a_machine_cannot_run_are_compiled_for_one_that_can():
    for r in RUNGS:
        assert r.needs(measure.compiled_for(r))
        assert r.needs(isas.X86["avx2"]) == (r.name not in ("bf16 dot", "AMX tiles"))


def test_the_ring_leads_through_all_lines():
    ring = memory.ring_of(37)
    at, seen = 0, set()
    while at not in seen:
        seen.add(at)
        at = int(ring.reshape(-1)[at])
    assert at == 0 and seen == {8 * line for line in range(37)}


def test_a_level_is_measured_where_no_other_cache_holds_the_buffer():
    rows = [{"bytes": 1 << n} for n in range(12, 28)]
    found = memory.levels(rows, {1: 32 << 10, 2: 512 << 10, 3: 32 << 20})
    assert {name: row["bytes"] >> 10 for name, row in found.items()} == {"L1": 16, "L2": 128, "L3": 2048, "memory": 1 << 17}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.extended
def test_the_command_measures_prints_and_draws(threads, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BARELLM_THREADS", str(threads))
    monkeypatch.setattr(memory, "sizes", lambda: [4096, 8192, 16384])
    monkeypatch.setattr(measure, "SAMPLE", 1e-4)
    assert command.main(["--size", "24", "--rounds", "2", "--rungs", "1,5,8-9", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["1", "5", "8", "9"] and "6 loads" not in lines[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["anatomy.json", "memory.svg", "staircase.svg"]
    found = command.json.loads((tmp_path / "anatomy.json").read_text())
    fifth = found["rungs"][1]
    median = sorted(fifth["seconds"])
    assert fifth["flops"] == pytest.approx(2 * 24**3 / (sum(median) / 2))
    (peaks,) = [p["flops"] for p in found["peaks"] if p["threads"] == 1 and p["dtype"] == "fp32"]
    assert fifth["percent"] == pytest.approx(100 * fifth["flops"] / (sum(peaks) / 2))
    assert all(row["latency_ns"] > 0 and row["bytes_per_s"] > 0 for row in found["memory"])
    draw.staircase(found, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "staircase.svg").read_bytes()


@pytest.mark.parametrize("words, line", [
    (["--rungs", "3-1"], "--rungs '3-1' has '3-1', expected numbers from 1 to 12 such as 1,4-6"),
    (["--rungs", "13"], "--rungs '13' has '13', expected numbers from 1 to 12 such as 1,4-6"),
    (["--size", "0"], "--size is 0, expected 1 or more"),
])  # fmt: skip
def test_mistakes_are_answered_in_a_line(words, line, capsys, tmp_path):
    assert command.main([*words, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"anatomy: error: {line}\n"
