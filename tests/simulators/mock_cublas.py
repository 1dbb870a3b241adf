"""libcublasLt in Python, for the driver of mock.py: the functions that barellm calls, behind the C signatures that it declares.

Every attribute is held against the size and the values that NVIDIA's header names, and a call of `cublasLtMatmul` against what its
heuristic was asked: then NumPy does the product, when the stream gets there.
"""

from __future__ import annotations

import ctypes
import traceback
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cuda import cublaslt
from tests.simulators.interpreter import tf32
from tests.simulators.mock import LAUNCH_MS, Gpu

INVALID_VALUE, NOT_SUPPORTED = 7, 15
DTYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
OPERATION = {  # attribute -> (bytes, name)
    3: (4, "transa"), 4: (4, "transb"), 7: (4, "epilogue"), 8: (8, "bias"), 11: (8, "aux"), 12: (8, "aux_ld"),
}  # fmt: skip
PREFERENCE = {1: (8, "workspace"), 3: (4, "reduction"), 5: (4, "align"), 6: (4, "align"), 7: (4, "align"), 8: (4, "align")}
EPILOGUES = {1: "", 4: "bias", 32 | 128: "gelu", 32 | 128 | 4: "gelu bias", 64 | 128: "dgelu"}
COMPUTE = {68: "fp32", 77: "tf32"}
WORKSPACE = 1 << 20  # that each algorithm wants


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form, which is cuBLASLt's."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: np.ndarray) -> np.ndarray:
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


