"""Two training steps of a tiny model on the GPU, in bf16 and fp32, and products that are large enough for Hopper's own kernels:
what compute-sanitizer looks at; it makes them 10 to 100 times slower."""

from __future__ import annotations

from barellm.assembly.machine import open_machine
from barellm.bench.gemms import Product, append, fill
from barellm.plans.devices import open_session
from barellm.profiling.step import SEED, StepBench
from barellm.program.builder import Program, Store
from benchmarks.gpu_check.correct import model
from benchmarks.gpu_check.stages import Scale

PRODUCTS = (("linear_gelu", "store"), ("linear_residual", "store"), ("matmul_dx_gelu", "store"), ("matmul_dw", "add"))


def steps() -> None:
    for dtype in ("bf16", "fp32"):
        with open_machine(model(Scale(small=True, mock=False), dtype=dtype), device="cuda") as machine:
            machine.initialize(SEED)
            bench = StepBench(machine)
            print(dtype, [bench.step().loss for _ in range(2)])
    print("two steps done")


def products(*, N: int, K: int, tokens: int) -> list[str]:
    """Each once; the kernels that did them."""
    done = []
    for op, mode in PRODUCTS:
        program = Program(Store(), compute="bf16")
        append(program, Product("", op, N, K, tokens, mode), 0)
        session = open_session({"product": program}, "cuda")
        fill(session)
        session.run("product", batch=1, seq=tokens)
        session.synchronize()
        done += [call.spec.name for call in session.calls["product"]]
        session.close()
    return done


if __name__ == "__main__":
    steps()
    print(products(N=640, K=640, tokens=2048))
