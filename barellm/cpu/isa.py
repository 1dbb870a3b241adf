"""The instruction sets of this processor, and the choice of a lesser one (`BARELLM_ISA`)."""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass, replace
from functools import cache

from barellm.cpu.processor import sysctl_number
from barellm.errors import UserError


@dataclass(frozen=True)
class ISA:
    """A target of code generation: `lanes` fp32 lanes in each of `registers` vector registers. `dot`: how pairs of bf16 are
    multiplied: "x86" (vdpbf16ps), "neon" (bfdot), or "" (converted to fp32). `bf16_round`: the machine rounds fp32 to bf16 in one
    instruction; otherwise it is integer arithmetic, because LLVM would call a symbol that does not exist."""

    name: str
    triple: str = ""  # "": the host's
    cpu: str = "generic"
    features: str = ""
    lanes: int = 4
    registers: int = 32
    fma: bool = True
    dot: str = ""
    bf16_round: bool = False
    half: bool = False  # converts between fp16 and fp32 in one instruction
    masked: bool = False  # masked loads and stores of 16- and 32-bit elements are instructions
    tiles: bool = False  # products of bf16 in AMX tile registers
    # How the ones of vectors are counted: "words" of 32 bits by an instruction (AVX512-VPOPCNTDQ), "nibbles" by a table of 16 bytes
    # (pshufb), or "bytes" (cnt on Arm; elsewhere LLVM's arithmetic).
    popcount: str = "bytes"
    byte_dot: bool = False  # adds products of unsigned and signed bytes to lanes of 32 bits (vpdpbusd)


_AVX512 = ISA("avx512", cpu="x86-64-v4", lanes=16, registers=32, half=True, masked=True, popcount="nibbles")
_AVX512_BF16 = replace(_AVX512, name="avx512_bf16", features="+avx512bf16,+avx512vnni", dot="x86", bf16_round=True, byte_dot=True)
_AMX_BF16 = replace(
    _AVX512_BF16, name="amx_bf16", cpu="sapphirerapids", features="+amx-tile,+amx-bf16", tiles=True, popcount="words"
)  # fmt: skip
X86 = {
    "amx_bf16": _AMX_BF16,
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": ISA("avx2", cpu="x86-64-v3", lanes=8, registers=16, half=True, popcount="nibbles"),
    "generic": ISA("generic", cpu="x86-64", lanes=4, registers=16, fma=False),
}
ARM = {
    "neon_bf16": ISA("neon_bf16", features="+v8.2a,+neon,+bf16", dot="neon", bf16_round=True, half=True),
    "neon": ISA("neon", features="+neon", half=True),
    "generic": ISA("generic", features="+neon", half=True),
}
NEEDS = {
    "amx_bf16": ("amx-tile", "amx-bf16", "avx512bf16", "avx512vnni", "avx512bw", "avx512vl", "avx512dq", "fma"),
    "avx512_bf16": ("avx512bf16", "avx512vnni", "avx512bw", "avx512vl", "avx512dq", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"), "avx2": ("avx2", "fma", "bmi2"), "neon_bf16": ("bf16",),
    "neon": ("neon",), "generic": (),
}  # fmt: skip


def cross(name: str, triple: str) -> ISA:
    """An ISA of another machine, for looking at its assembly."""
    table = ARM if triple.startswith(("aarch64", "arm64")) else X86
    return replace(table[name], triple=triple)


def arm() -> bool:
    """Whether this process runs on aarch64."""
    return platform.machine().lower() in ("arm64", "aarch64")


def host_features() -> dict[str, bool]:
    """The features of this processor, by LLVM's names. On aarch64 LLVM 22 misses bf16 on Linux, and everything on macOS."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return features | {"neon": True, "bf16": arm_bf16()} if arm() else features


def arm_bf16() -> bool:
    """Whether the system says that this aarch64 processor has BFDOT and BFCVT."""
    if sys.platform == "darwin":
        return sysctl_number("hw.optional.arm.FEAT_BF16") == 1
    getauxval, hwcap2, bf16 = ctypes.CDLL(None).getauxval, 26, 1 << 14  # AT_HWCAP2, HWCAP2_BF16
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return bool(getauxval(hwcap2) & bf16)


def available() -> list[str]:
    """ISA names that this machine runs, best first."""
    table, features = ARM if arm() else X86, host_features()
    names = [name for name in table if all(features.get(f, False) for f in NEEDS[name])]
    return [name for name in names if not table[name].tiles or tiles_permitted()]


@cache
def tiles_permitted() -> bool:
    """Ask Linux for the use of tile registers, once a process. Without it the first tile instruction ends the process."""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


@cache
def _host(name: str) -> ISA:
    """The ISA called `name` ("": the best) on this machine. The best one is tuned for this very processor."""
    import llvmlite.binding as llvm

    names = available()
    if name and name not in names:
        raise UserError(f"BARELLM_ISA is {name!r}, this machine runs: {', '.join(names)}")
    best = names[0]
    isa = (ARM if arm() else X86)[name or best]
    if isa.name != best:
        return isa  # as narrow as its name says
    detected = host_features()
    features = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(detected.items()))
    counts = "words" if isa.masked and detected.get("avx512vpopcntdq") else isa.popcount
    return replace(isa, cpu=llvm.get_host_cpu_name(), features=features, popcount=counts)  # tuned for the very processor


def host() -> ISA:
    """The ISA that kernels are compiled for on this machine."""
    return _host(os.environ.get("BARELLM_ISA", ""))
