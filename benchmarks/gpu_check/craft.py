"""Stages that time kernels which no step of GPT-2 has: sparse matmuls and attention, quantized weights, long rows,
random bits. Whether they are right is shown by the stage `kernels`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from barellm.config import DROPOUT_BITS
from barellm.program import layouts, ops
from barellm.program.block_layouts import block_layout, spread
from barellm.program.builder import Program, Store
from barellm.program.integers import ceil_div
from barellm.program.quantization import scheme
from barellm.program.tensor import Dim, Tensor
from benchmarks import sparse_products, sparsity
from benchmarks.gpu_check.apart import Case, measured
from benchmarks.gpu_check.stages import Scale

OF_COPY, OF_READING = 0.88, 0.85  # of a copy's rate: what moves bytes only; what reads a weight for a few rows
MORE = sparse_products.MORE  # a time of the density and so much of the dense one is what is asked of sparse kernels
LAYOUTS = {"local:256": 256, "local:64+fixed:512:64": 0, "watts-strogatz:8:0.2:1": 0}  # windows that flex_attention has too
FEW = {"bf16": 1.0, "int8": 1.5, "int4": 2.5, "nf4": 2.5}  # times as fast as PyTorch's matmul with bf16 weights


def blocks(scale: Scale) -> dict[str, Any]:
    """Block-sparse matmuls, in all three directions, beside the dense matmul of cuBLAS."""
    return measured(scale, block_products(scale), "ops-blocks-cuda.json")


def block_sparse_attention(scale: Scale) -> dict[str, Any]:
    """Attention over listed blocks, beside dense attention and flex_attention."""
    return measured(scale, attentions(scale), "ops-layouts-cuda.json")


def few(scale: Scale) -> dict[str, Any]:
    """Products of one row and of eight, with weights of 16, 8 and 4 bits, that no cache holds."""
    return measured(scale, few_rows(scale), "ops-few-cuda.json")


def rows(scale: Scale) -> dict[str, Any]:
    """Softmax, LayerNorm and RMSNorm of rows of 32,768 numbers, backward of 16,384."""
    return measured(scale, long_rows(scale), "ops-rows-cuda.json")


def bits(scale: Scale) -> dict[str, Any]:
    """Dropout by each generator of random bits: bytes read and written a second."""
    return measured(scale, generators(scale), "ops-bits-cuda.json")


def block_products(scale: Scale) -> list[Case]:
    tokens, width, dtype = (9, 64, "fp32") if scale.small else (8192, 4096, "bf16")
    found = []
    for block in (32,) if scale.small else (32, 64):
        for density in (0.5,) if scale.small else (1 / 16, 1 / 4):
            side = width // block
            layout = block_layout(spread(side, side, round(density * side), 1), block)
            for what in sparse_products.SPARSE:
                make = partial(sparse_products.program, what, layout, dtype, tokens=tokens, width=width)
                shape = (width, width, tokens) if what == "dw" else (tokens, width, width)
                baseline = {"op": "product", "dtype": dtype} | dict(zip(("rows", "columns", "depth"), shape, strict=True))
                name = f"blocks of {block}, density {layout.density:.3f}, {what}"
                against = {"dense": round(1 / (layout.density + MORE), 2)}
                found.append(Case(name, make, {"batch": 1, "seq": tokens}, baseline, against))
    return found


def attentions(scale: Scale) -> list[Case]:
    T, H, D, block, dtype = (48, 1, 16, 16, "fp32") if scale.small else (8192, 12, 64, 64, "bf16")
    found = []
    for text, window in {"local:20": 20}.items() if scale.small else LAYOUTS.items():
        layout = layouts.parse(text, length=T, block=block, heads=H)
        for both in (False, True):
            baseline = {"op": "attention", "batch": 1, "seq": T, "heads": H, "D": D, "window": window, "both": both}
            against = {"dense": round(1 / (layout.density + MORE), 2)} | ({"flex": 1.0} if window else {})
            make = partial(sparsity.program, T, H, D, layout, dtype, backward=both)
            name = f"attention {text}, T {T}, {'both' if both else 'forward'}"
            found.append(Case(name, make, {"batch": 1, "seq": T}, baseline | {"dtype": dtype}, against))
    return found


def few_rows(scale: Scale) -> list[Case]:
    N, K = (37, 64) if scale.small else (50304, 4096)
    found = []
    for weights, wanted in FEW.items():
        for count in (1, 8):
            baseline = {"op": "product", "dtype": "bf16", "rows": count, "columns": N, "depth": K}
            nbytes = N * K * 2
            if weights != "bf16":
                how = scheme(weights)
                codes, scales = how.shapes(N, K)
                nbytes = sum(ceil_div(prod(s) * bits, 8) for s, bits in ((codes, 8 if how.codes == "i8" else 4), (scales, 16)))
            case = Case(
                f"{weights}, {count} x {N} x {K}",
                partial(few_program, weights, count, N, K),
                {"batch": 1, "seq": count},
                baseline,
                {"dense": wanted},
                nbytes,
                OF_READING,
            )
            found.append(case)
    return found


def few_program(weights: str, count: int, N: int, K: int) -> Program:
    p = Program(Store(), compute="bf16")
    x = p.input("x", (Dim("batch", 1), Dim("seq", count), K), "bf16")
    if weights == "bf16":
        p.output("y", p.apply(ops.Matmul, x=x, weight=p.parameter("weight", (N, K), dtype="bf16")).y)
        return p
    how = scheme(weights)
    codes, scales = how.shapes(N, K)
    given = {
        "codes": p.store.get("codes", codes, how.codes, "parameter"),
        "scales": p.store.get("scales", scales, "fp16", "parameter"),
    }
    p.output("y", p.apply(ops.QuantizedMatmul, x=x, **given, weights=weights, columns=N).y)
    return p


def long_rows(scale: Scale) -> list[Case]:
    found = []
    for backward, columns in ((False, 1 << 15), (True, 1 << 14)):
        count, C = (3, 200) if scale.small else ((1 << 27) // columns, columns)
        for name in ("layernorm", "rmsnorm"):
            baseline = {"op": "rows", "dtype": "fp32", "name": name, "count": count, "columns": C, "backward": backward}
            make = partial(row_program, name, count, C, backward)
            what = f"{name}{' backward' if backward else ''}, {count} rows of {C}"
            nbytes = (3 if backward else 2) * 4 * count * C
            found.append(Case(what, make, {"batch": 1, "seq": count}, baseline, {"peer": 1.0}, nbytes, OF_COPY))
    return found


def row_program(name: str, count: int, C: int, backward: bool) -> Program:
    """fp32 in and out."""
    p = Program(Store(), compute="fp32")
    rows = (Dim("batch", 1), Dim("seq", count))

    def given(what: str, *shape: int) -> Tensor:
        return p.store.get(what, (*rows, *shape), "fp32", "state")

    weight = p.parameter("weight", (C,))
    kind: Any = ops.LayerNorm if name == "layernorm" else ops.RMSNorm
    operands, attrs = {"x": given("x", C), "weight": weight}, {"eps": 1e-5, "dtype": "fp32"}
    if backward:
        kind, attrs = (ops.LayerNormDx if name == "layernorm" else ops.RMSNormDx), {}
        operands |= {"dy": given("dy", C), "rstd": given("rstd")}
        operands |= {"mean": given("mean")} if name == "layernorm" else {}
    op = p.apply(kind, **operands, **attrs)
    p.output("result", next(iter(op.outputs.values())))
    return p


def generators(scale: Scale) -> list[Case]:
    """Threefry's twenty rounds are arithmetic, so it is held against PyTorch's Philox only."""
    shape = (2, 3, 40) if scale.small else (64, 1024, 768)
    nbytes = 2 * 4 * prod(shape)
    baseline = {"op": "dropout", "dtype": "fp32", "shape": list(shape), "rate": 0.1}
    sizes = {"batch": shape[0], "seq": shape[1]}
    return [
        Case(
            f"dropout by {kind}",
            partial(dropout, kind, shape),
            sizes,
            baseline,
            {"peer": 1.0},
            nbytes,
            0.0 if kind == "threefry" else OF_COPY,
        )
        for kind in DROPOUT_BITS
    ]


def dropout(kind: str, shape: tuple[int, int, int]) -> Program:
    p = Program(Store(), compute="fp32")
    x = p.store.get("x", (Dim("batch", shape[0]), Dim("seq", shape[1]), shape[2]), "fp32", "state")
    p.output("y", p.dropout(x, 0.1, kind))
    return p


# By stage.
CASES: dict[str, Callable[[Scale], list[Case]]] = {
    "blocks": block_products,
    "block_sparse_attention": attentions,
    "few": few_rows,
    "rows": long_rows,
    "bits": generators,
}
