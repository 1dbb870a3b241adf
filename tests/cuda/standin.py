"""Code without instructions: all that a launch must know of a compiled kernel, from the specialisation alone. Tests hold it against
what the compiler makes."""

from __future__ import annotations

from collections.abc import Iterable

from cuda.bindings import driver as real

from barellm.cuda.compile import Code, Descriptor
from barellm.cuda.kernel import Specialisation
from tests.simulators.gluon_stub import has_roles

ROW = 128  # bytes of a row of shared memory as the tensor memory accelerator fills it: the widest swizzle
SHARED = 64 << 10
# Bytes into constant memory, by compute capability.
PARAMETERS_AT = {75: 0x160, 80: 0x160, 86: 0x160, 89: 0x160, 90: 0x210, 100: 0x380, 120: 0x380}
ROLES_THREADS = 384  # of a kernel whose warps have roles: twelve warps
ELEMENTS = {  # of tensor maps: the driver's number, and the one that Triton's metadata has
    "bf16": (int(real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16), 10, 2),
    "fp16": (int(real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16), 6, 2),
    "fp32": (int(real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32), 7, 4),
}


def layout(signature: Iterable[tuple[str, str]]) -> tuple[tuple[int, int], ...]:
    """(bytes, alignment) of a kernel's parameters, as ptxas lays them out; compiled kernels are held against this."""
    sizes = {"*": [(8, 8)], "i32": [(4, 4)], "map": [(128, 64), (4, 4), (4, 4), (8, 8), (8, 8)]}
    return tuple(size for kind in [*kinds(signature), "*", "*"] for size in sizes[kind])


def kinds(signature: Iterable[tuple[str, str]]) -> list[str]:
    return ["*" if t.startswith(("*", "table<")) else "map" if t.startswith("tensormap<") else t for _, t in signature]


def boxed(type_: str) -> tuple[str, tuple[int, ...]]:
    """Element and box of "tensormap<bf16[128,64]>"."""
    element, box = type_.removeprefix("tensormap<").removesuffix("]>").split("[")
    return element, tuple(int(n) for n in box.split(","))


def placed(params: Iterable[tuple[int, int]], arch: int) -> list[tuple[int, int]]:
    """(offset, bytes) of parameters where a kernel reads them. They are aligned in constant memory, in which their block begins
    at no multiple of 64: one that opens with a tensor map begins with a gap. A launch hands over each by its own address."""
    start, found = PARAMETERS_AT[arch], []
    at = start
    for nbytes, align in params:
        at = -(-at // align) * align
        found.append((at - start, nbytes))
        at += nbytes
    return found


def descriptor(type_: str) -> Descriptor:
    """A wide box goes in several copies, each as wide as a row."""
    element, box = boxed(type_)
    _, number, nbytes = ELEMENTS[element]
    width = min(box[1], ROW // nbytes)
    return Descriptor((box[0], width), min(3, (width * nbytes).bit_length() - 5), nbytes, number)


def code(spec: Specialisation, arch: int, cubin: bytes) -> Code:
    maps = tuple(descriptor(type_) for _, type_ in spec.signature if type_.startswith("tensormap<"))
    roles = spec.function.dialect == "gluon" and has_roles(spec.function)
    threads = ROLES_THREADS if roles else 32 * dict(spec.options)["num_warps"]
    return Code(spec.name, arch, threads, SHARED, tuple(kinds(spec.signature)), layout(spec.signature), maps, cubin)