class MockCublas:
    """`unsupported`: epilogues that the heuristic knows no algorithm for. `done`: a line for each product that was done."""

    def __init__(self, gpu: Gpu, unsupported: tuple[str, ...] = ()) -> None:
        self.gpu, self.unsupported = gpu, unsupported
        self.objects: dict[int, Any] = {}
        self.asked: list[Any] = []
        self.done: list[str] = []
        self.failures: list[str] = []
        self._count = 0
        self._functions = {name: self._exported(name, types) for name, types in cublaslt.SIGNATURES.items()}

    def install(self, monkeypatch: Any) -> None:
        """In the library's place, called as the library is: by function pointers of the same C types."""
        monkeypatch.setattr(cublaslt, "functions", lambda: SimpleNamespace(**self._functions))

    def _exported(self, name: str, types: tuple[Any, ...]) -> Any:
        def function(*args: Any) -> int:
            try:
                return getattr(self, name)(*args) or 0
            except Exception as error:  # a callback has no other way to say so
                self.failures.append("".join(traceback.format_exception(error)))
                return INVALID_VALUE

        exported = ctypes.CFUNCTYPE(ctypes.c_int, *types)(function)
        exported.argtypes = types
        return exported

    def _make(self, out: Any, value: Any) -> None:
        self._count += 1
        out[0] = 64 * self._count
        self.objects[64 * self._count] = value

    # --- objects ---

    def cublasLtCreate(self, out):
        self._make(out, "handle")

    def cublasLtMatmulDescCreate(self, out, compute, scale):
        assert compute in COMPUTE and scale == 0, "fp32 sums, scaled in fp32"
        self._make(out, {"transa": 0, "transb": 0, "epilogue": 1, "compute": COMPUTE[compute]})

    def cublasLtMatrixLayoutCreate(self, out, dtype, rows, cols, ld):
        assert rows >= 1 and cols >= 1 and ld >= rows
        self._make(out, (DTYPES[dtype], rows, cols, ld))

    def cublasLtMatmulPreferenceCreate(self, out):
        self._make(out, {"reduction": 7, "workspace": 0, "align": 256})

    def _destroy(self, handle):
        del self.objects[handle]

    cublasLtDestroy = cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = _destroy
    cublasLtMatmulPreferenceDestroy = _destroy

    def _set(self, known, handle, attribute, buffer, nbytes):
        size, name = known[attribute]
        assert nbytes == size, f"attribute {attribute} has {size} bytes, not {nbytes}"
        self.objects[handle][name] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def cublasLtMatmulDescSetAttribute(self, *args):
        self._set(OPERATION, *args)

    def cublasLtMatmulPreferenceSetAttribute(self, *args):
        self._set(PREFERENCE, *args)

    # --- products ---

    def _problem(self, operation, a, b, c, d) -> tuple[Any, ...]:
        """What an algorithm is for; asserts that the shapes go together and that NVIDIA's tables have the types."""
        o = self.objects[operation]
        (a_type, *a_shape, _), (b_type, *b_shape, _), c_layout, d_layout = (self.objects[x] for x in (a, b, c, d))
        d_type, m, n, ld = d_layout
        assert c_layout == d_layout and a_type == b_type and d_type in (a_type, DTYPES[0])
        if o["transa"]:
            a_shape.reverse()
        if o["transb"]:
            b_shape.reverse()
        assert a_shape[0] == m and b_shape[1] == n and a_shape[1] == b_shape[0], (a_shape, b_shape, m, n)
        epilogue = EPILOGUES[o["epilogue"]]
        assert ("bias" in epilogue) == ("bias" in o) and ("gelu" in epilogue) == ("aux" in o)
        if "aux" in o:
            assert o["aux_ld"] % 8 == 0 and o["aux_ld"] >= m and o["aux"] % 16 == 0 and a_type == d_type != DTYPES[0]
        assert o["compute"] == "fp32" or a_type == DTYPES[0]
        return o["compute"], o["transa"], o["transb"], epilogue, a_type, *a_shape, d_type, n, ld

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, count, results, found):
        p = self.objects[preference]
        assert self.objects[handle] == "handle" and count == 1
        assert p["align"] == 16 and p["reduction"] == 2 and p["workspace"] >= WORKSPACE
        problem = self._problem(operation, a, b, c, d)
        if problem[3] in self.unsupported:
            found[0] = 0
            return NOT_SUPPORTED
        self.asked.append(problem)
        results[0].algorithm.data[0] = len(self.asked)
        results[0].workspace, results[0].state = WORKSPACE, 0
        found[0] = 1
        return 0

    def cublasLtMatmul(
        self, handle, operation, alpha, a_at, a, b_at, b, beta, c_at, c, d_at, d, algorithm, workspace, nbytes, stream
    ):
        problem = self._problem(operation, a, b, c, d)
        number = ctypes.c_uint64.from_address(algorithm).value
        assert self.objects[handle] == "handle" and self.asked[number - 1] == problem, "an algorithm of another product"
        assert nbytes >= WORKSPACE and workspace % 256 == 0
        self.gpu.span(workspace, nbytes)
        one, kept = (ctypes.c_float.from_address(at).value for at in (alpha, beta))
        assert one == 1 and kept in (0, 1)
        o = dict(self.objects[operation])
        assert all(at % 16 == 0 for at in (a_at, b_at, c_at, d_at))
        views = [self._view(at, *self.objects[x]) for at, x in ((a_at, a), (b_at, b), (c_at, c), (d_at, d))]
        m, n = views[3].shape[::-1]
        if "bias" in o:
            o["bias"] = self._view(o["bias"], views[3].dtype, m, 1, m)
        if "aux" in o:
            o["aux"] = self._view(o["aux"], views[3].dtype, m, n, o["aux_ld"])
        scratch = self._view(workspace, np.dtype(np.uint8), WORKSPACE, 1, WORKSPACE)
        self.gpu._put(stream, partial(self._multiply, problem[3], o, views, bool(kept), scratch))
        return 0

    def _view(self, at: int, dtype: np.dtype, rows: int, cols: int, ld: int) -> np.ndarray:
        """A column-major matrix as NumPy's row-major (cols, rows), inside one allocation."""
        nbytes = ((cols - 1) * ld + rows) * dtype.itemsize
        self.gpu.span(at, nbytes)
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at)).view(dtype)
        return np.lib.stride_tricks.as_strided(flat, (cols, rows), (ld * dtype.itemsize, dtype.itemsize))

    def _multiply(self, epilogue: str, o: dict[str, Any], views: list[np.ndarray], adds: bool, scratch: np.ndarray) -> None:
        a, b, c, d = views
        scratch[:] = 0xFF  # an algorithm may
        left, right = b.astype(np.float32), a.astype(np.float32)
        if o["compute"] == "tf32":
            left, right = tf32(left), tf32(right)
        total = (left.T if o["transb"] else left) @ (right.T if o["transa"] else right)
        if adds:
            total = total + c.astype(np.float32)
        if "bias" in o:
            total = total + o["bias"].astype(np.float32)
        if epilogue.startswith("gelu"):
            o["aux"][:] = total
            total = gelu(total)
        elif epilogue == "dgelu":
            total = total * gelu_slope(o["aux"].astype(np.float32))
        d[:] = total
        self.gpu.clock += LAUNCH_MS
        self.done.append(f"{o['compute']} {epilogue or 'none'} {d.dtype}{' adds' if adds else ''}")
