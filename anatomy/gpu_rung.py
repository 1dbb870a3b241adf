"""What a rung of the GPU's ladder is: a launch that computes C = A B on a Hopper card, and how it is compiled and checked.

Shapes, on every rung: a (M, K), b (K, N), c (M, N), row-major, all of one dtype; sums are fp32. Rungs 1 to 7 are fp32 on
ordinary cores, the others bf16 on tensor cores. The sizes are constants of the code. Kernels are written in Gluon, Triton's
lower language, because a rung must decide what Triton decides by itself: which thread has which element, what lies in shared
memory, who waits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from barellm.cuda.compile import Code, triton_compile
from barellm.cuda.kernel import Launch, Lowering, Specialisation, Target, TensorMap
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part

HOPPER = Target(arch=90)
GPU_RUNGS: list[GpuRung] = []
Mend = Callable[[str], str]


@dataclass
class Product:
    """The operands of one product. `tables`: integers that a rung has made beforehand, by the tensor that holds them."""

    M: int
    N: int
    K: int
    dtype: str
    target: Target
    tables: dict[Tensor, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lowering = Lowering(Op({}, {}), self.target)
        self.c, self.a, self.b = (
            Tensor(name, shape, self.dtype, "state")
            for name, shape in (("c", (self.M, self.N)), ("a", (self.M, self.K)), ("b", (self.K, self.N)))
        )

    def map(self, tensor: Tensor, *box: int) -> TensorMap:
        """The matrix as TMA moves it: in boxes of rows x columns."""
        rows, columns = (int(n) for n in tensor.shape)
        return TensorMap(part(tensor), tensor.dtype, rows, columns, (box[0], box[1]), columns)

    def table(self, values: np.ndarray) -> Tensor:
        tensor = Tensor(f"table {len(self.tables)}", values.shape, "i32", "state")
        self.tables[tensor] = values
        return tensor

    def launch(self, function: Any, operands: dict[str, Any], blocks: tuple[int, ...], *, warps: int, **constants: Any) -> None:
        """Append the launch of a kernel on a grid of `blocks`."""
        sizes = {name: n for name, n in (("M", self.M), ("N", self.N), ("K", self.K)) if name in function.parameters}
        self.lowering.launch(function, operands, sizes | constants, grid=lambda s: blocks, writes="c c_map", warps=warps)


@dataclass(frozen=True)
class GpuRung:
    """`mend`: what is changed in the PTX that Triton makes of the kernel, where it has no words for it."""

    name: str
    build: Callable[[Product], None]
    dtype: str
    mend: Mend | None = None

    @property
    def number(self) -> int:
        return GPU_RUNGS.index(self) + 1

    @property
    def file(self) -> str:
        return f"{self.build.__module__.replace('.', '/')}.py"

    @property
    def changes(self) -> str:
        """What is new on this rung: the first sentence of its file, without its number and name."""
        text = " ".join((sys.modules[self.build.__module__].__doc__ or "").split())
        return text.partition(": ")[2].partition(". ")[0].removesuffix(".")

    def product(self, M: int, N: int, K: int, target: Target = HOPPER) -> tuple[Product, Launch]:
        """The operands of a product, and the launch that does it."""
        product = Product(M, N, K, self.dtype, target)
        self.build(product)
        (launch,) = product.lowering.launches
        assert isinstance(launch, Launch)
        return product, launch

    def ptx(self, spec: Specialisation) -> str:
        """The rung's PTX for sm_90a, mended."""
        return (self.mend or str)(triton_compile(spec, HOPPER.arch).asm["ptx"])

    def mended(self, spec: Specialisation, code: Code) -> Code:
        """The machine code, of the mended PTX where the rung mends it. Only that is compiled again."""
        return replace(code, cubin=assembled(self.ptx(spec))) if self.mend else code


def assembled(ptx: str) -> bytes:
    """The machine code that ptxas makes of PTX for sm_90a, with the options that Triton gives it."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-lineinfo", "-suppress-debug-info", "--gpu-name=sm_90a", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return cubin.read_bytes()


def gpu_rung(
    name: str, *, dtype: str, mend: Mend | None = None
) -> Callable[[Callable[[Product], None]], Callable[[Product], None]]:
    """Make a function that launches a product the next rung of the GPU's ladder."""

    def add(build: Callable[[Product], None]) -> Callable[[Product], None]:
        GPU_RUNGS.append(GpuRung(name, build, dtype, mend))
        return build

    return add
