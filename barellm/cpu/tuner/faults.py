"""Faulty GEMMs (input gradients in fp32) for the self-test: the tuner must reject each."""

from barellm.cpu.isa import arm
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import gemm


def _chain(k: KernelBuilder, out, a, weight, rows, *, cols: int, depth: int, skip: int = 0) -> None:
    """out = a @ weight (depth, cols), one chain from the last element of the contraction down to the one at `skip`."""
    with k.parallel_for(rows) as row:
        for c, mask in k.columns(cols):
            acc = k.var_vec(0.0)
            with k.loop(skip, depth) as i:
                d = (depth - 1 + skip) - i
                acc.value = k.fma(k.splat(a.get(row * depth + d)), weight.load(d * cols + c, mask), acc.value)
            out.store(acc.value, row * cols + c, mask)


def wrong_values(k, out, second, a, weight, bias, other, row_begin, row_limit, *, cols, depth, dims, **rest) -> None:
    """Leaves out the first element of the contraction."""
    _chain(k, out, a, weight, k.min(k.num_elements(dims), row_limit), cols=cols, depth=depth, skip=1)


def other_order(k, out, second, a, weight, bias, other, row_begin, row_limit, *, cols, depth, dims, **rest) -> None:
    """Right values, added up from the end: the last bits differ."""
    _chain(k, out, a, weight, k.min(k.num_elements(dims), row_limit), cols=cols, depth=depth)


def writes_beyond(k, out, second, a, weight, bias, other, row_begin, row_limit, **constants) -> None:
    """Right result and right bits, and an element behind the last row."""
    with k.when(k.thread.equals(0)):
        out.put(1.0, row_limit * constants["cols"])
    gemm.gemm(k, out, second, a, weight, bias, other, row_begin, row_limit, **constants)


def hangs(k, out, second, a, weight, bias, other, row_begin, row_limit, *, dims, **rest) -> None:
    """Never comes back."""
    with k.while_(lambda: k.threads > 0):
        pass


def traps(k, out, second, a, weight, bias, other, row_begin, row_limit, *, dims, **rest) -> None:
    """Crashes when it runs."""
    k.declare("void @llvm.trap()")
    k.line("call void @llvm.trap()")


def not_selectable(k, out, second, a, weight, bias, other, row_begin, row_limit, *, dims, **rest) -> None:
    """Crashes when it is compiled: an intrinsic of another machine."""
    name = "@llvm.x86.sse2.pmadd.wd" if arm() else "@llvm.aarch64.neon.saddlp.v4i32.v8i16"
    operands = ["<8 x i16> zeroinitializer"] * (2 if arm() else 1)
    k.declare(f"<4 x i32> {name}({', '.join(['<8 x i16>'] * len(operands))})")
    found = k.op("<4 x i32>", f"call <4 x i32> {name}({', '.join(operands)})")
    k.line(f"store <4 x i32> {found.ref}, ptr {out.ref}, align 4")


# Name, and words of the reason that it is rejected for.
FAULTS = (
    ("wrong_values", "wrong values"), ("other_order", "other bits than the default's"),
    ("writes_beyond", "wrote outside its result"), ("hangs", "it hangs"), ("traps", "was ended by SIG"),
    ("not_selectable", "LLVM ERROR"),
)  # fmt: skip
