"""Tiling of a program's GEMMs on a GPU: tiles, waves of blocks, and the loss to wave quantization and tile quantization.

A multiprocessor runs as many blocks at a time as its registers and shared memory hold (occupancy); all blocks that run at a time
are a wave. The last wave is seldom full (wave quantization), and tiles at the edge hang over the result (tile quantization). Only
another tile size or split-K recovers either."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from barellm.program.backward import pullback
from barellm.program.builder import Program, Store
from barellm.program.integers import ceil_div
from barellm.program.tensor import Dim
from barellm.tools.plan import devices, roofline

if TYPE_CHECKING:
    from barellm.cuda.compile import Code
    from barellm.cuda.kernel import Launch, Sizes

MODES = {"nt": "fprop", "nn": "dgrad", "tn": "wgrad"}  # transpose mode -> what it is used for
PERSISTENT = "hopper_gemm"  # a block of it stays and does one tile after the other


@dataclass(frozen=True)
class Multiprocessor:
    """What limits occupancy. Registers are allocated to a warp by `unit`; each block takes `reserved` more bytes of shared."""

    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    shared: int = 233472
    unit: int = 256
    reserved: int = 1024

    def occupancy(self, *, threads: int, registers: int, shared: int) -> int:
        """Blocks that fit at a time, by the threads of one, the registers of a thread and the bytes of shared memory."""
        warps = ceil_div(threads, 32)
        each = ceil_div(registers * 32, self.unit) * self.unit * warps
        return min(self.blocks, self.threads // (32 * warps), self.registers // each, self.shared // (shared + self.reserved))


# By compute capability: shared memory of a multiprocessor, and threads and blocks where they are fewer (CUDA's programming guide).
MULTIPROCESSORS = {
    80: Multiprocessor(shared=167936),
    89: Multiprocessor(shared=102400, threads=1536, blocks=24),
    90: Multiprocessor(),
    100: Multiprocessor(),
}


@dataclass(frozen=True)
class Tiling:
    """An M x N x K GEMM and its tiling: tiles of `tile_m` x `tile_n`, the sum over K in `split_k` slices. `occupancy` blocks fit on
    each of `sms` multiprocessors."""

    kernel: str
    transpose_mode: str
    M: int
    N: int
    K: int
    dtype: str
    tile_m: int
    tile_n: int
    split_k: int
    sms: int
    occupancy: int

    @property
    def tiles(self) -> int:
        return ceil_div(self.M, self.tile_m) * ceil_div(self.N, self.tile_n) * self.split_k

    @property
    def slots(self) -> int:
        return self.sms * self.occupancy

    @property
    def waves(self) -> int:
        return ceil_div(self.tiles, self.slots)

    @property
    def idle(self) -> float:
        return 1 - (self.tiles - (self.waves - 1) * self.slots) / self.slots

    @property
    def padding(self) -> float:
        """The share of all tiles that hangs over the result."""
        return 1 - self.M * self.N * self.split_k / (self.tiles * self.tile_m * self.tile_n)

    @property
    def efficiency(self) -> float:
        """What both kinds of quantization leave of the card. Blocks on one multiprocessor share its tensor cores, so what counts is
        how many tiles the busiest one does, however many of them at a time."""
        return self.tiles / (self.sms * ceil_div(self.tiles, self.sms)) * (1 - self.padding)

    def roofline_s(self, sheet: devices.Published) -> float:
        """Roofline seconds: each operand read once and the result written once, or all operations at the peak."""
        itemsize = 4 if self.dtype == "fp32" else 2
        out = 4 if self.transpose_mode == "tn" else itemsize
        nbytes = itemsize * (self.M + self.N) * self.K + out * self.M * self.N
        return max(2 * self.M * self.N * self.K / sheet.peak(self.dtype), nbytes / sheet.bandwidth((8, 0, 0)))

    def to_json(self, sheet: devices.Published) -> dict[str, Any]:
        names = ("tiles", "waves", "idle", "padding", "efficiency")
        return asdict(self) | {name: getattr(self, name) for name in names} | {"roofline_s": self.roofline_s(sheet)}


def gemms(built: Any, programs: Iterable[str], sizes: "Sizes", codes: "Mapping[Any, Code] | None" = None) -> dict[Tiling, int]:
    """Count the tiled GEMMs of CUDA programs at these sizes. `codes`: compiled kernels, for occupancy (else 1 block per SM)."""
    found: dict[Tiling, int] = {}
    for name in programs:
        for call in built.calls[name]:
            tiling = _tiling(call, built.target.sms, sizes, _blocks(built.target.arch, codes or {}))
            if tiling is not None:
                found[tiling] = found.get(tiling, 0) + 1
    return found


def uncounted(built: Any, programs: Iterable[str]) -> dict[str, int]:
    """Ops with matmuls in other kernels than those that `gemms` reads, with their counts: their tiling is not known here."""
    found: dict[str, int] = {}
    for low in (built.lowered[name] for name in programs):
        for op in low.ops:
            read = any(call.spec.name in READERS for call in low.of[op].launches)
            if not read and any(part.product for part in roofline.primitives(op)):
                found[op.name] = found.get(op.name, 0) + 1
    return found


def specifications(built: Any, programs: Iterable[str]) -> list[Any]:
    """What must be compiled for `gemms` to know every occupancy."""
    calls = (call for name in programs for call in built.calls[name])
    return list(dict.fromkeys(call.spec for call in calls if call.spec.name in READERS and call.spec.name != PERSISTENT))


def one_gemm(M: int, N: int, K: int, dtype: str) -> Program:
    """A program with the GEMM y (M, N) = x (M, K) w (N, K)^T (fprop) and both its gradients (dgrad, wgrad)."""
    p = Program(Store(), compute=dtype)
    operands = p.precision.operands
    x = p.input("x", (Dim("batch", M), K), operands)
    weight = p.input("weight", (N, K), operands)
    y = p.output("y", p.linear(x, weight))
    dy = p.input("dy", (Dim("batch", M), N), y.dtype)
    for name, t in zip(("dx", "dw"), pullback(p, {y: dy}, [x, weight]), strict=True):
        p.output(name, t)
    return p


def _blocks(arch: int, codes: "Mapping[Any, Code]") -> "Callable[[Launch], int]":
    """A function that gives a launch's occupancy: blocks per multiprocessor, 1 for persistent or unknown kernels."""
    machine = MULTIPROCESSORS.get(arch, MULTIPROCESSORS[90])

    def blocks(call: "Launch") -> int:
        code = codes.get(call.spec)
        if code is None or call.spec.name == PERSISTENT:
            return 1
        return machine.occupancy(threads=code.threads, registers=code.registers, shared=code.shared_bytes)

    return blocks


