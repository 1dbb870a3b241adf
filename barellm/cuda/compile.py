"""Specialisations to cubins, kept on disk with what a launch must know of them.

Triton is the compiler and nothing else: it runs where a cubin is not in the cache, on any machine, with or without a GPU. What is
kept can be loaded without it, by any process and Python, from any folder."""

import hashlib
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from barellm.cuda.driver import INSTALL
from barellm.cuda.kernel import Specialisation
from barellm.cuda.lang import TRITON, constant, modules_of
from barellm.errors import UserError
from barellm.runtime import artefacts
from barellm.runtime.compilers import Compile, Service, compile_all

FORMAT = 4  # version of what is kept on disk
CACHE_NBYTES = 256 << 20  # of cubins on disk
FEW = 5  # kernels that are compiled without a word
SHARE = 2  # kernels for each helper process at least
HEAD = struct.Struct("<q")
# A cubin is an ELF file of 64 bits. At E_SHOFF of its header is the file offset of the section headers, at E_SHNUM their number and
# the index of the section of names. A section header: sh_name, an offset in that section, then sh_offset and sh_size.
E_SHOFF, E_SHNUM = 40, 60
SECTION = struct.Struct("<I20xQQ24x")
ATTRIBUTE = struct.Struct("<BBH")  # of .nv.info: format of the value, attribute, value or its size
EIFMT_SVAL, EIATTR_REGCOUNT = 4, 0x2F  # the value follows, in so many bytes; the registers of a function
FLAGS = {"enable_fp_fusion": True}  # stated, since another Triton has another default


@dataclass(frozen=True)
class Descriptor:
    """How the tensor map of a parameter must be encoded: the compiler's box, swizzle and element type."""

    box: tuple[int, ...]
    swizzle: int
    element_bytes: int
    element_type: int


