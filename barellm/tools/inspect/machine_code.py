"""The machine code of a CPU kernel: the loops of its assembly, and in them multiply-adds, loads, stores and stack references.

It is read from what LLVM prints for x86-64 (AT&T) and aarch64. A stack reference in an inner loop is a spill: kernels keep
everything there in registers, and reach buffers on the stack through a register of their own."""

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

LABEL = re.compile(r"^(\.?L[\w$.]+):")
INSTRUCTION = re.compile(r"^\s+([a-z][\w.]*)(?:\s+(.*))?$")
MULTIPLY_ADD = re.compile(r"^(vdpbf16ps|tdpbf16ps|vpdpbusd|vfn?madd\w+|vfn?msub\w+|v?mulp[sd]|fml[as]|bfdot|bfmmla|bfmlal[bt])$")
TILES = "tdpbf16ps"
X86_JUMP = re.compile(r"^j[a-z]+$")
ARM_JUMP = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)$")
MEMORY = {"x86": re.compile(r"\("), "arm": re.compile(r"\[")}
ACCUMULATE = re.compile(r"^(vdpbf16ps|tdpbf16ps|vpdpbusd|vfn?madd231\w+|v?addp[sd]|fml[as]|fadd|bfdot|bfmmla|bfmlal[bt])$")
VECTOR = re.compile(r"%(tmm\d+)|%[xyz]mm(\d+)|\b[vq](\d+)\b")
WIDTHS = {"zmm": 64, "ymm": 32, "xmm": 16, "v": 16}  # bytes; aarch64's q3 is v3


@dataclass(frozen=True)
class Instruction:
    mnemonic: str
    operands: str


@dataclass(frozen=True)
class Loop:
    """An innermost loop, or one of tile multiplications around packing loops, which are not counted. Counts are per iteration."""

    label: str
    instructions: int
    accumulators: int  # vectors to which the loop only adds, in registers, or on the stack for want of them
    multiply_adds: dict[str, int]
    loads: int
    stores: int
    stack_references: int
    vector_spills: int  # of the stack references those that move or compute with a vector
    widest: str

    @property
    def products(self) -> int:
        return sum(self.multiply_adds.values())


@dataclass(frozen=True)
class Code:
    """A function. `loops` in the order of the code; `inner` is the one with the most accumulators, then multiply-adds; among
    equals the shortest that reads memory: the one that whole tiles take, and not the one that clears them."""

    instructions: int
    stack_references: int
    widest: str
    loops: list[Loop]

    @property
    def inner(self) -> Loop | None:
        return max(self.loops, key=lambda x: (x.accumulators, x.products, x.loads > 0, -x.instructions), default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"inner": asdict(self.inner) if self.inner else None}


def read(assembly: str) -> Code:
    """Analyse a kernel's assembly, which has one function: its innermost loops, and those outer ones that have tile multiplies."""
    code, labels = _parse(assembly)
    kind = "x86" if any("%" in i.operands for i in code) else "arm"
    stack = _stack_registers(code, kind)
    names = {at: name for name, at in labels.items()}
    loops = natural_loops(code, labels)
    found = []
    for header, body in sorted(loops.items()):
        nested = set().union(*(loops[other] for other in loops if other != header and other in body))
        body_code = [code[i] for i in sorted(body - nested)]
        if not nested or any(i.mnemonic == TILES for i in body_code):
            found.append(_loop(names[header], body_code, kind, stack))
    return Code(len(code), _references(code, stack), _widest(code), found)


