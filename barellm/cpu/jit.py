"""LLVM IR to machine code, with the objects kept on disk.

An object is cached under a key of its sources (sources.py), the specialisation, the processor and the versions, so a warm start
emits no IR. A cold one compiles without LLVM's pass pipeline: SROA turns variables into registers, the rest gains nothing."""

import hashlib
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from barellm.cpu.isa import ISA
from barellm.runtime import artefacts

# What generated code may call in the C library; anything else would be a crash at run time.
ALLOWED = frozenset({"memcpy", "memset", "memmove", "syscall", "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait",
                     "pthread_cond_broadcast"})  # fmt: skip
CACHE_NBYTES = 64 << 20  # of objects on disk: some hundred sets of gpt2-124m's


def cache_folder() -> Path:
    return artefacts.cache_folder("objects")


@cache
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _initialise_all() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@cache
def target_machine(isa: ISA) -> llvm.TargetMachine:
    if isa.triple:
        _initialise_all()
        # For a linker, which may put it anywhere.
        return llvm.Target.from_triple(isa.triple).create_target_machine(cpu=isa.cpu, features=isa.features, opt=2, reloc="pic")
    _initialise()
    return llvm.Target.from_default_triple().create_target_machine(cpu=isa.cpu, features=isa.features, opt=2, jit=True)


@cache
def versions() -> str:
    """The versions of this Python's llvmlite and of LLVM, which are part of every key."""
    import llvmlite

    return f"{llvmlite.__version__} {llvm.llvm_version_info}"


def module(ir: str, isa: ISA) -> llvm.ModuleRef:
    """Parse and verify `ir`, with variables in registers: SROA is the only pass."""
    machine = target_machine(isa)
    mod = llvm.parse_assembly(ir)
    mod.verify()
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes.run(mod, builder)
    return mod


def assembly(ir: str, isa: ISA) -> str:
    return target_machine(isa).emit_assembly(module(ir, isa))


def compile_object(ir: str, isa: ISA) -> bytes:
    code = target_machine(isa).emit_object(module(ir, isa))
    missing = undefined_symbols(code) - ALLOWED
    if missing:
        raise RuntimeError(f"generated code calls {', '.join(sorted(missing))}, which nothing provides (ISA {isa.name})")
    return code


def undefined_symbols(code: bytes) -> set[str]:
    """Names that the ELF64 object file `code` leaves to the linker. Of other formats (Mach-O, COFF) nothing is read and the set is
    empty: their symbols resolve or fail on load. Offsets and sizes are those of the ELF64 headers."""
    if code[:5] != b"\x7fELF\x02":  # the magic number, then ELFCLASS64
        return set()
    # e_shoff and e_shnum: where the section headers begin, of 64 bytes each, and how many there are.
    table, count = struct.unpack_from("<Q", code, 0x28)[0], struct.unpack_from("<H", code, 0x3C)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + 64 * i) for i in range(count)]
    names: set[str] = set()
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]  # sh_offset of the string table that belongs to these symbols
        for at in range(offset + 24, offset + size, 24):  # 24: sizeof(Elf64_Sym); the first symbol is always empty
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0:  # SHN_UNDEF
                start = strings + name
                names.add(code[start : code.index(b"\0", start)].decode())
    return names - {"", "_GLOBAL_OFFSET_TABLE_"}  # the linker itself makes that one


def cached_object(key: str, isa: ISA, emit_ir: Callable[[], str]) -> bytes:
    """The object for `key`, compiled from `emit_ir()` where the cache does not have it."""
    code = load(key, isa)
    if code is None:
        code = compile_object(emit_ir(), isa)
        keep(key, isa, code)
    return code


def _path(key: str, isa: ISA) -> Path:
    return cache_folder() / f"{hashlib.sha256(f'{key}|{isa}|{versions()}'.encode()).hexdigest()}.o"


def load(key: str, isa: ISA) -> bytes | None:
    """The object for `key`, if the cache has it."""
    return artefacts.load(_path(key, isa))


def keep(key: str, isa: ISA, code: bytes) -> None:
    """Put an object into the cache."""
    artefacts.keep(_path(key, isa), code)


def prune(limit: int = CACHE_NBYTES) -> None:
    """Keep the folder of objects below `limit` bytes, once in a while."""
    artefacts.prune(cache_folder(), limit)


class Library:
    """Objects loaded into this process. Addresses are valid as long as it lives."""

    def __init__(self, objects: list[bytes], isa: ISA) -> None:
        _initialise()
        # The engine takes ownership of its target machine, so it gets one of its own.
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=isa.cpu, features=isa.features, opt=2, jit=True)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for code in objects:
            self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()

    def address(self, symbol: str) -> int:
        address = self.engine.get_function_address(symbol)
        assert address, symbol
        return address