@dataclass(frozen=True)
class Code:
    """A cubin and how to launch it.

    `params`: (bytes, alignment) of each kernel parameter, as ptxas lays them out. They are those of `arguments` in order: a
    pointer "*", "i32", or "map": a tensor map of 128 bytes, then its two sizes and two strides; and two scratch pointers."""

    name: str
    arch: int
    threads: int
    shared_bytes: int
    arguments: tuple[str, ...]
    params: tuple[tuple[int, int], ...]
    descriptors: tuple[Descriptor, ...]
    cubin: bytes

    @property
    def offsets(self) -> list[int]:
        """The offset of each parameter in the block of parameters."""
        offsets, end = [], 0
        for nbytes, align in self.params:
            end = -(-end // align) * align
            offsets.append(end)
            end += nbytes
        return offsets

    @property
    def registers(self) -> int:
        """Registers of a thread: the attribute EIATTR_REGCOUNT in the ELF section .nv.info."""
        (table,) = struct.unpack_from("<Q", self.cubin, E_SHOFF)
        count, names_index = struct.unpack_from("<HH", self.cubin, E_SHNUM)
        sections = [SECTION.unpack_from(self.cubin, table + SECTION.size * i) for i in range(count)]
        _, names, _ = sections[names_index]  # of each section: its name's place among the names, offset, size
        at, size = next((at, size) for name, at, size in sections if self.cubin.startswith(b".nv.info\0", names + name))
        end = at + size
        while at < end:
            form, attribute, size = ATTRIBUTE.unpack_from(self.cubin, at)
            at += ATTRIBUTE.size
            if (form, attribute) == (EIFMT_SVAL, EIATTR_REGCOUNT):
                _symbol, registers = struct.unpack_from("<II", self.cubin, at)
                return registers
            at += size if form == EIFMT_SVAL else 0  # other forms hold their value in `size` itself
        raise ValueError(f"the cubin of {self.name} does not say how many registers it takes")

    def packed(self) -> bytes:
        """What is kept on disk: the length of a JSON head, the head, the cubin."""
        fields = asdict(self)
        cubin = fields.pop("cubin")
        head = json.dumps(fields).encode()
        return HEAD.pack(len(head)) + head + cubin

    @classmethod
    def unpacked(cls, data: bytes) -> "Code":
        """The inverse of `packed`; JSON has lists where fields are tuples."""
        (size,) = HEAD.unpack_from(data)
        fields = json.loads(data[HEAD.size : HEAD.size + size])
        fields["arguments"] = tuple(fields["arguments"])
        fields["params"] = tuple((n, align) for n, align in fields["params"])
        fields["descriptors"] = tuple(Descriptor(**d | {"box": tuple(d["box"])}) for d in fields["descriptors"])
        return cls(**fields, cubin=data[HEAD.size + size :])


def cache_folder() -> Path:
    return artefacts.cache_folder("cubins")


def compiled(specs: Iterable[Specialisation], arch: int, *, processes: int) -> dict[Specialisation, Code]:
    """The code of each specialisation for compute capability `arch`, from the cache, else compiled by up to `processes` processes
    and kept there. UserError if it must be compiled and Triton is missing."""
    codes: dict[Specialisation, Code] = {}
    missing: dict[str, Specialisation] = {}
    paths = {spec: _path(spec, arch) for spec in specs}
    for spec, path in paths.items():
        data = artefacts.load(path)
        if data is None:
            missing[spec.key] = spec
        else:
            codes[spec] = Code.unpacked(data)
    if missing:
        check_compiler()
        if len(missing) > FEW:
            print(f"barellm: compiling {len(missing)} kernels for sm_{arch}, which are then kept", file=sys.stderr, flush=True)
        service = Service("barellm.cuda.compile", None)
        jobs = {key: _job(spec, arch) for key, spec in missing.items()}
        results = compile_all({k: lambda job=job: job for k, job in jobs.items()}, service, processes=processes, share=SHARE)
        for key, spec in missing.items():
            artefacts.keep(paths[spec], results[key])
            codes[spec] = Code.unpacked(results[key])
        artefacts.prune(cache_folder(), CACHE_NBYTES)
    return codes


def check_compiler() -> None:
    """Raise a UserError if Triton is missing or has another version than the kernels are written for: its version decides their
    machine code, and whether Gluon's names exist."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        raise UserError(f"kernels must be compiled, which needs triton {TRITON}: {INSTALL}") from None
    if installed != TRITON:
        raise UserError(f"triton {installed} is installed, kernels are written for {TRITON}: pip install triton=={TRITON}")


def _path(spec: Specialisation, arch: int) -> Path:
    return cache_folder() / f"{digest_of(spec, arch)}.cubin"


def ptxas_variable(arch: int) -> str:
    """The environment variable that names another ptxas to Triton: from Blackwell on it has one of its own."""
    return "TRITON_PTXAS_BLACKWELL_PATH" if arch >= 100 else "TRITON_PTXAS_PATH"


def digest_of(spec: Specialisation, arch: int) -> str:
    """A digest of everything outside this file that decides the code of a specialisation, in hexadecimal digits."""
    h = hashlib.sha256(f"{FORMAT}|{TRITON}|{FLAGS}|{os.environ.get(ptxas_variable(arch), '')}|{arch}|{spec.key}".encode())
    for module in modules_of(spec.function):
        h.update(_digest(module))
    return h.hexdigest()


@cache
def _digest(module: str) -> bytes:
    """A digest of a module's source, and of the constants that its device functions may take, wherever they come from."""
    h = hashlib.sha256()
    loaded = sys.modules[module]
    assert loaded.__file__, module
    artefacts.add_sources(h, [Path(loaded.__file__)])
    h.update(repr(sorted((k, v.value) for k, v in vars(loaded).items() if isinstance(v, constant))).encode())
    return h.digest()


def _job(spec: Specialisation, arch: int) -> str:
    """A specialisation as JSON text, for another process."""
    function = spec.function
    return json.dumps([function.module, function.name, spec.signature, spec.constants, spec.options, spec.aligned, arch])


def compiler(argument: None) -> Compile:
    """The function that a compiling process runs for each job (runtime.compilers): a specialisation as text to packed code."""
    check_compiler()

    def compile_job(job: str) -> bytes:
        module, name, signature, constants, options, aligned, arch = json.loads(job)
        frozen = [tuple((k, _frozen(v)) for k, v in pairs) for pairs in (signature, constants, options)]
        spec = Specialisation(getattr(import_module(module), name), frozen[0], frozen[1], frozen[2], tuple(aligned))
        return code_of(spec, triton_compile(spec, arch), arch).packed()

    return compile_job


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, nested ones too."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def triton_compile(spec: Specialisation, arch: int) -> Any:
    """Compile with Triton. Returns its result: `.asm` with "ttgir", "ptx", "cubin" and "sass", and `.metadata`."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as run_compiler

    source = ASTSource
    if spec.function.dialect == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource as source
    function = spec.function.materialised()
    types, constants = dict(spec.signature), dict(spec.constants)
    signature = {n: "constexpr" if n in constants else _type(types[n], spec) for n in spec.function.parameters}
    attrs = {(spec.function.parameters.index(n),): [["tt.divisibility", 16]] for n in spec.aligned}
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope(), knobs.runtime.scope():
        knobs.cache.dir = folder  # the result is kept by us, without the folder's path in it
        knobs.compilation.disable_line_info = True  # or the cubin would depend on where the sources lie
        knobs.runtime.add_stages_inspection_hook = _patch_ptx  # pyright: ignore[reportAttributeAccessIssue]
        return run_compiler(
            source(function, signature, constexprs=constants, attrs=attrs),
            target=GPUTarget("cuda", arch, 32),
            options=FLAGS | dict(spec.options),
        )


def _patch_ptx(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    """Triton's hook: its stage that makes PTX, followed by the corrections below."""
    make_ptx = stages["ptx"]
    stages["ptx"] = lambda source, metadata: with_wgmma_waits(with_proxy_fences(make_ptx(source, metadata)))


def with_proxy_fences(ptx: str) -> str:
    """The PTX with the fences that Triton leaves out before 3.7 (triton-lang/triton#9610): cp.async writes shared memory as threads
    do, wgmma reads it through the async proxy, and nothing else orders the two."""
    if "wgmma.mma_async" not in ptx:
        return ptx
    return re.sub(r"(cp\.async\.wait_group[ \t]+\d+;)", r"\1\n\tfence.proxy.async.shared::cta;", ptx)


def with_wgmma_waits(ptx: str) -> str:
    """The PTX with a wait at the end of each loop whose iterations leave two wgmma groups in flight: ptxas 12.8 otherwise
    serializes them ("wgmma.mma_async instructions are serialized", C7515)."""
    lines, labels = ptx.split("\n"), {}
    for i, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = i
        branch = re.match(r"\s*(?:@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$\w+);", line)
        if branch and branch[1] in labels:
            groups = re.findall(r"wgmma\.(commit|wait)_group", "\n".join(lines[labels[branch[1]] : i]))
            if groups[-2:] == ["commit", "commit"]:
                lines[i] = f"\twgmma.wait_group.sync.aligned 0;\n{line}"
    return "\n".join(lines)


def _type(name: str, spec: Specialisation) -> str:
    """Triton's name for a parameter's type, from its name in `Specialisation.signature`. A tensor map is a tensor descriptor, in
    Gluon with the shared-memory layout of its boxes; a table is a pointer to i64."""
    if name.startswith("table<"):
        return "*i64"
    if not name.startswith("tensormap<"):
        return name
    inner = name.removeprefix("tensormap<").removesuffix(">")
    if spec.function.dialect != "gluon":
        return f"tensordesc<{inner}>"
    from triton.experimental.gluon import language as gl

    element, box = inner.rstrip("]").split("[")
    shape = [int(n) for n in box.split(",")]
    types = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for(shape, types[element])
    return f"tensordesc<{inner},{layout!r}>"


def argument_of(type_: str) -> str:
    """A parameter's type as `Code.arguments` has it."""
    return "*" if type_.startswith(("*", "table<")) else "map" if type_.startswith("tensormap<") else type_


def code_of(spec: Specialisation, kernel: Any, arch: int) -> Code:
    """The cubin of Triton's result `kernel`, with what a launch must know: from Triton's metadata and, for the layout of the
    parameters, from the PTX. It fails if the code asks for a kind of launch that BoundLaunch does not make."""
    meta, ptx = kernel.metadata, kernel.asm["ptx"]
    assert not meta.global_scratch_size and not meta.profile_scratch_size, f"{spec.name} asks for scratch in memory"
    assert not meta.launch_pdl and not meta.launch_cooperative_grid, f"{spec.name} asks for a launch that nobody makes"
    assert meta.num_ctas == 1, f"{spec.name} asks for clusters, which nobody launches"
    arguments = tuple(argument_of(t) for _, t in spec.signature)
    params = _params(ptx)
    # A tensor map is its descriptor, two sizes and two strides; the last two parameters are Triton's own scratch pointers.
    assert len(params) == sum(5 if a == "map" else 1 for a in arguments) + 2, (spec, params)
    descriptors = tuple(
        Descriptor(tuple(d["block_size"]), d["swizzle"], d["elem_size"], d["elem_type"]) for d in (meta.tensordesc_meta or ())
    )
    assert len(descriptors) == arguments.count("map"), (spec, descriptors)
    return Code(meta.name, arch, 32 * meta.num_warps, meta.shared, arguments, params, descriptors, kernel.asm["cubin"])


def _params(ptx: str) -> tuple[tuple[int, int], ...]:
    """(bytes, alignment) of each parameter of the entry function, from its declaration: ".param .align 64 .b8 name[128]" or ".param
    .u64 name"; a scalar is as aligned as it is long."""
    entry = ptx[ptx.index(".entry") :]
    params = []
    pattern = r"\.param (?:\.align (\d+) )?\.(\w)(\d+)[^,\[\)]*(?:\[(\d+)\])?"
    for align, _, bits, count in re.findall(pattern, entry[: entry.index("{")]):
        nbytes = int(bits) // 8 * int(count or 1)
        params.append((nbytes, int(align or int(bits) // 8)))
    return tuple(params)