def _parse(assembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the index of the instruction that follows each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if match := LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := INSTRUCTION.match(re.sub(r"(##?|//|;)\s.*$", "", line)):
            code.append(Instruction(match[1], (match[2] or "").strip()))
    return code, labels


def natural_loops(code: list[Instruction], labels: dict[str, int]) -> dict[int, set[int]]:
    """Natural loops as {header instruction: all its instructions}: a back edge's target and all blocks that reach the edge without
    passing the header. Basic blocks may be in any order."""
    jumps = {index: target for index, i in enumerate(code) if (target := _jump(i, labels)) is not None}
    starts = sorted({0, *labels.values(), *(index + 1 for index, i in enumerate(code) if index in jumps or _ends(i))} - {len(code)})
    after: dict[int, list[int]] = {}
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        last = stop - 1
        after[start] = [jumps[last]] if last in jumps else []
        if not _ends(code[last]) and stop < len(code):
            after[start].append(stop)
    before: dict[int, list[int]] = {start: [] for start in starts}
    for start, targets in after.items():
        for target in targets:
            before[target].append(start)
    dominators = _dominators(starts, before)
    stops = dict(zip(starts, [*starts[1:], len(code)], strict=True))
    loops: dict[int, set[int]] = {}
    for start in starts:
        for header in after[start]:
            if header not in dominators[start]:
                continue
            body, worklist = {header}, [start]
            while worklist:
                block = worklist.pop()
                if block not in body:
                    body.add(block)
                    worklist += before[block]
            loops.setdefault(header, set()).update(i for block in body for i in range(block, stops[block]))
    return loops


def _dominators(starts: list[int], before: dict[int, list[int]]) -> dict[int, set[int]]:
    """Dominators of each basic block, itself included; empty for unreachable blocks."""
    everything = set(starts)
    found = {start: everything for start in starts} | {starts[0]: {starts[0]}}
    changed = True
    while changed:
        changed = False
        for start in starts[1:]:
            incoming = [found[b] for b in before[start]]
            updated = {start} | set.intersection(*incoming) if incoming else set()
            if updated != found[start]:
                found[start], changed = updated, True
    return found


def _jump(i: Instruction, labels: dict[str, int]) -> int | None:
    if X86_JUMP.match(i.mnemonic) or ARM_JUMP.match(i.mnemonic):
        return labels.get(i.operands.rpartition(",")[2].strip())
    return None


def _ends(i: Instruction) -> bool:
    """Whether the next instruction is never reached from this one."""
    return i.mnemonic in ("jmp", "jmpq", "b", "br", "ret", "retq", "ud2", "brk")


def _stack_registers(code: list[Instruction], kind: str) -> re.Pattern[str]:
    """Memory operands on the stack: the stack pointer, and the frame or base pointer where the prologue sets one."""
    if kind == "arm":
        frame = any(i.mnemonic in ("mov", "add") and i.operands.startswith("x29, sp") for i in code)
        return re.compile(r"\[(sp|x29)\b" if frame else r"\[sp\b")
    frame = {m[1] for i in code if i.mnemonic == "movq" and (m := re.match(r"%rsp, %(rbp|rbx)$", i.operands))}
    return re.compile(rf"\(%({'|'.join(['rsp', *sorted(frame)])})\b")


def _references(code: list[Instruction], stack: re.Pattern[str]) -> int:
    return sum(bool(stack.search(i.operands)) for i in code)


def _widest(code: list[Instruction]) -> str:
    text = " ".join(i.operands for i in code)
    found = {name for name in ("zmm", "ymm", "xmm") if f"%{name}" in text}
    if "%" not in text and re.search(r"\b[vq]\d+\b", text):
        found.add("v")
    return max(found, key=lambda name: WIDTHS[name], default="")


def _moves(i: Instruction, kind: str) -> tuple[int, int]:
    """(loads, stores) of one instruction: 0 or 1 each; an x86 operand in memory may be both. `kind`: "x86" (AT&T) or "arm"."""
    if not MEMORY[kind].search(i.operands) or i.mnemonic.startswith(("lea", "prefetch", "prfm", "nop", "j")):
        return 0, 0
    if kind == "arm":
        return int(i.mnemonic.startswith("ld")), int(i.mnemonic.startswith("st"))
    depth, split = 0, 0
    for at, c in enumerate(i.operands):
        depth += (c == "(") - (c == ")")
        split = at if c == "," and depth == 0 else split
    into_memory = "(" in i.operands[split:]
    only_reads = i.mnemonic.startswith(("cmp", "test"))
    only_writes = i.mnemonic.startswith(("mov", "vmov", "vextract", "vcvtneps", "tilestore"))
    return int(not into_memory or not only_writes), int(into_memory and not only_reads)


def _loop(label: str, code: list[Instruction], kind: str, stack: re.Pattern[str]) -> Loop:
    """Count what matters in one loop's `code`. `stack`: matches operands on the stack (`_stack_registers`)."""
    counts = Counter(i.mnemonic for i in code if MULTIPLY_ADD.match(i.mnemonic))
    moves = [_moves(i, kind) for i in code]
    sums = _accumulators(code, kind)
    if sums:  # a loop that adds to none keeps other things there
        sums += len(_kept_on_stack(code, kind, stack))
    return Loop(
        label=label, instructions=len(code), accumulators=sums, multiply_adds=dict(counts), loads=sum(load for load, _ in moves),
        stores=sum(store for _, store in moves), stack_references=_references(code, stack),
        vector_spills=_references([i for i in code if VECTOR.search(i.operands)], stack), widest=_widest(code),
    )  # fmt: skip


def _accumulators(code: list[Instruction], kind: str) -> int:
    """Vector registers that are written in the loop, and only by adding to them. x86 is in AT&T order: the target stands last."""
    added: set[str] = set()
    replaced: set[str] = set()
    for i in code:
        operands = [x.strip() for x in re.split(r",(?![^(\[]*[)\]])", i.operands)]
        names = [_vector_register(x) for x in operands]
        target = names[-1] if kind == "x86" else names[0]
        if target is None:
            continue
        sources = names[:-1] if kind == "x86" else names[1:]
        # Fused forms and two-operand SSE add to the target; an add of three operands does where the target is one of them.
        plain = i.mnemonic.startswith(("v", "f")) and "add" in i.mnemonic and not i.mnemonic.startswith("vf")
        adds = ACCUMULATE.match(i.mnemonic) and (not plain or target in sources)
        (added if adds else replaced).add(target)
    return len(added - replaced)


def _kept_on_stack(code: list[Instruction], kind: str, stack: re.Pattern[str]) -> set[str]:
    """Places on the stack from which the loop reads vectors and to which it writes them back."""
    loaded: set[str] = set()
    stored: set[str] = set()
    for i in code:
        if VECTOR.search(i.operands) and (place := re.search(rf"[^\s,]*{stack.pattern}[^)\]]*", i.operands)):
            load, store = _moves(i, kind)
            loaded |= {place[0]} if load else set()
            stored |= {place[0]} if store else set()
    return loaded & stored


def _vector_register(operand: str) -> str | None:
    match = VECTOR.search(operand)
    if match is None or "(" in operand or "[" in operand:
        return None
    return match[1] or match[2] or match[3]
