"""PTX text to instructions: what Triton emits for one kernel, and what tests write by hand.

Names that an inline assembly block declares between braces are its own: `complete` becomes `complete.3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Special:
    """%tid.x and its like."""

    name: str


@dataclass(frozen=True)
class Number:
    """An immediate. `bits`: two's complement in 64 bits, or of a float as written; `real`: whether it is one."""

    bits: int
    real: bool = False


@dataclass(frozen=True)
class Symbol:
    """A parameter, a variable of shared memory, a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """{a, b}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a|b"""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """_"""


@dataclass(frozen=True)
class Address:
    """[base + offset], of a tensor map [base, {coordinates}]."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Special | Number | Symbol | Vector | Pair | Sink | Address


@dataclass(frozen=True)
class Instruction:
    """`modifiers`: the parts of the opcode behind its first. `guard`: the register that lets threads take part, and whether it
    is negated."""

    number: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    nbytes: int
    align: int


@dataclass(frozen=True, eq=False)
class Kernel:
    """`most_registers`: of a thread. `cluster`: blocks along x of one. `registers`: name -> PTX type. `labels`: name -> number of
    the instruction behind it. `tables`: of brx.idx."""

    name: str
    target: str
    threads: int
    most_registers: int
    cluster: int
    parameters: tuple[Parameter, ...]
    shared: tuple[str, ...]
    registers: dict[str, str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    tables: dict[str, tuple[str, ...]]


PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.[a-z](\d+)(?: \.ptr[ \w.]*)? ([\w$]+)(?:\[(\d+)\])?")
LABEL = re.compile(r"([\w$]+)\s*:")
REGISTERS = re.compile(r"(%?[\w$]+)(?:<(\d+)>)?")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
LINES = re.compile(r"^\s*\.(loc|file)\b[^\n]*$", re.M)  # which end with their line


@cache
def parse(ptx: str) -> Kernel:
    """The only entry of a module. ValueError where it has what this does not know."""
    ptx = LINES.sub("", COMMENT.sub(" ", ptx))
    (entry,) = re.finditer(r"\.entry ([\w$]+)\s*\((.*?)\)(.*?)\{", ptx, re.S)
    head = ptx[: entry.start()]
    (target,) = re.findall(r"\.target (\w+)", head)
    threads = re.search(r"\.reqntid (\d+)", entry[3])
    most = re.search(r"\.maxnreg (\d+)", entry[3])
    cluster = re.search(r"\.reqnctapercluster (\d+)(?:, 1, 1)?\s", entry[3])
    body = Body()
    body.read(ptx[entry.end() :])
    shared = re.findall(r"\.extern \.shared \.align \d+ \.b8 ([\w$]+)\[\]", head)
    return Kernel(
        entry[1], target, int(threads[1]) if threads else 0, int(most[1]) if most else 255,
        int(cluster[1]) if cluster else 1, _parameters(entry[2]),
        tuple(shared), body.registers, tuple(body.instructions), body.labels, body.tables,
    )  # fmt: skip


def _parameters(text: str) -> tuple[Parameter, ...]:
    found, at = [], 0
    for align, bits, name, count in PARAMETER.findall(text):
        nbytes = int(bits) // 8 * int(count or 1)
        step = int(align or int(bits) // 8)
        at = -(-at // step) * step
        found.append(Parameter(name, at, nbytes, step))
        at += nbytes
    assert len(found) == text.count(".param"), text
    return tuple(found)


class Body:
    """What stands between the braces of an entry."""

    def __init__(self) -> None:
        self.registers: dict[str, str] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.scopes: list[dict[str, str]] = [{}]  # a name in a block -> the one that is only its own
        self.blocks = 0

    def read(self, text: str) -> None:
        at = 0
        while self.scopes:
            at = _skip(text, at)
            if text[at] == "{":
                at = self._open(text, at + 1)
            elif text[at] == "}":
                self.scopes.pop()
                at += 1
            elif label := LABEL.match(text, at):
                at = label.end()
                if text[_skip(text, at) :].startswith(".branchtargets"):
                    end = text.index(";", at)
                    names = text[at:end].split(".branchtargets")[1].split(",")
                    self.tables[label[1]] = tuple(self._own(n.strip()) for n in names)
                    at = end + 1
                else:
                    self.labels[self._own(label[1])] = len(self.instructions)
            else:
                end = text.index(";", at)
                self._statement(" ".join(text[at:end].split()))
                at = end + 1

    def _open(self, text: str, at: int) -> int:
        """Labels and registers of a block get names of their own."""
        self.blocks += 1
        inner = text[at : text.index("}\n", at)]
        declared = {name for line in re.findall(r"\.reg \.\w+ ([^;]*);", inner) for name in line.replace(" ", "").split(",")}
        declared |= {m for m in re.findall(r"^\s*([\w$]+)\s*:", inner, re.M)}
        self.scopes.append({name: f"{name}.{self.blocks}" for name in declared})
        return at

    def _own(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _statement(self, text: str) -> None:
        if not text or text.startswith(".pragma"):
            return
        if text.startswith(".reg "):
            _, type_, names = text.split(" ", 2)
            for name, count in REGISTERS.findall(names):
                made = [f"{name}{n}" for n in range(int(count))] if count else [self._own(name)]
                self.registers |= dict.fromkeys(made, type_[1:])
            return
        guard = None
        if text.startswith("@"):
            word, text = text.split(" ", 1)
            guard = Register(self._own(word.lstrip("@!"))), word.startswith("@!")
        opcode, _, rest = text.partition(" ")
        if opcode.startswith("."):
            raise ValueError(f"what is {text!r}?")
        operands = tuple(self._operand(word) for word in _split(rest, ",")) if rest else ()
        self.instructions.append(Instruction(len(self.instructions), opcode, operands, guard, text))

    def _operand(self, word: str) -> Operand:
        word = word.strip()
        if word.startswith("{"):
            return Vector(tuple(self._operand(w) for w in _split(word[1:-1], ",")))
        if word.startswith("["):
            base, *coordinates = _split(word[1:-1], ",")
            name, _, offset = base.partition("+")
            inner = self._operand(coordinates[0]) if coordinates else Vector(())
            assert isinstance(inner, Vector) and len(coordinates) < 2, word
            return Address(self._operand(name), int(offset or "0", 0), inner.items)
        if "|" in word:
            return Pair(*(self._operand(w) for w in word.split("|")))
        if word == "_":
            return Sink()
        if number := _number(word):
            return number
        name = self._own(word)
        if name in self.registers:
            return Register(name)
        return Special(word) if word.startswith("%") else Symbol(name)


def _skip(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _split(text: str, at: str) -> Iterator[str]:
    """By commas that stand in no bracket."""
    depth, word = 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == at and not depth:
            yield word
            word = ""
        else:
            word += c
    yield word


def _number(word: str) -> Number | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", word):
        return Number(int(word[2:], 16), True)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", word):
        return Number(int(word[2:], 16), True)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", word):
        return Number(int(word.rstrip("U"), 0) & (1 << 64) - 1)
    return None
