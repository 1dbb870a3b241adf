"""Packed signs and their products on the CUDA backend: exact integers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from barellm.cuda import gemm_config
from barellm.cuda.compile import compiled, triton_compile
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise.binary import pack
from barellm.program.tensor import Dim
from barellm.tools.inspect import device_code
from tests.binary_cases import NAMES, SIZES, cases, signs
from tests.check import Case, check_case, persistent, tokens
from tests.cuda.check import InterpretedSession, check_op
from tests.simulators import gluon_block, gluon_stub, interpreter
from tests.simulators.ptx import launch
from tests.simulators.ptx.counts import Counts
from tests.simulators.ptx.machine import Run
from tests.simulators.ptx.order import Fault

POPC, TENSOR_CORES = Target(100), Target(80)  # a card whose tensor cores multiply no bits, and one whose do


@pytest.mark.parametrize("name", NAMES)
def test_signs(name):
    """Each size with another dtype."""
    for (K, N), dtype in zip(SIZES, ("fp32", "bf16", "fp32", "fp16", "bf16"), strict=True):
        op_type, given, more = cases(K, N, dtype)[name]
        check_op(op_type, given, **more)


@pytest.mark.parametrize("target", [POPC, TENSOR_CORES])
@pytest.mark.parametrize("mode", ["store", "add", "start"])
def test_products_are_added_to_what_is_there(mode, target):
    op_type, given, more = cases(33, 100, "fp32")["product"]
    check_op(op_type, given, modes={"y": mode}, scalars={"accumulate": 1}, bounds={"y": 1e-4}, target=target, **more)


# Words of a row that come 1, 2 and 4 at a time; fewer than a buffer has, as many, and so many that the ring goes round. Rows and
# columns of one tile, and beyond; the last in large tiles.
FORMS = {
    "one word": (5, 7, 20, 132),
    "two at a time": (70, 67, 32 * 6, 132),
    "four at a time": (64, 65, 32 * 132 - 5, 132),
    "one at a time": (3, 130, 32 * 101 - 31, 132),
    "large tiles": (130, 129, 32 * 71, 1),
}


def form(name: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    rows, N, K, wave = FORMS[name]
    monkeypatch.setattr(gemm_config, "WAVE", wave)
    given = {"a": tokens(pack(signs(1, rows, K)), "i32"), "b": persistent(pack(signs(N, K, seed=2)), "i32", "state")}
    return Case(ops.BinaryMatmul, given, {"columns": K, "dtype": "fp32"}, {}, {}, {}, (2, rows + 3), {})


@pytest.mark.parametrize("name", FORMS)
def test_a_form(name, monkeypatch):
    """Copies arrive as late as they may, or at once."""
    case = form(name, monkeypatch)
    ways = {"late": interpreter.execute, "early": partial(interpreter.execute, backward=True)}
    check_case(case, {n: partial(InterpretedSession, target=TENSOR_CORES, execute=e) for n, e in ways.items()})


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.extended
def test_a_form_as_it_is_compiled(name, arch, monkeypatch):
    """The instruction takes its operands from registers as the ISA's figures have them, in drawn orders of the warps. No access to
    shared memory meets a bank twice, but for copies of less than 16 bytes."""
    counts = Counts()
    ways = {
        n: partial(launch.execute, arch=arch, run=run, counts=counts)
        for n, run in list(launch.RUNS.items())[: 2 if arch == 80 else 1]
    }
    check_case(form(name, monkeypatch), {n: partial(InterpretedSession, target=Target(arch), execute=e) for n, e in ways.items()})
    twice = {text for text, n in counts.passes.items() if n > counts.needed[text]}
    assert not {text for text in twice if not text.startswith("cp.async.ca")}, twice
    assert any("ldmatrix" in text for text in counts.passes) and not (twice and FORMS[name][2] // 32 % 4 == 0)


EDITS = {
    "words are read before they have come": ("binary_mma", ("wait_group(STAGES - 2)", "wait_group(STAGES - 1)"), "late"),
    "a buffer is filled too early": ("binary_mma", ("ahead = i + STAGES - 1", "ahead = i + STAGES"), "early"),
    "copies are under way at the end": ("binary_mma", ("wait_group(0)", "wait_group(1)"), "late"),
    "a group is not closed": ("binary_mma", ("DEPTH, W, COPY)\n        ampere.async_copy.commit_group()\n        a_words",
                                             "DEPTH, W, COPY)\n        a_words"), "late"),
    "the row's edge": ("async_load", ("row < rows", "row <= rows"), "late"),
    "the last word's edge": ("async_load", ("at < W", "at <= W"), "late"),
    "the second row's words": ("async_load", ("to(gl.int64) * W", "to(gl.int64) * (W + 1)"), "late"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_fault_of_the_kernel_shows(name, monkeypatch):
    function, edit, way = EDITS[name]

    def execute(spec, values, grid):
        kernel = gluon_stub.materialised(spec.function, {function: edit}, gluon_block.STUBS)
        with interpreter.interpreting():
            gluon_block.execute(spec, values, grid, way == "early", kernel)

    with pytest.raises((AssertionError, gluon_stub.Fault)):
        check_case(form("four at a time", monkeypatch), {"": partial(InterpretedSession, target=TENSOR_CORES, execute=execute)})


FAULTS = {
    "rows of an operand": (r"(\.popc \{[^}]*\}, \{%r\d+), (%r\d+), (%r\d+), (%r\d+)\}", r"\1, \3, \2, \4}", "of 4160 wrong"),
    "words of an operand": (r"(\.popc \{[^}]*\}, \{[^}]*\}, \{)(%r\d+), (%r\d+)\}", r"\1\3, \2}", "of 4160 wrong"),
    "no wait at the end": (r"cp\.async\.wait_group\s+0;", "", "overwritten while a copy"),
    "no wait in the loop": (r"cp\.async\.wait_group\s+1;", "", "still arriving"),
    "no barrier in the loop": (r"bar\.sync\s+0;", "", "no barrier behind warp"),
    "an exchange of units": (r"(ldmatrix[^;]*\[%r\d+)(\+\d+)?\]", r"\1+16]", "of 4160 wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.extended
def test_a_fault_of_the_compiled_code_shows(name, monkeypatch):
    pattern, by, message = FAULTS[name]
    code_of = launch.code_of

    def changed(spec, arch):
        code = code_of(spec, arch)
        text, count = re.subn(pattern, by, code.cubin.decode())
        assert count
        return replace(code, cubin=text.encode())

    monkeypatch.setattr(launch, "code_of", changed)
    execute = partial(launch.execute, arch=80, run=Run(seed=1, poison=0xFF, late=True))
    with pytest.raises((AssertionError, Fault), match=message):
        check_case(form("four at a time", monkeypatch), {"": partial(InterpretedSession, target=TENSOR_CORES, execute=execute)})


def product(target: Target, rows: int, N: int, K: int) -> Specialisation:
    p = Program(Store(), compute="fp32")
    x = p.input("x", (Dim("batch", 1), Dim("seq", rows), K), "fp32")
    p.output("y", p.binary_linear(x, p.parameter("w", (N, K))))
    (spec,) = [s for s in lower_and_plan({"op": p}, target).specs if s.name in ("binary_matmul", "binary_mma")]
    return spec


@pytest.mark.parametrize("arch, name", [(80, "binary_mma"), (86, "binary_mma"), (89, "binary_mma"), (90, "binary_mma"),
                                        (100, "binary_matmul"), (120, "binary_matmul")])  # fmt: skip
def test_the_card_decides_who_counts(arch, name):
    assert product(Target(arch), 64, 64, 96).name == name


@pytest.mark.parametrize("rows, tile", [(2048, 128), (1408, 128), (1280, 64), (1, 64)])
def test_large_tiles_are_taken_where_they_fill_the_card(rows, tile):
    """1536 columns have 12 tiles of 128, and with the 11 of 1408 rows there are 132."""
    constants = dict(product(Target(90), rows, 1536, 2048).constants)
    assert constants["TILE_M"] == constants["TILE_N"] == tile


@pytest.mark.slow
@pytest.mark.parametrize("rows, N, tile", [(2048, 2048, 128), (64, 512, 64)])
@pytest.mark.extended
def test_what_ptxas_makes_of_a_product(rows, N, tile):
    """One BMMA for each instruction: four buffers' steps of 8 words, a quarter of the tile for each warp. Two blocks of large tiles
    fit on a multiprocessor of an H100."""
    spec = product(Target(90), rows, N, 2048)
    assert dict(spec.constants)["TILE_M"] == tile
    (code,) = compiled([spec], 90, processes=1).values()
    sass = device_code.disassembled(code.cubin)
    found = device_code.read(code.cubin, shared=code.shared_bytes, sass=sass)
    assert not found.spills and not found.stack
    names = Counter(re.findall(r"\s(BMMA[.\w]*|LDSM[.\w]*|POPC|LDS\.128)\s", sass))
    blocks = tile // 2 // 8  # of 8 rows, and of 8 columns, of a warp
    assert names.pop("BMMA.168256.AND.POPC") == found.counts["BMMA"] == 4 * blocks // 2 * blocks
    assert names.pop("LDSM.16.M88.4") == 4 * 2 * blocks // 2
    assert names["POPC"] == 2 * 32 * tile // 128
    assert 2 * found.registers * 128 <= 65536 and 2 * (found.shared + 1024) <= 233472


@pytest.mark.slow
def test_the_compiler_makes_one_instruction_of_the_count():
    ptx = triton_compile(product(POPC, 256, 64, 96), 90).asm["ptx"]
    assert ptx.count("popc.b32") == 64 * 64 // 128  # a thread's share of the tile, once a word
