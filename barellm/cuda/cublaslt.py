"""NVIDIA's cuBLASLt: its library by ctypes, and a GEMM of ours as one call of it.

cuBLASLt thinks in columns. A row-major matrix (rows, cols) is to it a column-major (cols, rows), so the row-major out = a b is
asked for as out^T = b^T a^T: its operand A is our b, its B our a, and a bias along our rows lies along its columns, as it wants.

The algorithm is the heuristic's first, asked once for each shape; split-K adds in fp32. Numbers of
the interface are those of cublasLt.h, the same in CUDA 12 and 13."""

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from barellm.cuda.kernel import LibraryGemm, Sizes
from barellm.errors import UserError
from barellm.program.integers import round_up
from barellm.runtime.lowering import Region

INSTALL = "pip install nvidia-cublas"
WORKSPACE_ALIGN = 256  # bytes
ALIGN = 16  # bytes, of every operand: what the heuristic may count on, whatever the arena's plan is
DTYPE = {"fp32": 0, "fp16": 2, "bf16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
COMPUTE_FP32, COMPUTE_TF32 = 68, 77  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
TRANSA, TRANSB, EPILOGUE, BIAS, AUX, AUX_LD = 3, 4, 7, 8, 11, 12  # attributes of a matmul descriptor
EPILOGUES = {  # (what, with a bias): how cuBLASLt calls it
    ("", False): 1, ("", True): 4, ("gelu", False): 32 | 128, ("gelu", True): 32 | 128 | 4, ("gelu_backward", False): 64 | 128,
}  # fmt: skip
WORKSPACE, REDUCTION, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference
IN_COMPUTE_TYPE = 2  # the reduction scheme that keeps split-K's partial sums in fp32; no split-K is always allowed
NOT_SUPPORTED = 15


class Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algorithm", Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)]


_MADE, _ATTRIBUTE = POINTER(c_void_p), (c_void_p, c_int, c_void_p, c_size_t)
SIGNATURES: dict[str, tuple[Any, ...]] = {  # of what is called; each gives a status
    "cublasLtCreate": (_MADE,),
    "cublasLtDestroy": (c_void_p,),
    "cublasLtMatmulDescCreate": (_MADE, c_int, c_int),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatmulDescSetAttribute": _ATTRIBUTE,
    "cublasLtMatrixLayoutCreate": (_MADE, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (_MADE,),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": _ATTRIBUTE,
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, POINTER(Heuristic), POINTER(c_int)),
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


class CublasError(RuntimeError):
    """A function of cuBLASLt that failed."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} failed: status {status} of cuBLAS")
        self.status = status


def find() -> str:
    """The path of libcublasLt: from NVIDIA's wheels, Conda, the system or CUDA_HOME, by NVIDIA's own finder, which comes with
    cuda-bindings. UserError where there is none."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublasLt").abs_path
    except (ImportError, RuntimeError):
        path = None
    if path is None:
        raise UserError(f"--gemm-backend cublaslt needs NVIDIA's libcublasLt, and none was found here: {INSTALL}")
    return path


@cache
def functions() -> Any:
    """The functions of the library."""
    library = ctypes.CDLL(find())
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


class Cublas:
    """cuBLASLt in the current context, and what its heuristic has said."""

    def __init__(self) -> None:
        self.functions = functions()
        self.handle = self._made("cublasLt")
        self.close = self.handle.give_back
        self.preference = self._made("cublasLtMatmulPreference")
        self._algorithms: dict[Any, Algorithm] = {}

    def call(self, name: str, *args: Any) -> None:
        if status := getattr(self.functions, name)(*args):
            raise CublasError(name, status)

    def _made(self, name: str, *args: Any) -> "Made":
        """A new object of the library, by its functions `name`Create and `name`Destroy."""
        made = c_void_p()
        self.call(f"{name}Create", byref(made), *args)
        return Made(made, getattr(self.functions, f"{name}Destroy"))

    def matrix(self, dtype: str, rows: int, cols: int) -> "Made":
        """The layout of a row-major matrix without gaps."""
        return self._made("cublasLtMatrixLayout", DTYPE[dtype], cols, rows, cols)

    def operation(self, compute: int, attributes: list[tuple[int, Any]]) -> "Made":
        made = self._made("cublasLtMatmulDesc", compute, DTYPE["fp32"])
        for at, value in attributes:
            self.call("cublasLtMatmulDescSetAttribute", made.value, at, byref(value), ctypes.sizeof(value))
        return made

    def algorithm(self, key: Any, what: str, operation: "Made", layouts: "list[Made]", workspace: int) -> Algorithm:
        """The heuristic's first algorithm, asked once for each `key`, for an `operation` and the `layouts` of its operands A, B, C,
        D with so many bytes of workspace. UserError where it has none for the GEMM called `what`."""
        if key in self._algorithms:
            return self._algorithms[key]
        preferences = [(WORKSPACE, c_uint64(workspace)), (REDUCTION, c_uint32(IN_COMPUTE_TYPE))]
        for at, value in preferences + [(at, c_uint32(ALIGN)) for at in ALIGNMENTS]:
            size = ctypes.sizeof(value)
            self.call("cublasLtMatmulPreferenceSetAttribute", self.preference.value, at, byref(value), size)
        heuristic, count = Heuristic(), c_int()
        handles = [made.value for made in (self.handle, operation, *layouts, self.preference)]
        try:
            self.call("cublasLtMatmulAlgoGetHeuristic", *handles, 1, byref(heuristic), byref(count))
        except CublasError as error:
            if error.status != NOT_SUPPORTED:
                raise
        if not count.value or heuristic.state:
            raise UserError(f"cuBLASLt has no way to do {what} on this GPU: leave out --gemm-backend cublaslt")
        self._algorithms[key] = heuristic.algorithm
        return heuristic.algorithm


class Made:
    """An object of the library's, given back with this one."""

    def __init__(self, value: c_void_p, destroy: Callable[[c_void_p], int]) -> None:
        self.value = value

        def give_back() -> None:
            with suppress(Exception):
                destroy(value)

        self.give_back = weakref.finalize(self, give_back)


class BoundGemm:
    """A GEMM for the sizes of a run. `run` is one call; a graph that captures it keeps the kernels that it launches."""

    def __init__(self, gemm: LibraryGemm, cublas: Cublas, sizes: Sizes, address: Callable[[Region], int], accumulate: bool) -> None:
        """`address`: the device address of operands; `accumulate`: whether results of mode "start" are added to what is there. All
        arguments of cublasLtMatmul are prepared here: operands in its column-major order (see the module's docstring)."""
        spec = gemm.spec
        self.op, self.cublas = gemm.op, cublas
        rows = gemm.rows(sizes)
        self.empty = rows == 0
        if self.empty:
            return
        N, K = spec.N, spec.K
        widths = {"nt": (N, K), "nn": (K, N), "tn": (K, N)}[spec.gemm_kind]  # of out, a; that of b is K
        out_rows, b_rows = (N, rows) if spec.gemm_kind == "tn" else (rows, N)
        values: list[tuple[int, Any]] = [
            (TRANSA, c_int32(spec.gemm_kind == "nt")),
            (TRANSB, c_int32(spec.gemm_kind == "tn")),
            (EPILOGUE, c_uint32(EPILOGUES[spec.epilogue, gemm.bias is not None])),
        ]
        if gemm.bias is not None:
            values.append((BIAS, c_void_p(address(gemm.bias))))
        if gemm.pre is not None:
            values += [(AUX, c_void_p(address(gemm.pre))), (AUX_LD, c_int64(widths[0]))]
        operation = cublas.operation(COMPUTE_TF32 if spec.tf32 else COMPUTE_FP32, values)
        a = cublas.matrix(spec.dtype, rows, widths[1])
        b = cublas.matrix(spec.dtype, b_rows, K)
        out = cublas.matrix(spec.out, out_rows, widths[0])
        layouts = [b, a, out, out]  # of A, B, C, D
        adds = gemm.residual is not None or spec.mode == "add" or (spec.mode == "start" and accumulate)  # beta, of C
        scratch = round_up(address(gemm.workspace), WORKSPACE_ALIGN)
        workspace = gemm.workspace.stop - gemm.workspace.start - WORKSPACE_ALIGN
        key = spec, rows, gemm.bias is not None
        algorithm = cublas.algorithm(key, f"{spec.symbol()} of {rows} tokens", operation, layouts, workspace)
        out_at = address(gemm.out)
        added_at = out_at if gemm.residual is None else address(gemm.residual)
        b_at, a_at = address(gemm.b), address(gemm.a)
        assert not any(at % ALIGN for at in (b_at, a_at, out_at, added_at)), spec
        self._one, self._beta = c_float(1.0), c_float(adds)
        self._keep = [operation, *layouts, algorithm]
        self.arguments = (
            cublas.handle.value, operation.value, byref(self._one), b_at, b.value, a_at, a.value,
            byref(self._beta), added_at, out.value, out_at, out.value, byref(algorithm), scratch, workspace,
        )  # fmt: skip

    def run(self, stream: Any) -> None:
        if not self.empty:
            self.cublas.call("cublasLtMatmul", *self.arguments, int(stream))
