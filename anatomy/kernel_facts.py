"""What figures and exercises take from the kernels themselves: layouts, orders of tiles, resources, machine code of inner loops."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from anatomy import cpu, gpu
from anatomy.gpu.r11_persistent import place
from anatomy.gpu.r13_hilbert import hilbert
from anatomy.gpu_rung import GPU_RUNGS, HOPPER
from anatomy.rung import RUNGS
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cuda import compile as compiler
from barellm.program.integers import ceil_div
from barellm.tools.inspect import device_code, machine_code

assert cpu and gpu
ROOT = Path(__file__).parents[1]
LINUX = "x86_64-unknown-linux-gnu"
SIZE = 96  # rows, columns and depth of the product whose code is listed
GPU_SIZE = 4096

Pair = tuple[int, int]


def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@cache
def resources() -> dict[str, dict[str, Any]]:
    """Name of a step of the GPU's ladder -> what ptxas made of it: threads, registers, shared bytes."""
    return {row["name"]: row for row in recorded("anatomy-gpu")["rungs"]}


@cache
def gpu_launch(name: str) -> Any:
    (r,) = [r for r in GPU_RUNGS if r.name == name]
    return r.product(GPU_SIZE, GPU_SIZE, GPU_SIZE)[1]


def layout(name: str, variable: str = "THREADS") -> Any:
    """The Gluon layout that a step's kernel gives a variable, with the constants of its launch."""
    from triton.experimental.gluon import language as gl

    spec = gpu_launch(name).spec
    function = spec.function.function
    constants = {key: getattr(value, "value", value) for key, value in spec.constants}
    found: Any = None
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            try:
                value = eval(compile(ast.Expression(node.value), name, "eval"), {"gl": gl}, constants)
            except NameError:
                continue
            constants[node.target.id] = value
            found = value if node.target.id == variable else found
    return found


def elements(layout: Any, warp: int = 0) -> list[list[Pair]]:
    """The elements (row, column) of each thread of a warp, of one repetition of a BlockedLayout."""
    each, lanes, warps, order = (layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta, layout.order)

    def split(number: int, shape: list[int]) -> list[int]:
        at = [0, 0]
        for axis in order:
            number, at[axis] = divmod(number, shape[axis])
        return at

    w, found = split(warp, warps), []
    for lane in range(32):
        at = split(lane, lanes)
        first = [(w[i] * lanes[i] + at[i]) * each[i] for i in (0, 1)]
        found.append([(first[0] + r, first[1] + c) for r in range(each[0]) for c in range(each[1])])
    return found


def order(kind: str, rows: int, columns: int) -> list[Pair]:
    """The tiles (row, column) in the order in which a kernel does them: "rows", "grouped" (the persistent step's own function) or
    "Hilbert" (its table)."""
    if kind == "rows":
        return [(t // columns, t % columns) for t in range(rows * columns)]
    if kind == "Hilbert":
        return [(int(t) // columns, int(t) % columns) for t in hilbert(rows, columns)]
    names = {key: getattr(value, "value", value) for key, value in place.function.__globals__.items()}
    plain = FunctionType(place.function.__code__, names | {"gl": SimpleNamespace(cdiv=ceil_div)})
    tall, wide = 2 * names["HALF"], names["COLS"]
    corners = (plain(t, None, rows * tall, columns * wide) for t in range(rows * columns))
    return [(m // tall, n // wide) for m, n in corners]


def patch(kind: str, rows: int, columns: int, at_once: int, wave: int = 0) -> Pair:
    """(different rows, different columns) of the tiles of a wave: so many strips of A and of B its blocks read."""
    tiles = order(kind, rows, columns)[wave * at_once : (wave + 1) * at_once]
    return len({r for r, _ in tiles}), len({c for _, c in tiles})


def fragments(rows: int = 16, columns: int = 16) -> dict[Pair, int]:
    """Element of wgmma's results -> the thread that holds it, by Triton's own linear layout of the step "wgmma and TMA"."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon import language as gl

    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", HOPPER.arch, 32)).load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    linear = builder.to_linear_layout(sums._to_ir(builder), [64, 64])
    weights = [(1 << i, base) for i, base in enumerate([*linear.lane_bases, *linear.warp_bases])]
    weights += [(0, base) for base in linear.reg_bases]
    found = {}
    for number in range(1 << len(weights)):
        thread = row = column = 0
        for i, (weight, (r, c)) in enumerate(weights):
            if number >> i & 1:
                thread, row, column = thread + weight, row ^ r, column ^ c
        if row < rows and column < columns:
            found[row, column] = thread
    return found


@cache
def inner_loop(name: str, isa: str, size: int = SIZE) -> list[str]:
    """The instructions of the inner loop that LLVM makes of a step of the CPU's ladder, for an instruction set of any machine."""
    (r,) = [r for r in RUNGS if r.name == name]
    target = isas.cross(isa, LINUX)
    text = jit.assembly(r.specialised(size, size, size).ir(target), target)
    inner = machine_code.read(text).inner
    assert inner
    code, labels = machine_code._parse(text)
    loops = machine_code.natural_loops(code, labels)
    header = labels[inner.label]
    nested = set().union(*(body for other, body in loops.items() if other != header and other in loops[header]))
    return [f"{code[i].mnemonic} {code[i].operands}".replace("\t", " ") for i in sorted(loops[header] - nested)]


@cache
def compiled(name: str) -> tuple[str, str]:
    """(PTX, SASS) of a step of the GPU's ladder, for sm_90a."""
    spec = gpu_launch(name).spec
    kernel = compiler.triton_compile(spec, HOPPER.arch)
    code = compiler.code_of(spec, kernel, HOPPER.arch)
    return kernel.asm["ptx"], device_code.disassembled(code.cubin)


SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")


def sass_loop(name: str, mark: str, which: int = 0) -> list[str]:
    """The instructions of a step's shortest SASS loop (`which`: of them in order of length) that has `mark`, to the branch back."""
    lines = compiled(name)[1].splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"^(\.L_\w+):", line))}
    found = []
    for i, line in enumerate(lines):
        m = re.search(r"\bBRA `\((\.L_\w+)\)", line)
        if m and labels.get(m[1], i) < i:
            inside = lines[labels[m[1]] : i + 1]
            if any(mark in x for x in inside):
                found.append([s[1] for x in inside if (s := SASS.match(x))])
    return sorted(found, key=len)[which]


def ptx_loop(name: str, mark: str) -> list[str]:
    """The instructions of the first shortest loop of a step's PTX that has `mark`."""
    lines = [re.sub(r"//.*", "", line).strip() for line in compiled(name)[0].splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
    found = []
    for i, line in enumerate(lines):
        m = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if m and labels.get(m[1], i) < i:
            inside = lines[labels[m[1]] + 1 : i + 1]
            if any(mark in x for x in inside):
                found.append(inside)
    shortest = min(found, key=len)
    return [line for line in shortest if line and line[0] not in "{}." and not line.endswith(":")]
