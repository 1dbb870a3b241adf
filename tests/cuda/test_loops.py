"""What docs/cuda.md says of the loops of Hopper's kernels: barriers, what is waited for, registers, blocks of a multiprocessor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from barellm.cuda import tuning
from barellm.cuda.compile import Code, compiled
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.step import lower_and_plan
from barellm.cuda.tuner.candidates import specs_of
from barellm.runtime.tuner.problem import Candidate
from tests.cuda.sass import INSTRUCTION, disassembled, overwritten
from tests.cuda.test_golden import GPT2, attention_specs, build

pytestmark = pytest.mark.slow

REGISTERS, SHARED = 65536, 228 << 10  # of a multiprocessor; a block takes 1 KiB of shared memory besides its own


Instructions = list[tuple[int, str, str]]  # (address, name, operands)


def spans(code: Instructions, *, innermost: bool = True) -> list[tuple[int, int]]:
    """The first and last address of each loop, or of each innermost one."""
    backward = {
        (int(to[1], 16), at)
        for at, op, args in code
        if op == "BRA" and (to := re.search(r"0x([0-9a-f]+)", args)) and int(to[1], 16) < at
    }
    return [
        (first, last)
        for first, last in backward
        if not innermost or not any(first <= a and b <= last and (a, b) != (first, last) for a, b in backward)
    ]


def within(code: Instructions, span: tuple[int, int]) -> list[tuple[str, str]]:
    return [(op, args) for at, op, args in code if span[0] <= at <= span[1]]


def loops(sass: str) -> Iterator[list[tuple[str, str]]]:
    """The instructions and operands of each innermost loop."""
    code = [(int(m[1], 16), m[2], m[3]) for m in map(INSTRUCTION.match, sass.splitlines()) if m]
    for span in spans(code):
        yield within(code, span)


def epilogues(sass: str) -> list[tuple[int, int]]:
    """Of each half of a product on Hopper: the instructions between the end of the loop of products and the end of the loop over
    tiles around it, and how many of them are MUFU."""
    code = [(int(m[1], 16), m[2], m[3]) for m in map(INSTRUCTION.match, sass.splitlines()) if m]
    found = []
    for inner in (loop for loop in spans(code) if any(op.startswith("HGMMA") for op, _ in within(code, loop))):
        around = [loop for loop in spans(code, innermost=False) if loop[0] <= inner[0] and inner[1] < loop[1]]
        last = min(loop[1] for loop in around)
        after = [op for at, op, _ in code if inner[1] < at <= last]
        found.append((len(after), sum(op.startswith("MUFU") for op in after)))
    return found


def blocks(code: Code) -> int:
    """How many share a multiprocessor."""
    registers = -(-code.registers // 8) * 8 * code.threads
    return min(REGISTERS // registers, SHARED // (code.shared_bytes + 1024))


@pytest.fixture(scope="module")
def step() -> dict[str, tuple[Code, str]]:
    """Code and SASS of kernels of gpt2-124m's step at 64 x 1024, attention by Triton's."""
    _, programs = build(GPT2, batch=64, seq=1024, compute="bf16", optimizer=lambda p: None)
    names = ("row_losses", "attention_forward", "attention_dkv", "attention_dq")
    specs = [
        s
        for s in lower_and_plan({"forward_backward": programs["forward_backward"]}, Target(plain_attention=True)).specs
        if s.name in names
    ]
    codes = compiled(specs, 90, processes=1).values()
    texts = disassembled([*codes], 90)
    return {code.name: (code, text) for code, text in zip(codes, texts, strict=True)}


@pytest.mark.parametrize("D, most", [(64, 425), (128, 465)])
@pytest.mark.extended
def test_the_exponentials_of_warps_with_roles_lie_between_the_waits(D, most):
    """Scores are waited for while the sums are under way, the sums behind all exponentials; at most so many instructions for the 64
    scores of a thread."""
    found = attention_specs(D, "bf16", 90)
    (spec,) = [spec for spec in found if spec.name == "hopper_attention"]
    codes = compiled([spec], 90, processes=1).values()
    (sass,) = disassembled([*codes], 90)
    found = [loop for loop in loops(sass) if any(op.startswith("HGMMA") for op, _ in loop)]
    assert len(found) == 2 and not overwritten(sass)  # a loop for each half
    assert overwritten(re.sub(r"(\n.*HGMMA.* R\d+, R(\d+), gdesc.*)", r"\1\n /*0000*/ MOV R\2, RZ ;", sass, count=1))
    for loop in found:
        assert len(loop) <= most
        order = "".join(WAITED[args] if op == "WARPGROUP.DEPBAR.LE" else "e" for op, args in loop if op in ORDERED)
        assert re.fullmatch("se{66}a", order), order


ORDERED, WAITED = ("MUFU.EX2", "WARPGROUP.DEPBAR.LE"), {"gsb0, 0x1": "s", "gsb0, 0x0": "a"}


@pytest.mark.parametrize("name, left", [("attention_forward", 2), ("attention_dkv", 3), ("attention_dq", 2)])
@pytest.mark.extended
def test_loads_of_the_next_turn_are_on_their_way_and_two_blocks_share_a_multiprocessor(step, name, left):
    code, sass = step[name]
    products = [loop for loop in loops(sass) if any(op.startswith("HGMMA") for op, _ in loop)]
    assert products and blocks(code) == 2
    for loop in products:
        waits = [args for op, args in loop if op == "DEPBAR.LE"]
        assert waits == [f"SB0, {left:#x}"]


@pytest.mark.extended
def test_threads_of_a_row_meet_in_no_loop(step):
    code, sass = step["row_losses"]
    found = [loop for loop in loops(sass) if any(op.startswith("MUFU") for op, _ in loop)]
    assert len(found) == 2 and blocks(code) == 2  # the sums, then the gradient
    assert not [op for loop in found for op, _ in loop if op.startswith(("BAR", "SHFL"))]


PAGE = Path(__file__).parents[2] / "docs" / "cuda_gemm.md"
# The names that docs/cuda_gemm.md has for epilogues, in its code and in its table: (role, epilogue of a product, bias)
EPILOGUES = {
    "none": ("none", ("nn", "", False)),
    "bias": ("bias", ("nt", "", True)),
    "gelu": ("bias, GELU (writes two matrices)", ("nt", "gelu", True)),
    "gelu_backward": ("times GELU's slope (reads a matrix)", ("nn", "gelu_backward", False)),
    "residual": ("bias, residual (reads a matrix)", ("nt", "residual", True)),
    "dweight": ("none, weight gradients", ("tn", "", False)),
}


def products_of(step: dict[Specialisation, str]) -> dict[tuple[str, str, bool], Specialisation]:
    """Hopper's products by (role, epilogue, bias): those of a step, and one with a residual, which no step of GPT-2 has."""
    work = tuning.GemmProblem("nt", "bf16", 32768, 768, 768, "hopper", "residual")
    made = [*step, *specs_of(work, [Candidate(work.default(90))], Target())]
    found = {}
    for spec in (spec for spec in made if spec.name == "hopper_gemm"):
        c = dict(spec.constants)
        role = "tn" if c["A_TRANSPOSED"] else "nt" if c["B_TRANSPOSED"] else "nn"
        if "sums" in c:  # of weight gradients the form without the bias's
            found[role, c["EPILOGUE"], "bias" in dict(spec.signature)] = spec
    return found


