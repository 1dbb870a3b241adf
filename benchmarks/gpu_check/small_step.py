"""Two training steps of a tiny model on the GPU, in bf16 and fp32, and products that are large enough for Hopper's own kernels:
what compute-sanitizer looks at; it makes them 10 to 100 times slower."""

from __future__ import annotations

from barellm.assembly.build import open_model
from barellm.config import Config
from barellm.program.builder import Program, Store
from barellm.tools.bench.gemms import Product, append, fill
from barellm.tools.plan.devices import open_session
from barellm.tools.profile.step import SEED, StepBench
from benchmarks.gpu_check.correct import model
from benchmarks.gpu_check.stages import Scale

PRODUCTS = (("linear_gelu", "store"), ("linear_residual", "store"), ("matmul_dx_gelu", "store"), ("matmul_dw", "add"))


SIZES = {"N": 640, "K": 640, "tokens": 2048}


def configs() -> list[Config]:
    return [model(Scale(small=True, mock=False), dtype=dtype) for dtype in ("bf16", "fp32")]


def steps() -> None:
    for config in configs():
        with open_model(config, device="cuda") as compiled:
            compiled.initialize(SEED)
            bench = StepBench(compiled)
            print(config.train.dtype, [bench.step().loss for _ in range(2)])
    print("two steps done")


def programs(*, N: int, K: int, tokens: int) -> list[Program]:
    made = [Program(Store(), compute="bf16") for _ in PRODUCTS]
    for program, (op, mode) in zip(made, PRODUCTS, strict=True):
        append(program, Product("", op, N, K, tokens, mode), 0)
    return made


def products(*, N: int, K: int, tokens: int) -> list[str]:
    """Each once; the kernels that did them."""
    done = []
    for program in programs(N=N, K=K, tokens=tokens):
        session = open_session({"product": program}, "cuda")
        fill(session)
        session.run("product", batch=1, seq=tokens)
        session.synchronize()
        done += [call.spec.name for call in session.calls["product"]]
        session.close()
    return done


if __name__ == "__main__":
    steps()
    print(products(**SIZES))