def _tiling(call: Any, sms: int, sizes: "Sizes", blocks: "Callable[[Launch], int]") -> Tiling | None:
    """The tiling of a kernel launch; None if it is no GEMM, or has an empty grid at these sizes."""
    reader = READERS.get(call.spec.name)
    if reader is None or 0 in call.grid(sizes):
        return None
    constants = dict(call.spec.constants)
    values: dict[str, Any] = constants | {name: arg for (name, _), arg in zip(call.spec.signature, call.args, strict=True)}

    def number(name: str) -> int:
        value = values[name]
        return value if isinstance(value, int) else value(sizes)

    return Tiling(call.spec.name, sms=sms, occupancy=blocks(call), **reader(call, values, number))


def _transpose_mode(values: Mapping[str, Any]) -> str:
    return "tn" if values["A_TRANSPOSED"] else "nt" if values["B_TRANSPOSED"] else "nn"


def _tiled(call: "Launch", values: Mapping[str, Any], number: Callable[[str], int]) -> dict[str, Any]:
    """`Tiling` fields of a launch of `kernels.matmul.gemm`, or of `kernels.hopper.hopper_gemm`, whose tiles have 128 rows."""
    hopper = call.spec.name == PERSISTENT
    K = number("K")
    split = values.get("k_per_split") is not None and _transpose_mode(values) == "tn" and callable(values["k_per_split"])
    kinds = dict(call.spec.signature)
    return {
        "transpose_mode": _transpose_mode(values), "M": number("M"), "N": number("N"), "K": K,
        "dtype": _dtype(kinds["a_map"] if hopper else kinds["a"]),
        "tile_m": 128 if hopper else values["BM"], "tile_n": values["TILE_N"] if hopper else values["BN"],
        "split_k": ceil_div(K, number("k_per_split")) if split and values["k_per_split"] is not values["K"] else 1,
    }  # fmt: skip


def _few(call: "Launch", values: Mapping[str, Any], number: Callable[[str], int]) -> dict[str, Any]:
    """`kernels.skinny_gemm.skinny_gemm`: a block has all rows of some columns."""
    tile_m = number("rows")
    return {
        "transpose_mode": "nt", "M": tile_m, "N": values["N"], "K": values["K"],
        "dtype": _dtype(dict(call.spec.signature)["weight"]), "tile_m": tile_m, "tile_n": values["BN"], "split_k": 1,
    }  # fmt: skip


def _dtype(kind: str) -> str:
    """The dtype of an operand by its type in a signature: "*bf16", "tensormap<bf16[64,64]>"."""
    return next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in kind)


READERS: dict[str, Callable[..., dict[str, Any]]] = {"gemm": _tiled, PERSISTENT: _tiled, "skinny_gemm": _few}


def table(found: Mapping[Tiling, int], sheet: devices.Published, *, known: bool) -> list[str]:
    """The tilings as lines of text, the costliest first. `known`: occupancies are those of compiled code, else lower bounds."""
    row = "{:<17}{:<6}{:>3}{:>8}{:>6}{:>6}{:>4}{:>6}{:>5}{:>5}{:>5}{:>8}".format
    lines = []
    for kernel in dict.fromkeys(c.kernel for c in found):
        header = row("MxNxK", "pass", "n", "tile", "split", "tiles", "/SM", "waves", "idle", "pad", "eff.", "roof us")
        lines += ["", f"{kernel}:", header] + [
            row(
                f"{c.M}x{c.N}x{c.K}", MODES[c.transpose_mode], count, f"{c.tile_m}x{c.tile_n}", c.split_k, c.tiles,
                c.occupancy if known or c.kernel == PERSISTENT else f">={c.occupancy}", c.waves, f"{c.idle:.0%}",
                f"{c.padding:.0%}", f"{c.efficiency:.0%}", f"{1e6 * c.roofline_s(sheet):.1f}",
            )
            for c, count in sorted(found.items(), key=lambda item: -item[0].roofline_s(sheet) * item[1])
            if c.kernel == kernel
        ]  # fmt: skip
    return lines
