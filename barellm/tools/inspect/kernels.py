"""The kernels that a preset's programs use, for looking at them."""

from dataclasses import dataclass, field
from typing import Any

from barellm.assembly import build, quantized
from barellm.config import Config
from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cpu.gemm_config import GemmConfig, SkinnyGemmConfig
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Specialisation
from barellm.cuda.compile import triton_compile
from barellm.cuda.kernel import CollectiveCall, LibraryGemm, Target
from barellm.cuda.kernel import Specialisation as DeviceSpec
from barellm.errors import UserError, check_known, nearest
from barellm.tools.inspect import device_code, machine_code
from barellm.tools.plan.devices import lower, target_here

ARCHS = (80, 86, 87, 89, 90, 100, 103, 120)
ARM_TRIPLE, X86_TRIPLE = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"


@dataclass
class Used:
    """One kernel instance that is used: the ops that need it, and how many calls of it the programs make."""

    spec: Specialisation | DeviceSpec
    ops: list[str] = field(default_factory=list)
    calls: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.spec.name, "symbol": self.spec.symbol(), "ops": self.ops, "calls": self.calls,
            "operands": list(self.spec.operands),
            "constants": {name: str(v) if isinstance(v, GemmConfig | SkinnyGemmConfig) else v for name, v in self.spec.constants},
            **({"options": dict(self.spec.options)} if isinstance(self.spec, DeviceSpec) else {}),
        }  # fmt: skip

    def matches(self, wanted: str) -> bool:
        """Whether `wanted` means this one: it may be the kernel's name, its symbol, or an op."""
        return wanted in (self.spec.name, self.spec.symbol(), *self.ops)


def isa_named(name: str | None, triple: str | None = None) -> ISA:
    """The ISA of a name (None: the one in use) on this machine, or another machine's, for which code is compiled but not run."""
    if name is None and triple is None:
        return isas.host()
    known = {**isas.X86, **isas.ARM}
    name = name or "generic"
    check_known("ISA", name, known)
    on_arm = isas.arm()
    if triple is None:
        table = isas.ARM if on_arm else isas.X86
        if name in table and name in isas.available():
            return table[name]
        triple = X86_TRIPLE if name in isas.X86 and (name not in isas.ARM or not on_arm) else ARM_TRIPLE
    if not triple.startswith(("aarch64", "arm64", "x86_64")):
        raise UserError(f"target {triple!r} is not known: expected x86_64-... or aarch64-...")
    table = isas.ARM if triple.startswith(("aarch64", "arm64")) else isas.X86
    if name not in table:
        raise UserError(f"{triple} has no ISA {name!r} (known: {', '.join(table)})")
    return isas.cross(name, triple)


def arch_named(name: str | None) -> Target:
    """The GPUs that `--arch` names; without a name this machine's, or Hopper's where there is none."""
    if name is None:
        return target_here()
    number = name.removeprefix("sm_").removesuffix("a")
    if not number.isdigit() or int(number) not in ARCHS:
        raise UserError(f"unknown architecture {name!r} (known: {', '.join(f'sm_{n}' for n in ARCHS)})")
    return Target(arch=int(number))


def used_by(config: Config, machine: ISA | Target, *, weights: str = "") -> list[Used]:
    """All kernel instances of a training run in execution order; with quantized `weights`, of decoding and evaluation."""
    options = build.gemm_options(config.train, "cuda" if isinstance(machine, Target) else "cpu")
    programs = build.build_programs(config, training=not weights)
    if weights:
        programs = {name: programs[name] for name in ("decode", "eval")}
        quantized.quantize_programs(programs, weights)
    built = lower(programs, machine, **options)
    found: dict[Specialisation | DeviceSpec, Used] = {}
    for calls in built.calls.values():
        for call in calls:
            if isinstance(call, LibraryGemm | CollectiveCall):
                continue
            used = found.setdefault(call.spec, Used(call.spec))
            used.calls += 1
            if call.op.name not in used.ops:
                used.ops.append(call.op.name)
    return list(found.values())


def select(used: list[Used], wanted: str) -> list[Used]:
    """The kernels that `wanted` names. It is a UserError with the nearest name if there is none."""
    chosen = [u for u in used if u.matches(wanted)]
    if not chosen:
        names = list(dict.fromkeys(name for u in used for name in (u.spec.name, *u.ops)))
        raise UserError(f"no kernel is named {wanted!r}{nearest(wanted, names)} (known: {', '.join(sorted(names))})")
    return chosen


def summary(spec: Any, machine: ISA | Target) -> Any:
    """The kernel instance compiled for `machine` and what came of it read: machine_code.Code, or device_code.DeviceCode of a GPU's
    kernel, for which no GPU need be there."""
    if isinstance(machine, Target):
        made = triton_compile(spec, machine.arch)
        return device_code.read(made.asm["cubin"], shared=made.metadata.shared)
    return machine_code.read(jit.assembly(spec.ir(machine), machine))


def text(spec: Any, machine: ISA | Target, stage: str) -> str:
    """ "ir" or "asm" on the CPU; "ir", "ptx" or "sass" of a GPU's kernel."""
    if isinstance(machine, Target):
        asm = triton_compile(spec, machine.arch).asm
        return device_code.disassembled(asm["cubin"]) if stage == "sass" else asm[{"ir": "ttgir"}.get(stage, stage)]
    ir = spec.ir(machine)
    return ir if stage == "ir" else jit.assembly(ir, machine)