@pytest.mark.extended
def test_epilogues_have_as_many_instructions_as_the_arithmetic_says():
    """In the table and in the code of docs/cuda_gemm.md."""
    _, programs = build(GPT2, batch=64, seq=1024, compute="bf16", optimizer=lambda p: None)
    specs = products_of(lower_and_plan({"forward_backward": programs["forward_backward"]}, Target()).specs)
    text = PAGE.read_text()
    for name, (title, key) in EPILOGUES.items():
        assert dict(specs[key].constants)["TILE_N"] == 256
        (code,) = compiled([specs[key]], 90, processes=1).values()
        halves = epilogues(*disassembled([code], 90))
        assert len(halves) == 2
        instructions, mufu = max(halves)
        assert re.search(rf'"{name}": \({instructions}, {mufu}, \d, \d\)', text), (name, halves)
        assert re.search(rf"\| {re.escape(title)} \| \w+ \| {instructions} \| {mufu or ''} ?\|", text), (name, halves)


@pytest.mark.extended
def test_warpgroups_that_multiply_have_as_many_registers_as_the_page_says():
    """Before and after the warps with roles part: ptxas says how many a thread begins with, USETMAXREG what each has then."""
    _, programs = build(GPT2, batch=64, seq=1024, compute="bf16", optimizer=lambda p: None)
    spec = products_of(lower_and_plan({"forward_backward": programs["forward_backward"]}, Target()).specs)["nt", "gelu", True]
    (code,) = compiled([spec], 90, processes=1).values()
    (sass,) = disassembled([code], 90)
    counts = {int(n, 0) for n in re.findall(r"USETMAXREG\S*\s+(0x\w+)", sass)}
    (told,) = re.findall(r"takes 128 of the (\d+) registers", PAGE.read_text())
    assert max(counts) == int(told)
