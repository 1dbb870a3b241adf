"""What docs/cuda.md says of the loops of Hopper's kernels: barriers, what is waited for, registers, blocks of a multiprocessor."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from barellm.cuda import choices, tuning
from barellm.cuda.compile import Code, compiled
from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from tests.cuda.sass import INSTRUCTION, disassembled, overwritten
from tests.cuda.test_golden import GPT2, attention_specs, build

pytestmark = [pytest.mark.slow, pytest.mark.proof("barellm/cuda", "barellm/program/ops", "tests/cuda")]

REGISTERS, SHARED = 65536, 228 << 10  # of a multiprocessor; a block takes 1 KiB of shared memory besides its own


def loops(sass: str) -> Iterator[list[tuple[str, str]]]:
    """The instructions and operands of each innermost loop."""
    code = [(int(m[1], 16), m[2], m[3]) for m in map(INSTRUCTION.match, sass.splitlines()) if m]
    backward = [
        (int(to[1], 16), at)
        for at, op, args in code
        if op == "BRA" and (to := re.search(r"0x([0-9a-f]+)", args)) and int(to[1], 16) < at
    ]
    for first, last in set(backward):
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in backward):
            yield [(op, args) for at, op, args in code if first <= at <= last]


def blocks(code: Code) -> int:
    """How many share a multiprocessor."""
    registers = -(-code.registers // 8) * 8 * code.threads
    return min(REGISTERS // registers, SHARED // (code.shared_bytes + 1024))


@pytest.fixture(scope="module")
def step() -> dict[str, tuple[Code, str]]:
    """Code and SASS of kernels of gpt2-124m's step at 64 x 1024."""
    _, programs = build(GPT2, batch=64, seq=1024, compute="bf16", optimizer=lambda p: None)
    names = ("row_losses", "attention_forward", "attention_dkv", "attention_dq")
    specs = [s for s in lower_and_plan({"micro": programs["micro"]}, Target()).specs if s.name in names]
    codes = compiled(specs, 90, processes=1).values()
    texts = disassembled([*codes], 90)
    return {code.name: (code, text) for code, text in zip(codes, texts, strict=True)}


@pytest.mark.parametrize("D, most", [(64, 425), (128, 465)])
def test_the_exponentials_of_warps_with_roles_lie_between_the_waits(D, most):
    """Scores are waited for while the sums are under way, the sums behind all exponentials; at most so many instructions for the 64
    scores of a thread."""
    subject = tuning.AttentionSubject("forward", "bf16", 2, 64, 1, D)
    with tuning.forced(subject, choices.ROLES[D]):
        (spec,) = [s for s in attention_specs(D, "bf16", 90) if s.name == "hopper_attention"]
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
def test_loads_of_the_next_turn_are_on_their_way_and_two_blocks_share_a_multiprocessor(step, name, left):
    code, sass = step[name]
    products = [loop for loop in loops(sass) if any(op.startswith("HGMMA") for op, _ in loop)]
    assert products and blocks(code) == 2
    for loop in products:
        waits = [args for op, args in loop if op == "DEPBAR.LE"]
        assert waits == [f"SB0, {left:#x}"]


def test_threads_of_a_row_meet_in_no_loop(step):
    code, sass = step["row_losses"]
    found = [loop for loop in loops(sass) if any(op.startswith("MUFU") for op, _ in loop)]
    assert len(found) == 2 and blocks(code) == 2  # the sums, then the gradient
    assert not [op for loop in found for op, _ in loop if op.startswith(("BAR", "SHFL"))]
